"""The standard streams of a command: those that are closed, and output that cannot be written."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def open_closed_streams() -> Iterator[None]:
    """Prints to the null device where the process was started without a stream, as with `>&-`.

    Python has `None` in its place then, and the next file that is opened would get its number.
    """
    with contextlib.ExitStack() as stack:
        if sys.stdin is None:
            _null_device(os.O_RDONLY)  # `standard_input` has nothing to read
        if sys.stdout is None:
            stack.enter_context(contextlib.redirect_stdout(os.fdopen(_null_device(os.O_WRONLY), "w")))
        if sys.stderr is None:
            stack.enter_context(contextlib.redirect_stderr(os.fdopen(_null_device(os.O_WRONLY), "w")))
        yield


def _null_device(flags: int) -> int:
    """A number of the null device: the lowest that is free, which is that of the stream; processes inherit it."""
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)
    return number


def standard_input() -> BinaryIO:
    """Returns standard input, as bytes; an empty one if the process was started without it."""
    return io.BytesIO() if sys.stdin is None else sys.stdin.buffer


def was_printing(error: OSError, *own: str) -> bool:
    """Whether an error comes from writing to a standard stream, and not to a file.

    Args:
        error: The error.
        *own: The modules of this package that print what fails; a name stands for the modules in it, too.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals["__name__"] + "."
    return error.filename is None and module.startswith(tuple(f"{name}." for name in ("argparse", "rich", *own)))


def drop_output() -> None:
    """Redirects standard output to the null device, because Python flushes it at exit and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The standard streams of a command: those that are closed, and output that cannot be written."""

import os
import sys
import traceback


def open_closed_streams() -> None:
    """Opens the null device as each standard stream that the process was started without, as with `>&-`.

    Python then has `None` in its place, and the next file that is opened would get its number.
    """
    sys.stdin = sys.stdin or open(_null_device(os.O_RDONLY), encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(_null_device(os.O_WRONLY), "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(_null_device(os.O_WRONLY), "w", encoding="utf-8")  # noqa: SIM115


def _null_device(flags: int) -> int:
    """A number of the null device: the lowest that is free, which is that of the stream; processes inherit it."""
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)
    return number


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

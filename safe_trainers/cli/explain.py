"""`safe-trainers explain "ERROR TEXT"`, a log file or standard input: prints the cause of an error and its fix."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from .streams import standard_input


EPILOG = """exit status: 0: the cause or its candidates are known, 1: they are not, 2: there is nothing to explain
  safe-trainers explain "Attempting to unscale FP16 gradients."
  safe-trainers explain train.log
  python train.py 2>&1 | safe-trainers explain
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="the message, or a log file; by default standard input"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the explanation.

    Returns:
        0 if the cause is known, else 1.

    Raises:
        RecipeError: If there is nothing to explain.
    """
    from ..core.errors import RecipeError
    from ..explain.log_reader import decode, explain, report
    from ..report.render import present

    text = decode(_given(options.text))
    if not text.strip("\x00 \t\r\n\ufffd"):
        raise RecipeError('the input is empty. Write: safe-trainers explain "ERROR TEXT", or a log file')
    return present(report(explain(text)), options.json)


def _given(words: Sequence[str]) -> bytes:
    """Returns the message or the log as bytes; of a large file, its end."""
    from ..core.errors import RecipeError, hint, nearest
    from ..explain.log_reader import MAX_BYTES

    if not words or list(words) == ["-"]:
        given = standard_input()
        if given.isatty():
            raise RecipeError('the input is missing. Write: safe-trainers explain "ERROR TEXT", or a log file')
        return given.read()
    text = " ".join(words)
    if not text:
        return b""  # as a path, it would be the current folder
    file = Path(text)
    named = len(text) <= 1000 and "\n" not in text and "\0" not in text and os.path.exists(file)
    if not named and (len(words) > 1 or not re.fullmatch(r"\S{1,1000}|[^\n]{1,300}\.(?:log|txt|out|err)", text)):
        return text.encode()
    if os.path.isdir(file):
        raise RecipeError(f"{file} is a folder. Write: safe-trainers explain {file}/train.log")
    if os.path.exists(file):
        try:
            with file.open("rb") as stream:
                if not stream.seekable():  # a pipe: `explain <(tail train.log)`
                    return stream.read()
                head = stream.read(2)  # the byte order mark of UTF-16
                size = stream.seek(0, 2)
                stream.seek(max(0, size - 2 * MAX_BYTES))
                tail = stream.read()
        except OSError as error:
            raise RecipeError(f"{file} cannot be read: {error.strerror}") from None
        return tail if size <= 2 * MAX_BYTES or head not in (b"\xff\xfe", b"\xfe\xff") else head + tail
    if "/" in text or file.suffix in {".log", ".txt", ".out", ".err"}:
        siblings = (
            [str(path) for path in file.parent.glob("*") if path.is_file()] if os.path.isdir(file.parent) else []
        )
        raise RecipeError(f"there is no file {text}{hint(nearest(text, siblings))}")
    return text.encode()

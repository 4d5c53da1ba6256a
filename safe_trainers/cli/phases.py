"""Prints what a training command is doing before the first step; imports nothing, so that it prints at once."""

import os
import sys


def show_phase(text: str) -> None:
    """Prints a line to standard error, on the main process only.

    Args:
        text: What begins now.
    """
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)

"""`safe-trainers copy NAME [DEST]`: copies a packaged recipe, launch config or script, so that it can be edited."""

import argparse
import sys
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("name", metavar="NAME", help="a name from `safe-trainers list`; .yaml may be omitted")
    parser.add_argument(
        "dest", metavar="DEST", nargs="?", default=".", help="a folder or a file; by default the current folder"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Copies, and prints the path of the copy.

    Returns:
        The exit status.
    """
    from ..recipes.packaged import copy

    sys.stdout.write(f"{copy(options.name, options.dest, force=options.force)}\n")
    return 0

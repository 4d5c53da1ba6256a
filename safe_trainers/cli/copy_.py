"""`safe-trainers copy NAME [DEST]`: puts a packaged recipe or launch config where it can be edited."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("name", metavar="NAME", help="a name that `safe-trainers list` shows; .yaml may be left out")
    parser.add_argument("dest", metavar="DEST", nargs="?", default=".", help="a folder or a file; by default here")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Copies.

    Returns:
        The exit status.
    """
    from ..packaged import copy

    sys.stdout.write(f"{copy(options.name, Path(options.dest), force=options.force)}\n")
    return 0

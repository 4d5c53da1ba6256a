"""`safe-trainers compare A B`."""

import argparse
from collections.abc import Sequence


EPILOG = """A and B: whatever `safe-trainers report` takes.
The exit status is 0 where nothing differs, 1 where something does.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("first", metavar="A", help="a model, recipe, checkpoint or saved report")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="for a program")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Compares.

    Returns:
        0 where nothing differs, 1 where something does.
    """
    from ..comparison import compare
    from ..file_reports import report_on
    from ..render import present

    return present(compare(report_on(options.first), report_on(options.second)), options.json)

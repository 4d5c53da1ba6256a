"""`safe-trainers compare A B`."""

import argparse
from collections.abc import Sequence

from ..core.tasks import TASKS


EPILOG = """A and B: anything that `safe-trainers report` accepts
exit status: 0: no difference, 1: differences
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("first", metavar="A", help="a model, recipe, checkpoint or saved report")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("--task", choices=tuple(TASKS), help="the task of recipes; by default detected")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the differences.

    Returns:
        0 without differences, 1 with differences.
    """
    from ..report.compare import compare
    from ..report.render import present
    from .report import report_on

    first, second = (report_on(target, options.task) for target in (options.first, options.second))
    return present(compare(first, second), options.json)

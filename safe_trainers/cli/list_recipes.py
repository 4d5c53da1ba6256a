"""`safe-trainers list`: lists the packaged recipes and launch configs."""

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = "`safe-trainers copy NAME` copies one of them into the current folder."
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the list.

    Returns:
        The exit status.
    """
    from ..recipes.packaged import overview
    from ..report.render import present

    return present(overview(), options.json)

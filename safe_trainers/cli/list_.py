"""`safe-trainers list`: the recipes and launch configs that come with the package, one line each."""

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = "safe-trainers copy NAME puts one of them into the current folder."
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Lists.

    Returns:
        The exit status.
    """
    from ..packaged import overview
    from ..render import present

    return present(overview(), options.json)

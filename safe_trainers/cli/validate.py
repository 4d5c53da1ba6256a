"""`safe-trainers validate RECIPE...`: prints all problems of recipes, without importing torch or TRL."""

import argparse
from collections.abc import Sequence

from ..core.tasks import TASKS


EPILOG = """exit status: 0: ready, 1: warnings, 2: errors
  safe-trainers validate my_recipe.yaml --task grpo --accelerate_config zero3
The task is detected from the folder of the recipe (recipes/grpo/...), the command in its header, or its keys.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = EPILOG
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="a file, or a name from `safe-trainers list`")
    parser.add_argument(
        "--task", choices=tuple(TASKS), help="the task of the recipes; by default detected for each of them"
    )
    parser.add_argument(
        "--accelerate_config", metavar="NAME|FILE", help="the launch config to check; by default that of the header"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the report.

    Returns:
        0 without warnings and errors, 1 with warnings, 2 with errors.
    """
    from ..recipes.packaged import recipe_path
    from ..recipes.validate import report, validate
    from ..report.render import present

    checked = [
        validate(recipe_path(name), task=options.task, accelerate_config=options.accelerate_config)
        for name in options.recipes
    ]
    return present(report(checked), options.json)

"""`safe-trainers validate RECIPE...`: every problem of some recipes at once, without importing torch or TRL."""

import argparse
from collections.abc import Sequence

from ..schema import TASKS


EPILOG = """a recipe is a file, or the name of one that `safe-trainers list` shows:
  safe-trainers validate my_recipe.yaml --task grpo --accelerate_config zero3
The task is told by the recipe's folder (recipes/grpo/...), by the command its header begins with, or by its keys.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = EPILOG
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipe: a file, or a packaged recipe's name")
    parser.add_argument("--task", choices=TASKS, help="the task of the recipes; by default it is told by each")
    parser.add_argument(
        "--accelerate_config", metavar="NAME|FILE", help="the launch config to check against; by default the header's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Validates.

    Returns:
        0 if all of them can be run, 1 if a warning is among what was found, 2 if one of them cannot be run.
    """
    from ..packaged import recipe_path
    from ..render import present
    from ..validation import report, validate

    checked = [
        validate(recipe_path(name), task=options.task, accelerate_config=options.accelerate_config)
        for name in options.recipes
    ]
    return present(report(checked), options.json)

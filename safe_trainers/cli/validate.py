"""`safe-trainers validate RECIPE...`: prints all problems of recipes, without importing torch or TRL."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import RecipeError
from ..core.tasks import TASKS
from .streams import standard_input


if TYPE_CHECKING:
    from ..recipes.validate import Checked

STDIN = "-"

EPILOG = """exit status: 0: ready, 1: warnings, 2: errors
  safe-trainers validate my_recipe.yaml --task grpo --accelerate_config zero3
  safe-trainers validate my_recipe.yaml --fix
  safe-trainers validate - --task grpo < my_recipe.yaml
The task is detected from the folder of the recipe (recipes/grpo/...), the command in its header, or its keys.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="a file, a name from `safe-trainers list`, or - for standard input",
    )
    parser.add_argument(
        "--task", choices=tuple(TASKS), help="the task of the recipes; by default detected for each of them"
    )
    parser.add_argument(
        "--accelerate_config", metavar="NAME|FILE", help="the launch config to check; by default that of the header"
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="write the fixes into the files, keep a copy of each as FILE.bak, and print what changed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the report.

    Returns:
        0 without warnings and errors, 1 with warnings, 2 with errors.
    """
    from ..recipes.validate import report
    from ..report.render import present

    check = _fix if options.fix else _check
    return present(report([check(name, options) for name in options.recipes]), options.json)


def _check(name: str, options: argparse.Namespace) -> "Checked":
    from ..recipes.packaged import recipe_path
    from ..recipes.validate import validate
    from ..recipes.yaml_file import MAX_BYTES, read_bytes

    recipe = read_bytes(standard_input().read(MAX_BYTES + 1), STDIN) if name == STDIN else recipe_path(name)
    return validate(recipe, task=options.task, accelerate_config=options.accelerate_config)


def _fix(name: str, options: argparse.Namespace) -> "Checked":
    """Fixes a file, and prints the changes: to standard error if standard output is JSON."""
    from ..recipes.fix import fix, save

    if name == STDIN:
        raise RecipeError("--fix changes files, and - is standard input. Write the name of a file")
    if not os.path.exists(name):
        raise RecipeError(f"there is no file {name}. For a packaged recipe, run: safe-trainers copy {name}")
    path = Path(name)
    fixed = fix(path, task=options.task, accelerate_config=options.accelerate_config)
    if fixed.after != fixed.before:
        backup = save(path, fixed.after)
        output = sys.stderr if options.json else sys.stdout
        output.write(f"{fixed.diff()}{len(fixed.done)} fixed in {path}; the file before: {backup}\n")
    return fixed.checked

"""`safe-trainers TASK --config FILE --key value ...`, such as `safe-trainers grpo`."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.errors import RecipeError


if TYPE_CHECKING:
    from ..recipes.validate import Checked

EPILOG = """every key of a recipe is also an option, which overrides the file:
  safe-trainers grpo --config recipes/grpo/tiny_vlm_bf16.yaml --learning_rate 1e-4
in several processes:
  safe-trainers grpo --config RECIPE --accelerate_config zero3 --num_processes 8
"""

NEWEST = "true"
"""The value of `resume_from_checkpoint` for `--resume` without a folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are not recipe keys."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="the recipe: a YAML file")
    parser.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        metavar="NAME|FILE",
        help="launch config: single_gpu, ddp, fsdp2, zero2, zero3, or an accelerate config file",
    )
    parser.add_argument(
        "--num_processes",
        "--num-processes",
        metavar="N",
        type=_count,
        help="processes to launch; by default one per GPU",
    )
    parser.add_argument(
        "--resume",
        metavar="CHECKPOINT",
        nargs="?",
        const=NEWEST,
        help="resume from a checkpoint; by default from the newest complete one in output_dir",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="build the trainer, print the precision report, and exit without training",
    )
    parser.add_argument("--json", action="store_true", help="print the report of --dry-run as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Trains in this process, or in launched processes.

    Returns:
        The exit status.
    """
    if options.json and not options.dry_run:
        raise RecipeError("--json prints the report of --dry-run, which is missing. Write: --dry-run --json")
    from ..recipes.validate import prepare

    argv = recipe_arguments(options, rest)
    checked = prepare(options.command, argv, options.accelerate_config, options.num_processes)
    if options.accelerate_config is None and options.num_processes is None:
        return run_here(options, checked)
    from .launch import launch

    flags = [flag for flag, given in (("--dry-run", options.dry_run), ("--json", options.json)) if given]
    return launch([options.command, *flags, *argv], options.accelerate_config, options.num_processes)


def run_here(options: argparse.Namespace, checked: "Checked") -> int:
    """Trains in this process.

    Args:
        options: The options of the command line.
        checked: The recipe, without errors.

    Returns:
        The exit status.
    """
    from ..recipes.load import load_recipe
    from .run_recipe import dry_run, run_recipe

    recipe = load_recipe(checked)
    if not options.dry_run:
        run_recipe(recipe)
        return 0
    report = dry_run(recipe)
    if report is None:
        return 0
    from ..report.render import present

    return present(report, options.json)


def recipe_arguments(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Returns the recipe and its overrides as command-line arguments.

    Args:
        options: The options of the command line.
        rest: The overrides.
    """
    config = ["--config", options.config] if options.config else []
    return [*config, *rest, *(["--resume_from_checkpoint", options.resume] if options.resume else [])]

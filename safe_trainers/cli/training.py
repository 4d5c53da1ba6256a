"""`safe-trainers grpo|rloo|sft|reward --config FILE --key value ...`."""

import argparse
from collections.abc import Sequence

from ..errors import RecipeError


EPILOG = """every key of a recipe is an option too, and wins over the file:
  safe-trainers grpo --config recipes/grpo/tiny_vlm_bf16.yaml --learning_rate 1e-4
in several processes:
  safe-trainers grpo --config RECIPE --accelerate_config zero3 --num_processes 8
"""

NEWEST = "true"
"""What `--resume` without a folder stands for, as `resume_from_checkpoint` has it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are no keys of a recipe."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="recipe: a YAML file of TRL's keys and ours")
    parser.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        metavar="NAME|FILE",
        help="launch config: single_gpu, ddp, fsdp2, zero2, zero3, or a file of accelerate's",
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
        help="go on from a checkpoint; by default from the newest complete one in output_dir",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="build everything, train no step, print the precision report",
    )
    parser.add_argument("--json", action="store_true", help="print the report of --dry-run as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of processes")
    return int(text)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Trains, here or in processes that are launched.

    Returns:
        The exit status.
    """
    if options.json and not options.dry_run:
        raise RecipeError("--json is for the report of --dry-run. Write: --dry-run --json")
    from ..validation import prepare

    prepare(options.command, _recipe_arguments(options, rest), options.accelerate_config, options.num_processes)
    if options.accelerate_config is None and options.num_processes is None:
        return run_here(options, rest)
    from ..launch import launch

    flags = [flag for flag, given in (("--dry-run", options.dry_run), ("--json", options.json)) if given]
    arguments = [options.command, *flags, *_recipe_arguments(options, rest)]
    return launch(arguments, options.accelerate_config, options.num_processes)


def run_here(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Trains in this process.

    Returns:
        The exit status.
    """
    from .train import dry_run, train

    arguments = _recipe_arguments(options, rest)
    if not options.dry_run:
        train(options.command, arguments)
        return 0
    report = dry_run(options.command, arguments)
    if report is None:
        return 0
    from ..render import present

    return present(report, options.json)


def _recipe_arguments(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    config = ["--config", options.config] if options.config else []
    return [*config, *rest, *(["--resume_from_checkpoint", options.resume] if options.resume else [])]

"""`safe-trainers grpo|rloo|sft|reward --config FILE --key value ...`."""

import argparse
from collections.abc import Sequence


EPILOG = """every key of a recipe is an option too, and wins over the file:
  safe-trainers grpo --config recipes/grpo/tiny_vlm_bf16.yaml --learning_rate 1e-4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are no keys of a recipe."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="recipe: a YAML file of TRL's keys and ours")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Trains.

    Returns:
        The exit status.
    """
    from .train import train

    train(options.command, [*(["--config", options.config] if options.config else []), *rest])
    return 0

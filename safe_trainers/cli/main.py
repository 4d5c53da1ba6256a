"""`safe-trainers COMMAND ...`: finds the command, and turns every refusal into one clear message and exit status 2."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from ..errors import SafeTrainersError
from ..version import __version__


TRAINING = {
    "grpo": "train with SafeGRPOTrainer",
    "rloo": "train with SafeRLOOTrainer",
    "sft": "train with SafeSFTTrainer",
    "reward": "train a reward model with SafeRewardTrainer",
}
EPILOG = """every key of a recipe is an option too, and wins over the file:
  safe-trainers grpo --config recipes/grpo/tiny_vlm_bf16.yaml --learning_rate 1e-4
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the commands; the options of a recipe are parsed by the recipe's own parser."""
    parser = argparse.ArgumentParser(
        prog="safe-trainers",
        description="TRL trainers that are right in precision, or stop at construction with the line to change.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"safe-trainers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in TRAINING.items():
        command = commands.add_parser(name, help=summary, description=summary, epilog=EPILOG, add_help=True)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("--config", metavar="FILE", help="recipe: a YAML file of TRL's keys and ours")
    demo = commands.add_parser("demo", help="show stock TRL crash and the safe trainer learn, on a tiny model")
    demo.add_argument("--output_dir", default="runs/demo", help="where checkpoint, log and plot go")
    demo.epilog = "keys of the recipe can be given as options, as for grpo"
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The command line without the program's name; by default the process's.

    Returns:
        0 if it worked, 2 if the input was refused.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    try:
        if options.command == "demo":
            from .demo import demo

            demo(options.output_dir, rest)
        else:
            from .train import train

            train(options.command, [*(["--config", options.config] if options.config else []), *rest])
    except SafeTrainersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run() -> None:
    """The installed program: `main`, in a process of its own, whose output is for a person to read.

    What the libraries report of their own accord is set to errors only; each variable can be set otherwise.
    """
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    sys.exit(main())

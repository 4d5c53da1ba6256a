"""`safe-trainers COMMAND ...`: finds the command, and turns every refusal into one clear message and exit status 2."""

import argparse
import errno
import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from ..errors import SafeTrainersError
from ..version import __version__


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        summary: What it does, in one line.
        module: The module of this package with its `add_arguments(parser)` and its
            `run(options, rest) -> exit status`. It is imported when the command is used: `--help` costs no torch.
        takes_recipe_keys: Whether options that its parser does not know are keys of a recipe, which go into `rest`.
    """

    summary: str
    module: str
    takes_recipe_keys: bool = False


COMMANDS = {
    "grpo": Command("train with SafeGRPOTrainer", "training", takes_recipe_keys=True),
    "rloo": Command("train with SafeRLOOTrainer", "training", takes_recipe_keys=True),
    "sft": Command("train with SafeSFTTrainer", "training", takes_recipe_keys=True),
    "reward": Command("train a reward model with SafeRewardTrainer", "training", takes_recipe_keys=True),
    "demo": Command(
        "show stock TRL crash and the safe trainer learn, on a tiny model", "demo", takes_recipe_keys=True
    ),
    "validate": Command("check recipes: every problem at once, in a second", "validate"),
    "list": Command("list the recipes and launch configs that come with the package", "list_"),
    "copy": Command("copy one of them into the current folder", "copy_"),
    "report": Command("say what a model, a recipe or a checkpoint holds and computes in", "report"),
    "compare": Command("say what differs between two of them, or between two saved reports", "compare"),
    "plot": Command("draw what a run logged: reward, loss, loss scale, sampler against trainer", "plot"),
    "doctor": Command("say whether this machine and this environment can train", "doctor"),
    "explain": Command("say what an error text or a log means, and the line to write", "explain"),
}
"""The commands, in the order of the help."""


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the commands.

    Args:
        chosen: The command whose options are needed; of the others it knows the names alone.

    Returns:
        The parser; the keys of a recipe are left to the recipe's own.
    """
    parser = argparse.ArgumentParser(
        prog="safe-trainers",
        description="TRL trainers that are right in precision, or stop at construction with the line to change.",
    )
    parser.add_argument("--version", action="version", version=f"safe-trainers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        made = commands.add_parser(name, help=command.summary, description=command.summary)
        made.formatter_class = argparse.RawDescriptionHelpFormatter
        if name == chosen:
            _module(command).add_arguments(made)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The command line without the program's name; by default the process's.

    Returns:
        0 if it worked; 1 if what it reports needs a look; 2 if the input was refused.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    chosen = next((arg for arg in given if not arg.startswith("-")), None)
    command = COMMANDS.get(chosen or "")
    parser = build_parser(chosen)
    options, rest = parser.parse_known_args(given)
    if rest and not (command and command.takes_recipe_keys):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = _module(COMMANDS[options.command]).run(options, rest)
    except SafeTrainersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _module(command: Command) -> ModuleType:
    return importlib.import_module(f".{command.module}", __package__)


def quieten() -> None:
    """Sets what the libraries report of their own accord to errors only; each variable can be set otherwise."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def run() -> None:
    """The installed program: `main`, in a process of its own, whose output is for a person to read."""
    quieten()
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says it; a traceback would be nobody's news
    except BrokenPipeError:  # `| head` has read enough
        _drop_output()
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC or not _was_printing(error):
            raise
        _drop_output()
        print(f"error: nothing more can be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _was_printing(error: OSError) -> bool:
    """Whether it was output that could not be written, and not a file of someone else's."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.filename is None and frame.f_globals["__name__"].split(".")[0] in {
        "argparse",
        "rich",
        "safe_trainers",
    }


def _drop_output() -> None:
    """Sends what is left of the output nowhere: Python flushes it at exit, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

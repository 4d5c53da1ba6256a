"""`safe-trainers COMMAND ...`: runs a command; invalid input ends with one message and exit status 2."""

import argparse
import errno
import importlib
import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from ..core.errors import SafeTrainersError, hint, nearest
from ..core.tasks import EXPERIMENTAL, TASKS
from ..core.versions import __version__
from .streams import drop_output, open_closed_streams, was_printing


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        summary: A description in one line.
        module: The module in this package with the functions `add_arguments(parser)` and
            `run(options, rest) -> exit status`. It is imported when the command is used, so that `--help` is fast.
        takes_recipe_keys: Whether unknown options are keys of a recipe, which are passed as `rest`.
    """

    summary: str
    module: str
    takes_recipe_keys: bool = False


COMPLETING = "_ARGCOMPLETE"
"""Environment variable that argcomplete's shell functions set while they ask for completions."""

COMMANDS = {
    **{
        name: Command(" ".join(f"train {task.trains} with {task.trainer}".split()), "train", takes_recipe_keys=True)
        for name, task in TASKS.items()
    },
    "demo": Command(
        "train a tiny model with stock TRL, which crashes, and with the safe trainer", "demo", takes_recipe_keys=True
    ),
    "validate": Command("check recipes and print all problems at once", "validate"),
    "list": Command("list the recipes and launch configs that come with the package", "list_recipes"),
    "copy": Command("copy a packaged recipe or launch config into the current folder", "copy_recipe"),
    "keys": Command("list the keys of recipes, with type, default and help", "list_keys"),
    "completion": Command("print the code that completes commands, recipes and keys in a shell", "completion"),
    "report": Command("show the dtypes that a model, recipe or checkpoint stores and computes in", "report"),
    "compare": Command("compare the reports of two models, recipes or checkpoints, or two saved reports", "compare"),
    "diff": Command("find the first module at which two recorded runs part, and why", "diff"),
    "tune": Command(
        "find the precision and the modules in float32 that hold the mismatch of sampler and trainer",
        "tune",
    ),
    "bench": Command("check any TRL trainer class for precision faults, with tiny models on the CPU", "bench"),
    "plot": Command("plot the log of a run: reward, loss, loss scale, mismatch of sampler and trainer", "plot"),
    "doctor": Command("check whether this machine and environment can train", "doctor"),
    "explain": Command("explain an error message or a log, and print the line to write", "explain"),
}
"""The commands, in the order of the help."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the lines of descriptions and epilogs one by one, below their last column; commands are to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + part for line in text.splitlines() for part in _wrapped(line, width - len(indent)))


def _wrapped(line: str, width: int) -> list[str]:
    columns = re.match(r" *(?:\S+(?: \S+)* {2,})?", line)
    hanging = " " * (columns.end() if columns else 0)
    if line[len(hanging) :].startswith(("safe-trainers ", "--")):
        return [line]
    wrapper = textwrap.TextWrapper(width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(line) or [line]


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser of the command line.

    Args:
        chosen: The command whose options are added; the others get only their names.

    Returns:
        The parser. It does not parse keys of recipes.
    """
    parser = argparse.ArgumentParser(
        prog="safe-trainers",
        description=(
            "TRL trainers that train at the right precision, or fail at construction and tell you which line to "
            "change."
        ),
    )
    parser.add_argument("--version", action="version", version=f"safe-trainers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        made = commands.add_parser(name, help=command.summary, description=command.summary)
        made.formatter_class = HelpFormatter
        if name == chosen:
            _module(command).add_arguments(made)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The command line without the program's name; by default that of the process.

    Returns:
        The exit status: 0 for success, 1 for warnings or differences, 2 for errors or invalid input.
    """
    if COMPLETING in os.environ:
        from .completion import complete

        complete(build_parser, {name: command.takes_recipe_keys for name, command in COMMANDS.items()})  # and exits
    given = list(sys.argv[1:] if argv is None else argv)
    chosen = next((arg for arg in given if not arg.startswith("-")), None)
    command = COMMANDS.get(chosen or "")
    parser = build_parser(chosen)
    if not given:
        parser.print_help()
        return 0
    if chosen is not None and command is None:
        print(f"error: {_no_command(chosen)}", file=sys.stderr)
        return 2
    options, rest = parser.parse_known_args(given)
    if rest and not (command and command.takes_recipe_keys):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = _module(COMMANDS[options.command]).run(options, rest)
    except SafeTrainersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _no_command(name: str) -> str:
    """The message for a name that is not a command: the nearest one, or how else to do what is meant."""
    from importlib.util import find_spec
    from pathlib import Path

    module = name.lower().replace("-", "_")
    if module in EXPERIMENTAL:
        algorithm = EXPERIMENTAL[module]
        places = getattr(find_spec("trl"), "submodule_search_locations", None) or ()
        here = any(Path(place, "experimental", module).is_dir() for place in places)
        missing = "" if here else f" (the installed TRL has no trl.experimental.{module}, but other releases have)"
        return (
            f"{name} is an experimental trainer of TRL, which has no command{missing}. In Python:\n"
            "  from safe_trainers import PrecisionBase, PrecisionMixin\n"
            f"  from trl.experimental.{module} import {algorithm}Trainer\n\n"
            f"  class Safe{algorithm}Trainer(PrecisionMixin, {algorithm}Trainer, PrecisionBase): ..."
        )
    if name.endswith((".yaml", ".yml")):
        return f"{name} is not a command. Run: safe-trainers validate {name}, or safe-trainers TASK --config {name}"
    near = nearest(name, COMMANDS)
    return f"there is no command {name!r}{hint(near) or '. Run: safe-trainers'}"


def _module(command: Command) -> ModuleType:
    return importlib.import_module(f".{command.module}", __package__)


def quieten() -> None:
    """Makes the libraries print errors only; environment variables that are already set win."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def run() -> None:
    """Runs `main` as the installed program, and exits."""
    with open_closed_streams():
        quieten()
        sys.exit(_status())


def _status() -> int:
    """Runs `main`, and returns the exit status of the process, also after a signal and with output that fails."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, without a traceback
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)  # such as from `| head`
        if not (broken or error.errno == errno.ENOSPC) or not was_printing(error, "safe_trainers"):
            raise
        drop_output()
        if not broken:
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 141 if broken else 2  # 128 + SIGPIPE

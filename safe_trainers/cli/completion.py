"""`safe-trainers completion SHELL`, and the completions themselves, which argcomplete asks for at each TAB.

Names of recipes and of keys are read from the files of the package. Neither torch nor TRL is imported.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.shell_integration import shellcode

from ..core.tasks import TASKS


PROGRAM = "safe-trainers"
SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")

EPILOG = """  bash, in ~/.bashrc:               eval "$(safe-trainers completion bash)"
  zsh, in ~/.zshrc after compinit:  eval "$(safe-trainers completion zsh)"
  fish:                             safe-trainers completion fish > ~/.config/fish/completions/safe-trainers.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = EPILOG
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the code.

    Returns:
        The exit status.
    """
    sys.stdout.write(shellcode([PROGRAM], shell=options.shell) + "\n")
    return 0


def complete(build_parser: Callable[..., argparse.ArgumentParser], commands: Mapping[str, bool]) -> None:
    """Prints the completions of the command line in the environment, and exits.

    Args:
        build_parser: Builds the parser, with the options of a command if its name is passed.
        commands: Whether a command takes keys of recipes, by name.
    """
    words = _words()
    chosen = next((word for word in words[1:] if word in commands), None)
    parser = build_parser(chosen)
    if chosen is not None:
        _add_completers(parser, chosen, commands[chosen])
    argcomplete.autocomplete(parser, always_complete_options="long")


def _words() -> list[str]:
    """The words before the cursor."""
    line = os.environ.get("COMP_LINE", "")
    try:
        return shlex.split(line[: int(os.environ.get("COMP_POINT", len(line)))])
    except ValueError:  # an open quote
        return line.split()


def _add_completers(parser: argparse.ArgumentParser, chosen: str, takes_keys: bool) -> None:
    """Adds what completes the arguments of a command: files, packaged names, and the keys of a task as options."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    command: argparse.ArgumentParser = commands.choices[chosen]
    completers = {
        "config": _recipes,
        "recipes": _recipes,
        "name": _packaged,
        "accelerate_config": _configs,
        "task": _choices(TASKS),
        "pattern": _key_names,
        "trainer": _trainers,
        "only": _checks,
    }
    for action in command._actions:
        completer = completers.get(action.dest)
        if completer is not None and action.choices is None:
            action.completer = completer  # type: ignore[attr-defined]
    if takes_keys:
        from ..recipes.schema import BOOLEAN, load

        taken = {action.dest for action in command._actions}
        for key in load(chosen if chosen in TASKS else "grpo").keys.values():
            if key.name not in taken:
                values = key.choices or key.examples or (("true", "false") if BOOLEAN in key.types else ())
                several = "+" if key.item is not None else None
                text = key.help.replace("%", "%%")
                option: Any = command.add_argument(f"--{key.name}", nargs=several, help=text)
                if values:
                    option.completer = _choices(values)


def _choices(values: Iterable[str]) -> Callable[..., list[str]]:
    return lambda prefix, **kwargs: list(values)


def _recipes(prefix: str, **kwargs: Any) -> list[str]:
    return [*_names("recipes"), *_files(prefix)]


def _packaged(prefix: str, **kwargs: Any) -> list[str]:
    from ..recipes.packaged import SCRIPT, folder

    scripts = (path.name for path in folder("configs").glob(f"*{SCRIPT}"))
    return [*_names("recipes"), *_names("configs"), *scripts]


def _configs(prefix: str, **kwargs: Any) -> list[str]:
    return [*_names("configs"), *_files(prefix)]


def _trainers(prefix: str, **kwargs: Any) -> list[str]:
    return [f"trl:{task.algorithm}Trainer" for task in TASKS.values()] + [
        f"safe_trainers:{task.trainer}" for task in TASKS.values()
    ]


def _checks(prefix: str, **kwargs: Any) -> list[str]:
    """The names of checks, behind those that are already in the list."""
    from ..bench.checks import CHECKS

    before, comma, _ = prefix.rpartition(",")
    return [f"{before}{comma}{name}" for name in CHECKS if name not in before.split(",")]


def _key_names(prefix: str, parsed_args: argparse.Namespace, **kwargs: Any) -> list[str]:
    from ..recipes.schema import load

    tasks = [parsed_args.task] if parsed_args.task in TASKS else list(TASKS)
    return sorted({name for task in tasks for name in load(task).keys})


def _names(kind: Any) -> list[str]:
    """The names of packaged recipes or configs."""
    from ..recipes.packaged import folder

    root = folder(kind)
    return [path.relative_to(root).with_suffix("").as_posix() for path in sorted(root.rglob("*.yaml"))]


def _files(prefix: str) -> list[str]:
    """YAML files and folders."""
    return list(FilesCompleter(("yaml", "yml"))(prefix))

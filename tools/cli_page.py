"""Writes the page of commands, from the parsers of the command line and from what the commands print."""

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safe_trainers.cli.main import COMMANDS, build_parser, main
from safe_trainers.core.tasks import TASKS


FAULTY = """\
model_name_or_path: tiny:aria
torch_dtype: bfloat16
dataset_name: tiny:shapes
reward_funcs: [safe_trainers.tiny.exact_match]
num_generations: 4.0
learning_rat: 1.0e-5
"""
"""A recipe with three faults, for the example of `validate`."""
EXAMPLES = {
    "validate": ["validate", "old.yaml", "--task", "grpo"],
    "explain": ["explain", "ValueError: Attempting to unscale FP16 gradients."],
    "report": ["report", "tiny:text"],
}
"""The commands whose output the page shows."""


def cli_page() -> str:
    """Returns `cli.md`."""
    lines = [
        "# Commands",
        "",
        "`safe-trainers COMMAND --help` prints the options of a command.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#{_place(name)}) | {command.summary} |" for name, command in COMMANDS.items()),
        "",
        "## Training commands",
        "",
        f"{', '.join(f'`{task}`' for task in TASKS)} train from a recipe:",
        "",
        "```console",
        "safe-trainers copy grpo/tiny_vlm_bf16",
        "safe-trainers grpo --config tiny_vlm_bf16.yaml --learning_rate 1e-4",
        "```",
        "",
        *_options(next(iter(TASKS))),
        "Every key of a recipe is also an option, which overrides the file. [Recipes](recipes.md), "
        "[keys](datasets.md).",
        "",
    ]
    for name, command in COMMANDS.items():
        if name in TASKS:
            continue
        lines += [f"## {name}", "", f"{command.summary[:1].upper()}{command.summary[1:]}.", ""]
        lines += _options(name)
        if name == "demo":
            lines += ["Every key of its recipe, `grpo/tiny_vlm_bf16`, is also an option.", ""]
        epilog = _parser(name).epilog
        if epilog and not command.takes_recipe_keys:
            lines += ["```text", *epilog.strip().splitlines(), "```", ""]
        if name in EXAMPLES:
            lines += ["Example:", "", "```text", *printed(EXAMPLES[name]), "```", ""]
    return "\n".join([*lines, "*Made from the parsers and the output of the commands by `make docs`.*"]) + "\n"


def _place(name: str) -> str:
    return "training-commands" if name in TASKS else name


def _parser(name: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in build_parser(name)._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices[name]
    return parser


def _options(name: str) -> list[str]:
    parser = _parser(name)
    formatter = parser._get_formatter()
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    if not actions:
        return []
    lines = ["| argument | meaning |", "|---|---|"]
    lines += [
        f"| {_argument(action)} | {formatter._expand_help(action).replace('|', chr(92) + '|')} |" for action in actions
    ]
    return [*lines, ""]


def _argument(action: argparse.Action) -> str:
    """An argument in command-line notation."""
    metavar = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices is not None and action.metavar is None:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    words = f"{', '.join(action.option_strings)} {metavar}".strip() if action.option_strings else str(metavar)
    return f"`{words}`".replace("|", "\\|")


def printed(command: list[str]) -> Iterator[str]:
    """Yields a command line and the lines that it prints.

    Args:
        command: The command without the name of the program.
    """
    words = " ".join(f'"{word}"' if " " in word else word for word in command)
    yield f"$ safe-trainers {words}"
    out, before = io.StringIO(), dict(os.environ)
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(out):
            Path("old.yaml").write_text(FAULTY, encoding="utf-8")
            main(command)
    finally:
        os.environ.clear()
        os.environ.update(before)
    yield from (line.rstrip() for line in out.getvalue().rstrip().splitlines())

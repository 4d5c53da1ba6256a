"""Every block of code in the pages runs, top to bottom, in an empty folder with the wheel installed.

Nothing is passed to a page: it makes what it uses. Training commands are cut short. A `text` block that follows a
`python` block is what this prints.
"""

import ast
import builtins
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from release_check import build

from safe_trainers.cli.main import COMMANDS


ROOT = Path(__file__).parent.parent
ALL = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "recipes/README.md",
    ROOT / "configs/README.md",
]
PYTHON = [page for page in ALL if re.search(r"^```python\n", page.read_text(), re.M)]
PROGRAMS = ("safe-trainers", "make", "pip", ".")
SHORT = [
    *("--max_steps", "1", "--warm_up_steps", "1", "--dataset_size", "64", "--evaluation_size", "8"),
    *("--per_device_train_batch_size", "8", "--logging_steps", "1", "--progress", "false"),
]
FOLDER = ["--output_dir", "short"]
DRIVER = """
import contextlib, io, json, os, pathlib, sys, traceback
from accelerate.state import AcceleratorState
from safe_trainers.cli.main import main

def python(blocks):
    names, printed = {"__name__": "page"}, []
    for line, code in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\\n" * line + code, "page.md", "exec"), names)
        printed.append(out.getvalue())
    return printed

def console(lines):
    with contextlib.redirect_stdout(io.StringIO()):
        for line in lines:
            status = main(line)
            assert status == 0, (status, line)
    return []

found = {}
for number, (kind, page, content) in enumerate(json.load(open("work.json"))):
    empty = pathlib.Path(f"empty-{number}").absolute()
    empty.mkdir()
    AcceleratorState._reset_state(True)  # as in a process of its own
    try:
        with contextlib.chdir(empty):
            found[f"{kind} {page}"] = {"printed": {"python": python, "console": console}[kind](content)}
    except BaseException:
        found[f"{kind} {page}"] = {"error": traceback.format_exc()[-2000:]}
json.dump(found, open("found.json", "w"))
"""
"""Runs the blocks of each page in an empty folder."""


def commands(page):
    """The lines of a page's console blocks, without comments."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def runnable(page):
    """The commands of a page up to one that installs an extra whose package is not in this environment."""
    for line in commands(page):
        extras = re.findall(r"pip install .*(?:safe-trainers|\.)\[(\w+)\]", line)
        if any(importlib.util.find_spec(extra) is None for extra in extras):
            return
        yield line


SHELL = [page for page in ALL if commands(page)]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The folder that a freshly built wheel was installed into; its dependencies are this environment's."""
    built, folder = build(tmp_path_factory.mktemp("dist"))["wheel"], tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(built),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def blocks_of(page):
    """The blocks of Python of a page: their lines, their code, and the output that the page shows for each."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.M | re.S)
    return [(text[: match.start(1)].count("\n"), match[1], match[2]) for match in found]


@pytest.fixture(scope="session")
def ran(wheel, tmp_path_factory):
    """What became of each page, in one process of the installed wheel, away from the checkout."""
    folder = tmp_path_factory.mktemp("pages")
    work = [("python", name_of(page), [block[:2] for block in blocks_of(page)]) for page in PYTHON]
    for page in SHELL:
        lines = [shlex.split(line)[1:] for line in runnable(page) if line.startswith("safe-trainers ")]
        short = [
            [*line, *SHORT, *(() if FOLDER[0] in line else FOLDER)] if COMMANDS[line[0]].takes_recipe_keys else line
            for line in lines
        ]
        work.append(("console", name_of(page), short))
    (folder / "work.json").write_text(json.dumps(work))
    environment = {**os.environ, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", DRIVER], cwd=folder, env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(page, ran):
    blocks, result = blocks_of(page), ran[f"python {name_of(page)}"]
    assert len(blocks) == page.read_text().count("\n```python\n")
    assert "error" not in result, result["error"]
    for (line, _, shown), printed in zip(blocks, result["printed"], strict=True):
        if shown is not None:
            assert printed.strip() == shown.strip(), f"{page.name}:{line}"


def undefined(blocks):
    """Names that blocks use before any of them has defined them."""
    known, missing = set(dir(builtins)), []
    for block in blocks:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                known.add(node.name)
            elif isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                known.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        missing += sorted(used - known)
    return missing


@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_a_page_defines_every_name_that_its_code_uses(page):
    assert undefined(code for _, code, _ in blocks_of(page)) == []


def test_an_undefined_name_would_be_found():
    assert undefined(["from trl import GRPOTrainer\n", "trainer = GRPOTrainer(model)\ntrainer.train()\n"]) == ["model"]


def test_there_are_commands_in_the_pages():
    assert sum(len(commands(page)) for page in SHELL) >= 20


@pytest.mark.parametrize("page", SHELL, ids=name_of)
def test_a_command_can_be_pasted(page):
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in commands(page):
        if page.name == "CONTRIBUTING.md":
            continue
        assert not re.search(r"<[a-z ]+>", line), line
        program, *arguments = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
        assert program in PROGRAMS or program in extras, line  # an extra may bring a program of its name
        if program == "make":
            assert arguments[0] in targets
        elif program == "pip":
            assert {name for group in re.findall(r"\[(.+?)\]", line) for name in group.split(",")} <= set(extras)
        elif program == ".":
            assert arguments == [".venv/bin/activate"]  # which `make setup` creates


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SHELL, ids=name_of)
def test_the_commands_of_a_page_work_one_after_the_other(page, ran):
    result = ran[f"console {name_of(page)}"]
    assert "error" not in result, result["error"]


def test_console_blocks_are_labelled():
    """A block without a language would be neither run nor checked."""
    for page in ALL:
        for language, block in re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.M | re.S):
            assert language or not re.search(r"^(safe-trainers|make|git|pip) ", block, re.M), page

"""Measures the structure of the package against its targets: `make house`.

The import graph and the counts are read from the source. The path of a value through the package is traced in a real
run: it consists of the files with a function that was called with the value.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "safe_trainers"
WAYS = ROOT / "benchmarks" / "results" / "ways.json"


# ---- Read from the source -------------------------------------------------------------------------------------------


def sources() -> dict[str, ast.Module]:
    """The syntax trees of the package by module name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules of the package that each module imports, also inside functions, but not for type checkers only."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        is_package = (PACKAGE.parent / Path(*name.split(".")) / "__init__.py").is_file()
        skipped = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
                continue
            base = name.split(".") if is_package else name.split(".")[:-1]
            start = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                for target in (f"{module}.{alias.name}", module):
                    if target in trees:
                        graph[name].add(target)
                        break
    return {name: targets - {name, "safe_trainers"} for name, targets in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The import cycles: groups of modules that import one another."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = []
            while (member := stack.pop()) != name:
                group.append(member)
            if group:
                found.append(sorted([name, *group]))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def package_of(module: str) -> str:
    """The package of a module, or its file in the root."""
    return module.split(".")[1] if "." in module else module


def package_arrows(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports between packages."""
    pairs = {(package_of(name), package_of(target)) for name, targets in graph.items() for target in targets}
    return {(a, b) for a, b in pairs if a != b and a != "safe_trainers"}


def static_counts() -> dict[str, Any]:
    """The rows of the table that are counted in the source."""
    trees = sources()
    graph = imports(trees)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py"))
    private = 0
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                private += any(_is_private_of_trainer(inner) for inner in ast.walk(node))
    return {
        "files in the root": sum(path.name != "__init__.py" for path in PACKAGE.glob("*.py")),
        "modules": len(trees),
        "import circles": len(circles(graph)),
        "arrows between packages": len(package_arrows(graph)),
        "arrows between modules": sum(map(len, graph.values())),
        "overrides of train": sum(
            isinstance(node, ast.FunctionDef) and node.name == "train"
            for tree in trees.values()
            for cls in ast.walk(tree)
            if isinstance(cls, ast.ClassDef)
            for node in cls.body
        ),
        "Python lines": lines,
        "tests that read a private name of a trainer": private,
    }


_OURS = {"_run", "_trainer_state", "_adapter_guard", "_side", "_engine_kwargs", "_choose_checkpoint", "_agree"}
"""Private names of a trainer that this package defines."""


def _is_private_of_trainer(node: ast.AST) -> bool:
    named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trainer"
    return named and node.attr in _OURS  # type: ignore[attr-defined]


# ---- Traced in a run ------------------------------------------------------------------------------------------------


@contextmanager
def traced(carries: Callable[[Any], bool]) -> Iterator[list[str]]:
    """Collects the files of the package in which a function is called with a value while the block runs.

    Args:
        carries: Whether an argument is the value, or directly contains it.

    Yields:
        The files in the order in which the value entered them.
    """
    files: list[str] = []
    prefix = str(PACKAGE) + os.sep

    def watch(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix):
            return
        name = code.co_filename.removeprefix(prefix)
        if name in files or name.startswith("tiny" + os.sep):
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        if any(carries(frame.f_locals.get(argument)) for argument in code.co_varnames[:count]):
            files.append(name)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _holds(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Extends a test of a value to the items of tuples, lists and mappings."""

    def carries(value: Any) -> bool:
        if test(value):
            return True
        if isinstance(value, dict):
            return any(test(item) for item in value.values())
        return isinstance(value, (tuple, list)) and any(test(item) or _in_dict(item, test) for item in value)

    return carries


def _in_dict(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and any(test(item) for item in value.values())


def trace_all() -> dict[str, list[str]]:
    """The paths of an image tensor, a LoRA parameter, `precision: fp16`, and a misspelt dtype in a recipe."""
    import torch

    from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, tiny
    from safe_trainers.cli.main import main
    from safe_trainers.testing import fp16_on_cpu

    ways: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny.save("llava", Path(scratch) / "model")

        def train(**changes: Any) -> Any:
            from peft import LoraConfig

            settings = {
                "output_dir": scratch, "use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 2,
                "num_generations": 2, "max_completion_length": 4, "report_to": [], "save_strategy": "steps",
                "save_steps": 1, "disable_tqdm": True, "precision_report": "file", **changes,
            }  # fmt: skip
            trainer = fp16_on_cpu(SafeGRPOTrainer)(
                str(folder),
                args=SafeGRPOConfig(**settings),
                train_dataset=tiny.prompt_dataset(4),
                reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
                peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
            )
            trainer.train()
            return trainer

        def is_image(value: Any) -> bool:
            plain = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
            return plain and value.ndim == 4 and value.shape[1] == 3

        with traced(_holds(is_image)) as ways["pixel_values"]:
            train(precision="bf16")
        with traced(_holds(lambda v: isinstance(v, torch.nn.Parameter) and v.requires_grad and 2 in v.shape)) as way:
            train(precision="bf16")
        ways["a LoRA parameter"] = way
        with traced(_holds(lambda value: isinstance(value, str) and value in ("fp16", "float16"))) as way:
            train(precision="fp16")
        ways["precision: fp16"] = way
        recipe = Path(scratch) / "recipe.yaml"
        recipe.write_text(f"model_name_or_path: {folder}\ndataset_name: tiny:shapes\nprecision: fp12\n")
        with traced(_holds(lambda value: isinstance(value, str) and value == "fp12")) as way:
            main(["grpo", "--config", str(recipe)])
        ways["a misspelt dtype"] = way
    return ways


TARGETS = {
    "files in the root": 4,
    "import circles": 0,
    "arrows between packages": 100,
    "own classes in the MRO": 4,
    "overrides of train": 1,
    "tests that read a private name of a trainer": 9,
    "pixel_values": 12,  # three files compare images, and core/feature.py measures phases
    "a LoRA parameter": 12,
    "precision: fp16": 10,
    "a misspelt dtype": 5,
}
"""The largest allowed value of each row."""


def main() -> int:
    """Prints the table; returns 1 if a row is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the paths to the file for docs/architecture.md")
    options = parser.parse_args()
    if options.trace:  # runs in a new process; libraries print before the last line
        print("\n" + json.dumps(trace_all()))
        return 0
    rows: dict[str, Any] = static_counts()
    from safe_trainers import SafeGRPOTrainer

    own = [cls.__name__ for cls in SafeGRPOTrainer.__mro__ if cls.__module__.startswith("safe_trainers")]
    rows["own classes in the MRO"] = len(own)
    done = subprocess.run(
        [sys.executable, __file__, "--trace"], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    ways = json.loads(done.stdout.strip().splitlines()[-1])
    if options.write:
        WAYS.write_text(json.dumps(ways, indent=1) + "\n", encoding="utf-8")
    missed = False
    for name, value in rows.items():
        most = TARGETS.get(name)
        missed |= most is not None and value > most
        print(f"{name:<45} {value:>6}" + ("" if most is None else f"   at most {most}"))
    for name, files in ways.items():
        missed |= len(files) > TARGETS[name]
        print(f"path of {name:<37} {len(files):>6}   at most {TARGETS[name]}: {', '.join(files)}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

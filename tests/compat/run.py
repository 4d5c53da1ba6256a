"""The core suite and the matrix slice in each supported pair of TRL and transformers: `make compat`.

    python tests/compat/run.py                       # all pairs, one after another: some 40 minutes each on 2 cores
    python tests/compat/run.py --pairs trl-0.29      # one
    python tests/compat/run.py --pairs torch-2.15    # a later torch, in its build for CUDA (5 GB)
    python tests/compat/run.py --only-install        # the environments alone
    python tests/compat/run.py --pairs trl-1.4 -- tests/test_media.py -x    # pytest there; writes nothing

Each pair has an environment of its own in `.compat/`, made from the package index and used again until its pins or
`pyproject.toml` change. The results go to `benchmarks/results/compat.json`, of which `tools/build_docs.py` makes
`docs/versions.md`.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".compat"
RESULT = ROOT / "benchmarks" / "results" / "compat.json"
TORCH = "torch==2.13.0"
"""As in the Makefile: first and alone, so that nothing else can choose another build of it."""

STACK = ("trl", "transformers", "peft", "accelerate", "bitsandbytes", "datasets")
"""What a pair chooses; everything else is pinned by constraints.txt, or follows."""

TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "matplotlib")
"""What the core suite needs beside the package."""


@dataclass(frozen=True)
class Pair:
    """A pair of TRL and transformers, with what fits them.

    Attributes:
        name: Of its environment.
        pins: Version by package of the stack; what is missing is the newest that the index has in our range.
        undeclared: What these versions import without declaring it.
        torch: The release of torch; another than `TORCH` is a build for CUDA of several GB, and runs on the CPU too.
    """

    name: str
    pins: dict[str, str] = field(default_factory=dict)
    undeclared: tuple[str, ...] = ()
    torch: str = TORCH


def _pair(name: str, *versions: str, undeclared: tuple[str, ...] = ()) -> Pair:
    return Pair(name, dict(zip(STACK, versions, strict=True)), undeclared)


# TRL 0.29 to 1.12 import `requests` without declaring it, and tools need `jmespath`. The oldest pair has the
# lowest versions that pyproject.toml accepts of PEFT, accelerate and datasets.
PAIRS = (
    _pair("trl-0.29", "0.29.1", "4.57.6", "0.17.0", "1.10.0", "0.49.2", "4.0.0", undeclared=("requests",)),
    _pair("trl-1.4", "1.4.0", "5.1.0", "0.19.1", "1.13.0", "0.49.2", "4.8.5", undeclared=("requests", "jmespath")),
    _pair("trl-1.9", "1.9.2", "5.14.1", "0.20.0", "1.14.0", "0.50.0", "5.2.0", undeclared=("requests", "jmespath")),
    Pair("newest"),
)

OPTIONAL = (Pair("torch-2.14", torch="torch==2.14.1"), Pair("torch-2.15", torch="torch==2.15.0"))
"""Pairs that run only if they are named."""

NOT_CORE = {
    "tests/test_project.py": "checks the files of the project",
    "tests/test_docs.py": "checks the documentation, which is generated with the latest pair",
    "tests/test_docs_browser.py": "checks the site, which is built with the latest pair",
    "tests/test_docs_run.py": "checks the documentation, which is generated with the latest pair",
    "tests/test_package.py": "checks the public API, which is the same in each environment, and its import time",
    "tests/recipes/test_configs.py": "checks the launch configs",
    "tests/recipes/test_schema.py": "checks the schema of recipes for the latest pair",
    "tests/recipes/test_recipes.py": "checks recipes, which have the keys of the latest TRL",
    "tests/recipes/test_validation.py": "checks recipes, which have the keys of the latest TRL",
    "tests/explain/test_catalogue.py": "checks error messages of the latest pair",
    "tests/test_policing.py": "checks the fixtures of the tests",
    "tests/doctor/test_doctor.py": "depends on the machine and the installed packages",
    "tests/explain/test_pasted_errors.py": "runs no upstream code",
    "tests/test_words.py": "runs no upstream code",
    "tests/explain/test_explain.py": "checks error messages of the latest pair",
    "tests/cli/test_plot.py": "runs no upstream code",
    "tests/recipes/test_recipe_file.py": "runs no upstream code",
    "tests/report/test_report.py": "runs no upstream code",
    "tests/integration/test_provenance.py": "checks what results were measured with, the same in each pair",
    "tests/integration/test_cost.py": "checks measurements with the latest pair",
    "tests/test_gpu_evidence.py": "checks measurements of the latest pair",
    "tests/test_growth.py": "checks measurements with the latest pair",
    "tests/tiny/test_families.py": "checks the families of the evidence with the latest pair",
    "tests/integration/test_wheel.py": "needs build tools that are not installed",
    "tests/integration/test_side_by_side.py": "runs scripts that are written for the latest TRL",
    "tests/compat/test_swapped.py": "runs tests twice that are written for the latest TRL",
    "tests/test_upstream_scripts.py": "checks a page of the latest pair, while this changes its results",
    "tests/distributed": "runs several processes for minutes, in its own target",
    "tests/gpu": "needs a CUDA device",
    "tests/real_vllm": "needs vLLM, which pins its own versions",
}
"""Tests that are not core tests, with the reasons; tests marked `slow`, `matrix` or `gpu` are excluded too."""

MARKERS = "not slow and not matrix and not gpu"


def constraints(pair: Pair) -> str:
    """The pins of an environment: those of the project, with the pair's stack in place of its own."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    chosen = (*STACK, *(() if pair.torch == TORCH else ("torch",)))
    kept = [line for line in lines if "==" in line and line.split("==")[0] not in chosen]
    return "\n".join([*kept, *(f"{package}=={number}" for package, number in pair.pins.items()), ""])


def environment(pair: Pair) -> Path:
    """Makes the environment of a pair, or finds it.

    Args:
        pair: The pair.

    Returns:
        Its Python.
    """
    home = ENVIRONMENTS / pair.name
    python, stamp = home / "bin" / "python", home / "installed"
    pins = constraints(pair)
    wanted = hashlib.sha256((pins + str(ROOT) + (ROOT / "pyproject.toml").read_text("utf-8")).encode()).hexdigest()
    newest = not pair.pins
    if not newest and stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"{pair.name}: installing into {home}", file=sys.stderr)
    if not python.is_file():
        venv.create(home, with_pip=True)
    file = home / "constraints.txt"
    file.write_text(pins, encoding="utf-8")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(file)]
    subprocess.run([*pip, pair.torch], check=True)
    upgrade = ["--upgrade", *(STACK)] if newest else []
    subprocess.run([*pip, *upgrade, "-e", f"{ROOT}[quantization]", *TOOLS, *pair.undeclared], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def installed(python: Path) -> dict[str, str]:
    """The versions in an environment: of Python, torch and the stack."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = {package["name"].lower(): package["version"] for package in json.loads(listing.stdout)}
    return {"python": platform.python_version(), **{package: found[package] for package in ("torch", *STACK)}}


def core() -> list[str]:
    """The arguments with which pytest runs the core suite."""
    return ["tests", *(f"--ignore={path}" for path in NOT_CORE), "-m", MARKERS]


def run_suite(python: Path, arguments: Sequence[str], report: Path) -> dict[str, Any]:
    """Runs tests in an environment, in one process.

    Args:
        python: Of the environment.
        arguments: For pytest.
        report: Where pytest's own results go.

    Returns:
        `passed`, `failed` and `skipped` as numbers, `seconds`, the ids of the `failures`, the reasons of the skips.
    """
    started = time.perf_counter()
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "--no-header", "--show-capture=no", "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=surroundings(), check=False)
    if not report.is_file():
        raise SystemExit(f"pytest wrote no results: {' '.join(command)}")
    return {**tally(report), "seconds": round(time.perf_counter() - started)}


def tally(report: Path) -> dict[str, Any]:
    """Counts what pytest wrote.

    Args:
        report: A JUnit file.
    """
    failures, reasons, passed = [], Counter[str](), 0
    for case in ElementTree.parse(report).iter("testcase"):
        file = f"{case.get('classname', '').replace('.', '/')}.py"
        if file in NOT_CORE:  # of a run that knew less
            continue
        name = f"{file}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(name)
        elif skip is not None:
            reasons[re.sub(r"^Skipped: ", "", skip.get("message", ""))] += 1
        else:
            passed += 1
    return {
        "passed": passed, "failed": len(failures), "skipped": reasons.total(), "failures": failures,
        "skips": dict(reasons.most_common()),
    }  # fmt: skip


def run_failed(python: Path, before: dict[str, Any], report: Path) -> dict[str, Any]:
    """Runs what failed once more, after it was mended, and counts it with what passed before.

    Args:
        python: Of the environment.
        before: What `run_suite` returned.
        report: Where pytest's own results go.

    Returns:
        The sum, with how many tests were run `again`. The process ends if not all of them were found.
    """
    if not before["failures"]:
        return before
    found = run_suite(python, [*before["failures"], "-m", MARKERS], report)
    count = found["passed"] + found["failed"] + found["skipped"]
    if count != before["failed"]:
        raise SystemExit(f"{count} of {before['failed']} failed tests were found; run the pair without --failed")
    return {
        "passed": before["passed"] + found["passed"],
        "failed": found["failed"],
        "skipped": before["skipped"] + found["skipped"],
        "failures": found["failures"],
        "skips": dict((Counter(before["skips"]) + Counter(found["skips"])).most_common()),
        "again": before.get("again", 0) + before["failed"],
        "seconds": before["seconds"] + found["seconds"],
    }


def run_slice(python: Path, name: str, jobs: int) -> dict[str, Any]:
    """Runs the matrix slice in an environment.

    Args:
        python: Of the environment.
        name: Of the pair.
        jobs: How many processes.

    Returns:
        How many cells ended in which outcome, stock and safe, and which families are not there.
    """
    out = ENVIRONMENTS / f"matrix-{name}.jsonl"
    command = [str(python), "benchmarks/matrix.py", "--slice", "--jobs", str(jobs), "--out", str(out)]
    out.unlink(missing_ok=True)  # it would keep cells of an earlier slice
    started = time.perf_counter()
    status = subprocess.run(command, cwd=ROOT, env=surroundings(), check=False).returncode
    heading, *rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {
        "cells": len(rows),
        **{side: dict(Counter(row[side]["outcome"] for row in rows)) for side in ("stock", "safe")},
        "problems": status != 0,
        "absent": heading.get("absent", {}),
        "seconds": round(time.perf_counter() - started),
    }


def run_upstream(python: Path, name: str) -> dict[str, str]:
    """Runs the scripts that show faults of the libraries below in an environment.

    Args:
        python: Of the environment.
        name: Of the pair.

    Returns:
        The verdict of each script: `"FAULT"`, `"FIXED"`, or that it does not run with these versions.
    """
    out = ENVIRONMENTS / f"upstream-{name}.json"
    out.unlink(missing_ok=True)
    subprocess.run([str(python), "upstream/run.py", "--out", str(out)], cwd=ROOT, env=surroundings(), check=False)
    found = json.loads(out.read_text(encoding="utf-8"))["scripts"]
    return {script: result["verdict"] for script, result in found.items()}


def surroundings() -> dict[str, str]:
    """The environment variables of a run: one thread, nothing downloaded, nothing of the calling environment."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def record(name: str, result: dict[str, Any]) -> None:
    """Writes a pair's results into the file, and leaves those of the others."""
    whole = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    pairs = {**whole.get("pairs", {}), name: result}
    ordered = {pair.name: pairs[pair.name] for pair in (*PAIRS, *OPTIONAL) if pair.name in pairs}
    content = {
        "command": "make compat",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "not_core": NOT_CORE,
        "pairs": ordered,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Runs what was asked for; the exit status is 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [pair.name for pair in (*PAIRS, *OPTIONAL)]
    parser.add_argument("--pairs", nargs="*", choices=names, help="these alone")
    parser.add_argument("--only-install", action="store_true", help="make the environments and stop")
    parser.add_argument(
        "--part", choices=("core", "slice", "upstream"), help="this part alone; results of others stay"
    )
    parser.add_argument(
        "--failed", action="store_true", help="of the core suite, what failed in the committed results"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of the matrix slice")
    parser.add_argument("pytest", nargs="*", help="after `--`: run pytest with this, and record nothing")
    options = parser.parse_args()
    table, failed = Table("pair", "passed", "failed", "skipped", "seconds"), False
    chosen = [pair for pair in (*PAIRS, *OPTIONAL) if pair.name in options.pairs] if options.pairs else PAIRS
    for pair in chosen:
        python = environment(pair)
        if options.only_install:
            continue
        report = ENVIRONMENTS / f"{pair.name}.xml"
        if options.pytest:
            suite = run_suite(python, options.pytest, report)
            table.add_row(pair.name, *(str(suite[key]) for key in ("passed", "failed", "skipped", "seconds")))
            failed = failed or suite["failed"] > 0
            continue
        whole = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
        result = {**whole.get("pairs", {}).get(pair.name, {}), "versions": installed(python)}
        if options.failed:
            result["core"] = run_failed(python, result["core"], report)
        elif options.part in (None, "core"):
            result["core"] = run_suite(python, core(), report)
        if options.part in (None, "slice") and not options.failed:
            result["slice"] = run_slice(python, pair.name, options.jobs)
        if options.part in (None, "upstream") and not options.failed:
            result["upstream"] = run_upstream(python, pair.name)
        if options.part in (None, "core"):
            result["date"] = datetime.now(UTC).date().isoformat()
        record(pair.name, result)
        suite = result.get("core", {})
        table.add_row(pair.name, *(str(suite.get(key)) for key in ("passed", "failed", "skipped", "seconds")))
        failed = failed or bool(suite.get("failed")) or result.get("slice", {}).get("problems", False)
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

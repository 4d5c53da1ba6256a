"""Runs the scripts of this folder, and writes what they print into `benchmarks/results/upstream.json`.

    python upstream/run.py                # all scripts
    python upstream/run.py NAME ...       # some of them; the results of the others stay
    python upstream/run.py --out FILE     # writes another file
    VLLM=path/to/python python upstream/run.py    # the scripts that need vLLM run in that environment

Each script shows one fault of a library that this package works around. It imports nothing of this package, and prints
`FAULT` or `FIXED` and a number, or on a machine that cannot show the fault `NOT RUN` and the reason. Its constants
state the thread upstream or the source (`THREAD`), the files of this package that can become simpler when it is fixed
(`MECHANISMS`), and what the number is (`QUESTION`).
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
RESULT = HERE.parent / "benchmarks" / "results" / "upstream.json"
PACKAGES = ("trl", "transformers", "peft", "accelerate", "bitsandbytes", "torch")
PRINTED = re.compile(r"(FAULT|FIXED) (\S+)(?: \((.*)\))?\s*|(NOT RUN) \((.*)\)\s*")
SECONDS = 300
"""Time limit of a script."""


def scripts() -> list[Path]:
    """Returns the scripts, in alphabetical order."""
    return sorted(file for file in HERE.glob("*.py") if file != Path(__file__))


def described(file: Path) -> dict[str, Any]:
    """Reads the docstring and the constants of a script, without running it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"fault": ast.get_docstring(tree)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            found[node.targets[0].id.lower()] = ast.literal_eval(node.value)
    return found


def run(file: Path) -> dict[str, Any]:
    """Runs a script, and returns its verdict, its number and its remark."""
    needs = described(file).get("needs")
    python = os.environ.get("VLLM", sys.executable) if needs == "vllm" else sys.executable
    if needs is not None and python == sys.executable and find_spec(needs) is None:
        return {"verdict": "NOT RUN", "remark": f"{needs} is not installed"}
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [python, str(file)], capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "ERROR", "remark": f"more than {SECONDS} seconds"}
    printed = next(filter(None, map(PRINTED.fullmatch, reversed(done.stdout.splitlines()))), None)
    if done.returncode or printed is None:
        lines = done.stderr.strip().splitlines()
        return {"verdict": "ERROR", "remark": lines[-1] if lines else f"exit status {done.returncode}"}
    verdict, number, remark, not_run, why = printed.groups()
    if not_run:
        return {"verdict": not_run, "remark": why}
    return {"verdict": verdict, "number": number, **({"remark": remark} if remark else {})}


def installed() -> dict[str, str]:
    """Returns the versions of the packages that the scripts are about."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> int:
    """Runs the scripts; the exit status is 1 if one of them cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of scripts; all by default")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file to write")
    options = parser.parse_args()
    if unknown := set(options.names) - {file.stem for file in scripts()}:
        parser.error(f"no script has the name {', '.join(sorted(unknown))}")
    chosen = [file for file in scripts() if not options.names or file.stem in options.names]
    before = json.loads(options.out.read_text(encoding="utf-8"))["scripts"] if options.out.is_file() else {}
    results = {}
    for file in chosen:
        results[file.stem] = run(file)
        print(file.stem, *results[file.stem].values(), flush=True)
    names = [file.stem for file in scripts()]
    known = {name: results.get(name, before.get(name)) for name in names}
    content = {
        "command": "python upstream/run.py",
        "versions": installed(),
        "scripts": {name: result for name, result in known.items() if result is not None},
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(result["verdict"] == "ERROR" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

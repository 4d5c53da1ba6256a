"""Writes `docs/upstream.md`, from the scripts in `upstream/` and `benchmarks/results/upstream.json`."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from results import versions_of


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "upstream.json"
COMPAT = RESULT.with_name("compat.json")
SHOWN = {"ERROR": "does not run with these releases", "NOT RUN": "not run"}
"""What the table of releases shows for verdicts that are none."""


def runner() -> Any:
    """Loads `upstream/run.py`, which imports only the standard library."""
    spec = importlib.util.spec_from_file_location("upstream_run", ROOT / "upstream" / "run.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("upstream/run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def upstream_page() -> str:
    """Returns `upstream.md`."""
    scripts = runner()
    measured = json.loads(RESULT.read_text(encoding="utf-8"))
    found = measured["scripts"]
    faults = sum(result["verdict"] == "FAULT" for result in found.values())
    lines = [
        "# Faults upstream",
        "",
        f"{len(found)} scripts of at most 60 lines, each of one fault of the newest or of older releases that this "
        "package",
        "works around.",
        f"They import nothing of this package, so that they can be pasted into a report. {faults} of them print "
        "`FAULT` with",
        "the versions below.",
        "When one prints `FIXED`, the named files can become simpler.",
        "",
        "```bash",
        "make upstream",
        "```",
        "",
        "| script | result | number | what the number is |",
        "|---|---|---|---|",
    ]
    for file in scripts.scripts():
        about, result = scripts.described(file), found.get(file.stem, {"verdict": "NOT RUN"})
        lines.append(
            f"| [{file.stem}](#{file.stem}) | {result['verdict']} | {result.get('number', '')} | {about['question']} |"
        )
    lines += _by_release(list(found))
    for file in scripts.scripts():
        about, result = scripts.described(file), found.get(file.stem, {})
        lines += ["", f"## {file.stem}", "", about["fault"], ""]
        lines += [f"- Upstream: <{about['thread']}>"]
        lines += ["- Works around it: " + ", ".join(f"`{name}`" for name in about["mechanisms"])]
        lines += [f"- Printed with it: {result['remark']}"] if "remark" in result else []
    lines += [
        "",
        f"*Made from `upstream/` and `benchmarks/results/upstream.json` by `make docs`; {versions_of(measured)}.*",
    ]
    return "\n".join(lines) + "\n"


def _by_release(names: list[str]) -> list[str]:
    """A table of the verdicts in each pair of releases that `make compat` has run the scripts in."""
    whole = json.loads(COMPAT.read_text(encoding="utf-8"))["pairs"] if COMPAT.is_file() else {}
    pairs = {name: pair["upstream"] for name, pair in whole.items() if "upstream" in pair}
    if not pairs:
        return []
    rows = [
        f"| {name} | "
        + " | ".join(SHOWN.get(v, v) for v in (pair.get(name, "NOT RUN") for pair in pairs.values()))
        + " |"
        for name in names
    ]
    return [
        "",
        "With the releases of [tested versions](versions.md):",
        "",
        f"| script | {' | '.join(pairs)} |",
        "|---" * (len(pairs) + 1) + "|",
        *rows,
    ]

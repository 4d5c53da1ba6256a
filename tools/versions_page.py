"""Writes the page of tested versions, from `benchmarks/results/compat.json`, which `make compat` writes."""

import json
from pathlib import Path
from typing import Any


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "compat.json"
SHOWN = ("trl", "transformers", "torch", "peft", "accelerate", "bitsandbytes", "datasets")
TITLES = {"trl": "TRL"}
"""Of packages whose row has another title than their name."""

OUTCOMES = ("trained", "wrong", "crashed", "refused")


def page(measured: dict[str, Any] | None = None) -> str:
    """Returns `versions.md`.

    Args:
        measured: The results; by default the committed ones.
    """
    measured = json.loads(RESULT.read_text(encoding="utf-8")) if measured is None else measured
    pairs = {name: pair for name, pair in measured["pairs"].items() if "core" in pair}
    pythons = sorted({pair["versions"]["python"] for pair in pairs.values()})
    return "\n".join(
        [
            "# Versions",
            "",
            "Supported: TRL 0.29 to below 2, transformers 4.57 to below 6. Importing a trainer with other versions",
            "fails with the supported range and the command to run.",
            "",
            "Each column is an environment from the package index, in which the core tests were run on a CPU:",
            "",
            *_columns(pairs),
            "",
            *_builds(pairs),
            *(line for name, pair in pairs.items() for line in _failures(name, pair)),
            "Versions in between are accepted, but were not tested. The oldest pair has the oldest PEFT,",
            "accelerate and datasets that the package accepts, and a newer bitsandbytes: on a CPU, 0.46.1 does not",
            "support fp4, and 0.47.0 rounds the inputs of 8-bit layers in training.",
            "",
            "## Comparison with stock TRL",
            "",
            "A part of the [comparison](evidence.md), in number of combinations. *Wrong* trains something else, "
            "silently.",
            "Environments that are not in the table were not run.",
            "",
            "| environment | stock trained | wrong | crashed | safe trained | refused | wrong or crashed |",
            "|---" * 7 + "|",
            *(_slice(name, pair) for name, pair in pairs.items() if "slice" in pair),
            "",
            *_absent(pairs),
            "## Missing upstream features",
            "",
            "Tests that were skipped, with the reasons:",
            "",
            *(line for name, pair in pairs.items() for line in _skips(name, pair)),
            "## Tests outside the core tests",
            "",
            *(f"- `{name}`: {why}" for name, why in measured["not_core"].items()),
            "- tests marked `slow`, `matrix` or `gpu`",
            "",
            "*Made from `benchmarks/results/compat.json`, which `make compat` writes, by `make docs`. "
            f"{measured['machine']}; Python {', '.join(pythons)}.*",
            "",
        ]
    )  # fmt: skip


def _columns(pairs: dict[str, dict[str, Any]]) -> list[str]:
    """A table with a column for each pair, which fits narrow pages."""
    lines = ["| | " + " | ".join(pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for package in SHOWN:
        numbers = (pair["versions"][package] for pair in pairs.values())
        lines.append(f"| {TITLES.get(package, package)} | " + " | ".join(numbers) + " |")
    lines.append("| tested | " + " | ".join(pair.get("date", "date not recorded") for pair in pairs.values()) + " |")
    for count in ("passed", "failed"):
        numbers = (f"{pair['core'][count]:,}" for pair in pairs.values())
        lines.append(f"| tests {count} | " + " | ".join(numbers) + " |")
    return lines


def _builds(pairs: dict[str, dict[str, Any]]) -> list[str]:
    """Says which torch has code for GPUs, if one has."""
    if all(pair["versions"]["torch"].endswith("+cpu") for pair in pairs.values()):
        return []
    return ["A torch without `+cpu` is the build for CUDA.", ""]


def _failures(name: str, pair: dict[str, Any]) -> list[str]:
    failures, again = pair["core"]["failures"], pair["core"].get("again", 0)
    if again and not failures:
        return [f"In `{name}`, {again} of these tests were run again after a fix.", ""]
    if not failures:
        return []
    return [f"Failed in `{name}`:", "", *(f"- `{failure}`" for failure in failures), ""]


def _slice(name: str, pair: dict[str, Any]) -> str:
    stock, safe = pair["slice"]["stock"], pair["slice"]["safe"]
    numbers = [
        *(stock.get(name, 0) for name in OUTCOMES[:3]),
        safe.get("trained", 0),
        safe.get("refused", 0),
        safe.get("wrong", 0) + safe.get("crashed", 0),
    ]
    return "| " + " | ".join([name, *map(str, numbers)]) + " |"


def _absent(pairs: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, pair in pairs.items():
        absent = pair.get("slice", {}).get("absent", {})
        for why in sorted(set(absent.values())):
            families = [family for family, reason in absent.items() if reason == why]
            lines.append(f"- `{name}`: without {', '.join(families)} ({why}).")
    return [*lines, ""] if lines else []


def _skips(name: str, pair: dict[str, Any]) -> list[str]:
    skips = pair.get("core", {}).get("skips", {})
    if not skips:
        return []
    return [f"`{name}`:", "", *(f"- {why}: {count}" for why, count in skips.items()), ""]

"""Writes the page of tested versions, from `benchmarks/results/compat.json`, which `make compat` writes."""

import json
from pathlib import Path
from typing import Any


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "compat.json"
SHOWN = ("trl", "transformers", "peft", "accelerate", "bitsandbytes", "datasets")
OUTCOMES = ("trained", "wrong", "crashed", "refused")


def page(measured: dict[str, Any] | None = None) -> str:
    """Returns `versions.md`.

    Args:
        measured: The results; by default the committed ones.
    """
    measured = json.loads(RESULT.read_text(encoding="utf-8")) if measured is None else measured
    pairs = {name: pair for name, pair in measured["pairs"].items() if "core" in pair}
    others = sorted({(pair["versions"]["python"], pair["versions"]["torch"]) for pair in pairs.values()})
    return "\n".join(
        [
            "# Versions",
            "",
            "Supported: TRL 0.29 to below 2, transformers 4.57 to below 6. Importing a trainer with other versions",
            "fails with the supported range and the command to run.",
            "",
            "Each column is an environment from the package index, in which the core tests were run:",
            "",
            *_columns(list(pairs.values())),
            "",
            *(line for pair in pairs.values() for line in _failures(pair)),
            "Versions in between are accepted, but were not tested. The oldest pair has the oldest PEFT,",
            "accelerate and datasets that the package accepts, and a newer bitsandbytes: on a CPU, 0.46.1 does not",
            "support fp4, and 0.47.0 rounds the inputs of 8-bit layers in training.",
            "",
            "## Comparison with stock TRL",
            "",
            "A part of the [comparison](evidence.md), in number of combinations. *Wrong* trains something else, "
            "silently.",
            "Pairs that are not in the table were not run.",
            "",
            "| TRL | stock trained | wrong | crashed | safe trained | refused | wrong or crashed |",
            "|---" * 7 + "|",
            *(_slice(pair) for pair in pairs.values() if "slice" in pair),
            "",
            *_absent(pairs),
            "## Missing upstream features",
            "",
            "Tests that were skipped, with the reasons:",
            "",
            *(line for pair in pairs.values() for line in _skips(pair)),
            "## Tests outside the core tests",
            "",
            *(f"- `{name}`: {why}" for name, why in measured["not_core"].items()),
            "- tests marked `slow`, `matrix` or `gpu`",
            "",
            "*Made from `benchmarks/results/compat.json`, which `make compat` writes, by `make docs`. "
            f"{measured['machine']}; "
            + "; ".join(f"Python {python}, torch {torch}" for python, torch in others) + ".*",
            "",
        ]
    )  # fmt: skip


def _name(pair: dict[str, Any]) -> str:
    return f"TRL {pair['versions']['trl']}, transformers {pair['versions']['transformers']}"


def _columns(pairs: list[dict[str, Any]]) -> list[str]:
    """A table with a column for each pair, which fits narrow pages."""
    lines = [
        "| | " + " | ".join(f"TRL {pair['versions']['trl']}" for pair in pairs) + " |",
        "|---" * (len(pairs) + 1) + "|",
    ]
    for package in SHOWN[1:]:
        lines.append(f"| {package} | " + " | ".join(pair["versions"][package] for pair in pairs) + " |")
    for count in ("passed", "failed"):
        lines.append(f"| tests {count} | " + " | ".join(f"{pair['core'][count]:,}" for pair in pairs) + " |")
    return lines


def _failures(pair: dict[str, Any]) -> list[str]:
    failures, again = pair["core"]["failures"], pair["core"].get("again", 0)
    if again and not failures:
        return [f"With {_name(pair)}, {again} of these tests were run again after a fix.", ""]
    if not failures:
        return []
    return [f"Failed with {_name(pair)}:", "", *(f"- `{failure}`" for failure in failures), ""]


def _slice(pair: dict[str, Any]) -> str:
    part, versions = pair["slice"], pair["versions"]
    stock, safe = part["stock"], part["safe"]
    numbers = [
        *(stock.get(name, 0) for name in OUTCOMES[:3]),
        safe.get("trained", 0),
        safe.get("refused", 0),
        safe.get("wrong", 0) + safe.get("crashed", 0),
    ]
    return "| " + " | ".join([versions["trl"], *map(str, numbers)]) + " |"


def _absent(pairs: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for pair in pairs.values():
        for why in sorted(set(pair.get("slice", {}).get("absent", {}).values())):
            names = [name for name, reason in pair["slice"]["absent"].items() if reason == why]
            lines.append(f"- {_name(pair)}: without {', '.join(names)} ({why}).")
    return [*lines, ""] if lines else []


def _skips(pair: dict[str, Any]) -> list[str]:
    skips = pair.get("core", {}).get("skips", {})
    if not skips:
        return []
    return [f"{_name(pair)}:", "", *(f"- {why}: {count}" for why, count in skips.items()), ""]

"""Writes the page with one row for each trainer of TRL, from the results of `make bench-trainers`."""

import json
from pathlib import Path
from typing import Any

from results import versions_of


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "trainers.json"
AREAS = {
    "media": "images, audio",
    "boundaries": "boundaries",
    "adapters": "adapters",
    "rollout": "rollout",
    "buffer": "buffer",
}
HOOKS = {"media": "inputs", "adapters": "adapters", "rollout": "rollout", "buffer": "buffer"}
STABLE = "trainer."

WHY = {
    "media": "the class prepares its batches itself, without the `_prepare_inputs` of `Trainer`",
    "rollout": "the class generates, but not in `_generate_single_turn`",
    "buffer": "the class generates, but not in `_generate_and_score_completions`",
}
"""Why an area is not covered."""


def trainers_page() -> str:
    """Returns `trainers.md`."""
    measured = json.loads(RESULT.read_text(encoding="utf-8"))
    stable = [row for row in measured["rows"] if row["name"].startswith(STABLE)]
    others = [row for row in measured["rows"] if not row["name"].startswith(STABLE)]
    differing = [f"`{row['class']}`" for row in stable if "bf16" in row and len(set(row["bf16"])) > 1]
    lines = [
        "# Trainers",
        "",
        "Each trainer of TRL, and what is covered by the class that this package has or that two lines make:",
        "",
        "```python",
        "from dataclasses import dataclass",
        "",
        "from safe_trainers import PrecisionArguments, PrecisionBase, PrecisionMixin",
        "from trl.experimental.cpo import CPOConfig, CPOTrainer",
        "",
        "",
        "class SafeCPOTrainer(PrecisionMixin, CPOTrainer, PrecisionBase): ...",
        "",
        "",
        "@dataclass",
        "class SafeCPOConfig(PrecisionArguments, CPOConfig): ...",
        "```",
        "",
        "Each trainer trains a tiny text model for two steps, stock and safe: in float32, and with `bf16=True` on "
        "float32",
        "weights.",
        "",
        "- same bits: losses and trained weights in float32 are those of stock.",
        "- bf16: the dtype that the model computes in during training with `bf16=True`: stock, safe.",
        "- Areas: yes, no, or – if the class does not need it. A number is how often the hook of the area fired in",
        "  the float32 run. The hook of images and audio does not fire for a text model.",
        "",
        "## Stable trainers",
        "",
        *_table(stable),
        "",
        "The classes are `SafeGRPOTrainer` and so on. `SafeKTOTrainer` needs TRL 1.8, `SafeDistillationTrainer` TRL",
        "1.10; in older releases asking for them is an error that names the release.",
        "",
        f"{' and '.join(differing)} of stock TRL computes in float32 under `bf16=True`: TRL calls the loss in place",
        "of the forward pass that accelerate runs under autocast, so that only rollouts compute in bfloat16. The safe",
        "class runs the loss under autocast.",
        "",
        "## Experimental trainers",
        "",
        *_table(others),
        "",
        "What is not covered computes as in stock TRL:",
        "",
        *(f"- {AREAS[area]}: {why}." for area, why in WHY.items()),
        "",
        "CPO and ORPO generate only for logs of evaluations.",
        "",
        "## Trainers that are not trained here",
        "",
        "Neither stock nor the safe class trains on a machine without a GPU:",
        "",
        *(f"- `{row['class']}`: {row['missing']}." for row in others if "missing" in row),
        "",
        "*Made from `benchmarks/results/trainers.json`, which `make bench-trainers` writes, by `make docs`;",
        f"{versions_of(measured)}; {measured['machine']}.*",
        "",
    ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["trainer", "trains here", "same bits", "bf16: stock, safe", *AREAS.values()]
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    trained = "missing" not in row
    words = {"covered": "yes", "not covered": "no", "not applicable": "–"}
    areas = []
    for area in AREAS:
        state = row["contract"][area]
        fired = row.get("fired", {}).get(HOOKS.get(area, ""), 0)
        areas.append(f"{words[state]}, {fired}" if state == "covered" and fired else words[state])
    made = "[no](#trainers-that-are-not-trained-here)"
    same = ("yes" if row["same"] else "no") if trained else "–"
    module = row["name"].partition(".")[0]
    name = row["class"] if row["name"].startswith(STABLE) else f"{module}.{row['class']}"
    return [f"`{name}`", "yes" if trained else made, same, ", ".join(row.get("bf16", ["–"])), *areas]

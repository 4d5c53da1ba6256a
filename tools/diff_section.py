"""The table of `docs/diff.md`, from the results of `benchmarks/diff_faults.py`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "diff_faults.json"


def section() -> str:
    """Returns the text between the markers."""
    content = json.loads(RESULT.read_text(encoding="utf-8"))
    faults, clean, times = content["faults"], content["clean"], content["time"]
    right, total = (
        Counter(row["expected"][1] for row in rows) for rows in ([r for r in faults if r["right"]], faults)
    )
    equal = sum(row["equal"] for row in clean)
    held_out = content["held_out"]
    lines = [
        f"{len(faults)} faults were planted into one of two runs of two steps, with text models, vision-language",
        f"models, LoRA, SFT, GRPO and DPO: module and cause are right for {sum(right.values())}.",
        f"Of {len(clean)} pairs without a fault, {equal} have no difference beyond noise.",
        "The comparison was developed on these faults.",
        f"Another {len(held_out)} faults were written when the comparison was finished, and run once: right for",
        f"{sum(row['right'] for row in held_out)}.",
        "",
        "| cause | faults | module and cause right |",
        "|---|---:|---:|",
        *(f"| {cause} | {count} | {right[cause]} |" for cause, count in total.items()),
        "",
        "| recorded step on one CPU core | ms | recorded, ms | ratio | largest file, KB |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['trainer'].upper()}, {row['layers']} layer{'s' * (row['layers'] > 1)} of width {row['width']}, "
        f"{row['words']} words a sequence "
        f"| {row['step_ms']:.0f} | {row['recorded_ms']:.0f} | {row['ratio']:.2f} | {row['largest_bytes'] / 1e3:.0f} |"
        for row in times
    ]
    wrong = [row for row in (*faults, *held_out) if not row["right"]]
    lines += [
        "",
        *(
            f"Not right: {row['fault']}. Found: {row['module']}, {row['cause']}. Expected: {_expected(row)}."
            for row in wrong
        ),
    ]
    return "\n".join([*lines, "", f"Made by `make bench-diff`, torch {content['versions']['torch']}."])


def _expected(row: dict[str, Any]) -> str:
    """The module and the cause that a fault must be named with."""
    module, cause = row["expected"]
    return f"{'the whole model' if module.startswith('^$') else module}, {cause}"

"""The page of how the package's own work grows, made from `benchmarks/results/growth.json`."""

import json
from pathlib import Path
from typing import Any


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "growth.json"
LINEAR = 1.1
"""The largest exponent that is called linear."""
WHAT = {
    "census": "counts the dtypes of a model, several times in a construction",
    "policy": "decides from what was counted",
    "decisions on trainables": "what each trainable is held in, and what it is brought to",
    "fp32_modules, all norms": "`fp32_modules=['*norm*']`, found and decided on",
    "boundaries": "hooks on the leaves of the tower",
    "adapter guard": "around the construction of a quantised model with adapters",
    "inventory": "what the report counts",
    "report": "counted, made and written as JSON, of a real trainer",
    "cast of one tensor": "float32 pictures of 336 x 336 to bfloat16",
    "cast of a list of tensors": "the same as one tensor for each picture",
    "decision on a first batch, of 32 x 32": "once a run: the tower on both dtypes, compared bit by bit",
}


def read() -> dict[str, Any]:
    """What was measured."""
    measured: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return measured


def growth_page() -> str:
    """The page, as it is written to `growth.md`."""
    measured = read()
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    parts = [*measured["tensors"].values(), *measured["images"].values()]
    steepest = max(part[of]["exponent"] for part in parts for of in ("time", "memory"))
    verdict = "Nothing grows faster than linearly" if steepest <= LINEAR else "**Not everything grows linearly**"
    lines = [
        "# How it grows",
        "",
        "Made from `benchmarks/results/growth.json`, which `make bench-growth` measures, by `make docs`.",
        f"`{measured['command']}`; {versions}; {measured['machine']}; CPU time, the median of",
        f"{measured['repetitions']}; {measured['cpu_minutes']} minutes in all.",
        "",
        f"{verdict}: the largest exponent of time or memory over size is {steepest:.2f}. Each row was measured at",
        "five sizes. *constant* and *fixed* are the line fixed + constant x size through the medians, nearest in",
        "relative error; *exponent* is the slope of the logarithms, below 1 where the fixed part shows. Memory is the",
        "peak during the work, beyond what was held before it.",
        "",
        "`tests/test_growth.py` counts the operations of each row: linear to within three in a thousand.",
        "Where an exponent of time is a little above 1, one and the same operation takes longer on a large model,",
        "presumably because its objects fit into no cache.",
        "",
        "## With the tensors of a model",
        "",
        "A LLaVA with as many layers as it takes, half of its tensors in the tower, bfloat16, LoRA in the text model;",
        "on the meta device, the report of a real trainer on the CPU. The size of a tensor plays no part: none is",
        "read. A model of 7 billion parameters with LoRA on all its layers has about 700 tensors; one of 48 layers",
        "with 128 experts each, not fused, about 19,000.",
        "",
        *_table(measured["tensors"], "tensor"),
        "",
        "## With the images of a batch",
        "",
        "Memory is that of tensors. What a cast keeps is half of what it was given, which can go then. Its time is",
        "that of writing to fresh pages; small batches, for which the allocator hands out used ones, take less.",
        "",
        *_table(measured["images"], "image"),
        "",
        "The decision runs the tower, so that its constant is the tower's: here a tiny one.",
        "",
        "Not measured: GPUs, where a cast is a kernel and moving half the bytes is what counts; tensors that an",
        "engine shards.",
        "",
    ]
    return "\n".join(lines)


def _table(parts: dict[str, Any], unit: str) -> list[str]:
    lines = [
        f"| what | constant, us per {unit} | fixed, ms | exponent | bytes per {unit} | exponent | at the largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        time, memory = part["time"], part["memory"]
        lines.append(
            f"| {name}: {WHAT[name]} | {_number(time['constant'] * 1e6)} | {_number(time['fixed'] * 1e3)} "
            f"| {time['exponent']:.2f} | {_number(memory['constant'])} | {memory['exponent']:.2f} "
            f"| {_number(part['seconds'][-1] * 1e3)} ms at {part['sizes'][-1]:,} |"
        )
    return lines


def _number(value: float) -> str:
    """A number with three significant digits, zero where it is none or a fit's rounding."""
    if value < 0.005:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""Writes the page about the growth of the package's own work, from `benchmarks/results/growth.json`."""

import json
from pathlib import Path
from typing import Any


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "growth.json"
LINEAR = 1.1
"""The largest final exponent of time, and exponent of memory, that count as linear."""
WHAT = {
    "inventory": "counts the dtypes of a model, several times in a construction",
    "policy": "is resolved from the inventory",
    "trainable weights": "the dtype of each is decided and set",
    "fp32_modules, all norms": "`fp32_modules=['*norm*']` is matched and planned",
    "boundaries": "hooks on the layers of the tower",
    "adapter guard": "protects the adapters of a quantised model during construction",
    "module groups": "the counts of the report",
    "report": "is counted, made and written as JSON for a trainer",
    "cast of one tensor": "float32 images of 336 x 336 to bfloat16",
    "cast of a list of tensors": "the same with one tensor for each image",
    "decision on the first batch, 32 x 32": "once per run, the outputs of the tower for both dtypes are compared",
}


def read() -> dict[str, Any]:
    """Reads the committed results."""
    measured: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return measured


def steepest(measured: dict[str, Any]) -> float:
    """The largest exponent of those to which the limit applies."""
    parts = [*measured["tensors"].values(), *measured["images"].values()]
    return max(max(part["time"]["final"], part["memory"]["exponent"]) for part in parts)


def growth_page() -> str:
    """Returns `growth.md`."""
    measured = read()
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    largest = steepest(measured)
    verdict = "Work grows at most linearly" if largest <= LINEAR else "**Not everything grows linearly**"
    name, least, most = _slower(measured["tensors"])
    ((control, walk),) = measured["control"].items()
    _, least_of_walk, most_of_walk = _slower(measured["control"])
    over = [part["time"]["exponent"] for part in measured["tensors"].values() if part["time"]["exponent"] >= LINEAR]
    lines = [
        "# Growth with tensors and images",
        "",
        f"{verdict}: the largest final exponent of time, or exponent of memory, is {largest:.2f}. *exponent* is the "
        "slope of log(time)",
        "over log(size). *final* is the slope over the sizes from a quarter of the largest on, where a part that "
        "grows faster than",
        "linearly shows most. *constant* and *fixed* are fitted to fixed + constant x size by relative error; an "
        "exponent is below 1 if",
        "the fixed part is significant. Memory is the peak during the work, without the memory in use before it.",
        "",
        f"The limit of {LINEAR} is for *final*. Over all sizes, {len(over)} of {len(measured['tensors'])} exponents "
        "of time for tensors are above it. The time per tensor rises by a",
        f"factor of at most {most / least:.2f}: {name} takes {least * 1e6:.1f} us at least, and {most * 1e6:.1f} us "
        "at the largest size. `tests/test_growth.py`",
        "counts the operations of each row, which are linear within 0.3 %, so that the same operations take longer "
        "on a larger model.",
        f"So does {control}, a walk without code of this package: {least_of_walk * 1e6:.2f} to "
        f"{most_of_walk * 1e6:.2f} us (a factor of {most_of_walk / least_of_walk:.2f}, exponent",
        f"{walk['time']['exponent']:.2f}, final {walk['time']['final']:.2f}). The cause is probably that the objects "
        "of a large model do not fit into the caches of the CPU.",
        "",
        "## Tensors of a model",
        "",
        "The model is a bfloat16 LLaVA with many layers, half of its tensors in the tower, and LoRA in the text",
        "model. It is on the meta device, except for the report of a trainer on the CPU. The size of tensors has no",
        "influence, because their values are not read. A model of 7 billion parameters with LoRA on all layers has",
        "about 700 tensors; a model of 48 layers with 128 separate experts each has about 19,000.",
        "",
        *_table(measured["tensors"], "tensor"),
        "",
        "## Images of a batch",
        "",
        "Memory is tensor memory. The result of a cast takes half the memory of its input, which can then be freed.",
        "The time of a cast is that of writing to new pages; small batches, which can reuse pages, take less.",
        "",
        *_table(measured["images"], "image"),
        "",
        "The decision on the first batch runs the tower, here a tiny one.",
        "",
        "GPUs and sharded tensors were not measured.",
        "",
        "*Made from `benchmarks/results/growth.json`, which `make bench-growth` writes, by `make docs`.",
        f"`{measured['command']}`; {versions}; {measured['machine']}; CPU time, the median of",
        f"{measured['repetitions']}; {measured['cpu_minutes']} minutes in total.*",
        "",
    ]
    return "\n".join(lines)


def _slower(parts: dict[str, Any]) -> tuple[str, float, float]:
    """The part whose time per tensor rises most, with its least time and that at the largest size, in seconds."""
    found = []
    for name, part in parts.items():
        each = [seconds / size for seconds, size in zip(part["seconds"], part["sizes"], strict=True)]
        found.append((each[-1] / min(each), name, min(each), each[-1]))
    return max(found)[1:]


def _table(parts: dict[str, Any], unit: str) -> list[str]:
    lines = [
        f"| work | constant, us per {unit} | fixed, ms | exponent | final | bytes per {unit} | exponent "
        "| at the largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        time, memory = part["time"], part["memory"]
        lines.append(
            f"| {name}: {WHAT[name]} | {_number(time['constant'] * 1e6)} | {_number(time['fixed'] * 1e3)} "
            f"| {time['exponent']:.2f} | {time['final']:.2f} "
            f"| {_number(memory['constant'])} | {memory['exponent']:.2f} "
            f"| {_number(part['seconds'][-1] * 1e3)} ms at {part['sizes'][-1]:,} |"
        )
    return lines


def _number(value: float) -> str:
    """A number with three significant digits; values below 0.005 are rounding errors of the fit and become 0."""
    if value < 0.005:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

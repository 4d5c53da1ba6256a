"""Writes the section of the evidence page about cost, from `benchmarks/results/cost.json`."""

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cost.json"
MISMATCH = ROOT / "benchmarks" / "results" / "mismatch.json"
LIMITS = {"step": 1.01, "peak": 1.00, "media": 0.50, "construction": 1.05}
"""The targets: medians, rounded to two digits, should not exceed these."""
WORDS = {
    "step": "CPU time of a step",
    "construction": "CPU time of construction",
    "peak": "peak tensor memory",
    "media": "bytes of buffered media",
    "moved": "bytes of batches moved to the device, per step",
    "time": "CPU time",
    "resident": "peak resident memory",
    "drift": "largest change of the base in 100 syncs",
}


def read() -> dict[str, Any]:
    """Reads the committed results."""
    content: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return content


def median(value: Mapping[str, Any]) -> float:
    """The median ratio of a figure."""
    return float(statistics.median(value["ratios"]))


def spread(value: Mapping[str, Any]) -> str:
    """A figure, with its range if it was timed."""
    ratios = value["ratios"]
    more = f", {value['more'] * 1e3:+.1f} ms" if "more" in value else ""
    return f"{median(value):.3f}" + (f" ({min(ratios):.3f} to {max(ratios):.3f}{more})" if len(ratios) > 1 else "")


def section() -> list[str]:
    """Returns the lines of the section."""
    measured = read()
    minutes = sum(measured["minutes"].values())
    parts, versions = measured["sections"], ", ".join(f"{p} {v}" for p, v in measured["versions"].items())
    return [
        "## What it costs",
        "",
        "Generated from `benchmarks/results/cost.json`, which `make bench` writes. `make bench-check` measures again,",
        "and fails if a median of times is outside the committed range by more than 0.02, or if bytes differ.",
        f"`{measured['command']}` ({minutes:.0f} minutes); {versions}; {measured['machine']}.",
        "",
        "Figures are ratios of safe over stock: the median of several comparisons, with the smallest and the largest.",
        "Times are CPU times of one thread. For steps, both trainers run in turns in one process, and a comparison is",
        "the median over the pairs of steps; the additional time per step is given in milliseconds. For",
        "constructions, it is the fastest of five each. Bytes are exact. Both sides use bfloat16 weights,",
        "`bf16=True`, TRL's plain config and all metrics. The medians of single steps do not include the optimizer",
        "metrics, which take 0.7 ms in every fifth step, and a log, which takes 0.4 ms.",
        "",
        *_limits(parts),
        "",
        "### By trainer",
        "",
        *_table(parts["cells"], "family, trainer, kind"),
        "",
        "### Optional parts",
        "",
        "Most of the additional time of a GRPO step is spent on the metrics of the rollout. Sampling under the",
        "autocast of the loss takes almost no time. The rest is spent on the hooks of dtype boundaries, on casts of",
        "media, and on the detection of skipped steps.",
        "",
        *_table(parts["switches"], "GRPO, LoRA"),
        "",
        "### Growth",
        "",
        "![step time, peak memory and buffered media by images, steps, tokens and width](cost.svg)",
        "",
        *(line for name, points in parts["growth"].items() for line in (*_table(points, name), "")),
        "### Weight sync, import, whole processes",
        "",
        "Before TRL sends the weights of a model with adapters to vLLM, it merges and unmerges the adapters in place;",
        "the safe trainers merge copies. The model has two bfloat16 blocks with seven adapted layers each.",
        "",
        *_table(
            {**parts["sync"], **_named("import of ", parts["import"]), **_named("process: ", parts["process"])}, "what"
        ),
        "",
        *_metrics(),
    ]


def _named(prefix: str, part: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in part.items()}


def _limits(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table of targets, with the worst and the largest measurements."""
    yield "| quantity | target | worst of the trainers below | at the largest size of each series |"
    yield "|---|---|---|---|"
    for name, limit in LIMITS.items():
        medians = {cell: median(found[name]) for cell, found in parts["cells"].items() if name in found}
        worst = max(medians, key=medians.__getitem__)
        missed = sum(round(value, 2) > limit for value in medians.values())
        ends = [list(points.values())[-1] for points in parts["growth"].values()]
        large = ", ".join(f"{median(end[name]):.3f}" for end in ends if name in end)
        held = "met by all" if not missed else f"missed by {missed} of {len(medians)}"
        yield f"| {WORDS[name]} | {limit:.2f} | {medians[worst]:.3f} ({worst}); {held} | {large} |"
    yield f"| CPU time of import | 1.10 | {spread(parts['import']['two trainers']['time'])} | |"
    alone = [found["peak"]["stock"] / 1e6 for found in parts["cells"].values()]
    most = max((median(f["peak"]) - 1) * f["peak"]["stock"] for f in parts["cells"].values())
    steps = [f["step"]["stock"] * 1e3 for f in parts["cells"].values()]
    more = {
        task: [f["step"]["more"] * 1e3 for cell, f in parts["cells"].items() if f" {task} " in cell]
        for task in ("sft", "grpo")
    }
    yield ""
    yield from textwrap.wrap(
        f"The models of the first column use {min(alone):.0f} to {max(alone):.0f} MB at their peak and take "
        f"{min(steps):.0f} to {max(steps):.0f} ms per step, so that constant costs dominate. A step of SFT takes "
        f"{min(more['sft']):.1f} to {max(more['sft']):.1f} ms more than stock, a step of GRPO {min(more['grpo']):.1f} "
        f"to {max(more['grpo']):.1f} ms. Little of this grows with the model or the batch: it is one percent of steps "
        f"of {max(more['sft']) / 10:.2f} and {max(more['grpo']) / 10:.2f} seconds. The sample of the optimizer "
        f"metrics takes {most / 1e3:.0f} kB for any size of the model. Construction reads the dtype of each tensor a "
        "few times, which [takes about 0.01 ms per tensor](growth.md). If weights are trained in half precision, it "
        "also counts the updates that would be lost: a tenth of a construction of 50 ms, and little if loading takes "
        "seconds. The last column has the ratios of larger, but still small, runs.",
        width=110,
    )


def _table(points: Mapping[str, Any], heading: str) -> Iterator[str]:
    """Yields a table with a row for each point and a column for each measured quantity."""
    names = [name for name in WORDS if any(name in found for found in points.values())]
    yield f"| {heading} | " + " | ".join(WORDS[name] for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for point, found in points.items():
        yield f"| {point} | " + " | ".join(spread(found[n]) if n in found else "" for n in names) + " |"


def _metrics() -> list[str]:
    cost = json.loads(MISMATCH.read_text(encoding="utf-8"))["cost"]
    return [
        "### Metrics",
        "",
        f"A step of the tiny recipe takes {cost['milliseconds']:.0f} ms of CPU time, of which the `precision/`",
        f"metrics take {cost['share']:.2%} ({cost['range'][0]:.2%} to {cost['range'][1]:.2%} in {cost['repetitions']}",
        "runs; see [mismatch by dtype](mismatch.md)). By module of the package:",
        "",
        "| module | share of a step |",
        "|---|---|",
        *(f"| `{name}` | {share:.3%} |" for name, share in cost["parts"].items()),
        "",
    ]


def draw(file: Path) -> None:
    """Draws how the ratios grow.

    Args:
        file: The file to write; its suffix selects the format.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    growth = read()["sections"]["growth"]
    with mpl.rc_context({"svg.hashsalt": "cost", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(11, 2.8), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (name, points) in zip(figure.subplots(1, len(growth), sharey=True), growth.items(), strict=True):
            x = [float(point) for point in points]
            for quantity, colour in (("step", "#0072b2"), ("peak", "#d55e00"), ("media", "#009e73")):
                if not all(quantity in found for found in points.values()):
                    continue
                axes.plot(x, [median(found[quantity]) for found in points.values()], "o-", color=colour,
                          label=WORDS[quantity], markersize=3)  # fmt: skip
                low, high = ([edge(found[quantity]["ratios"]) for found in points.values()] for edge in (min, max))
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.axhline(1, color="black", linewidth=0.5)
            axes.set(xscale="log", xlabel=name)
            axes.set_xticks(x, list(points))
            axes.minorticks_off()
        figure.axes[0].set_ylabel("safe / stock")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(file, metadata={"Date": None, "Creator": None})

"""The part of the evidence page about what the safe trainers cost, made from `benchmarks/results/cost.json`."""

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
"""What the medians should not exceed, to two digits."""
WORDS = {
    "step": "CPU time of a step",
    "construction": "CPU time of construction",
    "peak": "most bytes of tensors alive",
    "media": "bytes of buffered media",
    "moved": "bytes of batches moved to the device, per step",
    "time": "CPU time",
    "resident": "most resident memory",
    "drift": "largest change of the base in 100 syncs",
}


def read() -> dict[str, Any]:
    """The committed results."""
    content: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return content


def median(value: Mapping[str, Any]) -> float:
    """The median ratio of one figure."""
    return float(statistics.median(value["ratios"]))


def spread(value: Mapping[str, Any]) -> str:
    """A figure with its spread, where it was timed."""
    ratios = value["ratios"]
    more = f", {value['more'] * 1e3:+.1f} ms" if "more" in value else ""
    return f"{median(value):.3f}" + (f" ({min(ratios):.3f} to {max(ratios):.3f}{more})" if len(ratios) > 1 else "")


def section() -> list[str]:
    """The lines of the section."""
    measured = read()
    minutes = sum(measured["minutes"].values())
    parts, versions = measured["sections"], ", ".join(f"{p} {v}" for p, v in measured["versions"].items())
    return [
        "## What it costs",
        "",
        "Made from `benchmarks/results/cost.json`, which `make bench` measures; `make bench-check` measures again and",
        "fails where a median of times is outside the committed spread by more than two hundredths, or bytes differ.",
        f"`{measured['command']}` ({minutes:.0f} minutes); {versions}; {measured['machine']}.",
        "",
        "Ratios of safe over stock: the median of several comparisons, with the least and the largest. Times are",
        "CPU time of one thread. Of steps, both trainers take turns in one process, step by step, and a comparison",
        "is the median over the pairs; what a step takes more is given beside it. Of constructions, it is the",
        "fastest of five of each, by turns. Bytes are counted and exact. Both sides compute alike: bfloat16 weights,",
        "`bf16=True`, TRL's plain config, all metrics on. Not in the median of single steps: what the optimizer's",
        "metrics take in every fifth step, some 0.7 ms, and what a log takes, some 0.4 ms.",
        "",
        *_limits(parts),
        "",
        "### By trainer",
        "",
        *_table(parts["cells"], "family, trainer, kind"),
        "",
        "### What can be switched off",
        "",
        "Most of what a step of GRPO takes more goes to the metrics of its rollout. That it is sampled under the",
        "autocast of the loss, which is what makes sampler and trainer agree, takes next to nothing. The rest is",
        "hooks at the boundaries of towers, media that are cast by name, and the record of skipped steps.",
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
        "A sync is what TRL does with a model with adapters before it sends the weights to vLLM: merge and unmerge in",
        "place, against merging beside it; seven adapted layers in each of two blocks, bfloat16.",
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
    """What was aimed at, beside the worst and the largest that was measured."""
    yield "| what | aim | worst of the trainers below | at the largest size of each series |"
    yield "|---|---|---|---|"
    for name, limit in LIMITS.items():
        medians = {cell: median(found[name]) for cell, found in parts["cells"].items() if name in found}
        worst = max(medians, key=medians.__getitem__)
        missed = sum(round(value, 2) > limit for value in medians.values())
        ends = [list(points.values())[-1] for points in parts["growth"].values()]
        large = ", ".join(f"{median(end[name]):.3f}" for end in ends if name in end)
        held = "held in all" if not missed else f"missed in {missed} of {len(medians)}"
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
        f"The models of the first column hold {min(alone):.0f} to {max(alone):.0f} MB at their peak and take "
        f"{min(steps):.0f} to {max(steps):.0f} ms a step, so that what is constant shows most. A step of SFT takes "
        f"{min(more['sft']):.1f} to {max(more['sft']):.1f} ms more, one of GRPO {min(more['grpo']):.1f} to "
        f"{max(more['grpo']):.1f} ms, little of which grows with the model or the batch: a hundredth of a step that "
        f"takes {max(more['sft']) / 10:.2f} and {max(more['grpo']) / 10:.2f} seconds. The sample that the optimizer's "
        f"metrics look at takes {most / 1e3:.0f} kB, whatever the size of the model. Construction reads each tensor's "
        "dtype a few times, which [takes some hundredth of a millisecond a tensor](growth.md), and, where weights "
        "are trained in half precision, counts what updates would lose: a tenth where a model is made in 50 ms, and "
        "little where loading takes seconds. The last column is what is left of it in runs that are still small.",
        width=110,
    )


def _table(points: Mapping[str, Any], heading: str) -> Iterator[str]:
    """One row for each point, one column for each quantity that is known of any."""
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
        f"Of the CPU time of a step of the tiny recipe, {cost['milliseconds']:.0f} ms, {cost['share']:.2%} goes to",
        f"the `precision/` metrics ({cost['range'][0]:.2%} to {cost['range'][1]:.2%} in {cost['repetitions']} runs):",
        "[sampler and trainer, by dtype](mismatch.md). By the part of the package that it is spent in:",
        "",
        "| part | share of a step |",
        "|---|---|",
        *(f"| `{name}` | {share:.3%} |" for name, share in cost["parts"].items()),
        "",
    ]


def picture(file: Path) -> None:
    """Draws how the ratios grow.

    Args:
        file: Where to; its suffix decides the format.
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

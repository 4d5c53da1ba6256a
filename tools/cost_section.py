"""Writes the pages about cost, from `benchmarks/results/cost.json` and `growth.json`."""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import figures
import growth_page


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


def with_defaults(points: Mapping[str, Any]) -> dict[str, Any]:
    """The points of a section that were measured without other settings."""
    return {name: found for name, found in points.items() if ", " not in name}


def _between(ratios: list[float]) -> str:
    """The least and the largest of some ratios, or the only one."""
    ends = [f"{end:.2f}" for end in (min(ratios), max(ratios))]
    return " to ".join(dict.fromkeys(ends))


def page() -> str:
    """Returns `cost.md`: the cost in short."""
    measured = read()
    parts = measured["sections"]
    cells = parts["cells"]
    steps = [median(found["step"]) for found in cells.values()]
    more = {
        task: [found["step"]["more"] * 1e3 for cell, found in cells.items() if f" {task} " in cell]
        for task in ("sft", "grpo")
    }  # fmt: skip
    took = [found["step"]["stock"] * 1e3 for found in cells.values()]
    large = [median(list(points.values())[-1]["step"]) for points in parts["growth"].values()]
    rolled = [median(found["step"]) for found in with_defaults(parts["rollouts"]).values()]
    built = [found["construction"] for found in cells.values()]
    given = [median(found["step"]) for name, found in parts["switches"].items() if name.endswith("default")]
    without = [median(found["step"]) for name, found in parts["switches"].items() if "precision_metrics" in name]
    media = [median(found["media"]) for found in cells.values() if "media" in found]
    growth = growth_page.read()
    steepest = growth_page.steepest(growth)
    refused = {reason for found in parts["images"].values() for reason in found["refused"]}
    always = {name.partition(",")[0]: found["computed"] for name, found in parts["images"].items() if "," in name}
    fewest = all(parts["images"][name]["computed"] <= computed for name, computed in always.items())
    shares = "once for equal images" if fewest else "several times for each distinct image"
    if refused:
        shares = f"on all images ({'; '.join(sorted(refused))})"
    return (
        "\n".join(
            [
                "# Cost",
                "",
                f"A step takes {min(steps):.2f} to {max(steps):.2f} times the CPU time of stock TRL on toy models, "
                "whose steps take",
                f"{min(took):.0f} to {max(took):.0f} ms: {min(more['sft']):.1f} to {max(more['sft']):.1f} ms more for "
                "SFT, "
                f"{min(more['grpo']):.1f} to",
                f"{max(more['grpo']):.1f} ms for GRPO. Little of this grows with the model: at the largest size of "
                "each series the ratio is",
                f"{min(large):.2f} to {max(large):.2f}, and in the rollouts below {min(rolled):.2f} to "
                f"{max(rolled):.2f}. Buffered images and audio take {max(media):.1f} of the bytes.",
                "",
                *figures.embed(
                    "cost.svg",
                    "The ratio of safe-trainers over stock TRL approaches 1 as a run grows. Upper row: CPU time of "
                    "a step, with the "
                    "range of the measurements. Lower row: peak tensor memory and bytes of buffered media.",
                    described="Ratios of time, memory and bytes by size, in six series.",
                ),
                "",
                "## Rollouts of larger models",
                "",
                "Stock TRL rolls out in the dtype of the weights, and the safe trainers in that of training. With "
                "float32",
                "weights and `bf16=True` this saves time on models that are not tiny. Casts of frozen weights, and "
                "dequantised 4-bit",
                "weights, are kept for a whole rollout, in memory that is free (`keep_frozen_casts`). It saves less, "
                "or costs time, where",
                "a layer takes less time than its casts, and for long",
                "completions on a CPU, because torch's CPU attention of one query to 512 keys takes about seven "
                "times as long in",
                'bfloat16 as in float32; `rollout_compute="stock"` avoids it. Eight completions of each prompt:',
                "",
                *_rollouts(parts["rollouts"], parts["images"]),
                "",
                "By default, a tower runs once for equal images if no gradient flows into it and the features are "
                "then bit-identical, which",
                f"depends on the kernels of a CPU. Here, by default, it ran {shares}.",
                'With `share_media_features="always"` features may differ in their last bits. The last column counts '
                "the images of calls without a",
                "gradient into the tower.",
                "",
                "## The time of your run",
                "",
                "`profile: true` in a recipe, `--profile true` of a training command, or `profile=True` in a Safe "
                "config measures",
                "each phase of a step: `profile/...` in the log is in seconds per optimizer step, and the table at "
                "the end is in",
                "`profile.json` too. On a GPU, each change of phase waits for the device. `safe_trainers` is the "
                "work of this package",
                "outside the model; casts inside the model count in the phase in which they run. "
                "[Measured shares](evidence.md#the-time-of-a-step).",
                "",
                "## What takes the time",
                "",
                "| part | share | to leave it out |",
                "|---|---|---|",
                f"| metrics of the rollout | GRPO steps take {_between(given)} of stock with them, and "
                f"{_between(without)} without | `precision_metrics=False` |",
                '| sampling under autocast | see above | `rollout_compute="stock"` |',
                "| casts at boundaries and of media, detection of skipped steps | the rest | – |",
                f"| construction | {min(map(median, built)):.2f} to {max(map(median, built)):.2f} of stock, about "
                "0.01 ms for each "
                "tensor | – |",
                f"| import | {median(parts['import']['two trainers']['time']):.2f} of stock | – |",
                "| trial with one sample image at construction | one forward pass, of one row in linear layers, "
                "more than half of what construction adds to a tiny vision-language model | `media_trial=False` |",
                "",
                "## Targets",
                "",
                *_limits(parts),
                "",
                "## How it grows",
                "",
                "The package's own work was measured up to 100,000 tensors and 1,000 images. Operations grow at "
                "most linearly; at the largest",
                f"sizes the largest exponent is {steepest:.2f}. [Growth](growth.md) has each part; a model "
                "of 7 billion parameters with LoRA has",
                "about 700 tensors.",
                "",
                "[All tables](cost_tables.md). These are times of CPUs; [on a GPU](gpu.md) has those of GPUs.",
                "",
                "*Made from `benchmarks/results/cost.json` and `growth.json` by `make docs`; `make bench-check` "
                "measures again and fails",
                "outside the committed range.*",
            ]
        )
        + "\n"
    )


def tables_page() -> str:
    """Returns `cost_tables.md`: every measurement of the cost."""
    measured = read()
    minutes = sum(measured["minutes"].values())
    parts, versions = measured["sections"], ", ".join(f"{p} {v}" for p, v in measured["versions"].items())
    lines = [
        "# Cost, all measurements",
        "",
        "Figures are ratios of safe over stock: the median of several comparisons, with the smallest and the "
        "largest. Times are CPU",
        "times of one thread. For steps, both trainers run in turns in one process, and a comparison is the median "
        "over the pairs",
        "of steps; the additional time per step is given in milliseconds. For constructions, it is the fastest of "
        "five each. Bytes",
        "are exact. Both sides use bfloat16 weights, `bf16=True`, TRL's plain config and all metrics. The medians "
        "of single steps",
        "do not include the optimizer metrics, which take 0.7 ms in every fifth step, and a log, which takes 0.4 ms.",
        "",
        "## By trainer",
        "",
        *_table(parts["cells"], "family, trainer, kind"),
        "",
        "## Rollouts of larger models",
        "",
        *_table(parts["rollouts"], "family, trainer, kind, weights, hidden size, new tokens"),
        "",
        "## Optional parts",
        "",
        *_table(parts["switches"], "GRPO, LoRA"),
        "",
        "## By size",
        "",
        *(line for name, points in parts["growth"].items() for line in (*_table(points, name), "")),
        "## Weight sync, import, whole processes",
        "",
        "Before TRL sends the weights of a model with adapters to vLLM, it merges and unmerges the adapters in "
        "place; the safe",
        "trainers merge copies. The model has two bfloat16 blocks with seven adapted layers each.",
        "",
        *_table(
            {**parts["sync"], **_named("import of ", parts["import"]), **_named("process: ", parts["process"])}, "what"
        ),
        "",
        *_metrics(),
        "*Made from `benchmarks/results/cost.json`, which `make bench` writes, by `make docs`. "
        f"`{measured['command']}`",
        f"({minutes:.0f} minutes); {versions}; {measured['machine']}.*",
    ]
    return "\n".join(lines) + "\n"


def _named(prefix: str, part: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in part.items()}


def _limits(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table of targets, with the worst and the largest measurements."""
    yield "| quantity | target | worst of the [trainers](cost_tables.md) | at the largest size of each series |"
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


def _table(points: Mapping[str, Any], heading: str) -> Iterator[str]:
    """Yields a table with a row for each point and a column for each measured quantity."""
    names = [name for name in WORDS if any(name in found for found in points.values())]
    yield f"| {heading} | " + " | ".join(WORDS[name] for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for point, found in points.items():
        yield f"| {point} | " + " | ".join(spread(found[n]) if n in found else "" for n in names) + " |"


def _rollouts(points: Mapping[str, Any], towers: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table of the steps of GRPO on models of real proportions."""
    yield (
        "| model, kind, weights, hidden size, new tokens | CPU time of a step | peak of tensor memory "
        "| images of the tower |"
    )
    yield "|---|---|---|---|"
    for point, found in points.items():
        name = point.replace(" grpo", "").replace(" tokens", "")
        images = towers.get(point)
        ran = f"{images['computed']} of {images['seen']}" if images else ""
        yield f"| {name} | {spread(found['step'])} | {median(found['peak']):.2f} | {ran} |"


def phases_table(points: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table of the share of each phase in a step."""
    phases = [
        phase
        for phase in next(iter(points.values()))["seconds"]
        if max(found["seconds"].get(phase, 0.0) / sum(found["seconds"].values()) for found in points.values()) >= 5e-4
    ]
    yield "| model, kind, weights, hidden size, new tokens | ms per step | " + " | ".join(phases) + " |"
    yield "|---" * (len(phases) + 2) + "|"
    for point, found in points.items():
        seconds, name = found["seconds"], point.replace(" grpo", "").removesuffix(" tokens")
        whole = sum(seconds.values())
        shares = " | ".join(f"{seconds.get(phase, 0.0) / whole:.1%}" for phase in phases)
        yield f"| {name} | {whole * 1e3:.0f} | {shares} |"


def _metrics() -> list[str]:
    cost = json.loads(MISMATCH.read_text(encoding="utf-8"))["cost"]
    return [
        "## Metrics",
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
    """Draws how the ratios change with the size of a run: time above, memory and bytes below.

    Args:
        file: The SVG to write.
    """
    growth = read()["sections"]["growth"]

    def panels(figure: Any) -> None:
        rows = figure.subplots(2, len(growth), sharey="row", sharex="col", height_ratios=[1.4, 1])
        for (upper, lower), (name, points) in zip(zip(*rows, strict=True), growth.items(), strict=True):
            x = [float(point) for point in points]
            for axes, quantity, colour, marker in (
                (upper, "step", figures.BLUE, "o"),
                (lower, "peak", figures.RED, "s"),
                (lower, "media", figures.GREEN, "^"),
            ):
                if not all(quantity in found for found in points.values()):
                    continue
                axes.plot(x, [median(found[quantity]) for found in points.values()], color=colour, marker=marker,
                          label=WORDS[quantity], markersize=4)  # fmt: skip
                low, high = ([edge(found[quantity]["ratios"]) for found in points.values()] for edge in (min, max))
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            for axes in (upper, lower):
                axes.axhline(1, color=figures.TEXT, linewidth=0.7, linestyle="--")
            upper.set(xscale="log", ylim=(0.9, 1.2))
            lower.set(xscale="log", ylim=(0.4, 1.1))
            lower.set_xlabel(name.replace(" per ", "\nper ").replace(", ", ",\n"))
            lower.set_xticks(x, list(points))
            lower.minorticks_off()
        rows[0][0].set_ylabel("safe / stock")
        rows[1][0].set_ylabel("safe / stock")
        labels = [axes.get_legend_handles_labels() for axes in (rows[0][0], rows[1][0])]
        handles, words = ([item for group in side for item in group] for side in zip(*labels, strict=True))
        figure.legend(handles, words, loc="outside upper center", ncols=3)

    figures.plot(file, panels, (10, 4.4))

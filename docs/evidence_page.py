"""The page of the matrix, and its picture, made from `benchmarks/results/matrix.jsonl`."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cost_section
import expected


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "matrix.jsonl"
COLOURS = {"trained": "#0072b2", "refused": "#f0e442", "wrong": "#e69f00", "crashed": "#d55e00"}
"""Blue, yellow, orange and vermilion of Okabe and Ito, which colour-blind readers tell apart."""
MODES = [(weights, flag) for weights in ("fp32", "bf16", "fp16") for flag in ("none", "bf16", "fp16")]


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The heading of the results and their rows."""
    heading, *rows = map(json.loads, RESULT.read_text(encoding="utf-8").splitlines())
    return heading, rows


def _specs() -> dict[str, Any]:
    """What the matrix knows of its families; the module imports neither torch nor transformers."""
    spec = importlib.util.spec_from_file_location("family_specs", ROOT / "benchmarks/families/specs.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("benchmarks/families/specs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["family_specs"] = module  # where dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["family_specs"]
    return {family: module.family_spec(family) for family in module.FAMILIES}


def _kind(message: str) -> str:
    """The part of an error that is the same in each cell."""
    if message.startswith("RuntimeError: Input type"):  # it names both types
        return "RuntimeError: Input type (torch.FloatTensor) and weight type (...) should be the same"
    return message.split(". ", maxsplit=1)[0][:140]


def _fault(fault: str) -> str:
    """A fault without its numbers and the names of modules."""
    if fault.startswith("adapters rounded"):
        return "adapters rounded to bfloat16, which loses most updates of the learning rate"
    if " computes in " in fault:
        return "a part computes in another dtype in the rollout than in scoring and training"
    if fault.startswith("log-probabilities"):
        return "log-probabilities off by more than the dtype allows"
    if "not finite" in fault:
        return "loss or gradient not finite"
    return fault


def page() -> str:
    """The page, as it is written to `evidence.md`."""
    heading, rows = read()
    versions = ", ".join(f"{package} {number}" for package, number in heading["versions"].items())
    lines = [
        "# Stock and safe, side by side",
        "",
        "What stock TRL does in the cells that users are in, what the safe trainers do there, and what it costs. Made",
        "by `make evidence` from what was measured and committed, in `benchmarks/results/`; `make bench-all` measures",
        "all of it again. Each section names its command, its versions and its machine.",
        "",
        "## The matrix",
        "",
        "Made from `benchmarks/results/matrix.jsonl`, which `make bench-matrix` measures.",
        f"`{heading['command']}`; {versions}; {heading['machine']}.",
        "",
        f"{len(rows)} cells of {len({row['family'] for row in rows})} families: trainer, weights, flag, full, LoRA or",
        "4-bit LoRA, with and without a reference. Chosen so that every pair of two axes' values occurs. Each is a",
        "real TRL trainer on a tiny real model, stock and safe in one process, two real steps, with TRL's plain",
        "config; under `fp16=True` with a real autocast and a loss scaler that refuses what CUDA's refuses.",
        "",
        "- **trained**: both steps, and nothing wrong was seen.",
        "- **refused**: stopped while it was built, with the line to write. Each line was followed, and that trains.",
        "- **wrong**: trained, with half trainables under a loss scaler, with adapters rounded so that their updates",
        "  are lost, with a rollout that computes in another dtype than training, with media or log-probabilities off",
        "  by more than the dtype allows, or with losses or gradients that are no numbers. Judged alike for both,",
        "  from the live model.",
        "- **crashed**: an error of another kind.",
        "",
        "| trainer | trained | refused | wrong | crashed |",
        "|---|---|---|---|---|",
    ]
    for side in ("stock", "safe"):
        counts = Counter(row[side]["outcome"] for row in rows)
        lines.append(f"| {side} | " + " | ".join(str(counts[outcome]) for outcome in COLOURS) + " |")
    lines += ["", "![outcomes of stock and safe by family, weights and flag](matrix.svg)", ""]
    lines += ["### Where stock crashes", "", "| error | cells | families |", "|---|---|---|"]
    crashes: dict[str, list[str]] = {}
    for row in rows:
        if row["stock"]["outcome"] in ("crashed", "refused"):
            crashes.setdefault(_kind(row["stock"]["message"]), []).append(row["family"])
    for message, families in sorted(crashes.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| `{message.replace('|', chr(92) + '|')}` | {len(families)} | {_some(families)} |")
    lines += ["", "### Where stock trains something else", "", "| what | cells | families |", "|---|---|---|"]
    faults: dict[str, list[str]] = {}
    for row in rows:
        for fault in dict.fromkeys(map(_fault, row["stock"].get("faults", []))):
            faults.setdefault(fault, []).append(row["family"])
    for fault, families in sorted(faults.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {fault} | {len(families)} | {_some(families)} |")
    lines += ["", "### What safe refuses", ""]
    for found in sorted({found for row in rows for found in row["safe"].get("ids", [])}):
        cells = [row for row in rows if found in row["safe"].get("ids", [])]
        trained = [row["id"] for row in cells if row["stock"]["outcome"] == "trained"]
        also = (
            f"stock trains {len(trained)} of them ({', '.join(trained)})" if trained else "stock trains none of them"
        )
        lines.append(f"- [`{found}`](refusals.md): {len(cells)} cells; {also}.")
    lines += ["", *expected.section(rows), "", *cost_section.section(), *_trained_and_sampled()]
    unable = [(name, spec) for name, spec in _specs().items() if spec.not_in_stock]
    lines += ["", "## What is not in it", ""]
    lines += ["What TRL cannot train in any precision is no question of precision, and has no cells:", ""]
    lines += [f"- {name}, {task}: {why}" for name, spec in unable for task, why in spec.not_in_stock.items()]
    lines += [
        "",
        "Not measured, in anything on this page: CUDA and other devices, real vLLM (a stand-in takes its place where",
        "weights are pushed), and models larger than some ten million parameters. Not in the matrix: several",
        "processes ([distributed.md](distributed.md)), other versions ([versions.md](versions.md)), and the cells",
        "that the pairwise choice leaves out (`python benchmarks/matrix.py --all`). Processors that need torchvision",
        "are assembled from parts that do not; `benchmarks/families/specs.py` says which.",
        "",
    ]
    return "\n".join(lines)


def _trained_and_sampled() -> list[str]:
    """What the two other pages of measurements say, in a line each."""
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "mismatch.json").read_text(encoding="utf-8"))["rows"]
    mean = {(row["sampler"], row["trainer"], row["length"]): row["logp_mismatch_mean"] for row in rows}
    lengths = sorted({row["length"] for row in rows})
    both = [mean["bf16", "bf16", n] / mean["fp16", "fp16", n] for n in lengths]
    alone = [mean["bf16", "bf16", n] / mean["bf16", "fp16", n] for n in lengths]
    return [
        "## What training reaches, and how far sampler and trainer are apart",
        "",
        "- [The embedded picture task](tiny_task.md): stock and safe, in three precisions, with controls.",
        f"- [Sampler and trainer, by dtype](mismatch.md), at {lengths[0]} to {lengths[-1]:,} tokens: float16 on",
        f"  both sides is {min(both):.1f} to {max(both):.1f} times nearer than bfloat16 on both, in the mean; float16",
        f"  in the trainer alone, {min(alone):.2f} to {max(alone):.2f} times.",
        "- [How construction and media grow](growth.md) to 100,000 tensors and 1,000 pictures.",
        "",
    ]


def _some(names: list[str]) -> str:
    """The names once each, the first few of many."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:6]) + (f" and {len(distinct) - 6} more" if len(distinct) > 6 else "")


def picture(file: Path) -> None:
    """Draws families down and cells across, stock beside safe.

    Args:
        file: Where to; its suffix decides the format.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    _, rows = read()
    families = list(dict.fromkeys(row["family"] for row in rows))
    with mpl.rc_context({"svg.hashsalt": "matrix", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(11, 0.24 * len(families) + 1.6), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, side in zip(figure.subplots(1, 2, sharey=True), ("stock", "safe"), strict=True):
            for down, family in enumerate(families):
                for across, mode in enumerate(MODES):
                    cells = [row for row in rows if row["family"] == family and (row["weights"], row["flag"]) == mode]
                    width = 1 / max(len(cells), 1)
                    for index, row in enumerate(cells):
                        colour = COLOURS[row[side]["outcome"]]
                        axes.add_patch(Rectangle((across + index * width, down), width, 1, color=colour, linewidth=0))
            for across in range(len(MODES) + 1):
                axes.axvline(across, color="white", linewidth=2)
            for down in range(len(families) + 1):
                axes.axhline(down, color="white", linewidth=1)
            axes.set(xlim=(0, len(MODES)), ylim=(len(families), 0), title=side)
            axes.set_xticks([x + 0.5 for x in range(len(MODES))], [f"{w}\n{f}" for w, f in MODES])
            axes.set_yticks([y + 0.5 for y in range(len(families))], families)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("weights, flag; the bars in a field are its cells")
        figure.legend(
            [Patch(color=colour) for colour in COLOURS.values()], list(COLOURS), loc="outside lower center", ncols=4
        )
        figure.savefig(file, metadata={"Date": None, "Creator": None})

"""Draws the measured sets of a search: mismatch by bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


COLOURS = {"bf16": "#0072B2", "fp16": "#009E73", "fp32": "#000000"}
MARKERS = {"bf16": "o", "fp16": "s", "fp32": "D"}


def draw_front(result: Mapping[str, Any], path: Path) -> None:
    """Draws the front of a search, the sets of fixed rules, and the chosen set.

    Args:
        result: What `Tuning.to_dict` returned.
        path: The image (.png, .pdf or .svg).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    draw_axes(figure.subplots(), result)
    figure.savefig(path, dpi=150)


def draw_axes(axes: Any, result: Mapping[str, Any]) -> None:
    """Draws a search into axes of matplotlib.

    Args:
        axes: The axes.
        result: What `Tuning.to_dict` returned.
    """
    best = result["best"]
    for precision, colour in COLOURS.items():
        points = [c for c in result["measured_sets"] if c["precision"] == precision and c["mean"]]
        if points:
            x, y = [c["bytes"] / 2**10 for c in points], [c["mean"] for c in points]
            axes.plot(x, y, MARKERS[precision], color=colour, alpha=0.3, markersize=4, label=f"measured, {precision}")
    steps = [c for c in result["front"] if c["mean"]]
    x, y = [c["bytes"] / 2**10 for c in steps], [c["mean"] for c in steps]
    axes.plot(x, y, color="#666666", linewidth=1, drawstyle="steps-post", label="front")
    for rule in (r for r in result["rules"] if r["mean"] and r["precision"] == best["precision"]):
        axes.plot(rule["bytes"] / 2**10, rule["mean"], "x", color="#D55E00", markersize=7)
        axes.annotate(
            rule["chosen_by"], (rule["bytes"] / 2**10, rule["mean"]), (6, -3), textcoords="offset points", fontsize=8
        )
    axes.plot([], [], "x", color="#D55E00", label="fixed rule")
    if best["mean"]:
        axes.plot(best["bytes"] / 2**10, best["mean"], "*", color="#CC79A7", markersize=14, label="chosen")
    axes.set_yscale("log")
    axes.set_xlabel("KiB of weights beyond half precision")
    axes.set_ylabel("mean abs(D), nats")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)

"""The plot of a run: what was learned, and what the loss did."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


CURVES = {
    "reward": "reward",
    "rewards/exact_match/mean": "exact match",
    "mean_token_accuracy": "token accuracy",
    "accuracy": "accuracy",
}
"""Log keys that go into the upper panel, and what they are called."""


def why_not(log: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the plot of a run cannot be drawn, `None` where it can."""
    if find_spec("matplotlib") is None:
        return 'pip install "safe-trainers[plots]"'
    return None if _steps(log) else "the run ended before its first log; lower logging_steps"


def _steps(log: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entry for entry in log if "loss" in entry]


def plot_run(log: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path | None:
    """Draws reward (or accuracy) and loss over the steps of a run.

    Args:
        log: `trainer.state.log_history`.
        path: The picture to write; its suffix decides the format.
        title: The heading.

    Returns:
        `path`, or `None` where `why_not` says why.
    """
    if why_not(log) is not None:
        return None
    steps = _steps(log)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for key, label in CURVES.items():
        points = [(entry["step"], entry[key]) for entry in steps if isinstance(entry.get(key), (int, float))]
        if points:
            upper.plot(*zip(*points, strict=True), label=label, linewidth=1.5)
    lower.plot([entry["step"] for entry in steps], [float(entry["loss"]) for entry in steps], color="0.35")
    upper.set_title(title)
    upper.set_ylabel("mean per step")
    upper.legend(loc="lower right", frameon=False)
    lower.set_ylabel("loss")
    lower.set_xlabel("optimizer step")
    for panel in (upper, lower):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path

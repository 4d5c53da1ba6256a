"""`safe-trainers plot RUN`, and the plot that is written at the end of each run."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .outputs import check_output, written


if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]
"""Pairs of step and value."""

LEARNED = {
    "reward": "reward",
    "rewards/exact_match/mean": "exact match",
    "rewards/accuracies": "preference accuracy",
    "mean_token_accuracy": "token accuracy",
    "accuracy": "accuracy",
    "eval_accuracy": "accuracy, held out",
    "eval_mean_token_accuracy": "token accuracy, held out",
}
"""Log keys of the first panel and their labels; other `rewards/...` keys are labelled with their own names."""

LOSSES = {"loss": "loss", "eval_loss": "loss, held out"}
MISMATCH = {"precision/logp_mismatch_mean": "mean abs(D)", "precision/logp_mismatch_max": "largest abs(D)"}
SCALE, SKIPPED = "precision/loss_scale", "precision/skipped_steps"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The palette of Okabe and Ito, which colour-blind people can distinguish."""

DASHES = ("-", "--", "-.", ":")
MOST_LINES = 6
LARGEST, SMALLEST = 1e300, 1e-300
"""Larger values are left out; on logarithmic axes, smaller ones too. matplotlib computes powers beyond them."""
FORMATS = (".pdf", ".png", ".svg")
FILES = ("log.jsonl", "log.json", "trainer_state.json")
"""Names of logs, the first one first: `log.jsonl` grows while a run trains, `log.json` is written at its end."""

EPILOG = """RUN: the folder of a run (with log.jsonl), or a checkpoint (with trainer_state.json)
  safe-trainers plot runs/tiny_vlm_bf16
  safe-trainers plot runs/tiny_vlm_bf16/checkpoint-100 --output reward.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the folder of a run or a checkpoint, or its log file")
    parser.add_argument("--output", metavar="FILE", help="the image (.png, .pdf or .svg); by default RUN/plot.png")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Plots a run.

    Returns:
        The exit status.

    Raises:
        RecipeError: If the log is missing, or the image cannot be written.
    """
    from ..core.errors import RecipeError

    file = find_log(Path(options.run))
    log = read_log(file)
    reason = why_not(log)
    if reason is not None:
        raise RecipeError(f"{file} cannot be plotted: {reason}")
    output = Path(options.output) if options.output else file.parent / "plot.png"
    if output.suffix.lower() not in FORMATS:
        meant = output.with_suffix(".png") if output.name else output / "plot.png"
        raise RecipeError(f"--output must end in {', '.join(FORMATS)}, got {output}. Write: --output {meant}")
    check_output("--output", output)
    with written("--output", output):
        plot_run(log, output, file.parent.resolve().name)
    print(f"plot {output}")
    note = not_finite(log)
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    return 0


def find_log(place: Path) -> Path:
    """Finds the log of a run.

    Args:
        place: The folder of the run, a checkpoint, or the log itself.

    Returns:
        The first of `FILES` that exists, else `trainer_state.json` of the newest checkpoint inside.

    Raises:
        RecipeError: If the log is missing; the message contains the most similar folder that has a log.
    """
    from ..core.errors import RecipeError, hint, nearest

    if os.path.isfile(place):
        return place
    direct = [place / name for name in FILES if os.path.isfile(place / name)]
    if direct:
        return direct[0]

    def step(file: Path) -> int:
        number = file.parent.name.rpartition("-")[2]
        return int(number) if number.isdigit() else -1

    inside = sorted(place.glob("checkpoint-*/trainer_state.json"), key=step) if os.path.isdir(place) else []
    if inside:
        return inside[-1]
    above = place.parent
    logs = [found for name in FILES for found in above.glob(f"*/{name}")] if os.path.isdir(above) else []
    near = nearest(str(place), sorted({str(found.parent) for found in logs}))
    if not os.path.exists(place):
        raise RecipeError(f"{place} does not exist{hint(near)}")
    raise RecipeError(f"{place} is not a run: it has none of {', '.join(FILES)}{hint(near)}")


def read_log(file: Path) -> list[Mapping[str, Any]]:
    """Reads the log of a run: `trainer.state.log_history`.

    Args:
        file: The file that `find_log` found.

    Returns:
        The entries of the log.

    Raises:
        RecipeError: If the file is not a log.
    """
    from ..core.errors import RecipeError

    try:
        text = file.read_text(encoding="utf-8")
        content = list(_entries(text)) if file.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    found = content.get("log", content.get("log_history")) if isinstance(content, dict) else content
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise RecipeError(f"{file} is not the log of a run: it has neither `log` nor `log_history`")
    return found


def _entries(text: str) -> Iterator[Any]:
    """Yields the entries of JSON lines; a last line without an end was being written when the run was killed.

    Raises:
        ValueError: If another line is not JSON.
    """
    complete = text[: text.rfind("\n") + 1]
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def why_not(log: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns why a run cannot be plotted; `None` if it can."""
    if find_spec("matplotlib") is None:
        return 'pip install "safe-trainers[plots]"'
    if not any("loss" in entry for entry in log):
        return "the run ended before its first log; lower logging_steps"
    return None if any(map(partial(_points, log), (*LOSSES, *_learned(log), *MISMATCH, SCALE))) else not_finite(log)


def not_finite(log: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns how many values of the loss are left out of the plot, because they are not finite; `None` for none.

    Args:
        log: `trainer.state.log_history`.
    """
    values = [_number(entry["loss"]) for entry in log if "loss" in entry]
    out = sum(value is None or not _drawable(value) for value in values)
    nan = sum(value is not None and math.isnan(value) for value in values)
    if not out:
        return None
    large = f"{out - nan} above {LARGEST:g} or infinite"
    return f"the loss of {out} of {len(values)} logs cannot be drawn: {nan} NaN, {large}"


def _drawable(value: float) -> bool:
    """Whether a value is finite, and so small that the arithmetic of axes does not overflow."""
    return abs(value) <= LARGEST


def plot_run(log: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path | None:
    """Plots reward or accuracy, loss, loss scale, and mismatch of sampler and trainer by step.

    Each quantity that is in the log has a panel. The last two have logarithmic axes.

    Args:
        log: `trainer.state.log_history`.
        path: The image to write; its suffix sets the format.
        title: The heading.

    Returns:
        `path`; `None` if the run cannot be plotted, see `why_not`.
    """
    if why_not(log) is not None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = _panels(log)
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(8, 0.9 + 1.05 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)
    for axes, (_, draw) in zip(grid[:, 0], panels, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), frameon=False, fontsize=9)
    figure.align_ylabels()
    grid[0, 0].set_title(title, loc="left", fontsize=11)
    grid[-1, 0].set_xlabel("optimizer step")
    grid[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.savefig(path, dpi=150)
    return path


def _panels(log: Sequence[Mapping[str, Any]]) -> list[tuple[float, Callable[["Axes"], None]]]:
    """Returns the relative height and the drawing function of each panel that has data."""
    learned = _lines(log, _learned(log))
    losses, mismatch = _lines(log, LOSSES), _lines(log, MISMATCH)
    scale, skips = _points(log, SCALE), _skips(log)
    panels: list[tuple[float, Callable[[Axes], None]]] = []
    if learned:
        spread = _spread(log) if "reward" in learned else []
        panels.append((2.2, lambda axes: _draw_learned(axes, learned, spread)))
    missing = "" if losses else str(not_finite(log))
    panels.append((1.6, lambda axes: _draw(axes, losses, "loss", missing=missing)))
    if scale:
        panels.append((1.4, lambda axes: _draw_scale(axes, scale, skips)))
    if mismatch:
        panels.append(
            (1.6, lambda axes: _draw(axes, mismatch, "mismatch of sampler\nand trainer, nats", logarithmic=True))
        )
    return panels


def _learned(log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the labels of the first panel by log key; several reward functions get one label each."""
    names = dict(LEARNED)
    own = sorted({key for entry in log for key in entry if key.startswith("rewards/") and key.endswith("/mean")})
    own = [key for key in own if key not in names]
    if len(own) > 1 or "rewards/exact_match/mean" in {key for entry in log for key in entry}:
        names |= {key: key.removeprefix("rewards/").removesuffix("/mean").replace("_", " ") for key in own}
    return names


def _lines(log: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, Points]:
    made = {label: _points(log, key) for key, label in names.items()}
    return dict([(label, points) for label, points in made.items() if points][:MOST_LINES])


def _points(log: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Returns the logged values of a key; an empty list if none of them can be drawn."""
    found = [(entry.get("step"), _number(entry.get(key))) for entry in log if key in entry]
    points = [(float(step), value) for step, value in found if isinstance(step, (int, float)) and value is not None]
    return points if any(_drawable(value) for _, value in points) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _skips(log: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the steps at which the number of skipped steps had increased."""
    counted = _points(log, SKIPPED)
    before = [0.0, *(count for _, count in counted)]
    return [step for (step, count), last in zip(counted, before, strict=False) if count > last]


def _spread(log: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """Returns step, reward minus and reward plus its standard deviation, for entries that have both."""
    spread = dict(_points(log, "reward_std"))
    return [
        (step, mean - spread[step], mean + spread[step])
        for step, mean in _points(log, "reward")
        if step in spread and _drawable(mean) and _drawable(spread[step])
    ]


def _draw(
    axes: "Axes", lines: Mapping[str, Points], label: str, *, logarithmic: bool = False, missing: str = ""
) -> None:
    if missing:
        axes.text(0.02, 0.5, missing, transform=axes.transAxes, fontsize=9)
    positive = [value for points in lines.values() for _, value in points if SMALLEST <= value <= LARGEST]
    logarithmic = logarithmic and bool(positive)  # a run in float32 may be exactly 0 throughout
    for index, (name, points) in enumerate(lines.items()):
        marker = "o" if len(points) <= 25 else ""
        axes.plot(
            [step for step, _ in points],
            [
                value if _drawable(value) and (value >= SMALLEST or not logarithmic) else math.nan
                for _, value in points
            ],
            color=COLOURS[index % len(COLOURS)],
            linestyle=DASHES[index % len(DASHES)],
            marker=marker,
            markersize=3,
            linewidth=1.5,
            label=name,
        )
    if logarithmic:
        from matplotlib.ticker import NullFormatter

        # The limits are powers of ten, so that at least two ticks have a label.
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        axes.set_yscale("log")
        axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


def _draw_learned(axes: "Axes", lines: Mapping[str, Points], spread: list[tuple[float, float, float]]) -> None:
    _draw(axes, lines, next(iter(lines)) if len(lines) == 1 else "mean per step")
    if len(spread) > 1:
        steps, low, high = zip(*spread, strict=True)
        axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.12, linewidth=0, label="reward ± std")


def _draw_scale(axes: "Axes", points: Points, skips: Sequence[float]) -> None:
    points = [(step, value if _drawable(value) else math.nan) for step, value in points]
    axes.plot(*zip(*points, strict=True), color=COLOURS[0], linewidth=1.5, drawstyle="steps-post", label="loss scale")
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    at = dict(points)
    if skips:
        values = [at.get(step, points[0][1]) for step in skips]
        axes.plot(skips, values, "x", color=COLOURS[1], markersize=6, label="step skipped")

"""Shows the progress of training: a bar on a terminal, else a line for each log, and a log file that grows with it."""

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ..core.files import replace_file
from .signals import StopSignals


WATCHED = {
    "reward": "reward",
    "loss": "loss",
    "rewards/accuracies": "preference accuracy",
    "mean_token_accuracy": "token accuracy",
    "accuracy": "accuracy",
    "eval_loss": "held-out loss",
    "precision/logp_mismatch_mean": "mismatch",
    "precision/skipped_steps": "skipped",
}
"""Log keys that are shown, and their labels."""

LOG = "log.jsonl"
"""Name of the log file in `output_dir`: one entry of `trainer.state.log_history` per line."""


class RunProgress(TrainerCallback):
    """Shows steps, time left, and the newest values of `WATCHED`.

    Args:
        console: The console: a terminal gets a bar, anything else one line for each log.
        title: The label of the bar and the lines.
        signals: The signals of the run; a recorded one is shown.
    """

    def __init__(self, console: Console, title: str, signals: StopSignals | None = None) -> None:
        self._console, self._title = console, title
        self._bar = _Bar(console, signals) if console.is_terminal else None
        self._task: Any = None
        self._begun = (0, 0.0)  # the first step of this process, and its time
        if signals is not None and self._bar is not None:
            signals.silent = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the bar."""
        self._begun = state.global_step, time.monotonic()
        if self._bar is not None and state.is_world_process_zero:
            self._task = self._bar.add_task(self._title, total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Shows the newest values."""
        values = "  ".join(_watched(logs or {}))
        if not values:
            return
        if self._bar is not None:
            self._bar.values = values
        elif state.is_world_process_zero:
            line = f"{self._title} {state.global_step}/{state.max_steps}  {values}{self._left(state)}"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _left(self, state: Any) -> str:
        first, since = self._begun
        done, left = state.global_step - first, state.max_steps - state.global_step
        if done < 1 or left < 1:
            return ""
        return f"  left {timedelta(seconds=round((time.monotonic() - since) / done * left))}"

    def stop(self) -> None:
        """Removes the bar from the terminal's control, which shows the cursor again."""
        if self._bar is not None:
            self._bar.stop()


class _Bar(Progress):
    """A bar with a second line, which has the newest values or the signal that was received."""

    def __init__(self, console: Console, signals: StopSignals | None) -> None:
        self.values = ""
        self._signals = signals
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        # What is printed meanwhile is shown above the bar; a standard error that is a file stays one.
        super().__init__(*columns, console=console, refresh_per_second=4, redirect_stderr=sys.stderr.isatty())

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields the bar and the line below it."""
        yield from super().get_renderables()
        stopping = "" if self._signals is None else str(self._signals)
        if stopping or self.values:
            yield Text(stopping or self.values, style="yellow" if stopping else "")


class LogFile(TrainerCallback):
    """Appends each entry of the log to a file as soon as it exists, so that a killed run leaves its log.

    Args:
        path: The file. It is replaced when training begins, by the entries up to the checkpoint if a run resumes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the entries of the checkpoint."""
        if state.is_world_process_zero:
            text = "".join(map(_as_line, state.log_history))
            replace_file(self._path, lambda file: file.write(text.encode()))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Appends the newest entry."""
        if state.is_world_process_zero and state.log_history:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_as_line(state.log_history[-1]))


def _as_line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, default=float) + "\n"


@contextlib.contextmanager
def show_progress(
    trainer: Trainer, console: Console, title: str, shown: bool = True, signals: StopSignals | None = None
) -> Iterator[None]:
    """Replaces the progress displays of a trainer by `RunProgress`, and ends it with the `with` block.

    Args:
        trainer: The trainer.
        console: The console.
        title: The label.
        shown: Whether to show progress; `False` only removes the displays of the trainer.
        signals: The signals of the run.
    """
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if not shown:
        yield
        return
    progress = RunProgress(console, title, signals)
    trainer.add_callback(progress)
    try:
        yield
    finally:
        progress.stop()


def _watched(logs: Mapping[str, Any]) -> Iterator[str]:
    for key, label in WATCHED.items():
        value = logs.get(key)
        if isinstance(value, (int, float)):
            yield f"{label} {value:.4g}"

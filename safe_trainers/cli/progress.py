"""A progress bar for training that shows the newest metrics."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


WATCHED = {
    "reward": "reward",
    "loss": "loss",
    "rewards/accuracies": "preference accuracy",
    "mean_token_accuracy": "token accuracy",
    "accuracy": "accuracy",
}
"""Log keys that are shown, and their labels."""


class RichProgress(TrainerCallback):
    """Shows steps, time, and the newest values of `WATCHED`.

    Args:
        console: The console; the bar is hidden if it is not a terminal.
        title: The label of the bar.
    """

    def __init__(self, console: Console, title: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
        self._title = title
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the bar."""
        if state.is_world_process_zero:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=state.max_steps, values="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._task is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Shows the newest values."""
        shown = [f"{label} {logs[key]:.3f}" for key, label in WATCHED.items() if logs and _number(logs.get(key))]
        if self._task is not None and shown:
            self._bar.update(self._task, values="  ".join(shown))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the bar."""
        self._bar.stop()


def show_progress(trainer: Trainer, console: Console, title: str, shown: bool = True) -> None:
    """Replaces the progress displays of a trainer by `RichProgress`.

    Args:
        trainer: The trainer.
        console: The console of the bar.
        title: The label of the bar.
        shown: Whether to show a bar; `False` only removes the displays of the trainer.
    """
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if shown:
        trainer.add_callback(RichProgress(console, title))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))

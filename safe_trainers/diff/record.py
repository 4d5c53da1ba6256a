"""`record`: records any trainer or model; and the writer that it shares with the feature of the safe trainers."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import PrecisionWarning, warn
from . import storage
from .recorder import Recorder
from .writing import write_step


class StepWriter:
    """Records chosen steps of a run, and writes each when it ends. An error ends the recording and not the run.

    Args:
        model: The model as it is called.
        folder: The folder of the recording.
        steps: The numbers of the steps, from 1.
        report: Gets the reason why the recording has ended.
        args: The training arguments; `None` without.
        rank: The number of this process.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        steps: Sequence[int],
        report: Callable[[str], None],
        args: Any = None,
        rank: int = 0,
    ) -> None:
        self.recorder = Recorder(model, args)
        self._report = report
        self._failed = False
        self._folder, self._rank = folder, rank
        self._steps = steps if isinstance(steps, range) else frozenset(steps)
        self._number = 0
        self._begun_at = 0
        self._described = False

    def begin(self, number: int, optimizer: Any = None) -> None:
        """Begins to record a step if it is one of the chosen steps; a step that did not end is discarded."""
        self.attempt(lambda _: self._begin(number, optimizer))

    def end(self) -> None:
        """Ends the step and writes it."""
        self.attempt(lambda _: self._end())

    def attempt(self, action: Callable[[Recorder], None]) -> None:
        """Runs a part of the recording, unless it has ended because of an error.

        Args:
            action: Gets the recorder.
        """
        if self._failed:
            return
        try:
            action(self.recorder)
            if self.recorder.error is not None:
                raise self.recorder.error
        except Exception as error:
            self._failed = True
            self.recorder.stop()
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError):
                why = f"the file cannot be written: {error.strerror}"
            self._report(why)

    def _begin(self, number: int, optimizer: Any) -> None:
        if self.recorder.recording:
            self.recorder.stop()
        if not self._begun_at:
            self._begun_at = number
            if self._rank == 0:  # those of an earlier run; a resumed run keeps the steps before its checkpoint
                storage.remove_steps(self._folder, number)
        if number in self._steps:
            self._number = number
            self.recorder.begin(optimizer)
            if not self._described:
                self._described = True
                description = self.recorder.description()
                known = storage.settings_of(self._folder, description) if self._begun_at > 1 else None
                if known is not None:
                    self.recorder.known = known
                elif self._rank == 0:
                    storage.remove_steps(self._folder)
                    storage.write_model(self._folder, description)

    def _end(self) -> None:
        if self.recorder.recording:
            columns, tables = self.recorder.end()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_step(self._folder, self._number, self._rank, columns, tables)


@contextlib.contextmanager
def record(target: Any, path: str | Path, steps: int | Sequence[int] = 1) -> Iterator[None]:
    """Records what a trainer or a model computes in a block, for `safe-trainers diff`.

    The recording changes no value and no random state. The safe trainers record themselves with `record_steps`.

    Args:
        target: Any trainer of transformers or TRL, whose steps are recorded, or a model. What a model computes in the
            block is recorded as one step; gradients are recorded if `backward` is called in it.
        path: The folder of the recording; an older recording in it is replaced.
        steps: For a trainer: the number of steps to record, from the first, or a list of the numbers of steps.

    Raises:
        TypeError: If `target` is neither a trainer nor a model.
        ValueError: If `steps` contains no step, or a number below 1.
    """
    folder = Path(path)
    if isinstance(target, nn.Module):
        writer = StepWriter(target, folder, [1], _warn)
        writer.begin(1)
        try:
            yield
            writer.attempt(lambda recorder: recorder.gradients(None))
            writer.end()
        finally:
            writer.recorder.stop()
        return
    if not hasattr(target, "add_callback"):
        raise TypeError(f"record takes a trainer or a model, got {type(target).__name__}")
    chosen = range(1, steps + 1) if isinstance(steps, int) else sorted(steps)
    if not chosen or chosen[0] < 1:
        raise ValueError(f"steps must be an integer or a list of integers of at least 1, got {steps!r}")
    writer = StepWriter(target.model, folder, chosen, _warn, target.args, target.args.process_index)
    callback = _callback(target, writer)
    target.add_callback(callback)
    try:
        yield
    finally:
        target.remove_callback(callback)
        writer.recorder.stop()


def _warn(why: str) -> None:
    warnings.warn(str(warn("not-recorded", "`record`", why=why)), PrecisionWarning, stacklevel=2)


def _callback(trainer: Any, writer: StepWriter) -> Any:
    from transformers import TrainerCallback

    class Records(TrainerCallback):
        """Passes the events of the training loop to the writer."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            writer.begin(state.global_step + 1, trainer.optimizer)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            writer.attempt(lambda recorder: recorder.gradients(trainer.optimizer))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            writer.attempt(lambda recorder: recorder.updated())
            writer.end()

    return Records()

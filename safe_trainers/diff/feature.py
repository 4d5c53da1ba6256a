"""Records the steps in `record_steps`, for `safe-trainers diff`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import warn
from ..core.feature import Feature, Run
from . import storage
from .record import StepWriter
from .recorder import LOSS_NAME


class RunRecorder(Feature):
    """Writes recordings of chosen steps into `output_dir/recordings`. Without `record_steps` it does nothing."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._writer: StepWriter | None = None
        self._first = 0  # the first step to record, before the first step of the run

    def on_train_begin(self) -> None:
        """Makes the writer, if the run records steps."""
        args, steps = self.run.args, self.run.settings.record_steps
        if not steps:
            self.rest("on_step_begin", "around_rollout", "around_loss", "before_step", "after_step")
            return
        steps = range(1, steps + 1) if isinstance(steps, int) else sorted(steps)
        if args.n_gpu > 1:
            self.run.warn_once(
                warn(
                    "not-recorded",
                    f"record_steps={self.run.settings.record_steps}",
                    why="`nn.DataParallel` runs copies of it",
                )
            )
            return
        self._first = steps[0]
        folder = Path(args.output_dir, storage.FOLDER)
        self._writer = StepWriter(self.run.model, folder, steps, self._ended, args, args.process_index)
        self._writer.recorder.paused = lambda: self.run.replaying

    def on_step_begin(self) -> None:
        """Begins to record the next step, if it is one of `record_steps`."""
        if self._writer is None:
            return
        first, last, self._first = self._first, self.run.trainer.state.max_steps, 0
        if first > last:
            self.run.warn_once(warn("step-not-reached", f"record_steps={self.run.settings.record_steps}", steps=last))
        self._writer.begin(self.run.step + 1, self.run.trainer.optimizer)

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Marks the calls of the model in a rollout."""
        if self._writer is None:
            return call()
        self._writer.recorder.sampling = True
        try:
            return call()
        finally:
            self._writer.recorder.sampling = False

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Records a loss and its inputs."""
        if self._writer is None or self.run.replaying:
            return call()
        inputs = self.run.loss_inputs
        if inputs:
            self._writer.attempt(lambda recorder: recorder.add(storage.LOSS, storage.PRE, LOSS_NAME, inputs))
        result = call()
        loss = result[0] if isinstance(result, tuple) else result
        self._writer.attempt(lambda recorder: recorder.add(storage.LOSS, storage.POST, LOSS_NAME, [loss]))
        return result

    def before_step(self) -> None:
        """Records the gradients and the state of the optimizer."""
        if self._writer is not None:
            self._writer.attempt(lambda recorder: recorder.gradients(self.run.trainer.optimizer))

    def after_step(self, skipped: bool) -> None:
        """Records the updated weights, and writes the step."""
        if self._writer is not None:
            self._writer.attempt(lambda recorder: recorder.updated())
            self._writer.end()

    def on_train_exit(self) -> None:
        """Removes the hooks if the last step did not end."""
        if self._writer is not None:
            self._writer.recorder.stop()

    def _ended(self, why: str) -> None:
        self.run.warn_once(warn("not-recorded", "record_steps", why=why))

"""Ends training at a step boundary after SIGINT or SIGTERM, in all processes of a run at the same step."""

from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

from .signals import StopSignals, end_by


class StopAtStep(TrainerCallback):
    """Stops training after a recorded signal, with a checkpoint and without an evaluation.

    With several processes, the signal may reach only one of them, but all have to stop at the same step. At each step
    boundary, a collective takes the maximum of the signal numbers. It is asynchronous and read at the next boundary,
    one step later, and runs on the CPU through gloo, so that no process waits for another one or for its GPU.

    Args:
        signals: The recorded signals.

    Attributes:
        stopped: Whether training was stopped.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self.stopped = False
        self._group: Any = None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on, signals are recorded; one that came before, and that a library swallowed, ends the process."""
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self._group = distributed.new_group(backend="gloo")
        self._signals.training = True
        if self._signals.received is not None:
            end_by(self._signals.received)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops if any process has a signal, except after the last step, which ends training anyway."""
        self._agree()
        if self._signals.received is not None and self._group is None:
            self.stopped = True
        self.stopped = self.stopped and state.global_step < state.max_steps
        if self.stopped:
            control.should_training_stop = control.should_save = control.should_log = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prevents a second checkpoint and an evaluation of a run that was stopped in this epoch."""
        if self.stopped:
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the agreement of the processes; signals are still recorded, until the results are written."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None

    def _agree(self) -> None:
        """Reads the maximum of the previous step, and starts that of this one."""
        if self._group is None:
            return
        if self._pending is not None:
            work, found = self._pending
            work.wait()
            if found.item():
                self._signals.received = self._signals.received or int(found.item())
                self.stopped = True
        flag = torch.tensor([self._signals.received or 0])  # (1,)
        self._pending = distributed.all_reduce(flag, distributed.ReduceOp.MAX, self._group, async_op=True), flag

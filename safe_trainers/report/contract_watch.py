"""Compares the safety contract of a trainer with what happened until the first optimizer step."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..core.coverage import HOOKS, SafetyContract
from ..core.errors import Problem, warn
from ..core.feature import Feature, Run
from ..core.trl import BUFFER_METHOD, ROLLOUT_METHOD
from ..media.caster import count_media
from ..model.parts import find_parts


_FIXES = {
    "inputs": "`super()._prepare_inputs(batch)` where the class prepares a batch",
    "adapters": "`super()._adapters_ready(model)` where the class overrides it",
    "rollout": f"`super().{ROLLOUT_METHOD}(...)` where the class overrides it or generates",
    "buffer": f"`super().{BUFFER_METHOD}(...)` where the class overrides it",
}
"""What to write if a hook never fired, by hook."""


class ContractWatch(Feature):
    """Counts how often the hooks of the contract were due, and warns of those that did not fire in the first step."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._handles: list[RemovableHandle] = []
        self._checked = False

    def on_train_begin(self) -> None:
        """Counts the calls of the model with images or audio until the first step."""
        self._stop()
        args = self.run.args
        # torch.compile would compile hooks into the model, and `nn.DataParallel` would run them in threads.
        if self._checked or getattr(args, "torch_compile", False) or args.n_gpu > 1:
            return
        count = partial(count_media, self.run.coverage.due, frozenset(self.run.trainer.media_keys))
        self._handles = [
            container.register_forward_pre_hook(count, with_kwargs=True)
            for container in find_parts(self.run.model).containers
        ]

    def on_train_exit(self) -> None:
        """Removes the hooks of the model, if no step was taken."""
        self._stop()

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn, whose batch is to be buffered."""
        self.run.coverage.due["buffer"] += 1
        return call()

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Generates and scores a batch; a rollout is part of it."""
        self.run.coverage.due["rollout"] += 1
        return call()

    def around_rewards(self, call: Callable[[], Any]) -> Any:
        """Computes rewards; a rollout was before it, and its batch is to be buffered."""
        self.run.coverage.due.update(("rollout", "buffer"))
        return call()

    def after_step(self, skipped: bool) -> None:
        """Checks the contract after the first step that is not skipped."""
        if skipped or self._checked:
            return
        self._checked = True
        self._stop()
        for problem in broken_guarantees(self.run.coverage):
            self.run.warn_once(problem, key=problem.what)

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def broken_guarantees(contract: SafetyContract) -> Iterator[Problem]:
    """Yields a warning for each guarantee whose hook was due and never fired.

    Args:
        contract: The contract of a run in which a step was taken.
    """
    for coverage in contract.broken():
        hook = str(coverage.hook)
        given = f"{coverage.area}: the hook {hook!r} never fired"
        yield warn("guarantee-not-kept", given, trainer=contract.trainer, when=HOOKS[hook], fix=_FIXES[hook])

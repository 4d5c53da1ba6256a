"""Reports NaN and infinity that reach neither a loss nor a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object

from ..core.errors import warn
from ..core.feature import Feature, Run
from ..core.trl import trl_bases
from ..model.parts import local_shard


SCORING_METHOD = "_get_per_token_logps_and_entropies"


class FiniteWatch(Feature):
    """Checks log-probabilities of completions, and the trained weights at the end of a run.

    TRL replaces advantages that are not finite by 0, so that a reference model with NaN stops the training of a prompt
    without a sign. Log-probabilities are checked on the device, and the result is read when a log is written.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._finite: torch.Tensor | None = None
        self._scores = any(SCORING_METHOD in vars(base) for base in trl_bases(type(run.trainer)))

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions, and checks the log-probabilities if no gradient is computed."""
        result = call()
        scores = result[0] if isinstance(result, tuple) and result else result
        if isinstance(scores, torch.Tensor) and not scores.requires_grad:
            finite = (scores < torch.inf).all()  # false for NaN; excluded tokens have -inf
            self._finite = finite if self._finite is None else self._finite & finite
        return result

    def before_log(self, mode: str) -> None:
        """Warns about log-probabilities that are not finite on any rank."""
        finite, self._finite = self._finite, None
        if not self._scores:  # the same on all ranks, which wait for each other below
            return
        accelerator = self.run.accelerator
        own = torch.tensor(True) if finite is None else finite
        if not bool(accelerator.gather(own.to(accelerator.device).reshape(1)).all()):
            given = f"log-probabilities of completions up to step {self.run.step}"
            self.run.warn_once(warn("logps-not-finite", given))

    def on_train_end(self) -> None:
        """Warns about trained weights that are not finite on any rank, which has a part of them under FSDP."""
        self.before_log("train")
        trained = ((name, p) for name, p in self.run.model.named_parameters() if p.requires_grad)
        own = [name for name, p in trained if not bool(local_shard(p.detach()).isfinite().all())]
        names = list(dict.fromkeys(gather_object(own)))
        if names:
            given = f"{len(names)} trained tensors, such as {names[0]}, at the end of the run"
            self.run.warn_once(warn("weights-not-finite", given))

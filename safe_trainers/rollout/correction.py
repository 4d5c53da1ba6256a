"""What a loss compares its log-probabilities with: importance weights for samples of `generate`, and old ones.

The weight of a token, or of a sequence, is the ratio of its probability in the trainer and in the sampler. TRL
multiplies the loss of each token by it. The loss of a token is proportional to the advantage, so here the weights
multiply the advantages of a copy of the batch. The trainer's log-probabilities are the old ones if TRL computes them,
and otherwise those of the loss itself, so that no forward pass is added.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import PrecisionError, Problem, refuse
from ..core.feature import Feature, Run
from ..core.trl import has_rollouts, uses_continuous_batching
from ..policy.settings import LOSS
from .logprob_recorder import SAMPLER_KEY
from .mismatch import Limits, limits_of


ADVANTAGES = "advantages"
OLD_KEYS = ("old_per_token_logps", "old_logps")
"""TRL's keys of the old log-probabilities: GRPO's of each token, and RLOO's sum over each sequence."""


def corrects_generate(run: Run) -> bool:
    """Whether the losses of samples of `generate` are weighted; TRL weights those of vLLM itself."""
    return run.settings.rollout_correction and not getattr(run.args, "use_vllm", False)


def sampled_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """Returns 1 for the tokens that the model sampled, and 0 for padding and results of tools, (B, C).

    Args:
        batch: The rollout batch, or a slice of it.
    """
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def importance_weights(difference: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Computes the weights of tokens or sequences as TRL does.

    Args:
        difference: log p_trainer - log p_sampler of each token in nats, (B, C); 0 for tokens that do not count, and
            NaN for tokens whose weight is 1.
        limits: TRL's limits.

    Returns:
        The weights, (B, C), or (B, 1) for sequences.
    """
    difference = difference.where(~difference.isnan(), 0.0)
    log_weights = difference.sum(1, keepdim=True) if limits.sequences else difference
    weights = log_weights.exp()
    if limits.masks:
        return weights.masked_fill(limits.outside(log_weights), 0.0)
    return weights if limits.low is None and limits.high is None else weights.clamp(limits.low, limits.high)


def check_weights(weights: torch.Tensor) -> None:
    """Raises `PrecisionError` if an importance weight is not finite, which would make the loss NaN.

    Args:
        weights: The weights, of any shape.
    """
    if weights.isfinite().all():
        return
    what, fix = "infinite", "`vllm_importance_sampling_clip_max=3.0`"
    if weights.isnan().any():  # TRL 1.16 and later give such a token weight 1
        what, fix = "missing", "`vllm_importance_sampling_correction=False`, or pip install 'trl>=1.16'"
    given = f"{int((~weights.isfinite()).sum())} of {weights.numel()} importance weights are not finite"
    raise PrecisionError([refuse("importance-weights-not-finite", given, what=what, fix=fix)])


class RolloutCorrection(Feature):
    """Replaces what a loss compares its log-probabilities with, in a copy of the batch.

    With `rollout_correction=True` the losses of samples of `generate` are weighted. With `old_logps="loss"` the old
    log-probabilities are those of the loss, as long as the policy has not changed since the batch was scored.
    """

    name = "correction"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._slice: dict[str, Any] | None = None  # a copy of the batch's slice, until its log-probabilities are known
        self._limits = limits_of(run.args)

    def check(self, model: nn.Module) -> Iterator[Problem]:
        """Refuses trainers and settings under which the loss cannot be weighted."""
        args = self.run.args
        reasons = {
            f"{type(self.run.trainer).__name__} has no importance weights of tokens": self._limits is None,
            "`loss_type='vespo'` computes weights of its own": getattr(args, "loss_type", None) == "vespo",
            "the fused loss of Liger returns no log-probabilities": getattr(args, "use_liger_kernel", False)
            or getattr(args, "use_liger_loss", False),
            "continuous batching returns no log-probabilities": uses_continuous_batching(args),
        }
        reason = next((text for text, applies in reasons.items() if applies), None)
        if corrects_generate(self.run) and reason is not None:
            yield _refusal(reason)

    def on_train_begin(self) -> None:
        """Forgets the batches of an earlier `train`, and rests in a trainer whose losses use no rollouts."""
        self.run.scored_at.clear()
        if not has_rollouts(type(self.run.trainer)):
            self.rest("on_loss_inputs", "around_loss")

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Generates and scores a rollout batch, and keeps the step."""
        batch = call()
        self.run.scored_at[self.run.mode] = self.run.step
        return batch

    def on_loss_inputs(self, inputs: Any) -> Any:
        """Returns a copy of the slice, which is changed as soon as its log-probabilities are known."""
        self._slice = None
        corrects = corrects_generate(self.run)
        if not isinstance(inputs, Mapping) or not (corrects or self._replaces_old(inputs)):
            return inputs
        if corrects and SAMPLER_KEY not in inputs:
            raise PrecisionError([_refusal("the sampler's log-probabilities of this rollout were not recorded")])
        self._slice = dict(inputs)
        return self._slice

    def _replaces_old(self, inputs: Mapping[str, Any]) -> bool:
        unchanged = self.run.scored_at.get(self.run.mode) == self.run.step
        return self.run.settings.old_logps == LOSS and unchanged and any(key in inputs for key in OLD_KEYS)

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Computes log-probabilities; the policy's first ones of a loss change its copy of the slice."""
        result = call()
        if self._slice is None or not self.run.scores_policy:
            return result
        batch, self._slice = self._slice, None
        logps = result[0] if isinstance(result, tuple) else result
        now, mask = logps.detach(), sampled_mask(batch)
        if self._replaces_old(batch):
            of_sequences = (now * batch["completion_mask"]).sum(1)  # as RLOO computes them
            batch.update(
                {key: value for key, value in zip(OLD_KEYS, (now, of_sequences), strict=True) if key in batch}
            )
        if corrects_generate(self.run) and self._limits is not None:
            difference = (batch.get(OLD_KEYS[0], now) - batch[SAMPLER_KEY]).where(mask != 0, 0.0)
            weights = importance_weights(difference, self._limits)
            check_weights(weights)
            advantages = batch[ADVANTAGES]
            batch[ADVANTAGES] = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages) * weights
        return result

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Computes the loss, and raises an error if it was to be weighted and computed no log-probabilities."""
        try:
            value = call()
            if self._slice is not None and corrects_generate(self.run):
                raise PrecisionError([_refusal("this trainer's loss computes no log-probabilities of tokens")])
        finally:
            self._slice = None
        return value

    def state_dict(self) -> dict[str, Any]:
        """When the buffered batch was scored."""
        return dict(self.run.scored_at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores when the buffered batch was scored."""
        self.run.scored_at = dict(state)


def _refusal(reason: str) -> Problem:
    return refuse("rollout-cannot-be-corrected", "rollout_correction=True", reason=reason)

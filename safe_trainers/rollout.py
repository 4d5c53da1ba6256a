"""The sampler computes as the trainer does, whatever generates, and generation leaves the trainer's weights alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .contract import COVERED, ROLLOUT_METHOD, SafetyContract, batches_continuously
from .towers import anatomy


SCORE_METHOD = "_get_per_token_logps_and_entropies"
"""The method by which TRL scores completions, in rollouts and in the loss."""


class AlignedRollouts:
    """Above TRL: what a rollout computes in; a base of `PrecisionMixin`.

    Overrides `_generate_single_turn`, and the scoring of completions until it was seen what that computes in.
    """

    # What the trainers bring, for the type checker.
    args: Any
    accelerator: Any
    model: Any
    safety_contract: SafetyContract
    compute_context: Callable[[], contextlib.AbstractContextManager[Any]]

    _scored_in: torch.dtype | None = None
    """Autocast dtype of the first scoring or loss, float32 where there was none; `None` before it."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one turn of generation in what training computes in, and hands the weights back as they were.

        Left alone where the contract says that it is not covered.
        """
        generate: Callable[..., Any] = getattr(super(), ROLLOUT_METHOD)
        if self.safety_contract["rollout"].state != COVERED:
            return generate(*args, **kwargs)
        self.safety_contract.fired["rollout"] += 1
        with self._rollout_context():
            return generate(*args, **kwargs)

    def _rollout_context(self) -> contextlib.AbstractContextManager[Any]:
        if getattr(self.args, "use_vllm", False):
            # It has a compute dtype of its own; and weights are synchronised here, never in half precision.
            return contextlib.nullcontext()
        if batches_continuously(self.args):
            return casts_undone(self.model)
        return contextlib.nullcontext() if self._scored_in == torch.float32 else self.compute_context()

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Scores completions, and looks once at what that computes in.

        Whether TRL's forward pass runs under autocast is a matter of its version, and of whether accelerate has
        wrapped the model yet; so it is looked at, and later rollouts follow.
        """
        score: Callable[..., Any] = getattr(super(), SCORE_METHOD)
        if self._scored_in is not None or getattr(self.args, "torch_compile", False):
            return score(*args, **kwargs)  # a hook would be compiled into the model

        def look(*_: Any) -> None:
            kind = self.accelerator.device.type
            autocast = torch.is_autocast_enabled(kind)
            self._scored_in = torch.get_autocast_dtype(kind) if autocast else torch.float32

        handle = anatomy(self.model).text.register_forward_pre_hook(look)
        try:
            return score(*args, **kwargs)
        finally:
            handle.remove()


@contextlib.contextmanager
def casts_undone(model: nn.Module) -> Iterator[None]:
    """Gives a model its own tensors back after something has cast it in place.

    For continuous batching TRL casts the live model to half precision at each rollout and never back: master weights,
    and what the optimizer makes of them, would be half from the first rollout on. While the block runs, the weights
    are alive in both: one half copy of what is not half already is the memory that this costs.

    Args:
        model: The model, wrapped or not. Its parameters stay the same objects.
    """
    tensors = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    held = [(tensor, tensor.data) for tensor in tensors if tensor is not None]
    # A cast puts new buffers into a module, where it writes into parameters.
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
        for module, own in buffers:
            module._buffers.update(own)

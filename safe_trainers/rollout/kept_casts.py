"""Keeps what is computed from frozen weights from one forward pass to the next, while completions are made and scored.

Autocast stores its cast of a float32 weight until it ends, but only if the weight requires a gradient. A frozen one is
cast again in each forward pass: for every token that `generate` samples. While the policy generates or is scored
without gradients, the frozen weights are marked as requiring gradients, so that autocast stores their casts too. The
values are the same. The stored casts are freed at the end, before the loss is computed.

The dequantised weights of 4-bit layers are kept as `kept_weights` describes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import nn

from ..core.feature import Feature, Run
from ..core.trl import uses_continuous_batching
from ..model.parts import unwrap
from .kept_weights import four_bit_layers, weights_kept


FREE_SHARE = 0.5
"""Largest share of the free memory that what is kept may take on a CPU."""


class KeptCasts(Feature):
    """Stores casts and dequantised weights during rollouts and scoring, if the memory suffices.

    Attributes:
        nbytes: The largest number of bytes of stored casts so far.
        dequantised: The largest number of bytes of dequantised weights so far.
    """

    about_weights: ClassVar = {"_matrices": WeakKeyDictionary, "_packed": WeakKeyDictionary}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.nbytes = self.dequantised = 0
        self._scored: Any = None
        self._matrices: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self._packed: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

    def before_scoring(self, inputs: Mapping[str, Any]) -> None:
        """Remembers the model that is scored: the policy or the reference model."""
        self._scored = inputs.get("model")

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn. vLLM and continuous batching hold their own weights."""
        settings, args = self.run.settings, self.run.args
        # A compiled pass contains its casts, and would be compiled again for a changed `requires_grad`.
        if getattr(args, "use_vllm", False) or uses_continuous_batching(args) or settings.compile_decode:
            return call()
        with self._kept(self.run.model):
            return call()

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions in one or several forward passes. With gradients, as in losses, nothing is stored."""
        model, self._scored = self._scored, None
        if torch.is_grad_enabled() or not isinstance(model, nn.Module):
            return call()
        with self._kept(model):
            return call()

    @contextlib.contextmanager
    def _kept(self, model: nn.Module) -> Iterator[None]:
        run = self.run
        compiled = getattr(run.args, "torch_compile", False)  # a changed `requires_grad` would compile the model again
        if not run.settings.keep_frozen_casts or run.sharded or compiled:
            yield
            return
        base, device, autocast = unwrap(model), run.accelerator.device, run.policy.autocast.value is not None
        if base not in self._matrices:
            self._matrices[base], self._packed[base] = float32_matrices(base), four_bit_layers(base)
        weights, packed = frozen(self._matrices[base]) if autocast else [], self._packed[base]
        nbytes = sum(weight.numel() for weight in weights) * 2
        spare = spare_memory(device) if nbytes or packed else 0
        with contextlib.ExitStack() as stack:
            if autocast and nbytes <= spare:
                stack.enter_context(casts_kept(weights, device))
                self.nbytes, spare = max(self.nbytes, nbytes), spare - nbytes
            kept = stack.enter_context(weights_kept(packed, spare))
            yield
            self.dequantised = max(self.dequantised, kept.nbytes)


@contextlib.contextmanager
def casts_kept(weights: list[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Makes autocast store its casts of trainable and of frozen weights until the block ends.

    Args:
        weights: The frozen weights; they are marked as requiring gradients in the block.
        device: The device of autocast.
    """
    kind = device.type
    # Autocast frees its casts when its outermost context ends, which the model's own would be in each forward pass.
    outer = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    try:
        for weight in weights:
            weight.requires_grad = True
        with outer:
            yield
    finally:
        for weight in weights:
            weight.requires_grad = False


def float32_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the float32 matrices of a model, of which autocast makes casts, and stores those of trainable ones only.

    Args:
        model: The model, without wrappers.
    """
    return [
        parameter
        for parameter in model.parameters()
        if type(parameter) is nn.Parameter and parameter.dtype == torch.float32 and parameter.ndim > 1
    ]


def frozen(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the weights that do not require gradients."""
    return [weight for weight in weights if not weight.requires_grad]


def spare_memory(device: torch.device) -> int:
    """Returns the number of bytes that stored casts may take.

    Args:
        device: The device. On CUDA, the casts may take what the run has already needed at its peak, so that the peak
            does not rise; in the first rollout that is nothing. Elsewhere `FREE_SHARE` of the free memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return int(FREE_SHARE * psutil.virtual_memory().available)

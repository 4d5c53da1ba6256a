"""Keeps the dequantised weights of 4-bit layers from one forward pass to the next.

bitsandbytes dequantises a 4-bit weight in each forward pass, and multiplies with the result: for every token that
`generate` samples. The weights are frozen, so that the result is the same each time. In a block of forward passes
without gradients, the second pass through a layer keeps it. Layers that compute once, as those of a tower, keep
nothing. bitsandbytes of CUDA multiplies with the packed weight instead where it has a kernel for that; there, nothing
is kept.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..core.patches import patched
from ..model.inventory import bits


def four_bit_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the 4-bit layers of bitsandbytes whose forward pass is its own.

    Args:
        model: The model, without wrappers.
    """
    return [module for module in model.modules() if bits(module) == 4 and "forward" not in vars(module)]


class KeptWeights:
    """The dequantised weights of one block.

    Args:
        limit: The number of bytes that they may take.

    Attributes:
        nbytes: The number of bytes that they take.
    """

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self._limit = limit
        self._passes: Counter[nn.Module] = Counter()
        self._weights: dict[nn.Module, torch.Tensor] = {}

    def forward(self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Computes what the layer does.

        Args:
            layer: The layer.
            forward: Its own forward pass.
            x: Its input, (..., in_features), in any floating-point dtype.

        Returns:
            The output in the dtype of the input, (..., out_features).
        """
        weight = self._of(layer, x)
        if weight is None:
            return forward(x)
        bias = None if layer.bias is None else layer.bias.to(weight.dtype)
        return functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

    def _of(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the weight, (out_features, in_features), if the layer's own forward pass dequantises it."""
        if torch.is_grad_enabled() or not _dequantises(layer, x):
            return None
        kept = self._weights.get(layer)
        self._passes[layer] += 1
        if kept is None and self._passes[layer] > 1:
            size = layer.in_features * layer.out_features * layer.compute_dtype.itemsize
            if self.nbytes + size <= self._limit:
                kept = self._weights[layer] = _dequantised(layer)
                self.nbytes += size
        return kept


@contextlib.contextmanager
def weights_kept(layers: Sequence[nn.Module], limit: int) -> Iterator[KeptWeights]:
    """Keeps dequantised weights until the block ends.

    Args:
        layers: The 4-bit layers.
        limit: The number of bytes that their weights may take.
    """
    kept = KeptWeights(limit)
    with contextlib.ExitStack() as stack:
        for layer in layers:
            forward = partial(kept.forward, layer, layer.forward)
            stack.enter_context(patched("kept-weights", layer, forward=forward))
        yield kept


def _dequantises(layer: Any, x: torch.Tensor) -> bool:
    """Whether bitsandbytes dequantises the weight of a layer for an input, to the dtype in which it computes."""
    state = layer.weight.quant_state
    decided = state is not None and layer.compute_dtype == state.dtype
    if not decided or getattr(state, "packing_format_for_cpu", False):
        return False
    if x.device.type == "cuda":  # it has kernels of its own for one row, and newer releases for several rows
        return x.shape[:-1].numel() > 1 and not hasattr(torch.ops.bitsandbytes, "gemm_4bit")
    return x.device.type == "cpu"


def _dequantised(layer: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)

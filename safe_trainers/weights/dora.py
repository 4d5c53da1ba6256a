"""Makes DoRA adapters that were not trained yet compute exactly what the base model computes.

A DoRA layer multiplies its output by `magnitude / norm`, where `norm` is that of its weight. PEFT initialises the
magnitude with the norm of the weight as it is when the adapter is made. In each forward pass PEFT casts the weight,
and so the norm, to the dtype of the layer's input. If that is another dtype, or if the layer dequantises to another
dtype since, the ratio is not 1, and the first loss and the first KL divergence are not those of the base model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from ..core.patches import patched
from ..model.trial_forward import is_loaded


_ULPS = 8 * torch.finfo(torch.float32).eps
"""Relative difference between two float32 norms of a weight, which devices may sum in another order."""


@dataclass(frozen=True)
class FreshMagnitude:
    """A DoRA magnitude that has the value with which PEFT made it.

    Attributes:
        name: Name of the parameter in the model.
        layer: PEFT's module with the magnitude as its `weight`.
        place: Name of the adapted layer, which the adapters have in common.
    """

    name: str
    layer: Any
    place: str


def fresh_magnitudes(model: nn.Module) -> tuple[FreshMagnitude, ...]:
    """Finds the DoRA magnitudes of adapters that were not trained.

    Args:
        model: The model as PEFT or the user created it, before its quantised layers are changed.

    Returns:
        The magnitudes of each adapter whose products of matrices are 0 and whose magnitudes are norms in all layers;
        none if an engine has not loaded the weights yet.
    """
    if not is_loaded(model):
        return ()
    found: dict[str, list[FreshMagnitude]] = {}
    trained: set[str] = set()
    for place, module in model.named_modules():
        for adapter, layer in getattr(module, "lora_magnitude_vector", {}).items():
            if adapter in trained:
                continue
            name = f"{place}.lora_magnitude_vector.{adapter}.weight"
            if _adds_nothing(module, adapter) and _is_initial(module, layer):
                found.setdefault(adapter, []).append(FreshMagnitude(name, layer, place))
            else:
                trained.add(adapter)
    return tuple(one for adapter, members in found.items() if adapter not in trained for one in members)


def match_forward(magnitudes: tuple[FreshMagnitude, ...], forward: Callable[[], Any]) -> tuple[str, ...]:
    """Sets magnitudes to the norms that a forward pass computes.

    Args:
        magnitudes: The result of `fresh_magnitudes`.
        forward: Runs the model in the compute context of the run. Only active adapters compute a norm; the others of
            the same layer, such as TRL's reference, get the same one.

    Returns:
        Names of the magnitudes whose values have changed.
    """
    norms: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for one in magnitudes:
            recorder = _Recorder(one.layer.get_weight_norm, one.place, norms)
            stack.enter_context(patched("dora-norm", one.layer, get_weight_norm=recorder))
        forward()
    return tuple(_changed(magnitudes, norms))


class _Recorder:
    """Computes the norm of a layer's weight, and keeps the last result."""

    def __init__(self, original: Callable[..., torch.Tensor], place: str, norms: dict[str, torch.Tensor]) -> None:
        self._original, self._place, self._norms = original, place, norms

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = self._original(*args, **kwargs)
        self._norms[self._place] = norm.detach()
        return norm


def _changed(magnitudes: tuple[FreshMagnitude, ...], norms: dict[str, torch.Tensor]) -> Iterator[str]:
    """Sets magnitudes to the norms of their layers, and yields the names of those that had other values."""
    for one in magnitudes:
        norm, weight = norms.get(one.place), one.layer.weight
        if norm is None:
            continue
        values = norm.to(device=weight.device, dtype=weight.dtype).reshape(weight.shape)
        if not torch.equal(values, weight):
            weight.data = values.clone()
            yield one.name


def _adds_nothing(module: Any, adapter: str) -> bool:
    """Whether the product of an adapter's matrices is 0, because one of them is."""
    groups = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
    for group in groups:
        held = [getattr(module, name, {}) for name in group]
        if all(adapter in matrices for matrices in held):
            matrices = [getattr(one[adapter], "weight", one[adapter]) for one in held]
            return any(not matrix.any() for matrix in matrices)
    return False


def _is_initial(module: Any, layer: Any) -> bool:
    """Whether a magnitude is the norm of the weight, in the dtype of the weight or in float32."""
    magnitude = layer.weight.detach()
    with torch.no_grad():
        weight = dequantize_module_weight(module.get_base_layer())
        for dtype in dict.fromkeys((weight.dtype, torch.float32)):
            # PEFT adds `scaling` times the product of the matrices, which is 0.
            norm = layer.get_weight_norm(weight.to(device=magnitude.device, dtype=dtype), 0.0, 1.0)
            values = norm.to(magnitude.dtype).float()
            if values.shape == magnitude.shape and torch.allclose(values, magnitude.float(), rtol=_ULPS, atol=0.0):
                return True
    return False

"""Leaves the inputs of LoRA matrices in the dtype of autocast.

PEFT casts the input of a layer to the dtype of the adapter's matrices, float32 in most runs. Under autocast the next
operation, the product with a matrix, casts it back. Both casts copy the input once for each adapted layer, as does
their backward pass, and change no bit: each half-precision number is a float32 number. PEFT leaves them out itself in
layers of bitsandbytes under the autocast of CUDA.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.dtypes import FLOAT32
from ..core.feature import Feature
from ..core.patches import replace, restore


_CAST = "_cast_input_dtype"
"""The method of PEFT's layers that casts inputs."""
_LAYERS = {
    ("peft.tuners.lora.layer", "Linear"),
    ("peft.tuners.lora.bnb", "Linear4bit"),
    ("peft.tuners.lora.bnb", "Linear8bitLt"),
}
"""Their classes by name: an import of the last two imports bitsandbytes."""


class LoraInputs(Feature):
    """Leaves out PEFT's cast of inputs while `train` runs, where autocast would undo it."""

    def on_train_begin(self) -> None:
        """Replaces the cast in the layers of the policy, which may have got adapters since the last training."""
        if self.run.policy.autocast.value in (None, FLOAT32):
            return
        for layer in _layers(self.run.model):
            restore(layer, _CAST)  # `train` may begin again without having ended
            if hasattr(layer, _CAST):
                replace("lora-inputs", layer, _CAST, partial(_cast_input, layer, getattr(layer, _CAST)))

    def on_train_exit(self) -> None:
        """Restores PEFT's method."""
        for layer in _layers(self.run.model):
            restore(layer, _CAST)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Finds PEFT's own LoRA layers; subclasses may use the input otherwise."""
    return (m for m in model.modules() if (type(m).__module__, type(m).__name__) in _LAYERS)


def _cast_input(layer: nn.Module, cast: Callable[..., Any], x: Any, dtype: torch.dtype) -> Any:
    """Returns an input as it is if a product under autocast is all that it is used for; else calls PEFT's method."""
    if isinstance(x, torch.Tensor) and dtype == torch.float32:
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype == torch.get_autocast_dtype(kind) and _only_products(layer):
            return x
    return cast(x, dtype)


def _only_products(layer: Any) -> bool:
    """Whether no active adapter changes its input or computes with it otherwise, as dropout and DoRA do."""
    dropouts, variants = layer.lora_dropout, layer.lora_variant
    return not any(
        name in variants or (name in dropouts and dropouts[name].training and type(dropouts[name]) is not nn.Identity)
        for name in layer.active_adapters
    )

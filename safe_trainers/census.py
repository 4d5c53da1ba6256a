"""What dtypes a live model really holds, counted in one pass over its modules."""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .dtypes import from_torch
from .towers import (
    FEATURE_METHODS,
    adapter_parameters,
    anatomy,
    elements_of,
    floating_parameters,
    is_quantized,
    unwrap,
)


BITSANDBYTES = "bitsandbytes"


@dataclass(frozen=True)
class Tower:
    """A module beside the text model.

    Attributes:
        name: Qualified name of the module, relative to the module that contains it.
        dtype: Dtype of its first floating weight that is neither an adapter's nor quantised: what its inputs follow;
            `None` if it has none.
        dtypes: All dtypes of such weights.
    """

    name: str
    dtype: str | None
    dtypes: frozenset[str]


@dataclass(frozen=True)
class Census:
    """The dtypes of a model.

    Attributes:
        elements: Number of elements by role (`"weights"`, `"adapters"`, `"quantized"`, `"buffers"`) and dtype.
        trainable: Number of trainable elements by dtype.
        trainable_names: One example name of a trainable parameter by dtype.
        embeddings: Dtype of the input embeddings' weights, `None` where there are none or they are quantised.
        text: Dtypes of the text model's own floating weights.
        towers: The modules beside the text model.
        features: The methods by which the model asks its towers for features, such as `"get_image_features"`.
        quantization: `"4bit"`, `"8bit"`, another method's name, or `None`.
        attn_implementation: `config._attn_implementation`, `None` where the model has no such thing.
    """

    elements: Mapping[str, Mapping[str, int]]
    trainable: Mapping[str, int]
    trainable_names: Mapping[str, str]
    embeddings: str | None
    text: frozenset[str]
    towers: tuple[Tower, ...]
    features: tuple[str, ...]
    quantization: str | None
    attn_implementation: str | None

    @property
    def weights(self) -> frozenset[str]:
        """Dtypes of the weights that are neither adapters nor quantised."""
        return frozenset(self.elements["weights"])

    def to_dict(self) -> dict[str, Any]:
        """The census as plain values, ready for JSON."""
        return {
            "elements": {role: dict(counts) for role, counts in self.elements.items()},
            "trainable": dict(self.trainable),
            "embeddings": self.embeddings,
            "text": sorted(self.text),
            "towers": [
                {"name": tower.name, "dtype": tower.dtype, "dtypes": sorted(tower.dtypes)} for tower in self.towers
            ],
            "features": list(self.features),
            "quantization": self.quantization,
            "attn_implementation": self.attn_implementation,
        }


def take_census(model: nn.Module) -> Census:
    """Counts the dtypes of a model; reads only, in time linear in the number of parameters.

    Args:
        model: A transformers model, wrapped by PEFT or not, on any device (meta too).

    Returns:
        The count.
    """
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    elements: dict[str, Counter[str]] = {role: Counter() for role in ("weights", "adapters", "quantized", "buffers")}
    trainable: Counter[str] = Counter()
    trainable_names: dict[str, str] = {}
    weights: set[int] = set()
    for name, parameter in model.named_parameters():
        dtype = from_torch(parameter.dtype)
        role = "quantized" if is_quantized(parameter) else "adapters" if id(parameter) in adapters else "weights"
        if role == "weights":
            weights.add(id(parameter))
        elements[role][dtype] += elements_of(parameter)
        if parameter.requires_grad:
            trainable[dtype] += elements_of(parameter)
            trainable_names.setdefault(dtype, name)
    for buffer in model.buffers():
        elements["buffers"][from_torch(buffer.dtype)] += buffer.numel()

    parts = anatomy(model)
    base = unwrap(model)

    def dtypes(module: nn.Module) -> list[str]:
        """What a part holds, each dtype once, in the order of its weights."""
        held = (parameter.dtype for parameter in module.parameters() if id(parameter) in weights)
        return [from_torch(dtype) for dtype in dict.fromkeys(held)]

    towers = {name: dtypes(module) for name, module in parts.towers.items()}
    return Census(
        elements=elements,
        trainable=trainable,
        trainable_names=trainable_names,
        embeddings=next(iter(dtypes(parts.embeddings)), None) if parts.embeddings is not None else None,
        text=frozenset(dtypes(parts.text)),
        towers=tuple(Tower(name, next(iter(held), None), frozenset(held)) for name, held in towers.items()),
        features=tuple(name for name in FEATURE_METHODS if any(hasattr(c, name) for c in parts.containers)),
        quantization=quantization_method(base),
        attn_implementation=getattr(getattr(base, "config", None), "_attn_implementation", None),
    )


def first_dtype(module: nn.Module) -> torch.dtype | None:
    """Dtype of the first floating weight that is neither an adapter's nor quantised; `None` if there is none."""
    return next((parameter.dtype for parameter in floating_parameters(module)), None)


def bits(module: nn.Module) -> int | None:
    """How many bits bitsandbytes packs the weights of one layer into.

    Args:
        module: Any module; PEFT's wrapper around a quantised layer is none.

    Returns:
        4 or 8; `None` for what is no layer of bitsandbytes.
    """
    return _bits_of(type(module).__mro__)


@functools.cache
def _bits_of(mro: tuple[type, ...]) -> int | None:
    names = [base.__name__ for base in mro if base.__module__.partition(".")[0] == BITSANDBYTES]
    return next((number for number in (4, 8) if any(f"{number}bit" in name for name in names)), None)


def quantization_method(model: nn.Module) -> str | None:
    """How the weights that a model holds now are quantised.

    Read from its layers: `is_loaded_in_4bit` outlives `model.dequantize()`, and what was dequantised while it was
    loaded is an ordinary model.

    Args:
        model: A transformers model, wrapped or not.

    Returns:
        `"4bit"` or `"8bit"` for bitsandbytes; transformers' name of another method, such as `"gptq"`; `None` for a
        model that is not quantised.
    """
    base, torchao = unwrap(model), False
    for module in base.modules():
        own, number = module._parameters.values(), bits(module)
        if number is not None and any(is_quantized(parameter) for parameter in own if parameter is not None):
            return f"{number}bit"
        torchao = torchao or any(type(parameter).__module__.startswith("torchao.") for parameter in own)
    config = getattr(getattr(base, "hf_quantizer", None), "quantization_config", None)
    method = getattr(config, "quant_method", None)
    name = str(getattr(method, "value", method))  # an enum of strings prints as its member
    if method is not None and name != BITSANDBYTES and not getattr(config, "dequantize", False):
        return name
    return "torchao" if torchao else None

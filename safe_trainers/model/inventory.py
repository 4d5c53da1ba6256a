"""Counts a loaded model by part and dtype: elements and bytes of parameters, gradients, optimizer state and buffers.

Only reads the model, in one pass over the parameters, and never reads the values of a tensor.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.dtypes import FLOAT16, from_torch
from .parts import (
    FEATURE_METHODS,
    HEADS,
    MATMUL_LEAVES,
    adapter_layers,
    adapter_parameters,
    elements_of,
    find_parts,
    floating_parameters,
    holds_packed,
    is_copy,
    is_quantized,
    library_of,
    unwrap,
    wraps_tensors,
)


TEXT, HEAD, BUFFERS, OTHER = "language model", "head", "buffers", "other weights"
_ADAPTERS = ("adapter", "reference adapter")
_PLAIN = (torch.Tensor, nn.Parameter)
_PROJECTORS = ("project", "connector", "merger", "resampler", "perceiver")
_TOWERS = ("vision", "visual", "audio", "tower", "encoder")


@dataclass(frozen=True)
class Group:
    """Parameters of one part of a model with the same dtypes and `requires_grad`, or its buffers of one dtype.

    Attributes:
        part: `"language model"`, `"vision tower (...)"`, `"adapter (default)"`, ...
        held: Dtype in which they are stored; for packed parameters the format, such as `"nf4 in uint8"`.
        trainable: Whether they are trained; `None` for buffers.
        compute: Dtypes in which operations on them compute; empty if unknown.
        gradient: Dtypes of their gradients; empty if there are none (yet).
        optimizer: Dtypes of their optimizer state; empty if there is none (yet).
        tensors: Number of tensors; tied tensors count once.
        elements: Number of elements: before packing for packed parameters, of all shards for sharded ones.
        bytes: Memory in this process, in bytes, including the statistics of packed parameters.
        optimizer_bytes: Memory of their optimizer state in this process, in bytes; `None` if there is none yet.
        names: Qualified names, at most three.
    """

    part: str
    held: str
    trainable: bool | None
    compute: frozenset[str]
    gradient: frozenset[str]
    optimizer: frozenset[str]
    tensors: int
    elements: int
    bytes: int
    optimizer_bytes: int | None
    names: tuple[str, ...]


@dataclass
class CountContext:
    """What `count_groups` cannot read from the model.

    Attributes:
        compute: Returns the dtype in which operations on a parameter compute; its arguments are the part, the
            parameter, and the name of the parameter's dtype.
        gradients: Dtype of each gradient, by `id` of the parameter.
        states: Dtypes and bytes of each optimizer state, by `id` of the parameter.
    """

    compute: Callable[[str, nn.Parameter, str], str | None]
    gradients: Mapping[int, str] = field(default_factory=dict)
    states: Mapping[int, tuple[frozenset[str], int]] = field(default_factory=dict)


def count_groups(model: nn.Module, context: CountContext, name: str | None = None) -> tuple[Group, ...]:
    """Counts the parameters and buffers of a model.

    Args:
        model: A transformers model, possibly wrapped, sharded, or on the meta device.
        context: What cannot be read from the model.
        name: One part name for the whole model, for a model that is not trained, such as the reference model; by
            default each part is counted separately.

    Returns:
        The groups in the order of the model; adapters after other weights, buffers last.
    """
    rows: dict[tuple[Any, ...], _Row] = {}
    buffers: dict[str, _Row] = {}
    seen: set[int] = set()
    widths: dict[type, int | None] = {}
    adapters = getattr(model, "peft_config", None) or {}
    for place, module, place_part in walk(model):
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            held, compute, kind = from_torch(parameter.dtype), None, type(module)
            # PEFT holds tensors without a layer, such as the rows of trained tokens, by the names of adapters.
            owner = _part_of_adapter(own, adapters, place_part) if kind is nn.ParameterDict else place_part
            part = name or owner
            # FSDP2 replaces a packed parameter with a plain one; its state remains an attribute of the layer.
            sharded = own == "weight" and hasattr(parameter, "to_local") and bits(module) == 4
            if sharded or is_quantized(parameter):
                width = widths[kind] if kind in widths else widths.setdefault(kind, bits(module))
                state = getattr(module if sharded else parameter, "quant_state", None)
                held, compute = f"{_format(parameter, state, width)} in {held}", _computes_in(module, width)
                elements, size = _packed_size(parameter, state, module, width)
            else:
                elements, size = _size(parameter)
            compute = compute or context.compute(part, parameter, held)
            # PEFT freezes some tensors of TRL's copy only when they are first scored; they have no gradients before.
            copied = owner.startswith(_ADAPTERS[1]) and id(parameter) not in context.gradients
            key = (part, held, name is None and parameter.requires_grad and not copied, compute)
            row = rows.get(key) or rows.setdefault(key, _Row())
            row.add(place + own, elements, size)
            if id(parameter) in context.gradients:
                row.gradients.add(context.gradients[id(parameter)])
            if id(parameter) in context.states:
                dtypes, size = context.states[id(parameter)]
                row.states |= dtypes
                row.state_bytes = (row.state_bytes or 0) + size
        for own, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                buffers.setdefault(from_torch(buffer.dtype), _Row()).add(place + own, *_size(buffer))
    order = list(dict.fromkeys(key[0] for key in rows))
    keys = sorted(rows, key=lambda key: (key[0].startswith(_ADAPTERS), order.index(key[0])))
    groups = [rows[key].group(*key) for key in keys]
    label = f"{BUFFERS} of {name}" if name else BUFFERS
    return (*groups, *(row.group(label, dtype, None, None) for dtype, row in buffers.items()))


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields every module of a model once, with the part that its own parameters belong to.

    Args:
        model: A transformers model, possibly wrapped.

    Yields:
        The prefix of the parameters' names, the module, and the part, in the order of `named_modules`. Tied weights
        therefore belong to the language model, which comes before the head.
    """
    base: Any = unwrap(model)
    parts = {id(base): OTHER}
    found = find_parts(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    parts |= {id(module): tower_kind(name, module) for name, module in found.towers.items()}
    parts |= {id(head): HEAD, id(found.text): TEXT}
    adapters = getattr(model, "peft_config", None) or {}
    seen: set[int] = set()
    # Modules of the PEFT wrapper outside the base model, such as a prompt encoder, belong to the adapter.
    stack: list[tuple[str, nn.Module, str, bool]] = [("", model, _ADAPTERS[0] if adapters else OTHER, False)]
    while stack:
        prefix, module, part, added = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        part = part if added else parts.get(id(module), part)
        yield prefix, module, part
        if not module._modules:
            continue
        layers = {id(layer) for layer in adapter_layers(module)}
        for name, child in reversed(module._modules.items()):
            if child is None:
                continue
            inside = added or id(child) in layers
            owner = _part_of_adapter(name, adapters, part if added else _ADAPTERS[0])
            below = owner if inside else part
            stack.append((f"{prefix}{name}.", child, below, inside))


def _part_of_adapter(name: str, adapters: Collection[str], part: str) -> str:
    """Returns the part of what PEFT holds under a name: that of an adapter, or `part` if no adapter has this name."""
    return f"{_ADAPTERS[is_copy(name, adapters)]} ({name})" if name in adapters else part


def tower_kind(name: str, module: nn.Module) -> str:
    """Returns the part name of a module outside the text model.

    Args:
        name: Name of the module.
        module: The module. It is a tower if it has a stack of layers, else a projector.

    Returns:
        A name such as `"vision tower (vision_tower)"`, or `"head"` for a classification or value head.
    """
    if name in HEADS:
        return HEAD
    stacked = any(
        isinstance(part, nn.ModuleList) and next(part.parameters(), None) is not None for part in module.modules()
    )
    if any(word in name.lower() for word in _PROJECTORS):
        return f"projector ({name})"
    if not stacked and not any(word in name.lower() for word in _TOWERS):
        return f"projector ({name})"
    return f"{'audio' if 'audio' in name.lower() else 'vision'} tower ({name})"


def optimizer_states(optimizer: Any) -> dict[int, tuple[frozenset[str], int]]:
    """Returns the dtypes and sizes of an optimizer's state in this process.

    Args:
        optimizer: A torch optimizer, or accelerate's wrapper of one; the result is empty for anything else.

    Returns:
        By `id` of the parameter: the dtypes of its state tensors, without step counters, and the bytes of all of them.
    """
    states = getattr(getattr(optimizer, "optimizer", optimizer), "state", None)
    found: dict[int, tuple[frozenset[str], int]] = {}
    for parameter, state in (states or {}).items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, Mapping):
            continue
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        dtypes = frozenset(from_torch(tensor.dtype) for tensor in tensors if tensor.dim())
        if tensors:
            found[id(parameter)] = dtypes, sum(_size(tensor)[1] for tensor in tensors)
    return found


def first_products(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter, str]]:
    """Yields the first layer of each part and dtype that multiplies its input with its weight.

    Args:
        model: A transformers model, possibly wrapped.

    Yields:
        The layer, its weight, and its part. Packed layers are left out, because the dtype of their output does not
        show their compute dtype.
    """
    seen = set()
    for _, layer, part in walk(model):
        weight = layer._parameters.get("weight")
        if weight is None or not isinstance(layer, MATMUL_LEAVES) or isinstance(layer, nn.MultiheadAttention):
            continue
        key = (part, weight.dtype, weight.requires_grad)
        if key not in seen and not is_quantized(weight):
            seen.add(key)
            yield layer, weight, part


class _Row:
    """A group that is still being counted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors = self.elements = self.bytes = 0
        self.gradients: set[str] = set()
        self.states: set[str] = set()
        self.state_bytes: int | None = None

    def add(self, name: str, elements: int, size: int) -> None:
        if len(self.names) < 3:
            self.names.append(name)
        self.tensors, self.elements, self.bytes = self.tensors + 1, self.elements + elements, self.bytes + size

    def group(self, part: str, held: str, trainable: bool | None, compute: str | None) -> Group:
        computes = frozenset() if compute is None else frozenset({compute})
        return Group(
            part, held, trainable, computes, frozenset(self.gradients), frozenset(self.states),
            self.tensors, self.elements, self.bytes, self.state_bytes, tuple(self.names),
        )  # fmt: skip


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the elements of a tensor, including all shards, and its bytes in this process."""
    if hasattr(tensor, "ds_numel"):  # ZeRO-3 replaces a parameter with an empty tensor
        shard = getattr(tensor, "ds_tensor", None)
        return int(tensor.ds_numel), 0 if shard is None else _size(shard)[1]
    return tensor.numel(), _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor, or of the tensors that a wrapper subclass (DTensor, torchao) contains."""
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return sum(_bytes(part) for part in inner if isinstance(part, torch.Tensor))
    size: int = tensor.numel() * tensor.element_size()
    return size


def _packed_size(parameter: nn.Parameter, state: Any, layer: nn.Module, width: int | None) -> tuple[int, int]:
    """Returns the elements of a packed parameter before packing, and its bytes including scales and code tables.

    Args:
        parameter: The packed parameter.
        state: Its `QuantState`, if it has one.
        layer: Its layer.
        width: Bits per element, if it is packed by bitsandbytes.
    """
    shape = getattr(state, "shape", None)
    elements, size = _size(parameter)
    while state is not None:
        attributes = vars(state)
        size += sum(v.numel() * v.element_size() for v in attributes.values() if type(v) in _PLAIN)
        state = attributes.get("state2")
    if width == 8:  # the scales are moved from the parameter to the layer in the first forward pass
        scales = (getattr(owner, "SCB", None) for owner in (parameter, getattr(layer, "state", None)))
        size += next((_bytes(scale) for scale in scales if isinstance(scale, torch.Tensor)), 0)
    return elements if shape is None else math.prod(shape), size


def _format(parameter: nn.Parameter, state: Any, width: int | None) -> str:
    """Returns the format of a packed parameter, such as `"nf4"`."""
    kind = getattr(state, "quant_type", None)
    return kind if isinstance(kind, str) else f"{width}-bit" if width else type(parameter).__name__


def _computes_in(layer: nn.Module, width: int | None) -> str | None:
    """Returns the compute dtype of a packed layer; `None` if unknown."""
    if width == 8:
        return FLOAT16
    dtype = getattr(layer, "compute_dtype", None) if width else None
    return from_torch(dtype) if isinstance(dtype, torch.dtype) else None


BITSANDBYTES = "bitsandbytes"


@dataclass(frozen=True)
class Tower:
    """A module outside the text model, such as a vision tower.

    Attributes:
        name: Qualified name of the module, relative to the module that contains it.
        dtype: Dtype of its first floating-point weight that is neither an adapter's nor quantised, to which its inputs
            are cast; `None` if it has none.
        dtypes: All dtypes of such weights.
    """

    name: str
    dtype: str | None
    dtypes: frozenset[str]


@dataclass(frozen=True)
class ModelInventory:
    """The dtypes of a model.

    Attributes:
        elements: Number of elements by role (`"weights"`, `"adapters"`, `"quantized"`, `"buffers"`) and dtype.
        trainable: Number of trainable elements by dtype.
        trainable_names: The name of one trainable parameter by dtype.
        embeddings: Dtype of the input embeddings; `None` if there are none or they are quantised.
        text: Dtypes of the text model's floating-point weights.
        towers: The modules outside the text model.
        features: The methods that return the features of a tower, such as `"get_image_features"`.
        quantization: `"4bit"`, `"8bit"`, the name of another method, or `None`.
        attn_implementation: `config._attn_implementation`; `None` if the config has none.
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
        """Returns the inventory as plain values for JSON."""
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


def take_inventory(model: nn.Module) -> ModelInventory:
    """Counts the dtypes of a model, in time linear in the number of parameters.

    Args:
        model: A transformers model, possibly wrapped by PEFT, on any device including meta.
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

    parts = find_parts(model)
    base = unwrap(model)

    def dtypes(module: nn.Module) -> list[str]:
        """Returns each dtype once, in the order of the weights."""
        found = (parameter.dtype for parameter in module.parameters() if id(parameter) in weights)
        return [from_torch(dtype) for dtype in dict.fromkeys(found)]

    towers = {name: dtypes(module) for name, module in parts.towers.items()}
    return ModelInventory(
        elements=elements,
        trainable=trainable,
        trainable_names=trainable_names,
        embeddings=next(iter(dtypes(parts.embeddings)), None) if parts.embeddings is not None else None,
        text=frozenset(dtypes(parts.text)),
        towers=tuple(Tower(name, next(iter(found), None), frozenset(found)) for name, found in towers.items()),
        features=tuple(name for name in FEATURE_METHODS if any(hasattr(c, name) for c in parts.containers)),
        quantization=quantization_method(base),
        attn_implementation=getattr(getattr(base, "config", None), "_attn_implementation", None),
    )


def first_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first floating-point weight that is neither an adapter's nor quantised."""
    return next((parameter.dtype for parameter in floating_parameters(module)), None)


def bits(module: nn.Module) -> int | None:
    """Returns the bits per weight of a bitsandbytes layer.

    Args:
        module: Any module; PEFT's wrapper of a quantised layer does not count as one.

    Returns:
        4 or 8; `None` for other modules.
    """
    return _bits_of(type(module).__mro__)


@functools.cache
def _bits_of(mro: tuple[type, ...]) -> int | None:
    names = [base.__name__ for base in mro if base.__module__.partition(".")[0] == BITSANDBYTES]
    return next((number for number in (4, 8) if any(f"{number}bit" in name for name in names)), None)


def quantization_method(model: nn.Module) -> str | None:
    """Returns how a model's current weights are quantised.

    The layers are inspected, because the attribute `is_loaded_in_4bit` stays set after `model.dequantize()`.

    Args:
        model: A transformers model, possibly wrapped.

    Returns:
        `"4bit"` or `"8bit"` for bitsandbytes; transformers' name of another method, such as `"gptq"`, or the package
        that packs the weights; `None` if the model is not quantised or was dequantised while it was loaded.
    """
    base, packed, packer = unwrap(model), False, None
    declared = declared_method(base)
    for module in base.modules():
        own, number = [p for p in module._parameters.values() if p is not None], bits(module)
        if number is not None and any(map(is_quantized, own)):
            return f"{number}bit"
        packed = packed or holds_packed(module, declared is not None)
        packer = packer or next((library_of(type(p)) for p in own if wraps_tensors(type(p))), None)
    return declared or packer if packed else None


def declared_method(base: nn.Module) -> str | None:
    """Returns the name of the quantiser with which transformers loaded a model.

    Args:
        base: A transformers model without wrappers.

    Returns:
        The name; `None` for bitsandbytes, whose layers are inspected, and for a model that was dequantised.
    """
    config = getattr(getattr(base, "hf_quantizer", None), "quantization_config", None)
    method = getattr(config, "quant_method", None)
    name = str(getattr(method, "value", method))  # `str` of the enum would include its class
    return None if method is None or name == BITSANDBYTES or getattr(config, "dequantize", False) else name

"""What each part of a live model holds: dtypes, elements and bytes, and gradients and optimizer state where they are.

Parts are found as precision decisions find them, from the structure of the model (towers.py). Reads only; one pass
over the parameters; no tensor's contents are touched.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .boundaries import MATMUL_LEAVES
from .census import bits
from .dtypes import FLOAT16, from_torch
from .quantized_loading import HEADS
from .towers import adapter_layers, anatomy, is_quantized, unwrap


TEXT, HEAD, BUFFERS, OTHER = "language model", "head", "buffers", "other weights"
REFERENCE_ADAPTERS = ("ref", "reference")
"""What TRL calls the frozen copy of an adapter that the policy is compared with."""
_ADAPTERS = ("adapter", "reference adapter")
_PLAIN = (torch.Tensor, nn.Parameter)
_PROJECTORS = ("project", "connector", "merger", "resampler", "perceiver")
_TOWERS = ("vision", "visual", "audio", "tower", "encoder")


@dataclass(frozen=True)
class Group:
    """The parameters of one part of a model that are held alike, or its buffers of one dtype.

    Attributes:
        part: `"language model"`, `"vision tower (...)"`, `"adapter (default)"`, ...
        held: Dtype that they are held in; of packed ones the format, such as `"nf4 in uint8"`.
        trainable: Whether they are trained; `None` for buffers.
        compute: Dtype that operations on them compute in; `None` where nothing says it.
        gradient: Dtypes of their gradients; `None` where there are none, or none yet.
        optimizer: Dtypes of their optimizer state; `None` where there is none, or none yet.
        tensors: How many tensors they are; tied ones count once.
        elements: How many numbers they hold, of packed ones those that were packed; of sharded ones, of all shards.
        bytes: Memory that they take in this process, with the statistics of packed ones.
        optimizer_bytes: Memory that their optimizer state takes in this process; `None` where there is none yet.
        names: Their qualified names, at most three.
    """

    part: str
    held: str
    trainable: bool | None
    compute: str | None
    gradient: str | None
    optimizer: str | None
    tensors: int
    elements: int
    bytes: int
    optimizer_bytes: int | None
    names: tuple[str, ...]


@dataclass
class Circumstances:
    """What a model is counted under.

    Attributes:
        compute: Says what operations on a parameter compute in, from its part, the parameter, and the name of its
            dtype.
        gradients: Dtype of the gradient of each parameter that has one, by the parameter's `id`.
        states: Dtypes and bytes of the optimizer state of each parameter that has some, by the parameter's `id`.
    """

    compute: Callable[[str, nn.Parameter, str], str | None]
    gradients: Mapping[int, str] = field(default_factory=dict)
    states: Mapping[int, tuple[frozenset[str], int]] = field(default_factory=dict)


def take_inventory(model: nn.Module, circumstances: Circumstances, name: str | None = None) -> tuple[Group, ...]:
    """Counts what a model holds.

    Args:
        model: A transformers model, wrapped or not, whole or sharded, on any device (meta too).
        circumstances: What it is counted under.
        name: What to call it as a whole, for a model beside the policy, of which nothing is trained; by default its
            parts are told apart.

    Returns:
        Its groups, in the order of the model, adapters after the rest; buffers last.
    """
    rows: dict[tuple[Any, ...], _Row] = {}
    buffers: dict[str, _Row] = {}
    seen: set[int] = set()
    widths: dict[type, int | None] = {}
    for place, module, place_part in walk(model):
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            part, held, compute = name or place_part, from_torch(parameter.dtype), None
            kind = type(module)
            # FSDP2 makes a plain parameter of a packed one, and leaves its state with the layer.
            sharded = own == "weight" and hasattr(parameter, "to_local") and bits(module) == 4
            if sharded or is_quantized(parameter):
                width = widths[kind] if kind in widths else widths.setdefault(kind, bits(module))
                state = getattr(module if sharded else parameter, "quant_state", None)
                held, compute = f"{_format(parameter, state, width)} in {held}", _computes_in(module, width)
                elements, size = _packed_size(parameter, state, module, width)
            else:
                elements, size = _size(parameter)
            compute = compute or circumstances.compute(part, parameter, held)
            key = (part, held, name is None and parameter.requires_grad, compute)
            row = rows.get(key) or rows.setdefault(key, _Row())
            row.add(place + own, elements, size)
            if id(parameter) in circumstances.gradients:
                row.gradients.add(circumstances.gradients[id(parameter)])
            if id(parameter) in circumstances.states:
                dtypes, size = circumstances.states[id(parameter)]
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
    """Every module of a model, once, with the part that its own parameters belong to.

    Args:
        model: A transformers model, wrapped or not.

    Yields:
        The prefix of its parameters' names, the module, and the part, in the order of `named_modules`. A tied head
        belongs to the language model: that comes first.
    """
    base: Any = unwrap(model)
    parts = {id(base): OTHER}
    found = anatomy(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    parts |= {id(module): tower_kind(name, module) for name, module in found.towers.items()}
    parts |= {id(head): HEAD, id(found.text): TEXT}
    known = getattr(model, "peft_config", None) or {}
    seen: set[int] = set()
    # What a wrapper of PEFT holds outside the base, such as the encoder of a prompt, is an adapter's.
    stack: list[tuple[str, nn.Module, str, bool]] = [("", model, _ADAPTERS[0] if known else OTHER, False)]
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
            owner = f"{_ADAPTERS[1] if name in REFERENCE_ADAPTERS else _ADAPTERS[0]} ({name})"
            below = part if not inside else owner if name in known else part if added else _ADAPTERS[0]
            stack.append((f"{prefix}{name}.", child, below, inside))


def tower_kind(name: str, module: nn.Module) -> str:
    """What to call a module beside the text model.

    Args:
        name: Its name.
        module: The module. One with a stack of layers is a tower; one without brings features to the text model's
            width.

    Returns:
        Such as `"vision tower (vision_tower)"`; `"head"` for what scores.
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
    """The state that an optimizer keeps, as it is in this process.

    Args:
        optimizer: A torch optimizer, or accelerate's wrapper of one; anything else has no state that can be seen.

    Returns:
        For the `id` of each parameter with state: the dtypes of its tensors, step counters left out, and the bytes of
        all of them.
    """
    held = getattr(getattr(optimizer, "optimizer", optimizer), "state", None)
    found: dict[int, tuple[frozenset[str], int]] = {}
    for parameter, state in (held or {}).items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, Mapping):
            continue
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        dtypes = frozenset(from_torch(tensor.dtype) for tensor in tensors if tensor.dim())
        if tensors:
            found[id(parameter)] = dtypes, sum(_size(tensor)[1] for tensor in tensors)
    return found


def first_products(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter, str]]:
    """The first layer of each part that multiplies what enters it with weights of its own.

    Args:
        model: A transformers model, wrapped or not.

    Yields:
        The layer, its weight, and its part: one for each part and dtype. Packed layers do not show what they compute
        in, and are left out.
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
        return Group(
            part, held, trainable, compute, listed(self.gradients), listed(self.states),
            self.tensors, self.elements, self.bytes, self.state_bytes, tuple(self.names),
        )  # fmt: skip


def listed(values: Iterable[str]) -> str | None:
    """Values for people, sorted; `None` where there are none."""
    return " and ".join(sorted(values)) or None


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements of a whole tensor, and the bytes that this process holds of it."""
    if type(tensor) not in _PLAIN or hasattr(tensor, "ds_numel"):
        if hasattr(tensor, "ds_numel"):  # ZeRO-3 leaves an empty tensor in its place
            part = getattr(tensor, "ds_tensor", None)
            return int(tensor.ds_numel), 0 if part is None else _size(part)[1]
        return tensor.numel(), _bytes(tensor)
    elements = tensor.numel()
    return elements, elements * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; of one that wraps others (shards, torchao's), of those that it holds."""
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        held = (getattr(tensor, name) for name in names)
        return sum(_bytes(part) for part in held if isinstance(part, torch.Tensor))
    size: int = tensor.numel() * tensor.element_size()
    return size


def _packed_size(parameter: nn.Parameter, state: Any, layer: nn.Module, width: int | None) -> tuple[int, int]:
    """The numbers that were packed, and the bytes of what is held of them: scales, their scales, and code tables too.

    Args:
        parameter: The packed parameter.
        state: Its `QuantState`, where it has one.
        layer: Its layer.
        width: Bits of a number, where they are bitsandbytes'.
    """
    shape = getattr(state, "shape", None)
    elements, size = _size(parameter)
    while state is not None:
        held = vars(state)
        size += sum(v.numel() * v.element_size() for v in held.values() if type(v) in _PLAIN)
        state = held.get("state2")
    if width == 8:  # with the parameter until the first forward pass, with the layer from then on
        scales = (getattr(owner, "SCB", None) for owner in (parameter, getattr(layer, "state", None)))
        size += next((_bytes(scale) for scale in scales if isinstance(scale, torch.Tensor)), 0)
    return elements if shape is None else math.prod(shape), size


def _format(parameter: nn.Parameter, state: Any, width: int | None) -> str:
    """What a packed parameter is packed as."""
    kind = getattr(state, "quant_type", None)
    return kind if isinstance(kind, str) else f"{width}-bit" if width else type(parameter).__name__


def _computes_in(layer: nn.Module, width: int | None) -> str | None:
    """What a packed layer multiplies in; `None` where it does not say."""
    if width == 8:
        return FLOAT16
    dtype = getattr(layer, "compute_dtype", None) if width else None
    return from_torch(dtype) if isinstance(dtype, torch.dtype) else None

"""What each part of a live model holds: dtypes, elements and bytes, and gradients and optimizer state where they are.

Parts are found as precision decisions find them, from the structure of the model (towers.py). Reads only; one pass
over the parameters; no tensor's contents are touched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .boundaries import MATMUL_LEAVES
from .census import bits
from .dtypes import FLOAT16, from_torch
from .quantized_loading import HEADS
from .towers import adapter_parameters, anatomy, is_quantized, unwrap


TEXT, HEAD, BUFFERS, OTHER = "language model", "head", "buffers", "other weights"
REFERENCE_ADAPTERS = ("ref", "reference")
"""What TRL calls the frozen copy of an adapter that the policy is compared with."""
_ADAPTERS = ("adapter", "reference adapter")
_PROJECTORS = ("project", "connector", "merger", "resampler", "perceiver")


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
    parts = part_names(model)
    packed = _packed_layers(model)
    rows: dict[tuple[Any, ...], _Row] = {}
    for parameter_name, parameter in model.named_parameters():
        part = name or parts.get(id(parameter), OTHER)
        held, compute, statistics = from_torch(parameter.dtype), None, 0
        if is_quantized(parameter):
            layer = packed.get(id(parameter))
            held, statistics = f"{_format(parameter, layer)} in {held}", _statistics(parameter, layer)
            compute = _computes_in(layer)
        compute = compute or circumstances.compute(part, parameter, held)
        key = (part, held, parameter.requires_grad and name is None, compute)
        row = rows.setdefault(key, _Row())
        elements, size = _size(parameter)
        row.add(parameter_name, elements, size + statistics)
        row.gradients |= (
            {circumstances.gradients[id(parameter)]} if id(parameter) in circumstances.gradients else set()
        )
        if id(parameter) in circumstances.states:
            dtypes, size = circumstances.states[id(parameter)]
            row.states |= dtypes
            row.state_bytes = (row.state_bytes or 0) + size
    order = list(dict.fromkeys(key[0] for key in rows))
    keys = sorted(rows, key=lambda key: (key[0].startswith(_ADAPTERS), order.index(key[0])))
    groups = [rows[key].group(*key) for key in keys]
    buffers: dict[str, _Row] = {}
    for buffer_name, buffer in model.named_buffers():
        buffers.setdefault(from_torch(buffer.dtype), _Row()).add(buffer_name, *_size(buffer))
    label = f"{BUFFERS} of {name}" if name else BUFFERS
    return (*groups, *(row.group(label, dtype, None, None) for dtype, row in buffers.items()))


def part_names(model: nn.Module) -> dict[int, str]:
    """The part that each parameter belongs to.

    Args:
        model: A transformers model, wrapped or not.

    Returns:
        Parts by the `id` of a parameter. A tied head belongs to the language model; what belongs to no part is left
        out.
    """
    base: Any = unwrap(model)
    anatomy_ = anatomy(model)
    found: dict[int, str] = {}
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    inside = {id(parameter) for parameter in base.parameters()}
    known = getattr(model, "peft_config", None) or {}
    if adapters or known:
        for name, parameter in model.named_parameters():
            if id(parameter) in adapters or id(parameter) not in inside:
                owner = next((component for component in reversed(name.split(".")) if component in known), None)
                kind = "reference adapter" if owner in REFERENCE_ADAPTERS else "adapter"
                found[id(parameter)] = f"{kind} ({owner})" if owner else kind
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    places: list[tuple[str, nn.Module | None]] = [
        *((tower_kind(name, module), module) for name, module in anatomy_.towers.items()),
        (TEXT, anatomy_.text),
        (HEAD, head),
    ]
    for part, module in places:
        for parameter in module.parameters() if module is not None else ():
            found.setdefault(id(parameter), part)
    return found


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
    if any(word in name.lower() for word in _PROJECTORS) or not stacked:
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
    parts, seen = part_names(model), set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, MATMUL_LEAVES) or isinstance(layer, nn.MultiheadAttention):
            continue
        if not isinstance(weight, nn.Parameter) or is_quantized(weight):
            continue
        key = (parts.get(id(weight), OTHER), weight.dtype, weight.requires_grad)
        if key not in seen:
            seen.add(key)
            yield layer, weight, key[0]


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
    if hasattr(tensor, "ds_numel"):  # ZeRO-3 leaves an empty tensor in its place
        part = getattr(tensor, "ds_tensor", None)
        return int(tensor.ds_numel), 0 if part is None else _size(part)[1]
    state = getattr(tensor, "quant_state", None)
    shape = getattr(state, "shape", None)
    return tensor.numel() if shape is None else shape.numel(), _bytes(tensor)


def _bytes(tensor: Any) -> int:
    """The bytes of a tensor; of one that wraps others (shards, torchao's), of those that it holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        held = (getattr(tensor, name) for name in names)
        return sum(_bytes(part) for part in held if isinstance(part, torch.Tensor))
    size: int = tensor.numel() * tensor.element_size()
    return size


def _packed_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The layers of bitsandbytes by the `id` of their packed weight."""
    layers = {}
    for layer in model.modules():
        weight = vars(layer)["_parameters"].get("weight")
        if weight is not None and is_quantized(weight) and bits(layer) is not None:
            layers[id(weight)] = layer
    return layers


def _format(parameter: nn.Parameter, layer: nn.Module | None) -> str:
    """What a packed parameter is packed as."""
    kind = getattr(getattr(parameter, "quant_state", None), "quant_type", None) or getattr(
        parameter, "quant_type", None
    )
    number = bits(layer) if layer is not None else None
    return str(kind) if isinstance(kind, str) else f"{number}-bit" if number else type(parameter).__name__


def _computes_in(layer: nn.Module | None) -> str | None:
    """What a packed layer multiplies in; `None` where it does not say."""
    if layer is None:
        return None
    if bits(layer) == 8:
        return FLOAT16
    dtype = getattr(layer, "compute_dtype", None)
    return from_torch(dtype) if isinstance(dtype, torch.dtype) else None


def _statistics(parameter: nn.Parameter, layer: nn.Module | None) -> int:
    """The bytes of what belongs to a packed parameter: scales, their scales, and code tables."""
    held: dict[int, torch.Tensor] = {}
    states: list[Any] = [getattr(parameter, "quant_state", None)]
    while states:
        state = states.pop()
        for value in vars(state).values() if hasattr(state, "__dict__") else ():
            if isinstance(value, torch.Tensor):
                held[id(value)] = value
            elif type(value) is type(state):
                states.append(value)
    for owner in (parameter, getattr(layer, "state", None)):
        scales = getattr(owner, "SCB", None)
        if isinstance(scales, torch.Tensor):
            held[id(scales)] = scales
    return sum(_bytes(tensor) for tensor in held.values())

"""The groups of modules that are put into float32 together, what they cost, and how they are written in a recipe."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.errors import PrecisionError
from ..model.parts import find_parts, is_quantized, unwrap
from ..weights.fp32_modules import find_modules


ROUTERS = ("router", "gate")
"""Names of the modules that choose experts. A `gate_proj` is a matrix of an MLP."""
EXTRA_BYTES = 2
"""Bytes of an element in float32 beyond those of half precision."""


@dataclass(frozen=True)
class Group:
    """Modules that are put into float32 together.

    Attributes:
        name: A label such as `"layers.0.self_attn"` or `"norms"`.
        modules: Qualified names in the base model, as `find_modules` returns them.
        nbytes: Bytes of their weights in float32 beyond those in half precision.
    """

    name: str
    modules: frozenset[str]
    nbytes: int


def find_groups(model: nn.Module) -> tuple[Group, ...]:
    """Divides a model by its structure.

    Args:
        model: A transformers model, possibly wrapped.

    Returns:
        The embeddings, all norms of the text model, each other module of each text layer (attention, MLP), the
        routers, the head, and each tower and projector. Modules that cannot compute in float32, such as those with
        8-bit layers, are left out.
    """
    return _groups(model, _named_groups(model))


def find_rules(model: nn.Module) -> tuple[Group, ...]:
    """Returns the sets of fixed rules, which a search has to beat.

    Args:
        model: A transformers model, possibly wrapped.

    Returns:
        The head, and the last 1, 2, 4, ... layers of the text model; without rules that cannot compute in float32.
    """
    layers, head = layer_names(model), head_name(model)
    rules = [] if head is None else [("head only", [head])]
    count = 1
    while count < len(layers):
        rules.append((f"last {count} layers" if count > 1 else "last layer", list(layers[-count:])))
        count *= 2
    return _groups(model, rules)


def divide(model: nn.Module, group: Group) -> tuple[Group, ...]:
    """Divides a group into the children of its modules, such as the projections of an attention layer.

    Args:
        model: The model.
        group: One of its groups.

    Returns:
        A group for each child with weights; none if the modules have no children.
    """
    base = unwrap(model)
    children = ((name, label) for name in sorted(group.modules) for label, _ in _children(base.get_submodule(name)))
    return _groups(model, ((f"{group.name}.{label}", [f"{name}.{label}"]) for name, label in children))


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the qualified names of the layers of the text model, the first layer first."""
    names = _names(model)
    return tuple(names[id(layer)] for stack in _stacks(find_parts(model).text) for layer in stack)


def head_name(model: nn.Module) -> str | None:
    """Returns the qualified name of the output head; `None` if the model has none."""
    base: Any = unwrap(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return _names(model).get(id(head))


def extra_bytes(model: nn.Module, names: Iterable[str]) -> int:
    """Returns the bytes that modules need in float32 beyond those in half precision.

    Args:
        model: The model.
        names: Names of the modules in the base model. Packed weights are not counted, because they stay packed.
    """
    base = unwrap(model)
    parameters = {id(p): p for name in names for p in base.get_submodule(name).parameters()}
    return EXTRA_BYTES * sum(p.numel() for p in parameters.values() if not is_quantized(p))


def shortest_patterns(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the shortest `fp32_modules` that select modules and no others.

    Args:
        model: The model.
        names: Qualified names in the base model.
    """
    chosen = set(find_modules(model, names))
    left, patterns = dict.fromkeys(name for name in _names(model).values() if name in chosen), []
    while left:
        name = next(iter(left))
        pieces = name.split(".")
        ends = [".".join(pieces[-count:]) for count in range(1, len(pieces) + 1) if not pieces[-count].isdigit()]
        pattern, covered = name, frozenset([name])
        for end in ends:
            matched = _in_float32(model, [end])
            if matched and matched <= chosen:
                pattern, covered = end, matched
                break
        patterns.append(pattern)
        left = {other: None for other in left if other not in covered}
    return patterns


def _groups(model: nn.Module, named: Iterable[tuple[str, list[str]]]) -> tuple[Group, ...]:
    """Makes groups of modules that can compute in float32; of equal groups, the first one."""
    found: dict[frozenset[str], Group] = {}
    for label, names in named:
        modules = _in_float32(model, names)
        if modules and modules not in found:
            found[modules] = Group(label, modules, extra_bytes(model, modules))
    return tuple(found.values())


def _in_float32(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """The modules that `fp32_modules` with these names selects; empty if one of them cannot compute in float32."""
    try:
        return frozenset(find_modules(model, names))
    except PrecisionError:
        return frozenset()


def _named_groups(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    parts, names = find_parts(model), _names(model)
    if parts.embeddings is not None and id(parts.embeddings) in names:
        yield "embeddings", [names[id(parts.embeddings)]]
    norms, routers = [], []
    inside = {id(stack) for stack in _stacks(parts.text)}
    for label, child in _children(parts.text):
        if id(child) in inside or child is parts.embeddings:
            continue
        if _is_norm(child):
            norms.append(names[id(child)])
        else:
            yield label, [names[id(child)]]
    for stack in _stacks(parts.text):
        for number, layer in enumerate(stack):
            for label, child in _children(layer):
                if _is_norm(child):
                    norms.append(names[id(child)])
                else:
                    yield f"layers.{number}.{label}", [names[id(child)]]
            routers += [names[id(m)] for name, m in layer.named_modules() if name.split(".")[-1] in ROUTERS]
    if norms:
        yield "norms", norms
    if routers:
        yield "routers", routers
    head = head_name(model)
    if head is not None:
        yield "head", [head]
    for name, tower in parts.towers.items():
        yield name, [names[id(tower)]]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in unwrap(model).named_modules() if name}


def _stacks(text: nn.Module) -> Iterator[nn.ModuleList]:
    for child in text.children():
        if isinstance(child, nn.ModuleList) and next(child.parameters(), None) is not None:
            yield child


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None)


def _is_norm(module: nn.Module) -> bool:
    return all(parameter.ndim < 2 for parameter in module.parameters())

"""Names of modules and parameters without the names of wrappers, and the alignment of fused projections."""

import functools
from collections.abc import Iterable, Iterator

from torch import nn

from ..model.parts import unwrap


_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_flat_param"})
"""Pieces of names that FSDP, activation checkpointing and `torch.compile` add."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "kv_proj": ("k_proj", "v_proj"),
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
}
"""Projections that engines and some models fuse, and their parts in order."""


@functools.lru_cache(maxsize=2**14)
def canonical(name: str) -> str:
    """Returns a qualified name without the pieces that wrappers add.

    Args:
        name: The name of a module or a parameter, such as `base_model.model.model.layers.0._orig_mod.mlp`.
    """
    pieces = [piece for piece in name.split(".") if piece not in _WRAPPERS]
    while pieces[:2] == ["base_model", "model"]:  # PEFT
        pieces = pieces[2:]
    if pieces[:1] == ["module"]:  # DDP
        pieces = pieces[1:]
    return ".".join(pieces)


def without_adapters(name: str) -> str:
    """Returns the name that a module or parameter of a PEFT layer has in the model without adapters."""
    pieces = name.split(".")
    kept = [piece for piece in pieces if piece != "base_layer"]
    if "modules_to_save" in kept:
        place = kept.index("modules_to_save")
        del kept[place : place + 2]  # the name of the adapter follows
    return ".".join(kept)


def parent_of(name: str) -> str:
    """Returns the name of the module around a module; empty for the model."""
    return name.rpartition(".")[0]


def watched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules whose calls are recorded, by canonical name; the model itself has an empty name.

    Left out are the insides of compiled modules, where hooks would be compiled, and of modules whose fast path looks
    for hooks (`nn.TransformerEncoderLayer`, `nn.MultiheadAttention`).

    Args:
        model: A model, wrapped or not.
    """
    yield "", model
    base = unwrap(model)
    seen, stack = {id(model), id(base)}, [("", base)]
    if base is not model and not _opaque(base) and not _compiled(model):
        yield "", base  # called by `generate`, or by a trainer that unwraps the model
    if _compiled(model) or _compiled(base):
        return
    while stack:
        name, module = stack.pop()
        if name and id(module) not in seen:
            seen.add(id(module))
            yield canonical(name), module
        if _opaque(module) or (name and _compiled(module)):
            continue
        children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        stack += reversed(children)


def _compiled(module: nn.Module) -> bool:
    inner = "_orig_mod" in module._modules  # `hasattr` takes long if a module does not have the attribute
    return inner or getattr(module, "_compiled_call_impl", None) is not None


def _opaque(module: nn.Module) -> bool:
    return isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention))


def pairs(first: Iterable[str], second: Iterable[str]) -> dict[str, str]:
    """Aligns the names of two recordings.

    Args:
        first: The names of one recording.
        second: The names of the other.

    Returns:
        The name in the second recording by that in the first. A name of a PEFT layer that the other recording does not
        have is aligned with the name without adapters.
    """
    mine, theirs = list(dict.fromkeys(first)), list(dict.fromkeys(second))
    known, taken = set(theirs), {}
    bare = {without_adapters(name): name for name in reversed(theirs) if without_adapters(name) != name}
    for name in mine:
        if name in known:
            taken[name] = name
    for name in mine:
        stripped = without_adapters(name)
        if name not in taken and stripped != name and stripped in known and stripped not in mine:
            taken[name] = stripped
        elif name not in taken and name in bare and bare[name] not in mine:
            taken[name] = bare[name]
    return taken


def fused_parts(name: str) -> tuple[str, ...]:
    """Returns the names of the projections that a fused module or its weight replaces, in order; empty if none.

    Args:
        name: Such as `layers.0.self_attn.qkv_proj` or `layers.0.self_attn.qkv_proj.weight`.
    """
    pieces = name.split(".")
    place = next((i for i, piece in enumerate(pieces) if piece in FUSED), None)
    if place is None:
        return ()
    return tuple(".".join((*pieces[:place], part, *pieces[place + 1 :])) for part in FUSED[pieces[place]])

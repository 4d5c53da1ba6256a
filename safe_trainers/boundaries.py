"""Dtype boundaries inside a model: a cast exactly where two dtypes would otherwise meet and fail.

A tower has two boundaries. What enters one of its leaves follows that leaf's weights; what the tower gives back
follows the embeddings that it is merged into. Both casts act only where torch would refuse the operation (a matrix
product of two dtypes, an index put into another dtype), or where the model casts alike by itself, so they change no
number of a run that worked without them.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from .census import first_dtype
from .towers import FEATURE_METHODS, Anatomy, is_quantized


MATMUL_LEAVES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
"""Modules that multiply their input with their weights: two dtypes always fail there."""
NORM_LEAVES = (nn.LayerNorm, nn.GroupNorm)
"""Modules that scale their input: half weights fail with any other dtype, float32 weights on some devices."""

_LEAVES = (*MATMUL_LEAVES, *NORM_LEAVES)
_MARK = "_safe_trainers_boundary"


def guard_leaves(modules: Iterable[nn.Module]) -> int:
    """Makes what enters the leaves of some modules follow the leaves' weights.

    The hook is a function of this module without state, so it survives `deepcopy` and pickling, and gradient
    checkpointing runs it again. Under autocast it does nothing: autocast casts by itself.

    Args:
        modules: The modules, whose leaves below are guarded. A leaf is guarded once, however often it is named.

    Returns:
        How many leaves were guarded now.
    """
    count = 0
    for module in modules:
        for leaf in module.modules():
            weight = _own_weight(leaf)
            if weight is None or is_quantized(weight) or _follow_weights in leaf._forward_pre_hooks.values():
                continue
            leaf.register_forward_pre_hook(_follow_weights, with_kwargs=True)
            count += 1
    return count


def guard_features(parts: Anatomy) -> tuple[str, ...]:
    """Makes what towers give back follow the embeddings that it is merged into.

    Each `get_*_features` of the modules around the text model gets a wrapper bound to that module: it keeps the
    method's signature, which `generate` reads, and finds the module through `self`, so that a `deepcopy` of the model
    has a wrapper of its own.

    Args:
        parts: The anatomy of the model.

    Returns:
        The names of the methods that were wrapped now.
    """
    wrapped = []
    for container in parts.containers:
        for name in FEATURE_METHODS:
            method = getattr(container, name, None)
            function = getattr(method, "__func__", None)
            if function is None or hasattr(function, _MARK):
                continue
            setattr(container, name, MethodType(_features_follow_embeddings(function), container))
            wrapped.append(f"{type(container).__name__}.{name}")
    return tuple(wrapped)


def release_features(parts: Anatomy) -> bool:
    """Takes back what `guard_features` did.

    Args:
        parts: The anatomy of the model.

    Returns:
        Whether there was anything to take back.
    """
    released = False
    for container in parts.containers:
        for name in FEATURE_METHODS:
            if hasattr(getattr(vars(container).get(name), "__func__", None), _MARK):
                delattr(container, name)
                released = True
    return released


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating tensors of a nested value to `dtype`, without changing the value that was given.

    Args:
        value: A tensor; or a mapping, list or tuple of such values, ModelOutputs included, also with tensors that are
            attributes and no keys (SmolVLM's `pooler_output`).
        dtype: A floating dtype.

    Returns:
        The same tensors where the dtype was right already, the same object where all were.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is dict:
        cast = {key: cast_floating(item, dtype) for key, item in value.items()}
        return value if all(cast[key] is value[key] for key in value) else cast
    if isinstance(value, Mapping):
        return _cast_output(value, dtype)
    if isinstance(value, (list, tuple)):
        items = [cast_floating(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _cast_output(output: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, Any]:
    """`cast_floating` for a mapping, which may be a ModelOutput with attributes beside its keys."""
    held: dict[str, Any] = {**dict(output), **getattr(output, "__dict__", {})}
    changed = {name: new for name, old in held.items() if (new := cast_floating(old, dtype)) is not old}
    if not changed:
        return output
    copied: Any = copy.copy(output)
    for name, new in changed.items():
        if name in output:
            copied[name] = new
        else:
            setattr(copied, name, new)
    return copied


def _features_follow_embeddings(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def features(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = function(self, *args, **kwargs)
        dtype = first_dtype(self.get_input_embeddings())  # type: ignore[operator]
        return output if dtype is None else cast_floating(output, dtype)

    setattr(features, _MARK, True)
    return features


def _own_weight(leaf: nn.Module) -> torch.Tensor | None:
    """The floating weight that a leaf multiplies its input with, `None` where the module is no such leaf."""
    if isinstance(leaf, nn.MultiheadAttention):
        return leaf.in_proj_weight if leaf.in_proj_weight is not None else leaf.q_proj_weight
    weight = leaf.weight if isinstance(leaf, _LEAVES) else None
    return weight if isinstance(weight, torch.Tensor) else None


def _follow_weights(leaf: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = _own_weight(leaf)
    if weight is not None and len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) == weight.dtype:
        return None  # as nearly always
    if weight is None or weight.device.type == "meta" or torch.is_autocast_enabled(weight.device.type):
        return None
    if isinstance(leaf, NORM_LEAVES) and weight.dtype == torch.float32 and weight.device.type == "cpu":
        return None  # the CPU's kernel takes mixed inputs; CUDA's does not (pytorch#135969)
    new_args, new_kwargs = cast_floating(args, weight.dtype), cast_floating(kwargs, weight.dtype)
    return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)

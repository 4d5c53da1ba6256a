"""Hooks that cast tensors where an operation in a model would otherwise combine two dtypes and fail.

The inputs of a tower's layers are cast to the dtype of the layers' weights, and the tower's outputs to the dtype of
the embeddings into which they are merged. A cast acts only if PyTorch would refuse the operation (a matrix product of
two dtypes, an `index_put` into another dtype), or if the model itself would cast in the same way. A run that works
without the hooks therefore computes the same numbers with them.
"""

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.patches import has_replacements, keep, replace, replaced_by, restore
from ..model.inventory import first_dtype
from ..model.parts import (
    FEATURE_METHODS,
    MATMUL_LEAVES,
    NORM_LEAVES,
    ModelParts,
    adapter_parameters,
    feature_methods,
    input_embeddings,
    is_quantized,
)


_PATCH = "features"
_LEAVES = (*MATMUL_LEAVES, *NORM_LEAVES)
_METHODS = ("forward", "_old_forward", "disable_adapter", *FEATURE_METHODS)
"""Methods of modules that this package replaces."""
_MOVED = (("forward", "_old_forward"), ("_old_forward", "forward"))
"""Methods, and where they are after accelerate has added its own hook to a module, or removed it."""
_ATTRIBUTES = (*_METHODS, "_original_forward", "_is_accelerate_prepared")
"""Attributes of modules that this package and accelerate replace."""
_HOOK_TABLES = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
                "_forward_hooks_always_called")  # fmt: skip


def guard_leaves(modules: Iterable[nn.Module]) -> int:
    """Casts the inputs of matrix and norm layers to the dtype of their weights.

    The hook is a module-level function without state, so that `deepcopy`, pickling and gradient checkpointing keep it.
    It does nothing under autocast, which casts these inputs itself.

    Args:
        modules: The modules that contain the layers. Layers that already have the hook are skipped.

    Returns:
        The number of layers that got the hook.
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


def guard_features(parts: ModelParts) -> tuple[str, ...]:
    """Casts the outputs of towers to the dtype of the embeddings into which they are merged.

    Each `get_*_features` method of the modules around the text model is replaced as `around_features` says.

    Args:
        parts: The parts of the model.

    Returns:
        The names of the methods that were replaced.
    """
    wrapped = []
    for container, name, function in feature_methods(parts):
        if _PATCH not in replaced_by(container, name):
            replace(_PATCH, container, name, MethodType(around_features(function, _follow_embeddings), container))
            wrapped.append(f"{type(container).__name__}.{name}")
    return tuple(wrapped)


def widen_embeddings(embeddings: nn.Module) -> RemovableHandle:
    """Casts the output of the input embeddings to float32 under autocast, as if their weights were float32.

    Embeddings in one half format round the residual stream to it until the first layer adds to it, and so round away
    bits that the other format of autocast has.

    Args:
        embeddings: The module of the input embeddings.

    Returns:
        The handle that removes the cast.
    """
    return embeddings.register_forward_hook(_widen)


def guard_inputs(layer: nn.Module, dtype: torch.dtype) -> None:
    """Casts the inputs of a layer to a dtype, also under autocast.

    Args:
        layer: The layer.
        dtype: The dtype.
    """
    layer.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def remove_casts(model: nn.Module) -> None:
    """Removes the casts that this package has placed on the modules of a model, and what keeps modules in float32.

    Args:
        model: The model, wrapped or not, or a `deepcopy` of one that had casts.
    """
    for module in model.modules():
        if has_replacements(module):
            for name in _METHODS:
                restore(module, name)
            for name, kept_as in _MOVED:
                restore(module, name, kept_as)
        for hooks in filter(None, (module._forward_pre_hooks, module._forward_hooks)):
            for key in [key for key, hook in hooks.items() if _own_hook(hook) is not None]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def count_casts(model: nn.Module) -> Counter[Any]:
    """Counts what `remove_casts` would remove from a model, by kind.

    Args:
        model: The model, wrapped or not.

    Returns:
        The number of replaced methods by the id of the patch, and of hooks by function and arguments.
    """
    found: Counter[Any] = Counter()
    for module in model.modules():
        if has_replacements(module):
            for name in _METHODS:
                found.update(replaced_by(module, name))
            for name, kept_as in (*_MOVED, ("forward", "_original_forward")):
                found.update(replaced_by(module, name, kept_as))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():
                if (function := _own_hook(hook)) is not None:
                    found[function, getattr(hook, "args", ())] += 1
    del found["fsdp2-forward"]  # no cast: accelerate may replace it when it prepares the model
    return found


@contextlib.contextmanager
def casts_kept_on_error(model: nn.Module) -> Iterator[None]:
    """Restores the methods and hooks of a model's modules, and the dtypes of its weights, if the block fails.

    Weights that the block has cast to a wider dtype are cast back, which is exact; others are left.

    Args:
        model: The model, wrapped or not.
    """
    attributes = [keep(module, *_ATTRIBUTES) for module in model.modules()]
    tables = [getattr(module, name) for module in model.modules() for name in _HOOK_TABLES]
    hooks = [(table, list(table.items()) if table else ()) for table in tables]
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for put_back in attributes:
            put_back()
        for table, items in hooks:
            before = dict(items)
            # Hooks that others have added stay: transformers installs its own once, and counts on them.
            added = {key: hook for key, hook in table.items() if key not in before and _own_hook(hook) is None}
            table.clear()
            table.update(before | added)
        for parameter, dtype in dtypes:
            if parameter.is_floating_point() and parameter.dtype.itemsize > dtype.itemsize:
                parameter.data = parameter.data.to(dtype)
        raise


def _own_hook(hook: Any) -> Any:
    """Returns the function of a hook of this package; `None` for others, which may not be hashable."""
    function = getattr(hook, "func", hook)
    return next((own for own in _HOOKS if own is function), None)


def _widen(module: nn.Module, args: Any, output: Any) -> Any:
    half = isinstance(output, torch.Tensor) and output.is_floating_point()
    return output.float() if half and torch.is_autocast_enabled(output.device.type) else None


def release_features(parts: ModelParts) -> bool:
    """Restores the methods that `guard_features` replaced.

    Args:
        parts: The parts of the model.

    Returns:
        Whether any method had been replaced.
    """
    released = False
    for container in parts.containers:
        for name in FEATURE_METHODS:
            released = restore(container, name) or released
    return released


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a nested value, without modifying the value.

    Args:
        value: A tensor, or a mapping (including `ModelOutput`), list or tuple of such values. Tensors that are
            attributes of a `ModelOutput` but not keys (SmolVLM's `pooler_output`) are also cast.
        dtype: A floating-point dtype.

    Returns:
        The value with cast tensors; the same object if nothing had to be cast.
    """
    return map_floating(lambda tensor: tensor.to(dtype), value)


def map_floating(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies a function to the floating-point tensors of a nested value, without modifying the value.

    Args:
        function: Returns the new tensor, or the same one.
        value: As in `cast_floating`.

    Returns:
        The value with new tensors; the same object if the function returned the same tensors.
    """
    if isinstance(value, torch.Tensor):
        return function(value) if value.is_floating_point() else value
    if type(value) is dict:
        mapped = {key: map_floating(function, item) for key, item in value.items()}
        return value if all(mapped[key] is value[key] for key in value) else mapped
    if isinstance(value, Mapping):
        return _map_output(function, value)
    if isinstance(value, (list, tuple)):
        items = [map_floating(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _map_output(function: Callable[[torch.Tensor], torch.Tensor], output: Mapping[str, Any]) -> Mapping[str, Any]:
    """Applies `map_floating` to a mapping, which may be a `ModelOutput` with additional attributes."""
    entries: dict[str, Any] = {**dict(output), **getattr(output, "__dict__", {})}
    changed = {name: new for name, old in entries.items() if (new := map_floating(function, old)) is not old}
    return with_entries(output, changed) if changed else output


def with_entries(output: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a copy of a mapping with other entries.

    Args:
        output: The mapping, which may be a `ModelOutput` with additional attributes; not modified.
        entries: The new keys and attributes by name.
    """
    copied: Any = copy.copy(output)
    for name, new in entries.items():
        if name in output:
            copied[name] = new
        else:
            setattr(copied, name, new)
    return copied


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the floating-point tensors of a result.

    Args:
        value: A tensor, or mappings, model outputs, lists and tuples of tensors.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in {**dict(value), **getattr(value, "__dict__", {})}.values():
            yield from floating_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from floating_tensors(item)


def around_features(
    function: Callable[..., Any], around: Callable[[nn.Module, partial[Any], bool], Any]
) -> Callable[..., Any]:
    """Returns a `get_*_features` method inside another function.

    The result keeps the method's signature, which `generate` inspects, and takes the module first. Bound to a module,
    it is copied with it: a `deepcopy` of a model uses its own module.

    Args:
        function: The function of the method.
        around: Gets the module, the call of the method, and whether gradients of its inputs are needed. Returns the
            features.
    """

    @functools.wraps(function)
    def features(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in floating_tensors((args, kwargs)))
        return around(module, partial(function, module, *args, **kwargs), differentiated)

    return features


def _follow_embeddings(module: nn.Module, call: partial[Any], differentiated: bool) -> Any:
    output, embeddings = call(), input_embeddings(module)
    if embeddings is None:
        return output
    wide = _widen in embeddings._forward_hooks.values()
    dtype = torch.float32 if wide else first_dtype(embeddings)
    return output if dtype is None else cast_floating(output, dtype)


def _own_weight(leaf: nn.Module) -> torch.Tensor | None:
    """Returns the weight with which a layer multiplies its input; `None` for other modules."""
    if isinstance(leaf, nn.MultiheadAttention):
        return leaf.in_proj_weight if leaf.in_proj_weight is not None else leaf.q_proj_weight
    if not isinstance(leaf, _LEAVES):
        return None
    # `leaf.weight` of a parametrised layer (spectral norm) would be computed, which may change its state.
    weight = leaf._parameters.get("weight", leaf.__dict__.get("weight"))
    if weight is None and "parametrizations" in leaf._modules:
        parametrized: Any = leaf.parametrizations
        weight = next(parametrized.weight.parameters(), None) if "weight" in parametrized else None
    return weight if isinstance(weight, torch.Tensor) else None


def _follow_weights(leaf: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = _own_weight(leaf)
    if weight is not None and len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) == weight.dtype:
        return None  # fast path
    if weight is None or weight.device.type == "meta" or torch.is_autocast_enabled(weight.device.type):
        return None
    if isinstance(leaf, NORM_LEAVES) and weight.dtype == torch.float32 and weight.device.type == "cpu":
        return None  # the CPU kernel supports mixed dtypes, the CUDA kernel does not (pytorch#135969)
    new_args, new_kwargs = cast_floating(args, weight.dtype), cast_floating(kwargs, weight.dtype)
    return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)


def guard_fused(model: nn.Module) -> int:
    """Casts the input of modules that multiply with parameters of their own, such as fused experts.

    Such a module's own matrices contain most of its parameters. Only the first floating-point argument is cast,
    because later ones (routing weights) scale the result and may be wider. Under autocast the hook does nothing.

    Args:
        model: The model. Modules that already have the hook are skipped.

    Returns:
        The number of modules that got the hook.
    """
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    count = 0
    for module in model.modules():
        matrix = _matrix(module)
        if (
            matrix is None
            or id(matrix) in adapters
            or isinstance(module, (*MATMUL_LEAVES, *NORM_LEAVES, nn.Embedding, nn.EmbeddingBag))
            or any(is_quantized(parameter) for parameter in module.parameters(recurse=False))
            # A large module with a small matrix of its own (query tokens) does not multiply its input with it.
            or 2 * sum(map(torch.Tensor.numel, _matrices(module))) <= sum(p.numel() for p in module.parameters())
            or _follow_matrix in module._forward_pre_hooks.values()
        ):
            continue
        module.register_forward_pre_hook(_follow_matrix, with_kwargs=True)
        count += 1
    return count


def _matrix(module: nn.Module) -> nn.Parameter | None:
    """Returns the largest matrix among a module's own parameters; `None` if there is none."""
    return max(_matrices(module), key=torch.Tensor.numel, default=None)


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from (parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
    # While an adapter on a parameter is active, torch stores the parameter here.
    for parametrization in getattr(module, "parametrizations", {}).values():
        yield parametrization.original


def _follow_matrix(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    matrix = _matrix(module)
    if matrix is None or matrix.is_meta or torch.is_autocast_enabled(matrix.device.type):
        return None
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dtype == matrix.dtype:
                return None
            return (*args[:index], value.to(matrix.dtype), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if value.dtype == matrix.dtype else (args, {**kwargs, name: value.to(matrix.dtype)})
    return None


_HOOKS = (_follow_weights, _follow_matrix, _widen, _cast_inputs)

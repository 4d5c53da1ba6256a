"""Finds the text model and the towers of a model from its structure, without a list of model families.

The text model is the innermost module that contains the input embeddings and the stack of decoder layers. Its sibling
modules, and those of the modules around it, are towers and projectors. This was checked with the families of
transformers 4.57 to 5.23, and also works for remote code with the same structure.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn


FEATURE_METHODS = ("get_image_features", "get_video_features", "get_audio_features")
"""The methods of transformers models that return a tower's features, which are merged into the embeddings."""
REFERENCE_ADAPTERS = ("ref", "reference")
"""TRL's names for the frozen copy of an adapter that serves as the reference."""
_PATHS: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""Where a search found the input embeddings of a model."""


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model.

    Attributes:
        embeddings: The input embeddings; `None` if the model has none.
        text: The module with the decoder layers and the input embeddings.
        containers: The modules around the text model, outermost first; they merge features into embeddings.
        towers: Modules with weights outside the text model, by qualified name, outermost only.
    """

    embeddings: nn.Module | None
    text: nn.Module
    containers: tuple[nn.Module, ...]
    towers: dict[str, nn.Module]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this rank holds.

    Args:
        tensor: A tensor, distributed (`DTensor`) or not.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def tensors_in(value: Any, name: str, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested containers by dotted name; skips other objects such as caches.

    Args:
        value: A tensor, or mappings, tuples and lists of tensors.
        name: Its name; may be empty.
        depth: How deep containers are read.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_meta and value.layout == torch.strided:
            yield name, value
    elif depth > 0 and isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}" if name else str(key), depth - 1)
    elif depth > 0 and isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{name}.{index}", depth - 1)


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside DDP, `torch.compile` and PEFT wrappers.

    Args:
        model: A model, possibly wrapped.
    """
    while True:
        children = getattr(model, "_modules", {})  # `hasattr` takes long if a module does not have the attribute
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in children:
            model = model._orig_mod  # type: ignore[assignment]
        elif "base_model" in children and hasattr(model, "get_base_model"):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def find_parts(model: nn.Module) -> ModelParts:
    """Finds the parts of a model.

    Args:
        model: A transformers model, possibly wrapped.

    Returns:
        The parts. If no module contains both the embeddings and a stack of layers, the whole model counts as text.
    """
    base = unwrap(model)
    embeddings = input_embeddings(base)
    head = _call(base, "get_output_embeddings")
    chain = list(_ancestors(base, embeddings))  # outermost first
    depth = next((i for i in reversed(range(len(chain))) if _has_layers(chain[i])), None)
    if depth is None:
        return ModelParts(embeddings, base, (), {})
    text = chain[depth]
    inside = {id(module) for module in (*chain, embeddings, head)}
    # The head of a causal language model inside a composed model is not a tower.
    inside |= {id(_call(container, "get_output_embeddings")) for container in chain[:depth]}
    towers = {
        name: module
        for container in chain[:depth]
        for name, module in container.named_children()
        if id(module) not in inside and next(floating_parameters(module), None) is not None
    }
    return ModelParts(embeddings, text, tuple(chain[:depth]), towers)


def feature_methods(parts: ModelParts) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Yields the `get_*_features` methods of the modules around the text model.

    Args:
        parts: The parts of the model.

    Yields:
        The module, the name of the method, and its function, which takes the module first.
    """
    for container in parts.containers:
        for name in FEATURE_METHODS:
            function = getattr(getattr(container, name, None), "__func__", None)
            if function is not None:
                yield container, name, function


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """Returns the input embeddings of a model.

    Args:
        model: The model, or a module around its text model.

    Returns:
        What `get_input_embeddings` returns; if the model does not have it, the embeddings with the most rows, which
        are those of the vocabulary. `None` if there are none.
    """
    embeddings = _call(model, "get_input_embeddings")
    if embeddings is None:
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
        embeddings = max(tables, key=lambda table: table.num_embeddings, default=None)
    return embeddings


def floating_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the floating-point parameters of a module that are neither quantised nor an adapter's.

    Args:
        module: Any module.

    Yields:
        The parameters. A `Params4bit` is left out even if its storage dtype is bfloat16.
    """
    stack, seen = [module], set()
    while stack:
        place = stack.pop()
        if id(place) in seen:
            continue
        seen.add(id(place))
        for parameter in place._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not is_quantized(parameter) and parameter.is_floating_point():
                yield parameter
        if place._modules:
            added = {id(layer) for layer in adapter_layers(place)}
            below = reversed(place._modules.values())
            stack += [child for child in below if child is not None and id(child) not in added]


def adapter_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that PEFT added to a module: LoRA factors, DoRA magnitudes, `modules_to_save`."""
    for child in module.modules():
        for layer in adapter_layers(child):
            yield from layer.parameters()


def adapter_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the containers that PEFT added to one module, without its children; each has one entry per adapter."""
    # `adapter_layer_names` and `modules_to_save` are PEFT's plug-in contract, so PEFT need not be imported. They are
    # looked up directly, because `nn.Module.__getattr__` is slow for missing attributes of thousands of modules.
    names: Any = vars(module).get("adapter_layer_names") or getattr(type(module), "adapter_layer_names", ())
    for name in names:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Module):
            yield layer
    copies = module._modules.get("modules_to_save")
    if isinstance(copies, nn.ModuleDict):
        yield copies


def is_reference(scored: nn.Module, policy: nn.Module) -> bool:
    """Whether a scored model is not the policy, or is the policy without its adapters or with TRL's copy of them.

    Args:
        scored: The model that is scored, possibly wrapped.
        policy: The policy model, possibly wrapped.
    """
    if scored is not policy:
        base, other = (unwrap(extract_model_from_parallel(model)) for model in (scored, policy))
        if base is not other:
            return True
    disabled, active = adapter_state(scored)
    if disabled or not any(name in REFERENCE_ADAPTERS for name in active):
        return disabled
    adapters = getattr(extract_model_from_parallel(policy), "peft_config", {})
    return any(is_copy(name, adapters) for name in active)


def is_copy(name: str, adapters: Collection[str]) -> bool:
    """Whether an adapter is TRL's copy of another one, which serves as the reference.

    Args:
        name: Name of the adapter.
        adapters: Names of all adapters of the model. The only adapter is the policy's, also if it has such a name.
    """
    return name in REFERENCE_ADAPTERS and len(adapters) > 1


def adapter_state(model: nn.Module) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the adapters of a model are disabled, and the names of the active ones.

    Args:
        model: A model, possibly wrapped. All its layers have the same adapters, so that the first one is asked.
    """
    for module in model.modules():
        if vars(module).get("_adapters_disabled"):  # PEFT's wrapper, also without layers, as with prompt tuning
            return True, ()
        if hasattr(type(module), "adapter_layer_names") and hasattr(module, "active_adapters"):
            active: Any = module.active_adapters
            return bool(module.disable_adapters), tuple(active)
    return False, ()


def elements_of(parameter: torch.Tensor) -> int:
    """Returns the number of elements of a parameter, also if ZeRO-3 has replaced it with an empty tensor."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a tensor is packed. The dtype of a packed tensor is that of its storage, or of its scales.

    Args:
        parameter: A parameter or buffer. A `Params4bit` counts as packed even if its storage dtype is bfloat16.
    """
    return (
        not parameter.is_floating_point()
        or parameter.element_size() < 2
        or wraps_tensors(type(parameter))
        or hasattr(parameter, "quant_state")
        or hasattr(parameter, "SCB")
    )


@functools.cache
def wraps_tensors(kind: type) -> bool:
    """Whether tensors of a class hold their values in other tensors, as packed values and scales.

    Args:
        kind: The class of a tensor. The classes of PyTorch itself distribute values (`DTensor`) or trace them, and do
            not pack them.
    """
    return hasattr(kind, "__tensor_flatten__") and library_of(kind) != "torch"


def holds_packed(module: nn.Module, in_buffers: bool) -> bool:
    """Whether a module has a packed matrix of its own.

    Args:
        module: Any module.
        in_buffers: Whether a matrix of integers that is a buffer counts, as in layers of GPTQ and AWQ. Modules of
            unquantised models also have such buffers, such as position ids, but next to children or a matrix of
            weights.
    """
    own = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.ndim > 1]
    if any(map(is_quantized, own)):
        return True
    if own or module._modules or not in_buffers:
        return False
    buffers = [buffer for buffer in module._buffers.values() if buffer is not None and buffer.dtype != torch.bool]
    return any(buffer.ndim > 1 and is_quantized(buffer) for buffer in buffers)


def library_of(kind: type) -> str:
    """Returns the name of the installed package that defines a class."""
    return kind.__module__.partition(".")[0]


def _call(module: nn.Module, method: str) -> Any:
    """Returns the result of an accessor of the model; `None` if the model does not implement it."""
    if not callable(getattr(module, method, None)):
        return None
    try:
        return getattr(module, method)()
    except (NotImplementedError, AttributeError):  # transformers' default looks for attributes that may not exist
        return None


def _ancestors(root: nn.Module, target: nn.Module | None) -> Iterator[nn.Module]:
    """Yields the modules that contain `target`, outermost first, without `target` itself."""
    if target is None:
        return
    path = _PATHS.get(root, ())
    if not path or _at(root, path) is not target:  # a search passes through all modules of a model
        name = next((name for name, module in root.named_modules() if module is target), None)
        path = _PATHS[root] = tuple(name.split(".")) if name else ()
    module: Any = root
    for part in path:
        yield module
        module = getattr(module, part)


def _at(module: Any, path: tuple[str, ...]) -> Any:
    """Returns the module at a path of names of children; `None` if there is none."""
    for part in path:
        module = getattr(module, part, None)
    return module


def _has_layers(module: nn.Module) -> bool:
    """Whether a child of `module` is a list of layers with weights."""
    return any(
        isinstance(child, nn.ModuleList) and next(child.parameters(), None) is not None for child in module.children()
    )


HEADS = ("score", "classifier", "classification_head", "qa_outputs", "v_head")
"""Names of new heads that are added to a base for a task, unlike the head of a language model."""

MATMUL_LEAVES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
"""Modules that multiply their input with their weights; they fail if the two dtypes differ."""

NORM_LEAVES = (nn.LayerNorm, nn.GroupNorm)
"""Modules that scale their input; half weights fail with any other input dtype, float32 weights on some devices."""

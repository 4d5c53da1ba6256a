"""Where the towers of a model are, found from its structure and not from a list of families.

The text model is the lowest module that holds the input embeddings and the stack of decoder layers. What hangs beside
it, on the modules that contain it, are the towers and projectors: right for every family of transformers 4.57 to 5.23
that was measured, and for remote code of the same shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


FEATURE_METHODS = ("get_image_features", "get_video_features", "get_audio_features")
"""The methods by which transformers' models ask a tower for the features that they merge into the embeddings."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model that precision decisions are about.

    Attributes:
        embeddings: The input embeddings, or `None` where the model has none.
        text: The module with the decoder layers and the input embeddings.
        containers: The modules around the text model, outermost first; they merge features into embeddings.
        towers: Modules outside the text model that hold weights, by qualified name, outermost only.
    """

    embeddings: nn.Module | None
    text: nn.Module
    containers: tuple[nn.Module, ...]
    towers: dict[str, nn.Module]


def unwrap(model: nn.Module) -> nn.Module:
    """The base model inside DDP, `torch.compile` and PEFT wrappers.

    Args:
        model: Any of them, or the model itself.

    Returns:
        The model with the family's own class.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def anatomy(model: nn.Module) -> Anatomy:
    """Finds the parts of a model.

    Args:
        model: A transformers model, wrapped or not.

    Returns:
        Its parts. A text-only model has no containers with towers beside its text model; a model whose embeddings are
        not under a stack of layers counts as text as a whole.
    """
    base = unwrap(model)
    embeddings = _call(base, "get_input_embeddings")
    head = _call(base, "get_output_embeddings")
    chain = list(_ancestors(base, embeddings))  # outermost first
    depth = next((i for i in reversed(range(len(chain))) if _has_layers(chain[i])), None)
    if depth is None:
        return Anatomy(embeddings, base, (), {})
    text = chain[depth]
    inside = {id(module) for module in (*chain, embeddings, head)}
    # The model inside a causal language model has a head of its own beside it.
    inside |= {id(_call(container, "get_output_embeddings")) for container in chain[:depth]}
    towers = {
        name: module
        for container in chain[:depth]
        for name, module in container.named_children()
        if id(module) not in inside and next(floating_parameters(module), None) is not None
    }
    return Anatomy(embeddings, text, tuple(chain[:depth]), towers)


def floating_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of a module that have a dtype of their own: neither quantised nor an adapter's.

    Args:
        module: Any module.

    Yields:
        Floating parameters, without those of a PEFT adapter and without packed ones: a `Params4bit` may be stored as
        bfloat16 and still is no bfloat16 weight.
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
    """The parameters that PEFT added to a module: LoRA factors, DoRA magnitudes, trained copies of whole modules."""
    for child in module.modules():
        for layer in adapter_layers(child):
            yield from layer.parameters()


def adapter_layers(module: nn.Module) -> Iterator[nn.Module]:
    """What PEFT hung below one module, not below those inside it; each holds one entry for each adapter."""
    # Duck-typed, so that PEFT need not be imported: these two names are its plug-in contract. Looked up where they
    # are: a model has thousands of modules, and `nn.Module` takes long to say that it has no such attribute.
    names: Any = vars(module).get("adapter_layer_names") or getattr(type(module), "adapter_layer_names", ())
    for name in names:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Module):
            yield layer
    copies = module._modules.get("modules_to_save")
    if isinstance(copies, nn.ModuleDict):
        yield copies


def elements_of(parameter: torch.Tensor) -> int:
    """How many numbers a parameter holds, also where ZeRO-3 has left an empty tensor in its place.

    Args:
        parameter: Any parameter.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a parameter is packed, by its type: its dtype says how it is stored, not what it computes in."""
    return (
        type(parameter).__module__.split(".")[0] in {"bitsandbytes", "torchao"}
        or not parameter.is_floating_point()
        or parameter.element_size() < 2
    )


def _call(module: nn.Module, method: str) -> Any:
    """What an accessor of the model returns, `None` where the family has none or does not implement it."""
    if not hasattr(module, method):
        return None
    try:
        return getattr(module, method)()
    except NotImplementedError:
        return None


def _ancestors(root: nn.Module, target: nn.Module | None) -> Iterator[nn.Module]:
    """The modules that contain `target`, outermost first, without `target` itself."""
    if target is None:
        return
    name = next((name for name, module in root.named_modules() if module is target), None)
    if not name:
        return
    module = root
    for part in name.split("."):
        yield module
        module = getattr(module, part)


def _has_layers(module: nn.Module) -> bool:
    """Whether a stack of layers with weights hangs directly on `module`."""
    return any(
        isinstance(child, nn.ModuleList) and next(child.parameters(), None) is not None for child in module.children()
    )

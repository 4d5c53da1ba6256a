"""Merges adapters into the weights of a base without modifying the base.

PEFT merges in place and unmerges by subtraction. In half precision this does not restore the old weights, and a packed
base is quantised again each time. This module merges each layer in a float32 copy with PEFT's own `merge`, and only
reads the model.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..core.dtypes import KBIT, from_torch, parse_dtype, to_torch
from ..core.errors import PrecisionError, Problem, refuse
from ..model.inventory import bits, declared_method, first_dtype, quantization_method
from ..model.parts import unwrap
from .keep_fp32 import kept_in_float32


_ROUTED = frozenset({"XLORA"})
"""PEFT methods whose layers can be merged, but whose adapters depend on the input."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
"""Attributes that a copy shares with the original, because the copy is never called."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the merged model.

    Attributes:
        name: Name in the base model's `state_dict`.
        load: Returns the tensor, in float32 if it is merged.
        before: Returns the tensor of the base; `None` if no adapter changes it.
        held: Dtype of the tensor in the base; for packed weights, the dtype of the other weights.
        place: Key that is equal for two names of one tensor, such as tied weights.
        fixed: Whether the tensor keeps its dtype: buffers, and weights that the model class keeps in float32.
        buffer: Whether it is a buffer.
    """

    name: str
    load: Callable[[], torch.Tensor]
    before: Callable[[], torch.Tensor] | None
    held: torch.dtype
    place: tuple[Any, ...]
    fixed: bool = False
    buffer: bool = False

    def rounded(self, exact: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Casts the tensor to its dtype in the merged model.

        Args:
            exact: The result of `load`.
            dtype: The requested dtype; `None` for the dtype of the base.

        Returns:
            The cast tensor; the same tensor if it has the dtype already.

        Raises:
            PrecisionError: If a finite number becomes infinite.
        """
        return rounded(exact, self.held if self.fixed or dtype is None else dtype, self.name)


def rounded(exact: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Casts a tensor, unless a finite number becomes infinite.

    Args:
        exact: The tensor, of any shape.
        dtype: The dtype to cast to.
        name: Name of the tensor for the error message.

    Returns:
        The cast tensor; the same tensor if it has the dtype already.

    Raises:
        PrecisionError: If a finite number becomes infinite.
    """
    cast = exact.to(dtype)
    if dtype == torch.float16 != exact.dtype and bool((cast.isinf() & exact.isfinite()).any()):
        largest = exact.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        what = "merged weights in float16"
        raise PrecisionError([refuse("merged-weights-overflow", what, name=name, value=f"{largest:,.0f}")])
    return cast


def merged_weights(model: nn.Module, dtype: str | torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights and persistent buffers with the active adapters merged, one layer at a time.

    Base and adapter are added in float32, and the sum is rounded once. The model is not modified. The additional
    memory is that of one layer in float32 and of PEFT's delta for it. Layers whose adapters are disabled or merged
    already are returned as they are in the base.

    Args:
        model: A model with PEFT adapters, whose base is unquantised or quantised by bitsandbytes.
        dtype: Dtype of floating-point weights, in any spelling of `parse_dtype`; by default the dtype of each weight
            in the base, and `config.dtype` for packed weights, which are always dequantised. Buffers, and weights that
            the model class keeps in float32, keep their dtypes.

    Yields:
        Names as in the base model's `state_dict`, and tensors. A tensor that is neither merged nor cast is the model's
        own and must not be modified. Tied weights are yielded with each of their names, and differ if only one of them
        has an adapter.

    Raises:
        PrecisionError: If the model has no adapter, the adapter cannot be merged, the dtype is unknown, or a merged
            weight overflows float16.
    """
    target = None if dtype is None else to_torch(parse_dtype(dtype, allow_auto=False))
    # `map`, unlike a loop variable, does not keep a layer in memory while the next one is merged.
    yield from map(lambda weight: (weight.name, weight.rounded(weight.load(), target)), weights_of(model, target))


def weights_of(
    model: nn.Module, dtype: torch.dtype | None = None, checked: bool = False, merge: bool = True
) -> Iterator[Weight]:
    """Yields the tensors of the merged model, each with its value in the base.

    Args:
        model: A model with PEFT adapters.
        dtype: The dtype that will be passed to `Weight.rounded`.
        checked: Whether `unmergeable` was called before; it inspects every module and parameter.
        merge: Whether to merge the active adapters, or to yield the weights of the base.

    Yields:
        One entry for each name of the base model's `state_dict`, in its order.

    Raises:
        PrecisionError: If the model has no adapter, or the adapter cannot be merged.
    """
    problem = None if checked else unmergeable(model)
    if problem is not None:
        raise PrecisionError([problem])
    base = unwrap(model)
    declared = getattr(getattr(base, "config", None), "dtype", None)
    around = declared if isinstance(declared, torch.dtype) else first_dtype(base) or torch.float32
    kept = None if dtype is None else kept_in_float32(base, from_torch(dtype))

    def fix(weight: Weight) -> Weight:
        return replace(weight, fixed=True) if kept is not None and kept.search(weight.name) else weight

    yield from map(fix, _walk(base, "", around, merge))


def unmergeable(model: nn.Module) -> Problem | None:
    """Returns why a model cannot be merged, as far as this is known before its layers are merged.

    Args:
        model: Any model.

    Returns:
        The refusal: no adapter is active, the adapter does not change weights, the base is quantised with
        another method than bitsandbytes, or this process does not have all weights. `None` if none of these applies.
    """
    base = unwrap(model)
    for config in (getattr(model, "peft_config", None) or {}).values():
        if config.is_prompt_learning or config.is_adaption_prompt or config.peft_type in _ROUTED:
            why = "this method adds tokens or a term that depends on the input, and does not change the weights"
            return _refusal(f"a {getattr(config.peft_type, 'value', config.peft_type)} adapter", why)
    layers = [part for part in base.modules() if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if all(layer.disable_adapters for layer in layers):
        disabled = " whose adapters are disabled" if layers else ""
        return refuse("nothing-to-merge", f"a {type(model).__name__}{disabled}")
    for layer in layers:
        if isinstance(layer, BaseTunerLayer) and _plain(type(layer)).merge is BaseTunerLayer.merge:
            return _refusal(f"an adapter with {type(layer).__name__} layers", "PEFT has no `merge` for them")
        active = [name for name in layer.active_adapters if name in getattr(layer, "lora_variant", ())]
        if active and len(layer.active_adapters) > 1 and not hasattr(layer, "_unmerged_base_weight"):
            why = "PEFT before 0.21 merges them into weights that differ from what the model computes with"
            return _refusal(f"several active adapters, {active[0]!r} among them with DoRA or another variant", why)
    for name, parameter in base.named_parameters():
        sharded = type(parameter).__module__.startswith("torch.distributed")
        partitioned = hasattr(parameter, "ds_id") and parameter.numel() == 0
        if sharded or partitioned or parameter.is_meta:
            why = f"{name} is sharded over processes or offloaded, and this process does not have its values"
            return _refusal("a sharded or offloaded model", why)
    method = quantization_method(base) or declared_method(base)
    if method in (None, *KBIT):
        return None
    return _refusal(f"a base quantised by {method}", "only weights that bitsandbytes packed are dequantised here")


def active_configs(model: nn.Module) -> dict[str, Any]:
    """Returns PEFT's configs of the active adapters, by name."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    active: Any = getattr(model, "active_adapters", ()) if configs else ()
    names = active() if callable(active) else active  # a method in transformers, a property in PEFT
    return {name: configs[name] for name in names if name in configs}


def _walk(module: nn.Module, prefix: str, around: torch.dtype, merge: bool) -> Iterator[Weight]:
    """Yields the tensors of a module with their names without PEFT; those of the base if `merge` is false."""
    if isinstance(module, BaseTunerLayer):
        base = module.get_base_layer()
        if not merge or module.disable_adapters or module.merged:
            yield from _walk(base, prefix, around, merge)
            return
        originals = list(_walk(base, prefix, around, merge=False))
        twin = merged_twin(module, prefix)
        for weight in originals:
            yield replace(weight, load=_tensor(twin, weight.name[len(prefix) :]).detach, before=weight.load)
    elif isinstance(module, AuxiliaryTrainingWrapper):
        chosen = _chosen(module) if merge else module.original_module
        if isinstance(chosen, BaseTunerLayer) or chosen is module.original_module:
            yield from _walk(chosen, prefix, around, merge)
            return
        originals_by_name = {weight.name: weight for weight in _walk(module.original_module, prefix, around, False)}
        for weight in _walk(chosen, prefix, around, merge):
            yield replace(originals_by_name[weight.name], load=weight.load, before=originals_by_name[weight.name].load)
    else:
        yield from _own(module, prefix, around)
        for name, child in module._modules.items():  # not `named_children`, which leaves out a shared one
            if child is not None:
                yield from _walk(child, f"{prefix}{name}.", around, merge)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two names of one tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.device


def _own(module: nn.Module, prefix: str, around: torch.dtype) -> Iterator[Weight]:
    """Yields the entries of `state_dict` of a module without its children."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        place = place_of(parameter)
        if name == "weight" and is_packed(module):
            yield Weight(prefix + name, partial(_dequantised, module), None, around, place)
        else:
            fixed = not _is_wide(parameter)
            yield Weight(prefix + name, parameter.detach, None, parameter.dtype, place, fixed)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Weight(prefix + name, buffer.detach, None, buffer.dtype, place_of(buffer), fixed=True, buffer=True)


def _chosen(wrapper: AuxiliaryTrainingWrapper) -> nn.Module:
    """Returns the module that PEFT's wrapper for `modules_to_save` or for trainable token rows calls."""
    rows = wrapper._modules.get("token_adapter")
    if rows is not None:
        return rows
    active = () if wrapper.disable_adapters else wrapper.active_adapters
    copies = wrapper.modules_to_save
    return copies[active[0]] if active and active[0] in copies else wrapper.original_module


@torch.no_grad()
def merged_twin(layer: nn.Module, name: str = "") -> nn.Module:
    """Returns a float32 copy of a PEFT layer with its active adapters merged into its base.

    Args:
        layer: The layer; it is not modified.
        name: Name of the layer for an error message.

    Returns:
        The copy, with dequantised weights and unquantised layers.

    Raises:
        PrecisionError: If PEFT cannot merge the layer, with PEFT's error.
    """
    try:
        made: dict[int, Any] = {}
        twin: nn.Module = _twin(layer, made)
        # Layers may be nested. An inner one, which comes later, is merged first: trained token rows replace rows of
        # the base, and LoRA adds to them. Merging an outer layer may merge an inner one.
        for part in reversed([part for part in made.values() if isinstance(part, BaseTunerLayer)]):
            if not part.merged:
                part.merge()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        what = f"the {type(layer).__name__} adapter on {name.removesuffix('.')}"
        raise PrecisionError([_refusal(what, f"PEFT reports: {error}")]) from error
    return twin


def _twin(module: nn.Module, made: dict[int, Any]) -> Any:
    """Returns a float32 copy that shares no tensor to which merging writes; modules shared in it stay shared."""
    if id(module) in made:
        return made[id(module)]
    if isinstance(module, AuxiliaryTrainingWrapper):
        # PEFT's `merge` of a layer around a wrapper writes to a copy of its weight.
        made[id(module)] = _twin(_chosen(module), made)
        return made[id(module)]
    twin: nn.Module = object.__new__(nn.Linear if is_packed(module) else _plain(type(module)))
    made[id(module)] = twin
    twin.__dict__.update(
        {k: v.copy() if isinstance(v, (dict, list, set)) and k not in _HOOKS else v for k, v in vars(module).items()}
    )
    if isinstance(twin, BaseTunerLayer):
        twin.quantization_backend = None  # newer PEFT quantises and dequantises with it
        twin.__dict__.setdefault("fan_in_fan_out", False)  # missing in some packed layers
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in made:
            packed = name == "weight" and is_packed(module)
            wide = _wide(_dequantised(module) if packed else parameter)
            made[id(parameter)] = nn.Parameter(wide, requires_grad=False)
        twin._parameters[name] = None if parameter is None else made[id(parameter)]
    twin._buffers.update({k: None if v is None else _wide(v) for k, v in module._buffers.items()})
    for name, child in module._modules.items():
        read = isinstance(module, BaseTunerLayer) and name.startswith("lora_") and _is_float32(child)
        twin._modules[name] = child if child is None or read else _twin(child, made)
    return twin


def _is_float32(container: nn.Module | None) -> bool:
    """Whether all parameters of a LoRA container are float32, so that merging, which only reads them, can use them."""
    parts = () if container is None else (container, *container._modules.values())
    held = [parameter for part in parts if part is not None for parameter in part._parameters.values()]
    return all(parameter is None or parameter.dtype == torch.float32 for parameter in held)


def _plain(kind: type) -> Any:
    """Returns PEFT's class for unquantised layers that corresponds to a class for packed layers."""
    if not kind.__module__.endswith(".bnb"):
        return kind
    module = sys.modules[kind.__module__.removesuffix("bnb") + "layer"]
    return getattr(module, re.sub("(8bitLt|4bit)$", "", kind.__name__))


def _tensor(module: nn.Module, path: str) -> torch.Tensor:
    """Returns a tensor of a copy by its name without PEFT; merging may have made it a plain attribute."""
    found: Any = module
    for part in path.split("."):
        while isinstance(found, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found = found.get_base_layer() if isinstance(found, BaseTunerLayer) else _chosen(found)
        found = getattr(found, part)
    return found


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, in float32 or wider if it has a floating-point dtype."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if _is_wide(tensor) else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a floating-point dtype of 16 bits or more."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def is_packed(module: nn.Module) -> bool:
    """Whether the weight of a layer is packed by bitsandbytes; a layer of its classes may also be unpacked."""
    number = bits(module)
    if number is None:
        return False
    weight: Any = module.weight
    return _state(module) is not None if number == 4 else weight.dtype == torch.int8


def packing_of(layer: nn.Module) -> str:
    """Returns the format of a packed layer's weight: `"nf4"`, `"fp4"` or `"int8"`."""
    return "int8" if bits(layer) == 8 else str(_state(layer).quant_type)


def _state(layer: Any) -> Any:
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


@torch.no_grad()
def _dequantised(layer: Any) -> torch.Tensor:
    """Returns the dequantised weight of a packed layer. PEFT's function for this modifies the layer's statistics."""
    from bitsandbytes import functional

    data = layer.weight.data
    if bits(layer) == 8:
        scale = getattr(layer.weight, "SCB", None)  # the first forward pass moves the scales to the layer's state
        return functional.int8_vectorwise_dequant(data, layer.state.SCB if scale is None else scale)
    state = _state(layer)
    if getattr(state, "packing_format_for_cpu", False):
        # On some CPUs, evaluation packs a layer in another order, and bitsandbytes restores its scales incorrectly.
        state = copy.copy(state)
        absmax = state.absmax.T.reshape(-1).float()
        state.original_nested = False
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax = absmax
    return functional.dequantize_4bit(data, state)


def _refusal(what: str, why: str) -> Problem:
    return refuse("adapter-cannot-be-merged", what, why=why)

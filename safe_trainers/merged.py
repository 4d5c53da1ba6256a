"""The weights of a base with its adapters merged in, without touching the base.

PEFT merges in place and unmerges by subtracting again: in half precision that does not give the old weights back, and
a packed base is quantised anew each time. Here each layer is merged in a float32 twin of itself, by PEFT's own
`merge`; the live model is only read, so that there is nothing to put back.
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

from .census import bits, first_dtype, quantization_method
from .dtypes import from_torch, parse_dtype, to_torch
from .errors import PrecisionError, Problem, refuse
from .quantization import unsupported
from .towers import unwrap
from .weight_files import kept_in_float32


_ROUTED = frozenset({"XLORA"})
"""PEFT methods whose layers could be merged one by one, and whose model still depends on what enters it."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
"""What a twin shares, for it is never called."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the merged model.

    Attributes:
        name: Its name in the base model's own `state_dict`.
        load: Makes the tensor as precisely as it is known, merged ones in float32.
        before: Makes what the base holds in its place; `None` where no adapter changes it.
        held: Dtype in which the base holds it; of a packed one, the dtype of the weights around it.
        place: Equal for two names of one tensor, as tied weights are.
        fixed: Whether it is handed out as it is held: buffers, and what the model's class keeps in float32.
        buffer: Whether it is a buffer, and no parameter.
    """

    name: str
    load: Callable[[], torch.Tensor]
    before: Callable[[], torch.Tensor] | None
    held: torch.dtype
    place: tuple[Any, ...]
    fixed: bool = False
    buffer: bool = False

    def rounded(self, exact: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor in the dtype that it is handed out in.

        Args:
            exact: What `load` made.
            dtype: The dtype that is asked for, `None` for the base's own.

        Returns:
            The same tensor where nothing is cast.

        Raises:
            PrecisionError: If a finite number becomes infinite.
        """
        target = self.held if self.fixed or dtype is None else dtype
        made = exact.to(target)
        if target == torch.float16 != exact.dtype and bool((made.isinf() & exact.isfinite()).any()):
            largest = exact.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
            given = "merged weights in float16"
            raise PrecisionError([refuse("merged-weights-overflow", given, name=self.name, value=f"{largest:,.0f}")])
        return made


def merged_weights(model: nn.Module, dtype: str | torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights and persistent buffers with the active adapters merged in, one layer at a time.

    The sum of base and adapter is made in float32 and rounded once. The model is only read, so that its base keeps its
    bytes, however often and however far this is iterated; the memory beside it is one layer in float32, and PEFT's
    delta of it. A layer whose adapters are disabled, or merged already, is handed out as its base is, which is what it
    computes with.

    Args:
        model: A model with PEFT adapters, on a base that is unquantised or packed by bitsandbytes.
        dtype: What floating weights are handed out in, in any spelling of `parse_dtype`; `None` for the dtype in
            which the base holds each, which for a packed one, always dequantised, is `config.dtype`. Buffers, and
            weights that the model's class keeps in float32, are handed out as they are held.

    Yields:
        Names as in the base model's own `state_dict`, without any of PEFT's, and tensors. What no adapter changes and
        no cast copies is the live tensor: to be read, not written. Tied weights come under each of their names, and
        differ where an adapter sits on one of them alone.

    Raises:
        PrecisionError: If there is no adapter, if it cannot be merged, if the dtype is unknown, or if float16 cannot
            hold a merged weight.
    """
    target = None if dtype is None else to_torch(parse_dtype(dtype, allow_auto=False))
    # A `map` holds no layer while the next one is merged, as the variable of a loop does.
    yield from map(lambda weight: (weight.name, weight.rounded(weight.load(), target)), weights_of(model, target))


def weights_of(model: nn.Module, dtype: torch.dtype | None = None, checked: bool = False) -> Iterator[Weight]:
    """The tensors of the merged model, each with what it was before.

    Args:
        model: A model with PEFT adapters.
        dtype: The dtype that will be asked for.
        checked: Whether `unmergeable` found nothing before: it looks at every module and parameter.

    Yields:
        One entry for each name of the base model's `state_dict`, in its order.

    Raises:
        PrecisionError: If there is no adapter, or if it cannot be merged.
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

    yield from map(fix, _walk(base, "", around, merge=True))


def unmergeable(model: nn.Module) -> Problem | None:
    """Says why a model cannot be merged, as far as it shows before a layer is; reads only.

    Args:
        model: Any model.

    Returns:
        The refusal: no active adapter, one that is no change of weights, a base that is quantised by something else
        than bitsandbytes, or weights that are not all in this process. `None` where nothing speaks against it.
    """
    base = unwrap(model)
    for config in (getattr(model, "peft_config", None) or {}).values():
        if config.is_prompt_learning or config.is_adaption_prompt or config.peft_type in _ROUTED:
            why = "what it adds depends on the input, or stands beside it: it is no change of the weights"
            return _refusal(f"a {_text(config.peft_type)} adapter", why)
    layers = [part for part in base.modules() if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if all(layer.disable_adapters for layer in layers):
        disabled = " whose adapters are disabled" if layers else ""
        return refuse("nothing-to-merge", f"a {type(model).__name__}{disabled}")
    for layer in layers:
        if isinstance(layer, BaseTunerLayer) and _plain(type(layer)).merge is BaseTunerLayer.merge:
            return _refusal(f"an adapter with {type(layer).__name__} layers", "PEFT has no `merge` for them")
        active = [name for name in layer.active_adapters if name in getattr(layer, "lora_variant", ())]
        if active and len(layer.active_adapters) > 1 and not hasattr(layer, "_unmerged_base_weight"):
            why = "PEFT before 0.21 merges them into another model than it computes"
            return _refusal(f"several active adapters, {active[0]!r} among them with DoRA or another variant", why)
    for name, parameter in base.named_parameters():
        sharded = type(parameter).__module__.startswith("torch.distributed")
        partitioned = hasattr(parameter, "ds_id") and parameter.numel() == 0
        if sharded or partitioned or parameter.is_meta:
            why = "it is sharded over processes, or offloaded: there are no numbers here to add the adapter to"
            return _refusal(f"a model that does not hold {name} itself", why)
    return unsupported(base, quantization_method(base))


def active_configs(model: nn.Module) -> dict[str, Any]:
    """PEFT's configs of the active adapters, by name.

    Args:
        model: Any model.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    active: Any = getattr(model, "active_adapters", ()) if configs else ()
    names = active() if callable(active) else active  # a method in transformers, a property in PEFT
    return {name: configs[name] for name in names if name in configs}


def _walk(module: nn.Module, prefix: str, around: torch.dtype, merge: bool) -> Iterator[Weight]:
    """The tensors of a module under the names that it would have without PEFT; as its base is unless `merge`."""
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
    """Where the numbers of a tensor are: equal for two names of one tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.device


def _own(module: nn.Module, prefix: str, around: torch.dtype) -> Iterator[Weight]:
    """What `state_dict` has of a module without its children."""
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
    """What a wrapper around a module that is trained as a whole, or in some rows, computes with."""
    rows = wrapper._modules.get("token_adapter")
    if rows is not None:
        return rows
    active = () if wrapper.disable_adapters else wrapper.active_adapters
    copies = wrapper.modules_to_save
    return copies[active[0]] if active and active[0] in copies else wrapper.original_module


@torch.no_grad()
def merged_twin(layer: nn.Module, name: str = "") -> nn.Module:
    """A copy of a PEFT layer in float32, with its active adapters merged in its base.

    Args:
        layer: The layer; it is only read.
        name: What to call it in an error.

    Returns:
        The twin. Packed weights are dequantised in it, and its layers are the plain ones.

    Raises:
        PrecisionError: If PEFT cannot merge it, with what PEFT says.
    """
    try:
        made: dict[int, Any] = {}
        twin: nn.Module = _twin(layer, made)
        # Layers may be nested, and an outer one, which is made first, may merge an inner one.
        for part in [part for part in made.values() if isinstance(part, BaseTunerLayer)]:
            if not part.merged:
                part.merge()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        given = f"the {type(layer).__name__} adapter on {name.removesuffix('.')}"
        raise PrecisionError([_refusal(given, f"PEFT says: {error}")]) from error
    return twin


def _twin(module: nn.Module, made: dict[int, Any]) -> Any:
    """A copy in float32 that shares nothing that merging writes to; what a module has twice, its twin has twice."""
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = object.__new__(nn.Linear if is_packed(module) else _plain(type(module)))
    made[id(module)] = twin
    twin.__dict__.update(
        {k: v.copy() if isinstance(v, (dict, list, set)) and k not in _HOOKS else v for k, v in vars(module).items()}
    )
    if isinstance(twin, BaseTunerLayer):
        twin.quantization_backend = None  # what newer PEFT packs and unpacks with
        twin.__dict__.setdefault("fan_in_fan_out", False)  # packed layers never are, and not all of them say it
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
    """Whether the factors of one kind that PEFT's LoRA holds in a layer, which its merging only reads, are float32."""
    parts = () if container is None else (container, *container._modules.values())
    held = [parameter for part in parts if part is not None for parameter in part._parameters.values()]
    return all(parameter is None or parameter.dtype == torch.float32 for parameter in held)


def _plain(kind: type) -> Any:
    """The class that PEFT has for unpacked layers, beside one for packed layers."""
    if not kind.__module__.endswith(".bnb"):
        return kind
    beside = sys.modules[kind.__module__.removesuffix("bnb") + "layer"]
    return getattr(beside, re.sub("(8bitLt|4bit)$", "", kind.__name__))


def _tensor(module: nn.Module, path: str) -> torch.Tensor:
    """A tensor of a twin by the name that it has without PEFT; merging may have made it a plain attribute."""
    found: Any = module
    for part in path.split("."):
        while isinstance(found, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found = found.get_base_layer() if isinstance(found, BaseTunerLayer) else _chosen(found)
        found = getattr(found, part)
    return found


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, floating numbers at least in float32."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if _is_wide(tensor) else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floating numbers of 16 bits or more."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def is_packed(module: nn.Module) -> bool:
    """Whether the weight of a layer is packed by bitsandbytes now; its class alone does not say it.

    Args:
        module: Any module.
    """
    number = bits(module)
    if number is None:
        return False
    weight: Any = module.weight
    return _state(module) is not None if number == 4 else weight.dtype == torch.int8


def packing_of(layer: nn.Module) -> str:
    """How the weight of a packed layer is packed: `"nf4"`, `"fp4"` or `"int8"`.

    Args:
        layer: A layer of which `is_packed` is true.
    """
    return "int8" if bits(layer) == 8 else str(_state(layer).quant_type)


def _state(layer: Any) -> Any:
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


@torch.no_grad()
def _dequantised(layer: Any) -> torch.Tensor:
    """The weight of a packed layer as it computes with it. PEFT's own function moves its statistics about."""
    from bitsandbytes import functional

    data = layer.weight.data
    if bits(layer) == 8:
        scale = getattr(layer.weight, "SCB", None)  # the first forward pass moves it to the layer's state
        return functional.int8_vectorwise_dequant(data, layer.state.SCB if scale is None else scale)
    state = _state(layer)
    if getattr(state, "packing_format_for_cpu", False):
        # Evaluated on some CPUs, a layer is packed in another order, and bitsandbytes' way back garbles its scales.
        state = copy.copy(state)
        absmax = state.absmax.T.reshape(-1).float()
        state.original_nested = False
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax = absmax
    return functional.dequantize_4bit(data, state)


def _refusal(given: str, why: str) -> Problem:
    return refuse("adapter-cannot-be-merged", given, why=why)


def _text(value: Any) -> str:
    """A member of an enum of strings, which prints as its member."""
    return str(getattr(value, "value", value))

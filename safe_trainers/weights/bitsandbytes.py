"""Sets one compute dtype for the packed layers of a quantised model and for its other half-precision weights.

transformers keeps the dtypes of the checkpoint or the `BitsAndBytesConfig`. A checkpoint that was quantised in
bfloat16 therefore stays bfloat16 in a float16 run, in three places: bitsandbytes' layers compute in `compute_dtype`,
their backward pass dequantises to `quant_state.dtype`, and norms, embeddings and heads are bfloat16 weights. This
module changes all three in place, one tensor at a time. Packed weights and their statistics are not modified.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PretrainedConfig

from ..core.dtypes import FLOAT16, FLOAT16_OVERFLOW, FLOAT32, HALVES, from_torch, parse_dtype, to_torch
from ..core.errors import Problem, raise_if, refuse, warn
from ..core.patches import replace
from ..model.inventory import BITSANDBYTES, bits
from ..model.packed_layers import packed_layers
from ..model.parts import adapter_parameters, is_quantized, unwrap
from .cast import largest_magnitude


COMPUTE_DTYPE, QUANT_STATE, WEIGHT, BUFFER, CONFIG = "compute_dtype", "quant_state", "weight", "buffer", "config"


_REASONS = {
    COMPUTE_DTYPE: "dtype of the layer's matrix products; transformers keeps that of the checkpoint or the config",
    QUANT_STATE: "dtype to which the backward pass dequantises; bitsandbytes keeps the dtype before quantisation",
    WEIGHT: "bfloat16 and float16 cannot be combined in one operation",
    BUFFER: "bfloat16 and float16 cannot be combined in one operation",
    CONFIG: "dtype of the weights that are not packed; caches and saved configs use it",
}
_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of a 4-bit layer: whether it is packed in another order when it is evaluated on a CPU."""
_WIDENED = "no autocast: operations use the dtype of the weights, and the cast to float32 is exact"


@dataclass(frozen=True)
class Change:
    """One dtype that is changed so that a quantised model computes in the dtype of the run.

    Attributes:
        kind: `"compute_dtype"` or `"quant_state"` of a layer, `"weight"`, `"buffer"`, or `"config"` for
            `config.dtype`.
        name: Qualified name of the layer, the tensor, or the config (`"config.text_config"`) in the model.
        source: Dtype before the change; `"unset"` if the first input would have set it.
        target: Dtype after the change.
        reason: Why the dtype is changed.
        elements: Number of elements that are cast; 0 if only an attribute is set.
    """

    kind: str
    name: str
    source: str
    target: str
    reason: str
    elements: int = 0


@dataclass(frozen=True)
class QuantPlan:
    """The changes that bring a quantised model to one compute dtype.

    Attributes:
        compute: The compute dtype.
        changes: The changes; empty if the dtypes agree already, or if the model is not quantised.
        problems: Refusals; `reconcile` raises them before it changes anything.
    """

    compute: str
    changes: tuple[Change, ...] = ()
    problems: tuple[Problem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON."""
        return {
            "compute": self.compute,
            "changes": [vars(change) for change in self.changes],
            "problems": [problem.to_dict() for problem in self.problems],
        }

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str, str], list[Change]] = {}
        for change in self.changes:
            groups.setdefault((change.kind, change.source, change.target, change.reason), []).append(change)
        lines = []
        for (kind, source, target, reason), members in groups.items():
            example = members[0].name + (", ..." if len(members) > 1 else "")
            lines.append(f"{kind} {source} -> {target}: {len(members)} ({example}): {reason}")
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines or [f"no dtype in the quantised model is changed for a run in {self.compute}"])


def compute_of(autocast: str | None, weights: Collection[str]) -> str:
    """Returns the compute dtype to which a quantised model is brought.

    Args:
        autocast: The autocast dtype of the run; `None` without autocast.
        weights: Dtypes of the weights that are neither adapters nor quantised.

    Returns:
        The autocast dtype. Without autocast, the half dtype of the weights, which TRL's command line also uses for
        `bnb_4bit_compute_dtype`; `"float32"` if the weights have no half dtype or two of them.
    """
    halves = HALVES & set(weights)
    if autocast is not None:
        return autocast
    return next(iter(halves)) if len(halves) == 1 else FLOAT32


def plan(model: nn.Module, compute: str, *, exempt: Iterable[str] = (), trained: bool = True) -> QuantPlan:
    """Plans the changes that bring a quantised model to one compute dtype, without changing it.

    The compute dtype is set as `compute_dtype` of 4-bit layers (also if the `BitsAndBytesConfig` contains another one,
    because its default, float32, cannot be distinguished from a value that the user has set), as `dtype` of their
    quantisation states and of configs, and frozen half-precision weights and buffers are cast to it. Packed weights,
    their statistics, adapters, trainable weights and float32 tensors are not changed, nor is any tensor of the packed
    layers of other quantisers.

    Args:
        model: A transformers model, possibly wrapped by PEFT.
        compute: `"float32"`, `"bfloat16"` or `"float16"`, from `compute_of`. With `"float32"` half weights are upcast,
            which is exact and costs 2 bytes per element.
        exempt: Names of modules in the base model that are not changed (`fp32_modules`).
        trained: Whether the model is trained; `False` for a reference model, where `requires_grad` is ignored.

    Returns:
        The plan, with refusals if weights overflow float16.

    Raises:
        PrecisionError: If `compute` is not one of the three dtypes.
    """
    compute = parse_dtype(compute, field="compute", allow_auto=False)
    base = unwrap(model)
    prefix = _prefix(model, base)
    exempt_ids = {id(part) for name in exempt for part in _parts(base.get_submodule(name))}
    layers = [(name, part, number) for name, part in base.named_modules() if (number := bits(part)) is not None]
    others = [layer for _, layer in packed_layers(base)]
    if not layers and not others:
        return QuantPlan(compute)
    # The tensors next to a packed weight of another quantiser are its scales, whose dtype its kernel may expect.
    exempt_ids |= {id(part) for layer in others for part in (*layer.parameters(False), *layer.buffers(False))}
    layers = [layer for layer in layers if id(layer[1]) not in exempt_ids]
    tensors = [found for found in _half_tensors(base, compute, trained) if id(found[2]) not in exempt_ids]
    changes = [change for name, layer, number in layers if number == 4 for change in _layer(name, layer, compute)]
    reason = _WIDENED if compute == FLOAT32 else None
    for kind, name, tensor in tensors:
        changes.append(Change(kind, name, from_torch(tensor.dtype), compute, reason or _REASONS[kind], tensor.numel()))
    changes += _config_changes(base, compute, bool(tensors))
    return QuantPlan(
        compute,
        tuple(dataclasses.replace(change, name=prefix + change.name) for change in changes),
        tuple(_overflows(layers, tensors, compute)),
    )


def reconcile(model: nn.Module, planned: QuantPlan) -> None:
    """Applies a plan in place, with at most one tensor in memory twice.

    Args:
        model: The model that was planned for.
        planned: The plan.

    Raises:
        PrecisionError: If the plan has problems; the model is not changed.
    """
    raise_if(planned.problems)
    base = unwrap(model)
    prefix = _prefix(model, base)
    configs = _configs(base)
    for change in planned.changes:
        name, dtype = change.name.removeprefix(prefix), to_torch(change.target)
        if change.kind == CONFIG:
            configs[name].dtype = dtype
            continue
        path, _, last = name.rpartition(".")
        owner: Any = base.get_submodule(name if change.kind in (COMPUTE_DTYPE, QUANT_STATE) else path)
        if change.kind in (COMPUTE_DTYPE, QUANT_STATE):
            compute_in(owner, dtype)
        elif change.kind == WEIGHT:
            parameter = getattr(owner, last)
            parameter.data = parameter.data.to(dtype)
        else:
            setattr(owner, last, getattr(owner, last).to(dtype))


def compute_in(layer: nn.Module, dtype: torch.dtype) -> None:
    """Sets the compute dtype of a 4-bit layer, for its forward and its backward pass.

    Args:
        layer: The layer; other modules are not changed.
        dtype: A floating-point dtype.
    """
    if bits(layer) != 4:
        return
    vars(layer).update(compute_dtype=dtype, compute_type_is_set=True)
    for state in _states(layer):
        setattr(state, _dtype_field(state), dtype)


def keep_packing(model: nn.Module) -> None:
    """Keeps 4-bit layers from being packed in another order when they are evaluated on a CPU with bfloat16 units.

    No gradient passes through a layer in that order, and its scales are rounded to bfloat16. bitsandbytes would keep
    the order for all later steps.

    Args:
        model: A model that is trained, or one that must compute what a trained model does.
    """
    for layer in unwrap(model).modules():
        if bits(layer) == 4 and getattr(layer, _REPACKS, False):
            replace("cpu-packing", layer, _REPACKS, False)


def repacked(model: nn.Module) -> Problem | None:
    """Refuses a model with 4-bit layers that an earlier evaluation packed in another order.

    Args:
        model: The model that is to be trained, possibly wrapped.

    Returns:
        The refusal; `None` if no layer was packed in another order.
    """
    base = unwrap(model)
    layers = ((name, layer) for name, layer in base.named_modules() if bits(layer) == 4)
    names = [name for name, layer in layers if any(map(_is_repacked, _states(layer)))]
    if not names:
        return None
    what = f"4-bit layers that were evaluated on this CPU before: {_listed(names)}"
    return refuse("repacked-in-evaluation", what, kind=type(base).__name__)


def dora_loses_scales(model: nn.Module) -> Problem | None:
    """Refuses DoRA on 8-bit layers on a CPU, where the scales of a layer are lost after its first forward pass.

    Args:
        model: The model with its adapters.

    Returns:
        The refusal; `None` if no layer has both, if they are on another device, or if this bitsandbytes keeps scales.
    """
    names = [name for name, module in unwrap(model).named_modules() if _is_dora_on_int8(module)]
    if not names:
        return None
    return refuse("dora-on-int8-on-cpu", f"DoRA on 8-bit layers on a CPU: {_listed(names)}")


def int8_rounds_inputs(model: nn.Module, compute: str) -> Problem | None:
    """Warns about 8-bit layers, which compute in float16, in a run with another compute dtype.

    Args:
        model: The model, possibly wrapped.
        compute: The compute dtype of the run.

    Returns:
        The warning; `None` if there are no 8-bit layers, or if the run computes in float16.
    """
    layers = [(name, module) for name, module in unwrap(model).named_modules() if bits(module) == 8]
    if not layers or compute == FLOAT16:
        return None
    # In training mode on these devices, bitsandbytes multiplies with dequantised weights instead.
    devices = {next(module.parameters()).device.type for _, module in layers}
    where = " except in training mode" if devices <= {"cpu", "xpu"} else ""
    what = f"{len(layers)} 8-bit layers, such as {layers[0][0]}, in a run that computes in {compute}"
    return warn("int8-computes-in-fp16", what, where=where)


def _layer(name: str, layer: Any, compute: str) -> Iterator[Change]:
    """Yields the changes of one 4-bit layer."""
    if hasattr(layer, "compute_dtype"):
        unset = layer.compute_dtype is None or not getattr(layer, "compute_type_is_set", True)
        source = "unset" if unset else from_torch(layer.compute_dtype)
        if source != compute:
            yield Change(COMPUTE_DTYPE, name, source, compute, _REASONS[COMPUTE_DTYPE])
    sources = {from_torch(getattr(state, _dtype_field(state))) for state in _states(layer)} - {compute}
    if sources:
        yield Change(QUANT_STATE, name, min(sources), compute, _REASONS[QUANT_STATE])


def _states(layer: nn.Module) -> list[Any]:
    """Returns the quantisation states of a layer, which may be attributes of the layer, of its weight, or of both."""
    holders = (layer, *layer.parameters(recurse=False))
    states = [state for holder in holders if (state := getattr(holder, "quant_state", None)) is not None]
    return list({id(state): state for state in states}.values())


def _dtype_field(state: Any) -> str:
    """Returns the attribute with the dtype to which a state dequantises; another one while packed for a CPU kernel."""
    return "original_dtype" if _is_repacked(state) else "dtype"


def _is_repacked(state: Any) -> bool:
    """Whether an evaluation on a CPU packed the layer of a state in another order."""
    return bool(getattr(state, "packing_format_for_cpu", False))


def _is_dora_on_int8(module: nn.Module) -> bool:
    """Whether an active DoRA adapter reads a packed 8-bit weight on a CPU that loses its scales."""
    if not isinstance(module, BaseTunerLayer):
        return False
    if set(getattr(module, "lora_magnitude_vector", ())).isdisjoint(module.active_adapters):
        return False
    layer: Any = module.get_base_layer()
    return bits(layer) == 8 and layer.weight.device.type == "cpu" and _moves_without_scales(type(layer.weight))


def _moves_without_scales(kind: Any) -> bool:
    """Whether a moved weight of a class claims to have scales; PEFT's DoRA layers move it to the CPU in each step.

    The first forward pass takes the scales from the weight. Some releases of bitsandbytes set `CB` of a moved weight,
    and the next forward pass takes the scales that are not there.
    """
    weight = kind(torch.zeros(1, 1, dtype=torch.int8), requires_grad=False, has_fp16_weights=False)
    return weight.to("cpu").CB is not None


def _half_tensors(base: nn.Module, compute: str, trained: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields kind, name and tensor of what is frozen and half-precision but not `compute`, except adapters."""
    others = HALVES - {compute}
    adapters = {id(parameter) for parameter in adapter_parameters(base)}
    for name, parameter in base.named_parameters():
        excluded = id(parameter) in adapters or (trained and parameter.requires_grad) or is_quantized(parameter)
        if from_torch(parameter.dtype) in others and not excluded:
            yield WEIGHT, name, parameter
    for path, module in base.named_modules():
        if type(module).__module__.partition(".")[0] not in ("peft", BITSANDBYTES):
            for last, buffer in module.named_buffers(recurse=False):
                # The large negative numbers of an attention mask would overflow: such a buffer is not cast.
                fits = compute != FLOAT16 or largest_magnitude(buffer) < FLOAT16_OVERFLOW
                if from_torch(buffer.dtype) in others and fits:
                    yield BUFFER, f"{path}.{last}".removeprefix("."), buffer


def _overflows(
    layers: list[tuple[str, nn.Module, int]], tensors: list[tuple[str, str, torch.Tensor]], compute: str
) -> Iterator[Problem]:
    """Yields refusals of weights that overflow float16: of 8-bit layers in any run, of others in float16 runs."""
    limit = FLOAT16_OVERFLOW if compute == FLOAT16 else float("inf")
    infinite = [name for name, layer, number in layers if number == 8 and not _scale(layer) < limit]
    if infinite:
        skip = [_layer_name(infinite[0]), "lm_head"]
        yield refuse(
            "quantised-weights-overflow-fp16",
            f"8-bit weights that overflow float16: {_listed(infinite)}",
            cause="bitsandbytes casts weights to float16 before it quantises them to 8 bits.",
            fix=f"exclude them from quantisation: `llm_int8_skip_modules={skip!r}`",
        )
    if compute != FLOAT16:
        return
    sizes = [(name, max(map(_absmax, _states(layer)), default=0.0)) for name, layer, number in layers if number == 4]
    sizes += [(name, largest_magnitude(tensor)) for _, name, tensor in tensors]
    large = {name: size for name, size in sizes if size >= FLOAT16_OVERFLOW}
    if large:
        name, size = max(large.items(), key=lambda item: item[1])
        yield refuse(
            "quantised-weights-overflow-fp16",
            f"weights up to {size:.6g} in a run that computes in float16: {_listed([*large])}",
            cause="packed weights are dequantised to numbers up to the absmax of their block.",
            fix=f"`bf16=True` instead of `fp16=True`, or `fp32_modules=[{_module_name(name)!r}]`",
        )


def _absmax(state: Any) -> float:
    """Returns the largest weight that a 4-bit state dequantises to, which is its largest absmax."""
    if state.absmax.is_meta:
        return 0.0
    if not state.nested:
        return largest_magnitude(state.absmax)
    from bitsandbytes.functional import dequantize_blockwise

    return largest_magnitude(dequantize_blockwise(state.absmax, state.state2) + state.offset)


def _scale(layer: Any) -> float:
    """Returns the largest weight of an 8-bit layer, from its scales; 0 if it is not quantised yet."""
    scale = getattr(layer.weight, "SCB", None)  # the first forward pass moves the scales to the layer's state
    scale = getattr(getattr(layer, "state", None), "SCB", None) if scale is None else scale
    return 0.0 if scale is None else largest_magnitude(scale)


def _configs(base: nn.Module) -> dict[str, PretrainedConfig]:
    """Returns the configs of a model and of its parts, each once, by name such as `"config.text_config"`."""
    pending = [
        (f"{name}.config".removeprefix("."), getattr(module, "config", None)) for name, module in base.named_modules()
    ]
    found: dict[str, PretrainedConfig] = {}
    for name, config in pending:  # the list grows during the loop
        if isinstance(config, PretrainedConfig) and all(config is not other for other in found.values()):
            found[name] = config
            pending += [(f"{name}.{key}", getattr(config, key, None)) for key in getattr(config, "sub_configs", ())]
    return found


def _config_changes(base: nn.Module, compute: str, cast: bool) -> Iterator[Change]:
    """Yields changes of configs whose `dtype` differs from the weights; none if no weight is half-precision."""
    floating = [parameter for parameter in base.parameters() if not is_quantized(parameter)]
    if compute in HALVES and not cast and all(from_torch(parameter.dtype) != compute for parameter in floating):
        return
    for name, config in _configs(base).items():
        source = str(getattr(config, "dtype", None)).removeprefix("torch.")
        if source not in (compute, "None"):
            yield Change(CONFIG, name, source, compute, _REASONS[CONFIG])


def _parts(module: nn.Module) -> Iterator[nn.Module | torch.Tensor]:
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()


def _prefix(model: nn.Module, base: nn.Module) -> str:
    """Returns the prefix of the base model's names in its wrapper."""
    return next((f"{name}." for name, module in model.named_modules() if module is base and name), "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def _module_name(name: str) -> str:
    """Returns the layer's name of a tensor, without the suffixes that PEFT adds."""
    for ending in (".weight", ".bias", ".base_layer", ".original_module"):
        name = name.removesuffix(ending)
    return name


def _layer_name(name: str) -> str:
    """Returns the last part of a layer's name, such as `"down_proj"`."""
    return _module_name(name).rpartition(".")[2]

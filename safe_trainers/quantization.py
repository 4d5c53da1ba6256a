"""Quantised bases: one compute dtype for the packed layers and for the half-precision weights beside them.

Upstream keeps what a checkpoint or a `BitsAndBytesConfig` was written with. A checkpoint that was saved pre-quantised
in bfloat16 and is loaded for float16 stays bfloat16, in three places: bitsandbytes' layers compute in `compute_dtype`,
their backward pass dequantises to `quant_state.dtype`, and norms, embeddings and heads are plain bfloat16 weights. All
of them follow the run here, in place and one tensor at a time. No packed number and no statistic of one is touched.

bitsandbytes is imported only where statistics have to be dequantised, by its own function.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .census import BITSANDBYTES, bits
from .dtypes import FLOAT16, FLOAT32, HALVES, from_torch, parse_dtype, to_torch
from .errors import PrecisionError, Problem, refuse, warn
from .policy import OFF
from .towers import adapter_parameters, is_quantized, unwrap


COMPUTE_DTYPE, QUANT_STATE, WEIGHT, BUFFER, CONFIG = "compute_dtype", "quant_state", "weight", "buffer", "config"

FIRST_INFINITE = 65520.0
"""The smallest number that float16, whose largest is 65504, rounds to infinity."""

_REASONS = {
    COMPUTE_DTYPE: "the layer multiplies in it; upstream keeps what the checkpoint or `BitsAndBytesConfig` says",
    QUANT_STATE: "the backward pass dequantises to it; upstream keeps the dtype that was quantised from",
    WEIGHT: "two half formats do not meet in one operation",
    BUFFER: "two half formats do not meet in one operation",
    CONFIG: "what the weights beside the packed ones hold, for what reads it (caches, saved configs)",
}
_WIDENED = "no autocast: operations follow the weights, and float32 holds them exactly"


@dataclass(frozen=True)
class Change:
    """One thing that is set so that a quantised model computes in the dtype of the run.

    Attributes:
        kind: `"compute_dtype"` or `"quant_state"` of a layer, `"weight"`, `"buffer"`, or `"config"` for its dtype.
        name: Qualified name in the model: of the layer, the tensor, or the config (`"config.text_config"`).
        source: Dtype that it has; `"unset"` where the first input would have decided.
        target: Dtype that it gets.
        reason: Why.
        elements: How many numbers are cast; 0 where a dtype is set and nothing is cast.
    """

    kind: str
    name: str
    source: str
    target: str
    reason: str
    elements: int = 0


@dataclass(frozen=True)
class Reconciliation:
    """What brings a quantised model to one compute dtype; empty where nothing disagrees, or nothing is quantised.

    Attributes:
        compute: The dtype that the model is brought to.
        changes: What is set, each with its reason.
        problems: What makes it impossible; `reconcile` raises them before it changes anything.
    """

    compute: str
    changes: tuple[Change, ...] = ()
    problems: tuple[Problem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The reconciliation as plain values, ready for JSON."""
        return {
            "compute": self.compute,
            "changes": [vars(change) for change in self.changes],
            "problems": [vars(problem) for problem in self.problems],
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
        return "\n".join(lines or [f"every quantised layer computes in {self.compute}"])


def compute_of(autocast: str, weights: Collection[str]) -> str:
    """The dtype that a quantised model is brought to.

    Args:
        autocast: The autocast dtype of the run, or `"off"`.
        weights: Dtypes of the weights that are neither adapters nor quantised.

    Returns:
        The autocast dtype. Without autocast operations follow the weights: their half dtype, as TRL's command line
        sets `bnb_4bit_compute_dtype` too, and `"float32"` where they have none, or two that could not meet.
    """
    halves = HALVES & set(weights)
    return autocast if autocast != OFF else next(iter(halves)) if len(halves) == 1 else FLOAT32


def plan(model: nn.Module, compute: str, *, exempt: Iterable[str] = (), trained: bool = True) -> Reconciliation:
    """Decides what follows the compute dtype in a model that bitsandbytes quantised; reads only.

    What follows: `compute_dtype` of its 4-bit layers and `dtype` of their quantisation state, half-precision weights
    and buffers that are frozen, and `dtype` of configs. What does not: packed weights, their statistics (and the state
    that those are packed with in turn), adapters, trainable weights, and everything in float32. A `compute_dtype` that
    was written into a `BitsAndBytesConfig` follows as well: float32 stands there where nothing was written.

    Args:
        model: A transformers model, wrapped by PEFT or not.
        compute: `"float32"`, `"bfloat16"` or `"float16"`; `compute_of` names it. With `"float32"` half weights are
            widened, which is exact and costs 2 bytes per number.
        exempt: Names of modules in the base model that are left as they are (`fp32_modules`).
        trained: Whether the model is trained. All of a reference model is frozen, whatever `requires_grad` says.

    Returns:
        The plan, with the problems where float16 cannot hold the weights.

    Raises:
        PrecisionError: If `compute` is none of the three.
    """
    compute = parse_dtype(compute, field="compute", allow_auto=False)
    base = unwrap(model)
    prefix = _prefix(model, base)
    spared = {id(part) for name in exempt for part in _parts(base.get_submodule(name))}
    layers = [(name, part, number) for name, part in base.named_modules() if (number := bits(part)) is not None]
    if not layers:
        return Reconciliation(compute)
    layers = [layer for layer in layers if id(layer[1]) not in spared]
    tensors = [found for found in _half_tensors(base, compute, trained) if id(found[2]) not in spared]
    changes = [change for name, layer, number in layers if number == 4 for change in _layer(name, layer, compute)]
    reason = _WIDENED if compute == FLOAT32 else None
    for kind, name, tensor in tensors:
        changes.append(Change(kind, name, from_torch(tensor.dtype), compute, reason or _REASONS[kind], tensor.numel()))
    changes += _config_changes(base, compute, bool(tensors))
    return Reconciliation(
        compute,
        tuple(replace(change, name=prefix + change.name) for change in changes),
        tuple(_overflows(layers, tensors, compute)),
    )


def reconcile(model: nn.Module, planned: Reconciliation) -> None:
    """Does what was planned: in place, no more than one tensor held twice, no packed byte changed.

    Args:
        model: The model that was planned for.
        planned: The plan.

    Raises:
        PrecisionError: If the plan has problems; nothing is changed then.
    """
    if planned.problems:
        raise PrecisionError(planned.problems)
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
    """Makes a 4-bit layer multiply in a dtype, and dequantise to it in the backward pass.

    Args:
        layer: The layer; any other module is left alone.
        dtype: A floating dtype.
    """
    if bits(layer) != 4:
        return
    vars(layer).update(compute_dtype=dtype, compute_type_is_set=True)
    for state in _states(layer):
        setattr(state, _dtype_field(state), dtype)


def int8_rounds_inputs(model: nn.Module, compute: str) -> Problem | None:
    """The warning about 8-bit layers in a run that computes in something else than float16.

    bitsandbytes says it too, in its log, once for each layer and forward pass.

    Args:
        model: The model, wrapped or not.
        compute: The compute dtype of the run.

    Returns:
        The warning, `None` without 8-bit layers, or where the run computes in float16 anyway.
    """
    layers = [(name, module) for name, module in unwrap(model).named_modules() if bits(module) == 8]
    if not layers or compute == FLOAT16:
        return None
    # On these two it multiplies dequantised weights while it trains.
    devices = {next(module.parameters()).device.type for _, module in layers}
    where = " wherever it does not train" if devices <= {"cpu", "xpu"} else ""
    given = f"{len(layers)} 8-bit layers, such as {layers[0][0]}, in a run that computes in {compute}"
    return warn("int8-computes-in-fp16", given, where=where)


def unsupported(model: nn.Module, method: str | None) -> Problem | None:
    """The refusal of a model that is quantised in a way for which there are no rules here.

    Args:
        model: The loaded model, wrapped or not.
        method: What `quantization_method` says of it.

    Returns:
        The problem; `None` for bitsandbytes, for what is not quantised, and for what was dequantised.
    """
    if method in (None, "4bit", "8bit"):
        return None
    config = getattr(getattr(unwrap(model), "hf_quantizer", None), "quantization_config", None)
    fix = "the unquantised checkpoint with `quantization_config=BitsAndBytesConfig(load_in_4bit=True)`"
    if hasattr(config, "dequantize"):
        fix = f"`quantization_config={type(config).__name__}(dequantize=True)`, or {fix}"
    return refuse("unknown-quantizer", f"a model quantised by {method}", method=method, fix=fix)


def _layer(name: str, layer: Any, compute: str) -> Iterator[Change]:
    """What is set on one 4-bit layer."""
    if hasattr(layer, "compute_dtype"):
        unset = layer.compute_dtype is None or not getattr(layer, "compute_type_is_set", True)
        source = "unset" if unset else from_torch(layer.compute_dtype)
        if source != compute:
            yield Change(COMPUTE_DTYPE, name, source, compute, _REASONS[COMPUTE_DTYPE])
    sources = {from_torch(getattr(state, _dtype_field(state))) for state in _states(layer)} - {compute}
    if sources:
        yield Change(QUANT_STATE, name, min(sources), compute, _REASONS[QUANT_STATE])


def _states(layer: nn.Module) -> list[Any]:
    """The quantisation states of a layer: on the layer, on its weight, or one object on both."""
    holders = (layer, *layer.parameters(recurse=False))
    states = [state for holder in holders if (state := getattr(holder, "quant_state", None)) is not None]
    return list({id(state): state for state in states}.values())


def _dtype_field(state: Any) -> str:
    """Where a state keeps what it dequantises to; while weights are repacked for a CPU kernel, aside."""
    return "original_dtype" if getattr(state, "packing_format_for_cpu", False) else "dtype"


def _half_tensors(base: nn.Module, compute: str, trained: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Kind, name and tensor of what is half-precision, frozen, no adapter's, not packed, and not in `compute`."""
    others = HALVES - {compute}
    adapters = {id(parameter) for parameter in adapter_parameters(base)}
    for name, parameter in base.named_parameters():
        fixed = id(parameter) in adapters or (trained and parameter.requires_grad) or is_quantized(parameter)
        if from_torch(parameter.dtype) in others and not fixed:
            yield WEIGHT, name, parameter
    for path, module in base.named_modules():
        if type(module).__module__.partition(".")[0] not in ("peft", BITSANDBYTES):
            for last, buffer in module.named_buffers(recurse=False):
                # The "minus infinity" of a mask has no twin in float16: such a buffer is left as it is.
                fits = compute != FLOAT16 or _largest(buffer) < FIRST_INFINITE
                if from_torch(buffer.dtype) in others and fits:
                    yield BUFFER, f"{path}.{last}".removeprefix("."), buffer


def _overflows(
    layers: list[tuple[str, nn.Module, int]], tensors: list[tuple[str, str, torch.Tensor]], compute: str
) -> Iterator[Problem]:
    """What float16 cannot hold: 8-bit layers, whose weights passed through it, and what a run in float16 reads."""
    limit = FIRST_INFINITE if compute == FLOAT16 else float("inf")
    infinite = [name for name, layer, number in layers if number == 8 and not _scale(layer) < limit]
    if infinite:
        skip = [_layer_name(infinite[0]), "lm_head"]
        yield refuse(
            "quantised-weights-overflow-fp16",
            f"8-bit weights beyond float16: {_listed(infinite)}",
            what="bitsandbytes quantises to 8 bits through it, and larger weights",
            fix=f"keep them out of the quantisation: `llm_int8_skip_modules={skip!r}`",
        )
    if compute != FLOAT16:
        return
    sizes = [(name, max(map(_absmax, _states(layer)), default=0.0)) for name, layer, number in layers if number == 4]
    sizes += [(name, _largest(tensor)) for _, name, tensor in tensors]
    large = {name: size for name, size in sizes if size >= FIRST_INFINITE}
    if large:
        name, size = max(large.items(), key=lambda item: item[1])
        yield refuse(
            "quantised-weights-overflow-fp16",
            f"weights up to {size:.6g} in a run that computes in float16: {_listed([*large])}",
            what="a packed weight is dequantised to as much as its block's absmax, and these weights",
            fix=f"`bf16=True` instead of `fp16=True`, or `fp32_modules=[{_module_name(name)!r}]`",
        )


def _absmax(state: Any) -> float:
    """The largest weight that a 4-bit state dequantises to: the largest code is 1."""
    if state.absmax.is_meta:
        return 0.0
    if not state.nested:
        return _largest(state.absmax)
    from bitsandbytes.functional import dequantize_blockwise

    return _largest(dequantize_blockwise(state.absmax, state.state2) + state.offset)


def _scale(layer: Any) -> float:
    """The largest weight of an 8-bit layer, which its scale says; 0 where it is not quantised yet."""
    scale = getattr(layer.weight, "SCB", None)  # the first forward pass moves it to the layer's state
    scale = getattr(getattr(layer, "state", None), "SCB", None) if scale is None else scale
    return 0.0 if scale is None else _largest(scale)


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude in a tensor, without a copy of it; 0 where there is no data."""
    if tensor.is_meta or tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    low, high = torch.aminmax(tensor.detach())
    return max(-low.item(), high.item())


def _configs(base: nn.Module) -> dict[str, PretrainedConfig]:
    """The configs of a model and of the parts in it, each once, by their place."""
    pending = [
        (f"{name}.config".removeprefix("."), getattr(module, "config", None)) for name, module in base.named_modules()
    ]
    places: dict[str, PretrainedConfig] = {}
    for name, config in pending:  # grows on the way
        if isinstance(config, PretrainedConfig) and all(config is not other for other in places.values()):
            places[name] = config
            pending += [(f"{name}.{key}", getattr(config, key, None)) for key in getattr(config, "sub_configs", ())]
    return places


def _config_changes(base: nn.Module, compute: str, cast: bool) -> Iterator[Change]:
    """The configs whose `dtype` is not what the weights will hold; none where no weight is half-precision."""
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
    """What stands before the names of the base model in the names of its wrapper."""
    return next((f"{name}." for name, module in model.named_modules() if module is base and name), "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def _module_name(name: str) -> str:
    """The layer of a tensor, without what PEFT puts around it."""
    for ending in (".weight", ".bias", ".base_layer", ".original_module"):
        name = name.removesuffix(ending)
    return name


def _layer_name(name: str) -> str:
    """The last part of a layer's name: `"down_proj"`."""
    return _module_name(name).rpartition(".")[2]

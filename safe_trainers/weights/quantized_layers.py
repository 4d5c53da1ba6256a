"""Decides how the packed layers of quantisers other than bitsandbytes take part in a run, from what they compute.

Quantisers are not known by name. One layer of each kind is run forward and backward on random inputs in the autocast
context of the run. If it computes in the dtype of the run, nothing is changed. If it computes only in float32, it
runs in float32, as `fp32_modules` do. If it does not compute, or has no gradient, the model is refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..boundaries.cast_hooks import guard_inputs
from ..core.dtypes import FLOAT32, HALVES, KBIT, SHORT, to_torch
from ..core.errors import Problem, refuse
from ..model.inventory import declared_method, quantization_method
from ..model.packed_layers import LayerTrial, kind_of, packed_layers, rewritten_layers, try_layer
from ..model.parts import find_parts, is_quantized, unwrap
from . import fp32_modules


AS_LOADED, CAST_INPUTS, IN_FLOAT32 = "as loaded", "inputs cast to the compute dtype", "computes in float32"


@dataclass(frozen=True)
class MeasuredLayers:
    """Layers of one kind, and what one of them computed.

    Attributes:
        kind: Class of the layers, and of their weights if that is a class of a quantiser.
        names: Qualified names in the base model.
        trial: What the first of them computed.
        treatment: How they take part in the run: `"as loaded"`, `"inputs cast to the compute dtype"` or `"computes in
            float32"`; `None` if the model is refused because of them.
    """

    kind: str
    names: tuple[str, ...]
    trial: LayerTrial
    treatment: str | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the measurement as plain values for JSON."""
        return {
            "kind": self.kind,
            "names": list(self.names[:3]),
            "layers": len(self.names),
            "input": self.trial.dtype,
            "output": self.trial.output,
            "gradient": self.trial.slope,
            "treatment": self.treatment,
        }

    def __str__(self) -> str:
        treatment = "refused" if self.treatment is None else self.treatment
        return f"{_described(self)}: {treatment}; for {self.trial.dtype} inputs, {self.trial}"


def concerns(model: nn.Module) -> bool:
    """Whether a quantiser other than bitsandbytes quantised a model.

    Args:
        model: The model, possibly wrapped.
    """
    base = unwrap(model)
    method = quantization_method(base)
    return method not in KBIT and (method is not None or declared_method(base) is not None)


def measure(
    model: nn.Module, compute: str, autocast: str | None, *, float32: Iterable[str] = (), trained: bool = True
) -> tuple[MeasuredLayers, ...]:
    """Measures one packed layer of each kind, without changing the model.

    Args:
        model: A transformers model, possibly wrapped by PEFT.
        compute: The compute dtype of the run.
        autocast: The autocast dtype of the run; `None` without autocast.
        float32: Names of modules in the base model that compute in float32 (`fp32_modules`).
        trained: Whether gradients must pass through the layers; `False` for a reference model.

    Returns:
        The layers by kind; empty if bitsandbytes quantised the model, or if it is not quantised.
    """
    base = unwrap(model)
    if not concerns(base):
        return ()
    wide = {id(part) for name in float32 for part in base.get_submodule(name).modules()}
    frozen = _without_gradient(base) if trained else {id(part) for part in base.modules()}
    groups: dict[tuple[Any, ...], list[tuple[str, nn.Module]]] = {}
    for name, layer in (*packed_layers(model), *rewritten_layers(model)):
        key = (kind_of(layer), id(layer) in wide, id(layer) not in frozen)
        groups.setdefault(key, []).append((name, layer))
    found = []
    for (_, in_float32, backward), members in groups.items():
        layer = members[0][1]
        if in_float32:
            decided = _decide(layer, FLOAT32, None, backward)
        else:
            decided = _decide(layer, compute, autocast, backward)
        if decided is not None:
            names = tuple(name.removesuffix(".base_layer") for name, _ in members)
            found.append(MeasuredLayers(_kind(layer), names, *decided))
    return tuple(found)


def refusals(
    model: nn.Module, measured: Iterable[MeasuredLayers], compute: str, autocast: str | None
) -> Iterator[Problem]:
    """Yields a refusal of each kind of layer that cannot take part in a run.

    Args:
        model: The model that was measured.
        measured: The result of `measure`.
        compute: The compute dtype of the run.
        autocast: The autocast dtype of the run; `None` without autocast.
    """
    context = "without autocast" if autocast is None else f"under {autocast} autocast"
    for group in measured:
        if group.treatment is None:
            method = declared_method(unwrap(model)) or quantization_method(model)
            what = f"a model quantised by {method}: {_described(group)}"
            found = f"for {group.trial.dtype} inputs {context}, {group.trial}"
            fix = _fix(model, layer_of(model, group.names[0]), compute)
            yield refuse("quantised-layers-do-not-train", what, found=found, fix=fix)


def apply(model: nn.Module, measured: Iterable[MeasuredLayers], compute: str) -> None:
    """Applies the treatments in place. Weights are not changed.

    Args:
        model: The model that was measured.
        measured: The result of `measure`.
        compute: The compute dtype of the run.
    """
    for group in measured:
        layers = {name: layer_of(model, name) for name in group.names}
        if group.treatment == IN_FLOAT32:
            fp32_modules.guard(model, layers)
        elif group.treatment == CAST_INPUTS:
            for layer in layers.values():
                guard_inputs(layer, to_torch(compute))


def _decide(
    layer: nn.Module, compute: str, autocast: str | None, backward: bool
) -> tuple[LayerTrial, str | None] | None:
    """Returns the measurement of a layer that decides, and its treatment; `None` if it cannot be run yet."""
    packed = any(map(is_quantized, (*layer.parameters(recurse=False), *layer.buffers(recurse=False))))
    weight: Any = getattr(layer, "weight", None)
    if not packed and autocast is None and isinstance(weight, torch.Tensor) and not is_quantized(weight):
        compute = str(weight.dtype).removeprefix("torch.")  # its inputs follow an ordinary weight
    first = try_layer(layer, compute, autocast, backward=backward)
    if first is None:
        return None
    if first.trains and first.output in (None, compute, FLOAT32):
        if autocast is None:
            return first, AS_LOADED
        from_norm = try_layer(layer, FLOAT32, autocast, backward=backward)  # float32 norms do not round their output
        return first, AS_LOADED if from_norm is not None and from_norm.trains else CAST_INPUTS
    exact = try_layer(layer, FLOAT32, None, backward=backward)
    if exact is not None and exact.trains and exact.output == FLOAT32:
        return exact, IN_FLOAT32
    return first, None


def _without_gradient(base: nn.Module) -> set[int]:
    """Returns the `id`s of modules through which no gradient passes: towers, if nothing in a tower is trained."""
    towers = find_parts(base).towers.values()
    if any(parameter.requires_grad for tower in towers for parameter in tower.parameters()):
        return set()
    return {id(part) for tower in towers for part in tower.modules()}


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """Returns the layer of a name in `MeasuredLayers.names`, without the adapters around it.

    Args:
        model: The model, possibly wrapped by PEFT.
        name: The name, without the suffix that PEFT adds.
    """
    layer = unwrap(model).get_submodule(name)
    return layer.base_layer if hasattr(layer, "base_layer") else layer  # type: ignore[return-value]


def _kind(layer: nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    kind = type(weight) if isinstance(weight, torch.Tensor) else torch.Tensor
    suffix = "" if kind in (torch.Tensor, nn.Parameter) else f" with {kind.__name__}"
    return f"{type(layer).__name__}{suffix}"


def _described(group: MeasuredLayers) -> str:
    return f"{len(group.names)} layers of {group.kind}, such as {group.names[0]}"


def _fix(model: nn.Module, layer: nn.Module, compute: str) -> str:
    """Returns what to write instead: another dtype if the layer computes in it, otherwise another quantiser."""
    for dtype in sorted({*SHORT} - {compute}):
        trial = try_layer(layer, dtype, None)
        if trial is not None and trial.trains and trial.output == dtype:
            switch = f"`{SHORT[dtype]}=True`" if dtype in HALVES else "`bf16=False`"
            return f"quantise a model that was loaded with `dtype='{compute}'`, or train in {dtype} with {switch}"
    config = getattr(getattr(unwrap(model), "hf_quantizer", None), "quantization_config", None)
    fix = "the unquantised checkpoint with `quantization_config=BitsAndBytesConfig(load_in_4bit=True)`"
    if hasattr(config, "dequantize"):
        return f"`quantization_config={type(config).__name__}(dequantize=True)`, or {fix}"
    return f"{fix}, or another quantiser of weights only"

"""Brings the weights of a loaded model to the dtypes of the policy, before an optimizer or an engine exists."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..core.dtypes import AUTO, FLOAT32, HALVES, from_torch, to_torch
from ..core.errors import Problem, raise_if, warn
from ..model.inventory import ModelInventory, declared_method, take_inventory
from ..model.parts import HEADS, adapter_parameters, elements_of, unwrap
from ..policy.resolve import PrecisionPolicy
from . import bitsandbytes as quantization
from . import fp32_modules, quantized_layers
from .bitsandbytes import QuantPlan as Quantized
from .bitsandbytes_loading import fresh_heads, unusable_head
from .cast import ParameterCast, apply_casts, table
from .dora import FreshMagnitude, fresh_magnitudes
from .lost_updates import lost_share
from .quantized_layers import MeasuredLayers
from .trainables import TrainableContext, decide, refuse_upcast
from .unify_dtypes import CastPlan as Layout


@dataclass(frozen=True)
class PreparedWeights:
    """The dtypes to which the weights of a model were brought.

    Attributes:
        decisions: One cast for each trainable parameter and each parameter of `fp32_modules`.
        quantized: The changes of a quantised model.
        layout: The changes that let a model with weights of several dtypes compute.
        fp32_modules: Names, in the base model, of the modules that compute in float32.
        warnings: Warnings about a loss of precision.
        layers: What the layers of quantisers other than bitsandbytes compute.
        magnitudes: The DoRA magnitudes of adapters that were not trained.
        renewed: Names of those that were set to the norms of the forward pass.
    """

    decisions: tuple[ParameterCast, ...] = ()
    quantized: Quantized | None = None
    layout: Layout | None = None
    fp32_modules: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()
    layers: tuple[MeasuredLayers, ...] = ()
    magnitudes: tuple[FreshMagnitude, ...] = ()
    renewed: tuple[str, ...] = ()

    def with_layout(self, layout: Layout) -> "PreparedWeights":
        """Returns a copy with another `layout`."""
        return replace(self, layout=layout)

    def with_renewed(self, names: tuple[str, ...]) -> "PreparedWeights":
        """Returns a copy with other `renewed`."""
        return replace(self, renewed=names)

    @property
    def casts(self) -> bool:
        """Whether the dtype of any weight may have changed."""
        return self.quantized is not None or any(cast.source != cast.target for cast in self.decisions)

    def to_dict(self) -> dict[str, Any]:
        """Returns the changes as plain values for JSON."""
        return {
            "decisions": [vars(cast) for cast in self.decisions],
            "quantized": None if self.quantized is None else self.quantized.to_dict(),
            "layers": [group.to_dict() for group in self.layers],
            "layout": None if self.layout is None else self.layout.to_dict(),
            "fp32_modules": list(self.fp32_modules),
            "renewed": list(self.renewed),
            "warnings": [warning.to_dict() for warning in self.warnings],
        }

    def __str__(self) -> str:
        parts = [table(self.decisions) or "no parameter is trained"]
        parts += [str(part) for part in (self.quantized, *self.layers, self.layout) if part is not None]
        return "\n".join(parts)


def prepare_weights(
    model: nn.Module,
    inventory: ModelInventory,
    policy: PrecisionPolicy,
    context: TrainableContext,
    upcast: bool = True,
    fp32_patterns: tuple[str, ...] = (),
) -> PreparedWeights:
    """Casts the weights of a model in place to the dtypes of the policy. Changes nothing if it raises.

    Args:
        model: The policy model, with the adapters as PEFT created them.
        inventory: The dtypes of the model.
        policy: The policy of the run.
        context: What else the dtypes of trainable parameters depend on.
        upcast: Whether half-precision trainable parameters may be upcast if the loss is scaled.
        fp32_patterns: `fp32_modules`.

    Returns:
        The changes.

    Raises:
        PrecisionError: If the model cannot be prepared, with all problems.
    """
    is_quantized = inventory.quantization is not None
    modules = fp32_modules.find_modules(model, fp32_patterns)
    wide = (*fp32_modules.decide(model, modules), *(_heads(model) if is_quantized else ()))
    covered = {cast.name for cast in wide}
    trainables = tuple(cast for cast in decide(model, policy, context) if cast.name not in covered)
    problems = [] if upcast else [refuse_upcast(trainables, context.unscalable_dtypes)]
    problems += [unusable_head(model), quantization.repacked(model), quantization.dora_loses_scales(model)]
    quantized, autocast = None, policy.autocast.value
    compute = quantization.compute_of(autocast, inventory.weights)
    layers: tuple[MeasuredLayers, ...] = ()
    if (is_quantized or declared_method(unwrap(model)) is not None) and quantized_layers.concerns(model):
        layers = quantized_layers.measure(model, compute, autocast, float32=modules)
        problems += quantized_layers.refusals(model, layers, compute, autocast)
    if is_quantized:
        exempt = [*modules, *(name for name, _ in unwrap(model).named_children() if name in HEADS)]
        quantized = quantization.plan(model, compute, exempt=exempt)
        problems += quantized.problems
    raise_if(problems)
    magnitudes = fresh_magnitudes(model)
    fp32_modules.guard(model, modules)
    if quantized is not None:
        quantization.reconcile(model, quantized)
        quantization.keep_packing(model)
    if layers:
        quantized_layers.apply(model, layers, compute)
    casts = (*wide, *trainables)
    apply_casts(model, casts)
    warnings = [*_half_trainables(model, trainables, context)]
    int8 = None if quantized is None else quantization.int8_rounds_inputs(model, quantized.compute)
    warnings += [] if int8 is None else [int8]
    return PreparedWeights(casts, quantized, None, tuple(modules), tuple(warnings), layers, magnitudes)


def _heads(model: nn.Module) -> Iterator[ParameterCast]:
    """Yields the casts of a quantised model's new heads to float32."""
    fresh = set(fresh_heads(model))
    for name, p in model.named_parameters():
        if name in fresh:
            yield ParameterCast(name, from_torch(p.dtype), FLOAT32, "a new, randomly initialised head", elements_of(p))


def prepare_reference(model: nn.Module, policy: PrecisionPolicy, patterns: tuple[str, ...]) -> None:
    """Brings a reference model to the same compute dtypes as the policy model.

    Args:
        model: The reference model, of the policy model's class or a base class.
        policy: The policy of the run.
        patterns: `fp32_modules`.

    Raises:
        PrecisionError: If its quantised layers do not compute.
    """
    modules = fp32_modules.find_modules(model, patterns)
    wide = fp32_modules.decide(model, modules)
    autocast = policy.autocast.value
    compute = quantization.compute_of(autocast, take_inventory(model).weights)
    layers = quantized_layers.measure(model, compute, autocast, float32=modules, trained=False)
    raise_if(quantized_layers.refusals(model, layers, compute, autocast))
    quantized = quantization.plan(model, compute, exempt=modules, trained=False)
    fp32_modules.guard(model, modules)
    quantization.reconcile(model, quantized)
    quantization.keep_packing(model)
    quantized_layers.apply(model, layers, compute)
    apply_casts(model, wide)


def _half_trainables(
    model: nn.Module, casts: tuple[ParameterCast, ...], context: TrainableContext
) -> Iterator[Problem]:
    """Warns about half-precision trainable parameters, except adapters for which the cast was found to be safe."""
    if context.engine_copies is not None:
        return
    parameters = dict(model.named_parameters())
    trained = [d for d in casts if parameters[d.name].requires_grad]
    halves = [d for d in trained if d.target in HALVES and (d.source == d.target or context.adapter_dtype != AUTO)]
    if not halves:
        return
    dtypes = sorted({cast.target for cast in halves})
    rate = context.learning_rate
    lost, elements = 0.0, sum(d.elements for d in halves)
    for dtype in dtypes:
        members = [d for d in halves if d.target == dtype]
        share = lost_share((parameters[d.name] for d in members), rate, to_torch(dtype))
        lost += share * sum(d.elements for d in members) / elements
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    adapter = all(id(parameters[d.name]) in adapters for d in halves)
    fix = "`adapter_dtype='float32'`" if adapter else (
        "`model_init_kwargs={'dtype': 'float32'}` with `bf16=True`, which trains float32 weights with the same "
        "compute dtype; `model.float()` for a model that you pass yourself"
    )  # fmt: skip
    yield warn(
        "half-trainables",
        f"trainable weights in {' and '.join(dtypes)}, such as {halves[0].name}",
        count=elements,
        total=sum(d.elements for d in trained),
        dtypes=" and ".join(dtypes),
        share=f"{lost:.0%}",
        rate=f"{rate:g}",
        fix=fix,
    )

"""What is changed in a live model before anything is built on it: once, in place, one tensor at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import fp32_modules, quantization
from .adapters import Circumstances, decide, refuse_upcast
from .census import Census, take_census
from .decisions import Decision, carry_out, table
from .dtypes import AUTO, FLOAT32, HALVES, from_torch, to_torch
from .errors import PrecisionError, Problem, warn
from .layout import Reconciliation as Layout
from .policy import PrecisionPolicy
from .quantization import Reconciliation as Quantized
from .quantized_loading import HEADS, fresh_heads, unusable_head
from .rounding import lost_share
from .towers import adapter_parameters, elements_of, unwrap


@dataclass(frozen=True)
class Preparation:
    """What a model was brought to.

    Attributes:
        decisions: One for each trainable, and for each other parameter of `fp32_modules`, with its reason.
        quantized: What was set in a model that bitsandbytes quantised.
        layout: What was done so that weights of several dtypes can meet.
        fp32_modules: Names, in the base model, of the modules that compute in float32.
        warnings: What is supported but loses precision.
    """

    decisions: tuple[Decision, ...] = ()
    quantized: Quantized | None = None
    layout: Layout | None = None
    fp32_modules: tuple[str, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def casts(self) -> bool:
        """Whether any weight may have another dtype than before."""
        return self.quantized is not None or any(decision.source != decision.target for decision in self.decisions)

    def to_dict(self) -> dict[str, Any]:
        """The preparation as plain values, ready for JSON."""
        return {
            "decisions": [vars(decision) for decision in self.decisions],
            "quantized": None if self.quantized is None else self.quantized.to_dict(),
            "layout": None if self.layout is None else self.layout.to_dict(),
            "fp32_modules": list(self.fp32_modules),
            "warnings": [vars(warning) for warning in self.warnings],
        }

    def __str__(self) -> str:
        parts = [table(self.decisions) or "nothing is trained"]
        parts += [str(part) for part in (self.quantized, self.layout) if part is not None]
        return "\n".join(parts)


def prepare(
    model: nn.Module,
    census: Census,
    policy: PrecisionPolicy,
    circumstances: Circumstances,
    upcast: bool = True,
    fp32_patterns: tuple[str, ...] = (),
) -> Preparation:
    """Brings a model to what the policy decided; nothing is changed where it has to be refused.

    Args:
        model: The policy model, its adapters as PEFT made them.
        census: What it holds.
        policy: The policy of the run.
        circumstances: What else the decisions on trainables depend on.
        upcast: Whether half trainables may be upcast where the loss is scaled.
        fp32_patterns: `fp32_modules`.

    Returns:
        What was done.

    Raises:
        PrecisionError: With everything that cannot be prepared.
    """
    is_quantized = census.quantization is not None
    modules = fp32_modules.find_modules(model, fp32_patterns)
    wide = (*fp32_modules.decide(model, modules), *(_heads(model) if is_quantized else ()))
    covered = {decision.name for decision in wide}
    trainables = tuple(d for d in decide(model, policy, circumstances) if d.name not in covered)
    problems = [] if upcast else [refuse_upcast(trainables)]
    problems += [quantization.unsupported(model, census.quantization), unusable_head(model)]
    quantized = None
    if is_quantized:
        compute = quantization.compute_of(policy.autocast.value, census.weights)
        exempt = [*modules, *(name for name, _ in unwrap(model).named_children() if name in HEADS)]
        quantized = quantization.plan(model, compute, exempt=exempt)
        problems += quantized.problems
    found = [problem for problem in problems if problem is not None]
    if found:
        raise PrecisionError(found)
    fp32_modules.guard(model, modules)
    if quantized is not None:
        quantization.reconcile(model, quantized)
    decisions = (*wide, *trainables)
    carry_out(model, decisions)
    warnings = [*_half_trainables(model, trainables, circumstances)]
    rounds = None if quantized is None else quantization.int8_rounds_inputs(model, quantized.compute)
    return Preparation(
        decisions, quantized, None, tuple(modules), tuple([*warnings, *([] if rounds is None else [rounds])])
    )


def _heads(model: nn.Module) -> Iterator[Decision]:
    """The heads of a quantised model that were made for the task, trained or not."""
    fresh = set(fresh_heads(model))
    for name, p in model.named_parameters():
        if name in fresh:
            yield Decision(name, from_torch(p.dtype), FLOAT32, "a head that was made for the task", elements_of(p))


def prepare_reference(model: nn.Module, policy: PrecisionPolicy, patterns: tuple[str, ...]) -> None:
    """Makes a second model of the run compute where and as the policy model does.

    Args:
        model: The reference, of the class of the policy model or one that it inherits from.
        policy: The policy of the run.
        patterns: `fp32_modules`.
    """
    modules = fp32_modules.find_modules(model, patterns)
    wide = fp32_modules.decide(model, modules)
    compute = quantization.compute_of(policy.autocast.value, take_census(model).weights)
    quantized = quantization.plan(model, compute, exempt=modules, trained=False)
    fp32_modules.guard(model, modules)
    quantization.reconcile(model, quantized)
    carry_out(model, wide)


def _half_trainables(
    model: nn.Module, decisions: tuple[Decision, ...], circumstances: Circumstances
) -> Iterator[Problem]:
    """What is trained in half precision without the policy having found that it loses nothing."""
    halves = [d for d in decisions if d.target in HALVES and (d.source == d.target or circumstances.asked != AUTO)]
    if not halves or circumstances.copied is not None:
        return
    parameters = dict(model.named_parameters())
    trained = [d for d in decisions if parameters[d.name].requires_grad]
    halves = [d for d in halves if parameters[d.name].requires_grad]
    if not halves:
        return
    dtypes = sorted({decision.target for decision in halves})
    rate = circumstances.learning_rate
    lost, elements = 0.0, sum(d.elements for d in halves)
    for dtype in dtypes:
        members = [d for d in halves if d.target == dtype]
        share = lost_share((parameters[d.name] for d in members), rate, to_torch(dtype))
        lost += share * sum(d.elements for d in members) / elements
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    adapter = all(id(parameters[d.name]) in adapters for d in halves)
    fix = "`adapter_dtype='float32'`" if adapter else (
        "`model_init_kwargs={'dtype': 'float32'}` with `bf16=True`: fp32 master weights, the same compute dtype; "
        "`model.float()` for a model that you pass yourself"
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

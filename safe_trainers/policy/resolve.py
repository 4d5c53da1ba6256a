"""Resolves the dtypes of a run from plain values, each with its reason.

No function here uses a tensor or a model: `resolve` is a pure function, and its tests are a table. Decisions that
depend on the loaded model are made in `weights` and `boundaries`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from ..core.device import Device
from ..core.dtypes import AUTO, BFLOAT16, FLOAT16, FLOAT32, HALVES, KBIT, SHORT, join_dtypes, parse_dtype
from ..core.errors import PrecisionError, Problem, refuse, warn
from .settings import ADAPTER_DTYPES, ROLLOUT_COMPUTE, unknown_choice


OFF, AS_LOADED, AS_CREATED = "off", "as loaded", "as created"
"""Texts of choices without a value: no autocast, weights of unknown dtypes, adapters that keep their dtypes."""
_FLASH_ATTENTION = re.compile(r"flash[-_]?att")
"""Matches the names of flash attention implementations, including those of kernel repositories."""
FLAG_OF = {BFLOAT16: "bf16", FLOAT16: "fp16"}
"""The flag of `TrainingArguments` that selects each half dtype."""


_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True)
class Choice(Generic[_ValueT]):
    """A value that was chosen, with the reason.

    Attributes:
        value: The value, for programs.
        reason: The reason; names the values that the choice follows from.
        text: The value as text for people; by default made from `value`.
    """

    value: _ValueT
    reason: str
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            value: Any = self.value
            if isinstance(value, frozenset):
                text = join_dtypes(value, AS_LOADED)
            else:
                text = OFF if value is None else str(value)
            object.__setattr__(self, "text", text)


@dataclass(frozen=True)
class Requested:
    """The precision that the user requested, as plain values.

    Attributes:
        bf16: `TrainingArguments.bf16`; `None` if it was left unset.
        fp16: `TrainingArguments.fp16`.
        precision: `PrecisionSettings.precision`, in any spelling of `parse_dtype`; `None` if unset.
        rollout_compute: `"training"` or `"stock"`.
        adapter_dtype: `"auto"`, `"float32"` or `"bfloat16"`, in any spelling of `parse_dtype`.
        config: Name of the Safe config class that messages recommend; `None` if the trainer has none.
    """

    bf16: bool | None = None
    fp16: bool = False
    precision: str | None = None
    rollout_compute: str = "training"
    adapter_dtype: str = AUTO
    config: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the model, either declared before it is loaded or read from it afterwards.

    Attributes:
        weights: Dtypes of the weights that are neither adapters nor quantised; empty if unknown.
        trainable: Dtypes of trainable parameters; empty if unknown.
        live: Whether the user passed a loaded model, so that `model_init_kwargs` has no effect.
        attn_implementation: `config._attn_implementation`, or the requested one; `None` if unknown.
        quantization: `"4bit"`, `"8bit"`, the name of another method, or `None`.
    """

    weights: frozenset[str] = frozenset()
    trainable: frozenset[str] = frozenset()
    live: bool = False
    attn_implementation: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one run, each with its reason.

    Attributes:
        compute: Dtypes of matrix products in training, scoring and rollout. Several if autocast is off and the
            weights have several dtypes; none if they are unknown.
        autocast: Autocast dtype; `None` without autocast.
        master: Dtypes of trainable weights and of the optimizer state; none if unknown.
        frozen_base: Dtypes of weights that are not trained, or their quantisation method.
        adapter: Dtype of adapter weights; `None` if they keep the dtype in which PEFT or the user created them. Single
            tensors may keep a wider dtype (`PreparedWeights`).
        media: Images and audio get the dtype of the tower that consumes them.
        rollout: The autocast context of generation: `"training"` (the same as in training) or `"stock"`.
        reference: Compute dtypes of the reference model.
        loss_scale: Whether the loss is scaled.
        problems: Refusals; `check` raises them.
        warnings: Warnings.
    """

    compute: Choice[frozenset[str]]
    autocast: Choice[str | None]
    master: Choice[frozenset[str]]
    frozen_base: Choice[frozenset[str]]
    adapter: Choice[str | None]
    media: Choice[str]
    rollout: Choice[str]
    reference: Choice[frozenset[str]]
    loss_scale: Choice[bool]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    def choices(self) -> Iterator[tuple[str, Choice[Any]]]:
        """Yields each choice with its name, in the order of the attributes."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Choice):
                yield field.name, value

    def check(self) -> None:
        """Raises all problems together.

        Raises:
            PrecisionError: If there are any.
        """
        if self.problems:
            raise PrecisionError(self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as plain values for JSON."""
        return {
            **{name: {"value": choice.text, "reason": choice.reason} for name, choice in self.choices()},
            "problems": [problem.to_dict() for problem in self.problems],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }

    def __str__(self) -> str:
        rows = list(self.choices())
        name_width = max(len(name) for name, _ in rows)
        value_width = max(len(choice.text) for _, choice in rows)
        lines = [f"{name:<{name_width}}  {choice.text:<{value_width}}  {choice.reason}" for name, choice in rows]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def resolve_compute(requested: Requested, device: Device) -> tuple[Choice[str], tuple[Problem, ...]]:
    """Resolves the requested compute dtype.

    Args:
        requested: The user's settings.
        device: The device of the run.

    Returns:
        `"float32"`, `"bfloat16"` or `"float16"` with the reason, and a refusal for each contradicting flag.

    Raises:
        PrecisionError: If `requested.precision` is not a dtype.
    """
    if requested.precision is None:
        if requested.fp16:
            both = (refuse("two-half-formats", "bf16=True with fp16=True"),) if requested.bf16 else ()
            return Choice(FLOAT16, "fp16=True"), both
        if requested.bf16:
            return Choice(BFLOAT16, "bf16=True"), ()
        if requested.bf16 is False:
            return Choice(FLOAT32, "neither bf16 nor fp16 is set"), ()
    dtype = AUTO if requested.precision is None else parse_dtype(requested.precision, field="precision")
    if dtype == AUTO:
        dtype, reason = device.preferred
        reason = f"precision='auto': {reason}"
    else:
        reason = f"precision={requested.precision!r}"
    flag = FLAG_OF.get(dtype)
    contradicting = [f"{other}=True" for other in ("bf16", "fp16") if getattr(requested, other) and other != flag]
    if flag == "bf16" and requested.bf16 is False:
        contradicting.append("bf16=False")
    problems = tuple(
        refuse(
            "precision-contradicts-flag",
            f"precision={requested.precision!r} ({SHORT[dtype]}) with {setting}",
            flag=setting,
            precision=requested.precision,
        )
        for setting in contradicting
    )
    return Choice(dtype, reason), problems


def resolve(requested: Requested, device: Device, model: ModelFacts) -> PrecisionPolicy:
    """Resolves the dtypes of a run. This is a pure function of plain values.

    Args:
        requested: The user's settings.
        device: The device of the run.
        model: Properties of the model.

    Returns:
        The policy, with all problems and warnings. This function does not raise the problems; call `check` when
        everything is known, so that they are reported together.

    Raises:
        PrecisionError: If a setting is not a dtype (`precision="fp12"`).
    """
    dtype, problems = resolve_compute(requested, device)
    found, warnings = list(problems), []
    weights = join_dtypes(model.weights, AS_LOADED)
    autocast: Choice[str | None]

    scaled = dtype.value == FLOAT16 and device.scales_loss
    if dtype.value == FLOAT32:
        autocast = Choice(None, dtype.reason)
    elif dtype.value == FLOAT16 and not scaled:
        autocast = Choice(None, f"accelerate has no fp16 autocast on {device}")
        fix = f"drop `fp16=True`, or use {_switch(requested, BFLOAT16)}"
        if requested.precision is not None:
            fix = f"{_switch(requested, FLOAT32)}, or {_switch(requested, BFLOAT16)}"
        warnings.append(warn("fp16-on-cpu", f"{dtype.reason} on {device}", weights=weights, fix=fix))
    else:
        autocast = Choice(dtype.value, dtype.reason)

    if autocast.value is not None:
        compute = Choice(frozenset({autocast.value}), f"autocast, from {dtype.reason}")
    else:
        several = len(model.weights) > 1
        follow = (
            "each operation uses the dtype of its weights" if several else "operations use the dtype of the weights"
        )
        compute = Choice(model.weights, f"no autocast ({autocast.reason}): {follow}")

    if requested.rollout_compute not in ROLLOUT_COMPUTE:
        found.append(unknown_choice("rollout_compute", requested.rollout_compute, ROLLOUT_COMPUTE))
    found += _device_problems(dtype, compute.value, device, model, requested)
    adapter, adapter_problems = _adapter_dtype(requested, device, model, dtype, compute.value, scaled)
    half_problems, half_warnings = _half_weights(dtype, autocast.value, model, requested)
    found += [*adapter_problems, *half_problems]
    warnings += half_warnings
    aligned = requested.rollout_compute != "stock"
    if not aligned and autocast.value is not None:
        warnings.append(warn("rollout-not-aligned", "rollout_compute='stock' under autocast"))

    loaded = Choice(model.weights, "as loaded: `model_init_kwargs['dtype']`, float32 by default in TRL")
    trained = join_dtypes(model.trainable)
    upcast = scaled and bool(model.trainable & (device.unscalable_dtypes or frozenset()))
    return PrecisionPolicy(
        compute=compute,
        autocast=autocast,
        master=(
            Choice(frozenset({FLOAT32}), f"loss scaling: {trained} is upcast before the optimizer is created")
            if upcast
            else Choice(model.trainable, "trainable weights keep the dtype in which PEFT or the user created them")
            if trained
            else loaded
        ),
        frozen_base=loaded
        if model.quantization is None
        else Choice(frozenset({model.quantization}), "quantised, as loaded"),
        adapter=adapter,
        media=Choice("tower", "media tensors get the dtype of their tower if that does not change its output"),
        rollout=Choice(
            "training" if aligned else "stock",
            "generation runs in the autocast context of training" if aligned else "rollout_compute='stock'",
        ),
        reference=Choice(compute.value, "the reference is scored in the same context as the policy"),
        loss_scale=Choice(True, "float16 gradients underflow without it", "dynamic")
        if scaled
        else Choice(False, "not fp16", OFF),
        problems=tuple(found),
        warnings=tuple(warnings),
    )


def _adapter_dtype(
    requested: Requested, device: Device, model: ModelFacts, dtype: Choice[str], compute: frozenset[str], scaled: bool
) -> tuple[Choice[str | None], list[Problem]]:
    """Resolves the dtype of adapters, as far as it follows from plain values."""
    adapter = parse_dtype(requested.adapter_dtype, field="adapter_dtype")
    reason = f"adapter_dtype={requested.adapter_dtype!r}"
    if adapter not in ADAPTER_DTYPES:
        return Choice(adapter, reason), [unknown_choice("adapter_dtype", requested.adapter_dtype, ADAPTER_DTYPES)]
    if adapter == BFLOAT16 and scaled and BFLOAT16 in (device.unscalable_dtypes or ()):
        what, switch = f"{reason} with {dtype.reason}", _switch(requested, BFLOAT16)
        return Choice(adapter, reason), [refuse("adapter-dtype-cannot-be-scaled", what, device=device, switch=switch)]
    if adapter != AUTO:
        return Choice(adapter, reason), []
    if scaled:
        return Choice(FLOAT32, "loss scaling: the scaler unscales float32 gradients"), []
    if model.quantization in KBIT and compute == {BFLOAT16} and not device.emulates_bf16:
        return Choice(BFLOAT16, "a quantised base that computes in bfloat16, without loss scaling"), []
    return Choice(None, "the values that PEFT or the user created", AS_CREATED), []


def _device_problems(
    dtype: Choice[str], compute: frozenset[str], device: Device, model: ModelFacts, requested: Requested
) -> Iterator[Problem]:
    """Yields refusals of dtypes that the device or the attention implementation does not support."""
    if dtype.value == BFLOAT16 and device.emulates_bf16:
        config = f'{requested.config}(precision="fp16"), or ' if requested.config else ""
        yield refuse("bf16-is-emulated", f"{dtype.reason} on {device}", device=device, config=config)
    attention = model.attn_implementation or ""
    if _FLASH_ATTENTION.search(attention) and compute == {FLOAT32}:
        yield refuse("flash-attention-needs-half", f"attn_implementation={attention!r} with float32 compute")


def _half_weights(
    dtype: Choice[str], autocast: str | None, model: ModelFacts, requested: Requested
) -> tuple[list[Problem], list[Problem]]:
    """Makes refusals and warnings for half weights in another dtype; a refusal if `precision` names the dtype."""
    precision = parse_dtype(requested.precision, field="precision") if requested.precision is not None else AUTO
    half = model.weights & HALVES
    if dtype.value != FLOAT32 and (autocast is None or model.quantization is not None):
        # Without autocast, operations use the dtype of their weights. The weights of a quantised model that are not
        # packed are few, and are cast to the compute dtype.
        half = frozenset()
    elif dtype.value == FLOAT32 and precision == AUTO:
        half = frozenset()
    problems, warnings = [], []
    for weights in sorted(half - {autocast}):
        what = f"{weights} weights with {dtype.reason}"
        load, switch = _load(model, dtype.value), _switch(requested, weights)
        details = {"weights": weights, "compute": dtype.value, "load": load, "switch": switch}
        if precision == AUTO:
            warnings.append(warn("half-weights-under-other-autocast", what, **details))
        else:
            problems.append(refuse("half-weights-under-other-precision", what, **details))
    return problems, warnings


def _load(model: ModelFacts, dtype: str) -> str:
    """Returns the code that loads a model's weights in a dtype."""
    if not model.live:
        return f"`model_init_kwargs={{'dtype': '{dtype}'}}`"
    # `model.to` would also cast rotary frequencies to half precision, and packed weights cannot be cast.
    to_float32 = dtype == FLOAT32 and model.quantization is None
    return "`model.to(torch.float32)`" if to_float32 else f"`from_pretrained(..., dtype='{dtype}')`"


def autocast_switches(requested: Requested, device: Device) -> dict[str, str]:
    """Returns the settings that select autocast, in the field that the user has set.

    Args:
        requested: The user's settings, which do not select autocast yet.
        device: The device of the run.

    Returns:
        The setting by half dtype, for those that the device computes in under autocast.
    """
    supported = {BFLOAT16: not device.emulates_bf16, FLOAT16: device.scales_loss}
    instead = " instead of `fp16=True`" if requested.fp16 and requested.precision is None else ""
    return {dtype: _switch(requested, dtype) + instead for dtype in supported if supported[dtype]}


def _switch(requested: Requested, dtype: str) -> str:
    """Returns the setting that selects a compute dtype, in the field that the user has set."""
    return f"`{FLAG_OF[dtype]}=True`" if requested.precision is None else f"`precision={SHORT[dtype]!r}`"

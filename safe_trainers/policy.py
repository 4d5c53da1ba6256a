"""What a run computes in, decided from plain values alone, each decision with its reason.

Nothing here touches a tensor or a model: `resolve` is a pure function, so that the whole of it can be read, and
tested, as a table. What depends on the live model is counted by `census` and decided in `settlement`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from .device import Device
from .dtypes import AUTO, BFLOAT16, FLOAT16, FLOAT32, HALVES, SHORT, parse_dtype
from .errors import PrecisionError, Problem, nearest, refuse, warn


OFF = "off"
_FLASH_ATTENTION = re.compile(r"flash[-_]?att")
"""How the names of flash attention implementations are spelt, those of kernel repositories included."""
ROLLOUT_COMPUTE = ("training", "stock")
ADAPTER_DTYPES = (AUTO, FLOAT32, BFLOAT16)
AS_MADE = "as made"
FLAG_OF = {BFLOAT16: "bf16", FLOAT16: "fp16"}


@dataclass(frozen=True)
class Choice:
    """One decision.

    Attributes:
        value: What was decided.
        reason: Why, in words that name what it was decided from.
    """

    value: str
    reason: str


@dataclass(frozen=True)
class Flags:
    """What the user asked for, as plain values.

    Attributes:
        bf16: `TrainingArguments.bf16`; `None` where it was left unset.
        fp16: `TrainingArguments.fp16`.
        precision: The `precision` field of a Safe config, in any spelling of `parse_dtype`; `None` where unset.
        rollout_compute: `"training"` or `"stock"`.
        adapter_dtype: `"auto"`, `"float32"` or `"bfloat16"`, in any spelling of `parse_dtype`.
        config: Name of the Safe config class to recommend in messages, `None` where there is none for the trainer.
    """

    bf16: bool | None = None
    fp16: bool = False
    precision: str | None = None
    rollout_compute: str = "training"
    adapter_dtype: str = AUTO
    config: str | None = None


@dataclass(frozen=True)
class Model:
    """What is known of the model, declared before it is loaded or counted after.

    Attributes:
        weights: Dtypes of the weights that are neither adapters nor quantised; empty where unknown.
        trainable: Dtypes of what is trained; empty where unknown.
        live: Whether the user passed the model itself, so that `model_init_kwargs` says nothing about it.
        attn_implementation: `config._attn_implementation`, or what was asked for; `None` where unknown.
        quantization: `"4bit"`, `"8bit"`, another method's name, or `None`.
    """

    weights: frozenset[str] = frozenset()
    trainable: frozenset[str] = frozenset()
    live: bool = False
    attn_implementation: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision of one run.

    Attributes:
        compute: Dtype of matrix products in training, scoring and rollout.
        autocast: Autocast dtype, or `"off"`.
        master: Dtype of trainable weights and of the optimizer's state.
        frozen_base: Dtype of weights that are not trained.
        adapter: Dtype of adapter weights: `"float32"`, `"bfloat16"`, or `"as made"` by PEFT or the user. Single
            tensors may keep more, as the preparation says.
        media: Dtype of media tensors: what the tower that consumes them holds.
        rollout: The context that generation runs in: `"training"` (the same as training's) or `"stock"`.
        reference: Dtype that the reference model computes in.
        loss_scale: `"dynamic"` under fp16 where there is a scaler, else `"off"`.
        problems: What makes the run wrong; `check` raises them.
        warnings: What is supported but loses precision.
    """

    compute: Choice
    autocast: Choice
    master: Choice
    frozen_base: Choice
    adapter: Choice
    media: Choice
    rollout: Choice
    reference: Choice
    loss_scale: Choice
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """Every decision with its name, in the order of the class."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Choice):
                yield field.name, value

    def check(self) -> None:
        """Raises all problems at once.

        Raises:
            PrecisionError: If there are any.
        """
        if self.problems:
            raise PrecisionError(self.problems)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain values, ready for JSON."""
        return {
            **{name: {"value": choice.value, "reason": choice.reason} for name, choice in self.choices()},
            "problems": [vars(problem) for problem in self.problems],
            "warnings": [vars(warning) for warning in self.warnings],
        }

    def __str__(self) -> str:
        rows = list(self.choices())
        name_width = max(len(name) for name, _ in rows)
        value_width = max(len(choice.value) for _, choice in rows)
        lines = [f"{name:<{name_width}}  {choice.value:<{value_width}}  {choice.reason}" for name, choice in rows]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def resolve_compute(flags: Flags, device: Device) -> tuple[Choice, tuple[Problem, ...]]:
    """Decides the requested compute dtype from the flags alone.

    Args:
        flags: What the user asked for.
        device: Where the run computes.

    Returns:
        `"float32"`, `"bfloat16"` or `"float16"` with the reason, and the contradictions between flags.

    Raises:
        PrecisionError: If `flags.precision` names no dtype.
    """
    if flags.precision is None:
        if flags.fp16:
            both = (refuse("two-half-formats", "bf16=True with fp16=True"),) if flags.bf16 else ()
            return Choice(FLOAT16, "fp16=True"), both
        if flags.bf16:
            return Choice(BFLOAT16, "bf16=True"), ()
        if flags.bf16 is False:
            return Choice(FLOAT32, "neither bf16 nor fp16 is set"), ()
    wanted = AUTO if flags.precision is None else parse_dtype(flags.precision, field="precision")
    if wanted == AUTO:
        wanted, reason = device.preferred
        reason = f"precision='auto': {reason}"
    else:
        reason = f"precision={flags.precision!r}"
    flag = FLAG_OF.get(wanted)
    contradicting = [f"{other}=True" for other in ("bf16", "fp16") if getattr(flags, other) and other != flag]
    if flag == "bf16" and flags.bf16 is False:
        contradicting.append("bf16=False")
    problems = tuple(
        refuse(
            "precision-contradicts-flag",
            f"precision={flags.precision!r} ({SHORT[wanted]}) with {flag_text}",
            flag=flag_text,
            precision=flags.precision,
        )
        for flag_text in contradicting
    )
    return Choice(wanted, reason), problems


def resolve(flags: Flags, device: Device, model: Model) -> PrecisionPolicy:
    """Decides the precision of a run; a pure function of plain values.

    Args:
        flags: What the user asked for.
        device: Where the run computes.
        model: What is known of the model: declared, before it is loaded; counted, after.

    Returns:
        The policy, with the problems and warnings that follow from these values. Nothing is raised for them here:
        call `check` once everything is known, so that all are reported together.

    Raises:
        PrecisionError: If a flag has no such value (`precision="fp12"`).
    """
    requested, problems = resolve_compute(flags, device)
    found, warnings = list(problems), []
    weights = " and ".join(sorted(model.weights)) or "as loaded"

    scaled = requested.value == FLOAT16 and device.scales_loss
    if requested.value == FLOAT32:
        autocast = Choice(OFF, requested.reason)
    elif requested.value == FLOAT16 and not scaled:
        autocast = Choice(OFF, f"accelerate has no fp16 autocast on {device}")
        fix = f"drop `fp16=True`, or use {_switch(flags, BFLOAT16)}"
        if flags.precision is not None:
            fix = f"{_switch(flags, FLOAT32)}, or {_switch(flags, BFLOAT16)}"
        warnings.append(warn("fp16-on-cpu", f"{requested.reason} on {device}", weights=weights, fix=fix))
    else:
        autocast = Choice(requested.value, requested.reason)

    if autocast.value != OFF:
        compute = Choice(autocast.value, f"autocast, from {requested.reason}")
    else:
        several = len(model.weights) > 1
        follow = "each operation follows its own weights" if several else "operations follow the weights"
        compute = Choice(weights, f"no autocast ({autocast.reason}): {follow}")

    if flags.rollout_compute not in ROLLOUT_COMPUTE:
        found.append(_unknown_choice("rollout_compute", flags.rollout_compute, ROLLOUT_COMPUTE))
    found += _contradictions(requested, autocast, compute, device, model, flags)
    adapter, contradiction = _adapter(flags, device, model, requested, compute, scaled)
    found += contradiction
    contradicting, rounded = _half_weights(requested, autocast, model, flags)
    found, warnings = found + contradicting, warnings + rounded
    aligned = flags.rollout_compute != "stock"
    if not aligned and autocast.value != OFF:
        warnings.append(warn("rollout-not-aligned", "rollout_compute='stock' under autocast"))

    loaded = Choice(weights, "as loaded: `model_init_kwargs['dtype']`, float32 by default in TRL")
    trained = " and ".join(sorted(model.trainable))
    upcast = scaled and bool(model.trainable & (device.unscalable or frozenset()))
    return PrecisionPolicy(
        compute=compute,
        autocast=autocast,
        master=(
            Choice(FLOAT32, f"loss scaling needs it: {trained} is upcast before the optimizer exists")
            if upcast
            else Choice(trained, "what is trained, as PEFT or the user made it")
            if trained
            else loaded
        ),
        frozen_base=loaded if model.quantization is None else Choice(model.quantization, "quantised, as loaded"),
        adapter=adapter,
        media=Choice("tower", "each media tensor has the dtype of the tower that consumes it, where that is harmless"),
        rollout=Choice(
            "training" if aligned else "stock",
            "generation runs in the compute context of training" if aligned else "as asked: upstream's own contexts",
        ),
        reference=Choice(compute.value, "the reference is scored in the same context as the policy"),
        loss_scale=Choice("dynamic", "float16 gradients underflow without it") if scaled else Choice(OFF, "not fp16"),
        problems=tuple(found),
        warnings=tuple(warnings),
    )


def _adapter(
    flags: Flags, device: Device, model: Model, requested: Choice, compute: Choice, scaled: bool
) -> tuple[Choice, list[Problem]]:
    """What adapters are held in, as far as it follows from plain values."""
    asked = parse_dtype(flags.adapter_dtype, field="adapter_dtype")
    reason = f"adapter_dtype={flags.adapter_dtype!r}"
    if asked not in ADAPTER_DTYPES:
        return Choice(asked, reason), [_unknown_choice("adapter_dtype", flags.adapter_dtype, ADAPTER_DTYPES)]
    if asked == BFLOAT16 and scaled and BFLOAT16 in (device.unscalable or ()):
        given, switch = f"{reason} with {requested.reason}", _switch(flags, BFLOAT16)
        return Choice(asked, reason), [refuse("adapter-dtype-cannot-be-scaled", given, device=device, switch=switch)]
    if asked != AUTO:
        return Choice(asked, reason), []
    if scaled:
        return Choice(FLOAT32, "the loss is scaled, and its scaler unscales float32 gradients"), []
    if model.quantization is not None and compute.value == BFLOAT16 and not device.emulates_bf16:
        return Choice(BFLOAT16, "a quantised base under bfloat16 compute, without loss scaling"), []
    return Choice(AS_MADE, "the bits that PEFT or the user made"), []


def _contradictions(
    requested: Choice, autocast: Choice, compute: Choice, device: Device, model: Model, flags: Flags
) -> Iterator[Problem]:
    """What cannot be computed as asked, on this device with these weights."""
    if requested.value == BFLOAT16 and device.emulates_bf16:
        config = f'{flags.config}(precision="fp16"), or ' if flags.config else ""
        yield refuse("bf16-is-emulated", f"{requested.reason} on {device}", device=device, config=config)
    attention = model.attn_implementation or ""
    if _FLASH_ATTENTION.search(attention) and compute.value == FLOAT32:
        yield refuse("flash-attention-needs-half", f"attn_implementation={attention!r} with float32 compute")


def _half_weights(
    requested: Choice, autocast: Choice, model: Model, flags: Flags
) -> tuple[list[Problem], list[Problem]]:
    """Weights in a half format that the run does not compute in: refused where `precision` names another dtype."""
    named = parse_dtype(flags.precision, field="precision") if flags.precision is not None else AUTO
    half = model.weights & HALVES
    if requested.value != FLOAT32 and (autocast.value == OFF or model.quantization is not None):
        # Operations follow their weights; and what a quantised model has besides its packed weights is small, and is
        # brought to the compute dtype.
        half = frozenset()
    elif requested.value == FLOAT32 and named == AUTO:
        half = frozenset()
    problems, warnings = [], []
    for weights in sorted(half - {autocast.value}):
        given = f"{weights} weights with {requested.reason}"
        load, switch = _load(model, requested.value), _switch(flags, weights)
        details = {"weights": weights, "compute": requested.value, "load": load, "switch": switch}
        if named == AUTO:
            warnings.append(warn("half-weights-under-other-autocast", given, **details))
        else:
            problems.append(refuse("half-weights-under-other-precision", given, **details))
    return problems, warnings


def _load(model: Model, dtype: str) -> str:
    """How to load the weights of a model in a dtype."""
    if not model.live:
        return f"`model_init_kwargs={{'dtype': '{dtype}'}}`"
    # A cast to half precision would take rotary frequencies along, and packed weights cannot be cast.
    widened = dtype == FLOAT32 and model.quantization is None
    return "`model.to(torch.float32)`" if widened else f"`from_pretrained(..., dtype='{dtype}')`"


def _switch(flags: Flags, dtype: str) -> str:
    """What to write instead to compute in a dtype: in the field that decided."""
    return f"`{FLAG_OF[dtype]}=True`" if flags.precision is None else f"`precision={SHORT[dtype]!r}`"


def _unknown_choice(field: str, value: str, accepted: tuple[str, ...]) -> Problem:
    return refuse(
        "unknown-choice",
        f"{field}={value!r}",
        value=value,
        accepted=", ".join(map(repr, accepted)),
        field=field,
        suggestion=nearest(str(value), accepted) or accepted[0],
    )

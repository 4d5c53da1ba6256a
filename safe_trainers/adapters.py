"""What trainables are held in: adapters keep their bits, and nothing half-precision meets the loss scaler.

TRL casts every trainable of a 4-bit or 8-bit model to bfloat16, right after it made the adapters. `captures` keeps
their bits; here it is decided, tensor by tensor, where the cast is taken over because nothing that matters is lost.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .decisions import Decision, extra_bytes, mebibytes
from .dtypes import AUTO, BFLOAT16, FLOAT32, HALVES, from_torch
from .errors import Problem, refuse
from .policy import AS_MADE, PrecisionPolicy
from .rounding import lost_share
from .towers import adapter_parameters, elements_of


LOST_LIMIT = 0.01
"""Adapters stay as they were made where a larger share of their updates would round to nothing in bfloat16."""
RANDOM_INITS = (True, False, "gaussian", "orthogonal")
"""Values of `LoraConfig.init_lora_weights` that draw numbers, of which none stands for a number of the base."""
_MATRIX = re.compile(r"\.lora_(embedding_)?[AB]\.")
_MAGNITUDE, _COPY = ".lora_magnitude_vector.", ".modules_to_save."


@dataclass(frozen=True)
class Circumstances:
    """What the decisions on trainables depend on, besides the policy and the tensors.

    Attributes:
        learning_rate: The peak learning rate.
        asked: The `adapter_dtype` that was asked for.
        fresh: Whether the adapters were made in this construction, from a `peft_config`.
        one_dtype: Whether an engine flattens several trainables into one tensor (FSDP).
        widened: Whether accelerate makes trainables float32 when it shards them (FSDP2 under autocast); it leaves
            those beside 4-bit weights alone.
        copied: The half dtype that an engine casts every weight to, while it trains float32 copies (DeepSpeed).
        unscalable: The half dtypes whose gradients the loss scaler refuses; empty where the loss is not scaled.
    """

    learning_rate: float
    asked: str = AUTO
    fresh: bool = True
    one_dtype: bool = False
    widened: bool = False
    copied: str | None = None
    unscalable: frozenset[str] = frozenset()


def decide(model: nn.Module, policy: PrecisionPolicy, circumstances: Circumstances) -> tuple[Decision, ...]:
    """Decides what each trainable is held in; reads only.

    Args:
        model: The model as PEFT or the user made it.
        policy: The policy of the run.
        circumstances: What else it depends on.

    Returns:
        One decision for each trainable, and for each frozen twin of one in an adapter named `"ref"`, which has to
        start as the policy does, bit by bit.
    """
    named = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    obstacle = _obstacle(model, trainable, circumstances) if policy.adapter.value == BFLOAT16 else None
    decisions = []
    for name, parameter in trainable.items():
        source = from_torch(parameter.dtype)
        if circumstances.copied is not None:
            target, reason = source, f"DeepSpeed trains a float32 copy of it, and computes in {circumstances.copied}"
        elif source in circumstances.unscalable:
            target, reason = FLOAT32, f"the loss scaler cannot unscale {source} gradients"
        elif circumstances.widened and source in HALVES and policy.frozen_base.value != "4bit":
            target, reason = FLOAT32, "accelerate makes float32 of what FSDP2 trains under autocast"
        elif id(parameter) in adapters:
            target, reason = _adapter(name, source, policy, obstacle, circumstances.asked == BFLOAT16)
        else:
            target, reason = source, "a weight of the model, as it was loaded"
        for twin in (name, name.replace(".default.", ".ref.")) if ".default." in name else (name,):
            held = named.get(twin)
            if held is not None and (twin == name or not held.requires_grad):
                decisions.append(Decision(twin, from_torch(held.dtype), target, reason, elements_of(held)))
    trained = {decision.target for decision in decisions if named[decision.name].requires_grad}
    if circumstances.one_dtype and len(trained) > 1:
        why = "FSDP flattens trainables into one dtype, and some of them need float32"
        decisions = [replace(decision, target=FLOAT32, reason=why) for decision in decisions]
    return tuple(decisions)


def refuse_upcast(decisions: Iterable[Decision]) -> Problem | None:
    """The refusal of `upcast_trainables=False`, where something would have to be upcast.

    Args:
        decisions: What was decided.

    Returns:
        The problem, which names the parameters; `None` where there is none.
    """
    upcast = [d for d in decisions if d.source != d.target == FLOAT32 and "unscale" in d.reason]
    if not upcast:
        return None
    shown = ", ".join(decision.name for decision in upcast[:3]) + (", ..." if len(upcast) > 3 else "")
    dtypes = " and ".join(sorted({decision.source for decision in upcast}))
    given = f"upcast_trainables=False with fp16=True and {len(upcast)} trainable parameters in {dtypes}: {shown}"
    return refuse("half-trainables-under-loss-scaling", given, memory=mebibytes(extra_bytes(upcast)))


def _adapter(name: str, source: str, policy: PrecisionPolicy, obstacle: str | None, asked: bool) -> tuple[str, str]:
    """What an adapter's tensor is held in."""
    choice = policy.adapter
    if choice.value == AS_MADE:
        return source, choice.reason
    if choice.value == FLOAT32:
        return FLOAT32, choice.reason
    if _MAGNITUDE in name:
        return source, "a DoRA magnitude: its updates are smaller than bfloat16's steps"
    if _COPY in name:
        return source, "a module that is trained as a whole, and not beside a base"
    if not _MATRIX.search(name) and not asked:
        return source, "not a LoRA matrix"
    return (BFLOAT16, choice.reason) if obstacle is None else (source, obstacle)


def _obstacle(model: nn.Module, trainable: dict[str, nn.Parameter], circumstances: Circumstances) -> str | None:
    """Why the LoRA matrices of a model must not be rounded to bfloat16, `None` where they may be, or were asked to."""
    if circumstances.asked != AUTO:
        return None
    if not circumstances.fresh:
        return "the adapter was given, with bits of its own"
    special = next((init for init in _inits(model) if init not in RANDOM_INITS), None)
    if special is not None:
        return f"init_lora_weights={special!r}: adapter and base add up to the model only with these bits"
    matrices = [parameter for name, parameter in trainable.items() if _MATRIX.search(name)]
    rate = circumstances.learning_rate
    share = lost_share(matrices, rate, torch.bfloat16)
    if share > LOST_LIMIT:
        return f"{share:.0%} of the updates would round to nothing in bfloat16 at learning_rate={rate:g}"
    return None


def _inits(model: nn.Module) -> Iterator[Any]:
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    yield from (getattr(config, "init_lora_weights", True) for config in configs.values())

"""Decides the dtypes of trainable parameters, such as adapters.

TRL casts every trainable parameter of a 4-bit or 8-bit model to bfloat16, right after it creates the adapters.
`trainer.trl_patches` keeps the original values; this module decides for which tensors that cast is safe.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..core.dtypes import AUTO, BFLOAT16, FLOAT32, HALVES, from_torch, join_dtypes
from ..core.errors import Problem, refuse, warn
from ..model.parts import adapter_parameters, elements_of, unwrap
from ..policy.resolve import PrecisionPolicy
from .cast import ParameterCast, extra_bytes, mebibytes
from .lost_updates import lost_share


LOST_LIMIT = 0.01
"""Adapters are not cast to bfloat16 if a larger share of their updates would round to zero."""
RANDOM_INITS = (True, False, "gaussian", "orthogonal")
"""Values of `LoraConfig.init_lora_weights` that draw random numbers, independent of the base weights."""
_MATRIX = re.compile(r"\.lora_(embedding_)?[AB]\.")
_MAGNITUDE, _COPY = ".lora_magnitude_vector.", ".modules_to_save."


@dataclass(frozen=True)
class TrainableContext:
    """What the dtypes of trainable parameters depend on, besides the policy and the tensors.

    Attributes:
        learning_rate: The peak learning rate.
        adapter_dtype: The requested `adapter_dtype`.
        fresh: Whether the trainer created the adapters, from a `peft_config`.
        one_dtype: Whether an engine flattens several trainable parameters into one tensor (FSDP).
        upcast_by_fsdp: Whether accelerate casts trainable parameters to float32 when it shards them (FSDP2 under
            autocast), except those of models with 4-bit weights.
        engine_copies: The half dtype to which an engine casts every weight while it trains float32 copies (DeepSpeed).
        unscalable_dtypes: The half dtypes whose gradients cannot be unscaled; empty if the loss is not scaled.
    """

    learning_rate: float
    adapter_dtype: str = AUTO
    fresh: bool = True
    one_dtype: bool = False
    upcast_by_fsdp: bool = False
    engine_copies: str | None = None
    unscalable_dtypes: frozenset[str] = frozenset()


def decide(model: nn.Module, policy: PrecisionPolicy, context: TrainableContext) -> tuple[ParameterCast, ...]:
    """Decides the dtype of each trainable parameter, without changing it.

    Args:
        model: The model as PEFT or the user created it.
        policy: The policy of the run.
        context: What else the dtypes depend on.

    Returns:
        One cast for each trainable parameter, and for its frozen counterpart in an adapter named `"ref"`, which must
        start with the same values as the policy.
    """
    named = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    obstacle = _obstacle(model, trainable, context) if policy.adapter.value == BFLOAT16 else None
    casts = []
    for name, parameter in trainable.items():
        source = from_torch(parameter.dtype)
        if context.engine_copies is not None:
            target, reason = source, f"DeepSpeed trains a float32 copy, and computes in {context.engine_copies}"
        elif source in context.unscalable_dtypes:
            target, reason = FLOAT32, f"the loss scaler cannot unscale {source} gradients"
        elif context.upcast_by_fsdp and source in HALVES and "4bit" not in policy.frozen_base.value:
            target, reason = FLOAT32, "accelerate casts trainable parameters to float32 with FSDP2 under autocast"
        elif id(parameter) in adapters:
            target, reason = _adapter(name, source, policy, obstacle, context.adapter_dtype == BFLOAT16)
        else:
            target, reason = source, "a weight of the model, as it was loaded"
        for twin in (name, name.replace(".default.", ".ref.")) if ".default." in name else (name,):
            found = named.get(twin)
            if found is not None and (twin == name or not found.requires_grad):
                casts.append(ParameterCast(twin, from_torch(found.dtype), target, reason, elements_of(found)))
    trained = {cast.target for cast in casts if named[cast.name].requires_grad}
    if context.one_dtype and len(trained) > 1:
        why = "FSDP flattens trainable parameters into one tensor, and some of them need float32"
        casts = [replace(cast, target=FLOAT32, reason=why) for cast in casts]
    return tuple(casts)


def refuse_upcast(casts: Iterable[ParameterCast], unscalable_dtypes: frozenset[str]) -> Problem | None:
    """Makes the refusal of `upcast_trainables=False` if parameters would have to be upcast.

    Args:
        casts: The casts.
        unscalable_dtypes: The half dtypes whose gradients cannot be unscaled.

    Returns:
        The refusal, which names the parameters; `None` if there are none.
    """
    upcast = [cast for cast in casts if cast.source in unscalable_dtypes and cast.target == FLOAT32]
    if not upcast:
        return None
    shown = ", ".join(cast.name for cast in upcast[:3]) + (", ..." if len(upcast) > 3 else "")
    dtypes = join_dtypes({cast.source for cast in upcast})
    what = f"upcast_trainables=False with fp16=True and {len(upcast)} trainable parameters in {dtypes}: {shown}"
    return refuse("half-trainables-under-loss-scaling", what, memory=mebibytes(extra_bytes(upcast)))


def _adapter(
    name: str, source: str, policy: PrecisionPolicy, obstacle: str | None, requested: bool
) -> tuple[str, str]:
    """Returns the dtype of an adapter's tensor and the reason; `requested` if the user chose bfloat16."""
    choice = policy.adapter
    if choice.value is None:
        return source, choice.reason
    if choice.value == FLOAT32:
        return FLOAT32, choice.reason
    if _MAGNITUDE in name:
        return source, "a DoRA magnitude, whose updates are smaller than the spacing of bfloat16"
    if _COPY in name:
        return source, "a copy of a whole module (`modules_to_save`)"
    if not _MATRIX.search(name) and not requested:
        return source, "not a LoRA matrix"
    return (BFLOAT16, choice.reason) if obstacle is None else (source, obstacle)


def _obstacle(model: nn.Module, trainable: dict[str, nn.Parameter], context: TrainableContext) -> str | None:
    """Returns why LoRA matrices must not be rounded to bfloat16; `None` if they may, or if the user requested it."""
    if context.adapter_dtype != AUTO:
        return None
    if not context.fresh:
        return "the adapter was not created by the trainer, so its exact values are kept"
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    inits = (getattr(config, "init_lora_weights", True) for config in configs.values())
    special = next((init for init in inits if init not in RANDOM_INITS), None)
    if special is not None:
        return f"init_lora_weights={special!r}: base and adapter equal the original model only with these values"
    matrices = [parameter for name, parameter in trainable.items() if _MATRIX.search(name)]
    rate = context.learning_rate
    share = lost_share(matrices, rate, torch.bfloat16)
    if share > LOST_LIMIT:
        return f"{share:.0%} of the updates would round to zero in bfloat16 at learning_rate={rate:g}"
    return None


def base_of(model: Any) -> str | None:
    """Returns the name by which the base model was loaded; `None` if unknown."""
    return getattr(getattr(unwrap(model), "config", None), "_name_or_path", None) or None


def another_base(name: str, trained: str | None, model: Any) -> Problem | None:
    """Warns about an adapter that was trained on a base with another name.

    Args:
        name: Name of the adapter.
        trained: Name of the base in the adapter's config.
        model: The model with the adapter, or into which it will be loaded.

    Returns:
        The warning; `None` if the last parts of the two names are equal, or one is unknown.
    """
    base = base_of(model)
    if not trained or not base or _folder(trained) == _folder(base):
        return None
    return warn("adapter-of-another-base", f"the adapter {name!r}", trained=trained, base=base)


def _folder(name: str) -> str:
    """Returns the last part of a model's name, which is the same on the Hub and in a local copy."""
    return name.rstrip("/").split("/")[-1]

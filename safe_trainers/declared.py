"""What the user declared, read off configs and models as the plain values that a policy is resolved from."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .census import Census, take_census
from .device import detect_device
from .dtypes import AUTO, FLOAT32, SHORT, from_torch, parse_dtype
from .policy import Flags, Model, PrecisionPolicy, resolve


def flags_of(args: Any, trainer_class: type) -> Flags:
    """The user's flags as plain values.

    Args:
        args: A TRL config, plain or Safe.
        trainer_class: The trainer, for the config that messages recommend.

    Returns:
        The flags. `bf16` is never unset after a config's own `__post_init__`.
    """
    config = getattr(trainer_class, "config_class", None)
    return Flags(
        bf16=bool(args.bf16),
        fp16=bool(args.fp16),
        precision=getattr(args, "precision", None),
        rollout_compute=getattr(args, "rollout_compute", "training"),
        continuous_batching=getattr(args, "use_transformers_continuous_batching", False),
        config=config.__name__ if config is not None else None,
    )


def model_of(census: Census, live: bool = False) -> Model:
    """What a policy needs to know of a counted model.

    Args:
        census: The count.
        live: Whether the user passed the model itself.
    """
    return Model(census.weights, frozenset(census.trainable), live, census.attn_implementation, census.quantization)


def declared_policy(args: Any, model: Any, trainer_class: type) -> PrecisionPolicy:
    """The policy as far as it can be known before a model is loaded.

    Args:
        args: A TRL config, plain or Safe.
        model: What was passed as the model: a live one is counted, of a name only what `model_init_kwargs` declare
            is known.
        trainer_class: The trainer.

    Returns:
        The policy, whose problems are worth raising before gigabytes are read.

    Raises:
        PrecisionError: If a dtype is misspelt.
    """
    if isinstance(model, nn.Module):
        # What is trained is not known yet: TRL may still put adapters on the model.
        known = replace(model_of(take_census(model), live=True), trainable=frozenset())
    else:
        declared = dict(getattr(args, "model_init_kwargs", None) or {})
        dtype = declared.get("dtype", FLOAT32)  # TRL's default; transformers' older `torch_dtype` has no effect there
        known = Model(_declared_weights(dtype), attn_implementation=declared.get("attn_implementation"))
    return resolve(flags_of(args, trainer_class), detect_device(args.device), known)


def _declared_weights(dtype: Any) -> frozenset[str]:
    """The weights that a declared dtype means; none where only the checkpoint knows, or it is none of the three."""
    if dtype is None or (isinstance(dtype, torch.dtype) and from_torch(dtype) not in SHORT):
        return frozenset()
    name = parse_dtype(dtype, field="model_init_kwargs['dtype']")
    return frozenset() if name == AUTO else frozenset({name})


def spell_dtype_as_trl_does(args: Any) -> None:
    """Writes a dtype of `model_init_kwargs` in the one spelling that TRL reads.

    Args:
        args: A TRL config, whose `model_init_kwargs` are replaced where they spell a dtype otherwise.
    """
    declared = getattr(args, "model_init_kwargs", None)
    if isinstance(declared, dict) and isinstance(declared.get("dtype"), str):
        args.model_init_kwargs = {**declared, "dtype": parse_dtype(declared["dtype"])}

"""Reads configs and models into the plain values that a policy is resolved from."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..core.device import Device, detect_device
from ..core.dtypes import AUTO, FLOAT32, HALVES, SHORT, from_torch, parse_dtype, rename_torch_dtype
from ..core.errors import PrecisionError, PrecisionWarning, refuse
from ..model.inventory import ModelInventory, take_inventory
from ..policy.distributed import engine_copies, fsdp_version
from ..policy.resolve import ModelFacts, PrecisionPolicy, Requested, resolve
from ..weights.bitsandbytes_loading import asked_quantization, missing_backend, skip_heads, unloadable_head
from ..weights.trainables import TrainableContext, another_base


def requested_by(args: Any, trainer_class: type) -> Requested:
    """Returns the precision settings that the user requested.

    Args:
        args: A TRL config, stock or Safe. Its `__post_init__` has already set `bf16` to a boolean.
        trainer_class: The trainer class, whose config messages recommend.
    """
    config = getattr(trainer_class, "config_class", None)
    return Requested(
        bf16=bool(args.bf16),
        fp16=bool(args.fp16),
        precision=getattr(args, "precision", None),
        rollout_compute=getattr(args, "rollout_compute", "training"),
        adapter_dtype=getattr(args, "adapter_dtype", AUTO),
        config=config.__name__ if config is not None else None,
    )


def facts_of(inventory: ModelInventory, live: bool = False) -> ModelFacts:
    """Returns the facts of an inventoried model that a policy is resolved from.

    Args:
        inventory: The inventory.
        live: Whether the user passed a model object instead of a name.
    """
    return ModelFacts(
        inventory.weights, frozenset(inventory.trainable), live, inventory.attn_implementation, inventory.quantization
    )


@contextlib.contextmanager
def own_model_init_kwargs(args: Any) -> Iterator[None]:
    """Gives a config a copy of its `model_init_kwargs`, which may be changed in the block, and then the user's again.

    Args:
        args: A TRL config, or `None`.
    """
    declared = getattr(args, "model_init_kwargs", None)
    if not hasattr(args, "model_init_kwargs"):
        yield
        return
    args.model_init_kwargs = dict(declared) if isinstance(declared, dict) else declared
    try:
        yield
    finally:
        args.model_init_kwargs = declared


def check_loading(arguments: dict[str, Any], trainer_class: type) -> None:
    """Checks that a model can be loaded, and excludes a newly initialised head from quantisation.

    Args:
        arguments: The trainer's arguments by name; their quantization configs are completed in place.
        trainer_class: The trainer class.

    Raises:
        PrecisionError: If loading is known to fail.
    """
    model, args, given = (arguments.get(name) for name in ("model", "args", "quantization_config"))
    fresh_head = any(base.__name__ == "RewardTrainer" for base in trainer_class.__mro__)
    problems = [missing_backend(model, args, given), unloadable_head(model, args) if fresh_head else None]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise PrecisionError(found)
    if fresh_head and given is not None:
        arguments["quantization_config"] = skip_heads(given)
    declared = getattr(args, "model_init_kwargs", None) or {}
    if args is not None and fresh_head and declared.get("quantization_config") is not None:
        args.model_init_kwargs = {**declared, "quantization_config": skip_heads(declared["quantization_config"])}


def declared_policy(args: Any, model: Any, trainer_class: type, quantization_config: Any = None) -> PrecisionPolicy:
    """Resolves the policy as far as possible before a model is loaded.

    Args:
        args: A TRL config, stock or Safe.
        model: The trainer's `model` argument. For a name, only `model_init_kwargs` describe its weights.
        trainer_class: The trainer class.
        quantization_config: The trainer's argument of that name.

    Returns:
        The policy. Its problems can be raised before gigabytes of weights are read.

    Raises:
        PrecisionError: If a dtype is misspelt.
    """
    if isinstance(model, nn.Module):
        # The trainable weights are not known yet, because TRL may add adapters.
        known = replace(facts_of(take_inventory(model), live=True), trainable=frozenset())
    else:
        declared = dict(getattr(args, "model_init_kwargs", None) or {})
        dtype = declared.get("dtype", FLOAT32)  # TRL's default
        known = ModelFacts(
            _declared_weights(dtype),
            attn_implementation=declared.get("attn_implementation"),
            quantization=asked_quantization(model, args, quantization_config),
        )
    detect = getattr(trainer_class, "precision_device", None)  # a stock class has none
    device = detect_device(args.device) if detect is None else detect(args)
    return resolve(requested_by(args, trainer_class), device, known)


def _declared_weights(dtype: Any) -> frozenset[str]:
    """The dtypes of weights loaded with a declared dtype; empty if only the checkpoint determines them."""
    if dtype is None or (isinstance(dtype, torch.dtype) and from_torch(dtype) not in SHORT):
        return frozenset()
    name = parse_dtype(dtype, field="model_init_kwargs['dtype']")
    return frozenset() if name == AUTO else frozenset({name})


def choose_load_dtype(arguments: dict[str, Any], policy: PrecisionPolicy) -> None:
    """Loads a frozen base model in the compute dtype if `precision` is set and no load dtype is.

    Full fine-tuning keeps TRL's default, float32, for the master weights.

    Args:
        arguments: The trainer's arguments by name; `model_init_kwargs` of their config are completed in place.
        policy: The declared policy of the run.
    """
    args, model = arguments["args"], arguments.get("model")
    declared = getattr(args, "model_init_kwargs", None) or {}
    frozen = arguments.get("peft_config") is not None
    if getattr(args, "precision", None) is None or not isinstance(model, str) or "dtype" in declared or not frozen:
        return
    if policy.autocast.value in HALVES:
        args.model_init_kwargs = {**declared, "dtype": policy.autocast.value}


def read_torch_dtype(args: Any) -> None:
    """Replaces `torch_dtype` in the `model_init_kwargs` of a config by `dtype`, with a warning.

    Args:
        args: A TRL config.

    Raises:
        PrecisionError: If `dtype` is also set, to another dtype.
    """
    declared = getattr(args, "model_init_kwargs", None)
    if not isinstance(declared, dict) or "torch_dtype" not in declared:
        return
    args.model_init_kwargs, problem = rename_torch_dtype(declared)
    if problem is not None and problem.level == "error":
        raise PrecisionError([problem])
    if problem is not None:
        warnings.warn(str(problem), PrecisionWarning, stacklevel=4)


def spell_dtype_for_trl(args: Any) -> None:
    """Replaces other spellings of a dtype in `model_init_kwargs` (`"bf16"`) by the one that TRL reads."""
    declared = getattr(args, "model_init_kwargs", None)
    if isinstance(declared, dict) and isinstance(declared.get("dtype"), str):
        args.model_init_kwargs = {**declared, "dtype": parse_dtype(declared["dtype"])}


def trainable_context(args: Any, device: Device, fresh: bool) -> TrainableContext:
    """Returns the settings that decide in which dtype trainable weights are kept.

    Args:
        args: A TRL config, stock or Safe.
        device: The device of the run.
        fresh: Whether the trainer created the adapters from a `peft_config`.

    Raises:
        PrecisionError: If the learning rate is negative or not a finite number.
    """
    rate = args.learning_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise PrecisionError([refuse("learning-rate-out-of-range", f"learning_rate={rate!r}")])
    return TrainableContext(
        learning_rate=rate,
        adapter_dtype=parse_dtype(getattr(args, "adapter_dtype", AUTO), field="adapter_dtype"),
        fresh=fresh,
        one_dtype=fsdp_version(args) is not None,
        upcast_by_fsdp=fsdp_version(args) == 2 and (args.bf16 or args.fp16),
        engine_copies=engine_copies(args),
        unscalable_dtypes=(device.unscalable_dtypes or frozenset()) if args.fp16 else frozenset(),
    )


def check_adapters(model: Any, peft_config: Any) -> None:
    """Checks the adapter's config, and warns if an adapter was trained on another base model.

    Args:
        model: The trainer's `model` argument.
        peft_config: The trainer's `peft_config` argument.

    Raises:
        PrecisionError: If `peft_config` is not a `peft.PeftConfig`.
    """
    if peft_config is not None:
        from peft import PeftConfig

        if not isinstance(peft_config, PeftConfig):
            kind = type(peft_config).__name__
            raise PrecisionError([refuse("not-a-peft-config", f"peft_config={peft_config!r}", kind=kind)])
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        problem = another_base(name, getattr(config, "base_model_name_or_path", None), model)
        if problem is not None:
            warnings.warn(str(problem), PrecisionWarning, stacklevel=4)

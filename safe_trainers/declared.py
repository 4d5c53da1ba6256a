"""What the user declared, read off configs and models as the plain values that a policy is resolved from."""

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .adapter_files import another_base
from .adapters import Circumstances
from .census import Census, take_census
from .device import Device, detect_device
from .dtypes import AUTO, FLOAT32, HALVES, SHORT, from_torch, parse_dtype
from .engines import engine_copies, fsdp_version
from .errors import PrecisionError, PrecisionWarning, refuse
from .policy import Flags, Model, PrecisionPolicy, resolve
from .quantized_loading import asked_quantization, missing_backend, skip_heads, unloadable_head


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
        adapter_dtype=getattr(args, "adapter_dtype", AUTO),
        config=config.__name__ if config is not None else None,
    )


def model_of(census: Census, live: bool = False) -> Model:
    """What a policy needs to know of a counted model.

    Args:
        census: The count.
        live: Whether the user passed the model itself.
    """
    return Model(census.weights, frozenset(census.trainable), live, census.attn_implementation, census.quantization)


def check_loading(arguments: dict[str, Any], trainer_class: type) -> None:
    """Refuses what cannot be loaded, and spares heads that are made while a model is quantised.

    Args:
        arguments: What a trainer is built with, by name; its quantization configs are completed.
        trainer_class: The trainer.

    Raises:
        PrecisionError: With everything that is known before the model is read.
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
    """The policy as far as it can be known before a model is loaded.

    Args:
        args: A TRL config, plain or Safe.
        model: What was passed as the model: a live one is counted, of a name only what `model_init_kwargs` declare
            is known.
        trainer_class: The trainer.
        quantization_config: What the trainer takes under this name.

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
        known = Model(
            _declared_weights(dtype),
            attn_implementation=declared.get("attn_implementation"),
            quantization=asked_quantization(model, args, quantization_config),
        )
    detect = getattr(trainer_class, "precision_device", None)  # a stock class has none
    device = detect_device(args.device) if detect is None else detect(args)
    return resolve(flags_of(args, trainer_class), device, known)


def _declared_weights(dtype: Any) -> frozenset[str]:
    """The weights that a declared dtype means; none where only the checkpoint knows, or it is none of the three."""
    if dtype is None or (isinstance(dtype, torch.dtype) and from_torch(dtype) not in SHORT):
        return frozenset()
    name = parse_dtype(dtype, field="model_init_kwargs['dtype']")
    return frozenset() if name == AUTO else frozenset({name})


def choose_load_dtype(arguments: dict[str, Any], policy: PrecisionPolicy) -> None:
    """Loads a frozen base in the compute dtype, where `precision` decides and nothing else was written.

    Full fine-tuning keeps TRL's default: float32, the master weights.

    Args:
        arguments: What a trainer is built with, by name; `model_init_kwargs` of its config are completed.
        policy: The declared policy of the run.
    """
    args, model = arguments["args"], arguments.get("model")
    declared = getattr(args, "model_init_kwargs", None) or {}
    frozen = arguments.get("peft_config") is not None
    if getattr(args, "precision", None) is None or not isinstance(model, str) or "dtype" in declared or not frozen:
        return
    if policy.autocast.value in HALVES:
        args.model_init_kwargs = {**declared, "dtype": policy.autocast.value}


def spell_dtype_as_trl_does(args: Any) -> None:
    """Writes a dtype of `model_init_kwargs` in the one spelling that TRL reads.

    Args:
        args: A TRL config, whose `model_init_kwargs` are replaced where they spell a dtype otherwise.
    """
    declared = getattr(args, "model_init_kwargs", None)
    if isinstance(declared, dict) and isinstance(declared.get("dtype"), str):
        args.model_init_kwargs = {**declared, "dtype": parse_dtype(declared["dtype"])}


def fp32_patterns_of(args: Any) -> tuple[str, ...]:
    """The `fp32_modules` of a config; none where it has no such field.

    Args:
        args: A TRL config, plain or Safe.
    """
    return tuple(getattr(args, "fp32_modules", None) or ())


def circumstances_of(args: Any, device: Device, fresh: bool) -> Circumstances:
    """What decisions on trainables depend on besides the policy and the tensors.

    Args:
        args: A TRL config, plain or Safe.
        device: Where the run computes.
        fresh: Whether the adapters were made by the trainer, from a `peft_config`.

    Raises:
        PrecisionError: If the learning rate is no finite number, or below 0.
    """
    rate = args.learning_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise PrecisionError([refuse("learning-rate-out-of-range", f"learning_rate={rate!r}")])
    return Circumstances(
        learning_rate=rate,
        asked=parse_dtype(getattr(args, "adapter_dtype", AUTO), field="adapter_dtype"),
        fresh=fresh,
        one_dtype=fsdp_version(args) is not None,
        widened=fsdp_version(args) == 2 and (args.bf16 or args.fp16),
        copied=engine_copies(args),
        unscalable=(device.unscalable or frozenset()) if args.fp16 else frozenset(),
    )


def check_adapters(model: Any, peft_config: Any) -> None:
    """Refuses what cannot become an adapter, and warns of one that was made for another base.

    Args:
        model: What was passed as the model.
        peft_config: What was passed as the adapter's config.

    Raises:
        PrecisionError: If it is no `peft.PeftConfig`.
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

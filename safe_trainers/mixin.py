"""The sandwich: a class above TRL's trainer and one below it.

```
SafeGRPOTrainer -> PrecisionMixin -> GRPOTrainer -> trl _BaseTrainer -> PrecisionBase -> transformers.Trainer
```

`PrecisionMixin` overrides what users and TRL call on `self`. `PrecisionBase` receives what TRL calls through
`super()`, which skips everything above TRL: `Trainer.__init__`, where TRL has just made its adapters and nothing has
moved yet, and the `_prepare_inputs` of rollouts, scoring, tool images and reward models.
"""

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer

from .census import Census, take_census
from .contract import BUFFER_METHOD, ROLLOUT_METHOD, SafetyContract, check_bases, contract_of, trl_bases
from .device import detect_device
from .dtypes import AUTO, HALVES, parse_dtype
from .errors import PrecisionError, PrecisionWarning, refuse
from .media import MEDIA_KEYS, MediaCaster, MediaDecision
from .policy import OFF, Flags, Model, PrecisionPolicy, resolve
from .probing import meeting_dtypes, sample_inputs
from .settlement import Settlement, apply, settle
from .towers import unwrap


logger = logging.getLogger(__name__)


class PrecisionBase(Trainer):
    """Below TRL: the moment before `Trainer.__init__`, and every batch that TRL prepares.

    Attributes:
        precision_policy: What the run computes in, each decision with its reason.
        precision_census: What the model holds.
        precision_settlement: What was done to the model.
        safety_contract: What the class covers, and which hooks have fired.
    """

    media_keys: ClassVar[Mapping[str, str]] = MEDIA_KEYS
    """Media inputs and the model method that shows what a tower makes of each. A subclass extends it:
    `media_keys = {**MEDIA_KEYS, "my_pixels": "get_image_features"}`."""

    precision_policy: PrecisionPolicy
    precision_census: Census
    precision_settlement: Settlement
    safety_contract: SafetyContract

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs)
        model, training_args = bound.arguments["model"], bound.arguments["args"]
        self.safety_contract = contract_of(type(self))
        self._media: MediaCaster | None = None
        self._settle(model, training_args, bound.arguments.get("processing_class"))
        super().__init__(*args, **kwargs)
        self._check_accelerator()

    def _adapters_ready(self, model: nn.Module) -> None:
        """The PEFT init hook: TRL has made, and perhaps cast, the adapters of `model`; no optimizer exists.

        Args:
            model: The policy model as TRL hands it to `Trainer.__init__`, still where it was loaded.
        """
        self.safety_contract.fired["adapters"] += 1

    def _settle(self, model: nn.Module, training_args: Any, processing_class: Any) -> None:
        """Decides on the live model, refuses what cannot work, and places the boundaries."""
        self._adapters_ready(model)
        self.precision_census = take_census(model)
        self.precision_policy = resolve(
            flags_of(training_args, type(self)), detect_device(training_args.device), model_of(self.precision_census)
        )
        self.precision_policy.check()
        # DeepSpeed casts the weights when it is initialised, after the census.
        late_cast = getattr(training_args, "deepspeed_plugin", None) is not None
        self.precision_settlement = settle(self.precision_policy, self.precision_census, late_cast)
        apply(self.precision_settlement, model)
        weights = self.precision_census.weights
        if len(weights) > 1:
            inputs = sample_inputs(processing_class)
            problem = meeting_dtypes(model, inputs, weights, self.precision_policy.autocast.value)
            if problem is not None:
                raise PrecisionError([problem])
        if training_args.process_index == 0:
            for warning in (*self.precision_policy.warnings, *self.precision_settlement.warnings):
                warnings.warn(str(warning), PrecisionWarning, stacklevel=6)
            logger.info("precision policy\n%s", self.precision_policy)
            logger.info("dtype boundaries\n%s", self.precision_settlement)

    def _check_accelerator(self) -> None:
        """Compares the accelerator that was really built with the policy that it was decided for."""
        policy, problems = self.precision_policy, []
        actual = self.accelerator.mixed_precision
        wanted = {"bfloat16": "bf16", "float16": "fp16", OFF: "no"}[policy.autocast.value]
        silent_fp16 = actual == "fp16" and not self.accelerator.native_amp
        if actual != wanted and not silent_fp16:
            given = f"the training arguments ask for mixed precision {wanted!r}"
            problems.append(refuse("accelerator-disagrees", given, actual=actual))
        halves = sorted(HALVES & set(self.precision_census.trainable))
        if self.accelerator.scaler is not None and halves:
            given = f"{' and '.join(halves)} trainable weights with fp16=True"
            problems.append(refuse("half-trainables-under-loss-scaling", given))
        if problems:
            raise PrecisionError(problems)

    def compute_context(self) -> contextlib.AbstractContextManager[Any]:
        """The context that training computes in: accelerate's autocast, or none."""
        return self.accelerator.autocast()

    @property
    def media_decisions(self) -> list[MediaDecision]:
        """What was decided on each media tensor so far: on its first batch, once."""
        return list(self._media.decisions.values()) if self._media is not None else []

    def _media_caster(self) -> MediaCaster:
        if self._media is None:
            contexts: list[Callable[[], Any]] = [self.compute_context]
            if self.precision_policy.rollout.value == "stock":
                contexts.append(contextlib.nullcontext)
            engine = (
                self.accelerator.state.deepspeed_plugin.hf_ds_config.dtype() if self.is_deepspeed_enabled else None
            )
            self._media = MediaCaster(self.media_keys, self._media_models(), contexts, self._sharded(), engine)
        return self._media

    def _media_models(self) -> list[nn.Module]:
        """Every model of this trainer that reads media: the policy, and reference or teacher models beside it."""
        policy = unwrap(self.model)
        others = {id(base): base for value in vars(self).values() if (base := _base_model(value)) is not None}
        return [policy, *(model for model in others.values() if model is not policy)]

    def _sharded(self) -> str | None:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            return "ZeRO-3 shards the weights"
        return "FSDP shards the weights" if self.is_fsdp_enabled else None

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Prepares a batch for a model: moved to the device, media in the dtype of their tower.

        Args:
            inputs: Model inputs by name.

        Returns:
            A new mapping of the same kind; `inputs` is not changed.
        """
        self.safety_contract.fired["inputs"] += 1
        return super()._prepare_inputs(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """Prepares any part of a batch. Some trainers call this past any class between them and `Trainer`."""
        if not isinstance(data, Mapping):
            return self._move(data)
        caster = self._media_caster()
        media = caster.media(data)
        if caster.undecided(data):
            caster.decide({key: self._move(value) for key, value in data.items()})
            for decision in caster.decisions.values():
                logger.info("media tensor %s: %s", decision.key, decision.reason)
        return type(data)(  # type: ignore[call-arg]
            {key: self._move(caster.cast(key, value)) if key in media else self._prepare_input(value)
             for key, value in data.items()}
        )  # fmt: skip

    def _move(self, data: Any) -> Any:
        """Moves nested tensors to the device and leaves their dtype alone.

        `Trainer` does the same without DeepSpeed; under it, it casts every floating tensor to the engine's dtype, also
        those that are no model inputs or are multiplied into integer positions.
        """
        if isinstance(data, Mapping):
            return type(data)({key: self._move(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (list, tuple)):
            return type(data)(self._move(value) for value in data)
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else data


class PrecisionMixin:
    """Above TRL: what users and TRL call on `self`.

    A safe trainer of any TRL algorithm is `class SafeX(PrecisionMixin, XTrainer, PrecisionBase)`.

    Attributes:
        config_class: The config that is made when a trainer is built without one.
    """

    config_class: ClassVar[type | None] = None

    # What PrecisionBase brings, for the type checker.
    accelerator: Any
    model: Any
    safety_contract: SafetyContract
    precision_policy: PrecisionPolicy
    precision_settlement: Settlement
    is_deepspeed_enabled: bool
    compute_context: Callable[[], contextlib.AbstractContextManager[Any]]
    _media_models: Callable[[], list[nn.Module]]
    _media_caster: Callable[[], MediaCaster]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        initialise = super().__init__
        arguments = _by_name(initialise, args, kwargs)
        if arguments.get("args") is None and self.config_class is not None:
            arguments["args"] = self.config_class(_default_output_dir(arguments.get("model"), type(self)))
        if arguments.get("args") is not None:
            declared_policy(arguments["args"], arguments.get("model"), type(self)).check()
        initialise(**arguments)
        for model in self._media_models()[1:]:
            apply(self.precision_settlement_of(model), model)

    def precision_settlement_of(self, model: nn.Module) -> Settlement:
        """What a second model of the run needs: a reference or a teacher.

        Args:
            model: The model.

        Returns:
            The settlement of this run's policy with that model's own census.
        """
        return settle(self.precision_policy, take_census(model), self.is_deepspeed_enabled)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepares the batch of a step: TRL's own work here, then `PrecisionBase` for what goes into a model."""
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one turn of generation in the compute context of training.

        Generation by vLLM has a compute dtype of its own, and generation in another thread does not see this thread's
        autocast; weights are also synchronised in this method, which must not be done in half precision.
        """
        self.safety_contract.fired["rollout"] += 1
        elsewhere = getattr(self, "use_vllm", False) or getattr(self, "use_transformers_continuous_batching", False)
        aligned = self.precision_policy.rollout.value == "training" and not elsewhere
        with self.compute_context() if aligned else contextlib.nullcontext():
            return _next_method(self, ROLLOUT_METHOD)(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Generates and scores a batch, and hands it on with its media in their tower's dtype.

        Whatever TRL prepared by a way of its own is cast here, once, before the batch is buffered and sliced.

        Returns:
            TRL's batch, or a copy of its mapping where a media tensor had to be cast.
        """
        batch = _next_method(self, BUFFER_METHOD)(*args, **kwargs)
        self.safety_contract.fired["buffer"] += 1
        caster = self._media_caster()
        cast = {key: new for key in caster.media(batch) if (new := caster.cast(key, batch[key])) is not batch[key]}
        return {**batch, **cast} if cast else batch


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
        config=config.__name__ if config is not None else "SafeGRPOConfig",
    )


def model_of(census: Census) -> Model:
    """What a policy needs to know of a counted model."""
    return Model(census.weights, census.attn_implementation, census.quantization)


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
        known = model_of(take_census(model))
    else:
        declared = dict(getattr(args, "model_init_kwargs", None) or {})
        dtype = declared.get("dtype", declared.get("torch_dtype", "float32"))
        weights = None if dtype is None else parse_dtype(dtype, field="model_init_kwargs['dtype']")
        known = Model(
            frozenset() if weights in (None, AUTO) else frozenset({str(weights)}), declared.get("attn_implementation")
        )
    return resolve(flags_of(args, trainer_class), detect_device(args.device), known)


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by keyword: their order differs between releases of TRL."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)


def _next_method(trainer: PrecisionMixin, name: str) -> Callable[..., Any]:
    """The method that comes after `PrecisionMixin`; not every TRL trainer has each of them."""
    method: Callable[..., Any] = getattr(super(PrecisionMixin, trainer), name)
    return method


def _default_output_dir(model: Any, trainer_class: type) -> str:
    """The folder that TRL would name, e.g. `Qwen2.5-VL-3B-GRPO`."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    algorithm = getattr(trl_bases(trainer_class)[0], "_name", None) or trl_bases(trainer_class)[0].__name__
    return f"{name.rstrip('/').split('/')[-1]}-{algorithm}"


def _base_model(value: Any) -> nn.Module | None:
    """The transformers model inside an attribute of a trainer, if there is one."""
    if not isinstance(value, nn.Module):
        return None
    base = unwrap(value)
    return base if hasattr(base, "get_input_embeddings") else None

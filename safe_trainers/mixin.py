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
from dataclasses import replace
from importlib import metadata
from typing import Any, ClassVar

import torch
from datasets import IterableDataset
from torch import nn
from transformers import Trainer

from . import layout, scaler
from .captures import AdapterGuard, adapters_held
from .census import Census, take_census
from .checkpoints import ExactCheckpoints
from .contract import (
    BUFFER_METHOD,
    COVERED,
    ROLLOUT_METHOD,
    SafetyContract,
    check_bases,
    contract_of,
    generates_elsewhere,
)
from .decisions import carry_out
from .declared import (
    check_adapters,
    check_loading,
    circumstances_of,
    declared_policy,
    flags_of,
    fp32_patterns_of,
    model_of,
    spell_dtype_as_trl_does,
)
from .device import Device, detect_device
from .dtypes import HALVES
from .errors import PrecisionError, PrecisionWarning, refuse
from .media import MEDIA_KEYS, MediaCaster, MediaCollator, MediaDecision
from .policy import OFF, PrecisionPolicy, resolve
from .preparation import Preparation, prepare, prepare_reference
from .probing import cannot_meet, failure
from .settlement import Settlement, apply, settle
from .signatures import by_name, default_output_dir, signature_of
from .towers import unwrap


logger = logging.getLogger(__name__)


class PrecisionBase(Trainer):
    """Below TRL: the moment before `Trainer.__init__`, and every batch that TRL prepares.

    Attributes:
        precision_policy: What the run computes in, each decision with its reason.
        precision_census: What the model holds.
        precision_preparation: What its weights were brought to.
        precision_settlement: Which dtype boundaries were placed in it.
        safety_contract: What the class covers, and which hooks have fired.
    """

    media_keys: ClassVar[Mapping[str, str]] = MEDIA_KEYS
    """Media inputs and the model method that shows what a tower makes of each. A subclass extends it:
    `media_keys = {**MEDIA_KEYS, "my_pixels": "get_image_features"}`."""

    precision_policy: PrecisionPolicy
    precision_census: Census
    precision_preparation: Preparation
    precision_settlement: Settlement
    safety_contract: SafetyContract
    # What PrecisionMixin sees before TRL does.
    _model_is_live: bool
    _adapter_guard: AdapterGuard

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs)
        model, training_args = bound.arguments["model"], bound.arguments["args"]
        self.safety_contract = contract_of(type(self), generates_elsewhere(self, training_args))
        self._media: MediaCaster | None = None
        self._settle(model, training_args)
        self._reconcile_mixed_weights(
            model, bound.arguments.get("processing_class"), bound.arguments.get("train_dataset")
        )
        self._say_what_was_done(training_args)
        super().__init__(*args, **kwargs)
        self._check_accelerator()

    @classmethod
    def precision_device(cls, args: Any) -> Device:
        """The device of a run, as far as precision is concerned.

        Args:
            args: The training arguments.
        """
        return detect_device(args.device)

    def _adapters_ready(self, model: nn.Module) -> None:
        """The PEFT init hook: TRL has made, and perhaps cast, the adapters of `model`; no optimizer exists.

        Args:
            model: The policy model as TRL hands it to `Trainer.__init__`, still where it was loaded.

        Raises:
            PrecisionError: If TRL cast adapters whose bits could not be kept.
        """
        self.safety_contract.fired["adapters"] += 1
        missed = self._adapter_guard.release(model)
        if missed:
            given = f"{len(missed)} bfloat16 trainables of a quantised model, such as {missed[0]}"
            raise PrecisionError([refuse("adapters-not-captured", given, version=metadata.version("trl"))])

    def _settle(self, model: nn.Module, training_args: Any) -> None:
        """Decides on the live model, refuses what cannot work, prepares the weights, and places the boundaries."""
        self._adapters_ready(model)
        device = self.precision_device(training_args)
        counted = model_of(take_census(model), live=self._model_is_live)
        self.precision_policy = resolve(flags_of(training_args, type(self)), device, counted)
        self.precision_policy.check()
        self.precision_preparation = prepare(
            model,
            self.precision_policy,
            circumstances_of(training_args, device, self._adapter_guard.fresh),
            upcast=getattr(training_args, "upcast_trainables", True),
            fp32_patterns=fp32_patterns_of(training_args),
        )
        # DeepSpeed casts the weights when it is initialised, after the census.
        self._late_cast = getattr(training_args, "deepspeed_plugin", None) is not None
        self._place_boundaries(model)

    def _place_boundaries(self, model: nn.Module) -> None:
        self.precision_census = take_census(model)
        self.precision_settlement = settle(self.precision_policy, self.precision_census, self._late_cast)
        apply(self.precision_settlement, model)

    def _say_what_was_done(self, training_args: Any) -> None:
        if training_args.process_index == 0:
            for warning in (*self.precision_policy.warnings, *self.precision_preparation.warnings):
                warnings.warn(str(warning), PrecisionWarning, stacklevel=6)
            logger.info("precision policy\n%s", self.precision_policy)
            logger.info("weights\n%s", self.precision_preparation)
            logger.info("dtype boundaries\n%s", self.precision_settlement)

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator, and gives its loss scaler what the config says."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.scaler is not None:
            scaler.configure(self.accelerator.scaler, self.args)

    def _reconcile_mixed_weights(self, model: nn.Module, processing_class: Any, dataset: Any) -> None:
        """Asks a model whose weights disagree whether it computes, on the kind of input that it will get.

        Where it does not, as little as possible is brought to one dtype; what still cannot compute is refused.
        """
        columns = getattr(dataset, "column_names", None)
        if columns is None and isinstance(dataset, IterableDataset):
            columns = next(iter(dataset), {})  # a stream starts again at each `iter`
        pictures = processing_class if {"image", "images", "pixel_values"} & set(columns or ()) else None
        done = self._make_meet(model, pictures)
        if done is not None:
            self.precision_preparation = replace(self.precision_preparation, layout=done)
            self._place_boundaries(model)

    def _make_meet(self, model: nn.Module, processing_class: Any = None) -> layout.Reconciliation | None:
        """Makes a model compute whose weights disagree; `None` where they agree."""
        weights, autocast = take_census(model).weights, self.precision_policy.autocast.value
        if len(weights) == 1 or not weights & HALVES:
            return None
        done = layout.reconcile(
            model,
            self.precision_policy.compute.value,
            lambda: failure(model, processing_class, autocast),
            keep=self.precision_preparation.fp32_modules,
        )
        if done.error is not None:
            raise PrecisionError([cannot_meet(model, processing_class, weights, autocast, done.error)])
        return done

    def _check_accelerator(self) -> None:
        """Compares the accelerator that was really built with the policy that it was decided for."""
        policy, problems = self.precision_policy, []
        actual = self.accelerator.mixed_precision
        wanted = {"bfloat16": "bf16", "float16": "fp16", OFF: "no"}[policy.autocast.value]
        silent_fp16 = actual == "fp16" and not self.accelerator.native_amp
        if actual != wanted and not silent_fp16:
            given = f"the training arguments ask for mixed precision {wanted!r}"
            problems.append(refuse("accelerator-disagrees", given, actual=actual))
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

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a dataloader whose batches hold their media as decided before they are moved.

        Only what this process collates: a worker does not know what is decided after it was started.
        """
        if self.args.dataloader_num_workers > 0:
            return super()._get_dataloader(*args, **kwargs)
        collator: Any = self.data_collator  # type: ignore[has-type]
        self.data_collator = MediaCollator(collator, self._media_caster)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

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


class PrecisionMixin(ExactCheckpoints):
    """Above TRL: what users and TRL call on `self`.

    A safe trainer of any TRL algorithm is `class SafeX(PrecisionMixin, XTrainer, PrecisionBase)`.

    Attributes:
        config_class: The config that is made when a trainer is built without one.
    """

    config_class: ClassVar[type | None] = None
    __signature__: ClassVar[inspect.Signature]

    # What PrecisionBase brings, for the type checker.
    args: Any
    accelerator: Any
    model: Any
    safety_contract: SafetyContract
    precision_policy: PrecisionPolicy
    precision_preparation: Preparation
    precision_settlement: Settlement
    is_deepspeed_enabled: bool
    compute_context: Callable[[], contextlib.AbstractContextManager[Any]]
    _media_models: Callable[[], list[nn.Module]]
    _media_caster: Callable[[], MediaCaster]
    _make_meet: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)
        cls.__signature__ = signature_of(cls.__mro__)  # what `help` and editors show

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mro = type(self).__mro__
        arguments = by_name(signature_of(mro[mro.index(PrecisionMixin) + 1 :]), args, kwargs)
        self._model_is_live = isinstance(arguments.get("model"), nn.Module)
        if arguments.get("args") is None and self.config_class is not None:
            arguments["args"] = self.config_class(default_output_dir(arguments.get("model"), type(self)))
        if arguments.get("args") is not None:
            check_loading(arguments, type(self))
            quantization = arguments.get("quantization_config")
            declared_policy(arguments["args"], arguments.get("model"), type(self), quantization).check()
            spell_dtype_as_trl_does(arguments["args"])
        check_adapters(arguments.get("model"), arguments.get("peft_config"))
        with adapters_held(type(self), arguments.get("model")) as self._adapter_guard:
            super().__init__(**arguments)
        policy, *others = self._media_models()
        for model in others:
            if type(model) is type(policy):
                prepare_reference(model, self.precision_policy, fp32_patterns_of(self.args))
            apply(self.precision_settlement_of(model), model)
            self._make_meet(model)

    def precision_settlement_of(self, model: nn.Module) -> Settlement:
        """What a second model of the run needs: a reference or a teacher.

        Args:
            model: The model.

        Returns:
            The settlement of this run's policy with that model's own census.
        """
        return settle(self.precision_policy, take_census(model), self.is_deepspeed_enabled)

    def _adapters_loaded(self, checkpoint: str) -> None:
        carry_out(self.model, self.precision_preparation.decisions)
        super()._adapters_loaded(checkpoint)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one turn of generation in the compute context of training.

        Where the contract says that it is not covered, it is left alone: vLLM has a compute dtype of its own, another
        thread does not see this thread's autocast, and weights are synchronised in this method, which must not be done
        in half precision.
        """
        if self.safety_contract["rollout"].state != COVERED:
            return _next_method(self, ROLLOUT_METHOD)(*args, **kwargs)
        self.safety_contract.fired["rollout"] += 1
        with self.compute_context():
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


def _next_method(trainer: PrecisionMixin, name: str) -> Callable[..., Any]:
    """The method that comes after `PrecisionMixin`; not every TRL trainer has each of them."""
    method: Callable[..., Any] = getattr(super(PrecisionMixin, trainer), name)
    return method


def _base_model(value: Any) -> nn.Module | None:
    """The transformers model inside an attribute of a trainer, if there is one."""
    if not isinstance(value, nn.Module):
        return None
    base = unwrap(value)
    return base if hasattr(base, "get_input_embeddings") else None

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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from datasets import IterableDataset
from torch import nn
from transformers import Trainer

from .census import Census, take_census
from .contract import BUFFER_METHOD, COVERED, ROLLOUT_METHOD, SafetyContract, check_bases, contract_of, trl_bases
from .declared import declared_policy, flags_of, model_of, spell_dtype_as_trl_does
from .device import detect_device
from .dtypes import HALVES
from .errors import PrecisionError, PrecisionWarning, refuse
from .media import MEDIA_KEYS, MediaCaster, MediaCollator, MediaDecision
from .policy import OFF, PrecisionPolicy, resolve
from .probing import meeting_dtypes
from .settlement import QUANTIZED_ADAPTERS, Settlement, apply, settle
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
    _model_is_live: bool  # whether the user passed the model itself; PrecisionMixin sees it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs)
        model, training_args = bound.arguments["model"], bound.arguments["args"]
        self.safety_contract = contract_of(type(self), _generates_elsewhere(self, training_args))
        self._media: MediaCaster | None = None
        self._settle(model, training_args)
        self._check_mixed_weights(model, bound.arguments.get("processing_class"), bound.arguments.get("train_dataset"))
        super().__init__(*args, **kwargs)
        self._check_accelerator()

    def _adapters_ready(self, model: nn.Module) -> None:
        """The PEFT init hook: TRL has made, and perhaps cast, the adapters of `model`; no optimizer exists.

        Args:
            model: The policy model as TRL hands it to `Trainer.__init__`, still where it was loaded.
        """
        self.safety_contract.fired["adapters"] += 1

    def _settle(self, model: nn.Module, training_args: Any) -> None:
        """Decides on the live model, refuses what cannot work, and places the boundaries."""
        self._adapters_ready(model)
        self.precision_census = take_census(model)
        self.precision_policy = resolve(
            flags_of(training_args, type(self)),
            detect_device(training_args.device),
            model_of(self.precision_census, live=self._model_is_live),
        )
        self.precision_policy.check()
        # DeepSpeed casts the weights when it is initialised, after the census.
        late_cast = getattr(training_args, "deepspeed_plugin", None) is not None
        self.precision_settlement = settle(self.precision_policy, self.precision_census, late_cast)
        apply(self.precision_settlement, model)
        if training_args.process_index == 0:
            for warning in (*self.precision_policy.warnings, *self.precision_settlement.warnings):
                warnings.warn(str(warning), PrecisionWarning, stacklevel=6)
            logger.info("precision policy\n%s", self.precision_policy)
            logger.info("dtype boundaries\n%s", self.precision_settlement)

    def _check_mixed_weights(self, model: nn.Module, processing_class: Any, dataset: Any) -> None:
        """Asks a model whose weights disagree whether it computes, on the kind of input that it will get."""
        weights = self.precision_census.weights
        if len(weights) > 1 and weights & HALVES:
            columns = getattr(dataset, "column_names", None)
            if columns is None and isinstance(dataset, IterableDataset):
                columns = next(iter(dataset), {})  # a stream starts again at each `iter`
            pictures = bool({"image", "images", "pixel_values"} & set(columns or ()))
            problem = meeting_dtypes(
                model, processing_class if pictures else None, weights, self.precision_policy.autocast.value
            )
            if problem is not None:
                raise PrecisionError([problem])

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
            load = "`model.float()`" if self._model_is_live else "`model_init_kwargs={'dtype': 'float32'}`"
            fix = f"{load}: autocast still computes in float16"
            if self.precision_census.quantization is not None:
                fix = f"a base that is not quantised: {QUANTIZED_ADAPTERS}"
            problems.append(refuse("half-trainables-under-loss-scaling", given, fix=fix))
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


class PrecisionMixin:
    """Above TRL: what users and TRL call on `self`.

    A safe trainer of any TRL algorithm is `class SafeX(PrecisionMixin, XTrainer, PrecisionBase)`.

    Attributes:
        config_class: The config that is made when a trainer is built without one.
    """

    config_class: ClassVar[type | None] = None
    __signature__: ClassVar[inspect.Signature]

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
        cls.__signature__ = _signature(cls.__mro__)  # what `help` and editors show

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mro = type(self).__mro__
        arguments = _by_name(_signature(mro[mro.index(PrecisionMixin) + 1 :]), args, kwargs)
        self._model_is_live = isinstance(arguments.get("model"), nn.Module)
        if arguments.get("args") is None and self.config_class is not None:
            arguments["args"] = self.config_class(_default_output_dir(arguments.get("model"), type(self)))
        if arguments.get("args") is not None:
            declared_policy(arguments["args"], arguments.get("model"), type(self)).check()
            spell_dtype_as_trl_does(arguments["args"])
        super().__init__(**arguments)
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


def _generates_elsewhere(trainer: Any, args: Any) -> str | None:
    """Why this run does not generate in this process's compute context, `None` where it does."""
    if getattr(args, "use_vllm", False):
        return "vLLM generates, in a dtype of its own"
    if getattr(args, "use_transformers_continuous_batching", False):
        return "continuous batching generates in a thread of its own, which no context reaches"
    if getattr(trainer, "rollout_func", None) is not None:
        return "a rollout_func of the user's generates"
    return "as asked by rollout_compute='stock'" if getattr(args, "rollout_compute", None) == "stock" else None


def _signature(classes: Iterable[type]) -> inspect.Signature:
    """How the first of some classes that names its arguments is built.

    One that takes `*args` hands them on to the next, and may take keywords of its own.
    """
    own: dict[str, inspect.Parameter] = {}
    for cls in classes:
        if "__init__" in vars(cls):
            signature = inspect.signature(vars(cls)["__init__"])
            named = list(signature.parameters.values())[1:]  # without self
            if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in named):
                own = {name: parameter for name, parameter in own.items() if name not in signature.parameters}
                last = [parameter for parameter in named if parameter.kind is parameter.VAR_KEYWORD]
                first = [parameter for parameter in named if parameter.kind is not parameter.VAR_KEYWORD]
                return signature.replace(parameters=[*first, *own.values(), *last])
            own |= {parameter.name: parameter for parameter in named if parameter.kind is parameter.KEYWORD_ONLY}
    return inspect.Signature()


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by keyword: their order differs between releases of TRL."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


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

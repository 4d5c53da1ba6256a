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
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any, ClassVar

from datasets import IterableDataset
from torch import nn
from transformers import Trainer

from . import engines, fp32_modules, layout, scaler
from .boundaries import release_features
from .captures import AdapterGuard, construction
from .census import Census, take_census
from .contract import (
    BUFFER_METHOD,
    SafetyContract,
    check_bases,
    contract_of,
    generates_elsewhere,
    generates_how,
)
from .decisions import carry_out
from .declared import (
    check_adapters,
    check_loading,
    choose_load_dtype,
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
from .media import MediaCaster, has_packed_towers, refuse_packed_casts
from .media_inputs import MediaInputs
from .metrics import MismatchMetrics, check_reward_weights
from .policy import OFF, PrecisionPolicy, resolve
from .preparation import Preparation, prepare, prepare_reference
from .probing import cannot_meet, failure
from .reports import PrecisionReports
from .rollout import AlignedRollouts
from .sampled import SampledRollouts
from .settlement import Settlement, apply, settle
from .signatures import as_taken, by_name, default_output_dir, signature_of
from .towers import anatomy, unwrap


logger = logging.getLogger(__name__)

_MEDIA_COLUMNS = {"image", "images", "pixel_values", "audio", "audios", "input_features"}
"""Columns of datasets whose rows are more than text."""


class PrecisionBase(SampledRollouts, MediaInputs):
    """Below TRL: the moment before `Trainer.__init__`, and every batch that TRL prepares.

    Attributes:
        precision_policy: What the run computes in, each decision with its reason.
        precision_census: What the model holds.
        precision_preparation: What its weights were brought to.
        precision_settlement: Which dtype boundaries were placed in it.
        precision_engine: What runs it in several processes, and what that computes in.
        safety_contract: What the class covers, and which hooks have fired.
    """

    precision_policy: PrecisionPolicy
    precision_engine: engines.Engine
    precision_census: Census
    precision_preparation: Preparation
    precision_settlement: Settlement
    safety_contract: SafetyContract
    # What PrecisionMixin sees before TRL does.
    _model_is_live: bool
    _adapter_guard: AdapterGuard
    _joins_features = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs)
        model, training_args = bound.arguments["model"], bound.arguments["args"]
        self.safety_contract = contract_of(
            type(self), generates_elsewhere(self, training_args), generates_how(training_args)
        )
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
        census = take_census(model)
        counted = model_of(census, live=self._model_is_live)
        self.precision_policy = resolve(flags_of(training_args, type(self)), device, counted)
        self.precision_policy.check()
        self.precision_preparation = prepare(
            model,
            census,
            self.precision_policy,
            circumstances_of(training_args, device, self._adapter_guard.fresh),
            upcast=getattr(training_args, "upcast_trainables", True),
            fp32_patterns=fp32_patterns_of(training_args),
        )
        autocast = self.precision_policy.autocast.value
        if self._adapter_guard.chunked and autocast != OFF and self._head_is_float32(model):
            given = f"fp32_modules with the head under {autocast} autocast"
            raise PrecisionError([refuse("fused-head-is-not-float32", given)])
        # DeepSpeed casts the weights when it is initialised, after the census.
        self._late_cast = getattr(training_args, "deepspeed_plugin", None) is not None
        self._place_boundaries(model, take_census(model) if self.precision_preparation.casts else census)

    def _place_boundaries(self, model: nn.Module, census: Census) -> None:
        self.precision_census = census
        self.precision_settlement = self._settlement(census, self._late_cast)
        apply(self.precision_settlement, model)

    def _settlement(self, census: Census, late_cast: bool) -> Settlement:
        settlement = settle(self.precision_policy, census, late_cast)
        return settlement.without_features() if self._joins_features else settlement

    def _say_what_was_done(self, training_args: Any) -> None:
        if training_args.process_index == 0:
            for warning in (*self.precision_policy.warnings, *self.precision_preparation.warnings):
                warnings.warn(str(warning), PrecisionWarning, stacklevel=6)
            logger.info("precision policy\n%s", self.precision_policy)
            logger.info("weights\n%s", self.precision_preparation)
            logger.info("dtype boundaries\n%s", self.precision_settlement)

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator, and gives its engine and its loss scaler what policy and config say."""
        super().create_accelerator_and_postprocess()
        self.precision_engine = engines.configure(self.accelerator)
        self._configure_scaler()

    def _configure_scaler(self) -> None:
        if self.accelerator.scaler is not None:
            scaler.configure(self.accelerator.scaler, self.args)

    def _reconcile_mixed_weights(self, model: nn.Module, processing_class: Any, dataset: Any) -> None:
        """Asks a model whose weights disagree whether it computes, on the kind of input that it will get.

        Where it does not, as little as possible is brought to one dtype; what still cannot compute is refused.
        """
        packed = has_packed_towers(model)
        if not packed and not self._disagrees(model, self.precision_census):
            return
        columns = getattr(dataset, "column_names", None)
        if columns is None and isinstance(dataset, IterableDataset):
            columns = next(iter(dataset), {})  # a stream starts again at each `iter`
        media = processing_class if _MEDIA_COLUMNS & set(columns or ()) else None
        if packed and media is not None:
            refuse_packed_casts(model, media, self.media_keys, self.precision_policy.autocast.value)
        done = self._make_meet(model, self.precision_census, media)
        if done is not None:
            self.precision_preparation = replace(self.precision_preparation, layout=done)
            self._place_boundaries(model, take_census(model))

    def _disagrees(self, model: nn.Module, census: Census) -> bool:
        """Whether several dtypes may meet; LoRA's meet nothing, since PEFT casts what enters them."""
        autocast = self.precision_policy.autocast.value
        others = {config.peft_type for config in getattr(model, "peft_config", {}).values()} - {"LORA"}
        dtypes = {*census.elements["weights"], *(census.elements["adapters"] if others else ())}
        if census.quantization is None and autocast != OFF and dtypes & HALVES:
            dtypes.add(autocast)  # what autocast computes meets weights that it does not cast
        return len(dtypes) > 1 and bool(dtypes & HALVES)

    def _make_meet(
        self, model: nn.Module, census: Census, processing_class: Any = None
    ) -> layout.Reconciliation | None:
        """Makes a model compute whose weights disagree; `None` where they agree."""
        weights, autocast = census.weights, self.precision_policy.autocast.value
        if not self._disagrees(model, census):
            return None
        done = layout.reconcile(
            model,
            self.precision_policy.compute.value,
            lambda: failure(model, processing_class, autocast),
            keep=self.precision_preparation.fp32_modules,
        )
        if done.error is not None and release_features(anatomy(model)):
            # It may join features before it casts them itself, which autocast refuses in the other half format.
            self._joins_features = failure(model, processing_class, autocast) is None
            done = replace(done, error=None if self._joins_features else done.error)
        if done.error is not None:
            raise PrecisionError([cannot_meet(model, processing_class, weights, autocast, done.error)])
        return done

    def _head_is_float32(self, model: nn.Module) -> bool:
        """Whether a model's head is in `fp32_modules`; asked by the fused head, once all is settled."""
        base: Any = unwrap(model)
        head = base.get_output_embeddings()
        modules = (base.get_submodule(name) for name in self.precision_preparation.fp32_modules)
        return any(part is head for module in modules for part in module.modules())

    def _check_accelerator(self) -> None:
        """Compares the accelerator that was really built with the policy that it was decided for."""
        policy, problems = self.precision_policy, []
        actual = self.accelerator.mixed_precision
        wanted = {"bfloat16": "bf16", "float16": "fp16", OFF: "no"}[policy.autocast.value]
        silent_fp16 = actual == "fp16" and not self.accelerator.native_amp
        if actual != wanted and not silent_fp16:
            given = f"the training arguments ask for mixed precision {wanted!r}"
            problems.append(refuse("accelerator-disagrees", given, actual=actual))
        problems += engines.flattens(self.model, self.accelerator)
        if problems:
            raise PrecisionError(problems)


class PrecisionMixin(AlignedRollouts, MismatchMetrics, PrecisionReports):
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
    _settlement: Callable[..., Settlement]
    _head_is_float32: Callable[[nn.Module], bool]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, PrecisionMixin, PrecisionBase)
        cls.__signature__ = signature_of(cls.__mro__)  # what `help` and editors show

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mro = type(self).__mro__
        signature = signature_of(mro[mro.index(PrecisionMixin) + 1 :])
        arguments = by_name(signature, args, kwargs)
        self._model_is_live = isinstance(arguments.get("model"), nn.Module)
        if arguments.get("args") is None and self.config_class is not None:
            arguments["args"] = self.config_class(default_output_dir(arguments.get("model"), type(self)))
        if arguments.get("args") is not None:
            check_loading(arguments, type(self))
            quantization = arguments.get("quantization_config")
            declared = declared_policy(arguments["args"], arguments.get("model"), type(self), quantization)
            found = (*declared.problems, *engines.asked_otherwise(arguments["args"], declared))
            if found:
                raise PrecisionError(found)
            choose_load_dtype(arguments, declared)
            spell_dtype_as_trl_does(arguments["args"])
        check_reward_weights(arguments.get("args"))
        arguments = as_taken(signature, arguments)
        check_adapters(arguments.get("model"), arguments.get("peft_config"))
        with construction(type(self), arguments.get("model"), self._head_is_float32) as self._adapter_guard:
            super().__init__(**arguments)
        policy, *others = self._media_models()
        for model in others:
            if isinstance(policy, type(model)):  # TRL makes references of the class that the config names
                prepare_reference(model, self.precision_policy, fp32_patterns_of(self.args))
            census = take_census(model)
            apply(self._settlement(census, self.is_deepspeed_enabled), model)
            self._make_meet(model, census)
        if getattr(self.args, "cast_lm_head_to_fp32", False):
            for model in (policy, *others):  # TRL's own head, which the autocast of a rollout would round again
                base: Any = model
                fp32_modules.without_autocast(base.get_output_embeddings())
        engines.compute_as_alone(self.model, self.accelerator)  # around the forward pass that TRL has replaced
        self._plan_report()

    def _adapters_loaded(self, checkpoint: str) -> None:
        carry_out(self.model, self.precision_preparation.decisions)
        super()._adapters_loaded(checkpoint)

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

"""`PrecisionBase`, the class below TRL's trainer, and the construction of a run."""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, ClassVar

from datasets import IterableDataset
from torch import nn
from transformers import Trainer

from ..boundaries.cast_hooks import release_features, remove_casts
from ..boundaries.placement import (
    EMBEDDINGS,
    BoundaryPlan,
    cast_operations,
    place,
    plan_boundaries,
    rounds_in_embeddings,
    widen,
)
from ..checkpoint.adapters import outside_adapters
from ..core.device import Device, detect_device
from ..core.dtypes import HALVES, to_torch
from ..core.errors import PrecisionError, raise_if, refuse
from ..core.feature import Run
from ..core.phase_clock import BACKWARD, BATCH
from ..media.caster import MEDIA_KEYS, has_packed_towers, refuse_packed_casts, takes_media
from ..media.inputs import MediaInputs
from ..model.inventory import ModelInventory, quantization_method, take_inventory
from ..model.packed_layers import unpack
from ..model.parts import find_parts, unwrap
from ..model.trial_forward import Trial, is_loaded, trial_error
from ..numerics import loss_scale
from ..numerics.gradient_norm import GradientNorm
from ..policy import distributed
from ..policy.resolve import FLAG_OF, autocast_switches, resolve
from ..policy.settings import PrecisionSettings
from ..policy.without_prompt import compute_reference_in_autocast
from ..weights import unify_dtypes
from ..weights.dora import match_forward
from ..weights.fp32_modules import covers_head
from ..weights.prepare import prepare_reference, prepare_weights
from .coverage import check_bases, contract_of, describe_engine, why_not_aligned
from .from_config import facts_of, requested_by, trainable_context
from .signature import bind_arguments, signature_of
from .trl_patches import AdapterGuard


logger = logging.getLogger(__name__)

_MEDIA_COLUMNS = {"image", "images", "pixel_values", "audio", "audios", "input_features"}
"""Dataset columns that hold images or audio."""


class PrecisionBase(Trainer):
    """The class below TRL's trainer. It receives the calls that TRL makes through `super()`.

    Attributes:
        media_keys: Names of image and audio inputs, each with the model method that runs its tower. A subclass can
            add names: `media_keys = {**MEDIA_KEYS, "my_pixels": "get_image_features"}`.
    """

    media_keys: ClassVar[Mapping[str, str]] = MEDIA_KEYS
    _side = "below"

    # Set by `PrecisionMixin` before TRL's `__init__` runs.
    _run: Run
    _adapter_guard: AdapterGuard

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = bind_arguments(signature_of((Trainer,)), args, kwargs)
        model, training_args = bound["model"], bound["args"]
        run = self._run
        run.coverage = contract_of(
            type(self),
            why_not_aligned(self, training_args),
            describe_engine(training_args),
            takes_media=takes_media(model, self.media_keys),
        )
        run.begin(model, training_args, PrecisionSettings.of(training_args), self.features)
        run.coverage.due["adapters"] += 1
        self._adapters_ready(model)
        move_early(model, training_args)
        construct(run, self._adapter_guard, model, bound.get("processing_class"), bound.get("train_dataset"))
        super().__init__(*args, **kwargs)
        check_accelerator(run)

    @classmethod
    def precision_device(cls, args: Any) -> Device:
        """Returns the device of a run, with the properties that decide its precision.

        Args:
            args: The training arguments.
        """
        return detect_device(args.device)

    def compute_context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which training computes: accelerate's autocast, or a null context."""
        return self.accelerator.autocast()

    def _adapters_ready(self, model: nn.Module) -> None:
        """Called after TRL has created, and perhaps cast, the adapters, and before an optimizer exists.

        Restores the adapter values that PEFT created. A subclass may inspect or change the adapters after `super()`.

        Args:
            model: The policy model as TRL passes it to `Trainer.__init__`, on the device where it was loaded.

        Raises:
            PrecisionError: If TRL cast adapters whose original values were not saved.
        """
        self._run.coverage.fired["adapters"] += 1
        missed = self._adapter_guard.release(model)
        if missed:
            given = f"{len(missed)} bfloat16 trainables of a quantised model, such as {missed[0]}"
            raise PrecisionError([refuse("adapters-not-captured", given, version=metadata.version("trl"))])

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator, and configures its distributed engine and its loss scaler."""
        super().create_accelerator_and_postprocess()
        self._run.engine = distributed.configure(self.accelerator)
        self._run.preparation = distributed.OwnPreparation(self.accelerator)
        self._run.loss_scale = loss_scale.LossScaleWatch(self.accelerator)
        self._run.gradient_norm = GradientNorm(self.accelerator)
        if self.accelerator.scaler is not None:
            loss_scale.configure(self.accelerator.scaler, self.args)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Moves a batch to the device and casts images and audio to the dtype of their tower.

        TRL calls this method for training, rollout, scoring, tool images and reward models. A subclass may add to the
        result, and lists its own media inputs in `media_keys`.

        Args:
            inputs: Model inputs by name.

        Returns:
            A new mapping of the same type; `inputs` is not changed.
        """
        prepared: dict[str, Any] = self._run.in_phase(BATCH, super()._prepare_inputs, inputs)
        return self._run.through("on_inputs", prepared)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the gradients of a batch. What is neither inputs nor loss in it is the backward pass."""
        return self._run.in_phase(BACKWARD, partial(super().training_step, **kwargs), *args)

    def _prepare_input(self, data: Any) -> Any:
        """Prepares a part of a batch; some trainers call this method directly and skip `_prepare_inputs`."""
        return self._run.feature(MediaInputs).prepare(data)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a dataloader whose collator casts media before they are moved to the device.

        With worker processes the collator is left alone: a worker does not see decisions made after it has started.
        """
        if self.args.dataloader_num_workers > 0:
            return super()._get_dataloader(*args, **kwargs)
        collator: Any = self.data_collator  # type: ignore[has-type]
        self.data_collator = self._run.feature(MediaInputs).collator(collator)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator


def move_early(model: nn.Module, args: Any) -> None:
    """Moves a model to the device of a run, as `Trainer.__init__` does later, so that trials use its kernels.

    Args:
        model: The policy model.
        args: The training arguments. Models that an engine places, and quantised ones, are left where they are.
    """
    if all(parameter.device.type == args.device.type for parameter in model.parameters()):
        return
    places = getattr(args, "place_model_on_device", None) in (None, True)
    evaluates_in_half = args.fp16_full_eval or args.bf16_full_eval
    engine = distributed.shards_weights(args) or getattr(args, "deepspeed_plugin", None) is not None
    placed = getattr(model, "hf_device_map", None) is not None or quantization_method(model) is not None
    if places and not (evaluates_in_half or engine or placed) and is_loaded(model):
        model.to(args.device)


def construct(run: Run, guard: AdapterGuard, model: nn.Module, processing_class: Any, dataset: Any) -> None:
    """Resolves the policy for the live model, prepares its weights and places its dtype boundaries.

    Args:
        run: The run. Its policy, inventory, weights and boundaries are set here.
        guard: The guard that saved the adapters' values during construction.
        model: The policy model.
        processing_class: The run's tokenizer or processor.
        dataset: The training dataset.

    Raises:
        PrecisionError: If the run cannot work, with all problems that one step finds.
    """
    device = type(run.trainer).precision_device(run.args)
    unpack(model)
    inventory = take_inventory(model)
    run.policy = resolve(
        requested_by(run.args, type(run.trainer)), device, facts_of(inventory, live=run.model_is_live)
    )
    run.policy.check()
    run.weights = prepare_weights(
        model,
        inventory,
        run.policy,
        trainable_context(run.args, device, guard.fresh),
        upcast=run.settings.upcast_trainables,
        fp32_patterns=tuple(run.settings.fp32_modules or ()),
    )
    check_fused_head(run, guard, model)
    # DeepSpeed casts the weights when it is initialised, after the inventory.
    run.casts_late = getattr(run.args, "deepspeed_plugin", None) is not None
    run.boundaries = BoundaryPlan(())
    place_boundaries(run, model, take_inventory(model) if run.weights.casts else inventory)
    found = [problem for feature in run.features for problem in feature.check(model)]
    found += filter(None, [outside_adapters(model)])
    raise_if(problem for problem in found if problem.level == "error")
    media = functools.cache(lambda: processing_class if _has_media(dataset) else None)
    unify_mixed_weights(run, model, media)
    match_operations(run, model, media)
    if run.weights.magnitudes and not run.casts_late:
        forward = partial(trial_error, model, media(), run.policy.autocast.value)
        run.weights = run.weights.with_renewed(match_forward(run.weights.magnitudes, forward))
    if not run.casts_late:  # accelerate has no autocast under DeepSpeed
        compute_reference_in_autocast(model, run.args.device, run.policy)
    for warning in (*run.policy.warnings, *run.weights.warnings, *found):
        run.warn_once(warning, key=str(warning))
    if run.is_main:
        logger.info("precision policy\n%s", run.policy)
        logger.info("weights\n%s", run.weights)
        logger.info("dtype boundaries\n%s", run.boundaries)


def place_boundaries(run: Run, model: nn.Module, inventory: ModelInventory) -> None:
    """Plans and places the dtype boundaries of the policy model, whose current inventory is passed."""
    run.inventory = inventory
    plan = plan_boundaries(run.policy, inventory, run.casts_late, features=not run.joins_features)
    place(plan, model)
    run.boundaries = BoundaryPlan((*plan.boundaries, *run.boundaries.operations))


def prepare_other_model(run: Run, model: nn.Module, policy: nn.Module, is_reference: bool) -> None:
    """Makes a reference or teacher model compute in the dtypes of the policy.

    Args:
        run: The run.
        model: The reference or teacher model.
        policy: The policy model.
        is_reference: Whether it is the trainer's `ref_model`. Another model of the policy's class, such as a teacher,
            may have other layers, and is prepared in the same way if it has the policy's modules.
    """
    unpack(model)
    names = {*run.weights.fp32_modules, *(boundary.module for boundary in run.boundaries.operations)}
    has_modules = names <= {name for name, _ in model.named_modules()}
    is_reference = isinstance(policy, type(model)) and (is_reference or has_modules)
    if is_reference:
        remove_casts(model)
        prepare_reference(model, run.policy, tuple(run.settings.fp32_modules or ()))
    inventory = take_inventory(model)
    place(plan_boundaries(run.policy, inventory, run.casts_late, features=not run.joins_features), model)
    if is_reference:
        place(BoundaryPlan(run.boundaries.operations), model)
    make_computable(run, model, inventory)
    widened = any(boundary.module == EMBEDDINGS for boundary in run.boundaries.boundaries)
    if widened and rounds_in_embeddings(run.policy, take_inventory(model), run.casts_late):
        widen(run.boundaries, model, lambda: True)  # the policy model, of the same class, works with it


def check_fused_head(run: Run, guard: AdapterGuard, model: nn.Module) -> None:
    """Raises `PrecisionError` for a float32 head that this TRL bypasses by multiplying with its weight directly."""
    autocast = run.policy.autocast.value
    if guard.chunked and autocast is not None and covers_head(model, run.weights.fp32_modules):
        given = f"fp32_modules with the head under {autocast} autocast"
        raise PrecisionError([refuse("fused-head-is-not-float32", given)])


def unify_mixed_weights(run: Run, model: nn.Module, media_processor: Callable[[], Any]) -> None:
    """Runs a trial forward pass of a model with weights of several dtypes, and casts as few as possible if it fails.

    The trial uses the kind of input that the dataset has; `media_processor` returns `None` for text. Raises
    `PrecisionError` if the model still cannot compute.
    """
    packed = bool(run.inventory.elements["quantized"]) and has_packed_towers(model)
    if not packed and not _has_mixed_dtypes(run, model, run.inventory):
        return
    media = media_processor()
    if packed and media is not None:
        refuse_packed_casts(model, media, run.trainer.media_keys, run.policy.autocast.value)
    plan = make_computable(run, model, run.inventory, media)
    if plan is not None:
        run.weights = run.weights.with_layout(plan)
        place_boundaries(run, model, take_inventory(model))
    if rounds_in_embeddings(run.policy, run.inventory, run.casts_late):
        autocast = run.policy.autocast.value
        run.boundaries = widen(run.boundaries, model, lambda: trial_error(model, media, autocast) is None)


def match_operations(run: Run, model: nn.Module, media_processor: Callable[[], Any]) -> None:
    """Runs a sample image or sound through a model in half precision, and casts where operations get two dtypes.

    Raises `PrecisionError` if the model cannot compute with media.
    """
    autocast = run.policy.autocast.value
    half = autocast is not None or bool(run.inventory.weights & HALVES)
    if not half or not takes_media(model, run.trainer.media_keys):
        return
    media = media_processor()
    if media is None:
        return
    if not run.settings.media_trial:
        run.media_trial = Trial(skipped="`media_trial=False`")
    elif run.casts_late:
        run.media_trial = Trial(skipped="an engine casts the weights later")
    else:
        dtype = None if autocast is None else to_torch(autocast)
        run.boundaries, run.media_trial = cast_operations(run.boundaries, model, media, dtype)
    error, function = run.media_trial.error, run.media_trial.function
    if error is not None:
        given = f"{type(unwrap(model)).__name__} with media " + (
            "without autocast" if autocast is None else f"under {autocast} autocast"
        )
        device = next(model.parameters()).device.type
        fix = "train in float32: `bf16=False, fp16=False`, and `dtype='float32'` where the model is loaded"
        if function is not None and autocast is not None:
            fix = (
                f"decorate `forward` of `{function}` with `@torch.amp.custom_fwd(device_type={device!r})`, and its "
                f"`backward` with `@torch.amp.custom_bwd(device_type={device!r})`; or {fix}"
            )
        raise PrecisionError([refuse("media-cannot-compute", given, error=error, fix=fix)])


def _has_media(dataset: Any) -> bool:
    """Whether a dataset has columns with images or audio."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and isinstance(dataset, IterableDataset):
        columns = next(iter(dataset), {})  # each `iter` restarts the stream, so no row is lost
    return bool(_MEDIA_COLUMNS & set(columns or ()))


def _has_mixed_dtypes(run: Run, model: nn.Module, inventory: ModelInventory) -> bool:
    """Whether weights of different dtypes may meet; LoRA weights do not count, since PEFT casts their inputs."""
    dtypes = _dtypes_that_meet(run, model, inventory)
    return len(dtypes) > 1 and bool(dtypes & HALVES)


def _dtypes_that_meet(run: Run, model: nn.Module, inventory: ModelInventory) -> set[str]:
    """Returns the dtypes of weights that may meet, and of autocast if it does not cast all of them."""
    autocast = run.policy.autocast.value
    others = {config.peft_type for config in getattr(model, "peft_config", {}).values()} - {"LORA"}
    dtypes = {*inventory.elements["weights"], *(inventory.elements["adapters"] if others else ())}
    if inventory.quantization is None and autocast is not None and dtypes & HALVES:
        dtypes.add(autocast)  # outputs of autocast operations meet weights that autocast does not cast
    return dtypes


def make_computable(
    run: Run, model: nn.Module, inventory: ModelInventory, processing_class: Any = None
) -> unify_dtypes.CastPlan | None:
    """Casts weights of a model with mixed dtypes until a trial forward pass succeeds.

    Args:
        run: The run.
        model: The model.
        inventory: The model's inventory.
        processing_class: The processor, if the run has images or audio.

    Returns:
        The casts, or `None` if all weights have one dtype.

    Raises:
        PrecisionError: If the trial fails with every possible cast.
    """
    autocast = run.policy.autocast.value
    if not _has_mixed_dtypes(run, model, inventory):
        return None
    plan = unify_dtypes.make_computable(
        model,
        run.policy.compute.value,
        lambda: trial_error(model, processing_class, autocast),
        keep=run.weights.fp32_modules,
    )
    if plan.error is not None and release_features(find_parts(model)):
        # The model may join features before it casts them; autocast rejects `cat` of two half-precision dtypes.
        run.joins_features = trial_error(model, processing_class, autocast) is None
        plan = plan.without_error() if run.joins_features else plan
    if plan.error is not None and len(_dtypes_that_meet(run, model, inventory) & HALVES) == 1:
        dtype = None if autocast is None else to_torch(autocast)
        boundaries, trial = cast_operations(BoundaryPlan(()), model, processing_class, dtype)
        if trial.error is None and trial.skipped is None:
            plan = plan.without_error()
            if model is run.model:
                run.boundaries = BoundaryPlan((*run.boundaries.boundaries, *boundaries.boundaries))
    if plan.error is not None:
        trainer_class = type(run.trainer)
        device = trainer_class.precision_device(run.args)
        switches = autocast_switches(requested_by(run.args, trainer_class), device)
        problem = unify_dtypes.dtype_conflict(model, processing_class, inventory, autocast, switches, plan.error)
        raise PrecisionError([problem])
    return plan


def check_accelerator(run: Run) -> None:
    """Raises `PrecisionError` if the accelerator that was built does not match the policy."""
    accelerator, problems = run.accelerator, []
    actual = accelerator.mixed_precision
    autocast = run.policy.autocast.value
    expected = "no" if autocast is None else FLAG_OF[autocast]
    silent_fp16 = actual == "fp16" and not accelerator.native_amp
    if actual != expected and not silent_fp16:
        given = f"the training arguments ask for mixed precision {expected!r}"
        problems.append(refuse("accelerator-disagrees", given, actual=actual))
    raise_if([*problems, *distributed.mixed_dtype_units(run.model, accelerator)])

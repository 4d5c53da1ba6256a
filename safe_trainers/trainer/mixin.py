"""`PrecisionMixin`, the class above TRL's trainer.

```
SafeGRPOTrainer -> PrecisionMixin -> ExactCheckpoints -> GRPOTrainer -> trl _BaseTrainer -> PrecisionBase -> Trainer
```

`PrecisionMixin` overrides the methods that users and TRL call on `self`, and passes each call to the features of the
run. `PrecisionBase` (base.py) receives the calls that TRL makes through `super()`, which skip the classes above TRL.
"""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from datasets.fingerprint import Hasher
from torch import nn
from transformers import TrainerCallback, TrainingArguments, set_seed

from ..boundaries.lora_inputs import LoraInputs
from ..checkpoint.mixin import ExactCheckpoints
from ..checkpoint.trainer_state import TrainerState
from ..core.errors import ContractError, raise_if
from ..core.feature import Feature, Run
from ..core.phase_clock import OPTIMIZER, REFERENCE, SCORING
from ..core.trl import trl_bases
from ..diff.feature import RunRecorder
from ..experts.routes import ExpertRoutes
from ..media.frozen_towers import FrozenTowers
from ..media.inputs import MediaInputs
from ..media.shared_features import SharedFeatures
from ..model import input_gradients
from ..model.parts import is_reference, unwrap
from ..numerics.finite_watch import FiniteWatch
from ..numerics.loss_scale import keep_settings, reset_unusable_scale
from ..numerics.not_finite import NotFinite
from ..numerics.overflow_probe import OverflowProbe
from ..numerics.step_monitor import StepMonitor
from ..policy import distributed
from ..policy.settings import PrecisionSettings
from ..report.contract_watch import ContractWatch
from ..report.profiler import Profiler
from ..report.reporter import Reporter
from ..rollout.alignment import RolloutAlignment
from ..rollout.compiled_decode import CompiledDecode
from ..rollout.correction import RolloutCorrection
from ..rollout.kept_casts import KeptCasts
from ..rollout.mismatch_meter import MismatchMeter, check_reward_weights
from ..rollout.scoring_inputs import ScoringInputs
from ..rollout.truncation import TruncationCorrection
from ..rollout.turn_recorder import TurnRecorder
from ..weights import fp32_modules
from ..weights.cast import weights_restored
from .base import prepare_other_model
from .coverage import check_bases
from .fingerprint import SameOnAllRanks
from .from_config import (
    check_adapters,
    check_loading,
    choose_load_dtype,
    declared_policy,
    own_model_init_kwargs,
    read_torch_dtype,
    spell_dtype_for_trl,
)
from .precision import Precision
from .shared_model import Placements, taken_over
from .signature import bind_arguments, default_output_dir, move_quantization_config, signature_of, takes_others
from .trl_patches import compute_redirected_in_autocast, construction


class PrecisionMixin(ExactCheckpoints):
    """The class above TRL's trainer. It overrides the methods that users and TRL call on `self`.

    To train any TRL algorithm at the right precision, write
    `class SafeX(PrecisionMixin, XTrainer, PrecisionBase): ...`.

    Attributes:
        config_class: The config class to use if a trainer is built without `args`.
        features: The feature classes of a run, outermost first. A subclass can add its own:
            `features = (*PrecisionMixin.features, MyFeature)`.
    """

    config_class: ClassVar[type | None] = None
    features: ClassVar[tuple[type[Feature], ...]] = (
        Profiler,
        SameOnAllRanks,
        MediaInputs,
        FrozenTowers,
        SharedFeatures,
        LoraInputs,
        RolloutAlignment,
        KeptCasts,
        CompiledDecode,
        ScoringInputs,
        TruncationCorrection,
        RolloutCorrection,
        TurnRecorder,
        MismatchMeter,
        ContractWatch,
        Reporter,
        OverflowProbe,
        NotFinite,
        FiniteWatch,
        StepMonitor,
        ExpertRoutes,
        RunRecorder,
    )
    _side = "above"
    __signature__: ClassVar[inspect.Signature]

    # Attributes of `Trainer`, declared for the type checker.
    control: Any
    callback_handler: Any
    is_in_train: bool

    _prepared: list[nn.Module]
    _hashed: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls)
        cls.__signature__ = signature_of(cls.__mro__)  # for `help` and editors

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Gives the trainer its run, which has no features until the model exists."""
        made = super().__new__(cls)
        made._run, made._prepared, made._hashed = Run(made), [], False
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mro = type(self).__mro__
        below = mro[mro.index(ExactCheckpoints) + 1 :]
        signature = signature_of(below)
        arguments = bind_arguments(signature, args, kwargs, takes_others(below))
        run = self._run
        self._trainer_state = TrainerState(run, self.exact_state)
        run.model_is_live = isinstance(arguments.get("model"), nn.Module)
        run.reference_is_live = isinstance(arguments.get("ref_model"), nn.Module)
        if arguments.get("args") is None and self.config_class is not None:
            arguments["args"] = self.config_class(default_output_dir(arguments.get("model"), type(self)))
        with own_model_init_kwargs(arguments.get("args")):
            self._construct(signature, arguments)

    def _construct(self, signature: inspect.Signature, arguments: dict[str, Any]) -> None:
        """Checks the arguments, completes them, calls TRL's constructor, and prepares its models."""
        run = self._run
        if isinstance(arguments.get("args"), TrainingArguments):
            read_torch_dtype(arguments["args"])
            check_loading(arguments, type(self))
            quantization = arguments.get("quantization_config")
            declared = declared_policy(arguments["args"], arguments.get("model"), type(self), quantization)
            raise_if([*declared.problems, *distributed.engine_conflicts(arguments["args"], declared)])
            choose_load_dtype(arguments, declared)
            spell_dtype_for_trl(arguments["args"])
            seed = arguments["args"].seed
            if isinstance(arguments["args"], PrecisionSettings):  # as newer releases of TRL do for all configs
                set_seed(seed)
        check_reward_weights(arguments.get("args"))
        arguments = move_quantization_config(signature, arguments)
        check_adapters(arguments.get("model"), arguments.get("peft_config"))
        with taken_over(arguments):
            with construction(
                type(self),
                arguments.get("model"),
                partial(self._float32_head, patterns=getattr(arguments.get("args"), "fp32_modules", None) or ()),
                self._engine_kwargs,
            ) as self._adapter_guard:
                super().__init__(**arguments)
            if run.begun:  # TRL's `PPOTrainer` does not call `Trainer.__init__`, where the run begins
                self._prepare_models()

    def _prepare_models(self) -> None:
        """Prepares what needs the whole trainer: reference and teacher models, heads in float32, and the features."""
        run = self._run
        self._prepare_others()
        if getattr(self.args, "cast_lm_head_to_fp32", False):
            for owner in (self.model, getattr(self, "ref_model", None)):  # TRL casts the heads of these two
                base: Any = None if owner is None else unwrap(owner)
                head = None if base is None else base.get_output_embeddings()
                if head is not None:  # autocast in rollouts would round the output of the float32 head
                    fp32_modules.without_autocast(head)
        distributed.wrap_forward_in_autocast(self.model, self.accelerator)
        compute_redirected_in_autocast(self)
        input_gradients.keep_hooks_single(self.model)
        run.tell("ready")
        self._placements = Placements(run)

    def _prepare_others(self) -> None:
        """Prepares the reference and teacher models that were not prepared yet."""
        policy, *others = self._run.feature(MediaInputs).models()
        reference = getattr(self, "ref_model", None)
        for model in others:
            if not any(model is prepared for prepared in self._prepared):
                prepare_other_model(self._run, model, policy, reference is not None and model is unwrap(reference))
                self._prepared.append(model)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares the reference model, which TRL calls before its `__init__` ends, and computes log-probabilities.

        The hash with which TRL names the file of the results gets what they depend on besides the weights.
        """
        if not self._hashed:
            self._prepare_others()
            policy = self._run.policy
            given = (policy.compute.text, policy.autocast.text, *self._run.weights.fp32_modules)
            weights = getattr(self, "_precompute_model_hash", None)
            if weights is not None:
                self._precompute_model_hash = Hasher.hash((weights, given))
            self._hashed = True
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    @property
    def precision(self) -> Precision:
        """The run's policy, weights, boundaries, measurements and report, read only."""
        return Precision(self._run)

    def _float32_head(self, model: nn.Module, patterns: Sequence[str]) -> Any:
        """Whether `fp32_modules` covers the head of a model that TRL fuses; TRL asks it in each forward pass."""
        return fp32_modules.covers_head(model, fp32_modules.find_modules(model, patterns))

    def _engine_kwargs(self, module: str, arguments: dict[str, Any]) -> dict[str, Any]:
        for feature in self._run.having("engine_kwargs"):
            arguments = dict(feature.engine_kwargs(module, arguments))
        return arguments

    # ---- Training ----

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None, **kwargs: Any
    ) -> Any:
        """Trains, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: The folder of a checkpoint, or `True` for the latest complete checkpoint in
                `output_dir`. By default training starts from step 0.
            trial: The trial of a hyperparameter search.
            ignore_keys_for_eval: Keys of the model's outputs that evaluation ignores.
            **kwargs: Passed to `Trainer.train`.

        Returns:
            The `TrainOutput` of `Trainer.train`.

        Raises:
            CheckpointError: If the checkpoint is truncated, damaged or unreadable, or `True` finds no complete one.
                Nothing has been loaded or written at that point.
            ContractError: If TRL's trainer was built without `Trainer.__init__`, as `PPOTrainer` is.
            PrecisionError: If a feature stops the run: the first batch overflows float16, or
                `max_consecutive_skips` optimizer steps in a row were skipped.
        """
        if not self._run.begun:
            trainers = " and ".join(base.__name__ for base in trl_bases(type(self))[:1])
            raise ContractError(
                f"{type(self).__name__} cannot train: {trainers} was built without `Trainer.__init__`, where the "
                f"precision of a run is decided. Use {trainers} itself"
            )
        self._run.wake()
        self._placements.check()
        chosen = self._choose_checkpoint(resume_from_checkpoint)
        if not any(isinstance(callback, _Events) for callback in self.callback_handler.callbacks):
            # First in the list, so that the user's callbacks see the features' results of the step.
            self.callback_handler.callbacks.insert(0, _Events(self._run, self._trainer_state))
        try:
            self._run.tell("on_train_begin")
            result = super().train(chosen, trial, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]
        finally:
            self._trainer_state.forget()
            self._run.tell("on_train_exit")
        self._run.tell("on_train_end")
        return result

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss, inside the features' `around_loss`."""
        inputs = self._run.through("on_loss_inputs", inputs)
        self._run.loss_inputs = inputs if isinstance(inputs, Mapping) else {}
        method = super().compute_loss  # type: ignore[misc]
        try:
            return self._run.around("around_loss", partial(method, model, inputs, *args, **kwargs))
        finally:
            self._run.loss_inputs = {}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates, inside the features' `around_evaluation`.

        With `bf16_full_eval` or `fp16_full_eval`, transformers casts the model in place if it does not train; the
        weights are restored afterwards, and so is what was found out about them.
        """
        self._placements.check()
        method = super().evaluation_loop  # type: ignore[misc]
        casts = not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval)
        with contextlib.ExitStack() as stack:
            if casts:
                stack.enter_context(weights_restored(self.model, exempt=self._run.weights.fp32_modules))
                stack.enter_context(self._run.other_weights())
            return self._run.around("around_evaluation", partial(method, *args, **kwargs))

    # ---- Rollouts ----

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Generates and scores a batch, inside the features' `around_batch`.

        The features cast images and audio to their tower's dtype before TRL buffers and slices the batch, and compare
        the sampler's log-probabilities with the trainer's. A subclass may change the batch that `super()` returns.

        Returns:
            TRL's batch, or a copy of the mapping with changed entries.
        """
        method = super()._generate_and_score_completions  # type: ignore[misc]
        return self._run.around("around_batch", partial(method, *args, **kwargs))

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generates one turn, inside the features' `around_rollout`."""
        self._run.tell("before_rollout", args[0] if args else kwargs.get("prompt_ids"))
        method = super()._generate_single_turn  # type: ignore[misc]
        return self._run.around("around_rollout", partial(method, *args, **kwargs))

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Computes log-probabilities of completions, inside the features' `around_scoring`."""
        names = ("model", "input_ids", "attention_mask", "logits_to_keep")
        scored = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        model = scored.get("model")
        self._run.scores_policy = not (isinstance(model, nn.Module) and is_reference(model, self.model))
        self._run.tell("before_scoring", scored)
        method = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        phase = SCORING if self._run.scores_policy else REFERENCE
        return self._run.around("around_scoring", partial(method, *args, **kwargs), phase)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the rewards, inside the features' `around_rewards`."""
        method = super()._calculate_rewards  # type: ignore[misc]
        return self._run.around("around_rewards", partial(method, *args, **kwargs))

    # ---- Logs, checkpoints, model card ----

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Lets the features combine their measurements over all ranks before a log."""
        if self.control.should_log or self.control.should_training_stop:  # the same on all ranks
            self._run.tell("before_log", "train")
        self._run.tell("on_grad_norm", grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the metrics of the features to `logs`, and logs them.

        Args:
            logs: Values by name; changed in place.
            *args: Passed to `Trainer.log`.
            **kwargs: Passed to `Trainer.log`.
        """
        mode = "train" if "train_loss" in logs else self._run.mode
        logs.update(self._run.metrics(logs, mode))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restores the loss scaler, except for a scale that is out of range, and settings that the config contains."""
        scaler = self.accelerator.scaler
        initial = None if scaler is None else scaler.get_scale()
        super()._load_scaler(checkpoint)
        if initial is not None:
            reset_unusable_scale(scaler, initial, checkpoint)
            keep_settings(scaler, self.args, checkpoint)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes TRL's model card; the features may then add to the file."""
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        self._run.tell("on_model_card", Path(self.args.output_dir, "README.md"))


class _Events(TrainerCallback):
    """Passes the events of the training loop to the features."""

    def __init__(self, run: Run, trainer_state: TrainerState) -> None:
        self._run, self._trainer_state = run, trainer_state

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run.clock is not None:
            self._run.clock.start()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer_state.begin_epoch(kwargs.get("train_dataloader"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.tell("on_step_begin")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.loss_scale.before_step()
        self._run.gradient_norm.before_step()
        self._run.tell("before_step")
        if self._run.clock is not None:
            self._run.clock.begin(OPTIMIZER)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run.clock is not None:
            self._run.clock.end()
        late = self._run.gradient_norm.after_step()
        skipped = self._run.loss_scale.after_step() or late
        self._run.skipped_in_a_row = self._run.skipped_in_a_row + 1 if skipped else 0
        self._run.tell("after_step", skipped)

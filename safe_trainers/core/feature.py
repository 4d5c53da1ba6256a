"""A run consists of features, each one capability with hooks that do nothing by default, which share one `Run`.

`PrecisionMixin.features` lists those of a trainer, outermost first. The around-hooks are middleware: each receives the
rest of the chain as `call`, and may run it, run it again, or raise an error.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from . import phase_clock
from .coverage import SafetyContract
from .errors import PrecisionWarning, Problem, level_of_user
from .phase_clock import PhaseClock


if TYPE_CHECKING:
    from ..boundaries.placement import BoundaryPlan
    from ..model.inventory import ModelInventory
    from ..policy.distributed import Engine
    from ..policy.resolve import PrecisionPolicy
    from ..policy.settings import PrecisionSettings
    from ..weights.prepare import PreparedWeights

_FeatureT = TypeVar("_FeatureT", bound="Feature")
_PHASES = {
    "around_batch": phase_clock.BATCH,
    "around_rollout": phase_clock.ROLLOUT,
    "around_scoring": phase_clock.SCORING,
    "around_rewards": phase_clock.REWARDS,
    "around_loss": phase_clock.LOSS,
    "around_evaluation": phase_clock.EVALUATION,
}
"""The phase of the method of TRL inside each around-hook."""


class Feature:
    """One capability of a run. A subclass overrides the hooks that it needs.

    Args:
        run: The run. Its settings and its model are set; the policy is resolved before `check` is called.

    Attributes:
        name: Key of the feature's state in checkpoints; features without state need none.
        about_weights: Attributes with what was found out about the model's weights, and what makes empty ones.
        run: The run.
    """

    name: ClassVar[str] = ""
    about_weights: ClassVar[Mapping[str, Callable[[], Any]]] = {}

    def __init__(self, run: "Run") -> None:
        self.run = run

    # ---- Construction ----

    def check(self, model: Any) -> Iterable[Problem]:
        """Returns the problems of the loaded model, before an optimizer or an engine exists.

        Args:
            model: The policy model; its weights have their final dtypes.

        Returns:
            Refusals, which are raised together with those of other features, and warnings.
        """
        return ()

    def engine_kwargs(self, module: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the keyword arguments to use for a vLLM engine that TRL builds.

        Args:
            module: Name of the module that builds the engine.
            arguments: TRL's keyword arguments.
        """
        return arguments

    def ready(self) -> None:
        """Called at the end of construction, when the trainer and its engine exist."""

    # ---- Training ----

    def rest(self, *hooks: str) -> None:
        """Leaves this feature out of hooks until `train` is called again, if it has nothing to do in them.

        Args:
            *hooks: Names of the hooks.
        """
        self.run.leave_out(self, hooks)

    def on_train_begin(self) -> None:
        """Called when `train` begins, before a checkpoint is loaded, and when `auto_find_batch_size` begins again."""

    def on_train_end(self) -> None:
        """Called after `on_train_exit` if `train` has ended without an error."""

    def on_train_exit(self) -> None:
        """Called when `train` ends, also with an error, to remove what a feature has attached to the model."""

    def on_step_begin(self) -> None:
        """Called before the first micro-batch of an optimizer step, and before its rollout."""

    def before_step(self) -> None:
        """Called before an optimizer step, when the gradients are final."""

    def after_step(self, skipped: bool) -> None:
        """Called after an optimizer step.

        Args:
            skipped: Whether the step was skipped because gradients were not finite.
        """

    def on_grad_norm(self, norm: Any) -> None:
        """Called with the gradient norm of a step, before it is logged.

        Args:
            norm: A number or a tensor of one element; `None` if it is unknown.
        """

    # ---- Around methods of TRL: `call` runs the inner features and TRL's method, and returns its result ----

    def before_rollout(self, prompt_ids: Any) -> None:
        """Called before each turn of generation.

        Args:
            prompt_ids: Token ids of each prompt.
        """

    def before_scoring(self, inputs: Mapping[str, Any]) -> None:
        """Called before completions are scored.

        Args:
            inputs: The first arguments of the scoring method by name: `model`, `input_ids` and `attention_mask`,
                (B, P + C), and `logits_to_keep`, C.
        """

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Wraps `_generate_and_score_completions`: a rollout batch, before TRL buffers and slices it."""
        return call()

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Wraps `_generate_single_turn`: one turn of generation."""
        return call()

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Wraps `_get_per_token_logps_and_entropies`: log-probabilities of completions, in rollouts and in losses."""
        return call()

    def around_rewards(self, call: Callable[[], Any]) -> Any:
        """Wraps `_calculate_rewards`: the rewards of all ranks by function, (N, F)."""
        return call()

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Wraps `compute_loss`, in training and in evaluation."""
        return call()

    def around_evaluation(self, call: Callable[[], Any]) -> Any:
        """Wraps `evaluation_loop`."""
        return call()

    def on_loss_inputs(self, inputs: Any) -> Any:
        """Changes the inputs of a loss, in training and in evaluation. `Run.loss_inputs` has the result.

        Args:
            inputs: The slice of the batch, usually a mapping; must not be modified.

        Returns:
            The inputs to use.
        """
        return inputs

    def on_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Changes the inputs that were prepared for a model.

        Args:
            inputs: The inputs by name; must not be modified.

        Returns:
            The inputs to use.
        """
        return inputs

    # ---- Logs ----

    def before_log(self, mode: str) -> None:
        """Called on every rank before a log, so that collective operations are possible.

        Args:
            mode: `"train"` or `"eval"`.
        """

    def on_log(self, logs: Mapping[str, float], mode: str) -> Mapping[str, float]:
        """Returns metrics to add to a log.

        Args:
            logs: The logged metrics.
            mode: `"train"` or `"eval"`.

        Returns:
            The metrics by name.
        """
        return {}

    def on_finding(self, problem: Problem) -> None:
        """Called when a feature has found the cause of a fault during training.

        Args:
            problem: What was found, and what to write instead.
        """

    def on_model_card(self, path: Path) -> None:
        """Called after TRL has written the model card.

        Args:
            path: Path of the card.
        """

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs: tensors, numbers, strings, lists and mappings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint.

        Args:
            state: What `state_dict` returned.
        """


class Run:
    """The state of one run that its features share.

    Args:
        trainer: The trainer; its construction may not be complete yet.

    Attributes:
        trainer: The trainer.
        args: The training arguments.
        settings: The precision settings.
        policy: The dtypes of the run, each with its reason.
        inventory: The dtypes of the model.
        weights: The casts of weights.
        boundaries: The dtype boundaries in the model.
        engine: The engine that runs the model in several processes, and its dtypes.
        coverage: The guarantees of the trainer class, and which hooks have fired.
        gradient_norm: Skips steps whose gradients are not finite (`numerics.gradient_norm.GradientNorm`).
        preparation: Prepares models that other accelerators have prepared (`policy.distributed.OwnPreparation`).
        features: The features, outermost first.
        scored_at: The step in which the last rollout batch was scored, by mode.
        skipped_in_a_row: Optimizer steps skipped since the last one that was applied.
        skip_cause: What was found about the last skipped steps; `None` if nothing was, or the last step was applied.
        findings: What features have found during training, in order.
        loss_scale: The monitor of the loss scale (`numerics.loss_scale.LossScaleWatch`).
        casts_late: Whether an engine (DeepSpeed) casts the weights after the inventory was taken.
        joins_features: Whether the model concatenates features before it casts them itself.
        media_trial: The result of the trial with a sample image or sound; `None` if the run needs none.
        model_is_live: Whether the user passed a model, not the name of one.
        reference_is_live: Whether the user passed a `ref_model`.
        clock: Measures the phases of a step; `None` unless the run is profiled.
        loss_inputs: The inputs of the loss that is being computed, by name; empty outside of losses.
        replaying: Whether a loss is being computed again, to find what was not finite.
        scores_policy: Whether the policy is being scored, and not a reference or teacher model.
    """

    args: Any
    settings: "PrecisionSettings"
    policy: "PrecisionPolicy"
    inventory: "ModelInventory"
    weights: "PreparedWeights"
    boundaries: "BoundaryPlan"
    engine: "Engine"
    coverage: SafetyContract
    loss_scale: Any
    gradient_norm: Any
    preparation: Any

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.features: tuple[Feature, ...] = ()
        self.scored_at: dict[str, int] = {}
        self.skipped_in_a_row = 0
        self.skip_cause: Problem | None = None
        self.findings: list[Problem] = []
        self.casts_late = self.joins_features = self.model_is_live = self.reference_is_live = self.replaying = False
        self.media_trial: Any = None
        self.clock: PhaseClock | None = None
        self.loss_inputs: Mapping[str, Any] = {}
        self.scores_policy = True
        self._model: Any = None
        self._by_hook: dict[str, tuple[Feature, ...]] = {}
        self._warned: set[str] = set()

    def begin(self, model: Any, args: Any, settings: "PrecisionSettings", features: Sequence[type[Feature]]) -> None:
        """Creates the features.

        Args:
            model: The policy model.
            args: The training arguments.
            settings: The precision settings.
            features: The classes of the features, outermost first.
        """
        self._model, self.args, self.settings = model, args, settings
        self.features = tuple(feature(self) for feature in features)
        self._by_hook.clear()

    @property
    def begun(self) -> bool:
        """Whether the model exists and the features have been created."""
        return "settings" in vars(self)

    # ---- For features ----

    @property
    def model(self) -> Any:
        """The policy model, possibly wrapped."""
        return getattr(self.trainer, "model", self._model)

    @property
    def accelerator(self) -> Any:
        """The trainer's accelerator."""
        return self.trainer.accelerator

    @property
    def step(self) -> int:
        """The number of optimizer steps so far."""
        return int(self.trainer.state.global_step)

    @property
    def mode(self) -> str:
        """`"train"` or `"eval"`, as TRL decides it."""
        return "train" if self.model.training else "eval"

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return bool(self.args.process_index == 0)

    @property
    def sharded(self) -> str | None:
        """The engine that shards the weights, `"FSDP"` or `"ZeRO-3"`; `None` if each process has all of them."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            return "ZeRO-3"
        return "FSDP" if self.trainer.is_fsdp_enabled else None

    def feature(self, kind: type[_FeatureT]) -> _FeatureT:
        """Returns the run's feature of a class.

        Args:
            kind: The class of the feature, or a base class. Another class raises `KeyError`.
        """
        for feature in self.features:
            if isinstance(feature, kind):
                return feature
        raise KeyError(f"{type(self.trainer).__name__}.features has no {kind.__name__}")

    def log_metric(self, name: str, values: Iterable[float]) -> None:
        """Adds values to TRL's metrics, which TRL averages in the next log. Does nothing if the trainer has none.

        Args:
            name: Name of the metric.
            values: Its values.
        """
        metrics = getattr(self.trainer, "_metrics", None)
        of_mode = metrics.get(self.mode) if isinstance(metrics, Mapping) else None
        if isinstance(of_mode, MutableMapping):
            of_mode.setdefault(name, []).extend(values)

    def warn_once(self, problem: Problem, key: str | None = None) -> None:
        """Gives a warning, once and on the main process only.

        Args:
            problem: The problem.
            key: Problems with the same key are given once; by default the id.
        """
        key = key or problem.id or problem.what
        if key not in self._warned and self.is_main:
            warnings.warn(str(problem), PrecisionWarning, stacklevel=level_of_user())
        self._warned.add(key)

    def note(self, problem: Problem) -> None:
        """Adds a finding to the report of the run.

        Args:
            problem: What was found, and what to write instead.
        """
        if problem not in self.findings:
            self.findings.append(problem)
            self.tell("on_finding", problem)

    # ---- For the trainer ----

    def around(self, hook: str, call: Callable[[], Any], phase: str | None = None) -> Any:
        """Runs a call inside an around-hook of all features.

        Args:
            hook: Name of the hook.
            call: The innermost call.
            phase: The phase of the innermost call, if it is not the hook's usual one.

        Returns:
            The result of the outermost feature.
        """
        if self.clock is not None:
            call = partial(self.in_phase, phase or _PHASES[hook], call)
        for feature in reversed(self.having(hook)):
            call = partial(getattr(feature, hook), call)
        return call() if self.clock is None else self.in_phase(phase_clock.FEATURES, call)

    def in_phase(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Runs a call as a phase, if the run is profiled.

        Args:
            name: One of `phase_clock.PHASES`.
            call: The call.
            *args: Its arguments.

        Returns:
            The result of the call.
        """
        if self.clock is None:
            return call(*args)
        with self.clock.phase(name):
            return call(*args)

    def tell(self, hook: str, *args: Any) -> None:
        """Calls a hook of all features.

        Args:
            hook: Name of the hook.
            *args: Its arguments.
        """
        for feature in self.having(hook):
            self.in_phase(phase_clock.FEATURES, getattr(feature, hook), *args)

    def through(self, hook: str, value: Any) -> Any:
        """Passes a value through a hook of all features, outermost first; returns the last result.

        Args:
            hook: Name of the hook, which takes and returns the value.
            value: The value.
        """
        for feature in self.having(hook):
            value = self.in_phase(phase_clock.FEATURES, getattr(feature, hook), value)
        return value

    def metrics(self, logs: Mapping[str, float], mode: str) -> dict[str, float]:
        """Returns the metrics that the features add to a log, each of which sees those of the features before it.

        Args:
            logs: The logged metrics.
            mode: `"train"` or `"eval"`.
        """
        added: dict[str, float] = {}
        for feature in self.having("on_log"):
            added |= self.in_phase(phase_clock.FEATURES, feature.on_log, {**logs, **added}, mode)
        return added

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """Lets the features forget what they know of the model's weights, which are others while the block runs."""
        kept = [(vars(f), {name: getattr(f, name) for name in f.about_weights}) for f in self.features]
        try:
            for feature in self.features:
                vars(feature).update({name: empty() for name, empty in feature.about_weights.items()})
            yield
        finally:
            for attributes, found in kept:
                attributes.update(found)

    def wake(self) -> None:
        """Returns all features to the hooks that they were left out of."""
        self._by_hook.clear()

    def leave_out(self, feature: Feature, hooks: Iterable[str]) -> None:
        """Leaves a feature out of hooks; see `Feature.rest`.

        Args:
            feature: The feature.
            hooks: Names of the hooks.
        """
        for hook in hooks:
            self._by_hook[hook] = tuple(other for other in self.having(hook) if other is not feature)

    def having(self, hook: str) -> tuple[Feature, ...]:
        """Returns the features that override a hook and do not rest in it, in their order.

        Args:
            hook: Name of the hook.
        """
        if hook not in self._by_hook:
            found = (f for f in self.features if getattr(type(f), hook) is not getattr(Feature, hook))
            self._by_hook[hook] = tuple(found)
        return self._by_hook[hook]

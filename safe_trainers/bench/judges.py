"""Measures faults of a run on the live trainer, in the same way for every trainer class."""

import contextlib
import copy
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainerCallback

from .. import MEDIA_KEYS
from ..core.errors import PrecisionError, PrecisionWarning, SafeTrainersError
from ..core.messages import WARNINGS
from ..testing import ComputeProbe
from .rules import limit_of, rules


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAGS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEARNING_RATE = 1e-5
"""A common learning rate for RL with adapters, at which most updates of a bfloat16 adapter round to zero."""
LOST_LIMIT = limit_of("adapters-rounded")
LOGP_LIMIT = {getattr(torch, name): limit for name, limit in rules()["log-probabilities"].values.items()}
"""Largest mean difference of log-probabilities from those of float32, relative to their size, by compute dtype."""
LOSS_SCALE = 2.0**8
"""The initial loss scale of the runs."""


class Combination(Protocol):
    """What the judges need to know about a run."""

    @property
    def weights(self) -> str:
        """The load dtype: `"fp32"`, `"bf16"` or `"fp16"`."""

    @property
    def flag(self) -> str:
        """`"bf16"`, `"fp16"` or `"none"`."""

    @property
    def kind(self) -> str:
        """`"full"`, `"lora"` or `"4bit"`."""


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        outcome: `"trained"`, `"refused"` (construction failed with a message for the user), `"crashed"`, or `"wrong"`
            (it trained with a fault).
        message: Type and first lines of an error; the whole message of a refusal.
        frame: The innermost frame of a crash.
        ids: The message ids of a refusal by this package.
        faults: The faults that were found.
        warned: The message ids of warnings.
        seconds: The duration.
    """

    outcome: str = "trained"
    message: str = ""
    frame: str = ""
    ids: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The attributes that are not empty, as JSON values."""
        return {key: value for key, value in asdict(self).items() if value or key == "outcome"}


def conclude(outcome: Outcome, said: list[warnings.WarningMessage], started: float) -> None:
    """Completes an outcome after its run.

    Args:
        outcome: The outcome, with its faults.
        said: The warnings of the run.
        started: When the run began, of `time.perf_counter`, in seconds.
    """
    if outcome.faults:
        outcome.outcome = "wrong"
    precision = [str(entry.message) for entry in said if issubclass(entry.category, PrecisionWarning)]
    outcome.warned = sorted({found for text in precision for found in findings_in(text)})
    outcome.seconds = round(time.perf_counter() - started, 2)


def fresh() -> None:
    """Resets the state that a failed step may leave: accelerate's singletons, and open autocast regions.

    transformers 4 also leaves the environment variable with the precision of the last config, which the next trainer
    of the process would use.
    """
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state(*([True] if state is AcceleratorState else []))
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)  # its default
    while torch.autocast_increment_nesting() > 1:
        torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def judge_error(error: Exception, built: bool, outcome: Outcome) -> None:
    """Distinguishes a refusal from a crash.

    Args:
        error: The error of a run.
        built: Whether the trainer had been constructed.
        outcome: The outcome, which is completed.
    """
    deliberate = isinstance(error, SafeTrainersError) or (not built and isinstance(error, (ValueError, ImportError)))
    text = f"{type(error).__name__}: {error}"
    if deliberate and not built:
        outcome.outcome, outcome.message = "refused", text
        if isinstance(error, PrecisionError):
            outcome.ids = [problem.id for problem in error.problems if problem.id]
        return
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = last.filename.rpartition("site-packages/")[2].removeprefix(f"{Path(__file__).parents[2]}/")
    outcome.outcome, outcome.message = "crashed", " ".join(text.split())[:300]
    outcome.frame = f"{place}:{last.lineno} in {last.name}"


def findings_in(text: str) -> Iterator[str]:
    """The warning ids in a message of this package.

    Args:
        text: The message.
    """
    return (found for found in WARNINGS if f"[{found}]" in text)


class Scaled(TrainerCallback):
    """Records the dtypes of trainable weights and gradients at each optimizer step.

    Attributes:
        dtypes: Dtypes of trainable weights.
        gradients: Dtypes of gradients.
    """

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Records one step."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.dtypes.add(parameter.dtype)
                if parameter.grad is not None:
                    self.gradients.add(parameter.grad.dtype)


def set_loss_scale(trainer: Any) -> None:
    """Sets the initial loss scale, because torch's would skip the first steps of some runs.

    Args:
        trainer: A trainer before training.
    """
    scaler = trainer.accelerator.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": LOSS_SCALE})


def judge_run(trainer: Any, cell: Combination) -> Iterator[tuple[str, str]]:
    """Trains, and yields the faults.

    Args:
        trainer: A trainer before training.
        cell: How it was built.

    Yields:
        The id of the rule, and what was measured.
    """
    for text in rounded_adapters(trainer, cell):
        yield "adapters-rounded", text
    probe, scaled, inputs = ComputeProbe(), Scaled(), Inputs()
    trainer.add_callback(scaled)
    set_loss_scale(trainer)
    with probe.attached(trainer), inputs.attached(trainer.model):
        trainer.train()
    if not scaled.gradients:
        yield "gradients", "no trainable weight has a gradient"
    if trainer.accelerator.scaler is not None and scaled.dtypes - {torch.float32}:
        yield "half-under-scaler", f"half trainables under a loss scaler: {names(scaled.dtypes)}"
    for text in probe.disagreements:
        yield "phases-differ", text
    for entry in trainer.state.log_history:
        broken = [key for key in ("loss", "grad_norm") if key in entry and not abs(float(entry[key])) < float("inf")]
        # With a loss scaler the first steps may overflow; they are skipped and the scale decreases.
        if broken and not (broken == ["grad_norm"] and trainer.accelerator.scaler is not None):
            yield "finite", f"{', '.join(broken)} not finite in step {entry.get('step')}"
    for text in inputs.narrowed(trainer, cell):
        yield "media-dtype", text
    for text in wrong_log_probabilities(trainer, inputs):
        yield "log-probabilities", text


def rounded_adapters(trainer: Any, cell: Combination) -> Iterator[str]:
    """Yields a fault if adapters that PEFT created in float32 were rounded, with the share of lost updates.

    Args:
        trainer: The trainer, before or after training.
        cell: How it was built.
    """
    if cell.kind == "full":
        return
    held = [p for n, p in trainer.model.named_parameters() if "lora_" in n and p.requires_grad]
    for dtype in sorted({p.dtype for p in held} - {torch.float32}, key=str):
        values = torch.cat([p.detach().double().flatten() for p in held if p.dtype == dtype])
        values = values[values != 0]
        stays = [
            ((values + step).to(dtype).double() == values).double().mean() for step in (LEARNING_RATE, -LEARNING_RATE)
        ]
        lost = float(sum(stays) / 2) if len(values) else 0.0
        if lost > LOST_LIMIT:
            yield f"adapters rounded to {names({dtype})}, which loses {lost:.0%} of the updates of {LEARNING_RATE:g}"


class Inputs:
    """Records the inputs of forward passes in training.

    Attributes:
        last: The inputs of the last forward pass with gradients.
        media: Dtypes of images and audio, by name.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self.media: dict[str, set[torch.dtype]] = {}

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Records a model's forward passes while the block runs.

        Args:
            model: The model.
        """
        handle = model.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for key, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and key in MEDIA_KEYS:
                self.media.setdefault(key, set()).add(value.dtype)
        if torch.is_grad_enabled() and "input_ids" in kwargs:
            keep = {k: v for k, v in kwargs.items() if k not in ("logits_to_keep", "labels")}
            self.last = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in keep.items()}

    def narrowed(self, trainer: Any, cell: Combination) -> Iterator[str]:
        """Yields a fault for media that were rounded below the compute dtype.

        Args:
            trainer: The trainer.
            cell: How it was built.
        """
        computes = FLAGS.get(cell.flag, DTYPES[cell.weights])
        for key, dtypes in self.media.items():
            for dtype in dtypes:
                if torch.finfo(dtype).eps > torch.finfo(computes).eps:
                    yield f"{key} was rounded to {names({dtype})}, and {names({computes})} computes on it"


def wrong_log_probabilities(trainer: Any, inputs: Inputs) -> Iterator[str]:
    """Compares the model's log-probabilities on the last training batch with those of a float32 copy.

    Quantised models and reward models are not compared.

    Args:
        trainer: The trainer after training.
        inputs: What its model was called with.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if inputs.last is None or any(p.dtype in (torch.uint8, torch.int8) for p in model.parameters()):
        return
    flag = trainer.accelerator.mixed_precision
    computes = FLAGS.get(flag) or max({p.dtype for p in model.parameters()}, key=lambda dtype: torch.finfo(dtype).eps)
    wide = {
        key: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for key, v in inputs.last.items()
    }
    with torch.no_grad():
        with torch.autocast("cpu", computes, enabled=flag != "no"):
            found = unfused(model)(**inputs.last).logits
        if found.ndim != 3:
            return
        expected = unfused(model).float()(**wide).logits.double().log_softmax(-1)
    distance = ((found.double().log_softmax(-1) - expected).abs().mean() / expected.abs().mean()).item()
    limit = LOGP_LIMIT[computes]
    if not distance <= limit:
        yield f"log-probabilities are off by {distance:.1e} of their size; {names({computes})} allows {limit:.1e}"


def unfused(model: Any) -> Any:
    """Copies a model without the `forward` of TRL and accelerate, which returns no logits.

    Args:
        model: The model.
    """
    twin = copy.deepcopy(model).eval()
    for module in (twin, twin.get_base_model() if hasattr(twin, "get_base_model") else twin):
        vars(module).pop("forward", None)
    return twin


def names(dtypes: set[torch.dtype]) -> str:
    """Names of dtypes, without `torch.`.

    Args:
        dtypes: The dtypes.
    """
    return ", ".join(sorted(str(dtype)[6:] for dtype in dtypes))

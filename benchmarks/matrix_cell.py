"""Runs one cell of the matrix: trains a tiny model for two steps with a stock or safe trainer, and judges the result.

Both trainers are judged by the same measurements of the live model, not by their own reports.
"""

import contextlib
import copy
import functools
import inspect
import io
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import families
import torch
import trl
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PrinterCallback, TrainerCallback

import safe_trainers
from safe_trainers.core.errors import PrecisionError, PrecisionWarning
from safe_trainers.testing import ComputeProbe, fp16_on_cpu


TRAINERS = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "reward": "Reward"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("full", "lora", "4bit")
FLAGS = ("bf16", "fp16", "none")
LEARNING_RATE = 1e-5
"""A common learning rate for RL with adapters, at which most updates of a bfloat16 adapter round to zero."""
LOST_LIMIT = 0.01
LOGP_LIMIT = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Largest mean difference of log-probabilities from those of float32, relative to their size: four units in the last
place of the half-precision formats. Correct computations stay below one."""


@dataclass(frozen=True)
class Cell:
    """A combination to train.

    Attributes:
        family: The model family.
        task: `"grpo"`, `"rloo"`, `"sft"` or `"reward"`.
        weights: The load dtype: `"fp32"`, `"bf16"` or `"fp16"`.
        flag: `"bf16"`, `"fp16"` or `"none"`.
        kind: `"full"`, `"lora"` or `"4bit"`.
        beta: The KL coefficient.
        spared: Layers that are not quantised, as suggested by a refusal.
    """

    family: str
    task: str
    weights: str
    flag: str
    kind: str
    beta: float = 0.0
    spared: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The cell's name in files and messages."""
        return "-".join((self.family, self.task, self.weights, self.flag, self.kind, f"beta{self.beta:g}"))


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


def run_cell(cell: Cell, safe: bool, **changes: Any) -> Outcome:
    """Builds a trainer and trains it, with the state of accelerate and autocast reset.

    Args:
        cell: The cell.
        safe: Whether to use the safe trainer instead of TRL's.
        **changes: Other training arguments.

    Returns:
        The result.
    """
    fresh()
    torch.manual_seed(0)
    outcome, started, trainer = Outcome(), time.perf_counter(), None
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            trainer = build(cell, safe, **changes)
            outcome.faults = list(dict.fromkeys(train(trainer, cell)))
        except Exception as error:  # every error is a result
            judge_error(error, built=trainer is not None, outcome=outcome)
    conclude(outcome, said, started)
    fresh()
    return outcome


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
    """Distinguishes a refusal from a crash."""
    deliberate = isinstance(error, safe_trainers.SafeTrainersError) or (
        not built and isinstance(error, (ValueError, ImportError))
    )
    text = f"{type(error).__name__}: {error}"
    if deliberate and not built:
        outcome.outcome, outcome.message = "refused", text
        if isinstance(error, PrecisionError):
            outcome.ids = [problem.id for problem in error.problems]
        return
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = last.filename.rpartition("site-packages/")[2].removeprefix(f"{Path(__file__).parents[1]}/")
    outcome.outcome, outcome.message = "crashed", " ".join(text.split())[:300]
    outcome.frame = f"{place}:{last.lineno} in {last.name}"


def findings_in(text: str) -> Iterator[str]:
    """The warning ids in a message of this package."""
    return (found for found in safe_trainers.WARNINGS if f"[{found}]" in text)


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="safe-trainers-matrix-")


@functools.cache
def folder(family: str) -> Path:
    """Saves a float32 model of the family."""
    return families.save(family, Path(_root().name) / family, seed=0)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between completions of random models, so that advantages and losses are not zero."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def build(cell: Cell, safe: bool, **changes: Any) -> Any:
    """Builds the trainer of a cell; both trainers get TRL's plain config."""
    processor, spec = families.build_processor(cell.family), families.family_spec(cell.family)
    name = TRAINERS[cell.task]
    config = (
        getattr(safe_trainers, f"Safe{name}Config")
        if changes.pop("safe_config", False)
        else getattr(trl, f"{name}Config")
    )
    settings: dict[str, Any] = {
        "output_dir": str(Path(_root().name) / "out"),
        "use_cpu": True,
        "bf16": cell.flag == "bf16",
        "fp16": cell.flag == "fp16",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": LEARNING_RATE,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": str(DTYPES[cell.weights])[6:]},
    }
    if cell.task in ("grpo", "rloo"):
        settings |= {
            "num_generations": 2,
            "max_completion_length": 4,
            "beta": cell.beta,
            "generation_kwargs": families.generation_kwargs(processor),
        }
    if cell.task == "sft":
        settings["max_length"] = None
    made: dict[str, Any] = {
        "model": str(folder(cell.family)),
        "args": config(**{**settings, **families.settings(cell.task, cell.family), **changes}),
        **families.trainer_inputs(cell.task, cell.family),
    }
    if cell.kind != "full":
        task_type = {"task_type": "SEQ_CLS"} if cell.task == "reward" else {}
        targets = spec.lora_targets if isinstance(spec.lora_targets, str) else list(spec.lora_targets)
        made["peft_config"] = LoraConfig(r=4, target_modules=targets, **task_type)
    if cell.kind == "4bit":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=DTYPES[cell.weights],
            llm_int8_skip_modules=list(cell.spared) or None,
        )
        if "quantization_config" in inspect.signature(trl.SFTTrainer.__init__).parameters:
            made["quantization_config"] = quantization
        else:  # before TRL 1.8
            made["args"].model_init_kwargs["quantization_config"] = quantization
    if cell.task in ("grpo", "rloo"):
        made["reward_funcs"] = reward
    chosen = getattr(safe_trainers, f"Safe{name}Trainer") if safe else getattr(trl, f"{name}Trainer")
    trainer = (fp16_on_cpu(chosen) if cell.flag == "fp16" else chosen)(**made)
    trainer.remove_callback(PrinterCallback)
    return trainer


LOSS_SCALE = 2.0**8
"""The initial loss scale, of stock and safe trainers."""


class _Scaled(TrainerCallback):
    """Records the dtypes of trainable weights and gradients at each optimizer step."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.dtypes.add(parameter.dtype)
                if parameter.grad is not None:
                    self.gradients.add(parameter.grad.dtype)


def train(trainer: Any, cell: Cell) -> Iterator[str]:
    """Trains, and yields the faults."""
    yield from rounded_adapters(trainer, cell)
    probe, scaled, inputs = ComputeProbe(), _Scaled(), Inputs()
    trainer.add_callback(scaled)
    scaler = trainer.accelerator.scaler
    if scaler is not None:  # torch's initial scale would skip both steps of some cells
        scaler.load_state_dict({**scaler.state_dict(), "scale": LOSS_SCALE})
    with probe.attached(trainer), inputs.attached(trainer.model):
        trainer.train()
    if not scaled.gradients:
        yield "no trainable weight has a gradient"
    if trainer.accelerator.scaler is not None and scaled.dtypes - {torch.float32}:
        yield f"half trainables under a loss scaler: {names(scaled.dtypes)}"
    yield from probe.disagreements
    for entry in trainer.state.log_history:
        broken = [key for key in ("loss", "grad_norm") if key in entry and not abs(float(entry[key])) < float("inf")]
        # With a loss scaler the first steps may overflow; they are skipped and the scale decreases.
        if broken and not (broken == ["grad_norm"] and trainer.accelerator.scaler is not None):
            yield f"{', '.join(broken)} not finite in step {entry.get('step')}"
    yield from inputs.narrowed(trainer, cell)
    yield from wrong_log_probabilities(trainer, inputs)


def rounded_adapters(trainer: Any, cell: Cell) -> Iterator[str]:
    """Yields a fault if adapters that PEFT created in float32 were rounded, with the share of lost updates."""
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
    """Records the inputs of forward passes in training."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self.media: dict[str, set[torch.dtype]] = {}

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Records a model's forward passes while the block runs."""
        handle = model.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for key, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and key in safe_trainers.MEDIA_KEYS:
                self.media.setdefault(key, set()).add(value.dtype)
        if torch.is_grad_enabled() and "input_ids" in kwargs:
            keep = {k: v for k, v in kwargs.items() if k not in ("logits_to_keep", "labels")}
            self.last = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in keep.items()}

    def narrowed(self, trainer: Any, cell: Cell) -> Iterator[str]:
        """Yields a fault for media that were rounded below the compute dtype."""
        computes = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": DTYPES[cell.weights]}[cell.flag]
        for key, dtypes in self.media.items():
            for dtype in dtypes:
                if torch.finfo(dtype).eps > torch.finfo(computes).eps:
                    yield f"{key} was rounded to {names({dtype})}, and {names({computes})} computes on it"


def wrong_log_probabilities(trainer: Any, inputs: Inputs) -> Iterator[str]:
    """Compares the model's log-probabilities on the last training batch with those of a float32 copy.

    Quantised models and reward models are not compared.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if inputs.last is None or any(p.dtype in (torch.uint8, torch.int8) for p in model.parameters()):
        return
    flag = trainer.accelerator.mixed_precision
    computes = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(flag) or max(
        {p.dtype for p in model.parameters()}, key=lambda dtype: torch.finfo(dtype).eps
    )
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
    """Copies a model without the `forward` of TRL and accelerate, which returns no logits."""
    twin = copy.deepcopy(model).eval()
    for module in (twin, twin.get_base_model() if hasattr(twin, "get_base_model") else twin):
        vars(module).pop("forward", None)
    return twin


def names(dtypes: set[torch.dtype]) -> str:
    """Names of dtypes, without `torch.`."""
    return ", ".join(sorted(str(dtype)[6:] for dtype in dtypes))


FOLLOWED = {
    "mixed-weights-cannot-meet": lambda cell: replace(cell, weights=cell.flag),
    "media-cast-to-packed-dtype": lambda cell: replace(cell, spared=("patch_embedding", "lm_head")),
}
"""The refusals that may occur in the matrix, each with the change that its message suggests."""

"""Builds the trainers that are measured: a tiny model, its data, and the arguments of the task."""

import contextlib
import importlib.util
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, DataCollatorForTokenClassification, PrinterCallback

from .. import tiny
from ..testing import fp16_on_cpu
from .judges import DTYPES, LEARNING_RATE, Outcome, conclude, fresh, judge_error, judge_run
from .outcome import Row
from .subject import PLAIN, Subject


ROWS = 8
VISIBLE_RATE = 1e-3
"""A learning rate at which a few steps change every weight, for checks that compare the weights of two runs."""
QUANTIZATION, PEFT = "quantization_config", "peft_config"
KINDS = {"full": "full", "lora": "LoRA", "4bit": "4-bit LoRA"}


def common_settings(folder: Path, flag: str, steps: int = 2) -> dict[str, Any]:
    """The training arguments that all measured runs share.

    Args:
        folder: The `output_dir`.
        flag: `"bf16"`, `"fp16"` or `"none"`.
        steps: Number of optimizer steps.
    """
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": flag == "bf16",
        "fp16": flag == "fp16",
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": LEARNING_RATE,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Attributes:
        family: The model family, of `tiny.FAMILIES`.
        weights: The load dtype: `"fp32"`, `"bf16"` or `"fp16"`.
        flag: `"bf16"`, `"fp16"` or `"none"`.
        kind: `"full"`, `"lora"` or `"4bit"`.
        steps: The number of optimizer steps.
        changes: Further settings of the config.
        dropout: The dropout of LoRA.
    """

    family: str = "text"
    weights: str = "fp32"
    flag: str = "none"
    kind: str = "full"
    steps: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.family}, {KINDS[self.kind]}, {self.weights} weights, {self.flag}"

    @property
    def control(self) -> "Setup":
        """The same run in float32; a 4-bit model has LoRA on the model that is not quantised as its control."""
        return replace(self, weights="fp32", flag="none", kind="full" if self.kind == "full" else "lora")


def with_changes(setup: Setup, **changes: Any) -> Setup:
    """Returns a setup with further settings of the config.

    Args:
        setup: The setup.
        **changes: The settings.
    """
    return replace(setup, changes={**setup.changes, **changes})


def token_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between completions of random models, so that losses are not zero.

    Args:
        completion_ids: The token ids of each completion.
        **kwargs: Ignored.
    """
    return [float(sum(ids) % 7) for ids in completion_ids]


class Workshop:
    """Builds and runs trainers of one class.

    Attributes:
        subject: The trainer class.
        folder: A folder for models and checkpoints.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder = subject, folder
        self._controls: dict[str, Row | None] = {}

    def model(self, family: str, seed: int = 0) -> str:
        """Saves a float32 model of a family once, and returns its folder.

        Args:
            family: One of `tiny.FAMILIES`.
            seed: Seed of its weights.
        """
        place = self.folder / f"{family}-{seed}"
        if not place.exists():
            tiny.save(family, place, seed=seed)
        return str(place)

    def why_not_built(self, family: str) -> str:
        """Why the installed transformers cannot build a family, or load its processor; empty if it can.

        Args:
            family: One of `tiny.FAMILIES`.
        """
        try:
            with quiet():
                transformers.AutoProcessor.from_pretrained(self.model(family))
        except Exception as error:  # releases of transformers lack classes, or need torchvision for them
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return f"transformers {transformers.__version__} cannot build {family}: {why}"
        return ""

    def dataset(self, family: str) -> Any:
        """The training data of the task, with images if the family takes them.

        Args:
            family: One of `tiny.FAMILIES`.
        """
        task = self.subject.task
        if task == PLAIN:
            return _tokenized()
        if task == "reward":
            return tiny.preference_dataset(ROWS, seed=0)
        makers = {
            "sft": tiny.sft_dataset,
            "dpo": tiny.image_preference_dataset,
            "kto": tiny.unpaired_preference_dataset,
        }
        made: Any = makers.get(task, tiny.prompt_dataset)(ROWS, seed=0)
        if family in tiny.VISION_FAMILIES:
            return made
        made = made.remove_columns("image")
        # Prompts that differ, so that the order of the data shows in the weights.
        numbered = [[{"role": "user", "content": "what " * (row % 3 + 1)}] for row in range(len(made))]
        return made.remove_columns("prompt").add_column("prompt", numbered) if "prompt" in made.features else made

    def build(self, setup: Setup) -> Any:
        """Builds a trainer.

        Args:
            setup: What is trained.

        Returns:
            The trainer. Under fp16 it has a stand-in for CUDA's autocast and loss scaler.
        """
        subject = self.subject
        fresh()
        torch.manual_seed(0)
        processor = tiny.build_processor(setup.family)
        settings = common_settings(self.folder / "out", setup.flag, setup.steps)
        optional: dict[str, Any] = {
            "num_generations": 2,
            "max_completion_length": 4,
            "max_length": None,
            "generation_kwargs": tiny.generation_kwargs(processor),
            "precision_report": "off",
        }
        if subject.generates:
            optional.pop("max_length")
        else:
            optional = {key: optional[key] for key in ("max_length", "precision_report")}
        settings |= {key: value for key, value in optional.items() if subject.accepts(key)}
        settings |= {**subject.args, **setup.changes}
        loading = {"dtype": DTYPES[setup.weights]}
        made: dict[str, Any] = {"train_dataset": self.dataset(setup.family)}
        if subject.accepts("model_init_kwargs"):
            settings["model_init_kwargs"] = {"dtype": str(DTYPES[setup.weights])[6:]}
            made["model"] = self.model(setup.family)
        else:
            made["model"] = transformers.AutoModelForCausalLM.from_pretrained(self.model(setup.family), **loading)
        made["args"] = subject.config_class(**settings)
        accepted = subject.parameters
        if setup.kind != "full":
            task_type = {"task_type": "SEQ_CLS"} if subject.task == "reward" else {}
            made["peft_config"] = LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], lora_dropout=setup.dropout, **task_type
            )
        if setup.kind == "4bit":
            quantization = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPES[setup.weights]
            )
            if QUANTIZATION in accepted:
                made[QUANTIZATION] = quantization
            else:  # before TRL 1.8
                made["args"].model_init_kwargs[QUANTIZATION] = quantization
        if "reward_funcs" in accepted:
            made["reward_funcs"] = [token_reward]
        if subject.task == "distillation":
            made["teacher_model"] = self.model(setup.family, 1)
        if subject.task == PLAIN:
            made |= {
                "processing_class": processor,
                "data_collator": DataCollatorForTokenClassification(processor),
            }
        made = {name: value for name, value in made.items() if name in accepted}
        chosen = subject.trainer_class
        trainer = (fp16_on_cpu(chosen) if setup.flag == "fp16" else chosen)(**made)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def judge(self, setup: Setup) -> tuple[Outcome, list[tuple[str, str]]]:
        """Trains, and judges the run; every error is a result.

        Args:
            setup: What is trained.

        Returns:
            The outcome, and the faults with the ids of their rules.
        """
        outcome, started, trainer = Outcome(), time.perf_counter(), None
        faults: list[tuple[str, str]] = []
        with quiet() as said:
            try:
                trainer = self.build(setup)
                faults = list(dict.fromkeys(judge_run(trainer, setup)))
            except Exception as error:  # every error is a result
                judge_error(error, built=trainer is not None, outcome=outcome)
        outcome.faults = [text for _, text in faults]
        conclude(outcome, said, started)
        fresh()
        return outcome, faults

    def control(self, setup: Setup) -> Row | None:
        """Runs the float32 control of a setup, once.

        Args:
            setup: The setup.

        Returns:
            `None` if it trains without a fault, else a row with the reason why the setup is not judged.
        """
        key = str(setup.control)
        if key not in self._controls:
            outcome, _ = self.judge(setup.control)
            why = outcome.message or "; ".join(outcome.faults)
            found = f"the float32 control ({key}) fails: {' '.join(why.split())[:300]}"
            self._controls[key] = None if outcome.outcome == "trained" else Row(str(setup), "could not run", found)
        row = self._controls[key]
        return row and replace(row, run=str(setup))

    def attempt(self, run: str, measure: Callable[[], Row]) -> Row:
        """Runs a measurement; an error is a row.

        Args:
            run: What is run, for the row.
            measure: Returns the row. It raises `Refused` for an error of the constructor.
        """
        try:
            with quiet():
                return measure()
        except Refused as error:
            return Row(run, "refused", str(error))
        except Exception as error:  # every error is a result
            return Row(run, "crashed", describe_error(error))
        finally:
            fresh()

    def construct(self, setup: Setup) -> Any:
        """Builds a trainer like `build`.

        Args:
            setup: What is trained.

        Raises:
            Refused: If the constructor fails with a message for the user.
        """
        try:
            return self.build(setup)
        except Exception as error:
            outcome = Outcome()
            judge_error(error, built=False, outcome=outcome)
            if outcome.outcome == "refused":
                raise Refused(outcome.message) from error
            raise


class Refused(Exception):  # noqa: N818  (a result, not an error)
    """The constructor of a trainer failed with a message for the user."""


class Heard(logging.Handler):
    """Collects the warnings of loggers.

    Attributes:
        lines: The messages.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collects one message."""
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Records warnings and hides what a run prints.

    Yields:
        The warnings.
    """
    hidden = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as said,
        contextlib.redirect_stdout(hidden),
        contextlib.redirect_stderr(hidden),  # progress bars
    ):
        warnings.simplefilter("always")
        yield said


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for models and checkpoints, removed at the end.

    Yields:
        The folder.
    """
    with tempfile.TemporaryDirectory(prefix="safe-trainers-bench-") as name:
        yield Path(name)


def why_not_adapted(subject: Subject, kind: str) -> str:
    """Why a trainer class cannot train a kind of model; empty if it can.

    Args:
        subject: The trainer class.
        kind: `"full"`, `"lora"` or `"4bit"`.
    """
    if kind != "full" and not (PEFT in subject.parameters and subject.accepts("model_init_kwargs")):
        return f"{subject.trainer_class.__name__} does not take `{PEFT}`"
    if kind == "4bit" and importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return ""


def describe_error(error: Exception) -> str:
    """The type, message and place of an error, in one line.

    Args:
        error: The error.
    """
    outcome = Outcome()
    judge_error(error, built=True, outcome=outcome)
    return f"{outcome.message} ({outcome.frame})"


def _tokenized() -> Any:
    """Token ids with labels, for a trainer that does not tokenise."""
    tokenizer: Any = tiny.build_tokenizer("text")
    rows = [tokenizer(f"two red {'square ' * (row % 3 + 1)}")["input_ids"] for row in range(ROWS)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})

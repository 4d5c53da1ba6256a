"""Runs one cell of the matrix: trains a tiny model for two steps with a stock or safe trainer, and judges the result.

Both trainers are judged by the same measurements of the live model, those of `safe_trainers.bench.judges`, and not by
their own reports.
"""

import contextlib
import functools
import inspect
import io
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import families
import torch
import trl
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PrinterCallback

import safe_trainers
from safe_trainers.bench.build import common_settings
from safe_trainers.bench.judges import DTYPES, Outcome, conclude, fresh, judge_error, judge_run
from safe_trainers.testing import fp16_on_cpu


TRAINERS = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "reward": "Reward"}
KINDS = ("full", "lora", "4bit")
FLAGS = ("bf16", "fp16", "none")


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
            outcome.faults = list(dict.fromkeys(text for _, text in judge_run(trainer, cell)))
        except Exception as error:  # every error is a result
            judge_error(error, built=trainer is not None, outcome=outcome)
    conclude(outcome, said, started)
    fresh()
    return outcome


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
    settings = common_settings(Path(_root().name) / "out", cell.flag)
    settings["model_init_kwargs"] = {"dtype": str(DTYPES[cell.weights])[6:]}
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


FOLLOWED = {
    "mixed-weights-cannot-meet": lambda cell: replace(cell, weights=cell.flag),
    "media-cast-to-packed-dtype": lambda cell: replace(cell, spared=("patch_embedding", "lm_head")),
}
"""The refusals that may occur in the matrix, each with the change that its message suggests."""

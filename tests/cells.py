"""One cell of the tables in the integration tests: a real TRL trainer, stock or safe, on a tiny real model."""

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from policing import autocast_nesting
from transformers import AutoModelForImageTextToText

import safe_trainers
from safe_trainers import tiny
from safe_trainers.core.tasks import TASKS
from safe_trainers.core.versions import stable_tasks
from upstream import loads_own_classes, why_not_built


STABLE = {name: TASKS[name] for name in stable_tasks()}
"""The tasks of the installed TRL."""
STOCK = {name: getattr(trl, f"{task.algorithm}Trainer") for name, task in STABLE.items()}
PLAIN = {name: getattr(trl, f"{task.algorithm}Config") for name, task in STABLE.items()}
SAFE = {name: getattr(safe_trainers, task.trainer) for name, task in STABLE.items()}
SAFE_CONFIG = {name: getattr(safe_trainers, task.config) for name, task in STABLE.items()}
NEEDS_STABLE = {
    name: pytest.mark.skipif(name not in STABLE, reason=f"{TASKS[name].trainer} needs TRL {TASKS[name].since}")
    for name in TASKS
}
"""The mark of a test of a task that older releases lack."""
SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """What is trained, and how.

    `weights` is what the model is loaded in, `flag` is `"bf16"`, `"fp16"` or `None`.
    """

    family: str
    task: str
    weights: str
    flag: str | None
    lora: bool = False
    beta: float = 0.0

    def __str__(self) -> str:
        kind = "lora" if self.lora else "full"
        return f"{self.family}-{self.task}-{self.weights}-{self.flag or 'none'}-{kind}-beta{self.beta:g}"


@dataclass
class Outcome:
    """What came of it: `error` is `None` where the cell trained."""

    error: str | None = None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    fingerprint: str | None = None
    trainer: Any = None


def sliced(table: list[Cell], *axes: str) -> list[Any]:
    """Parameters of a test over a table: one cell for each combination of `axes` always, all with `make matrix`.

    Which of the cells of a combination is taken rotates, so that the slice has every value of the other axes too.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in table:
        groups.setdefault(tuple(getattr(cell, axis) for axis in axes), []).append(cell)
    always = {group[turn % len(group)] for turn, group in enumerate(groups.values())}
    return [pytest.param(cell, id=str(cell), marks=() if cell in always else (pytest.mark.matrix,)) for cell in table]


@functools.cache
def folder(family: str, seed: int = 0) -> Path:
    """A saved fp32 model of the family; TRL rebuilds reference models from the folder."""
    return tiny.save(family, Path(_root().name) / (f"{family}-{seed}" if seed else family), seed=seed)


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="safe-trainers-cells-")


def token_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between completions of random models, so that advantages and losses are not zero."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def dataset(task: str, family: str, rows: int = 8) -> Any:
    """A training set for the task, with pictures unless the family is text-only."""
    if task == "reward":
        return tiny.preference_dataset(rows, seed=0)
    makers = {
        "sft": tiny.sft_dataset,
        "dpo": tiny.image_preference_dataset,
        "kto": tiny.unpaired_preference_dataset,
    }
    made = makers.get(task, tiny.prompt_dataset)(rows, seed=0)
    return made if family in tiny.VISION_FAMILIES else made.remove_columns("image")


def settings(cell: Cell, steps: int = 2, **changes: Any) -> dict[str, Any]:
    """The training arguments of a cell, as keywords for any config class."""
    common = {
        "output_dir": str(Path(_root().name) / "out"),
        "use_cpu": True,
        "bf16": cell.flag == "bf16",
        "fp16": cell.flag == "fp16",
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    if cell.task in ("grpo", "rloo"):
        common |= {"num_generations": 2, "max_completion_length": 4, "beta": cell.beta}
    if cell.task == "distillation":
        common |= {"max_completion_length": 4}
    if cell.task in ("sft", "dpo", "kto"):
        common |= {"max_length": None}
    return common | changes


def arguments(cell: Cell, config: type, steps: int = 2, **changes: Any) -> dict[str, Any]:
    """Everything that a trainer of this cell is built with; skips a test whose family cannot be built here."""
    if cell.family in tiny.VISION_FAMILIES and why_not_built(cell.family):
        pytest.skip(str(why_not_built(cell.family)))
    loading = changes.pop("model_init_kwargs", {"dtype": str(SHORT[cell.weights])[6:]})
    model: Any = str(folder(cell.family))
    if cell.family == "nocast" and not loads_own_classes(model):
        if cell.beta and not cell.lora:
            pytest.skip("this TRL loads reference models only of transformers' own classes")
        model, loading = AutoModelForImageTextToText.from_pretrained(model, **(loading or {})), None
    made: dict[str, Any] = {
        "model": model,
        "args": config(**settings(cell, steps, **{"model_init_kwargs": loading, **changes})),
        "train_dataset": dataset(cell.task, cell.family),
    }
    if cell.lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    if cell.task in ("grpo", "rloo"):
        made["reward_funcs"] = token_reward
    if cell.task == "distillation":
        made["teacher_model"] = str(folder(cell.family, 1))
    return made


def run(cell: Cell, safe: bool, *, keep: bool = False, config: type | None = None, **changes: Any) -> Outcome:
    """Trains one cell, stock or safe; an error of the run is the outcome, not a failure of the caller."""
    torch.manual_seed(0)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves there what the last config asked for
    outcome = Outcome()
    try:
        trainer = (SAFE if safe else STOCK)[cell.task](**arguments(cell, config or PLAIN[cell.task], **changes))
        trainer.train()
    except Exception as error:  # whatever stops a run is what the tables are about
        outcome.error = f"{type(error).__name__}: {error}"
        reset_autocast()
        return outcome
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    outcome.losses = [float(entry["loss"]) for entry in log]
    outcome.grad_norms = [float(entry["grad_norm"]) for entry in log]
    outcome.rewards = [float(entry.get("reward", 0.0)) for entry in log]
    outcome.fingerprint = fingerprint(trainer.model)
    if keep:
        outcome.trainer = trainer
    return outcome


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of every parameter's bytes: equal for two models only if they are bit-identical."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_logs(trainer: Any) -> list[dict[str, Any]]:
    """Trains, and returns the log; accelerate's autocast is reset also if training fails."""
    try:
        trainer.train()
    finally:
        reset_autocast()
    return trainer.state.log_history


def sampled(trainer_class: type, made: dict[str, Any]) -> tuple[list[Any], str]:
    """Builds and trains a trainer with rollouts; returns the tokens of each turn, and a hash of the weights."""
    turns = []

    class Keeping(trainer_class):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            turn = super()._generate_single_turn(*args, **kwargs)
            turns.append(turn[0] if isinstance(turn, tuple) else turn)
            return turn

    torch.manual_seed(0)
    trainer = Keeping(**made)
    trainer.train()
    return turns, fingerprint(trainer.model)


def reset_autocast() -> None:
    """Accelerate's autocast leaks out of a forward that failed."""
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16)):
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, dtype)  # its default
    while autocast_nesting() > 0:  # below zero the cache of casts would never be cleared again
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()

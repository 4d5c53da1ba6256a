"""Tiny models of the families in the evidence: those of `safe_trainers.tiny`, and the others that TRL trains.

The interface is that of `safe_trainers.tiny`: models are built offline, in a fraction of a second, from the classes of
transformers. To load a saved family, import this package first, because it registers processors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from safe_trainers import tiny
from safe_trainers.tiny.models import finish, resolve_dtype
from safe_trainers.tiny.processors import generation_kwargs
from safe_trainers.tiny.saving import write

from . import sounds
from .specs import AUDIO_FAMILIES, FAMILIES, TEXT_FAMILIES, VISION_FAMILIES, Spec, family_spec


try:
    from . import models, processors
except ImportError as error:
    # The builders need the latest transformers; older releases lack some families and names.
    ABSENT = dict.fromkeys((name for name in FAMILIES if name not in tiny.FAMILIES), str(error).split(" (")[0])
else:
    ABSENT = {}
"""Families that the installed transformers cannot build, with the reason."""


TASKS = ("grpo", "rloo", "sft")

__all__ = [
    "ABSENT",
    "AUDIO_FAMILIES",
    "FAMILIES",
    "TASKS",
    "TEXT_FAMILIES",
    "VISION_FAMILIES",
    "Spec",
    "build_model",
    "build_processor",
    "build_tokenizer",
    "dataset",
    "family_spec",
    "generation_kwargs",
    "save",
    "settings",
    "trainer_inputs",
]


def build_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Builds the tokenizer of a family, one of `FAMILIES`, with the tokens of its processor."""
    processor = build_processor(family)
    return getattr(processor, "tokenizer", processor)


def build_processor(family: str) -> ProcessorMixin | PreTrainedTokenizerBase:
    """Builds the processor of a family, one of `FAMILIES`; for a text-only family, its tokenizer."""
    if family in tiny.FAMILIES:
        return tiny.build_processor(family)
    spec = family_spec(family)
    tokenizer = tiny.build_tokenizer(spec)
    builder = processors.BUILDERS.get(family)
    return tokenizer if builder is None else builder(spec, tokenizer)


def build_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype | str = torch.float32,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Builds a tiny model with random weights.

    Args:
        family: One of `FAMILIES`.
        seed: Seed of the weights. torch's global random state does not change.
        dtype: Weight dtype: float32, bfloat16 or float16, or its name.
        tokenizer: The tokenizer of the model; by default that of the family.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        ValueError: If the family or the dtype does not exist.
    """
    if family in tiny.FAMILIES:
        return tiny.build_model(family, seed=seed, dtype=dtype, tokenizer=tokenizer)
    spec, resolved = family_spec(family), resolve_dtype(dtype)
    tokenizer = build_tokenizer(family) if tokenizer is None else tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in spec.special_tokens.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.BUILDERS[family](spec, tokenizer, ids)
    return finish(model, tokenizer, resolved)


def save(family: str, folder: str | os.PathLike[str], *, seed: int = 0, dtype: str = "float32") -> Path:
    """Writes a tiny model and its processor atomically; an existing checkpoint is replaced.

    Args:
        family: One of `FAMILIES`, or `"reward"`.
        folder: The folder to write.
        seed: Seed of the weights.
        dtype: Weight dtype: `"float32"`, `"bfloat16"` or `"float16"`.

    Returns:
        The absolute path of the folder.
    """
    if family in tiny.FAMILIES or family == "reward":
        return tiny.save(family, folder, seed=seed, dtype=dtype)
    processor = build_processor(family)
    tokenizer = getattr(processor, "tokenizer", processor)
    return write(build_model(family, seed=seed, dtype=dtype, tokenizer=tokenizer), processor, folder)


def dataset(task: str, family: str, rows: int = 8) -> Dataset:
    """Builds a training dataset with the kind of inputs that the family takes.

    Args:
        task: `"grpo"`, `"rloo"`, `"sft"` or `"reward"`.
        family: One of `FAMILIES`.
        rows: Number of rows.
    """
    if task == "reward":
        return tiny.preference_dataset(rows, seed=0)
    spec = family_spec(family)
    if spec.modality == "audio":
        return sounds.dataset(task, rows)
    made = tiny.sft_dataset(rows, seed=0) if task == "sft" else tiny.prompt_dataset(rows, seed=0)
    if spec.modality == "text":
        return made.remove_columns("image")
    if task == "sft" and spec.conversation:
        made = made.map(lambda row: {"messages": row["prompt"] + row["completion"]})
        return made.remove_columns(["prompt", "completion"])
    return made


def settings(task: str, family: str) -> dict[str, Any]:
    """Training arguments that a trainer needs to accept the dataset of the family."""
    if family_spec(family).modality == "audio" and task == "sft":
        # The collator needs the raw rows, with all columns.
        return {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    return {}


def trainer_inputs(task: str, family: str, rows: int = 8) -> dict[str, Any]:
    """Arguments of a trainer: the dataset, and a collator if TRL has none for the inputs of the family."""
    made: dict[str, Any] = {"train_dataset": dataset(task, family, rows)}
    if family_spec(family).modality == "audio" and task == "sft":
        made["data_collator"] = sounds.SoundCollator(build_processor(family))
    return made

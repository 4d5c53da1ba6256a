"""Saves tiny models as checkpoints that `from_pretrained` and the trainers load without network access."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safe_trainers.tiny.models import build_model, build_reward_model, resolve_dtype
from safe_trainers.tiny.processors import build_processor


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


def save(family: str, folder: str | os.PathLike[str], *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a tiny model and its processor atomically. An existing checkpoint is replaced.

    Args:
        family: One of `FAMILIES`, or `"reward"` for the text-only reward model.
        folder: Where to write.
        seed: Seed of the weights.
        dtype: Weight dtype: `"float32"`, `"bfloat16"` or `"float16"`.

    Returns:
        The folder, absolute.

    Raises:
        ValueError: If there is no such family or dtype.
        FileExistsError: If `folder` exists and is not a checkpoint, because it contains no `config.json`.
    """
    resolve_dtype(dtype)
    if family == "reward":
        processor = build_processor("text")
        model = build_reward_model(seed=seed, dtype=dtype, tokenizer=processor)
    else:
        processor = build_processor(family)
        tokenizer = getattr(processor, "tokenizer", processor)
        model = build_model(family, seed=seed, dtype=dtype, tokenizer=tokenizer)
    return write(model, processor, folder)


def write(
    model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerBase, folder: str | os.PathLike[str]
) -> Path:
    """Write a model and its processor as one checkpoint, atomically.

    Args:
        model: The model.
        processor: Its processor, or tokenizer.
        folder: Where to write.

    Returns:
        The folder, absolute.

    Raises:
        FileExistsError: If `folder` exists and is not a checkpoint, because it contains no `config.json`.
    """
    target = Path(folder).absolute()
    if target.exists() and not (target / "config.json").is_file() and any(target.iterdir()):
        raise FileExistsError(f"{target} exists and is not a checkpoint: pass a new folder or remove it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the parent folder, because a rename must stay on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        fresh = Path(scratch) / "new"
        model.save_pretrained(fresh)
        processor.save_pretrained(fresh)
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
    return target

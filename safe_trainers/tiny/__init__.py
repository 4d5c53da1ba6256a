"""Tiny models, processors and a task with ground truth, built offline in seconds.

A whole run (warm-up by fine-tuning, then GRPO or RLOO with images) takes minutes on two CPU cores:

    from safe_trainers import tiny

    folder = tiny.save("aria", "tiny-aria")  # loads with from_pretrained, like any checkpoint
    train = tiny.prompt_dataset(2000, seed=0)  # prompt, image, solution
    heldout = tiny.prompt_dataset(480, seed=0, split="heldout")  # disjoint from every training set
    rewards = [tiny.exact_match, tiny.attribute_match]
    ...
    tiny.exact_match_rate(model, processor, heldout)

`tiny.FAMILIES` lists the families. `aria` and `llama4` do not cast their pixels to the dtype of their weights;
`nocast` casts neither the inputs nor the outputs of its vision tower. `from_pretrained` loads `nocast` after
`safe_trainers.tiny.nocast` has been imported, which `tiny.save` and `tiny.build_model` do. `gpt_oss` and `text` take
no images; the experts of `gpt_oss` are fused parameters outside of any `nn.Linear`.

Importing this package does not import torch or transformers; its members do, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


_EXPORTS: dict[str, str] = {
    "ANSWERS": "grammar",
    "FAMILIES": "families",
    "QUESTION": "grammar",
    "VISION_FAMILIES": "families",
    "answers": "evaluate",
    "attribute_match": "rewards",
    "build_model": "models",
    "build_processor": "processors",
    "build_reward_model": "models",
    "build_tokenizer": "tokenizer",
    "constant_baseline": "evaluate",
    "exact_match": "rewards",
    "exact_match_rate": "evaluate",
    "generation_kwargs": "processors",
    "image_preference_dataset": "shapes",
    "preference_accuracy": "evaluate",
    "preference_dataset": "shapes",
    "prompt_dataset": "shapes",
    "save": "saving",
    "sft_dataset": "shapes",
    "unpaired_preference_dataset": "shapes",
}

__all__ = [
    "ANSWERS",
    "FAMILIES",
    "QUESTION",
    "VISION_FAMILIES",
    "answers",
    "attribute_match",
    "build_model",
    "build_processor",
    "build_reward_model",
    "build_tokenizer",
    "constant_baseline",
    "exact_match",
    "exact_match_rate",
    "generation_kwargs",
    "image_preference_dataset",
    "preference_accuracy",
    "preference_dataset",
    "prompt_dataset",
    "save",
    "sft_dataset",
    "unpaired_preference_dataset",
]

if TYPE_CHECKING:
    from safe_trainers.tiny.evaluate import answers, constant_baseline, exact_match_rate, preference_accuracy
    from safe_trainers.tiny.families import FAMILIES, VISION_FAMILIES
    from safe_trainers.tiny.grammar import ANSWERS, QUESTION
    from safe_trainers.tiny.models import build_model, build_reward_model
    from safe_trainers.tiny.processors import build_processor, generation_kwargs
    from safe_trainers.tiny.rewards import attribute_match, exact_match
    from safe_trainers.tiny.saving import save
    from safe_trainers.tiny.shapes import (
        image_preference_dataset,
        preference_dataset,
        prompt_dataset,
        sft_dataset,
        unpaired_preference_dataset,
    )
    from safe_trainers.tiny.tokenizer import build_tokenizer


def __getattr__(name: str) -> Any:
    """Import a member on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    """List the public members without importing them."""
    return sorted(__all__)

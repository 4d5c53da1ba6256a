"""Measures the accuracy of tiny models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from safe_trainers.model.trial_forward import undisturbed
from safe_trainers.tiny.rewards import exact_match


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


def _batches(dataset: Dataset, batch_size: int) -> Iterator[dict[str, list[Any]]]:
    if len(dataset) == 0:
        raise ValueError("The dataset is empty: there is nothing to measure.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    for start in range(0, len(dataset), batch_size):
        yield dataset[start : start + batch_size]


def _to_model(inputs: Any, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Move inputs to the model's device, and cast pixels to the dtype of its weights, as some towers do not."""
    moved = {name: value.to(model.device) for name, value in inputs.items()}
    if "pixel_values" in moved:
        moved["pixel_values"] = moved["pixel_values"].to(model.dtype)
    return moved


def answers(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    dataset: Dataset,
    *,
    batch_size: int = 64,
    max_new_tokens: int = 5,
) -> list[str]:
    """Answer the prompts of a dataset greedily.

    Args:
        model: A vision-language model, in any mode; its mode is restored.
        processor: Its processor.
        dataset: `N` rows with columns `prompt` (conversation) and `image`.
        batch_size: Rows per call of `generate`.
        max_new_tokens: Tokens per answer, at most.

    Returns:
        `N` answers, without special tokens.

    Raises:
        ValueError: If the dataset is empty or the batch size is not positive.
    """
    replies: list[str] = []
    with undisturbed(model):
        for batch in _batches(dataset, batch_size):
            prompts = [
                processor.apply_chat_template(_with_image(prompt), add_generation_prompt=True, tokenize=False)
                for prompt in batch["prompt"]
            ]
            inputs = processor(
                images=[[image] for image in batch["image"]],
                text=prompts,
                padding=True,
                padding_side="left",
                add_special_tokens=False,
                return_tensors="pt",
            )
            inputs = _to_model(inputs, model)
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)  # (B, T + new)
            replies += processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def _with_image(prompt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put one image placeholder in front of the first user message, as TRL does."""
    messages = []
    placed = False
    for message in prompt:
        content: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "user" and not placed:
            content.insert(0, {"type": "image"})
            placed = True
        messages.append({**message, "content": content})
    return messages


def exact_match_rate(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    dataset: Dataset,
    *,
    batch_size: int = 64,
    max_new_tokens: int = 5,
) -> float:
    """Return the share of images that a model answers exactly right, decoding greedily.

    Args:
        model: A vision-language model, in any mode; its mode is restored.
        processor: Its processor.
        dataset: Rows with columns `prompt` (conversation), `image` and `solution`.
        batch_size: Rows per call of `generate`.
        max_new_tokens: Tokens per answer, at most.

    Returns:
        Between 0 and 1.

    Raises:
        ValueError: If the dataset is empty or the batch size is not positive.
    """
    replies = answers(model, processor, dataset, batch_size=batch_size, max_new_tokens=max_new_tokens)
    return sum(exact_match(replies, dataset["solution"])) / len(replies)


def constant_baseline(dataset: Dataset) -> float:
    """Return the exact-match rate of the best answer that ignores the image.

    Args:
        dataset: Rows with a column `solution`.

    Returns:
        The share of the most frequent solution, between 0 and 1.

    Raises:
        ValueError: If the dataset is empty.
    """
    counts = Counter(dataset["solution"])
    if not counts:
        raise ValueError("The dataset is empty: there is nothing to measure.")
    return max(counts.values()) / sum(counts.values())


def preference_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dataset: Dataset, *, batch_size: int = 64
) -> float:
    """Return the share of pairs in which a reward model scores the chosen answer higher.

    Args:
        model: A sequence classification model with one label, in any mode; its mode is restored.
        tokenizer: Its tokenizer.
        dataset: Rows with columns `chosen` and `rejected`, conversations.
        batch_size: Pairs per call of the model.

    Returns:
        Between 0 and 1; a tie counts as wrong.

    Raises:
        ValueError: If the dataset is empty or the batch size is not positive.
    """
    right = 0
    with undisturbed(model):
        for batch in _batches(dataset, batch_size):
            scores = []
            for column in ("chosen", "rejected"):
                strings = tokenizer.apply_chat_template(batch[column], tokenize=False)
                inputs = tokenizer(strings, padding=True, add_special_tokens=False, return_tensors="pt")
                scores.append(model(**_to_model(inputs, model)).logits.squeeze(-1))  # (B,)
            right += int((scores[0] > scores[1]).sum())
    return right / len(dataset)

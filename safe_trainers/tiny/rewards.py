"""Reward functions of the image task, with the signature TRL's trainers call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def completion_text(completion: Any) -> str:
    """Return the text of a completion.

    Args:
        completion: A string, a message, a list of messages, or anything else.

    Returns:
        The text, without surrounding white space; empty if there is none.
    """
    if isinstance(completion, str):
        return completion.strip()
    if isinstance(completion, dict):
        if "content" in completion:
            return completion_text(completion["content"])
        text = completion.get("text")
        return text.strip() if isinstance(text, str) else ""
    if isinstance(completion, (list, tuple)):
        return " ".join(filter(None, map(completion_text, completion)))
    return ""


def _check_lengths(completions: Sequence[Any], solution: Sequence[str]) -> None:
    if len(completions) != len(solution):
        raise ValueError(f"{len(completions)} completions for {len(solution)} solutions: pass one solution for each.")


def exact_match(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float]:
    """Reward 1 for the right answer and 0 for any other.

    Args:
        completions: `B` completions, strings or conversations.
        solution: `B` right answers, e.g. `"two red squares"`.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1.

    Raises:
        ValueError: If the numbers of completions and solutions differ.
    """
    _check_lengths(completions, solution)
    return [float(completion_text(c).lower() == s.lower()) for c, s in zip(completions, solution, strict=True)]


def attribute_match(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float]:
    """Reward the share of correct words among count, colour and shape, each in its position.

    A longer answer gets 0, because a model that has learnt not to end its answers would otherwise not recover.

    Args:
        completions: `B` completions, strings or conversations.
        solution: `B` right answers, e.g. `"two red squares"`.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards: 0, 1/3, 2/3 or 1.

    Raises:
        ValueError: If the numbers of completions and solutions differ.
    """
    _check_lengths(completions, solution)
    rewards = []
    for completion, right in zip(completions, solution, strict=True):
        expected = right.lower().split()
        words = completion_text(completion).lower().split()
        hits = sum(a == b for a, b in zip(words, expected, strict=False))
        rewards.append(hits / len(expected) if len(words) <= len(expected) else 0.0)
    return rewards

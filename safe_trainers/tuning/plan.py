"""What a search is asked for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .search import Goal


Builder = Callable[[str, Callable[[type], type]], Any]
"""Builds a trainer for a precision such as `"bf16"`. Its second argument makes the class to build from another."""
PRECISIONS = ("bf16", "fp16", "fp32")
HELD_OUT = 64
"""The promise has up to this many times the prompts of the search; sequences of one prompt are not independent."""
SELECTION = 4
"""The finalists are measured on this many times the sequences of the search."""
MOST_ROUNDS = 600
"""If few tokens carry the mismatch, hundreds of rounds are needed."""


@dataclass
class Plan:
    """What a search is asked for.

    Attributes:
        target: What is tuned, in words.
        prompts: The prompts in words.
        goal: The goal.
        precisions: The precisions to try, that of the run first.
        sequences: Number of prompts of the search. The dataset should have some times as many, see `rows_for`.
        settings: Further settings that a precision needs, such as the load dtype.
        time_limit: Seconds.
        rounds: Most rounds of the promise, each over as many held-out prompts; it ends earlier if it is exact enough.
        progress: Receives lines of progress.
    """

    target: str = ""
    prompts: str = ""
    goal: Goal = field(default_factory=Goal)
    precisions: Sequence[str] = PRECISIONS
    sequences: int = 32
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    time_limit: float = 300.0
    rounds: int = MOST_ROUNDS
    progress: Callable[[str], None] = lambda line: None


def rows_for(sequences: int, size: int) -> int:
    """Returns the number of prompts with which a search, its selection and its promise have prompts of their own.

    Args:
        sequences: Prompts of the search.
        size: Rows of a batch.
    """
    return (1 + SELECTION + HELD_OUT) * math.ceil(sequences / size) * size

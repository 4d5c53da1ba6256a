"""Measures what a set promises: the mismatch on held-out prompts, with tokens that the set samples itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .figures import Figures, differences, summarize
from .measure import Bench, Tokens
from .search import Modules


LEAST_ROUNDS = 4
"""Least rounds of a promise. Large differences of single tokens may be rare, and a few sequences have none."""
SUMMARY_GROWTH = 1.1
"""The tokens of a promise are summarized again when their number has grown by this factor."""


class Worst:
    """The sequences with the largest mismatch, each with its prompt and its tokens.

    Args:
        count: The most sequences that are kept.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: list[tuple[float, Any, list[int]]] = []  # mismatch in nats, row of the dataset, tokens

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, rows: Sequence[Any], sizes: Sequence[float], turns: Sequence[Sequence[Sequence[int]]]) -> None:
        """Adds the sequences of a batch. Those of several turns cannot be put into another batch.

        Args:
            rows: The rows of the batch.
            sizes: The sum of abs(D) of each sequence, in nats.
            turns: The tokens of each turn and row.
        """
        if len(turns) != 1:
            return
        found = [
            (size, row, list(tokens)) for row, size, tokens in zip(rows, sizes, turns[0], strict=True) if size > 0
        ]
        self._kept = sorted([*self._kept, *found], key=lambda kept: kept[0], reverse=True)[: self._count]

    def batches(self, size: int) -> tuple[list[list[Any]], Tokens]:
        """Returns batches of the rows of the sequences, and their tokens.

        Args:
            size: Rows of a batch; the last one may have fewer.
        """
        longest = max(len(tokens) for *_, tokens in self._kept)
        parts = [self._kept[begin : begin + size] for begin in range(0, len(self._kept), size)]
        # Only sequences that have ended are shorter, and `generate` ignores what comes then.
        forced = [[[tokens + tokens[-1:] * (longest - len(tokens)) for *_, tokens in part]] for part in parts]
        return [[row for _, row, _ in part] for part in parts], forced


class Promise:
    """The measurement of one set in rounds, which can be continued.

    Args:
        names: The modules that compute in float32.
        batches: The held-out batches; they occur again when all were measured.
        size: Batches of a round.
        seed: The seed of sampling.
        start: The number of the first batch.
        keep: The number of sequences with the largest mismatch that are kept.
    """

    def __init__(
        self, names: Modules, batches: Sequence[Sequence[Any]], size: int, seed: int, start: int = 0, keep: int = 0
    ) -> None:
        self._names, self._batches, self._size, self._seed = names, batches, size, seed
        self._rows = len(batches[0])
        self.next = start  # the number of the next batch
        self.rounds = 0
        self.worst, self._keeps = Worst(keep), keep > 0
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._prompts: list[int] = []
        self._seconds = 0.0

    def measure(self, bench: Bench, enough: Callable[[Figures], bool], more: Callable[[int], bool]) -> Figures:
        """Measures rounds until they suffice.

        Args:
            bench: Measures the trainer.
            enough: Whether the figures so far suffice. It is asked after numbers of rounds that grow by
                `SUMMARY_GROWTH`, since a summary reads all tokens.
            more: Whether there may be another round after this number of rounds.

        Returns:
            The figures of all rounds, also those of earlier calls.
        """
        due = max(LEAST_ROUNDS, self.rounds + 1)
        while True:
            self._measure_round(bench)
            last = not more(self.rounds)
            if last or self.rounds >= due:
                figures = summarize(self._pairs, self._seconds, self._prompts)
                if last or enough(figures):
                    return figures
                due = max(self.rounds + 1, int(SUMMARY_GROWTH * self.rounds))

    def _measure_round(self, bench: Bench) -> None:
        count = len(self._batches)
        chosen = [(self.next + number) % count for number in range(self._size)]
        self.next = (self.next + self._size) % count
        batches = [self._batches[index] for index in chosen]
        measured = bench.run(self._names, None, self._seed + 100 * self.rounds, batches)
        for index, batch, (trainer, sampler, mask, seconds, turns) in zip(chosen, batches, measured, strict=True):
            self._pairs.append((trainer, sampler, mask))
            self._prompts += [self._rows * index + row for row in range(len(batch))]
            self._seconds += seconds
            if self._keeps:
                sizes = differences(trainer, sampler, mask).abs().sum(1).nan_to_num(math.inf)
                self.worst.add(batch, sizes.tolist(), turns)
        self.rounds += 1

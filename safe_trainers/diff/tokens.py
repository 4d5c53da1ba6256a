"""Tokens by their whole prefix, so that a token of a rollout is found again when it is scored, whatever the padding."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


MOST_ROWS, MOST_TOKENS = 2, 8
"""Sequences of a rollout, and tokens of each, whose values are recorded: the last of the prompt and the first ones of
the completion."""
SEARCHED_ROWS = 16
"""Sequences of a batch that is scored in which these tokens are looked for."""
MOST_HASHED = 256
"""Sequences of a batch whose tokens are hashed."""
_BASE = 0x9E3779B97F4A7C15


def prefix_hashes(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Hashes each prefix of a sequence.

    Args:
        ids: Token ids without padding, (T,).

    Returns:
        For each token the hash of the sequence up to and with it, (T,) int64.
    """
    powers = np.multiply.accumulate(np.full(len(ids), _BASE, np.uint64))
    with np.errstate(over="ignore"):
        return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * powers, dtype=np.uint64).view(np.int64)


def row_hashes(ids: Any, mask: Any) -> list[int]:
    """Returns the hash of each sequence of a batch without its padding.

    Args:
        ids: Token ids, (B, T).
        mask: Attention mask, (B, T); `None` if there is no padding.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return []
    rows = _real(ids, mask, MOST_HASHED)
    return [int(prefix_hashes(tokens)[-1]) if len(tokens) else 0 for _, tokens in rows]


def _real(ids: torch.Tensor, mask: Any, most: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """The positions and the ids of the tokens of each sequence that are not padding."""
    array = ids[:most].detach().cpu().numpy()
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape == ids.shape:
        kept = mask[:most].detach().cpu().numpy() != 0
    else:
        kept = np.ones(array.shape, bool)
    return [(np.flatnonzero(row), tokens[row]) for row, tokens in zip(kept, array, strict=True)]


class TokenRows:
    """The tokens of the running call of the model whose values are recorded.

    Attributes:
        chosen: Sequence, position, number and key of each chosen token.
    """

    def __init__(self) -> None:
        self.chosen: list[tuple[int, int, int, int]] = []
        self._shape = (0, 0)
        self._numbers: dict[int, int] = {}
        self._sequences: list[list[int]] = []

    def begin(self, inputs: Mapping[str, Any], rollout: bool) -> None:
        """Chooses the tokens of a call: the first ones of a rollout, and those again in other phases.

        Args:
            inputs: The inputs of the model by name.
            rollout: Whether the call is one of a rollout.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        self.chosen = []
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or (not rollout and not self._numbers):
            return
        self._shape = ids.shape[0], ids.shape[1]
        if not rollout:
            for row, (places, tokens) in enumerate(_real(ids, mask, SEARCHED_ROWS)):
                for place, key in zip(places.tolist(), prefix_hashes(tokens).tolist(), strict=True):
                    if key in self._numbers:
                        self.chosen.append((row, place, self._numbers[key], key))
            return
        if self._is_decoding(ids, mask):
            if self._sequences and len(self._sequences[0]) - self._prompt >= MOST_TOKENS - 1:
                return
            for sequence, token in zip(self._sequences, ids[:MOST_ROWS, -1].tolist(), strict=False):
                sequence.append(token)
            places = [0] * len(self._sequences)
        else:
            found = _real(ids, mask, MOST_ROWS)
            self._sequences = [tokens.tolist() for _, tokens in found]
            self._prompt = len(self._sequences[0]) if self._sequences else 0
            places = [int(place[-1]) if len(place) else 0 for place, _ in found]
        for row, (sequence, place) in enumerate(zip(self._sequences, places, strict=True)):
            if sequence:
                key = int(prefix_hashes(np.array(sequence))[-1])
                number = self._numbers.setdefault(key, len(self._numbers))
                if number < 2 * MOST_ROWS * MOST_TOKENS:
                    self.chosen.append((row, place, number, key))

    def _is_decoding(self, ids: torch.Tensor, mask: Any) -> bool:
        longer = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > ids.shape[1]
        return ids.shape[1] == 1 and bool(self._sequences) and (longer or not isinstance(mask, torch.Tensor))

    def rows_of(self, tensor: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields number, key and values of each chosen token in a tensor.

        Args:
            tensor: (B, T) or (B, T, H); logits may be those of the last tokens only. Others have no rows.
        """
        if tensor.ndim not in (2, 3) or tensor.shape[0] != self._shape[0] or tensor.shape[1] > self._shape[1]:
            return
        if tensor.ndim == 2 and tensor.shape[1] != self._shape[1]:
            return
        offset = self._shape[1] - tensor.shape[1]
        for row, place, number, key in self.chosen:
            if place >= offset:
                yield number, key, tensor[row, place - offset]

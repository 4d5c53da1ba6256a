"""Tokens by their whole prefix, so that a sampled token is found again when it is scored, whatever the padding."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..model.rows import images_by_row
from .digest import hash_of, plain


MOST_ROWS, MOST_TOKENS = 2, 6
"""Sequences of a rollout, and tokens of each, whose values are recorded: the last of the prompt and the first ones of
the completion."""
FEWER_FROM = 500
"""Modules of a model from which on fewer tokens are recorded, as each has a value in each module."""
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


def media_of(inputs: Mapping[str, Any], rows: int) -> np.ndarray[Any, Any] | None:
    """Returns a hash of the images of each sequence, (B,) int64; `None` if it is not known which image is whose.

    Args:
        inputs: The inputs of the model by name.
        rows: The number of sequences, B.
    """
    if not isinstance(inputs.get("pixel_values"), torch.Tensor):
        return np.zeros(rows, np.int64)
    parts = images_by_row(inputs, rows)
    if parts is None:
        return None
    halves = (plain(part).to(torch.bfloat16) for part in parts)  # the dtype of a rollout may be another one
    return np.array([int(hash_of(half)) for half in halves], np.int64)


class TokenRows:
    """The tokens of the running call of the model whose values are recorded.

    Args:
        modules: The number of modules that are recorded.

    Attributes:
        chosen: Sequence, position, number and key of each chosen token.
        images: The images of the running call of `generate`, which it may encode before it calls the model.
    """

    def __init__(self, modules: int) -> None:
        self._most = min(MOST_TOKENS, max(2, MOST_TOKENS * FEWER_FROM // max(1, modules)))
        self.chosen: list[tuple[int, int, int, int]] = []
        self.images: Mapping[str, Any] = {}
        self._shape = (0, 0)
        self._numbers: dict[int, int] = {}
        self._sequences: list[list[int]] = []
        self._seeds: np.ndarray[Any, Any] = np.zeros(0, np.int64)
        self._prompt = 0
        self._origins: dict[tuple[str, int], torch.Tensor] = {}
        self._indices: dict[tuple[int, bool, torch.device], tuple[Any, Any, torch.Tensor, torch.Tensor]] = {}

    def begin(self, inputs: Mapping[str, Any], rollout: bool) -> None:
        """Chooses the tokens of a call: the first ones of a rollout, and those again in other phases.

        Args:
            inputs: The inputs of the model by name.
            rollout: Whether the call is one of a rollout.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        self.chosen = []
        self._indices.clear()
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or (not rollout and not self._numbers):
            return
        decoding = rollout and self._is_decoding(ids, mask)
        seeds = media_of({**self.images, **inputs} if rollout and not decoding else inputs, ids.shape[0])
        if seeds is None:
            return
        self._shape = ids.shape[0], ids.shape[1]
        if not decoding:
            self._origins.clear()
        if not rollout:
            for row, (real, tokens) in enumerate(_real(ids, mask, SEARCHED_ROWS)):
                for place, key in zip(real.tolist(), (prefix_hashes(tokens) ^ seeds[row]).tolist(), strict=True):
                    if key in self._numbers:
                        self.chosen.append((row, place, self._numbers[key], key))
            return
        if decoding:
            if self._sequences and len(self._sequences[0]) - self._prompt >= self._most - 1:
                return
            for known, token in zip(self._sequences, ids[:MOST_ROWS, -1].tolist(), strict=False):
                known.append(token)
            places = [0] * len(self._sequences)
        else:
            found = _real(ids, mask, MOST_ROWS)
            self._sequences, self._seeds = [tokens.tolist() for _, tokens in found], seeds
            self._prompt = len(self._sequences[0]) if self._sequences else 0
            places = [int(place[-1]) if len(place) else 0 for place, _ in found]
        for row, (sequence, place) in enumerate(zip(self._sequences, places, strict=True)):
            if sequence:
                key = int(prefix_hashes(np.array(sequence))[-1] ^ self._seeds[row])
                number = self._numbers.setdefault(key, len(self._numbers))
                if number < 2 * MOST_ROWS * self._most:
                    self.chosen.append((row, place, number, key))

    def _is_decoding(self, ids: torch.Tensor, mask: Any) -> bool:
        longer = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > ids.shape[1]
        return ids.shape[1] == 1 and bool(self._sequences) and (longer or not isinstance(mask, torch.Tensor))

    def rows_of(self, name: str, slot: str, tensor: torch.Tensor) -> tuple[list[tuple[int, int]], torch.Tensor] | None:
        """Returns number and key of each chosen token in a tensor, and a copy of their values, (N, H).

        Args:
            name: The module; only the model and its head return fewer tokens than there are.
            slot: Name of the tensor.
            tensor: (B, T), (1, T) or (B, T, H); logits may be those of the last tokens only. `None` for others, as
                are positions in several dimensions, (P, B, T), whose number differs between `generate` and training.
        """
        if tensor.ndim == 3 and not tensor.is_floating_point():
            return None
        if tensor.ndim not in (2, 3) or tensor.shape[0] not in (1, self._shape[0]) or tensor.shape[1] > self._shape[1]:
            return None
        if tensor.shape[1] != self._shape[1] and (tensor.ndim == 2 or (name and "head" not in name)):
            return None
        offset = self._shape[1] - tensor.shape[1]
        rows, labels, *index = self._places(offset, tensor.shape[0] > 1, tensor.device)
        if not rows:
            return None
        values = tensor.detach()[tuple(index)]  # (N, H) or (N,)
        if "position" in slot and not tensor.is_floating_point():
            # Padding moves all positions of a sequence, so that they are counted from its first chosen token.
            origins = [self._origins.setdefault((slot, row), value) for row, value in zip(rows, values, strict=True)]
            values = values - torch.stack(origins)
        return labels, values.reshape(len(rows), -1)

    def _places(self, offset: int, several: bool, device: torch.device) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        """Sequences, numbers with keys, and the index of the chosen tokens in tensors of the running call."""
        known = offset, several, device
        if known not in self._indices:
            found = [chosen for chosen in self.chosen if chosen[1] >= offset]
            rows = [row for row, *_ in found]
            held = torch.tensor(rows if several else [0] * len(rows), dtype=torch.long, device=device)
            places = torch.tensor([place - offset for _, place, *_ in found], dtype=torch.long, device=device)
            self._indices[known] = rows, [(number, key) for *_, number, key in found], held, places
        return self._indices[known]

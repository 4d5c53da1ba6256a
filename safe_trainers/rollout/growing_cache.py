"""Writes the keys and values of sampled tokens into tensors with room for further tokens.

A dynamic cache of transformers concatenates: for each token, each layer copies all keys and values so far. While a
turn is generated, a token is written behind those before it instead, and everything is copied once for every `ROOM`
tokens. The cache holds the same keys and values, as views of longer tensors.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


ROOM = 32
"""Number of further tokens for which a tensor has room when it is allocated."""

Update = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The method `update` of a cache."""


class GrowingTensor:
    """Concatenates keys or values with those before them, and copies none of these while there is room."""

    def __init__(self) -> None:
        self._stored: torch.Tensor | None = None
        self._end = 0

    def append(self, before: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Returns what `torch.cat([before, new], dim=-2)` does.

        Args:
            before: The last tokens of the previous result, (B, heads, T, head size), or another tensor.
            new: The tokens to append, (B, heads, N, head size), in a dtype that is cast to that of `before` exactly.

        Returns:
            A view in the dtype of `before`, (B, heads, T + N, head size).
        """
        length, added = before.shape[-2], new.shape[-2]
        stored = self._stored
        if stored is None or not self._ends_with(before, stored) or self._end + added > stored.shape[-2]:
            stored = before.new_empty((*before.shape[:-2], length + added + ROOM, before.shape[-1]))
            stored[..., :length, :] = before
            self._stored, self._end = stored, length
        stored[..., self._end : self._end + added, :] = new
        self._end += added
        return stored[..., self._end - added - length : self._end, :]

    def _ends_with(self, before: torch.Tensor, stored: torch.Tensor) -> bool:
        """Whether a tensor is the view of the last tokens; it is not after the cache was cropped or reordered."""
        start = self._end - before.shape[-2]
        return (
            before.stride() == stored.stride()
            and before.shape[:-2] == stored.shape[:-2]
            and before.data_ptr() == stored.data_ptr() + start * stored.stride(-2) * stored.element_size()
        )


def growing_update(cache: DynamicCache) -> Update:
    """Returns a replacement for the method `update` of a cache, or this method if a subclass has its own.

    Args:
        cache: The cache.
    """
    if type(cache).update is not DynamicCache.update:
        return cache.update
    return partial(_update, cache, cache.update, defaultdict(lambda: (GrowingTensor(), GrowingTensor())))


def _update(
    cache: DynamicCache,
    update: Update,
    tensors: defaultdict[int, tuple[GrowingTensor, GrowingTensor]],
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends keys and values, each (B, heads, N, head size), to a layer that has some already."""
    layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not _appends(cache, layer, key_states, value_states):
        return update(key_states, value_states, layer_idx, *args, **kwargs)
    of_keys, of_values = tensors[layer_idx]
    keys, values = of_keys.append(layer.keys, key_states), of_values.append(layer.values, value_states)
    kept = slice(None)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += key_states.shape[-2]
        kept = slice(1 - layer.sliding_window, None)
    layer.keys, layer.values = keys[..., kept, :], values[..., kept, :]
    return keys, values


def _appends(cache: DynamicCache, layer: Any, *new: torch.Tensor) -> bool:
    """Whether the `update` of a layer concatenates, on one device and without a graph for gradients."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not layer.is_initialized:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or getattr(cache, "offloading", False):
        return False
    if getattr(layer, "record_past", False):  # it keeps more than the window, until it is cropped
        return False
    return all(
        type(states) is torch.Tensor
        and states.ndim == 4
        and states.device == held.device
        and torch.promote_types(states.dtype, held.dtype) == held.dtype
        for states, held in zip(new, (layer.keys, layer.values), strict=True)
    )

"""Chooses the dtype of the key-value cache of rollouts, and lets it grow without copies.

Autocast gives keys and values in two dtypes: the value projection returns the autocast dtype, and rotary embeddings
return keys in the dtype of the residual stream, which is float32. A dynamic cache of transformers stores both in
float32. Kernels that take queries, keys and values in one dtype then cast the whole cache to the autocast dtype for
every token. A static cache of transformers before 5.24 allocates one dtype for both, and refuses the other. Since 5.24
both caches store each of the two dtypes.

While a turn is generated under autocast, keys and values are cast to the autocast dtype once, when they are stored.
The kernels compute with the same values, and what was float32 takes half of the memory. Where the model's own code
computes attention (`"eager"`, or a kernel that is not in `KERNELS`), nothing is rounded: a dynamic cache is left as it
is, and the values of a static one are cast to the dtype of the keys.

With and without autocast, a dynamic cache grows as `growing_cache` describes.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer

from ..core.patches import replace, restore
from .growing_cache import growing_update


KERNELS = frozenset({"sdpa", "flash_attention_2", "flash_attention_3"})
"""Attention implementations of transformers of which autocast casts queries, keys and values to its dtype."""


def asks_for_cache(*owners: Any) -> bool:
    """Whether a generation config asks for a cache implementation.

    Args:
        *owners: Trainers and models, with or without `generation_config`.
    """
    configs = (getattr(owner, "generation_config", None) for owner in owners)
    return any(getattr(config, "cache_implementation", None) is not None for config in configs)


@contextlib.contextmanager
def cache_prepared(text: nn.Module, autocast: bool) -> Iterator[None]:
    """Prepares the cache that the first forward pass in the block is called with.

    Args:
        text: The text model, which gets the cache as `past_key_values`, or as `cache` since transformers 5.24.
        autocast: Whether the block runs under autocast.
    """
    caches: list[Any] = []
    rounds = autocast and getattr(getattr(text, "config", None), "_attn_implementation", None) in KERNELS

    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()  # later passes may be compiled, and have the same cache
        for cache in kwargs.values():
            grows = isinstance(cache, DynamicCache)
            if not (grows or (autocast and isinstance(cache, StaticCache))):
                continue
            update = growing_update(cache) if grows else cache.update
            if rounds or not grows:
                update = partial(_update, cache, update, rounds)
            caches.append(cache)
            replace("rollout-cache", cache, "update", update)
            return

    handle = text.register_forward_pre_hook(prepare, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        for cache in caches:
            restore(cache, "update")  # which refers to the cache; without it, the cache is freed after the turn
            for layer in cache.layers:
                if isinstance(layer, StaticLayer):
                    layer.is_initialized = False  # transformers before 5.23 uses it again, maybe in another dtype


def _update(
    cache: Any,
    update: Any,
    rounds: bool,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds keys and values, each (B, heads, T, head size), to a layer of a cache in one dtype."""
    kind = key_states.device.type
    # A module that is held in float32 disables autocast around its attention.
    dtype = torch.get_autocast_dtype(kind) if rounds and torch.is_autocast_enabled(kind) else key_states.dtype
    dtypes = dtype, dtype
    layer = cache.layers[layer_idx] if isinstance(cache, StaticCache) else None
    if isinstance(layer, StaticLayer) and layer.is_initialized:  # it writes into tensors that exist
        dtypes = layer.keys.dtype, layer.values.dtype
    return update(key_states.to(dtypes[0]), value_states.to(dtypes[1]), layer_idx, *args, **kwargs)

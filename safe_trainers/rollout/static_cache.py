"""Lets rollouts under autocast use a static key-value cache (`cache_implementation="static"`).

Autocast gives keys and values in two dtypes: the value projection returns the autocast dtype, and rotary embeddings
return keys in the dtype of the residual stream. A dynamic cache stores each as it is. A static cache of transformers
before 5.24 allocates one dtype for both, that of the keys, and its `index_copy_` refuses the other. While a turn is
generated, the values are cast to the dtype of the keys; attention under autocast casts them back without a loss.

Transformers 5.24 allocates a dtype for each, and calls the argument `cache`, so that nothing is changed there.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import StaticLayer

from ..core.patches import replace


def asks_for_cache(*owners: Any) -> bool:
    """Whether a generation config asks for a cache implementation.

    Args:
        *owners: Trainers and models, with or without `generation_config`.
    """
    configs = (getattr(owner, "generation_config", None) for owner in owners)
    return any(getattr(config, "cache_implementation", None) is not None for config in configs)


@contextlib.contextmanager
def static_cache_in_one_dtype(text: nn.Module) -> Iterator[None]:
    """Prepares the cache that the first forward pass in the block is called with.

    Args:
        text: The text model, which gets the cache as `past_key_values`.
    """

    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()  # later passes may be compiled, and have the same cache
        for layer in getattr(kwargs.get("past_key_values"), "layers", ()):
            if isinstance(layer, StaticLayer):
                replace("static-cache", layer, "update", partial(_update, layer, layer.update))

    handle = text.register_forward_pre_hook(prepare, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _update(layer: Any, update: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Adds keys and values, each (B, heads, T, head size), to a layer of a static cache in the layer's dtype."""
    dtype = layer.keys.dtype if layer.is_initialized else keys.dtype
    return update(keys.to(dtype), values.to(dtype), *args, **kwargs)

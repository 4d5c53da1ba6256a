"""Weights for a sampler: base and adapter in one tensor, the base untouched, and a measure of what that loses.

To push weights to vLLM, TRL merges the adapter into the base and unmerges it again. In half precision that does not
give the old weights back, so that the base drifts with each sync; and a packed base is packed anew, and pushed as
packed bytes. Here TRL's own sync runs as it is, on weights that are merged beside the model.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .merged import Weight, weights_of
from .towers import unwrap


METRIC = "precision/sync_lost_frac"
"""Of the elements that the adapters change, the share that is sent as the base's: base and merged weight are equal in
the dtype of the sampler. Between 0 and 1."""
SAMPLE = 1 << 13
"""Elements of each weight that are looked at for it, or up to twice as many, evenly spread over it."""
SYNC_LOST_LIMIT = 0.5
"""Above it, most of what the adapters change does not reach the sampler."""
PATIENCE = 10
"""Syncs in a row that have to lose more than `sync_lost_limit`: the first updates of an adapter are always small."""


class AdapterSync:
    """What one trainer sends of a model with adapters.

    Args:
        model: The model with PEFT adapters, as TRL walks through it.
        dtype: The dtype of the sampler, which merged weights are rounded to once, from float32; `None` for what the
            base holds each in.
        measure: Whether to measure what is lost.

    Attributes:
        lost: The `METRIC` of the last sync; `None` where no adapter changed anything yet.
        tied: Names of adapted weights that share their tensor with another one that they differ from now.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, measure: bool = True) -> None:
        self.lost: float | None = None
        self.tied: tuple[str, ...] = ()
        self._model, self._dtype, self._measure = model, dtype, measure
        self._counts: dict[tuple[int, torch.device], list[torch.Tensor]] = defaultdict(list)

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Lets the model look merged while the block runs, to what walks through its `named_parameters`.

        Merging and unmerging do nothing meanwhile. Nothing in the model is written to, and the extra memory is one
        layer in float32, however many there are.
        """
        attributes = vars(self._model)
        plain = type(self._model).named_parameters
        shadows = {
            "merge_adapter": lambda *_, **__: None,
            "unmerge_adapter": lambda *_, **__: None,
            # What gathers sharded weights has to see them as they are; it would ask `named_parameters`.
            "parameters": lambda recurse=True: (p for _, p in plain(self._model, recurse=recurse)),
            "named_parameters": lambda *_, **__: self.named_weights(),
        }
        before = {name: attributes[name] for name in shadows if name in attributes}
        attributes.update(shadows)
        try:
            yield
        finally:
            for name in shadows:
                del attributes[name]
            attributes.update(before)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged weights by the names that they have without PEFT, one layer at a time.

        Yields:
            What the base has as parameters, once each; an adapted weight also where another one shares its tensor. To
            be read, not written: most are the live tensors.
        """
        self._counts.clear()
        plain: set[tuple[Any, ...]] = set()
        adapted: dict[str, tuple[Any, ...]] = {}

        def hand_out(weight: Weight) -> tuple[str, torch.Tensor] | None:
            if weight.buffer or (weight.before is None and weight.place in plain):
                return None  # TRL sends no buffers, and a tied weight under its first name
            if weight.before is None:
                plain.add(weight.place)
            else:
                adapted[weight.name] = weight.place
            exact = weight.load()
            made = weight.rounded(exact, self._dtype)
            if self._measure and weight.before is not None:
                self._count(weight.before(), exact, made)
            return weight.name, made

        # `filter` and `map` hold no layer while the next one is merged, as the variable of a loop does.
        yield from filter(None, map(hand_out, weights_of(self._model, self._dtype, checked=True)))
        self.lost = self._share()
        times = Counter((*plain, *adapted.values()))
        self.tied = tuple(name for name, place in adapted.items() if times[place] > 1)

    @torch.no_grad()
    def _count(self, before: torch.Tensor, exact: torch.Tensor, made: torch.Tensor) -> None:
        """Counts a weight: what its base held, what it is in float32, and what is sent."""
        step = max(1, exact.numel() // SAMPLE)
        if step > 1:
            before, exact, made = (tensor.reshape(-1)[::step] for tensor in (before, exact, made))  # (S,)
        changes = before != exact
        lost = changes & (before.to(made.dtype) == made)
        self._counts[step, made.device] += [torch.count_nonzero(lost), torch.count_nonzero(changes)]

    def _share(self) -> float | None:
        lost = changes = 0
        for (step, _), counts in self._counts.items():
            numbers = torch.stack(counts).tolist()  # the device is read once for all weights of a size
            lost, changes = lost + step * sum(numbers[::2]), changes + step * sum(numbers[1::2])
        return lost / changes if changes else None


def ties_weights(model: nn.Module) -> bool:
    """Whether a model's config says that embeddings and head are one weight.

    Args:
        model: The model, wrapped or not.
    """
    config = getattr(unwrap(model), "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))

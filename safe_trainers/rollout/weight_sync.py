"""Sends merged weights to a sampler without merging in the model, and measures how much of the adapter is lost.

To sync weights to vLLM, TRL merges the adapter into the base weights and unmerges it afterwards. In half precision
this does not restore the base weights, so they drift with each sync; and quantised base weights are quantised again
and sent as packed bytes. Here TRL's sync runs on merged copies, made one layer at a time, and the model does not
change.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..core.errors import PrecisionError
from ..core.patches import patched
from ..model.parts import unwrap
from ..weights.merged import Weight, weights_of
from .vllm import weights_reloaded


METRIC = "precision/sync_lost_frac"
"""The share of the elements changed by the adapters that round back to the base weight in the dtype of the sampler,
between 0 and 1."""
SAMPLE = 1 << 13
"""`METRIC` is measured on about this many elements of each weight, evenly spaced, and on at most twice as many."""
PATIENCE = 10
"""Consecutive syncs that must lose more than `sync_lost_limit` before a warning, since the first updates of an adapter
are always small."""


class AdapterSync:
    """Merges adapters for the weight syncs of one trainer.

    Args:
        model: The model with PEFT adapters.
        dtype: The dtype of the sampler. Merged weights are rounded to it once, from float32. `None` rounds each weight
            to the dtype of its base weight.
        measure: Whether to measure the lost share.

    Attributes:
        lost: The `METRIC` of the last sync; `None` if the adapters have not changed any weight yet.
        tied: Names of adapted weights that the model ties to another weight, and that differ from it when merged.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, measure: bool = True) -> None:
        self.lost: float | None = None
        self.tied: tuple[str, ...] = ()
        self._model, self._dtype, self._measure = model, dtype, measure
        self._counts: dict[tuple[int, torch.device], list[torch.Tensor]] = defaultdict(list)

    @contextlib.contextmanager
    def sending(self, generation: Any) -> Iterator[None]:
        """Makes a weight sync of TRL that runs in the block send merged weights.

        Args:
            generation: TRL's `VLLMGeneration`.
        """
        with weights_reloaded(generation), self.merged():
            yield

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Makes `named_parameters` of the model return merged weights while the block runs.

        `merge_adapter` and `unmerge_adapter` do nothing in the block. The model is not written to, and the extra
        memory is one layer in float32.
        """
        plain = type(self._model).named_parameters
        with patched(
            "merged-view",
            self._model,
            merge_adapter=lambda *_, **__: None,
            unmerge_adapter=lambda *_, **__: None,
            # Code that gathers sharded weights needs the model's own parameters; by default `parameters` calls
            # `named_parameters`.
            parameters=lambda recurse=True: (p for _, p in plain(self._model, recurse=recurse)),
            named_parameters=lambda *_, **__: self.named_weights(),
        ):
            yield

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the merged weights with their names without PEFT, one layer at a time.

        Yields:
            Each parameter of the base model once; an adapted weight also if it is tied to another one. Most are the
            model's own tensors: do not write to them.

        Raises:
            PrecisionError: If merged weights overflow float16, after all weights: a server that receives them waits
                for all of them.
        """
        self._counts.clear()
        failed: list[PrecisionError] = []
        plain: set[tuple[Any, ...]] = set()
        adapted: dict[str, tuple[Any, ...]] = {}

        def merge(weight: Weight) -> tuple[str, torch.Tensor] | None:
            if weight.buffer or (weight.before is None and weight.place in plain):
                return None  # TRL sends no buffers, and a tied weight only under its first name
            if weight.before is None:
                plain.add(weight.place)
            else:
                adapted[weight.name] = weight.place
            exact = weight.load()
            try:
                rounded = weight.rounded(exact, self._dtype)
            except PrecisionError as error:
                failed.append(error)
                return weight.name, exact.to(torch.float16)
            if self._measure and weight.before is not None:
                self._count(weight.before(), exact, rounded)
            return weight.name, rounded

        # A loop variable would keep one layer in memory while the next is merged; `filter` and `map` do not.
        yield from filter(None, map(merge, weights_of(self._model, self._dtype, checked=True)))
        if failed:
            raise failed[0]
        self.lost = self._lost_share()
        times = Counter((*plain, *adapted.values()))
        self.tied = tuple(name for name, place in adapted.items() if times[place] > 1)

    @torch.no_grad()
    def _count(self, base: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Counts changed and lost elements of a weight: the base weight, merged in float32, and as it is sent."""
        step = max(1, exact.numel() // SAMPLE)
        if step > 1:
            base, exact, rounded = (tensor.reshape(-1)[::step] for tensor in (base, exact, rounded))  # (S,)
        changed = base != exact
        lost = changed & (base.to(rounded.dtype) == rounded)
        self._counts[step, rounded.device] += [torch.count_nonzero(lost), torch.count_nonzero(changed)]

    def _lost_share(self) -> float | None:
        lost = changed = 0
        for (step, _), counts in self._counts.items():
            numbers = torch.stack(counts).tolist()  # one read of the device for all weights with this step
            lost, changed = lost + step * sum(numbers[::2]), changed + step * sum(numbers[1::2])
        return lost / changed if changed else None


def ties_weights(model: nn.Module) -> bool:
    """Whether a model's config ties the output head to the input embeddings."""
    config = getattr(unwrap(model), "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))

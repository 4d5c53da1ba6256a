"""What updates do, seen on a fixed sample of the trained elements.

A few thousand places are drawn once, some of each parameter. Every few steps their gradients, and their weights before
and after the update, are read. No copy of the weights is made, and nothing is read back from the device until the next
log.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


SAMPLE = 4096
"""Elements that are looked at, spread over the parameters by their size."""
LEAST = 8
"""Elements of each parameter that are looked at, where it has so many."""
EVERY = 5
"""Optimizer steps from one look to the next; those that were skipped do not count."""
_ZERO, _NONZERO, _STEPPED, _LOST = range(4)


class UpdateSample:
    """Counts what the updates of an optimizer do to a fixed sample of its elements.

    A parameter stands for its part in this process, of a `DTensor` the local shard: sums over the processes are those
    of the whole.

    Args:
        optimizer: The optimizer, wrapped by accelerate or not.
        sparse: Parameters whose gradients are zero by nature, by `id`: of an embedding, the rows of all tokens that
            are not in the batch. They do not count for `grad_zero_frac`.
        size: Elements to look at in all.
    """

    def __init__(self, optimizer: Any, sparse: Iterable[int] = (), size: int = SAMPLE) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        members = [(number, p) for number, group in enumerate(groups) for p in group["params"] if p.requires_grad]
        self._parameters: list[nn.Parameter] = [parameter for _, parameter in members]
        self._group_of = [number for number, _ in members]
        left_out = set(sparse)
        dense = [id(parameter) not in left_out for parameter in self._parameters]
        self._dense = torch.tensor(dense, dtype=torch.bool)  # (P,); DeepSpeed's optimizer has no parameters to show
        self._sizes = [_local(parameter).numel() for parameter in self._parameters]
        self._places = _draw(self._parameters, self._sizes, size)
        self._drawn = torch.tensor([len(places) for places in self._places], dtype=torch.int64)  # (P,)
        self._count = int(self._drawn.sum())  # S
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._repeats = self._drawn.to(device)  # (P,)
        self._before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._last: torch.Tensor | None = None  # (S,), the weights at the last look
        self._begin(device)

    def _begin(self, device: torch.device) -> None:
        self._counts = torch.zeros(len(self._parameters), 4, dtype=torch.int64, device=device)  # (P, 4)
        self._moved: torch.Tensor | None = None  # (P,), elements that moved up to the last look

    @torch.no_grad()
    def before(self) -> None:
        """Reads gradients and weights when the gradients are final and the optimizer has not stepped yet.

        Nothing is read where nothing can move, as a warm-up begins with a learning rate of 0, nor where an engine has
        moved its shards about, so that other elements are at the places.
        """
        self._before = None
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        stepped = torch.tensor([rates[number] > 0 for number in self._group_of], dtype=torch.bool)  # (P,)
        gradients = [_gradient(parameter) for parameter in self._parameters]
        known = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.bool)  # (P,)
        if not (stepped & known).any() or [_local(p).numel() for p in self._parameters] != self._sizes:
            return
        flags = torch.stack([known, stepped], dim=1).to(self._repeats.device)  # (P, 2)
        self._before = (self._read(self._parameters), self._read(gradients), flags)

    @torch.no_grad()
    def after(self, skipped: bool) -> bool:
        """Reads the weights again, and counts.

        Args:
            skipped: Whether the optimizer did not step. Nothing is counted then: clipping by a norm that is not finite
                leaves zeros where there were none.

        Returns:
            Whether something was counted.
        """
        before, self._before = self._before, None
        if before is None or skipped:
            return False
        weights, gradients, flags = before
        known, stepped = self._of_each(flags).unbind(1)  # (S,) each, as are weights and gradients
        updated = self._read(self._parameters)  # (S,)
        nonzero = known & (gradients != 0)
        counted = nonzero & stepped
        seen = torch.stack([known & (gradients == 0), nonzero, counted, counted & (updated == weights)], dim=1)
        owner = self._of_each(torch.arange(len(self._parameters), device=self._repeats.device))  # (S,)
        self._counts.index_add_(0, owner, seen.to(torch.int64))  # (P, 4)
        moved = (updated != (weights if self._last is None else self._last)) | ~stepped
        self._moved = torch.zeros_like(self._counts[:, 0]).index_add_(0, owner, moved.to(torch.int64))
        self._last = updated
        return True

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Gives the metrics since they were last given, and begins anew.

        Args:
            total: Sums a float64 tensor over all processes.

        Returns:
            Those of `grad_zero_frac`, `update_lost_frac` and `stalled_params` that something was seen of.
        """
        none = torch.zeros(len(self._parameters), dtype=torch.int64)
        weight = torch.tensor(self._sizes, dtype=torch.float64) / self._drawn.clamp(min=1)  # (P,), elements a place
        counts = self._counts.cpu() * weight[:, None]  # (P, 4)
        sums = torch.cat([counts[self._dense, :2].sum(0), counts[:, 2:].sum(0)])  # (4,)
        moved = none if self._moved is None else self._moved.cpu()
        looked = none if self._moved is None else self._drawn
        everywhere = total(torch.cat([sums, moved, looked])).cpu()  # (4 + 2P,)
        zero, nonzero, stepped, lost = everywhere[:4].tolist()
        moved, looked = everywhere[4:].chunk(2)
        found = {}
        if zero + nonzero > 0:
            found["grad_zero_frac"] = zero / (zero + nonzero)
        if stepped > 0:
            found["update_lost_frac"] = lost / stepped
        if looked.any():
            found["stalled_params"] = float(((looked > 0) & (moved == 0)).sum())
        self._begin(self._counts.device)
        return found

    def state(self) -> dict[str, torch.Tensor | None]:
        """What a resumed run needs to go on with the same numbers."""
        return {"last": self._last, "counts": self._counts, "moved": self._moved}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` gave; nothing where this process holds other elements."""
        last, counts = state["last"], state["counts"]
        if counts.shape == self._counts.shape and (last is None or last.shape == (self._count,)):
            device = self._repeats.device
            self._last, self._moved = (
                None if held is None else held.to(device) for held in (last, state["moved"])
            )  # fmt: skip
            self._counts = counts.to(device)

    def _of_each(self, of_parameters: torch.Tensor) -> torch.Tensor:
        """What is known of the parameters, (P, ...), of each place, (S, ...)."""
        return torch.repeat_interleave(of_parameters, self._repeats, dim=0, output_size=self._count)

    def _read(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The elements at the places, one after the other; zeros where there is no tensor."""
        device = self._repeats.device
        parts = [
            places.new_zeros(len(places), dtype=torch.float32)
            if tensor is None
            else _local(tensor).reshape(-1)[places].to(device)
            for tensor, places in zip(tensors, self._places, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=device)  # (S,), in the widest dtype


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is in this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient, where it is one that can be read place by place."""
    gradient = parameter.grad
    return None if gradient is None or gradient.is_sparse else gradient


def _draw(parameters: Sequence[nn.Parameter], sizes: Sequence[int], size: int) -> list[torch.Tensor]:
    """Draws the places of each parameter, the same in each run, without touching the global random state.

    Not evenly spaced: a stride would meet the same column of a matrix again and again.
    """
    generator = torch.Generator().manual_seed(0)
    total, places = max(1, sum(sizes)), []
    for parameter, count in zip(parameters, sizes, strict=True):
        wanted = max(LEAST, round(size * count / total))
        if count <= 1 << 16:
            drawn = torch.randperm(count, generator=generator)[:wanted].sort().values
        else:  # no list of all places of a large matrix; hardly any is drawn twice
            drawn = torch.randint(count, (wanted,), generator=generator).unique()
        narrow = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64  # these are held all the run
        places.append(drawn.to(_local(parameter).device, narrow))
    return places

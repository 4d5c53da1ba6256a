"""Measures optimizer updates on a fixed sample of the trained elements.

A few thousand elements are drawn once, some of each parameter. Every few steps their gradients, and their weights
before and after the update, are read. The weights are not copied, and the device is not synchronised until the next
log.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..model.parts import local_shard


SAMPLE = 4096
"""Number of sampled elements, distributed over the parameters by size."""
LEAST = 8
"""Smallest number of sampled elements of a parameter that has so many."""
EVERY = 5
"""Taken optimizer steps from one sampling to the next."""
_ZERO, _NONZERO, _STEPPED, _LOST = range(4)


class UpdateSample:
    """Counts zero gradients, lost updates and stalled parameters on a fixed sample of an optimizer's elements.

    Of a `DTensor` only the local shard is sampled, so that sums over the ranks cover the whole parameter.

    Args:
        optimizer: The optimizer, wrapped by accelerate or not.
        sparse: `id`s of parameters that do not count for `grad_zero_frac`, since most of their gradient is zero, as in
            the rows of an embedding whose tokens are not in the batch.
        size: Total number of elements to sample.
    """

    def __init__(self, optimizer: Any, sparse: Iterable[int] = (), size: int = SAMPLE) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        members = [(number, p) for number, group in enumerate(groups) for p in group["params"] if p.requires_grad]
        self._parameters: list[nn.Parameter] = [parameter for _, parameter in members]
        self._group_of = [number for number, _ in members]
        left_out = set(sparse)
        dense = [id(parameter) not in left_out for parameter in self._parameters]
        self._dense = torch.tensor(dense, dtype=torch.bool)  # (P,); P is 0 under DeepSpeed
        self._sizes = [local_shard(parameter).numel() for parameter in self._parameters]
        self._places = _draw(self._parameters, self._sizes, size)
        self._drawn = torch.tensor([len(places) for places in self._places], dtype=torch.int64)  # (P,)
        self._count = int(self._drawn.sum())  # S
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._repeats = self._drawn.to(device)  # (P,)
        self._before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._last: torch.Tensor | None = None  # (S,), the weights at the last sampling
        self._begin(device)

    def _begin(self, device: torch.device) -> None:
        self._counts = torch.zeros(len(self._parameters), 4, dtype=torch.int64, device=device)  # (P, 4)
        self._moved: torch.Tensor | None = None  # (P,), number of changed elements

    @torch.no_grad()
    def before(self) -> None:
        """Reads gradients and weights right before the optimizer's step.

        Reads nothing if every learning rate is 0, as at the start of a warm-up, or if an engine has changed its
        shards, so that the sampled positions hold other elements.
        """
        self._before = None
        steps = [_has_rate(group) for group in self._optimizer.param_groups]
        stepped = torch.tensor([steps[number] for number in self._group_of], dtype=torch.bool)  # (P,)
        gradients = [_gradient(parameter) for parameter in self._parameters]
        known = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.bool)  # (P,)
        if not (stepped & known).any() or [local_shard(p).numel() for p in self._parameters] != self._sizes:
            return
        flags = torch.stack([known, stepped], dim=1).to(self._repeats.device)  # (P, 2)
        self._before = (self._read(self._parameters), self._read(gradients), flags)

    @torch.no_grad()
    def after(self, skipped: bool) -> bool:
        """Reads the weights after the step, and updates the counts.

        Args:
            skipped: Whether the step was skipped. It is then not counted, because clipping by a norm that is not
                finite sets gradients to zero.

        Returns:
            Whether the step was counted.
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
        """Returns the metrics since the last call, and resets the counts.

        Args:
            total: Sums a float64 tensor over all ranks.

        Returns:
            `grad_zero_frac`, `update_lost_frac` and `stalled_params`, without those that have no data.
        """
        none = torch.zeros(len(self._parameters), dtype=torch.int64)
        weight = torch.tensor(self._sizes, dtype=torch.float64) / self._drawn.clamp(min=1)  # (P,)
        counts = self._counts.cpu() * weight[:, None]  # (P, 4)
        sums = torch.cat([counts[self._dense, :2].sum(0), counts[:, 2:].sum(0)])  # (4,)
        moved = none if self._moved is None else self._moved.cpu()
        sampled = none if self._moved is None else self._drawn
        everywhere = total(torch.cat([sums, moved, sampled])).cpu()  # (4 + 2P,)
        zero, nonzero, stepped, lost = everywhere[:4].tolist()
        moved, sampled = everywhere[4:].chunk(2)
        found = {}
        if zero + nonzero > 0:
            found["grad_zero_frac"] = zero / (zero + nonzero)
        if stepped > 0:
            found["update_lost_frac"] = lost / stepped
        if sampled.any():
            found["stalled_params"] = float(((sampled > 0) & (moved == 0)).sum())
        self._begin(self._counts.device)
        return found

    def state(self) -> dict[str, torch.Tensor | None]:
        """The counts, and the weights at the last sampling."""
        return {"last": self._last, "counts": self._counts, "moved": self._moved}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned, unless this rank now holds other elements."""
        last, counts = state["last"], state["counts"]
        if counts.shape == self._counts.shape and (last is None or last.shape == (self._count,)):
            device = self._repeats.device
            self._last, self._moved = (
                None if held is None else held.to(device) for held in (last, state["moved"])
            )  # fmt: skip
            self._counts = counts.to(device)

    def _of_each(self, of_parameters: torch.Tensor) -> torch.Tensor:
        """Expands a tensor by parameter, (P, ...), to one by sampled element, (S, ...)."""
        return torch.repeat_interleave(of_parameters, self._repeats, dim=0, output_size=self._count)

    def _read(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns the sampled elements of all tensors, (S,); zeros for `None`."""
        device = self._repeats.device
        parts = [
            torch.zeros(len(places), dtype=torch.float32, device=device)
            if tensor is None
            else local_shard(tensor).reshape(-1)[places].to(device)
            for tensor, places in zip(tensors, self._places, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=device)  # (S,), in the widest dtype


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient of a parameter; `None` without one, or if it is sparse."""
    gradient = parameter.grad
    return None if gradient is None or gradient.is_sparse else gradient


def _draw(parameters: Sequence[nn.Parameter], sizes: Sequence[int], size: int) -> list[torch.Tensor]:
    """Draws the sampled positions of each parameter, the same in each run, without using the global random state.

    They are not evenly spaced, because a stride could sample the same few columns of a matrix.
    """
    generator = torch.Generator().manual_seed(0)
    total, places = max(1, sum(sizes)), []
    for parameter, count in zip(parameters, sizes, strict=True):
        wanted = max(LEAST, round(size * count / total))
        if count <= 1 << 16:
            drawn = torch.randperm(count, generator=generator)[:wanted].sort().values
        else:  # avoids a list of all positions; few are drawn twice
            drawn = torch.randint(count, (wanted,), generator=generator).unique()
        narrow = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64  # kept for the whole run
        places.append(drawn.to(local_shard(parameter).device, narrow))
    return places


def _has_rate(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer steps with a group; some choose the learning rate themselves."""
    rate = group.get("lr")
    return not isinstance(rate, (int, float, torch.Tensor)) or float(rate) > 0

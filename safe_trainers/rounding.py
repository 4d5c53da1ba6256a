"""How many updates a half-precision weight would not notice."""

from collections.abc import Iterable

import torch


SAMPLE = 1 << 13
"""About how many elements of each tensor are looked at, evenly spread over it."""


def lost_share(tensors: Iterable[torch.Tensor], learning_rate: float, dtype: torch.dtype) -> float:
    """The share of elements that an optimizer's update leaves as they were.

    Adam moves each element by about the learning rate, whatever the size of its gradient (Kingma and Ba,
    https://arxiv.org/abs/1412.6980); an update below half the distance to the next number of the dtype rounds to
    nothing. Elements that are zero are left out: their first update always counts, and says nothing of those after it.

    Args:
        tensors: Weights in any floating dtype and on any device.
        learning_rate: The peak learning rate.
        dtype: The dtype that the weights would be held in.

    Returns:
        Between 0 and 1, the mean of an update up and one down; 0.0 where there is no element to look at.
    """
    samples, sizes = [], []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sizes.append(flat.numel())
        # Odd: an even stride would meet the same columns of a matrix again and again.
        samples.append(flat[:: max(1, flat.numel() // SAMPLE) | 1].to(dtype, copy=True))  # no view, which keeps `flat`
    if not samples:
        return 0.0
    lengths = torch.tensor([len(sample) for sample in samples])  # (T,)
    sample = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()  # (S,), the one read of the device
    wide = sample.float()
    counted = wide != 0
    unmoved = [((wide + step).to(dtype).float() == wide) & counted for step in (learning_rate, -learning_rate)]
    seen, *lost = (_sums(flags, lengths) for flags in (counted, *unmoved))  # (T,) each
    weight = torch.tensor(sizes, dtype=torch.float64) * (seen > 0)  # (T,)
    total = float(weight.sum())
    return float((sum(lost) / 2 / seen.clamp(min=1) * weight).sum()) / total if total else 0.0


def _sums(flags: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many are set of each of several runs of flags (S,), whose lengths are (T,)."""
    up_to = torch.cat([torch.zeros(1, dtype=torch.int64), flags.cumsum(0)])  # (S + 1,)
    ends = lengths.cumsum(0)
    return up_to[ends] - up_to[ends - lengths]

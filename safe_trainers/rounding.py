"""How many updates a half-precision weight would not notice."""

from collections.abc import Iterable

import torch


SAMPLE = 1 << 16
"""Elements of each tensor that are looked at, evenly spread over it."""


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
    lost, seen = 0.0, 0.0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].to(dtype)  # (S,)
        sample = sample[sample != 0]
        if sample.numel() == 0:
            continue
        wide = sample.to(torch.float64)
        unmoved = sum(((wide + step).to(dtype) == sample).double().mean() for step in (learning_rate, -learning_rate))
        weight = flat.numel()
        lost += float(unmoved) / 2 * weight
        seen += weight
    return lost / seen if seen else 0.0

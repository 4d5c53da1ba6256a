"""Estimates the share of optimizer updates that round to zero in half-precision weights."""

from collections.abc import Iterable

import numpy as np
import torch


SAMPLE = 1 << 13
"""The approximate number of elements that are sampled from each tensor, at regular intervals."""


def lost_share(tensors: Iterable[torch.Tensor], learning_rate: float, dtype: torch.dtype) -> float:
    """Estimates the share of elements that an optimizer update does not change.

    Adam changes each element by about the learning rate, whatever the size of its gradient (Kingma and Ba,
    https://arxiv.org/abs/1412.6980). An update smaller than half the distance to the next number of the dtype rounds
    to zero. Elements that are zero are left out, because their first update is never lost, unlike later ones.

    Args:
        tensors: Weights in any floating-point dtype and on any device.
        learning_rate: The peak learning rate.
        dtype: The dtype in which the weights would be stored.

    Returns:
        A number from 0 to 1, the mean of an update up and an update down; 0.0 if there are no nonzero elements.
    """
    samples, sizes = [], []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if not flat.numel():
            continue
        sizes.append(flat.numel())
        # The stride is odd, because an even one would sample the same columns of a matrix again and again. The samples
        # are copied, because a view would keep `flat` in memory.
        samples.append(flat[:: max(1, flat.numel() // SAMPLE) | 1].to(dtype, copy=True))
    if not samples:
        return 0.0
    starts = np.cumsum([0, *map(len, samples[:-1])])  # (T,)
    sample = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()  # (S,), one device transfer
    wide, counted = sample.float(), sample != 0
    unmoved = [((wide + step).to(dtype) == sample) & counted for step in (learning_rate, -learning_rate)]
    seen, *lost = (np.add.reduceat(flags.numpy(), starts, dtype=int) for flags in (counted, *unmoved))  # (T,) each
    weight = np.where(seen > 0, sizes, 0)  # (T,)
    total = weight.sum()
    return float((sum(lost) / 2 / np.maximum(seen, 1) * weight).sum() / total) if total else 0.0

"""Checks whether the gradients of a float16 run are finite and not zero, which the forward pass does not show."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .measure import Bench, Tokens


UNDERFLOW = 0.05
"""A larger share of gradient elements that underflow to zero counts against a precision."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of one batch under a loss scale.

    Attributes:
        scale: The largest loss scale, from the initial one downwards, with finite gradients; 0 if none
            from 1 upwards has them.
        underflow: The share of elements that are zero, and not in float32.
    """

    scale: float
    underflow: float

    @property
    def usable(self) -> bool:
        """Whether a run would train with them."""
        return self.scale >= 1 and self.underflow <= UNDERFLOW

    def __str__(self) -> str:
        if not self.scale:
            return "gradients overflow at every loss scale from 1 upwards"
        return (
            f"gradients are finite at a loss scale of {self.scale:g}; {self.underflow:.2%} of them underflow to zero"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return asdict(self)


def check_gradients(
    bench: Bench, names: Iterable[str], everything: Iterable[str], tokens: Tokens, first_scale: float
) -> Gradients:
    """Runs a batch backward, with the loss scale halved until all gradients are finite.

    Args:
        bench: The trainer.
        names: The modules that compute in float32.
        everything: All modules that can compute in float32, for the comparison.
        tokens: The tokens of the batch.
        first_scale: The initial loss scale of the run.
    """
    names, scale = tuple(names), first_scale
    while scale >= 1:
        found = bench.gradients(names, tokens, scale)
        if all(bool(gradient.isfinite().all()) for gradient in found):
            break
        scale /= 2
    else:
        return Gradients(0.0, 0.0)
    reference = bench.gradients(everything, tokens, 1.0)
    zero = nonzero = 0
    for gradient, other in zip(found, reference, strict=True):
        there = other != 0
        nonzero += int(there.sum())
        zero += int(torch.count_nonzero(there & (gradient == 0)))
    return Gradients(scale, zero / max(nonzero, 1))

"""The figures of one measurement: how far the log-probabilities of sampler and trainer are apart, and the time."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


BAND = 0.01
"""Tokens whose abs(D) is larger, in nats, are out of band: their probabilities differ by more than 1 %."""


@dataclass(frozen=True)
class Figures:
    """The mismatch of sampler and trainer over the measured tokens. D is defined as in `rollout/mismatch.py`.

    Attributes:
        mean: The mean of abs(D) in nats; infinite if a log-probability is not finite.
        p99: The 99th percentile of abs(D) in nats.
        max: The largest abs(D) in nats.
        ess: The effective sample size of sequences, as a share.
        out_of_band: The share of tokens whose abs(D) exceeds `BAND`.
        tokens: Number of tokens.
        sequences: Number of sequences.
        error: The standard error of `mean` in nats, with prompts as the independent units.
        seconds: Time of generation and scoring: CPU time on a CPU, else wall time.
        computes: Whether the model computes; two dtypes may meet in an operation that rejects them.
    """

    mean: float
    p99: float
    max: float
    ess: float
    out_of_band: float
    tokens: int
    sequences: int
    error: float
    seconds: float
    computes: bool = True

    @property
    def finite(self) -> bool:
        """Whether all log-probabilities are finite."""
        return math.isfinite(self.mean)

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures for JSON, which has no infinity: `None` stands for it."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    @classmethod
    def of_dict(cls, content: dict[str, Any]) -> "Figures":
        """Reads what `to_dict` returned."""
        values: dict[str, Any] = {name: math.inf if value is None else value for name, value in content.items()}
        return cls(**values)


NOT_COMPUTED = Figures(math.inf, math.inf, math.inf, 0.0, 1.0, 0, 0, math.inf, 0.0, computes=False)
"""The figures of a set with which the model does not compute."""


def differences(trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns D of each token in nats, (B, C), float64 on the CPU; 0 where the mask, (B, C), is 0."""
    return (trainer.double() - sampler.double()).cpu().where(mask.cpu() != 0, 0.0)


def summarize(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    seconds: float,
    prompts: Sequence[int] | None = None,
) -> Figures:
    """Summarizes measured batches.

    Args:
        pairs: For each batch the log-probabilities of trainer and sampler in nats, (B, C), and a mask of the tokens
            that count, (B, C).
        seconds: The time of all batches.
        prompts: The number of the prompt of each sequence, if prompts occur several times. Sequences of one prompt
            are not independent.

    Raises:
        ValueError: If no token counts.
    """
    sums: list[torch.Tensor] = []  # the sum of abs(D), the number of tokens and S of each sequence
    tokens = []
    for trainer, sampler, mask in pairs:
        known, counted = differences(trainer, sampler, mask), mask.cpu() != 0
        tokens.append(known[counted].abs())
        sums.append(torch.stack([known.abs().sum(1), counted.sum(1).double(), known.sum(1)], dim=1))
    size, rows = torch.cat(tokens), torch.cat(sums)
    if not len(size):
        raise ValueError("no token was sampled")
    if not bool(size.isfinite().all()):
        return Figures(math.inf, math.inf, math.inf, 0.0, 1.0, len(size), len(rows), math.inf, seconds)
    mean = size.mean()
    n = len(rows)
    # The standard error of a ratio of sums over prompts.
    residual = rows[:, 0] - mean * rows[:, 1]
    if prompts is not None:
        _, unit = torch.tensor(prompts).unique(return_inverse=True)
        residual = torch.zeros(int(unit.max()) + 1, dtype=residual.dtype).index_add(0, unit, residual)
    units = len(residual)
    error = residual.square().sum().sqrt() * math.sqrt(units / max(units - 1, 1)) / rows[:, 1].sum()
    weight = rows[:, 2].clamp(-300, 300).exp()
    return Figures(
        mean=mean.item(),
        p99=size.quantile(0.99).item() if len(size) < 2**24 else size.kthvalue(int(0.99 * len(size))).values.item(),
        max=size.amax().item(),
        ess=(weight.sum().square() / (n * weight.square().sum())).item(),
        out_of_band=(size > BAND).double().mean().item(),
        tokens=len(size),
        sequences=n,
        error=error.item(),
        seconds=seconds,
    )

"""How far trainer and sampler are apart: estimators over log-probabilities of the same tokens, exact over ranks.

D = log p_trainer(token) - log p_sampler(token), in nats, of every completion token that is neither padding nor a tool's
result. Both sides are of `logits / temperature`; where vLLM sampled, its side is what vLLM returns (after top-k, top-p,
min-p and penalties). S is the sum of D over a sequence, w = exp(S).

| metric, after `precision/` | formula | unit | source |
|---|---|---|---|
| `logp_mismatch_mean`, `logp_mismatch_max` | mean of abs(D); largest abs(D) | nats | `sampling/sampling_logp_difference` of TRL |
| `logp_mismatch_k1` | mean of -D: estimates KL(sampler, trainer), may be negative | nats | Schulman 2020 |
| `logp_mismatch_k3` | mean of exp(D) - 1 - D: estimates the same, never negative | nats | Schulman 2020 |
| `logp_mismatch_ulp` | mean of abs(D) / spacing | spacings | see below |
| `seq_logratio_abs_mean`, `seq_logratio_std` | mean of abs(S); standard deviation of S | nats | arXiv 2510.26788 |
| `seq_ess` | (sum of w)^2 / (n * sum of w^2), 1 where all weigh alike | share | Kish 1965 |
| `is_masked_frac` | share of tokens outside TRL's limits of importance sampling | share | `vllm_importance_sampling_*` |
| `mismatch_pos_<first>_<last>` | mean of abs(D) at these positions of the completion, from 0 | nats | |
| `unscored_frac` | share of tokens without a finite D; they are in nothing else | share | |

Schulman 2020: http://joschu.net/blog/kl-approx.html. The spacing is that of the run's compute dtype between numbers of
the size of max(1, abs(log p_sampler)): a log-probability is a difference of logits, and such a logit is rounded by up to
half of it. So bfloat16 and float16 show about the same `ulp`, and a number far above 1 is no matter of rounding.

Every mean is a sum over all tokens (or sequences) of all ranks and micro-batches since the last log, over their number,
in float64. `exp` is taken of D and S cut off at plus and minus 300, beyond which no estimate means anything.
"""

import math
from dataclasses import dataclass

import torch


POSITIONS = (0, 16, 64, 256, 1024, 4096)
"""First positions of the buckets of `mismatch_pos_*`; the last has no end."""
LIMIT = 300.0
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""Spacing between numbers of size 1, by dtype."""

_TOKENS = ("tokens", "scored", "abs", "k1", "k3", "ulp", "limited", "outside")
_SEQUENCES = ("sequences", "ratio", "ratio_abs", "ratio_square", "weight", "weight_square")
_BUCKETS = tuple(f"{what}_{first}" for what in ("count", "abs") for first in POSITIONS)
_FIELDS = (*_TOKENS, *_SEQUENCES, *_BUCKETS, "max")
SIZE = len(_FIELDS)
"""Number of elements of a tally."""


@dataclass(frozen=True)
class Limits:
    """Where TRL cuts off or masks importance weights exp(D), or exp(S).

    Attributes:
        low: Smallest weight that is kept as it is; `None` for none.
        high: Largest weight that is kept as it is; `None` for none.
        sequences: Whether a sequence has one weight for all its tokens.
    """

    low: float | None
    high: float | None
    sequences: bool

    def outside(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Which log-ratios, of any shape, are beyond the limits."""
        beyond = torch.zeros_like(log_ratio, dtype=torch.bool)
        if self.low is not None:
            beyond |= log_ratio < (math.log(self.low) if self.low > 0 else -math.inf)
        if self.high is not None:
            beyond |= log_ratio > (math.log(self.high) if self.high > 0 else -math.inf)
        return beyond


def tally(
    trainer: torch.Tensor,
    sampler: torch.Tensor,
    mask: torch.Tensor,
    dtype: str = "float32",
    limits: Limits | None = None,
) -> torch.Tensor:
    """Counts and sums of one batch, from which `metrics` makes the estimates.

    Args:
        trainer: The trainer's log-probabilities in nats, (B, C).
        sampler: The sampler's, (B, C); not finite where there is none.
        mask: What counts, (B, C), zero or one.
        dtype: The compute dtype, `"float32"`, `"bfloat16"` or `"float16"`: the unit of `ulp`.
        limits: The limits of importance sampling, where the trainer has them.

    Returns:
        The tally, (SIZE,) float64, on the device of the log-probabilities (on the CPU where that has no float64).
        Nothing is waited for on a GPU.
    """
    device = torch.device("cpu") if trainer.device.type == "mps" else trainer.device
    trainer, sampler = trainer.detach().to(device, torch.float64), sampler.detach().to(device, torch.float64)
    counted = mask.to(device).bool()  # (B, C)
    difference = trainer - sampler
    scored = counted & difference.isfinite()
    difference = difference.where(scored, 0.0)
    size = difference.abs()
    cut = difference.clamp(-LIMIT, LIMIT)
    # Positive numbers: the exponent of the float is the floor of its logarithm.
    exponent = torch.frexp(sampler.where(scored, 0.0).abs().clamp(min=1.0)).exponent - 1
    ratio, some = difference.sum(1), scored.any(1)  # (B,)
    weight = ratio.clamp(-LIMIT, LIMIT).exp().where(some, 0.0)
    if limits is None:
        limited = outside = torch.zeros_like(scored)
    else:
        beyond = limits.outside(ratio).unsqueeze(1) if limits.sequences else limits.outside(difference)
        limited, outside = scored, scored & beyond
    tokens = torch.stack(
        [counted, scored, size, -difference, torch.expm1(cut) - cut, torch.ldexp(size, -exponent) / EPS[dtype],
         limited, outside]
    ).sum(1)  # fmt: skip  # (8, C)
    sequences = torch.stack([some, ratio, ratio.abs(), ratio.square(), weight, weight.square()]).sum(1)
    edges = [*POSITIONS, max(POSITIONS[-1], tokens.shape[1]) + 1]
    buckets = [tokens[row, a:b].sum() for row in (1, 2) for a, b in zip(edges, edges[1:], strict=False)]
    largest = size.amax() if size.numel() else size.new_zeros(())
    return torch.cat([tokens.sum(1), sequences, torch.stack([*buckets, largest])])


def combine(tallies: torch.Tensor) -> torch.Tensor:
    """Puts tallies together.

    Args:
        tallies: Those of batches or ranks, (N, SIZE) float64.

    Returns:
        That of all, (SIZE,).
    """
    total = tallies.sum(0)
    total[-1] = tallies[:, -1].amax()
    return total


def metrics(total: torch.Tensor) -> dict[str, float]:
    """The estimates, from what has been counted on all ranks.

    Args:
        total: The tally of all ranks, (SIZE,).

    Returns:
        By name, with `precision/`. A metric that nothing was counted for is absent; none is NaN.
    """
    seen = dict(zip(_FIELDS, total.tolist(), strict=True))
    if not seen["tokens"]:
        return {}
    found = {"unscored_frac": 1 - seen["scored"] / seen["tokens"]}
    if seen["scored"]:
        n = seen["sequences"]
        mean = seen["ratio"] / n
        found |= {
            "logp_mismatch_mean": seen["abs"] / seen["scored"],
            "logp_mismatch_max": seen["max"],
            "logp_mismatch_k1": seen["k1"] / seen["scored"],
            "logp_mismatch_k3": seen["k3"] / seen["scored"],
            "logp_mismatch_ulp": seen["ulp"] / seen["scored"],
            "seq_logratio_abs_mean": seen["ratio_abs"] / n,
            "seq_logratio_std": math.sqrt(max(seen["ratio_square"] / n - mean * mean, 0.0)),
            "seq_ess": seen["weight"] ** 2 / (n * seen["weight_square"]),
        }
    if seen["limited"]:
        found["is_masked_frac"] = seen["outside"] / seen["limited"]
    for first, following in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        if seen[f"count_{first}"]:
            last = "up" if following is None else following - 1
            found[f"mismatch_pos_{first}_{last}"] = seen[f"abs_{first}"] / seen[f"count_{first}"]
    return {f"precision/{name}": value for name, value in found.items()}

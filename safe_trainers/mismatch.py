"""How far trainer and sampler are apart: estimators over log-probabilities of the same tokens, exact over ranks.

D = log p_trainer(token) - log p_sampler(token), in nats, of every completion token that is neither padding nor the
result of a tool. Both sides are of `logits / temperature`; where vLLM sampled, its side is what vLLM returns (after
top-k, top-p, min-p and penalties). S is the sum of D over a sequence, w = exp(S).

| metric, after `precision/` | formula | unit | source |
|---|---|---|---|
| `logp_mismatch_mean`, `logp_mismatch_max` | mean of abs(D); largest abs(D) | nats | TRL's `sampling/` metrics |
| `logp_mismatch_k1` | mean of -D: estimates KL(sampler, trainer), may be negative | nats | Schulman 2020 |
| `logp_mismatch_k3` | mean of exp(D) - 1 - D: estimates the same, never negative | nats | Schulman 2020 |
| `logp_mismatch_ulp` | mean of abs(D) / (eps * max(1, abs(log p_sampler))) | spacings | see below |
| `seq_logratio_abs_mean`, `seq_logratio_std` | mean of abs(S); standard deviation of S | nats | arXiv 2510.26788 |
| `seq_ess` | (sum of w)^2 / (n * sum of w^2): 1 where all n sequences weigh alike | share | Kish 1965 |
| `is_masked_frac` | tokens beyond TRL's limits of importance sampling / tokens | share | TRL's `vllm_importance_*` |
| `mismatch_pos_<first>_<last>` | mean of abs(D) at these positions of the completion, from 0 | nats | |
| `unscored_frac` | tokens without a finite D, which are in no mean, / tokens | share | |

Schulman 2020: http://joschu.net/blog/kl-approx.html. eps is the spacing of the run's compute dtype at 1 (2^-7 for
bfloat16, 2^-10 for float16): a log-probability is a difference of logits of about its size, and each is rounded by up
to half the spacing there. bfloat16 and float16 show about the same `ulp`; far above 1 it is no matter of rounding.

Every mean is a sum over all tokens (or sequences) of all ranks and micro-batches since the last log, over their
number, in float64. D, and S before `exp`, are cut off at plus and minus 300, beyond which no estimate means anything.
`is_masked_frac` counts as TRL masks: a token whose log p_sampler is NaN weighs 1; where it is minus infinity, its
weight is infinite, and so is that of its sequence.
"""

import math
from dataclasses import dataclass

import torch


POSITIONS = (0, 16, 64, 256, 1024, 4096)
"""First positions of the buckets of `mismatch_pos_*`; the last has no end."""
LIMIT = 300.0
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""Spacing between numbers from 1 to 2, by dtype."""

_TOKENS = ("tokens", "scored", "abs", "sum", "k3", "relative", "outside")
_SEQUENCES = ("sequences", "ratio", "ratio_abs", "ratio_square", "weight", "weight_square")
_BUCKETS = tuple(f"{what}_{first}" for what in ("scored", "abs") for first in POSITIONS)
_FIELDS = (*_TOKENS, *_SEQUENCES, *_BUCKETS, "max")
SIZE = len(_FIELDS)
"""Number of elements of a tally."""


@dataclass(frozen=True)
class Limits:
    """Where TRL cuts off or masks importance weights: exp(D), or exp(S) for all tokens of a sequence.

    Attributes:
        low: Smallest weight that is kept as it is; `None` for none.
        high: Largest weight that is kept as it is; `None` for none.
        sequences: Whether the weights are those of sequences.
    """

    low: float | None
    high: float | None
    sequences: bool

    def outside(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Which log-ratios, of any shape, are beyond the limits."""
        low = math.log(self.low) if self.low else -math.inf
        high = math.inf if self.high is None else math.log(self.high) if self.high else -math.inf
        return (log_ratio < low) | (log_ratio > high)


def tally(
    trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, limits: Limits | None = None
) -> torch.Tensor:
    """Counts and sums of one batch, from which `metrics` makes the estimates. Waits for nothing on a GPU.

    Args:
        trainer: The trainer's log-probabilities in nats, (B, C).
        sampler: The sampler's, (B, C); not finite where there is none.
        mask: What counts, (B, C), zero or one.
        limits: The limits of importance sampling, where the trainer has them.

    Returns:
        The tally, (SIZE,) float64, on the device of the log-probabilities, or on the CPU where that has no float64.
    """
    device = torch.device("cpu") if trainer.device.type == "mps" else trainer.device
    trainer, sampler = trainer.detach().to(device, torch.float64), sampler.detach().to(device, torch.float64)
    counted = mask.to(device) != 0  # (B, C)
    difference = trainer - sampler
    scored = counted & difference.isfinite()
    outside = torch.zeros_like(scored)
    if limits is not None:
        weighed = difference.where(counted, 0.0).nan_to_num(nan=0.0)
        outside = counted & limits.outside(weighed.sum(1, keepdim=True) if limits.sequences else weighed)
    difference = difference.where(scored, 0.0).clamp(-LIMIT, LIMIT)
    size = difference.abs()
    relative = size / sampler.where(scored, 0.0).abs().clamp(min=1.0)
    ratio, some = difference.sum(1), scored.any(1)  # (B,)
    weight = ratio.clamp(-LIMIT, LIMIT).exp() * some
    tokens = torch.stack(
        [counted, scored, size, difference, difference.expm1() - difference, relative, outside]
    ).sum(1)  # fmt: skip  # (7, C)
    sequences = torch.stack([some, ratio, ratio.abs(), ratio * ratio, weight, weight * weight]).sum(1)
    zero, width = size.new_zeros(()), tokens.shape[1]
    buckets = [
        tokens[row, first:following].sum() if first < width else zero
        for row in (_TOKENS.index("scored"), _TOKENS.index("abs"))
        for first, following in zip(POSITIONS, (*POSITIONS[1:], width), strict=True)
    ]
    largest = size.amax() if size.numel() else zero
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


def metrics(total: torch.Tensor, dtype: str = "float32", limits: Limits | None = None) -> dict[str, float]:
    """The estimates, from what has been counted on all ranks.

    Args:
        total: The tally of all ranks, (SIZE,).
        dtype: The compute dtype, `"float32"`, `"bfloat16"` or `"float16"`: the unit of `ulp`.
        limits: What the tallies were made with.

    Returns:
        By name, with `precision/`. A metric that nothing was counted for is absent; none is NaN.
    """
    seen = dict(zip(_FIELDS, total.tolist(), strict=True))
    if not seen["tokens"]:
        return {}
    found = {"unscored_frac": 1 - seen["scored"] / seen["tokens"]}
    if seen["scored"]:
        tokens, n = seen["scored"], seen["sequences"]
        mean = seen["ratio"] / n
        found |= {
            "logp_mismatch_mean": seen["abs"] / tokens,
            "logp_mismatch_max": seen["max"],
            "logp_mismatch_k1": -seen["sum"] / tokens,
            "logp_mismatch_k3": seen["k3"] / tokens,
            "logp_mismatch_ulp": seen["relative"] / tokens / EPS[dtype],
            "seq_logratio_abs_mean": seen["ratio_abs"] / n,
            "seq_logratio_std": math.sqrt(max(seen["ratio_square"] / n - mean * mean, 0.0)),
            "seq_ess": seen["weight"] ** 2 / (n * seen["weight_square"]),
        }
    if limits is not None:
        found["is_masked_frac"] = seen["outside"] / seen["tokens"]
    for first, following in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        if seen[f"scored_{first}"]:
            last = "up" if following is None else following - 1
            found[f"mismatch_pos_{first}_{last}"] = seen[f"abs_{first}"] / seen[f"scored_{first}"]
    return {f"precision/{name}": value for name, value in found.items()}

"""Metrics of the mismatch between sampler and trainer, which assign different log-probabilities to the same tokens.

D = log p_trainer(token) - log p_sampler(token), in nats, for every completion token except padding and the results of
tools. Both log-probabilities are computed from `logits / temperature`. With vLLM, log p_sampler is the value that vLLM
returns, which includes top-k, top-p, min-p and penalties. S is the sum of D over a sequence, and w = exp(S).

| metric, after `precision/` | formula | unit | source |
|---|---|---|---|
| `logp_mismatch_mean`, `logp_mismatch_max` | mean of abs(D); largest abs(D) | nats | TRL's `sampling/` metrics |
| `logp_mismatch_k1` | mean of -D: an estimate of KL(sampler, trainer) that may be negative | nats | Schulman 2020 |
| `logp_mismatch_k3` | mean of exp(D) - 1 - D: an estimate of it that is never negative | nats | Schulman 2020 |
| `logp_mismatch_ulp` | mean of abs(D) / (eps * max(1, abs(log p_sampler))) | spacings | see below |
| `seq_logratio_abs_mean`, `seq_logratio_std` | mean of abs(S); standard deviation of S | nats | arXiv 2510.26788 |
| `seq_ess` | (sum of w)^2 / (n * sum of w^2): 1 if all n sequences have equal weights | share | Kish 1965 |
| `is_masked_frac` | tokens beyond TRL's limits of importance sampling / tokens | share | TRL's `vllm_importance_*` |
| `phantom_clip_frac` | tokens whose exp(D) is outside of the loss's clip range (`epsilon`) / tokens | share | |
| `logratio_policy` | mean of abs(log p_now - log p_trainer) in losses after the weights changed | nats | |
| `logratio_gap` | mean of abs(D) over the same tokens: what the log-ratio to the sampler contains beside it | nats | |
| `logp_batch_noise` | mean of abs(log p_now - log p_trainer) in losses before the weights change | nats | |
| `mismatch_pos_<first>_<last>` | mean of abs(D) at these positions of the completion, from 0 | nats | |
| `unscored_frac` | tokens without a finite D, which no mean includes, / tokens | share | |

Schulman 2020: http://joschu.net/blog/kl-approx.html. eps is the spacing of the run's compute dtype at 1 (2^-7 for
bfloat16, 2^-10 for float16). A log-probability is a difference of logits of about its own size, and each logit is
rounded by up to half the spacing at that size. `ulp` is therefore about the same for bfloat16 and float16. A value far
above 1 has another cause than rounding.

Every mean is taken in float64 over all tokens (or sequences) of all ranks and micro-batches since the last log. D, and
S before `exp`, are clamped to [-300, 300]. `is_masked_frac` follows TRL's masking: a token whose log p_sampler is NaN
has weight 1; if its log p_sampler is minus infinity, its weight and that of its sequence are infinite.

p_now is the probability in a loss. Before the weights change it differs from p_trainer only by rounding, because
scoring and loss compute other batches. `phantom_clip_frac` is the share of tokens that a loss would clip although the
policy has not changed, if it compared with the sampler's log-probabilities.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


PREFIX = "precision/"
"""The metrics' names begin with it."""
POSITIONS = (0, 16, 64, 256, 1024, 4096)
"""First positions of the buckets of `mismatch_pos_*`; the last bucket is open-ended."""
LIMIT = 300.0
"""Log-ratios are clamped to plus and minus this value, in nats."""
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""Spacing between the numbers from 1 to 2, by dtype. That of TF32 is float16's."""

_TOKENS = ("tokens", "scored", "abs", "sum", "k3", "relative", "outside", "phantom")
_SEQUENCES = ("sequences", "ratio", "ratio_abs", "ratio_square", "weight", "weight_square")
_LOSSES = ("moved", "policy", "compared", "gap", "still", "noise")
_BUCKETS = tuple(f"{what}_{first}" for what in ("scored", "abs") for first in POSITIONS)
_FIELDS = (*_TOKENS, *_SEQUENCES, *_BUCKETS, *_LOSSES, "max")
SIZE = len(_FIELDS)
"""Number of elements of a tally."""


@dataclass(frozen=True)
class Limits:
    """The range outside of which TRL clips or masks importance weights.

    Attributes:
        low: Lower limit of the weight; `None` without one.
        high: Upper limit of the weight; `None` without one.
        sequences: Whether the weight is exp(S), the same for all tokens of a sequence, instead of exp(D).
        clip: The range in which the loss does not clip the ratio of a token; `None` if it clips none.
        masks: Whether weights outside the limits become 0 instead of the nearest limit.
    """

    low: float | None
    high: float | None
    sequences: bool
    clip: tuple[float, float] | None = None
    masks: bool = True

    def outside(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Returns which log-ratios, of any shape, are outside the limits, as booleans of that shape."""
        low = math.log(self.low) if self.low else -math.inf
        high = math.inf if self.high is None else math.log(self.high) if self.high else -math.inf
        return (log_ratio < low) | (log_ratio > high)


def limits_of(args: Any) -> Limits | None:
    """Returns TRL's limits of importance sampling.

    Args:
        args: The training arguments.

    Returns:
        The limits; `None` if the algorithm has no weights of tokens.
    """
    mode = getattr(args, "vllm_importance_sampling_mode", None)
    if mode is None:
        return None
    cap = getattr(args, "vllm_importance_sampling_cap", None)  # the upper limit's name in older releases
    high = getattr(args, "vllm_importance_sampling_clip_max", cap)
    low, epsilon = getattr(args, "vllm_importance_sampling_clip_min", None), getattr(args, "epsilon", None)
    clip = None
    if epsilon is not None and epsilon < 1 and getattr(args, "importance_sampling_level", "token") == "token":
        upper = getattr(args, "epsilon_high", None)
        clip = (1 - epsilon, 1 + (epsilon if upper is None else upper))
    return Limits(low, high, str(mode).startswith("sequence"), clip, str(mode).endswith("mask"))


def tally(
    trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, limits: Limits | None = None
) -> torch.Tensor:
    """Computes the counts and sums of one batch that `metrics` needs, without synchronising with a GPU.

    Args:
        trainer: The trainer's log-probabilities in nats, (B, C).
        sampler: The sampler's log-probabilities in nats, (B, C); not finite if unknown.
        mask: 1 for tokens that count and 0 for others, (B, C).
        limits: The trainer's limits of importance sampling, if it has any.

    Returns:
        The tally, (SIZE,) float64, on the device of the log-probabilities, or on the CPU if it lacks float64 (MPS).
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
    phantom = torch.zeros_like(scored)
    if limits is not None and limits.clip is not None:
        low, high = map(math.log, limits.clip)
        phantom = scored & ((difference < low) | (difference > high))
    relative = size / sampler.where(scored, 0.0).abs().clamp(min=1.0)
    ratio, any_scored = difference.sum(1), scored.any(1)  # (B,)
    weight = ratio.clamp(-LIMIT, LIMIT).exp() * any_scored
    tokens = torch.stack(
        [counted, scored, size, difference, difference.expm1() - difference, relative, outside, phantom]
    ).sum(1)  # fmt: skip  # (8, C)
    sequences = torch.stack([any_scored, ratio, ratio.abs(), ratio * ratio, weight, weight * weight]).sum(1)
    zero, width = size.new_zeros(()), tokens.shape[1]
    buckets = [
        tokens[row, first:following].sum() if first < width else zero
        for row in (_TOKENS.index("scored"), _TOKENS.index("abs"))
        for first, following in zip(POSITIONS, (*POSITIONS[1:], width), strict=True)
    ]
    largest = size.amax() if size.numel() else zero
    return torch.cat([tokens.sum(1), sequences, torch.stack([*buckets, *(zero for _ in _LOSSES), largest])])


def joint_tally(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], limits: Limits | None = None
) -> torch.Tensor:
    """Computes the tally of several batches at once, which takes about as long as that of one small batch.

    Args:
        batches: The first three arguments of `tally` for each batch, each (B, C) with B and C of its own.
        limits: As in `tally`.

    Returns:
        The tally, (SIZE,) float64.
    """
    width = max(mask.shape[1] for *_, mask in batches)

    def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])

    trainer, sampler, mask = map(join, zip(*batches, strict=True))
    return tally(trainer, sampler, mask, limits)


def loss_tally(
    now: torch.Tensor, trainer: torch.Tensor, sampler: torch.Tensor | None, mask: torch.Tensor, moved: bool
) -> torch.Tensor:
    """Computes the counts and sums of one loss, without synchronising with a GPU.

    Args:
        now: The log-probabilities in the loss, in nats, (B, C).
        trainer: The trainer's log-probabilities before the first update, in nats, (B, C).
        sampler: The sampler's log-probabilities in nats, (B, C); `None` if they cannot be compared.
        mask: 1 for tokens that count and 0 for others, (B, C).
        moved: Whether the weights have changed since `trainer` was computed.

    Returns:
        The tally, (SIZE,) float64, as `tally` returns it.
    """
    device = torch.device("cpu") if now.device.type == "mps" else now.device
    now, trainer = now.detach().to(device, torch.float64), trainer.detach().to(device, torch.float64)
    change = (now - trainer).abs()
    counted = (mask.to(device) != 0) & change.isfinite()
    total = change.new_zeros(SIZE)
    names = ("moved", "policy") if moved else ("still", "noise")
    total[[_FIELDS.index(name) for name in names]] = torch.stack([counted.sum(), change.where(counted, 0.0).sum()])
    if moved and sampler is not None:
        gap = (trainer - sampler.detach().to(device, torch.float64)).abs()
        compared = counted & gap.isfinite()
        found = torch.stack([compared.sum(), gap.where(compared, 0.0).sum()])
        total[[_FIELDS.index(name) for name in ("compared", "gap")]] = found
    return total


@dataclass(frozen=True)
class Moments:
    """The distribution of S in measured sequences.

    Attributes:
        sequences: Number of sequences.
        tokens: Mean number of scored tokens of a sequence.
        mean: The mean of S in nats.
        std: The standard deviation of S in nats.
    """

    sequences: int
    tokens: float
    mean: float
    std: float


def sequence_moments(total: torch.Tensor) -> Moments:
    """Returns the distribution of S that a tally, (SIZE,), contains; zeros without a sequence."""
    seen = dict(zip(_FIELDS, total.tolist(), strict=True))
    n = seen["sequences"]
    if not n:
        return Moments(0, 0.0, 0.0, 0.0)
    mean = seen["ratio"] / n
    return Moments(int(n), seen["scored"] / n, mean, math.sqrt(max(seen["ratio_square"] / n - mean * mean, 0.0)))


def combine(tallies: torch.Tensor) -> torch.Tensor:
    """Combines tallies of several batches or ranks, (N, SIZE) float64, into one, (SIZE,)."""
    total = tallies.sum(0)
    total[-1] = tallies[:, -1].amax()
    return total


def metrics(total: torch.Tensor, dtype: str = "float32", limits: Limits | None = None) -> dict[str, float]:
    """Computes the metrics from a tally.

    Args:
        total: The combined tally of all ranks, (SIZE,).
        dtype: The compute dtype, which gives the unit of `ulp`: `"float32"`, `"bfloat16"` or `"float16"`.
        limits: The limits that the tallies were made with.

    Returns:
        The metrics by name, including `precision/`. A metric without data is absent; no value is NaN.
    """
    seen = dict(zip(_FIELDS, total.tolist(), strict=True))
    means = {"logratio_policy": ("policy", "moved"), "logratio_gap": ("gap", "compared"),
             "logp_batch_noise": ("noise", "still")}  # fmt: skip
    found = {name: seen[part] / seen[count] for name, (part, count) in means.items() if seen[count]}
    if not seen["tokens"]:
        return {PREFIX + name: value for name, value in found.items()}
    found["unscored_frac"] = 1 - seen["scored"] / seen["tokens"]
    if seen["scored"]:
        tokens, n = seen["scored"], seen["sequences"]
        found |= {
            "logp_mismatch_mean": seen["abs"] / tokens,
            "logp_mismatch_max": seen["max"],
            "logp_mismatch_k1": -seen["sum"] / tokens,
            "logp_mismatch_k3": seen["k3"] / tokens,
            "logp_mismatch_ulp": seen["relative"] / tokens / EPS[dtype],
            "seq_logratio_abs_mean": seen["ratio_abs"] / n,
            "seq_logratio_std": sequence_moments(total).std,
            "seq_ess": seen["weight"] ** 2 / (n * seen["weight_square"]),
        }
    if limits is not None:
        found["is_masked_frac"] = seen["outside"] / seen["tokens"]
        if limits.clip is not None and seen["scored"]:
            found["phantom_clip_frac"] = seen["phantom"] / seen["scored"]
    for first, following in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        if seen[f"scored_{first}"]:
            last = "up" if following is None else following - 1
            found[f"mismatch_pos_{first}_{last}"] = seen[f"abs_{first}"] / seen[f"scored_{first}"]
    return {PREFIX + name: value for name, value in found.items()}

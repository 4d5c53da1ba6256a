"""Predicts, from the first rollouts, the importance weights of sequences at the longest length of a run.

The weight of a sequence is exp(S), where S is the sum of D over its tokens (`mismatch.py`). Its mean grows with the
length, and its standard deviation with the square root of the length.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from ..core.errors import Problem, warn
from .mismatch import Limits, Moments


SMALLEST_ESS = 0.5
"""Weights with a smaller effective sample size are reported."""


@dataclass(frozen=True)
class Prediction:
    """The distribution of S at a length.

    Attributes:
        mean: Its mean in nats.
        std: Its standard deviation in nats.
    """

    mean: float
    std: float

    @classmethod
    def at(cls, length: int, measured: Moments) -> "Prediction":
        """Returns the prediction for a length.

        Args:
            length: Number of tokens to predict for.
            measured: The measured S. A mean within three standard errors of zero counts as zero.
        """
        ratio = length / measured.tokens
        certain = abs(measured.mean) > 3 * measured.std / math.sqrt(measured.sequences)
        return cls(measured.mean * ratio if certain else 0.0, measured.std * math.sqrt(ratio))

    @property
    def ess(self) -> float:
        """The effective sample size of weights exp(S) with normal S, as a share: exp(-std^2)."""
        return math.exp(-self.std * self.std)

    def share_outside(self, limits: Limits) -> float:
        """The share of sequences outside of TRL's limits.

        Args:
            limits: TRL's limits of importance sampling.
        """
        if self.std == 0:
            low = limits.low is not None and self.mean < math.log(max(limits.low, 1e-300))
            return float(low or (limits.high is not None and self.mean > math.log(limits.high)))
        normal = NormalDist(self.mean, self.std)
        below = normal.cdf(math.log(limits.low)) if limits.low else 0.0
        return below + (1 - normal.cdf(math.log(limits.high)) if limits.high else 0.0)


def vanishing(args: Any, limits: Limits | None, measured: Moments) -> Problem | None:
    """Returns a warning if the weights of sequences will be dominated by few of them, masked, or close to zero.

    Args:
        args: The training arguments.
        limits: TRL's limits of importance sampling.
        measured: The measured S.

    Returns:
        The warning; `None` if the weights are useful, or are those of tokens.
    """
    length = getattr(args, "max_completion_length", None)
    if limits is None or not limits.sequences or not length or measured.sequences < 2:
        return None
    found = Prediction.at(max(length, round(measured.tokens)), measured)
    outside = found.share_outside(limits)
    if found.ess >= SMALLEST_ESS and outside < 1 - SMALLEST_ESS and math.exp(found.mean) >= SMALLEST_ESS:
        return None
    mode = args.vllm_importance_sampling_mode
    return warn(
        "sequence-weights-vanish",
        f"vllm_importance_sampling_mode={str(mode)!r} with max_completion_length={length}",
        tokens=f"{measured.tokens:.0f}",
        mean=f"{found.mean:.2g}",
        std=f"{found.std:.2g}",
        ess=f"{found.ess:.0%}",
        outside=f"{outside:.0%}",
        fix=f"vllm_importance_sampling_mode='token_{str(mode).rpartition('_')[2]}'",
    )

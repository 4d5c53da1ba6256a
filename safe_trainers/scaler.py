"""The loss scaler: what it can be told, and what it refuses.

A float16 gradient underflows below 6e-8, so under fp16 the loss is multiplied before the backward pass and the
gradients are divided before the optimizer's step (Micikevicius et al., https://arxiv.org/abs/1710.03740). Dividing is
what fails: torch refuses float16 gradients everywhere, and CUDA's kernel has no bfloat16.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .dtypes import BFLOAT16, FLOAT16, to_torch
from .errors import Problem, refuse


SETTINGS = {
    "loss_scale_init": "scale",
    "loss_scale_growth_interval": "growth_interval",
    "loss_scale_growth_factor": "growth_factor",
    "loss_scale_backoff_factor": "backoff_factor",
}
"""Each setting of a Safe config, and the entry of `torch.amp.GradScaler.state_dict()` that it sets."""
LARGEST_SCALE = 2.0**126
"""The largest scale whose reciprocal, with which gradients are unscaled in float32, is a normal number."""
SMALLEST_SCALE = 1 / LARGEST_SCALE
"""Further down the reciprocal is infinite: it makes NaN of gradients that are 0, after the scaler has looked at them,
and the step is taken."""


@functools.cache
def unscalable(device_type: str) -> frozenset[str]:
    """The half dtypes whose gradients the loss scaler of a kind of device refuses.

    The scaler is asked, on one element: a future torch may unscale bfloat16 on CUDA
    (https://github.com/pytorch/pytorch/pull/194947).

    Args:
        device_type: As in `torch.device.type`.

    Returns:
        A subset of `"bfloat16"` and `"float16"`.
    """
    return frozenset(dtype for dtype in (BFLOAT16, FLOAT16) if not unscales(torch.amp.GradScaler(device_type), dtype))


def unscales(scaler: torch.amp.GradScaler, dtype: str) -> bool:
    """Whether a loss scaler unscales gradients of a dtype.

    Args:
        scaler: A fresh scaler; it is used up by the question.
        dtype: A canonical dtype name.
    """
    weight = nn.Parameter(torch.zeros(1, dtype=to_torch(dtype), device=scaler._device))
    weight.grad = torch.ones_like(weight)
    scaler.scale(torch.ones((), device=weight.device))  # makes the scale's tensor
    try:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.0))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


def configure(scaler: torch.amp.GradScaler, args: Any) -> None:
    """Gives a scaler that was not used yet what the config says; what a plain TRL config leaves unsaid is torch's.

    Args:
        scaler: Any kind that accelerate builds: the state is what all of them share.
        args: A config, Safe or plain.
    """
    state = scaler.state_dict()
    asked = {key: getattr(args, name) for name, key in SETTINGS.items() if getattr(args, name, None) is not None}
    if state and asked:
        scaler.load_state_dict({**state, **asked})


def problems(args: Any) -> Iterator[Problem]:
    """What no scaler can work with.

    Args:
        args: A config, Safe or plain.

    Yields:
        One refusal for each setting that is out of its range.
    """
    ranges = {
        "loss_scale_init": (f"a number from 2**-126 ({SMALLEST_SCALE:.3g}) to 2**126 ({LARGEST_SCALE:.3g})", 2.0**16),
        "loss_scale_growth_interval": ("a whole number of steps, at least 1", 400),
        "loss_scale_growth_factor": ("a finite number above 1", 2.0),
        "loss_scale_backoff_factor": ("a number between 0 and 1, both excluded", 0.5),
    }
    for name, (accepted, usual) in ranges.items():
        value = getattr(args, name, None)
        if value is not None and not _valid(name, value):
            yield refuse("loss-scale-out-of-range", f"{name}={value!r}", accepted=accepted, field=name, usual=usual)


def _valid(name: str, value: Any) -> bool:
    # Compared, not converted: a whole number may be too long for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        return False
    if name == "loss_scale_growth_interval":
        return isinstance(value, int) and value >= 1
    if name == "loss_scale_init":
        return SMALLEST_SCALE <= value <= LARGEST_SCALE
    return value > 1 if name == "loss_scale_growth_factor" else 0 < value < 1

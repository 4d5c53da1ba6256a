"""The autocast of the base model while the adapter of a prompt-learning method is disabled.

The reference of a policy with virtual tokens (prompt tuning, P-tuning, prefix tuning) is the policy without them. To
disable them, PEFT replaces the forward pass of the model, which accelerate runs under autocast, by that of the base
model, which it does not: the reference then computes in the dtype of the weights.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from ..core.dtypes import to_torch
from ..core.patches import patched, replace, replaced_by
from .resolve import PrecisionPolicy


_DISABLE = "disable_adapter"


def compute_reference_in_autocast(model: nn.Module, device: torch.device, policy: PrecisionPolicy) -> None:
    """Runs the base of a PEFT model under the autocast of the run while virtual tokens are disabled.

    Args:
        model: The policy model. It is not changed if none of its adapters has virtual tokens.
        device: The device of the run.
        policy: The policy of the run. The model is not changed without autocast.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    virtual = any(getattr(config, "is_prompt_learning", False) for config in configs.values())
    if policy.autocast.value is None or not virtual or not hasattr(model, _DISABLE) or replaced_by(model, _DISABLE):
        return
    autocast = to_torch(policy.autocast.value)
    replace("prompt-reference", model, _DISABLE, partial(_disabled, model, device.type, autocast))


@contextlib.contextmanager
def _disabled(model: Any, device: str, autocast: torch.dtype) -> Iterator[None]:
    """Disables the adapters of a model, and runs the forward pass that replaces its own as accelerate runs that."""
    own = vars(model).get("forward")
    with type(model).disable_adapter(model):
        base = vars(model).get("forward")
        if base is own:  # adapters of other methods leave the forward pass of the model in place
            yield
            return
        forward = convert_outputs_to_fp32(torch.autocast(device, autocast)(base))
        with patched("prompt-reference", model, forward=forward):
            yield

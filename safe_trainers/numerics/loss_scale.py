"""Configures the loss scaler, and detects skipped steps.

float16 gradients underflow below 6e-8. Under fp16 the loss is therefore multiplied by the loss scale before the
backward pass, and the gradients are divided by it before the optimizer's step (Micikevicius et al.,
https://arxiv.org/abs/1710.03740).
"""

import logging
import math
from typing import Any

import torch

from ..policy.settings import LARGEST_SCALE, LOSS_SCALE, SMALLEST_SCALE


logger = logging.getLogger(__name__)


def configure(scaler: torch.amp.GradScaler, args: Any) -> None:
    """Applies the loss-scale settings of a config to a new scaler; settings that are unset keep torch's defaults.

    Args:
        scaler: The scaler; all classes that accelerate uses have the same state.
        args: A TRL config, stock or Safe.
    """
    state, settings = scaler.state_dict(), _settings_of(args)
    if state and settings:
        scaler.load_state_dict({**state, **{LOSS_SCALE[name]: value for name, value in settings.items()}})


def keep_settings(scaler: Any, args: Any, checkpoint: str | None) -> None:
    """Applies the settings of a config to a scaler that got those of another run from a checkpoint.

    The loss scale itself and the steps since the last overflow remain those of the checkpoint.

    Args:
        scaler: The scaler, after a checkpoint was loaded.
        args: The config of the resumed run.
        checkpoint: The checkpoint's folder, for the log.
    """
    state = scaler.state_dict()
    settings = {name: value for name, value in _settings_of(args).items() if LOSS_SCALE[name] != "scale"}
    changed = {name: value for name, value in settings.items() if state and state[LOSS_SCALE[name]] != value}
    for name, value in changed.items():
        message = "%s was saved with %s=%g: the resumed run uses %g, the value in its config"
        logger.warning(message, checkpoint, name, state[LOSS_SCALE[name]], value)
    if changed:
        scaler.load_state_dict({**state, **{LOSS_SCALE[name]: value for name, value in changed.items()}})


def _settings_of(args: Any) -> dict[str, Any]:
    """Returns the loss-scale settings that a config contains, by name."""
    return {name: getattr(args, name) for name in LOSS_SCALE if getattr(args, name, None) is not None}


def reset_unusable_scale(scaler: Any, initial: float, checkpoint: str | None) -> None:
    """Resets a loss scale that was loaded from a checkpoint and is too small or too large to unscale gradients.

    Args:
        scaler: The scaler, after a checkpoint was loaded.
        initial: The scale to use instead.
        checkpoint: The checkpoint's folder, for the log.
    """
    if not SMALLEST_SCALE <= scaler.get_scale() <= 2 * LARGEST_SCALE:
        message = "scaler.pt of %s has the loss scale %g, which cannot unscale gradients: starting from %g instead"
        logger.warning(message, checkpoint, scaler.get_scale(), initial)
        scaler.load_state_dict({**scaler.state_dict(), "scale": initial})


class LossScaleWatch:
    """Detects skipped optimizer steps by comparing the loss scale before and after each step.

    accelerate considers a step skipped if the optimizer's `step` was not called. Optimizers that skip by themselves,
    such as fused AdamW, are always called, so that the learning-rate schedule advances although the step was skipped
    (https://github.com/huggingface/accelerate/issues/4242). The loss scale decreases only when a step is skipped.

    Args:
        accelerator: The trainer's accelerator.

    Attributes:
        before: The loss scale before the last step; NaN if no loss is scaled.
        now: The loss scale after it.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.before = self.now = math.nan
        self._copy: torch.Tensor | None = None

    @property
    def scaler(self) -> Any:
        """The loss scaler; `None` if accelerate does not scale the loss."""
        scaler = self._accelerator.scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    def before_step(self) -> None:
        """Copies the scale, which the scaler changes in place, without reading it from the device."""
        scaler = self.scaler
        self._copy = None if scaler is None else scaler._get_scale_async().detach().clone()

    def after_step(self) -> bool:
        """Returns whether the step was skipped, and if so stops accelerate from advancing the schedule."""
        scaler = self.scaler
        if scaler is None or self._copy is None:
            return bool(self._accelerator.optimizer_step_was_skipped)  # DeepSpeed has its own scaler
        self.before, self.now = torch.stack([self._copy, scaler._get_scale_async()]).tolist()  # the one device read
        skipped = not self.now >= self.before
        for optimizer in self._accelerator._optimizers:
            optimizer._is_overflow = skipped
        return skipped

"""Skips optimizer steps whose gradient norm is not finite, in runs whose loss is not scaled.

Without a loss scaler nothing checks the gradients: one NaN makes every weight NaN, because gradients are clipped by
their norm. The norm that the trainer computes for clipping is checked here before the step. An optimizer that takes
`found_inf` (fused AdamW) skips the step on the device, and the result is read one step later: the host does not
wait. For other optimizers the gradients are removed, and the optimizer then changes neither a weight nor its state.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..core.patches import replace


class GradientNorm:
    """Keeps the gradient norm of each step, and skips the step if it is not finite.

    Args:
        accelerator: The trainer's accelerator, whose `clip_grad_norm_` is replaced.
        deferred: Whether an optimizer that takes `found_inf` skips by itself; by default on CUDA devices only.
    """

    def __init__(self, accelerator: Any, deferred: bool | None = None) -> None:
        self._accelerator = accelerator
        self._deferred = accelerator.device.type == "cuda" if deferred is None else deferred
        self._norm: Any = None
        self._pending: Callable[[], bool] | None = None  # reads whether the last step was skipped on the device
        self._late = False
        clip = accelerator.clip_grad_norm_

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._norm = clip(*args, **kwargs)
            return self._norm

        replace("gradient-norm", accelerator, "clip_grad_norm_", clip_grad_norm_)

    def before_step(self) -> None:
        """Arranges that the step is skipped if the norm is not finite; does nothing if the loss is scaled."""
        self._late = self.read_late()
        norm, self._norm = self._norm, None
        scaler = self._accelerator.scaler
        if (scaler is not None and scaler.is_enabled()) or not self._accelerator._optimizers or self._has_engine():
            return
        if norm is None:  # the run does not clip, or transformers clips gradients of several meshes without accelerate
            norm = total_norm([p.grad for p in self._parameters() if p.grad is not None])
            if self._holds_plain_shards():
                norm = total_norm(self._accelerator.gather(norm.to(self._accelerator.device).reshape(1)))
        unusable = ~_whole(torch.as_tensor(norm)).detach().isfinite()
        optimizers = [wrapped.optimizer for wrapped in self._accelerator._optimizers]
        if self._deferred and all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers):
            for optimizer in optimizers:
                optimizer.found_inf = unusable.float()
            self._pending = _read_later(unusable)
            return
        skipped = bool(unusable)
        for wrapped in self._accelerator._optimizers:
            wrapped._is_overflow = skipped  # then the learning-rate schedule does not advance
            if skipped:
                wrapped.optimizer.zero_grad(set_to_none=True)

    def after_step(self) -> bool:
        """Returns whether the step before this one was skipped on the device."""
        if self._pending is not None:
            for wrapped in self._accelerator._optimizers:
                del wrapped.optimizer.found_inf
        return self._late

    @property
    def late(self) -> bool:
        """Whether the step before this one was skipped on the device; known from `before_step` on."""
        return self._late

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet whether the last step was skipped on the device."""
        return self._pending is not None

    @property
    def unread(self) -> bool:
        """Whether the last step was skipped on the device, and that was not read before; a checkpoint stores it."""
        return self._pending is not None and self._pending()

    def restore(self, unread: bool) -> None:
        """Restores `unread` from a checkpoint."""
        self._pending = (lambda: True) if unread else None

    def read_late(self) -> bool:
        """Returns whether the last step was skipped on the device, if that was not read before."""
        unread, self._pending = self.unread, None
        return unread

    def _has_engine(self) -> bool:
        return getattr(self._accelerator.state, "deepspeed_plugin", None) is not None

    def _holds_plain_shards(self) -> bool:
        """Whether gradients are plain tensors with this rank's part, as under FSDP1; FSDP2 has DTensors."""
        plugin = getattr(self._accelerator.state, "fsdp_plugin", None)
        return plugin is not None and plugin.fsdp_version == 1

    def _parameters(self) -> list[torch.Tensor]:
        groups = (group for wrapped in self._accelerator._optimizers for group in wrapped.param_groups)
        return [parameter for group in groups for parameter in group["params"]]


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the Euclidean norm of gradients, which may be distributed over several meshes.

    Args:
        gradients: The gradients of all parameters, in an order that is the same on all ranks.

    Returns:
        The norm, (), on the device of the first gradient; 0 without gradients.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [_whole(torch.nn.utils.get_total_norm(held)) for held in by_mesh.values()]
    return torch.nn.utils.get_total_norm(norms)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """Returns a norm that is distributed over ranks as a plain tensor."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _read_later(flag: torch.Tensor) -> Callable[[], bool]:
    """Begins to copy a flag to the host, and returns a function that waits for the copy and returns the flag."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    copy = torch.empty((), dtype=torch.bool, pin_memory=True)
    copy.copy_(flag, non_blocking=True)
    with torch.cuda.device(flag.device):  # weights may be on several devices
        copied = torch.cuda.Event()
        copied.record()

    def read() -> bool:
        copied.synchronize()
        return bool(copy)

    return read

"""Optimizer steps that were not taken, and what is logged of those that were.

Under fp16 a step whose gradients are not finite is skipped, and the loss scale falls. accelerate notices by whether
the optimizer's `step` was called, which the scaler always does where the optimizer skips by itself, as fused AdamW,
the default, does: the step is skipped, and the learning-rate schedule goes on
(https://github.com/huggingface/accelerate/issues/4242). Here the loss scale says it: it falls in no other case.

| metric | formula | unit |
|---|---|---|
| `precision/loss_scale` | loss scale after the last step | factor |
| `precision/skipped_steps` | optimizer steps of this run that were skipped, so far | steps |
| `precision/effective_steps` | optimizer steps of this run that were taken, so far | steps |
| `precision/grad_norm_finite` | mean of the gradient norms that are finite, before clipping | as `grad_norm` |
| `precision/grad_zero_frac` | sampled gradient elements that are exactly 0 after unscaling / all sampled | share |
| `precision/update_lost_frac` | those whose weight the update left as it was / sampled with a gradient not 0 | share |
| `precision/stalled_params` | parameters of which no sampled element moved between the last two looks | parameters |

The first three are logged where the loss is scaled, and are of the whole run, resumed parts included. The others are
of the steps since the last log, and are left out where these showed nothing. Steps after the last log of a loss are in
the one that ends the run.

The sample is of about 4,096 elements, at least 8 of each parameter, always the same; each stands for an equal part of
its parameter. It is looked at in every fifth step that is taken with a learning rate above 0. Embeddings do not
count for `grad_zero_frac`: the rows of absent tokens have no gradient in any precision.

All are those of the whole run: where processes hold parts of the weights, sums over them. DeepSpeed keeps gradients to
itself; there the last three are missing. Whether a step is skipped is the scaler's decision, and the same in each
process: DDP sums the gradients before it, FSDP's scaler and DeepSpeed's engine make it together.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from .checkpoints import ExactCheckpoints
from .errors import PrecisionError, Problem, refuse
from .scaler import LARGEST_SCALE, SMALLEST_SCALE
from .towers import unwrap
from .updates import EVERY, UpdateSample


logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_SKIPS = 50
_NORMS = 1024
"""Gradient norms that wait on the device for the next log before they are summed up."""


class SkippedSteps(ExactCheckpoints):
    """Above TRL: sees skipped steps, holds the schedule, and logs what the optimizer did; a base of `PrecisionMixin`.

    Overrides `train`, `log`, `_load_scaler`, and `_maybe_log_save_evaluate`, which hands over the gradients' norm.
    """

    _record: "StepRecord | None" = None

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None, **kwargs: Any
    ) -> Any:
        """Trains, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: See `ExactCheckpoints.train`.
            trial: Passed on.
            ignore_keys_for_eval: Passed on.
            **kwargs: Passed on.

        Returns:
            What upstream's `train` returns.

        Raises:
            PrecisionError: If `max_consecutive_skips` optimizer steps in a row were skipped.
        """
        self._record = None
        if not any(isinstance(callback, _AroundSteps) for callback in self.callback_handler.callbacks):
            # First, so that the user's callbacks after a step find it said whether it was skipped.
            self.callback_handler.callbacks.insert(0, _AroundSteps(self))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs)

    @property
    def _steps(self) -> "StepRecord":
        if self._record is None:
            self._record = StepRecord(self)
        return self._record

    @property
    def _step_record(self) -> dict[str, Any]:
        """The record as plain values, for `exact_state`."""
        return self._steps.state()

    @_step_record.setter
    def _step_record(self, state: dict[str, Any]) -> None:
        self._steps.load(state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restores the loss scaler, but no scale with which nothing can be unscaled."""
        scaler = self.accelerator.scaler
        begins = None if scaler is None else scaler.get_scale()
        super()._load_scaler(checkpoint)
        if begins is not None and not SMALLEST_SCALE <= scaler.get_scale() <= 2 * LARGEST_SCALE:
            said = "scaler.pt of %s holds a loss scale of %g, with which nothing can be unscaled: it begins at %g"
            logger.warning(said, checkpoint, scaler.get_scale(), begins)
            scaler.load_state_dict({**scaler.state_dict(), "scale": begins})

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Notes the norm of the gradients on its way to the log."""
        self._steps.note_norm(grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with the metrics of the optimizer beside those of a training step.

        Args:
            logs: What is logged; the metrics are added to it.
            *args: Passed on.
            **kwargs: Passed on.
        """
        # The last log of a run comes after the last step, which may not have been logged.
        due = ("loss" in logs and self.model.training) or ("train_loss" in logs and self._steps.unlogged)
        if due and getattr(self.args, "precision_metrics", True):
            logs.update(self._steps.metrics())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class _AroundSteps(TrainerCallback):
    """Tells the record of a trainer that the optimizer is about to step, and that it has."""

    def __init__(self, trainer: SkippedSteps) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._steps.before()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._steps.after()


class StepRecord:
    """What became of the optimizer steps of a run.

    Args:
        trainer: The trainer.

    Attributes:
        skipped: Steps that were skipped so far.
        in_a_row: Those since the last one that was taken.
        taken: Steps that were taken so far.
        unlogged: Steps since the metrics were last given.
        limit: How many may be skipped in a row.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.skipped = self.in_a_row = self.taken = self.unlogged = 0
        self.limit: int = getattr(trainer.args, "max_consecutive_skips", MAX_CONSECUTIVE_SKIPS)
        self._measures: bool = getattr(trainer.args, "precision_metrics", True)
        self._scale: torch.Tensor | None = None  # before the step
        self._loss_scale = self._row_began_at = math.nan
        self._norms: list[torch.Tensor] = []
        self._norm_sum, self._norm_count, self._norm_step = 0.0, 0, -1
        self._sample: UpdateSample | None = None
        self._sample_state: dict[str, Any] | None = None
        self._looked_at: int | None = None

    # ---- Around a step ----

    def before(self) -> None:
        """The gradients are final, and the optimizer is about to step."""
        scaler = self._scaler()
        # The scaler changes its tensor in place; a copy costs no read of the device.
        self._scale = None if scaler is None else scaler._get_scale_async().detach().clone()
        if self._measures and (self._looked_at is None or self.taken - self._looked_at >= EVERY):
            self._sampled().before()

    def after(self) -> None:
        """The optimizer has stepped, or not.

        Raises:
            PrecisionError: If too many steps in a row were skipped, or the loss scale is at its end.
        """
        skipped = self._was_skipped()
        if skipped:
            self.skipped += 1
            self.in_a_row += 1
        else:
            self.in_a_row = 0
        if self._sample is not None and self._sample.after(skipped):
            self._looked_at = self.taken
        self.taken += not skipped
        self.unlogged += 1
        # Before the step that a scale too small would make NaN of.
        if skipped and (self.in_a_row >= self.limit or self._loss_scale < SMALLEST_SCALE):
            raise PrecisionError([self._too_many()])

    def _was_skipped(self) -> bool:
        """Whether the step was skipped; where it was, schedules are held as accelerate holds them."""
        accelerator, scaler = self._trainer.accelerator, self._scaler()
        if scaler is None or self._scale is None:
            return bool(accelerator.optimizer_step_was_skipped)  # an engine with a scaler of its own knows
        before, now = torch.stack([self._scale, scaler._get_scale_async()]).tolist()  # the one read of the device
        skipped = not now >= before
        for optimizer in accelerator._optimizers:
            optimizer._is_overflow = skipped
        if skipped and not self.in_a_row:
            self._row_began_at = before
        self._loss_scale = now
        return skipped

    def _scaler(self) -> Any:
        scaler = self._trainer.accelerator.scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _sampled(self) -> UpdateSample:
        if self._sample is None:
            self._sample = UpdateSample(self._trainer.optimizer, _embeddings(self._trainer.model))
            if self._sample_state is not None:
                self._sample.load(self._sample_state)
        return self._sample

    def _too_many(self) -> Problem:
        began, now, step = self._row_began_at, self._loss_scale, self._trainer.state.global_step + 1
        high = now >= 1.0  # the scale has still a way to go
        return refuse(
            "optimizer-steps-skipped",
            f"{self.in_a_row} optimizer steps in a row, up to step {step}, were skipped",
            began=f"{began:g}",
            now=f"{now:g}",
            fix=f"`loss_scale_init={min(now, began):g}`, or `bf16=True`"
            if high
            else "`bf16=True`, whose range is float32's; or look with `overflow_probe_steps=1` for activations that "
            "overflow, and keep those modules in float32 with `fp32_modules=[...]`",
        )

    # ---- For the log ----

    def note_norm(self, norm: Any) -> None:
        """Takes the norm of the gradients of a step, without reading it.

        Args:
            norm: A number or a tensor of one; `None` where it is not known.
        """
        step = self._trainer.state.global_step
        if norm is None or step == self._norm_step or not self._measures:
            return  # upstream hands over the last one again when an epoch ends
        self._norm_step = step
        self._norms.append(torch.as_tensor(norm).detach())
        if len(self._norms) >= _NORMS:
            self._sum_norms()

    def _sum_norms(self) -> None:
        if self._norms:
            whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in self._norms]
            finite = [norm for norm in torch.stack(whole).tolist() if math.isfinite(norm)]
            self._norm_sum, self._norm_count = self._norm_sum + sum(finite), self._norm_count + len(finite)
            self._norms.clear()

    def metrics(self) -> dict[str, float]:
        """The metrics of the optimizer since the last log, by the names that they are logged under."""
        found: dict[str, float] = {}
        self.unlogged = 0
        if self._scaler() is not None:
            found["loss_scale"] = self._loss_scale
        if self._scaler() is not None or (self._trainer.args.fp16 and self._trainer.is_deepspeed_enabled):
            found |= {"skipped_steps": float(self.skipped), "effective_steps": float(self.taken)}
        self._sum_norms()
        if self._norm_count:
            found["grad_norm_finite"] = self._norm_sum / self._norm_count
        self._norm_sum, self._norm_count = 0.0, 0
        if self._sample is not None or self._sample_state is not None:
            found |= self._sampled().metrics(self._total)
        return {f"precision/{name}": value for name, value in found.items()}

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return sums  # some devices have no float64
        total: torch.Tensor = accelerator.reduce(sums.to(accelerator.device), "sum")
        return total

    # ---- For a resume ----

    _PLAIN = (
        "skipped", "in_a_row", "taken", "_loss_scale", "_row_began_at", "_norm_sum", "_norm_count", "_norm_step",
        "_looked_at",
    )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The record as plain values."""
        self._sum_norms()
        sample = self._sample_state if self._sample is None else self._sample.state()
        return {name: getattr(self, name) for name in self._PLAIN} | {"sample": sample}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave.

        Args:
            state: The plain values.
        """
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self._sample_state = state["sample"]
        if self._sample is not None and self._sample_state is not None:
            self._sample.load(self._sample_state)


def _embeddings(model: nn.Module) -> Iterator[int]:
    """The `id`s of the embeddings' weights that are embeddings alone, and no head at the same time."""
    base: Any = unwrap(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    tied = getattr(head, "weight", None)
    for module in base.modules():
        if isinstance(module, nn.Embedding) and module.weight is not tied:
            yield id(module.weight)


def problems(args: Any) -> Iterator[Problem]:
    """What no number of steps can be.

    Args:
        args: A config, Safe or plain.

    Yields:
        One refusal for each setting that is out of its range.
    """
    for name, usual, unset in (("max_consecutive_skips", MAX_CONSECUTIVE_SKIPS, False),
                               ("overflow_probe_steps", 100, True)):  # fmt: skip
        value = getattr(args, name, usual)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not whole and not (unset and value is None):
            accepted = "a whole number of steps, at least 1" + (", or unset" if unset else "")
            yield refuse("steps-out-of-range", f"{name}={value!r}", accepted=accepted, field=name, usual=usual)

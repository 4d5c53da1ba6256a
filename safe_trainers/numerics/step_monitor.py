"""Counts skipped optimizer steps, and logs metrics of the steps that were taken.

A step whose gradients are not finite is skipped. Under fp16 the loss scale then decreases (see `LossScaleWatch`). In
other precisions the gradient norm decides (see `GradientNorm`), and the first skipped step causes a warning.

| metric | formula | unit |
|---|---|---|
| `precision/loss_scale` | loss scale after the last step | factor |
| `precision/skipped_steps` | optimizer steps skipped so far in this run | steps |
| `precision/effective_steps` | optimizer steps taken so far in this run | steps |
| `precision/grad_norm_finite` | mean of the finite gradient norms, before clipping | as `grad_norm` |
| `precision/grad_zero_frac` | sampled gradient elements that are 0 after unscaling / all sampled elements | share |
| `precision/update_lost_frac` | unchanged sampled weights with nonzero gradient / all with nonzero gradient | share |
| `precision/stalled_params` | parameters without a sampled element that changed between two samplings | parameters |

The first is logged if the loss is scaled, and the next two also if a step was skipped. They count from the start of
the run, including resumed parts. The others cover the steps since the last log, and are absent without data. Steps
after the last log of a loss are in the log at the end of training.

The sample has about 4,096 elements, at least 8 of each parameter, and does not change. Each element is weighted by the
share of its parameter that it represents. It is read every fifth step that is taken with a learning rate above 0.
Embeddings do not count for `grad_zero_frac`, because the rows of absent tokens have no gradient in any precision.

All metrics are of the whole run: with sharded weights they are summed over ranks. DeepSpeed does not expose gradients,
so the last three metrics are absent there. All ranks skip the same steps: DDP reduces the gradients before the scaler
reads them, and FSDP's scaler and DeepSpeed's engine decide for all ranks together.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import PrecisionError, Problem, refuse, warn
from ..core.feature import Feature, Run
from ..model.parts import unwrap
from ..policy.settings import SMALLEST_SCALE
from .update_sample import EVERY, UpdateSample


LOOK = "look for inf or NaN in the batch of this step"
ANOMALY = (
    "look for inf or NaN in the data and in the initial weights; `torch.autograd.set_detect_anomaly(True)` shows the "
    "operation that makes them"
)
"""What to do if the cause of skipped steps is not known."""
_NORMS = 1024
"""Number of gradient norms that are kept on the device before they are summed."""


class StepMonitor(Feature):
    """Counts skipped optimizer steps, stops after too many in a row, and logs the metrics of this module.

    Attributes:
        skipped: Number of skipped steps so far.
        taken: Number of steps taken so far.
        unlogged: Number of steps since the metrics were last logged.
    """

    name = "steps"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.on_train_begin()

    def on_train_begin(self) -> None:
        """Resets all counts to zero."""
        self.skipped = self.taken = self.unlogged = 0
        self.run.skipped_in_a_row = 0
        self._loss_scale = self._row_began_at = math.nan
        self._norms: list[torch.Tensor] = []
        self._norm_sum, self._norm_count, self._norm_step = 0.0, 0, -1
        self._sample: UpdateSample | None = None
        self._sample_state: dict[str, Any] | None = None
        self._looked_at: int | None = None  # `taken` when the sample was last read

    # ---- Around a step ----

    def before_step(self) -> None:
        """Reads the sample of gradients and weights, every fifth step."""
        due = self._looked_at is None or self.taken - self._looked_at >= EVERY
        if self.run.settings.precision_metrics and due:
            self._sampled().before()

    def after_step(self, skipped: bool) -> None:
        """Counts the step.

        Raises:
            PrecisionError: If too many steps in a row were skipped, or the loss scale is too small to go on.
        """
        if skipped and self.run.skipped_in_a_row == 1:
            self._row_began_at = self.run.loss_scale.before
        self._loss_scale = self.run.loss_scale.now
        self.skipped += skipped
        if self._sample is not None and self._sample.after(skipped):
            self._looked_at = self.taken
        self.taken += not skipped
        self.unlogged += 1
        if skipped and self.run.loss_scale.scaler is None and not self.run.trainer.is_deepspeed_enabled:
            step = self.run.step + (not self.run.gradient_norm.late)  # one skipped on the device is known a step later
            given, fix = self._with_cause(f"the gradient norm of step {step} is not finite", LOOK)
            self.run.warn_once(warn("step-skipped", given, fix=fix))
        limit = self.run.settings.max_consecutive_skips
        # A scale that is too small would make the next step NaN.
        if skipped and (self.run.skipped_in_a_row >= limit or self._loss_scale < SMALLEST_SCALE):
            raise PrecisionError([self._too_many()])

    def on_train_end(self) -> None:
        """Raises `PrecisionError` if every step of the run was skipped."""
        self._settle()
        if self.skipped and not self.taken:
            scaled = not math.isnan(self._loss_scale)
            fix = f"`loss_scale_init={self._loss_scale:g}`, or more steps" if scaled else (
                "look for inf or NaN in the data and in the initial weights"
            )  # fmt: skip
            given, fix = self._with_cause(f"a run of {self.skipped} optimizer steps", fix)
            raise PrecisionError([refuse("no-step-taken", given, fix=fix)])

    def _with_cause(self, given: str, fix: str) -> tuple[str, str]:
        """Adds to a message what was found about the skipped steps; returns it with the fix."""
        cause = self.run.skip_cause
        return (given, fix) if cause is None or cause.fix is None else (f"{given}; {cause.what}", cause.fix.text)

    def _settle(self) -> None:
        """Counts the last step as skipped if the optimizer skipped it, and its flag was not read before."""
        if self.run.gradient_norm.read_late():
            self.skipped, self.taken = self.skipped + 1, self.taken - 1

    def _sampled(self) -> UpdateSample:
        if self._sample is None:
            self._sample = UpdateSample(self.run.trainer.optimizer, _embeddings(self.run.model))
            if self._sample_state is not None:
                self._sample.load(self._sample_state)
        return self._sample

    def _too_many(self) -> Problem:
        began, now, step = self._row_began_at, self._loss_scale, self.run.step + 1
        given = f"{self.run.skipped_in_a_row} optimizer steps in a row, up to step {step}, were skipped"
        if math.isnan(now):
            given, fix = self._with_cause(given, ANOMALY)
            return refuse("gradients-not-finite", given, fix=fix)
        fix = f"`loss_scale_init={min(now, began):g}`, or `bf16=True`" if now >= 1.0 else (
            "`bf16=True`, which has the range of float32; or find the activations that overflow with "
            "`overflow_probe_steps=1`, and keep those modules in float32 with `fp32_modules=[...]`"
        )  # fmt: skip
        given, fix = self._with_cause(given, fix)
        return refuse("optimizer-steps-skipped", given, began=f"{began:g}", now=f"{now:g}", fix=fix)

    # ---- For the log ----

    def on_grad_norm(self, norm: Any) -> None:
        """Keeps the gradient norm of a step, without reading it from the device."""
        step = self.run.step
        if norm is not None and self._engine_applied(norm):
            given = f"the gradient norm of step {step} is {float(norm)}"
            raise PrecisionError([refuse("gradients-not-finite", given, fix=ANOMALY)])
        if norm is None or step == self._norm_step or not self.run.settings.precision_metrics:
            return  # transformers passes the last norm again at the end of an epoch
        self._norm_step = step
        self._norms.append(torch.as_tensor(norm).detach())
        if len(self._norms) >= _NORMS:
            self._sum_norms()

    def _engine_applied(self, norm: Any) -> bool:
        """Whether DeepSpeed applied gradients that are not finite: without fp16 it checks nothing."""
        engine = self.run.trainer.is_deepspeed_enabled and not self.run.args.fp16
        return engine and not math.isfinite(norm)

    def _sum_norms(self) -> None:
        if self._norms:
            whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in self._norms]
            finite = [norm for norm in torch.stack(whole).tolist() if math.isfinite(norm)]
            self._norm_sum, self._norm_count = self._norm_sum + sum(finite), self._norm_count + len(finite)
            self._norms.clear()

    def on_log(self, logs: Mapping[str, float], mode: str) -> dict[str, float]:
        """The metrics since the last log of a training step."""
        # The last log of a run comes after the last step, which may not have been logged.
        due = ("loss" in logs and self.run.model.training) or ("train_loss" in logs and self.unlogged)
        if not due or not self.run.settings.precision_metrics:
            return {}
        found: dict[str, float] = {}
        self.unlogged = 0
        scales = self.run.loss_scale.scaler is not None
        if scales:
            found["loss_scale"] = self._loss_scale
        if scales or self.skipped or (self.run.args.fp16 and self.run.trainer.is_deepspeed_enabled):
            found |= {"skipped_steps": float(self.skipped), "effective_steps": float(self.taken)}
        self._sum_norms()
        if self._norm_count:
            found["grad_norm_finite"] = self._norm_sum / self._norm_count
        self._norm_sum, self._norm_count = 0.0, 0
        if self._sample is not None or self._sample_state is not None:
            found |= self._sampled().metrics(self._total)
        return {f"precision/{name}": value for name, value in found.items()}

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        accelerator = self.run.accelerator
        if accelerator.num_processes == 1:
            return sums  # some devices have no float64
        total: torch.Tensor = accelerator.reduce(sums.to(accelerator.device), "sum")
        return total

    # ---- Checkpoints ----

    _PLAIN = (
        "skipped", "taken", "_loss_scale", "_row_began_at", "_norm_sum", "_norm_count", "_norm_step", "_looked_at",
    )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The counts and the sample."""
        self._sum_norms()
        sample = self._sample_state if self._sample is None else self._sample.state()
        own = {name: getattr(self, name) for name in self._PLAIN}
        unread = self.run.gradient_norm.unread  # not settled here, because the next step of this run counts it
        return {**own, "in_a_row": self.run.skipped_in_a_row, "unread": unread, "sample": sample}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counts and the sample."""
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self.run.skipped_in_a_row = state["in_a_row"]
        self.run.gradient_norm.restore(state["unread"])
        self._sample_state = state["sample"]
        if self._sample is not None and self._sample_state is not None:
            self._sample.load(self._sample_state)


def _embeddings(model: nn.Module) -> Iterator[int]:
    """The `id`s of embedding weights that are not tied to the output head."""
    base: Any = unwrap(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    tied = getattr(head, "weight", None)
    for module in base.modules():
        if isinstance(module, nn.Embedding) and module.weight is not tied:
            yield id(module.weight)

"""Names what was not finite in a skipped step, and gradients that overflow or underflow float16.

Nothing is measured while all is well, except in the first step of an fp16 run, where hooks read the gradients of
module outputs. When a step was skipped, its losses are computed again before a weight changes, and the first number
that is not finite is named. It takes one more forward and backward pass for each batch of the step, in the first
skipped step of a run and again after 4, 8, 16, ... in a row.

Under fp16 most skipped steps only show that the loss scale is too large, and it falls. A gradient is reported if it
overflows with the loss scale 1 too: a smaller scale would make other gradients zero.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from ..core.dtypes import FLOAT16
from ..core.errors import PrecisionError, Problem, warn
from ..core.feature import Feature, Run
from ..model.parts import unwrap
from .activations import LIMIT, Watch
from .gradients import GradientReport, GradientWatch, names_of_adapters
from .overflow_fix import computing_in_float32, explain, search, shortest
from .replay import LossCall, Replay
from .trace import GRADIENT, INPUT, LOSS, LOSS_GRADIENT, LOSS_INPUT, OUTPUT, WEIGHT, Cause, Trace, values_of


logger = logging.getLogger(__name__)

UNDERFLOW = 0.5
"""Share of a module's gradient elements that underflow, above which the run warns."""
BF16 = "`bf16=True` on a device that computes it"
_FIXES = {
    WEIGHT: "load weights that are finite, or resume from the last complete checkpoint",
    INPUT: "look for inf or NaN in `{name}` of this batch, and in the data that it is made from",
    OUTPUT: "look at these inputs: a smaller `learning_rate` if they grow in each step; else the code of `{type}` "
    "divides by zero or overflows",
    LOSS: "look at the settings of the loss, and at the code that computes it",
    LOSS_INPUT: "look for inf or NaN in what `{name}` is computed from: the rewards, or the weights of the reference "
    "model",
    GRADIENT: "look at the backward pass of `{type}`: `torch.autograd.set_detect_anomaly(True)` shows the operation",
    LOSS_GRADIENT: "look at the code that computes the loss: `torch.autograd.set_detect_anomaly(True)` shows the "
    "operation",
}
"""What to do, by the kind of cause."""


class NotFinite(Feature):
    """Finds out why a step was skipped, and measures the gradients of fp16 runs.

    Attributes:
        cause: The first number that was not finite in the last step that was computed again; `None` if there was none.
        gradients: The gradients of module outputs in the last measured step; `None` in runs without float16.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._replay = Replay(run)
        self.cause: Cause | None = None
        self.gradients: GradientReport | None = None
        self._training = False
        self._watch: GradientWatch | None = None
        self._watched: LossCall | None = None
        self._watched_at: int | None = None
        self._explained = False
        self._noted: set[tuple[str, str, str]] = set()
        self._unlogged: float | None = None

    def on_train_begin(self) -> None:
        """Measures and explains again in each call of `train`."""
        self.cause = self.gradients = self._watch = self._watched = self._watched_at = self._unlogged = None
        self._explained = False
        self.run.skip_cause = None
        self._replay = Replay(self.run)
        self._training = self._replay.possible

    def on_train_exit(self) -> None:
        """Forgets the last batch."""
        self._training = False
        self._replay = Replay(self.run)

    # ---- Around a step ----

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Computes a loss, and keeps what is needed to compute it again."""
        if not (self._training and torch.is_grad_enabled()):
            return call()
        if self._replay.calls or not self._watch_due():
            return self._replay.computed(call)
        self._watch = GradientWatch(self.run.model)
        with self._watch.attached():
            result = self._replay.computed(call)
        self._watched = self._replay.calls[-1] if self._replay.calls else None
        return result

    def _watch_due(self) -> bool:
        every, last = self.run.settings.overflow_probe_steps, self._watched_at
        due = last is None or (every is not None and self.run.step - last >= every)
        return due and self.run.loss_scale.scaler is not None and FLOAT16 in self.run.policy.compute.value

    def before_step(self) -> None:
        """Explains a step that the optimizer skipped on the device, and reads the gradients of the first step."""
        if self.run.gradient_norm.late:
            self._explain(self._replay.before, self.run.skipped_in_a_row + 1, self.run.step)
        watch, call, self._watch, self._watched = self._watch, self._watched, None, None
        if watch is None:
            return
        report = watch.finish(self.run.step, self.run.loss_scale.scaler.get_scale())
        if report.finite:
            self.gradients, self._watched_at = report, self.run.step
            logger.info("%s", report)
            if call is not None and report.suspects(names_of_adapters(self.run.model)):
                self._guarded(lambda: self._measure_underflow(report, call))

    def after_step(self, skipped: bool) -> None:
        """Explains a skipped step; its weights are those of its losses."""
        late = self.run.gradient_norm.late
        if not skipped:
            self.run.skip_cause = None
        elif not late:
            self._explain(self._replay.calls, self.run.skipped_in_a_row, self.run.step + 1)
        self._replay.next_step(self.run.gradient_norm.undecided)

    def on_log(self, logs: Mapping[str, float], mode: str) -> dict[str, float]:
        """The largest underflow of a module, once after it was measured."""
        share, self._unlogged = self._unlogged, None
        if share is None or not self.run.settings.precision_metrics:
            return {}
        return {"precision/grad_underflow_max": share}

    # ---- What was not finite ----

    def _explain(self, calls: "deque[LossCall]", row: int, step: int) -> None:
        """Computes the losses of a skipped step again.

        Args:
            calls: Its losses.
            row: Number of steps skipped in a row.
            step: The number of the step, from 1.
        """
        again = row >= 4 and row & (row - 1) == 0
        if not self._training or not (again or row == self.run.settings.max_consecutive_skips or not self._explained):
            return
        self._explained = True
        found = self._guarded(lambda: self._find(calls, step)) or (None, None)
        if self.run.accelerator.num_processes > 1:
            # The rank that knows the cause; others may only know that their own losses are finite.
            found = max(gather_object([found]), key=lambda theirs: (theirs[0] is not None, theirs[1] is not None))
        self.cause, problem = found
        if problem is None:
            return
        self.run.skip_cause = problem
        key = ("", "", "") if self.cause is None else (self.cause.kind, self.cause.module, self.cause.what.name)
        if key not in self._noted:  # the same numbers of a later step would fill the report
            self._noted.add(key)
            self.run.note(problem)
        if self.run.loss_scale.scaler is not None:
            self.run.warn_once(problem)

    def _guarded(self, find: Callable[[], Any]) -> Any:
        """Returns the result of a diagnosis; `None` if it fails, because it must not end the run."""
        try:
            return find()
        except Exception as error:
            logger.warning("a diagnosis of this step failed: %s: %s", type(error).__name__, error)
            return None

    def _find(self, calls: "deque[LossCall]", step: int) -> tuple[Cause | None, Problem | None]:
        """Returns what is not finite, and the warning; no warning if a smaller loss scale is enough."""
        computed = 0
        for call in calls:
            cause, finite = self._traced(call)
            if cause is not None:
                return self._describe(cause, call, step)
            computed += finite
        if not computed or self.run.loss_scale.scaler is not None:
            return None, None
        what = f"{computed} of its losses, computed again, and their gradients are finite"
        fix = "compare two runs from the same seed: a kernel that is not deterministic, or the hardware"
        return None, warn("step-skipped", what, fix=fix)

    def _traced(self, call: LossCall, factor: float = 1.0) -> tuple[Cause | None, bool]:
        """Computes a loss again under a trace; returns the cause, and whether it was computed and is finite."""
        trace = Trace(self.run.model)
        loss = self._replay.again(call, trace.attached(), factor)
        cause = None if loss is None else trace.cause(loss, call.inputs)
        if call.seed is not None and (cause is None or cause.kind in (GRADIENT, LOSS_GRADIENT)):
            seed = values_of("gradient of the loss", call.seed, masks=False)
            cause = Cause(LOSS, "", "", seed) if seed.wrong else cause  # code around `compute_loss` changed the loss
        return cause, loss is not None and cause is None

    def _describe(self, cause: Cause, call: LossCall, step: int) -> tuple[Cause, Problem | None]:
        """Returns the cause and the warning; under fp16, what is wrong with the loss scale 1 if anything is."""
        scaled = self.run.loss_scale.scaler is not None
        given, fix = cause.sentence, _FIXES[cause.kind].format(name=cause.what.name, type=cause.type)
        if not scaled:
            return cause, warn("step-skipped", given, fix=fix)
        begin, factor = f"step {step} is skipped: ", 1.0
        backward = cause.kind in (GRADIENT, LOSS_GRADIENT)
        if backward and self.run.loss_scale.before > 1:
            factor = 1 / self.run.loss_scale.before
            smaller = self._traced(call, factor)[0]
            if smaller is None:
                logger.info("%s%s; with the loss scale 1 all gradients are finite", begin, cause.sentence)
                return cause, None
            cause, given = smaller, smaller.sentence
        if cause.kind in (INPUT, OUTPUT, GRADIENT, LOSS_GRADIENT):
            if self._wrong_in_float32(call, factor):
                return cause, warn("step-skipped", f"{begin}{given}, in float32 too", fix=fix)
            if backward:
                return cause, self._overflow(cause, call, factor, begin)
            problem = self._activations(call)
            fix = fix if problem is None or problem.fix is None else problem.fix.text
        return cause, warn("step-skipped", f"{begin}{given}", fix=fix)

    def _activations(self, call: LossCall) -> Problem | None:
        """The refusal of a forward pass that overflows float16, with the modules that have to compute in float32."""
        model, watch = self.run.model, Watch(self.run.model)

        def again(watch: Watch) -> torch.Tensor:
            loss = self._replay.again(call, watch.attached())
            if loss is None:
                raise RuntimeError("the loss cannot be computed again")
            return loss

        report = watch.finish("loss", self.run.step, again(watch))
        if report.first is None:
            return None
        return explain(report, model, list(self.run.settings.fp32_modules or ()), again)

    def _overflow(self, cause: Cause, call: LossCall, factor: float, begin: str) -> Problem:
        """The warning of gradients that overflow even with the loss scale 1, with the modules to hold in float32."""

        def attempt() -> tuple[str | None, bool]:
            found, finite = self._traced(call, factor)
            return None if found is None else found.module, finite

        names, fixed = self._searched(cause.module, attempt)
        given = (
            f"{begin}{cause.sentence}, with the loss scale {self.run.loss_scale.before * factor:g}; the loss is finite"
        )
        return warn("gradients-overflow-fp16", given, fix=self._line(names, fixed))

    def _searched(self, first: str, attempt: Callable[[], tuple[str | None, bool]]) -> tuple[list[str], bool | None]:
        try:
            return search(self.run.model, first, attempt)
        except PrecisionError as error:  # an 8-bit layer, which cannot compute in float32
            logger.info("%s", error)
            return [], False

    def _line(self, names: Sequence[str], fixed: bool | None) -> str:
        line = f"`fp32_modules={[*(self.run.settings.fp32_modules or ()), *shortest(self.run.model, names)]!r}`"
        if fixed is None and names:
            line += ", and the modules that the next run names,"
        return BF16 if fixed is False or not names else f"{line} or {BF16}"

    def _wrong_in_float32(self, call: LossCall, factor: float) -> bool:
        """Whether something is not finite with all modules in float32; false if that cannot be computed."""
        try:
            with computing_in_float32(self.run.model, self._whole()):
                return self._traced(call, factor)[0] is not None
        except (PrecisionError, torch.OutOfMemoryError) as error:
            logger.info("the step could not be computed in float32: %s", error)
            return False

    def _whole(self) -> list[str]:
        """The names of the largest modules, which make up the model."""
        base: nn.Module = unwrap(self.run.model)
        return [name for name, child in base.named_children() if next(child.parameters(), None) is not None]

    # ---- Underflow ----

    def _measure_underflow(self, report: GradientReport, call: LossCall) -> None:
        """Compares the gradients of a loss with those in float32, and warns if too many underflow."""
        reference = self._in_float32(call)
        if reference is None:
            return
        self.gradients = report = report.compared(reference)
        share = report.underflow
        if share is None:
            return
        self._unlogged = share
        logger.info("%s", report)
        if share > UNDERFLOW:
            worst = max(report.gradients, key=lambda gradient: gradient.underflow or 0.0)
            given = f"{worst.underflow:.1%} of the gradient of the output of `{worst.module or 'the model'}` is 0 in "
            given += f"float16 and not in float32, in step {report.step + 1} with the loss scale {report.scale:g}"
            problem = warn("gradients-underflow-fp16", given, fix=self._against_underflow(report, reference, call))
            self.run.note(problem)
            self.run.warn_once(problem)

    def _in_float32(self, call: LossCall) -> GradientReport | None:
        """The gradients of a loss with all modules in float32; `None` if they cannot be computed."""
        with computing_in_float32(self.run.model, self._whole()):
            return self._measured(call, 1.0)

    def _measured(self, call: LossCall, factor: float) -> GradientReport | None:
        watch = GradientWatch(self.run.model)
        if self._replay.again(call, watch.attached(), factor) is None:
            return None
        return watch.finish(self.run.step, self.run.loss_scale.scaler.get_scale() * factor)

    def _against_underflow(self, report: GradientReport, reference: GradientReport, call: LossCall) -> str:
        """What to write against underflow: a larger loss scale if it fits, else modules in float32."""
        room = LIMIT / 2 / report.largest if report.largest > 0 else math.inf
        factor = 2.0 ** min(24, math.floor(math.log2(room))) if room >= 4 else 1.0
        while factor >= 4:
            larger = self._measured(call, factor)
            if larger is None:
                break
            if larger.finite and self._traced(call, factor)[1]:
                if (larger.compared(reference).underflow or 0.0) <= UNDERFLOW:
                    return f"`loss_scale_init={report.scale * factor:g}`"
                break
            factor /= 4

        def attempt() -> tuple[str | None, bool]:
            now = self._measured(call, 1.0)
            first = None if now is None else _first(now.compared(reference))
            return first, now is not None and first is None

        first = _first(report)
        names, fixed = ([], False) if first is None else self._searched(first, attempt)
        return self._line(names, fixed)


def _first(report: GradientReport) -> str | None:
    """The first module, in the order of the backward pass, whose gradients underflow too much."""
    return next((g.module for g in report.gradients if (g.underflow or 0.0) > UNDERFLOW), None)

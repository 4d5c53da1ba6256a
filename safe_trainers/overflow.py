"""The overflow probe: which module computes beyond the largest float16 number, and the line that mends it.

No loss scale helps where the forward pass overflows. What a user sees of it is a loss of NaN and steps that are all
skipped, or, in a rollout, torch's "probability tensor contains either `inf`, `nan` or element < 0". The probe watches
the first forward pass of the first rollout and of the first loss, names the module, and tries the `fp32_modules` line
that it suggests: modules are brought to float32 for a moment, one after the other, and the same forward pass is run
again, until its result is finite.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object

from .activations import OverflowReport, Watch
from .contract import batches_continuously
from .dtypes import FLOAT16
from .errors import PrecisionError, PrecisionWarning, refuse
from .mending import Again, called_again, explain, foresee, sampled_from
from .policy import PrecisionPolicy
from .skips import SkippedSteps


logger = logging.getLogger(__name__)

_SAMPLING_FAILED = "probability tensor contains"
"""How torch words that the logits of a rollout were not finite."""


class _StoppedError(Exception):
    """Ends a rollout after its first forward pass.

    Args:
        output: What the model gave in it.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("the first forward pass is all that is needed")
        self.output = output


class OverflowProbe(SkippedSteps):
    """Above TRL: looks for activations that overflow float16; a base of `PrecisionMixin`.

    Overrides `train`, `compute_loss` and `_generate_single_turn`.

    Attributes:
        overflow_report: What the last probe saw; `None` before it, and where nothing is computed in float16.
    """

    # What PrecisionBase brings, for the type checker.
    precision_policy: PrecisionPolicy
    _sharded: Callable[[], str | None]

    overflow_report: OverflowReport | None = None

    _probed: dict[str, int] | None = None  # the step of the last probe of each phase
    _warned_of: frozenset[str] = frozenset()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `ExactCheckpoints.train`.

        Args:
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            What upstream's `train` returns.

        Raises:
            PrecisionError: If the first batch overflows float16.
        """
        self._probed = {}
        return super().train(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss; on the first batch, and where else it is due, under the eyes of the probe."""
        if not (torch.is_grad_enabled() and self._probe_due("loss")):
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        watch = Watch(self.model)
        with watch.attached():
            result = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        report = watch.finish("loss", self.state.global_step, result[0] if isinstance(result, tuple) else result)
        self._judge(report, called_again(watch.calls))
        return result

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one turn of generation, and stops it where its first forward pass is not finite.

        On a GPU torch finds that out in the sampling kernel, which ends the process' use of the GPU.

        Raises:
            PrecisionError: If no token can be sampled, with the module that overflows.
        """
        generate = super()._generate_single_turn  # type: ignore[misc]
        if self._probed is None or not self.model.training or not self._computes_in_float16() or self._elsewhere():
            return generate(*args, **kwargs)
        try:
            return self._watched_rollout(lambda: generate(*args, **kwargs), self._probe_due("rollout"))
        except RuntimeError as error:
            if _SAMPLING_FAILED not in str(error):
                raise
            raise self._not_finite_rollout() from error

    def _watched_rollout(self, generate: Callable[[], Any], due: bool) -> Any:
        """Generates; where the first forward pass is not finite in any process, it is run again under all eyes."""
        watch = Watch(self.model, whole=due)

        def first(output: Any) -> None:
            report = watch.finish("rollout", self.state.global_step, sampled_from(output))
            watch.calls.clear()  # generation goes on, and may need the memory
            if not all(gather_object([report.result_finite])):
                raise _StoppedError(output)
            if due:
                self._judge(report, None)

        def stop(output: Any) -> None:
            raise _StoppedError(output)

        def again(watch: Watch) -> torch.Tensor:
            try:
                with watch.attached(stop):
                    generate()
            except _StoppedError as stopped:
                return sampled_from(stopped.output)
            raise RuntimeError("nothing was generated")

        try:
            with watch.attached(first):
                return generate()
        except _StoppedError:
            watch = Watch(self.model)
            result = again(watch)
        self._judge(watch.finish("rollout", self.state.global_step, result), again)
        raise self._not_finite_rollout()

    def _not_finite_rollout(self) -> PrecisionError:
        return PrecisionError([refuse("rollout-not-finite", f"the rollout after step {self.state.global_step}")])

    def _computes_in_float16(self) -> bool:
        if getattr(self.args, "torch_compile", False) or self.args.n_gpu > 1:
            return False  # hooks would be compiled into the model, or run in the threads of `nn.DataParallel`
        return FLOAT16 in self.precision_policy.compute.value.split(" and ")

    def _elsewhere(self) -> bool:
        """Whether another engine, thread or function generates, in which no forward pass of the model is the first."""
        return (
            getattr(self.args, "use_vllm", False)
            or batches_continuously(self.args)
            or getattr(self, "rollout_func", None) is not None
        )

    def _probe_due(self, phase: str) -> bool:
        if self._probed is None or not self._computes_in_float16():
            return False
        step, last = self.state.global_step, self._probed.get(phase)
        every = getattr(self.args, "overflow_probe_steps", None)
        last_chance = phase == "loss" and self._steps.in_a_row == self._steps.limit - 1
        due = last is None or (every is not None and step - last >= every) or (last_chance and step > last)
        if due:
            self._probed[phase] = step
        return due

    def _judge(self, report: OverflowReport, again: Again | None) -> None:
        """Says what a probe saw; all processes agree on it.

        Args:
            report: What it saw.
            again: Runs the same forward pass again.

        Raises:
            PrecisionError: If the result is not finite because a module overflowed.
        """
        self.overflow_report = report
        logger.info("%s", report)
        problem, warning = None, None
        patterns = list(getattr(self.args, "fp32_modules", None) or ())
        if report.first is not None and not report.result_finite:
            problem = explain(report, self.model, patterns, again if self._sharded() is None else None)
        elif report.first is not None or report.near:
            warning = foresee(report, self.model, patterns)
        found = gather_object([(problem, warning)])  # of all processes; one may not go on without the others
        problem = next((theirs for theirs, _ in found if theirs is not None), None)
        warning = next((theirs for _, theirs in found if theirs is not None), None)
        if problem is not None:
            raise PrecisionError([problem])
        if warning is not None and warning.given not in self._warned_of and self.args.process_index == 0:
            self._warned_of |= {warning.given}
            warnings.warn(str(warning), PrecisionWarning, stacklevel=4)

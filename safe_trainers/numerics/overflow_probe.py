"""The overflow probe: names the module whose output overflows float16, and the line that fixes it.

A loss scale cannot fix an overflow in the forward pass. Its symptoms are a loss of NaN and only skipped steps, or, in
a rollout, torch's error "probability tensor contains either `inf`, `nan` or element < 0". The probe measures the first
forward pass of the first rollout and of the first loss, names the module, and tries the `fp32_modules` line that it
suggests before it suggests it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object

from ..core.dtypes import FLOAT16
from ..core.errors import PrecisionError, refuse
from ..core.feature import Feature, Run
from ..core.trl import uses_continuous_batching
from .activations import OverflowReport, Watch
from .overflow_fix import Rerun, called_again, explain, sampled_from, warn_near_overflow, weight_not_finite


logger = logging.getLogger(__name__)

_SAMPLING_FAILED = "probability tensor contains"
"""Part of torch's error message for logits that are not finite."""


class _StoppedError(Exception):
    """Ends a rollout after its first forward pass.

    Args:
        output: The model's output.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("stopped after the first forward pass")
        self.output = output


class OverflowProbe(Feature):
    """Measures activations that overflow float16, in the first rollout, the first loss and at later due steps.

    Attributes:
        report: The report of the last probe; `None` before the first, and if nothing computes in float16.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.report: OverflowReport | None = None
        self._probed: dict[str, int] | None = None  # the step of the last probe of each phase; `None` before training
        self._turns: int | None = None  # the turns of the batch that is made so far; `None` outside of one

    def on_train_begin(self) -> None:
        """Probes again in each call of `train`."""
        self._probed = {}
        if not self._computes_in_float16():
            self.rest("around_loss")

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Computes the loss; if a probe is due, measures every module.

        Raises:
            PrecisionError: If the loss is not finite because a module overflowed.
        """
        if not (torch.is_grad_enabled() and self._due("loss")):
            return call()
        watch = Watch(self.run.model)
        with watch.attached():
            result = call()
        report = watch.finish("loss", self.run.step, result[0] if isinstance(result, tuple) else result)
        self._judge(report, called_again(watch.calls))
        return result

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Makes a rollout batch, of which all ranks generate the first turn, but maybe not the later ones."""
        self._turns = 0
        try:
            return call()
        finally:
            self._turns = None

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn, and stops if the first forward pass is not finite.

        On a GPU torch fails later, in the sampling kernel, and the process can then no longer use the GPU.

        Raises:
            PrecisionError: If the logits are not finite; the error names the module that overflows.
        """
        training = self._probed is not None and self.run.model.training
        half = self._computes_in_float16()
        together = not self._turns
        self._turns = None if self._turns is None else self._turns + 1
        try:
            if not training or not half or self._generates_elsewhere():
                return call()
            return self._watched_rollout(call, self._due("rollout"), together)
        except RuntimeError as error:
            if not training or _SAMPLING_FAILED not in str(error):
                raise
            weight = weight_not_finite(self.run.model)
            if weight is None and not half:
                raise
            raise self._not_finite_rollout(weight) from error

    def _watched_rollout(self, generate: Callable[[], Any], due: bool, together: bool) -> Any:
        """Generates; if the first forward pass is not finite on any rank, repeats it and measures every module.

        Args:
            generate: Generates one turn.
            due: Whether a probe is due.
            together: Whether all ranks generate this turn; after calls of tools they may generate different numbers.
        """
        watch = Watch(self.run.model, whole=due)

        def first(output: Any) -> None:
            report = watch.finish("rollout", self.run.step, sampled_from(output))
            watch.calls.clear()  # frees memory for the rest of generation
            if not all(_of_all(report.result_finite, together)):
                raise _StoppedError(output)
            if due:
                self._judge(report, None, together)

        def stop(output: Any) -> None:
            raise _StoppedError(output)

        def again(watch: Watch) -> torch.Tensor:
            try:
                with watch.attached(stop):
                    generate()
            except _StoppedError as stopped:
                return sampled_from(stopped.output)
            raise RuntimeError("generation did not call the model")

        try:
            with watch.attached(first):
                return generate()
        except _StoppedError:
            watch = Watch(self.run.model)
            result = again(watch)
        self._judge(watch.finish("rollout", self.run.step, result), again, together)
        raise self._not_finite_rollout()

    def _not_finite_rollout(self, weight: str | None = None) -> PrecisionError:
        given = f"the rollout after step {self.run.step}"
        if weight is not None:
            module, _, name = weight.rpartition(".")
            return PrecisionError([refuse("weights-not-finite", f"`{module}`, in {given}", name=name)])
        return PrecisionError([refuse("rollout-not-finite", given)])

    def _computes_in_float16(self) -> bool:
        args = self.run.args
        if getattr(args, "torch_compile", False) or args.n_gpu > 1:
            return False  # hooks would be compiled into the model, or run in the threads of `nn.DataParallel`
        return FLOAT16 in self.run.policy.compute.value

    def _generates_elsewhere(self) -> bool:
        """Whether generation does not start with a forward pass of the model in this thread."""
        args = self.run.args
        return (
            getattr(args, "use_vllm", False)
            or uses_continuous_batching(args)
            or getattr(self.run.trainer, "rollout_func", None) is not None
        )

    def _due(self, phase: str) -> bool:
        if self._probed is None or not self._computes_in_float16():
            return False
        step, last, settings = self.run.step, self._probed.get(phase), self.run.settings
        every = settings.overflow_probe_steps
        last_chance = phase == "loss" and self.run.skipped_in_a_row == settings.max_consecutive_skips - 1
        due = last is None or (every is not None and step - last >= every) or (last_chance and step > last)
        if due:
            self._probed[phase] = step
        return due

    def _judge(self, report: OverflowReport, rerun: Rerun | None, together: bool = True) -> None:
        """Raises or warns on all ranks if a report of any rank has an overflow or values near the limit.

        Args:
            report: The report of this rank.
            rerun: Runs the same forward pass again.
            together: Whether all ranks call this method.

        Raises:
            PrecisionError: If the result is not finite because a module overflowed.
        """
        self.report = report
        logger.info("%s", report)
        problem, warning = None, None
        patterns = list(self.run.settings.fp32_modules or ())
        if report.first is not None and not report.result_finite:
            problem = explain(report, self.run.model, patterns, rerun if self.run.sharded is None else None)
        elif report.first is not None or report.near:
            warning = warn_near_overflow(report, self.run.model, patterns)
        found = _of_all((problem, warning), together)
        problem = next((theirs for theirs, _ in found if theirs is not None), None)
        warning = next((theirs for _, theirs in found if theirs is not None), None)
        if problem is not None:
            raise PrecisionError([problem])
        if warning is not None:
            self.run.warn_once(warning, key=warning.what)


def _of_all(value: Any, together: bool) -> list[Any]:
    """Returns the values of all ranks, or of this one if the others do not call this function."""
    found: list[Any] = gather_object([value]) if together else [value]
    return found

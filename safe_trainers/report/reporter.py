"""Creates the precision report of a trainer: planned at construction, confirmed after the first optimizer step."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.dtypes import from_torch
from ..core.errors import Problem
from ..core.feature import Feature, Run
from ..core.files import replace_file
from ..model.inventory import Group, first_products, optimizer_states
from ..policy.settings import FILE, FULL, LOG, OFF
from .document import Report
from .render import console, show, show_summary, to_json, to_markdown
from .run_report import FILE as REPORT_FILE
from .run_report import Seen, confirm, contradictions, count, gradient_dtypes, make_report, plan, summarize
from .trackers import log_to_trackers


logger = logging.getLogger(__name__)


_BEGIN, _END = "<!-- precision report -->", "<!-- end of the precision report -->"


class Reporter(Feature):
    """Creates the precision report and prints or writes it once.

    Attributes:
        confirmed: The confirmed report; `None` before the first optimizer step that is not skipped.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.confirmed: Report | None = None
        self._planned: tuple[Group, ...] | None = None
        self._gradients: dict[int, str] | None = None
        self._products: Seen | None = None
        self._shown = False

    @property
    def report(self) -> Report:
        """The precision report: planned before the first optimizer step, confirmed after it."""
        return self.confirmed or make_report(self.run, self._planned or plan(self.run))

    @property
    def _unconfirmed(self) -> bool:
        """Whether there is a plan that no step has confirmed yet."""
        return self._planned is not None and self.confirmed is None

    def ready(self) -> None:
        """Plans the report, to compare it with the state after the first step."""
        mode = self.run.settings.precision_report
        if mode == OFF:
            return
        self._planned = plan(self.run)
        if mode == FILE:
            self._write(self.report)

    def on_train_begin(self) -> None:
        """Makes the next loss record compute dtypes again, if the report is not confirmed.

        Without a report of this run, that of an earlier run in the same folder is removed.
        """
        if self.run.settings.precision_report == OFF and self.run.trainer.is_world_process_zero():
            self._change(lambda path: path.unlink(missing_ok=True))
        self._products = None
        self._rest_if_confirmed()

    def on_train_end(self) -> None:
        """Shows the plan if no step was taken."""
        if self._unconfirmed:
            self._show(self.report)

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Computes the loss, and records the compute dtypes of layers during the first loss of a run."""
        if not self._unconfirmed or self._products is not None:
            return call()
        with self._record_products():
            return call()

    @contextlib.contextmanager
    def _record_products(self) -> Iterator[None]:
        """Records the output dtype of the first matrix product of each part, which is its compute dtype."""
        seen: dict[tuple[str, str], set[str]] = {}
        handles = []
        args = self.run.args
        # torch.compile would compile hooks into the model, and `nn.DataParallel` would run them in threads.
        hooks = not (getattr(args, "torch_compile", False) or args.n_gpu > 1)
        for layer, weight, part in first_products(self.run.model) if hooks else ():
            key = part, from_torch(weight.dtype)

            def note(
                module: nn.Module, inputs: Any, output: Any, key: tuple[str, str] = key
            ) -> None:  # a default value, because the loop rebinds `key`
                if isinstance(output, torch.Tensor):
                    seen.setdefault(key, set()).add(from_torch(output.dtype))

            handles.append(layer.register_forward_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._products = {key: frozenset(dtypes) for key, dtypes in seen.items()}

    def before_step(self) -> None:
        """Records the dtypes of the gradients of the first step."""
        if self._unconfirmed:
            self._gradients = gradient_dtypes(self.run.model)

    def after_step(self, skipped: bool) -> None:
        """Confirms the report after the first step that is not skipped."""
        if skipped or not self._unconfirmed or self._planned is None:
            return
        counted = count(self.run, self._gradients, optimizer_states(self.run.trainer.optimizer))
        groups = confirm(counted, self._products or {})
        self._gradients, self.confirmed = None, make_report(self.run, groups, self._planned)
        self._show(self.confirmed)
        for problem in contradictions(self._planned, groups):
            self.run.warn_once(problem, key=problem.what)
        self._rest_if_confirmed()

    def _rest_if_confirmed(self) -> None:
        if not self._unconfirmed:
            self.rest("around_loss", "before_step", "after_step")

    def _show(self, report: Report) -> None:
        """Prints or writes the report once, on the main process."""
        if self._shown or not self.run.trainer.is_world_process_zero():
            return
        self._shown = True
        mode, width = self.run.settings.precision_report, 80
        self._write(report)
        file = Path(self.run.args.output_dir, REPORT_FILE)
        if report is self.confirmed:  # trackers have ended when a report without a step is shown
            log_to_trackers(report, file, self.run.trainer)
        if self.run.args.log_level in ("error", "critical"):
            return
        if mode == LOG:
            show_summary(
                summarize(report), console(stderr=True, width=width), f"{file}; precision_report=full prints it"
            )
        elif mode == FULL:
            show(report, console(stderr=True, width=width))

    def _write(self, report: Report) -> None:
        if not self.run.trainer.is_world_process_zero():
            return

        def write(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(to_json(report).encode()))

        self._change(write)

    def _change(self, change: Callable[[Path], None]) -> None:
        """Changes the file of the report; a failure does not end the run."""
        try:
            change(Path(self.run.args.output_dir, REPORT_FILE))
        except OSError as error:
            logger.warning("the precision report cannot be written: %s", error)

    def on_finding(self, problem: Problem) -> None:
        """Adds a finding to the report, and writes it again."""
        if self.confirmed is not None:
            self.confirmed = replace(self.confirmed, verdicts=(*self.confirmed.verdicts, replace(problem, why="")))
        if self.run.settings.precision_report != OFF:
            self._write(self.report)

    def on_model_card(self, path: Path) -> None:
        """Adds the precision report to TRL's model card, as a section."""
        if self.run.settings.precision_report == OFF or not self.run.trainer.is_world_process_zero():
            return
        try:
            self._add_to_card(path)
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("the precision report cannot be added to the model card: %s", error)

    def _add_to_card(self, path: Path) -> None:
        if path.is_symlink() or not path.is_file():
            logger.warning("the precision report cannot be added to the model card: %s is not a regular file", path)
            return
        text = path.read_text(encoding="utf-8")
        before, found, rest = text.partition(_BEGIN)
        rest = rest.partition(_END)[2] if found else ""
        section = f"{_BEGIN}\n\n{to_markdown(self.report)}\n{_END}"
        card = f"{before.rstrip()}\n\n{section}\n{rest.lstrip()}"
        replace_file(path, lambda file: file.write(card.encode()))

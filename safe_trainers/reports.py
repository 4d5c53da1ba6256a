"""The precision report as a safe trainer makes it: planned when it was built, confirmed after its first step."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from .dtypes import from_torch
from .errors import PrecisionWarning, Problem, nearest, refuse
from .file_checks import replace_file
from .inventory import Group, first_products, optimizer_states
from .overflow import OverflowProbe
from .precision_report import FILE, POLICY, Seen, confirm, contradictions, count, gradient_dtypes, make_report, plan
from .render import console, show, to_json, to_markdown
from .report import Report


logger = logging.getLogger(__name__)

LOG, FILE_ONLY, NOT = "log", "file", "off"
MODES = (LOG, FILE_ONLY, NOT)
"""What `precision_report` may be."""

CARD = "README.md"
_BEGIN, _END = "<!-- precision report -->", "<!-- end of the precision report -->"


class PrecisionReports(OverflowProbe):
    """Above TRL: makes the precision report and shows it once; a base of `PrecisionMixin`.

    Overrides `train`, `compute_loss`, whose first call it watches, and `create_model_card`.
    """

    # What the trainers bring, for the type checker.
    optimizer: Any
    is_world_process_zero: Callable[[], bool]

    _report_planned: tuple[Group, ...] | None = None
    _report_confirmed: Report | None = None  # the confirmed one
    _report_gradients: dict[int, str] | None = None
    _report_products: Seen | None = None
    _report_shown = False

    @property
    def precision_report(self) -> Report:
        """What the run holds and computes in: confirmed after its first optimizer step, planned before it."""
        return self._report_confirmed or make_report(self, self._report_planned or plan(self))

    @property
    def _mode(self) -> str:
        return str(getattr(self.args, "precision_report", LOG))

    def _plan_report(self) -> None:
        """The end of construction: counts what is there, to compare it with what is there after a step."""
        if self._mode == NOT:
            return
        self._report_planned = plan(self)
        if self._mode == FILE_ONLY:
            self._write_report(self.precision_report)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `ExactCheckpoints.train`.

        Args:
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            What upstream's `train` returns.
        """
        waiting = self._report_planned is not None and self._report_confirmed is None
        if waiting and not any(isinstance(callback, _FirstStep) for callback in self.callback_handler.callbacks):
            self.add_callback(_FirstStep(self))
        self._report_products = None
        result = super().train(*args, **kwargs)
        if waiting and self._report_confirmed is None:  # no step was taken
            self._tell(self.precision_report)
        return result

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss; for the first time in a run, with an eye on what layers compute in."""
        if self._report_planned is None or self._report_confirmed is not None or self._report_products is not None:
            return super().compute_loss(*args, **kwargs)
        with self._watched_products():
            return super().compute_loss(*args, **kwargs)

    @contextlib.contextmanager
    def _watched_products(self) -> Iterator[None]:
        """Notes the dtype of what the first matrix product of each part gives: it shows what it computes in."""
        seen: dict[tuple[str, str], set[str]] = {}
        handles = []
        # Hooks would be compiled into the model, or run in the threads of `nn.DataParallel`.
        hooks = not (getattr(self.args, "torch_compile", False) or self.args.n_gpu > 1)
        for layer, weight, part in first_products(self.model) if hooks else ():
            key = part, from_torch(weight.dtype)

            def note(
                module: nn.Module, inputs: Any, output: Any, key: tuple[str, str] = key
            ) -> None:  # bound now, not when it is called
                if isinstance(output, torch.Tensor):
                    seen.setdefault(key, set()).add(from_torch(output.dtype))

            handles.append(layer.register_forward_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._report_products = {key: frozenset(dtypes) for key, dtypes in seen.items()}

    def _before_first_step(self) -> None:
        if self._report_confirmed is None:
            self._report_gradients = gradient_dtypes(self.model)

    def _after_first_step(self) -> None:
        """The optimizer has stepped, or skipped; then the next step is waited for."""
        if self._report_confirmed is not None or self._report_planned is None or self._steps.in_a_row:
            return
        counted = count(self, self._report_gradients, optimizer_states(self.optimizer))
        groups = confirm(counted, self._report_products or {})
        self._report_gradients, self._report_confirmed = None, make_report(self, groups, self._report_planned)
        self._tell(self._report_confirmed)
        if self.is_world_process_zero():
            for problem in contradictions(self._report_planned, groups):
                warnings.warn(str(problem), PrecisionWarning, stacklevel=2)

    def _tell(self, report: Report) -> None:
        """Shows or writes the report, on the main process, once."""
        if self._report_shown or not self.is_world_process_zero():
            return
        self._report_shown = True
        if self._mode == FILE_ONLY:
            self._write_report(report)
        elif self.args.log_level not in ("error", "critical"):
            tables = tuple(table for table in report.tables if table.title != POLICY)  # the reasons are with the rest
            show(replace(report, tables=tables), console(stderr=True))

    def _write_report(self, report: Report) -> None:
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir, FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(to_json(report).encode()))
        except OSError as error:
            logger.warning("the precision report cannot be written: %s", error)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes TRL's model card, and the precision report as a section of it.

        Args:
            *args: Passed on.
            **kwargs: Passed on.
        """
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        if self._mode == NOT or not self.is_world_process_zero():
            return
        try:
            self._add_to_card(Path(self.args.output_dir, CARD))
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("the precision report is not in the model card: %s", error)

    def _add_to_card(self, path: Path) -> None:
        if path.is_symlink() or not path.is_file():
            logger.warning("the precision report is not in the model card: %s is no file of its own", path)
            return
        text = path.read_text(encoding="utf-8")
        before, found, rest = text.partition(_BEGIN)
        rest = rest.partition(_END)[2] if found else ""
        section = f"{_BEGIN}\n\n{to_markdown(self.precision_report)}\n{_END}"
        whole = f"{before.rstrip()}\n\n{section}\n{rest.lstrip()}"
        replace_file(path, lambda file: file.write(whole.encode()))


class _FirstStep(TrainerCallback):
    """Tells a trainer that its optimizer is about to step, and that it has, until the report is confirmed."""

    def __init__(self, trainer: PrecisionReports) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._before_first_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._after_first_step()


def problems(args: Any) -> Iterator[Problem]:
    """What the report cannot be asked to be.

    Args:
        args: A config, Safe or plain.

    Yields:
        The refusal of an unknown `precision_report`.
    """
    value = getattr(args, "precision_report", LOG)
    if value not in MODES:
        yield refuse(
            "unknown-choice",
            f"precision_report={value!r}",
            value=value,
            accepted=", ".join(map(repr, MODES)),
            field="precision_report",
            suggestion=nearest(str(value), MODES) or LOG,
        )

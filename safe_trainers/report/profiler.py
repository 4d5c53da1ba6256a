"""Shows how the time of a run divides into rollout, scoring, loss, backward pass and the other phases of a step."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from ..core.feature import Feature, Run
from ..core.files import replace_file
from ..core.phase_clock import PhaseClock
from .document import Report, Table
from .render import console, show, to_json


logger = logging.getLogger(__name__)

FILE = "profile.json"
"""The file in `output_dir` with the times of a profiled run."""
PHASES = "phases"
"""Title of the table."""
COLUMNS = ("phase", "seconds", "seconds per step", "share")
"""Columns of the table of phases."""


class Profiler(Feature):
    """Measures the phases of a run with `profile=True`, logs them, and prints them at its end.

    Attributes:
        seconds: The seconds of each phase since training began; empty if the run is not profiled.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = 0
        self._logged: tuple[int, dict[str, float]] = (0, {})
        if run.settings.profile:
            run.clock = PhaseClock(torch.accelerator.synchronize) if torch.accelerator.is_available() else PhaseClock()

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase since training began; empty if the run is not profiled."""
        clock = self.run.clock
        return {} if clock is None else clock.snapshot()

    @property
    def report(self) -> Report:
        """The seconds of each phase, per optimizer step and as a share of the run."""
        seconds, steps = self.seconds, max(self._steps, 1)
        whole = sum(seconds.values()) or 1.0
        rows = tuple((name, spent, spent / steps, f"{spent / whole:.1%}") for name, spent in seconds.items() if spent)
        facts = {"seconds": whole, "optimizer steps": self._steps}
        return Report("profile", type(self.run.trainer).__name__, facts, (Table(PHASES, COLUMNS, rows),))

    def on_train_begin(self) -> None:
        """Forgets the steps of an earlier call of `train`."""
        self._steps, self._logged = 0, (0, {})

    def after_step(self, skipped: bool) -> None:
        """Counts the optimizer steps of this process."""
        self._steps += 1

    def on_log(self, logs: Mapping[str, float], mode: str) -> Mapping[str, float]:
        """Returns the seconds of each phase per optimizer step since the last log."""
        (before, seconds), clock = self._logged, self.run.clock
        if clock is None or not clock.running or self._steps == before:
            return {}
        self._logged = self._steps, clock.snapshot()
        spent = {name: now - seconds.get(name, 0.0) for name, now in self._logged[1].items()}
        return {f"profile/{name}": value / (self._steps - before) for name, value in spent.items() if value}

    def on_train_end(self) -> None:
        """Stops the clock, writes the times into `output_dir`, and prints them."""
        clock, args = self.run.clock, self.run.args
        if clock is None:
            return
        clock.stop()
        if not self.run.trainer.is_world_process_zero():
            return
        report, path = self.report, Path(args.output_dir, FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(to_json(report).encode()))
        except OSError as error:
            logger.warning("the profile cannot be written: %s", error)
        if args.log_level not in ("error", "critical"):
            show(report, console(stderr=True, width=80))

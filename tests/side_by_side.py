"""Runs one script three times: with TRL's classes, with the trainers swapped, and with trainers and configs swapped.

A script is a function of a `Library`, which has the names that a user imports, and of a folder for its outputs.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cells
import numpy as np
import torch
import trl
from transformers import Trainer

import safe_trainers
from safe_trainers import PrecisionWarning
from safe_trainers.core.tasks import TASKS


TIMES = ("runtime", "per_second", "_time")
"""Parts of the names of metrics that differ between two runs of one script."""

Script = Callable[..., Any]


class Library:
    """The trainers and configs that a script imports: those of TRL, or the safe ones under the names of TRL's.

    Args:
        trainers: Where `GRPOTrainer` and the others come from, `trl` or `safe_trainers`.
        configs: Where `GRPOConfig` and the others come from.
    """

    def __init__(self, trainers: Any, configs: Any) -> None:
        for name in cells.STABLE:
            task = TASKS[name]
            for kind, module in (("Trainer", trainers), ("Config", configs)):
                prefix = "" if module is trl else "Safe"
                setattr(self, f"{task.algorithm}{kind}", getattr(module, f"{prefix}{task.algorithm}{kind}"))

    def __getattr__(self, name: str) -> Any:
        """What is not swapped: `TrlParser`, callbacks, experimental modules."""
        return getattr(trl, name)


LIBRARIES = {
    "stock": lambda: Library(trl, trl),
    "trainer swapped": lambda: Library(safe_trainers, trl),
    "trainer and config swapped": lambda: Library(safe_trainers, safe_trainers),
}


@dataclass
class Outcome:
    """The result of a script.

    Attributes:
        error: The exception that ended it.
        log: The log history of the trainer, without times.
        weights: A hash of all weights.
        facts: What the script returned beside the trainer.
        alarms: Warnings of this package.
    """

    error: BaseException | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    weights: str | None = None
    facts: Any = None
    alarms: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.log if "loss" in row]


def run(script: Script, library: Library, folder: Path) -> Outcome:
    """Runs a script in a folder of its own; whatever it raises is its outcome."""
    folder.mkdir()
    cells.reset_autocast()
    torch.manual_seed(0)
    np.random.seed(0)
    outcome = Outcome()
    with contextlib.chdir(folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = script(library, folder)
        except Exception as error:  # the comparison is about it
            outcome.error = error
            result = None
        finally:
            cells.reset_autocast()
    outcome.alarms = [str(one.message) for one in caught if issubclass(one.category, PrecisionWarning)]
    trainer, outcome.facts = result if isinstance(result, tuple) else (result, None)
    if trainer is not None:
        if not isinstance(trainer, Trainer):
            raise TypeError("a script returns a trainer, or a trainer and its facts")
        outcome.log = [timeless(row) for row in trainer.state.log_history]
        outcome.weights = cells.fingerprint(trainer.model)
    return outcome


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the log without times; NaN becomes a string, which is equal to itself."""
    kept = {name: value for name, value in row.items() if not any(part in name for part in TIMES)}
    return {name: "nan" if isinstance(value, float) and math.isnan(value) else value for name, value in kept.items()}


def differences(stock: Outcome, safe: Outcome) -> dict[str, str]:
    """Names what differs in a safe run, a metric, the weights or the facts of the script, with its first values."""
    found: dict[str, str] = {}
    if stock.losses != safe.losses:
        found["losses"] = f"{stock.losses} and {safe.losses}"
    if len(stock.log) != len(safe.log):
        found["rows"] = f"{len(stock.log)} and {len(safe.log)}"
    for number, (one, other) in enumerate(zip(stock.log, safe.log, strict=False)):
        for name, value in one.items():
            if other.get(name) != value:
                found.setdefault(name, f"row {number}: {value} and {other.get(name)}")
    if stock.weights != safe.weights:
        found["weights"] = f"{stock.weights} and {safe.weights}"
    if stock.facts != safe.facts:
        found["facts"] = f"{stock.facts} and {safe.facts}"
    return found

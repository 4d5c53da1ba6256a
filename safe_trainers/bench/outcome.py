"""Results of checks, and the exit status that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


Status: TypeAlias = Literal["passed", "refused", "fault", "crashed", "not applicable", "could not run"]
"""The result of a check or of one of its runs.

- `"passed"`: measured, and within the limits of the rules.
- `"refused"`: the constructor failed with a message for the user.
- `"fault"`: trained, and a rule is broken.
- `"crashed"`: failed after construction, or without a message for the user, where the float32 control trains.
- `"not applicable"`: the trainer or its task has nothing to measure.
- `"could not run"`: the float32 control fails, or the time ended.
"""

WORST: Sequence[Status] = ("fault", "crashed", "could not run", "passed", "refused", "not applicable")
"""The statuses of runs, the one that decides the status of the check first."""
WRONG: Sequence[Status] = ("fault", "crashed", "could not run")


@dataclass(frozen=True)
class Row:
    """The result of one run of a check.

    Attributes:
        run: What was run, such as `"text, LoRA, fp32 weights, bf16"`.
        status: The result.
        detail: What was measured, or the error.
        rule: The id of the broken rule.
    """

    run: str
    status: Status
    detail: str = ""
    rule: str = ""

    def to_dict(self) -> dict[str, str]:
        """The run, its status, and the other attributes that are not empty."""
        return {name: value for name, value in vars(self).items() if value or name in ("run", "status")}


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        check: The name of the check.
        rows: Its runs.
        seconds: The duration.
        stand_in: Whether some of the runs use a stand-in for CUDA's fp16 on this machine.
    """

    check: str
    rows: tuple[Row, ...]
    seconds: float = 0.0
    stand_in: bool = False

    @property
    def status(self) -> Status:
        """The worst status of the runs."""
        found = {row.status for row in self.rows}
        return next((status for status in WORST if status in found), "not applicable")

    @property
    def counts(self) -> Mapping[Status, int]:
        """The number of runs by status, the worst first."""
        every = [row.status for row in self.rows]
        return {status: every.count(status) for status in WORST if status in every}

    @property
    def ran(self) -> int:
        """The number of runs that apply to the trainer."""
        return sum(row.status != "not applicable" for row in self.rows)

    @property
    def wrong(self) -> int:
        """The number of runs that found a fault or could not run."""
        return sum(row.status in WRONG for row in self.rows)

    @property
    def detail(self) -> str:
        """The detail of the first run that has the status of the check."""
        row = next((row for row in self.rows if row.status == self.status), None)
        if row is None:
            return ""
        return f"{row.run}: {row.detail}" if row.run and row.detail else row.detail or row.run

    def to_dict(self) -> dict[str, Any]:
        """The result as values for JSON."""
        return {
            "check": self.check,
            "status": self.status,
            "detail": self.detail,
            "stand_in": self.stand_in,
            "seconds": round(self.seconds, 1),
            "rows": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True)
class Bench:
    """The results of all checks of one trainer.

    Attributes:
        trainer: The class, as `MODULE:CLASS`.
        task: The task whose data and models were used.
        args: Further arguments of the config.
        results: The results, in the order of the checks.
        versions: The versions of the packages.
    """

    trainer: str
    task: str
    args: Mapping[str, Any]
    results: tuple[Result, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        """0 if every check passed, was refused or is not applicable, 1 if one found a fault or could not run."""
        return int(any(result.status in WRONG for result in self.results))

    def __getitem__(self, check: str) -> Result:
        """Returns the result of a check.

        Args:
            check: Its name.
        """
        return next(result for result in self.results if result.check == check)

    def to_dict(self) -> dict[str, Any]:
        """The results as values for JSON."""
        return {
            "trainer": self.trainer,
            "task": self.task,
            "args": dict(self.args),
            "exit_status": self.exit_status,
            "seconds": round(sum(result.seconds for result in self.results), 1),
            "versions": dict(self.versions),
            "checks": [result.to_dict() for result in self.results],
        }

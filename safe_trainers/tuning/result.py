"""The result of a search: the lines to write, what they promise, and what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import yaml_value
from ..report.document import Report, Table
from .figures import Figures
from .gradients import Gradients


@dataclass(frozen=True)
class Candidate:
    """A measured set of modules in float32.

    Attributes:
        precision: `"bf16"`, `"fp16"` or `"fp32"`.
        fp32_modules: The patterns that select the set.
        nbytes: Its bytes beyond those of half precision.
        figures: What was measured.
        chosen_by: `"search"`, or the rule that names the set, such as `"head only"`.
    """

    precision: str
    fp32_modules: tuple[str, ...]
    nbytes: int
    figures: Figures
    chosen_by: str = "search"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        own = {"precision": self.precision, "fp32_modules": list(self.fp32_modules), "bytes": self.nbytes}
        return own | {"chosen_by": self.chosen_by} | self.figures.to_dict()


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`.

    Attributes:
        target: What was tuned.
        prompts: The prompts that were used, in words.
        goal: The goal in words.
        reached: Whether the goal is met on held-out prompts.
        complete: Whether the search ended before its time limit.
        best: The chosen set, with the figures of the search.
        promise: The figures of the chosen set on held-out prompts, with tokens that it sampled itself.
        before: The chosen set's precision, or the recipe's, without modules in float32, on the same prompts.
        front: The sets of all precisions to which no other is better in bytes and mismatch.
        rules: The sets of fixed rules.
        finalists: The sets of the chosen precision that were measured again on a larger sample, from which the best
            one was chosen.
        points: Precision, bytes and mean mismatch of every measured set.
        contributions: For each group of the chosen precision its bytes, and the mean mismatch with only this group in
            half precision and with only this group in float32.
        gradients: The check of the gradients, for float16.
        settings: The lines to write, by key.
        notes: What was left out, and why.
        seconds: Wall time.
        measurements: Number of measurements.
    """

    target: str
    prompts: str
    goal: str
    reached: bool
    complete: bool
    best: Candidate
    promise: Figures
    before: Candidate
    front: tuple[Candidate, ...]
    rules: tuple[Candidate, ...]
    finalists: tuple[Candidate, ...] = ()
    points: tuple[tuple[str, int, float], ...] = ()
    contributions: tuple[Mapping[str, Any], ...] = ()
    gradients: Gradients | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    measurements: int = 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines to write into a recipe."""
        return tuple(f"{key}: {yaml_value(value)}" for key, value in self.settings.items())

    @property
    def verdict(self) -> str:
        """A sentence on whether the goal is met."""
        promised = f"a mean mismatch of {self.promise.mean:.3g} nats on held-out prompts"
        if self.reached:
            return f"{self.goal}: reached, {promised}"
        why = "" if self.complete else ", because the time limit ended the search"
        return f"{self.goal}: not reached{why}; the best that was found gives {promised}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "target": self.target,
            "prompts": self.prompts,
            "goal": self.goal,
            "reached": self.reached,
            "complete": self.complete,
            "settings": dict(self.settings),
            "best": self.best.to_dict(),
            "promise": self.promise.to_dict(),
            "before": self.before.to_dict(),
            "front": [candidate.to_dict() for candidate in self.front],
            "rules": [candidate.to_dict() for candidate in self.rules],
            "finalists": [candidate.to_dict() for candidate in self.finalists],
            "measured_sets": [dict(zip(("precision", "bytes", "mean"), point, strict=True)) for point in self.points],
            "contributions": [dict(row) for row in self.contributions],
            "gradients": None if self.gradients is None else self.gradients.to_dict(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
            "measured": self.measurements,
        }

    def report(self) -> Report:
        """Returns the result as a report, for printing."""
        facts: dict[str, Any] = {"prompts": self.prompts, "goal": self.goal}
        facts["promise"] = (
            f"mean {self.promise.mean:.3g} +- {2 * self.promise.error:.1g} nats, 99th percentile "
            f"{self.promise.p99:.2g}, effective sample size {self.promise.ess:.4f}, {self.promise.out_of_band:.2%} of "
            f"tokens off by more than 1 %, over {self.promise.tokens:,} held-out tokens"
        )
        if self.gradients is not None:
            facts["gradients"] = str(self.gradients)
        facts["effort"] = f"{self.measurements} measurements in {self.seconds:.0f} s" + (
            "" if self.complete else "; the time limit ended the search"
        )
        rows = tuple(_row(candidate) for candidate in (*self.front, *self.rules))
        head = ("precision", "fp32_modules", "more bytes", "time", "mean mismatch", "chosen by")
        tables = [Table("Bytes, time and mismatch", head, rows)]
        if self.finalists:
            ordered = sorted(self.finalists, key=lambda candidate: candidate.figures.mean)
            tables.append(
                Table(
                    f"Finalists, measured again on {self.finalists[0].figures.tokens:,} tokens",
                    ("fp32_modules", "more bytes", "mean mismatch", "+-", "chosen by"),
                    tuple(_final(candidate) for candidate in ordered),
                )
            )
        if self.contributions:
            tables.append(
                Table(
                    "Contribution of each group",
                    ("group", "more bytes", "mismatch of this group alone", "mismatch with it in float32"),
                    tuple(tuple(_text(value) for value in row.values()) for row in self.contributions),
                )
            )
        return Report("Precision search", self.target, facts, tuple(tables), ())


def _row(candidate: Candidate) -> tuple[str, ...]:
    names = ", ".join(candidate.fp32_modules) or "none"
    mean = f"{candidate.figures.mean:.2e}" if candidate.figures.finite else "not finite"
    time = f"{candidate.figures.seconds:.2f} s"
    return candidate.precision, names, f"{candidate.nbytes:,}", time, mean, candidate.chosen_by


def _final(candidate: Candidate) -> tuple[str, ...]:
    names, figures = ", ".join(candidate.fp32_modules) or "none", candidate.figures
    shown = (f"{figures.mean:.2e}", f"{2 * figures.error:.0e}") if figures.finite else ("not finite", "")
    return names, f"{candidate.nbytes:,}", *shown, candidate.chosen_by


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def lines_of(precision: str, patterns: Sequence[str], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the settings of a run.

    Args:
        precision: `"bf16"`, `"fp16"` or `"fp32"`.
        patterns: The patterns of the modules in float32.
        more: Further settings.
    """
    modules = {"fp32_modules": list(patterns)} if patterns else {}
    return {"precision": precision, **modules, **(more or {})}

"""What a trainer class guarantees, and which of its hooks have fired in a run."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


COVERED, NOT_APPLICABLE, UNCOVERED = "covered", "not applicable", "not covered"


HOOKS = {
    "adapters": "the moment after TRL creates its adapters, before it moves the model or makes an optimizer",
    "inputs": "every batch with images or audio that is prepared for a model: training, rollout, scoring, tool images",
    "rollout": "each turn of generation",
    "buffer": "the scored rollout batch, before TRL buffers and slices it",
}
"""The hooks of a trainer, and when each fires."""


@dataclass(frozen=True)
class Coverage:
    """One guarantee of a trainer class.

    Attributes:
        area: What the guarantee is about.
        state: `"covered"`, `"not applicable"` or `"not covered"`.
        detail: The mechanism, or the reason why the area is not covered.
        hook: The hook that must fire; `None` if the guarantee needs none.
    """

    area: str
    state: str
    detail: str
    hook: str | None = None


@dataclass
class SafetyContract:
    """The guarantees of a trainer class, and how often their hooks have fired in this run.

    Attributes:
        trainer: Name of the class.
        coverage: The guarantees.
        fired: How often each hook has fired, by hook.
        due: How often something else has shown that a hook was due, by hook: the model got images, or
            a rollout was scored.
    """

    trainer: str
    coverage: tuple[Coverage, ...]
    fired: Counter[str] = field(default_factory=Counter)
    due: Counter[str] = field(default_factory=Counter)

    def __getitem__(self, area: str) -> Coverage:
        return next(coverage for coverage in self.coverage if coverage.area == area)

    def missing(self) -> list[Coverage]:
        """Returns the covered guarantees whose hook has not fired yet."""
        return [c for c in self.coverage if c.state == COVERED and c.hook and not self.fired[c.hook]]

    def broken(self) -> list[Coverage]:
        """Returns the covered guarantees whose hook was due and has not fired."""
        return [coverage for coverage in self.missing() if self.due[str(coverage.hook)]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the contract as plain values for JSON."""
        return {
            "trainer": self.trainer,
            "coverage": [vars(coverage) for coverage in self.coverage],
            "fired": {hook: self.fired[hook] for hook in HOOKS},
        }

    def __str__(self) -> str:
        width = max(len(coverage.area) for coverage in self.coverage)
        lines = [f"{c.area:<{width}}  {c.state}: {c.detail}{self._count(c)}" for c in self.coverage]
        return "\n".join([f"safety contract of {self.trainer}", *lines])

    def _count(self, coverage: Coverage) -> str:
        return f" (fired {self.fired[coverage.hook]} times)" if coverage.hook and coverage.state == COVERED else ""

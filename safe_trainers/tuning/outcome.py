"""The search in one precision with what was chosen in it, and the attempts to promise a set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .figures import Figures
from .gradients import Gradients
from .promise import Promise
from .result import Candidate
from .search import Modules, Search


@dataclass
class Outcome:
    """The search in one precision."""

    precision: str
    search: Search
    patterns: dict[Modules, tuple[str, ...]] = field(default_factory=dict)
    rules: dict[Modules, str] = field(default_factory=dict)
    sizes: dict[Modules, int] = field(default_factory=dict)
    offset: int = 0  # bytes beyond half precision of a run without a module in float32
    gradients: Gradients | None = None
    selected: dict[Modules, Figures] = field(default_factory=dict)  # the finalists, on the sample of the selection
    chosen: Modules | None = None  # a set that was chosen for its gradients or for rare large differences

    @property
    def best(self) -> Modules | None:
        """The set that was chosen last; without one that of the selection, or else of the search."""
        return self.search.best(self.selected or None) if self.chosen is None else self.chosen

    def figures(self, names: Modules) -> Figures:
        """The figures by which a set is judged."""
        return self.selected.get(names) or self.search.found[names]

    def candidate(self, names: Modules, figures: Figures | None = None) -> Candidate:
        """A set with its figures, by default those of the search."""
        nbytes = self.offset + self.sizes[names]
        chosen_by = self.rules.get(names, "search") if names else "no module"
        return Candidate(self.precision, self.patterns[names], nbytes, figures or self.search.found[names], chosen_by)


@dataclass
class Attempt:
    """A set with its promise."""

    outcome: Outcome
    names: Modules
    best: Candidate
    gradients: Gradients | None
    promise: Promise
    figures: Figures  # those of the promise


def front_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates to which no other is better in bytes and mismatch."""

    def better(one: Candidate, other: Candidate) -> bool:
        a, b = (one.nbytes, one.figures.mean), (other.nbytes, other.figures.mean)
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    return [c for c in candidates if c.figures.finite and not any(better(other, c) for other in candidates)]


def contributions_of(search: Search) -> Iterator[Mapping[str, Any]]:
    """The contribution of each group, for the result."""

    def mean(figures: Figures | None) -> float | None:
        return None if figures is None or not figures.finite else figures.mean

    for row in search.contributions:
        yield {"group": row.group.name, "bytes": row.group.nbytes} | {
            "alone": mean(row.alone), "in_float32": mean(row.removed)
        }  # fmt: skip

"""Searches the smallest set of modules in float32 that meets a goal, by measuring.

The contribution of each group is measured in two ways: with only this group in float32, and with only this group in
half precision. The second orders the groups, because half-precision modules behind a group hide its contribution. Sets
are then grown greedily, and each step is decided by measurements. What is left of a budget is filled with parts of
groups. At the end, modules that are not needed are removed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .figures import Figures
from .groups import Group


Modules = frozenset[str]
NOTHING: Modules = frozenset()

SHORTLIST = 3
"""Number of groups that are tried in a greedy step, by each order."""
PARTS = 16
"""Number of parts of groups that are tried when the rest of a budget is filled."""
STALLS = 2
"""Greedy steps without an improvement after which the path ends; two sources may have to be removed together."""
TOLERANCE = 1.02
"""Within a budget, a module is left out if the mismatch grows by no more than this factor."""
FLOOR = 1.5
"""The mismatch is not reduced further once it is within this factor of that with everything in float32."""


class OutOfTimeError(Exception):
    """The time limit of a search has passed."""


@dataclass(frozen=True)
class Goal:
    """What a set must hold.

    Attributes:
        max_mismatch: The largest mean of abs(D), in nats.
        min_ess: The smallest effective sample size, as a share.
        max_bytes: The most bytes beyond those of half precision.
        max_time: The longest time, as a factor of that without a module in float32.
    """

    max_mismatch: float | None = None
    min_ess: float | None = None
    max_bytes: int | None = None
    max_time: float | None = None

    @property
    def has_target(self) -> bool:
        """Whether the smallest set is searched, and not the smallest mismatch."""
        return self.max_mismatch is not None or self.min_ess is not None

    @property
    def has_budget(self) -> bool:
        """Whether bytes or time are limited."""
        return self.max_bytes is not None or self.max_time is not None

    def is_met(self, figures: Figures) -> bool:
        """Whether the mismatch is small enough; without a target it never is."""
        small = self.max_mismatch is None or figures.mean <= self.max_mismatch
        return figures.finite and self.has_target and small and (self.min_ess is None or figures.ess >= self.min_ess)

    def fits(self, nbytes: int, seconds: float, plain_seconds: float) -> bool:
        """Whether a set is within the budget.

        Args:
            nbytes: Its bytes.
            seconds: Its time.
            plain_seconds: The time without a module in float32.
        """
        small = self.max_bytes is None or nbytes <= self.max_bytes
        return small and (self.max_time is None or seconds <= self.max_time * plain_seconds)

    def __str__(self) -> str:
        parts = [
            "" if self.max_mismatch is None else f"a mean mismatch of at most {self.max_mismatch:.3g} nats",
            "" if self.min_ess is None else f"an effective sample size of at least {self.min_ess:g}",
            "" if self.max_bytes is None else f"at most {self.max_bytes:,} more bytes",
            "" if self.max_time is None else f"at most {self.max_time:g} times the time",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Contribution:
    """What one group adds to the mismatch.

    Attributes:
        group: The group.
        alone: The figures with only this group in half precision; `None` if the time did not suffice.
        removed: The figures with only this group in float32; `None` if the time did not suffice.
    """

    group: Group
    alone: Figures | None = None
    removed: Figures | None = None


@dataclass
class Search:
    """The search in one precision.

    Attributes:
        groups: The groups of the model.
        rules: Sets that fixed rules would choose, such as the head; they are measured too.
        measure: Measures a set. May raise `OutOfTimeError`.
        size: Returns the bytes of a set.
        goal: The goal.
        divide: Returns the parts of a group.
        found: All measured sets.
        contributions: The contributions of the groups, as far as they were measured.
        complete: Whether the search ended before the time limit.
    """

    groups: Sequence[Group]
    rules: Sequence[Modules]
    measure: Callable[[Modules], Figures]
    size: Callable[[Modules], int]
    goal: Goal
    divide: Callable[[Group], Sequence[Group]] = lambda group: ()
    found: dict[Modules, Figures] = field(default_factory=dict)
    contributions: list[Contribution] = field(default_factory=list)
    complete: bool = False
    _added: list[Group] = field(default_factory=list)  # parts of groups that filled the budget

    @property
    def everything(self) -> Modules:
        """All modules that can be put into float32."""
        return outermost(NOTHING.union(*(group.modules for group in self.groups)))

    def run(self) -> None:
        """Searches until the goal is met with as few bytes as possible, nothing helps, or the time is over."""
        try:
            if self.goal.is_met(self._figures(NOTHING)):
                self.complete = True
                return
            whole = self._figures(self.everything)
            for rule in self.rules:
                self._figures(rule)
            self._measure_contributions()
            if whole.mean < self.found[NOTHING].mean / FLOOR or not whole.computes:
                self._by_contribution()
                self._greedy()
                if self._has_room():
                    self._swap()
                    self._fill(whole)
            self._prune()
            self.complete = True
        except OutOfTimeError:
            return

    def best(self, measured: Mapping[Modules, Figures] | None = None) -> Modules | None:
        """Returns the smallest set that meets the goal, or else the set with the smallest mismatch within the budget.

        Args:
            measured: The sets to choose from, with the figures to judge them by; by default those of the search.

        Returns:
            The set; `None` if no set is within the budget, or nothing was measured.
        """
        measured = self.found if measured is None else measured
        fitting = [names for names in measured if self._fits(names)]
        meeting = [names for names in fitting if self.goal.is_met(measured[names])]
        if meeting:
            return min(meeting, key=lambda names: (self.size(names), measured[names].mean))
        limit = min((measured[names].mean for names in fitting), default=0.0) * TOLERANCE
        least = [names for names in fitting if measured[names].mean <= limit]
        return min(least, key=self.size, default=None)

    def finalists(self, count: int) -> list[Modules]:
        """Returns the sets that may be the best one, since the measurements of the search are inexact.

        Args:
            count: Number of sets by each order.

        Returns:
            The best set first. With a target, the smallest sets that meet it, and the smallest that miss it by no more
            than two standard errors; without one, the sets with the smallest mismatch. The rules that qualify are
            always among them.
        """
        fitting = [names for names in self.found if self._fits(names) and self.found[names].finite]
        if self.goal.has_target:
            near = [n for n in fitting if self.goal.is_met(_less(self.found[n]))]
            near.sort(key=lambda names: (self.size(names), self.found[names].mean))
            met = [self.goal.is_met(self.found[names]) for names in near]
            orders = [[n for n, is_met in zip(near, met, strict=True) if is_met is wanted] for wanted in (True, False)]
        else:
            near = sorted(fitting, key=lambda names: (self.found[names].mean, self.size(names)))
            orders = [near]
        best = self.best()
        chosen = [] if best is None else [best]
        chosen += [names for order in orders for names in order[:count]]
        chosen += [rule for rule in map(outermost, self.rules) if rule in near]
        return list(dict.fromkeys(chosen))

    def front(self) -> list[Modules]:
        """Returns the sets to which no other set is better in bytes and mismatch, the smallest first."""
        ordered = sorted(self.found, key=lambda names: (self.size(names), self.found[names].mean))
        front: list[Modules] = []
        for names in ordered:
            if not front or self.found[names].mean < self.found[front[-1]].mean:
                front.append(names)
        return front

    # ---- Steps ----

    def _figures(self, names: Modules) -> Figures:
        names = outermost(names)
        if names not in self.found:
            self.found[names] = self.measure(names)
        return self.found[names]

    def _fits(self, names: Modules) -> bool:
        plain = self.found.get(NOTHING)
        figures = self.found.get(outermost(names))
        if plain is None or figures is None:
            return self.goal.max_bytes is None or self.size(names) <= self.goal.max_bytes
        return self.goal.fits(self.size(names), figures.seconds, plain.seconds)

    def _without(self, group: Group) -> Modules:
        others = (other.modules for other in self.groups if not other.modules <= group.modules)
        return outermost(NOTHING.union(*others) - group.modules)

    def _measure_contributions(self) -> None:
        self.contributions = [Contribution(group) for group in self.groups]
        for number, group in enumerate(self.groups):
            alone = self._figures(self._without(group))
            self.contributions[number] = Contribution(group, alone)
        for number, (group, contribution) in enumerate(zip(self.groups, self.contributions, strict=True)):
            self.contributions[number] = Contribution(group, contribution.alone, self._figures(group.modules))

    def _alone(self, group: Group) -> float:
        """The mean mismatch that a group alone causes, in nats; infinite if it overflows."""
        figures = self.found.get(self._without(group))
        if figures is None:
            return 0.0
        if not figures.computes:
            return max(self._gain_of(group), 0.0)
        return max(figures.mean - self.found[self.everything].mean, 0.0)

    def _by_contribution(self) -> None:
        """Measures sets of the groups with the largest contributions for their bytes, without measuring each step."""
        ordered = sorted(self.groups, key=lambda group: _ratio(self._alone(group) ** 2, group.nbytes), reverse=True)
        if not self.goal.has_target:  # fill the budget with what fits
            names = NOTHING
            for group in ordered:
                if self._fits(names | group.modules) and self._alone(group) > 0:
                    names |= group.modules
            self._figures(names)
            return
        low, high = 0, len(ordered)
        while low < high:  # the smallest number that meets the target
            middle = (low + high) // 2
            if self.goal.is_met(self._figures(NOTHING.union(*(group.modules for group in ordered[:middle])))):
                high = middle
            else:
                low = middle + 1

    def _greedy(self) -> None:
        """Adds one group at a time: of those on the shortlist, the one with the largest measured gain."""
        gains: dict[str, float] = {}
        current, stalls = NOTHING, 0
        whole = self.found[self.everything]
        floor = whole.mean * FLOOR if whole.finite else 0.0
        must = [group for group in self.groups if not math.isfinite(self._alone(group))]  # they overflow on their own
        current = current.union(*(group.modules for group in must))
        if not self._fits(current):
            return
        here = self._figures(current)
        while not self.goal.is_met(here) and here.mean > floor and stalls < STALLS:
            left = [g for g in self.groups if not within(g.modules, current) and self._fits(current | g.modules)]
            if not left:
                return
            tried = self._shortlist(left, gains)
            for group in tried:
                new = self._figures(current | group.modules)
                gains[group.name] = (
                    here.mean - new.mean if new.finite and here.finite else (math.inf if new.finite else 0)
                )
            best = max(tried, key=lambda g: _ratio(gains[g.name], self._growth(current, g)))
            stalls = 0 if gains[best.name] > 0 else stalls + 1
            current |= best.modules
            here = self._figures(current)

    def _shortlist(self, left: Sequence[Group], gains: dict[str, float]) -> list[Group]:
        orders: Iterable[Callable[[Group], float]] = (
            lambda g: _ratio(self._alone(g), g.nbytes),
            lambda g: _ratio(gains.get(g.name, self._gain_of(g)), g.nbytes),
            self._alone,
        )
        chosen = [group for order in orders for group in sorted(left, key=order, reverse=True)[:SHORTLIST]]
        return list(dict.fromkeys(chosen))

    def _gain_of(self, group: Group) -> float:
        figures = self.found.get(group.modules)
        gain = 0.0 if figures is None or not figures.computes else self.found[NOTHING].mean - figures.mean
        return 0.0 if math.isnan(gain) else gain

    def _growth(self, current: Modules, group: Group) -> int:
        return self.size(current | group.modules) - self.size(current)

    def _swap(self) -> None:
        """Tries to replace a member of the best set within the budget by another group."""
        best = self.best()
        if best is None:
            return
        inside = [group for group in self.groups if group.modules <= best]
        others = (group for group in self.groups if not within(group.modules, best))
        outside = sorted(others, key=self._alone, reverse=True)[:SHORTLIST]
        for member in inside:
            for other in outside:
                names = (best - member.modules) | other.modules
                if self._fits(names):
                    self._figures(names)

    def _fill(self, whole: Figures) -> None:
        """Fills the best set that leaves room in the budget with parts of the groups that contribute most."""
        fitting = [names for names in self.found if self._fits(names) and self.found[names].finite]
        fitting.sort(key=lambda names: self.found[names].mean)
        choices = ((names, self._parts_beside(names)) for names in fitting)
        current, tried = next((choice for choice in choices if choice[1]), (NOTHING, []))
        while tried and self.found[outermost(current)].mean > whole.mean * FLOOR:
            here, gains = self.found[outermost(current)], dict[Group, float]()
            for part in tried:
                gains[part] = here.mean - self._figures(current | part.modules).mean
            helpful = [part for part in tried if gains[part] > 0]
            if not helpful:
                return
            best = max(helpful, key=lambda part: _ratio(gains[part], part.nbytes))
            current |= best.modules
            self._added.append(best)
            helpful.sort(key=lambda part: gains[part], reverse=True)
            left = [part for part in helpful if not within(part.modules, current)]
            tried = [part for part in left if self._fits(current | part.modules)][:SHORTLIST]

    def _parts_beside(self, current: Modules) -> list[Group]:
        """Parts of the groups outside of a set that the budget leaves room for."""
        outside = [group for group in self.groups if not within(group.modules, current) and self._alone(group) > 0]
        parts = (part for group in sorted(outside, key=self._alone, reverse=True) for part in self.divide(group))
        return [part for part in parts if self._fits(current | part.modules)][:PARTS]

    def _prune(self) -> None:
        """Removes from the best set the modules without which it still meets the goal, the largest first."""
        best = self.best()
        if best is None:
            return
        limit = self.found[best].mean * TOLERANCE
        members = [group for group in (*self.groups, *self._added) if within(group.modules, best)]
        parts = NOTHING.union(*(group.modules for group in members))
        if self._is_enough(self._figures(parts), limit):  # a rule may have chosen whole layers
            best = parts
        for group in sorted(members, key=lambda group: group.nbytes, reverse=True):
            names = best - group.modules
            if names != best and self._is_enough(self._figures(names), limit):
                best = names

    def _has_room(self) -> bool:
        """Whether a smaller mismatch within the budget is wanted, and not fewer bytes."""
        best = self.best()
        return not self.goal.has_target or (
            self.goal.has_budget and best is not None and not self.goal.is_met(self.found[best])
        )

    def _is_enough(self, figures: Figures, limit: float) -> bool:
        return self.goal.is_met(figures) if self.goal.has_target else figures.mean <= limit


def outermost(names: Modules) -> Modules:
    """Returns the names that are not inside of another of the modules."""
    return frozenset(name for name in names if not within([name], names - {name}))


def within(names: Iterable[str], others: Modules) -> bool:
    """Whether all modules are among others or inside of them."""
    return all(name in others or any(name.startswith(f"{other}.") for other in others) for name in names)


def _less(figures: Figures) -> Figures:
    """The figures if the mean mismatch was measured too large by two standard errors."""
    return replace(figures, mean=figures.mean - 2 * figures.error)


def _ratio(gain: float, nbytes: int) -> float:
    return gain / max(nbytes, 1)

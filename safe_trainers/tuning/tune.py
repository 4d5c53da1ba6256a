"""Finds the precision and the modules in float32 that hold the mismatch of sampler and trainer, by measuring."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Never

from ..core.dtypes import FLOAT16, FLOAT32
from ..core.errors import PrecisionWarning, RecipeError, SafeTrainersError
from ..model.parts import unwrap
from ..model.trial_forward import is_dtype_error
from .accelerate_state import forget_precision, precision_kept
from .figures import NOT_COMPUTED, Figures
from .gradients import Gradients, check_gradients
from .groups import divide, extra_bytes, find_groups, find_rules, shortest_patterns
from .identity import identity_of
from .measure import Bench, Tokens, batches_of, check_measured, measured
from .result import Candidate, Tuning, lines_of
from .search import NOTHING, Goal, Modules, OutOfTimeError, Search, within
from .store import Store


Builder = Callable[[str, Callable[[type], type]], Any]
"""Builds a trainer for a precision such as `"bf16"`. Its second argument makes the class to build from another."""

PRECISIONS = ("bf16", "fp16", "fp32")
SHARE = 0.1
"""Without a goal, the mismatch is to become this share of what it is without a module in float32."""
NOISE = 1e-6
"""The smallest default target, in nats: float32 on both sides differs by up to this."""
MARGIN = 0.9
"""The search aims at this share of the target, because the promise is measured on other prompts."""
TIGHTENED = 3
"""Number of searches, each with a smaller target, until the target is met on held-out prompts."""
SEARCH_TIME = 0.6
"""Share of the time limit for the search."""
SELECTION_TIME = 0.8
"""Share of the time limit until the end of the selection; the rest is for the promise."""
FINALISTS = 5
"""Number of sets that are measured again before one is chosen, beside the fixed rules."""
HELD_OUT = 64
"""The promise has up to this many times the prompts of the search; sequences of one prompt are not independent."""
SELECTION = 4
"""The finalists are measured on this many times the sequences of the search."""
RELATIVE_ERROR = 0.04
"""The promise is measured until its standard error is this share of it."""
ABSOLUTE_ERROR = 2e-7
"""A standard error in nats that suffices for any promise: about the rounding of float32."""
MOST_ROUNDS = 600
"""If few tokens carry the mismatch, hundreds of rounds are needed."""
SEED, SELECTION_SEED = 11, 500
REPORTED = 5.0
"""Seconds between two lines of progress."""


@dataclass
class Plan:
    """What a search is asked for.

    Attributes:
        target: What is tuned, in words.
        prompts: The prompts in words.
        goal: The goal.
        precisions: The precisions to try, that of the run first.
        sequences: Number of prompts of the search. The dataset should have some times as many, see `rows_for`.
        settings: Further settings that a precision needs, such as the load dtype.
        time_limit: Seconds.
        rounds: Most rounds of the promise, each over as many held-out prompts; it ends earlier if it is exact enough.
        progress: Receives lines of progress.
    """

    target: str = ""
    prompts: str = ""
    goal: Goal = field(default_factory=Goal)
    precisions: Sequence[str] = PRECISIONS
    sequences: int = 32
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    time_limit: float = 300.0
    rounds: int = MOST_ROUNDS
    progress: Callable[[str], None] = lambda line: None


@dataclass
class _Outcome:
    """The search in one precision."""

    precision: str
    search: Search
    patterns: dict[Modules, tuple[str, ...]] = field(default_factory=dict)
    rules: dict[Modules, str] = field(default_factory=dict)
    sizes: dict[Modules, int] = field(default_factory=dict)
    offset: int = 0  # bytes beyond half precision of a run without a module in float32
    gradients: Gradients | None = None
    selected: dict[Modules, Figures] = field(default_factory=dict)  # the finalists, on the sample of the selection

    @property
    def best(self) -> Modules | None:
        """The best set of the selection; without a selection, that of the search."""
        return self.search.best(self.selected or None)

    def figures(self, names: Modules) -> Figures:
        """The figures by which a set is judged."""
        return self.selected.get(names) or self.search.found[names]

    def candidate(self, names: Modules, figures: Figures | None = None) -> Candidate:
        nbytes = self.offset + self.sizes[names]
        chosen_by = self.rules.get(names, "search") if names else "no module"
        return Candidate(self.precision, self.patterns[names], nbytes, figures or self.search.found[names], chosen_by)


class _Tuner:
    """One search over all precisions."""

    def __init__(self, build: Builder, plan: Plan, store: Store) -> None:
        self._build, self._plan, self._store = build, plan, store
        self._begun, self._told = time.monotonic(), 0.0
        self._goal = plan.goal
        self._notes: list[str] = []
        self._outcomes: list[_Outcome] = []
        self._bench: Bench | None = None  # that of the last precision
        self._held_out: Sequence[list[Any]] = []
        self._fresh: list[list[Any]] = []  # the batches of the selection
        self._last = ""  # the precision of the bench

    def run(self) -> Tuning:
        for number, precision in enumerate(self._plan.precisions):
            share = self._plan.time_limit * (number + 1) / len(self._plan.precisions)
            bench = self._open(precision)
            if bench is not None:
                self._outcomes.append(self._search(precision, bench, share))
        if not self._outcomes:
            raise RecipeError(f"{self._plan.target} cannot be measured. " + " ".join(self._notes))
        target = self._goal.max_mismatch
        for attempt in range(TIGHTENED):
            outcome, names = self._choose()
            promise = self._promise(outcome, names)
            if target is None or promise.mean <= target or not promise.finite or attempt == TIGHTENED - 1:
                break
            if not self._tighten(outcome, target, promise.mean):
                break
        return self._result(outcome, names, promise)

    # ---- One precision ----

    def _open(self, precision: str) -> Bench | None:
        """Builds the trainer of a precision; `None`, with a note, if it cannot be built or computes otherwise."""
        self._bench, self._last = None, ""
        forget_precision()
        self._tell(f"building the trainer in {precision}", now=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecisionWarning)  # the run itself gives them
                trainer = self._build(precision, measured)
                check_measured(trainer)
        except SafeTrainersError as error:
            if not self._outcomes and precision == self._plan.precisions[-1]:
                raise
            self._notes.append(f"{precision} was left out: {str(error).splitlines()[0]}")
            return None
        dtypes = trainer.precision.policy.compute.value
        wanted = {"bf16": "bfloat16", "fp16": FLOAT16, "fp32": FLOAT32}[precision]
        if dtypes != {wanted}:
            found = " and ".join(sorted(dtypes))
            self._notes.append(f"{precision} was left out: the run would compute in {found} on this device")
            return None
        size = trainer.args.per_device_train_batch_size
        count = math.ceil(self._plan.sequences / size)
        every = batches_of(trainer.train_dataset, size, (1 + SELECTION + HELD_OUT) * count * size)
        batches, unseen, again = list(every[:count]), every[count:], SELECTION * count
        # For a small dataset, the selection takes other samples of the prompts of the search.
        self._fresh = list(unseen[:again] if len(unseen) > again else islice(cycle(batches), again))
        self._held_out = unseen[again:] if len(unseen) > again else unseen
        if not self._held_out:
            raise RecipeError(
                "the dataset has too few prompts for a search and for held-out prompts. Write: --sequences 4"
            )
        self._bench, self._last = Bench(trainer, batches), precision
        return self._bench

    def _search(self, precision: str, bench: Bench, time_limit: float) -> _Outcome:
        model, store = bench.model, self._store
        groups = [] if precision == "fp32" else find_groups(model)
        rules = {} if precision == "fp32" else {rule.modules: rule.name for rule in find_rules(model)}
        if not self._outcomes:
            store.open(identity_of(self._plan.target, bench.trainer, bench.batches, self._fresh))
            if store.resumed:
                self._tell(f"resumed with {store.resumed} measurements", now=True)
        everything = NOTHING.union(*(group.modules for group in groups))
        if store.tokens is None:
            store.tokens = bench.sample(everything, SEED)
        measure = self._measurer(precision, bench, store.tokens, SEARCH_TIME * time_limit)
        plain = measure(NOTHING)
        if not self._goal.has_target and not self._goal.has_budget:
            self._goal = Goal(max_mismatch=max(SHARE * plain.mean, NOISE))
        search = Search(
            groups, list(rules), measure, partial(extra_bytes, model), self._aimed(), partial(divide, model)
        )
        outcome = _Outcome(precision, search, rules=rules)
        if precision == "fp32":
            outcome.offset = extra_bytes(model, (name for name, _ in unwrap(model).named_children()))
            search.found[NOTHING], search.complete = plain, True
        else:
            search.run()
            self._select(outcome, bench, SELECTION_TIME * time_limit)
        if precision == "fp16":
            outcome.gradients = self._check_gradients(bench, outcome)
        self._name_sets(outcome, model)
        return outcome

    def _select(self, outcome: _Outcome, bench: Bench, deadline: float) -> None:
        """Measures the finalists of a search again, on a larger sample that the search has not seen.

        The search compares many sets on few tokens, so that the set with the smallest mismatch there owes a part of it
        to chance.
        """
        finalists = outcome.search.finalists(FINALISTS)
        outcome.selected = {}
        if len(finalists) < 2:
            return
        self._tell(f"{outcome.precision}: measuring {len(finalists)} sets again on a larger sample", now=True)
        fresh = Bench(bench.trainer, self._fresh)
        tokens = fresh.sample(outcome.search.everything, SEED + SELECTION_SEED)
        measure = self._measurer(outcome.precision, fresh, tokens, deadline, " selection")
        try:
            for names in finalists:
                outcome.selected[names] = measure(names)
        except OutOfTimeError:
            return

    def _measurer(
        self, precision: str, bench: Bench, tokens: Tokens | None, deadline: float, stage: str = ""
    ) -> Callable[[Modules], Figures]:
        """Returns the function that measures a set, or takes it from the store."""
        store, key = self._store, precision + stage

        def measure(names: Modules) -> Figures:
            known = store.get(key, names)
            if known is not None:
                return known
            if names and time.monotonic() - self._begun > deadline:  # without any set there would be no result
                raise OutOfTimeError
            if store.get(precision, NOTHING) is None:
                bench.measure(names, tokens)  # the first measurement fills caches, and takes longer
            try:
                figures = bench.measure(names, tokens)
            except RuntimeError as error:
                if not names or not is_dtype_error(error):
                    raise
                figures = NOT_COMPUTED
            store.put(key, names, figures)
            self._tell(f"{precision}: {len(store)} measured, the last with a mean mismatch of {figures.mean:.2e}")
            store.write({"complete": False})
            return figures

        return measure

    def _aimed(self) -> Goal:
        target = self._goal.max_mismatch
        return self._goal if target is None else replace(self._goal, max_mismatch=MARGIN * target)

    def _check_gradients(self, bench: Bench, outcome: _Outcome) -> Gradients | None:
        """Checks the gradients with the best set, and adds the groups that it needs to be usable."""
        search, best = outcome.search, outcome.best
        if best is None or not search.found[best].finite:
            return None
        scale = bench.trainer.args.loss_scale_init if hasattr(bench.trainer.args, "loss_scale_init") else 2.0**16
        tokens = self._store.tokens or []

        def check(names: Modules) -> Gradients:
            return check_gradients(bench, names, search.everything, tokens, scale)

        found = check(best)
        if found.usable:
            return found
        for group in (group for group in search.groups if not within(group.modules, best)):
            names = best | group.modules
            if not search.goal.fits(search.size(names), 0.0, 1.0):
                continue
            other = check(names)
            if other.usable:
                self._notes.append(f"fp16 without {group.name} in float32: {found}")
                try:
                    figures = search.measure(names)
                except OutOfTimeError:
                    break
                search.found, outcome.selected = {NOTHING: search.found[NOTHING], names: figures}, {}
                return other
        return found

    def _name_sets(self, outcome: _Outcome, model: Any) -> None:
        """Writes the sets that the result shows as patterns, while the model is there."""
        search = outcome.search
        outcome.sizes = {names: search.size(names) for names in search.found}
        shown = {NOTHING, *search.front(), *(names for names in outcome.rules if names in search.found)}
        shown |= {*outcome.selected, *(names for names in (outcome.best,) if names is not None)}
        for names in shown - outcome.patterns.keys():
            outcome.patterns[names] = tuple(shortest_patterns(model, names))
        # None of them keeps the model in memory.
        search.size, search.measure, search.divide = outcome.sizes.__getitem__, _closed, _closed

    # ---- The choice ----

    def _choose(self) -> tuple[_Outcome, Modules]:
        """Returns the precision and the set to promise."""
        usable = [o for o in self._outcomes if o.gradients is None or o.gradients.usable] or self._outcomes
        choices = [(o, names) for o in usable for names in (o.best,) if names is not None]
        choices = choices or [(self._outcomes[0], NOTHING)]

        def rank(choice: tuple[_Outcome, Modules]) -> tuple[Any, ...]:
            outcome, names = choice
            figures, nbytes = outcome.figures(names), outcome.offset + outcome.sizes[names]
            fits = self._goal.max_bytes is None or nbytes <= self._goal.max_bytes
            met = outcome.search.goal.is_met(figures)
            return not fits, not met, nbytes if met else figures.mean, figures.mean

        return min(choices, key=rank)

    def _promise(self, outcome: _Outcome, names: Modules) -> Figures:
        """Measures a set on held-out prompts, until the promise is exact enough or the time is over."""
        if self._last != outcome.precision:
            self._open(outcome.precision)
        if self._bench is None:
            raise RecipeError(f"the trainer in {outcome.precision} cannot be built a second time")
        self._tell("measuring the promise on held-out prompts", now=True)
        bench = Bench(self._bench.trainer, self._held_out)

        def enough(figures: Figures) -> bool:
            return figures.error <= max(RELATIVE_ERROR * figures.mean, ABSOLUTE_ERROR)

        def more(rounds: int) -> bool:
            self._tell(f"{rounds} rounds of the promise")
            return rounds < self._plan.rounds and time.monotonic() - self._begun <= self._plan.time_limit

        return bench.promise(names, SEED + 1000, enough, more, len(self._bench.batches))

    def _tighten(self, outcome: _Outcome, target: float, found: float) -> bool:
        """Searches again with a smaller target; returns whether there is time and another set."""
        search, bench = outcome.search, self._bench
        if bench is None or time.monotonic() - self._begun > SEARCH_TIME * self._plan.time_limit:
            return False
        before = outcome.best
        aimed = search.goal.max_mismatch or target
        search.goal = replace(search.goal, max_mismatch=aimed * MARGIN * target / found)
        if search.groups:
            limit = self._plan.time_limit
            search.measure = self._measurer(outcome.precision, bench, self._store.tokens, SEARCH_TIME * limit)
            search.size = partial(extra_bytes, bench.model)
            search.run()
            self._select(outcome, bench, SELECTION_TIME * limit)
        self._name_sets(outcome, bench.model)
        return outcome.best != before

    # ---- The result ----

    def _result(self, outcome: _Outcome, names: Modules, promise: Figures) -> Tuning:
        goal, best = self._goal, outcome.candidate(names)
        within_budget = goal.fits(best.nbytes, best.figures.seconds, outcome.search.found[NOTHING].seconds)
        unusable = outcome.gradients is not None and not outcome.gradients.usable
        reached = within_budget and promise.finite and not unusable and (not goal.has_target or goal.is_met(promise))
        shown = [o.candidate(names) for o in self._outcomes for names in o.search.front() if names in o.patterns]
        rules = [o.candidate(names) for o in self._outcomes for names in o.rules if names in o.search.found]
        if outcome.search.groups and not best.figures.mean < outcome.search.found[NOTHING].mean / 2:
            whole = outcome.search.found.get(outcome.search.everything)
            if whole is not None and whole.mean > outcome.search.found[NOTHING].mean / 2:
                self._notes.append(
                    f"with every module in float32 the mismatch is {whole.mean:.2e}: it is not due to the precision"
                )
        result = Tuning(
            target=self._plan.target,
            prompts=self._plan.prompts,
            goal=str(goal),
            reached=reached,
            complete=all(o.search.complete for o in self._outcomes),
            best=best,
            promise=promise,
            before=self._outcomes[0].candidate(NOTHING),
            front=tuple(sorted(_front(shown), key=lambda c: (c.nbytes, c.figures.mean))),
            rules=tuple(rules),
            finalists=tuple(outcome.candidate(names, figures) for names, figures in outcome.selected.items()),
            points=tuple(self._points()),
            contributions=tuple(_contributions(outcome.search)),
            gradients=outcome.gradients,
            settings=lines_of(outcome.precision, best.fp32_modules, self._plan.settings.get(outcome.precision)),
            notes=tuple(dict.fromkeys(self._notes)),
            seconds=time.monotonic() - self._begun,
            measurements=len(self._store),
        )
        self._store.write(result.to_dict())
        return result

    def _points(self) -> Iterator[tuple[str, int, float]]:
        for o in self._outcomes:
            for names, figures in o.search.found.items():
                if figures.finite:
                    yield o.precision, o.offset + o.sizes[names], figures.mean

    def _tell(self, line: str, now: bool = False) -> None:
        since = time.monotonic() - self._begun
        if now or since - self._told > REPORTED:
            self._told = since
            self._plan.progress(f"{line} ({since:.0f} of {self._plan.time_limit:.0f} s)")


def tune_trainer(build: Builder, plan: Plan, store: Store) -> Tuning:
    """Searches the precision and the modules in float32 of a run.

    Args:
        build: Builds the trainer for a precision. It is called once for each precision, and perhaps again for the
            promise. Its `per_device_train_batch_size` is the size of the measured batches.
        plan: What is asked for.
        store: The measurements so far.

    Returns:
        The result; `reached` is false if the goal was not met.

    Raises:
        RecipeError: If no precision can be measured.
        PrecisionError: If the trainer of the only precision cannot be built.
    """
    with precision_kept():
        return _Tuner(build, plan, store).run()


def rows_for(sequences: int, size: int) -> int:
    """Returns the number of prompts with which a search, its selection and its promise have prompts of their own.

    Args:
        sequences: Prompts of the search.
        size: Rows of a batch.
    """
    return (1 + SELECTION + HELD_OUT) * math.ceil(sequences / size) * size


def _front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates to which no other is better in bytes and mismatch."""

    def better(one: Candidate, other: Candidate) -> bool:
        a, b = (one.nbytes, one.figures.mean), (other.nbytes, other.figures.mean)
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    return [c for c in candidates if c.figures.finite and not any(better(other, c) for other in candidates)]


def _closed(*args: Any) -> Never:
    raise OutOfTimeError


def _contributions(search: Search) -> Iterator[Mapping[str, Any]]:
    def mean(figures: Figures | None) -> float | None:
        return None if figures is None or not figures.finite else figures.mean

    for row in search.contributions:
        yield {"group": row.group.name, "bytes": row.group.nbytes} | {
            "alone": mean(row.alone), "in_float32": mean(row.removed)
        }  # fmt: skip

"""Finds the precision and the modules in float32 that hold the mismatch of sampler and trainer, by measuring."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from .outcome import Attempt, Outcome, contributions_of, front_of
from .plan import HELD_OUT, SELECTION, Builder, Plan
from .promise import Promise
from .result import Tuning, lines_of
from .search import FLOOR, NOTHING, Goal, Modules, OutOfTimeError, Search, outermost, within
from .store import Store


SHARE = 0.1
"""Without a goal, the mismatch is to become this share of what it is without a module in float32."""
NOISE = 1e-6
"""The smallest default target is at most this, in nats: float32 on both sides differs by up to this."""
MARGIN = 0.9
"""The search aims at this share of the target, because the promise is measured on other prompts."""
ATTEMPTS = 5
"""Number of promises, with a search between two of them, until the target is met on held-out prompts."""
SEARCH_TIME = 0.6
"""Share of the time limit for the search."""
SELECTION_TIME = 0.8
"""Share of the time limit until the end of the selection; the rest is for the promise."""
FINALISTS = 5
"""Number of sets that are measured again before one is chosen, beside the fixed rules."""
RELATIVE_ERROR = 0.025
"""The promise is measured until its standard error is this share of it."""
ABSOLUTE_ERROR = 2e-8
"""A standard error in nats that suffices for any promise: a tenth of what is left with everything in float32."""
MISSED, MISSED_ERROR = 3.0, 0.25
"""A promise that exceeds the target by this many standard errors ends, if a search may follow, once its standard error
is this share of it: the search needs the tokens with large differences, which may be rare."""
SHOWN = 0.5
"""If the sample of a search has less than this share of a promise, the tokens with the mismatch are not in it."""
SEED, SELECTION_SEED, PROMISE_SEED = 11, 500, 1000
ATTEMPT_SEEDS = 10**6  # distance between the seeds of two promises
REPORTED = 5.0
"""Seconds between two lines of progress."""


class _Tuner:
    """One search over all precisions."""

    def __init__(self, build: Builder, plan: Plan, store: Store) -> None:
        self._build, self._plan, self._store = build, plan, store
        self._begun, self._told = time.monotonic(), 0.0
        self._goal = plan.goal
        self._notes: list[str] = []
        self._outcomes: list[Outcome] = []
        self._bench: Bench | None = None  # that of the last precision
        self._held_out: Sequence[list[Any]] = []
        self._fresh: list[list[Any]] = []  # the batches of the selection
        self._last = ""  # the precision of the bench
        self._is_warm = False  # whether the bench has measured
        self._measured_beside = 0  # measurements that are not in the store

    def run(self) -> Tuning:
        for number, precision in enumerate(self._plan.precisions):
            share = self._plan.time_limit * (number + 1) / len(self._plan.precisions)
            bench = self._open(precision)
            if bench is not None:
                self._outcomes.append(self._search(precision, bench, share))
        if not self._outcomes:
            raise RecipeError(f"{self._plan.target} cannot be measured. " + " ".join(self._notes))
        attempts: list[Attempt] = []
        while True:
            attempt = self._attempt(attempts)
            attempts.append(attempt)
            if len(attempts) == ATTEMPTS or not self._misses(attempt.figures) or not self._repeat(attempt):
                return self._result(self._best_of(attempts))

    # ---- One precision ----

    def _open(self, precision: str) -> Bench | None:
        """Builds the trainer of a precision; `None`, with a note, if it cannot be built or computes otherwise."""
        self._bench, self._last, self._is_warm = None, "", False
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

    def _search(self, precision: str, bench: Bench, time_limit: float) -> Outcome:
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
            try:
                smallest = min(FLOOR * measure(outermost(everything)).mean, NOISE)
            except OutOfTimeError:
                smallest = NOISE
            self._goal = Goal(max_mismatch=max(SHARE * plain.mean, smallest))
        search = Search(
            groups, list(rules), measure, partial(extra_bytes, model), self._aimed(), partial(divide, model)
        )
        outcome = Outcome(precision, search, rules=rules)
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

    def _select(self, outcome: Outcome, bench: Bench, deadline: float) -> None:
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
        self,
        precision: str,
        bench: Bench,
        tokens: Tokens | None,
        deadline: float,
        stage: str = "",
        store: Store | None = None,
    ) -> Callable[[Modules], Figures]:
        """Returns the function that measures a set, or takes it from a store, by default that of the search."""
        store, key = self._store if store is None else store, precision + stage

        def measure(names: Modules) -> Figures:
            known = store.get(key, names)
            if known is not None:
                return known
            if names and time.monotonic() - self._begun > deadline:  # without any set there would be no result
                raise OutOfTimeError
            try:
                if not self._is_warm:  # the first measurement fills caches, and takes longer
                    self._is_warm = True
                    bench.measure(names, tokens)
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

    def _check_gradients(self, bench: Bench, outcome: Outcome) -> Gradients | None:
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
                outcome.chosen = names
                return other
        return found

    def _name_sets(self, outcome: Outcome, model: Any) -> None:
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

    def _choose(self) -> tuple[Outcome, Modules]:
        """Returns the precision and the set to promise."""
        usable = [o for o in self._outcomes if o.gradients is None or o.gradients.usable] or self._outcomes
        choices = [(o, names) for o in usable for names in (o.best,) if names is not None]
        choices = choices or [(self._outcomes[0], NOTHING)]

        def rank(choice: tuple[Outcome, Modules]) -> tuple[Any, ...]:
            outcome, names = choice
            figures, nbytes = outcome.figures(names), outcome.offset + outcome.sizes[names]
            fits = self._goal.max_bytes is None or nbytes <= self._goal.max_bytes
            met = outcome.search.goal.is_met(figures)
            return not fits, not met, nbytes if met else figures.mean, figures.mean

        return min(choices, key=rank)

    # ---- The promise ----

    def _attempt(self, before: Sequence[Attempt]) -> Attempt:
        """Chooses a set, and measures it on held-out prompts until the promise is exact enough or the time is over.

        It ends as soon as the target is clearly missed, if a search may follow. After a miss, it has other prompts,
        and at least as many sequences as the promise that missed, because large differences may be rare.
        """
        outcome, names = self._choose()
        bench = self._reopened(outcome)
        self._tell("measuring the promise on held-out prompts", now=True)
        target = self._goal.max_mismatch
        repeatable = target is not None and bool(outcome.search.groups) and len(before) < ATTEMPTS - 1
        promise = Promise(
            names,
            self._held_out,
            size=len(bench.batches),
            seed=SEED + PROMISE_SEED + ATTEMPT_SEEDS * len(before),
            start=before[-1].promise.next if before else 0,
            keep=self._plan.sequences if repeatable else 0,
        )
        least = before[-1].figures.sequences if before else 0

        def enough(figures: Figures) -> bool:
            missed = figures.mean - MISSED * figures.error > (target or 0.0)
            if repeatable and self._may_search() and missed and figures.error <= MISSED_ERROR * figures.mean:
                return True
            return _is_exact(figures) and figures.sequences >= least

        figures = promise.measure(bench, enough, self._has_more)
        return Attempt(outcome, names, outcome.candidate(names), outcome.gradients, promise, figures)

    def _has_more(self, rounds: int) -> bool:
        """Whether a promise may have another round."""
        self._tell(f"{rounds} rounds of the promise")
        return rounds < self._plan.rounds and time.monotonic() - self._begun <= self._plan.time_limit

    def _may_search(self) -> bool:
        return time.monotonic() - self._begun <= SEARCH_TIME * self._plan.time_limit

    def _misses(self, figures: Figures) -> bool:
        """Whether the promise is larger than the target, so that another set may be better."""
        target = self._goal.max_mismatch
        return target is not None and figures.finite and figures.mean > target

    def _reopened(self, outcome: Outcome) -> Bench:
        """The bench of an outcome's precision, which is built again if it is not the last one."""
        if self._last != outcome.precision:
            self._open(outcome.precision)
        if self._bench is None:
            raise RecipeError(f"the trainer in {outcome.precision} cannot be built a second time")
        return self._bench

    def _best_of(self, attempts: Sequence[Attempt]) -> Attempt:
        """The attempt to report, whose promise is continued if it ended when the target was missed."""
        budget = math.inf if self._goal.max_bytes is None else self._goal.max_bytes

        def rank(attempt: Attempt) -> tuple[Any, ...]:
            figures = attempt.figures
            return attempt.best.nbytes > budget, not figures.finite, self._misses(figures), figures.mean

        best = attempts[-1] if self._goal.max_mismatch is None else min(attempts, key=rank)
        if best.figures.finite and not _is_exact(best.figures) and self._has_more(best.promise.rounds):
            best.figures = best.promise.measure(self._reopened(best.outcome), _is_exact, self._has_more)
        return best

    def _repeat(self, attempt: Attempt) -> bool:
        """Searches again after a promise that missed the target; returns whether there is another set."""
        outcome, bench = attempt.outcome, self._bench
        search = outcome.search
        if bench is None or not search.groups or not self._may_search():
            return False
        deadline = SEARCH_TIME * self._plan.time_limit
        search.measure = self._measurer(outcome.precision, bench, self._store.tokens, deadline)
        search.size, search.divide = partial(extra_bytes, bench.model), partial(divide, bench.model)
        factor = MARGIN * (self._goal.max_mismatch or 0.0) / attempt.figures.mean
        is_shown = outcome.figures(attempt.names).mean >= SHOWN * attempt.figures.mean
        found = is_shown and self._tighten(outcome, bench, factor)
        found = found or self._search_worst(attempt, bench, factor, deadline)
        if found and outcome.precision == "fp16":
            outcome.gradients = self._check_gradients(bench, outcome)
        self._name_sets(outcome, bench.model)
        return found

    def _tighten(self, outcome: Outcome, bench: Bench, factor: float) -> bool:
        """Searches with a smaller target on the sample of the search; returns whether there is another set."""
        if outcome.chosen is not None:
            return False
        search, before = outcome.search, outcome.best
        kept = search.goal, search.found, outcome.selected
        search.goal = replace(search.goal, max_mismatch=(search.goal.max_mismatch or math.inf) * factor)
        search.found = dict(search.found)
        search.run()
        self._select(outcome, bench, SELECTION_TIME * self._plan.time_limit)
        if outcome.best != before:
            return True
        search.goal, search.found, outcome.selected = kept
        return False

    def _search_worst(self, attempt: Attempt, bench: Bench, factor: float, deadline: float) -> bool:
        """Searches modules to add, with the sequences of the promise that have the largest mismatch in the sample.

        Large differences of single tokens, such as those of a router, may be so rare that the sample has none. The
        mismatch of the sample with these sequences has to fall by the square of the factor, because they were chosen
        for their mismatch, and look better with any other set. Modules are only added.

        Returns:
            Whether there is another set.
        """
        outcome, names, worst = attempt.outcome, attempt.names, attempt.promise.worst
        if not worst:
            return False
        self._tell(f"{outcome.precision}: searching on the sequences with the largest mismatch", now=True)
        batches, tokens = worst.batches(bench.trainer.args.per_device_train_batch_size)
        search, beside = outcome.search, Store(None)
        sample = Bench(bench.trainer, [*bench.batches, *batches])
        measure = self._measurer(
            outcome.precision, sample, [*(self._store.tokens or []), *tokens], deadline, store=beside
        )
        try:
            aim = max(factor**2 * measure(names).mean, FLOOR * measure(search.everything).mean)
            again = Search(
                [group for group in search.groups if not within(group.modules, names)],
                search.rules,
                lambda added: measure(outermost(names | added)),
                lambda added: search.size(outermost(names | added)),
                replace(self._goal, max_mismatch=aim, min_ess=None),
                search.divide,
            )
            again.run()
            search.complete = search.complete and again.complete
            added = again.best()
            if added is None or not again.goal.is_met(again.found[added]):
                return False
            best = outermost(names | added)
            figures = search.measure(best)
        except OutOfTimeError:
            search.complete = False
            return False
        finally:
            self._measured_beside += len(beside)
        if best == names or not self._goal.fits(search.size(best), figures.seconds, search.found[NOTHING].seconds):
            return False
        outcome.chosen, search.found[best] = best, figures
        return True

    # ---- The result ----

    def _result(self, attempt: Attempt) -> Tuning:
        goal, outcome, best, promise = self._goal, attempt.outcome, attempt.best, attempt.figures
        within_budget = goal.fits(best.nbytes, best.figures.seconds, outcome.search.found[NOTHING].seconds)
        unusable = attempt.gradients is not None and not attempt.gradients.usable
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
            front=tuple(sorted(front_of(shown), key=lambda c: (c.nbytes, c.figures.mean))),
            rules=tuple(rules),
            finalists=tuple(outcome.candidate(names, figures) for names, figures in outcome.selected.items()),
            points=tuple(self._points()),
            contributions=tuple(contributions_of(outcome.search)),
            gradients=attempt.gradients,
            settings=lines_of(outcome.precision, best.fp32_modules, self._plan.settings.get(outcome.precision)),
            notes=tuple(dict.fromkeys(self._notes)),
            seconds=time.monotonic() - self._begun,
            measurements=len(self._store) + self._measured_beside,
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


def _is_exact(figures: Figures) -> bool:
    """Whether the standard error of a promise is small enough."""
    return figures.error <= max(RELATIVE_ERROR * figures.mean, ABSOLUTE_ERROR)


def _closed(*args: Any) -> Never:
    raise OutOfTimeError

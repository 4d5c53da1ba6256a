"""Finds the first value at which two recordings part by more than the noise of a reference pair."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..core.errors import RecordingError
from . import storage
from .aligned import Key, Pair, Side, align, key_of
from .cause import Cause, explain, explain_rollout
from .digest import ulp_distance
from .names import pairs
from .storage import Recording, Step, read_recording


Tolerances = Callable[[Pair], float]
"""The largest distance of a pair that counts as noise."""
NOISE_FACTOR = 4.0
"""A value differs if its distance is above this multiple of the largest one in the reference pair up to there."""
ROLLOUT_TOLERANCE = 64.0
"""The distance in ulp up to which rollout and training count as equal without a reference: decoding one token at
a time uses other kernels than a forward pass over all tokens."""
SHOWN = 12
"""Differences after the first one that a result lists, one for each module."""
_NOT_COMPARED = frozenset({storage.WEIGHT, storage.BUFFER, storage.DERIVED})
"""Looked at for the cause, and if nothing else differs."""


@dataclass(frozen=True)
class Difference:
    """A value that differs.

    Attributes:
        step: Number of the step.
        phase: Phase of the step.
        module: Canonical name of the module; empty for the model, in parentheses for what is not a module.
        value: What differs, such as `"output"` or `"gradient of output"`.
        ulp: The distance; infinite if shapes, integers or counts of non-finite values differ.
        noise: The largest distance that counts as noise.
        rank: The process.
    """

    step: int
    phase: str
    module: str
    value: str
    ulp: float
    noise: float
    rank: int = 0


@dataclass(frozen=True)
class Comparison:
    """The comparison of two recordings.

    Attributes:
        first: Name of one recording.
        second: Name of the other.
        steps: The steps that were compared.
        compared: The number of values that were compared.
        differences: The first difference of each module in the process that parts first, in order of time; empty if
            there is none beyond noise.
        cause: The cause of the first difference, and the module that is responsible.
        alone: Modules that only one recording has.
        ranks: The processes that were compared.
        other_ranks: Processes that only one recording has.
        missing: The number of values that are not in the recordings because files would have been too large. Without
            a difference, nothing is known of these values.
    """

    first: str
    second: str
    steps: tuple[int, ...]
    compared: int
    differences: tuple[Difference, ...] = ()
    cause: Cause | None = None
    alone: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0,)
    other_ranks: tuple[int, ...] = ()
    missing: int = 0


def compare_recordings(first: str, second: str, noise: Sequence[str] = (), phase: str | None = None) -> Comparison:
    """Compares two recordings.

    Args:
        first: A run folder or a folder with a recording.
        second: Another one.
        noise: Recordings of the same computation as the first, whose distance from it counts as noise.
        phase: Compare only this phase, one of `storage.PHASES`; by default all.

    Returns:
        The comparison.

    Raises:
        RecordingError: If a recording is missing, they are of different models, or have no step in common, or no value
            of the phase.
    """
    a, b = read_recording(first), read_recording(second)
    references = [read_recording(path) for path in noise]
    for other in (b, *references):
        check_same_model(a, other)
    steps = common_steps(a, b)
    found = Comparison(first, second, steps, 0, alone=tuple(_alone(a, b)), ranks=(), other_ranks=_other_ranks(a, b))
    for number in steps:
        partings = []
        for rank in _common_ranks(number, a, b):
            mine, theirs = a.step(number, rank), b.step(number, rank)
            every = align(mine, theirs)
            aligned = [pair for pair in every if phase in (None, pair.first.phase)]
            tolerances = _Noise(mine, [_reference(r, number, rank) for r in references if number in r.steps])
            found = _with_counts(found, rank, aligned, (mine, theirs), (phase,))
            differing = list(_beyond(mine, aligned, tolerances))
            if differing:
                pair, sides = differing[0][0], (Side(a, mine), Side(b, theirs))
                cause = partial(explain, pair, every, *sides, partial(_is_beyond, tolerances))
                partings.append(_Parting(_place(pair, every), differing, cause))
        if partings:
            return _with_first(found, partings)
    if not found.compared:
        read = (a.step(number, _common_ranks(number, a, b)[0]) for number in steps)
        phases = {event.phase for step in read for event in step.events}
        known = ", ".join(name for name in storage.PHASES[1:] if name in phases)
        where = "" if phase is None else f" in the phase {phase}"
        raise RecordingError(f"{first} and {second} have no value in common{where}. {first} has the phases {known}")
    return found


def compare_rollout(path: str, noise: Sequence[str] = ()) -> Comparison:
    """Compares the rollout and the training of one run, by token.

    Args:
        path: A run folder or a folder with a recording.
        noise: Runs without a fault, whose distance of rollout and training counts as noise.

    Raises:
        RecordingError: If there is no recording, or no recorded step has both phases.
    """
    run = read_recording(path)
    references = [read_recording(other) for other in noise]
    tolerances = _rollout_tolerances(references)
    found = Comparison(f"{path} (rollout)", f"{path} (training)", (), 0, ranks=())
    for number in run.steps:
        partings = []
        for rank in sorted(run.steps[number]):
            step = run.step(number, rank)
            aligned = _rollout_pairs(step)
            if not aligned:
                continue
            found = _with_counts(found, rank, aligned, (step,), (storage.ROLLOUT, aligned[0].second.phase))
            found = replace(found, steps=tuple(dict.fromkeys((*found.steps, number))))
            differing = [(p, _difference(step, p, tolerances(p))) for p in aligned if _is_beyond(tolerances, p)]
            if differing:
                cause = partial(explain_rollout, differing[0][0], Side(run, step))
                partings.append(_Parting(_place(differing[0][0], aligned), differing, cause))
        if partings:
            return _with_first(found, partings)
    if not found.steps:
        raise RecordingError(
            f"{path} has no step in which tokens are sampled by the model's own `generate` and then trained on. "
            "Record a step of GRPO or RLOO with a rollout, without vLLM"
        )
    return found


@dataclass
class _Parting:
    """Where one process parts.

    Attributes:
        place: When, so that the processes of a step are comparable.
        differing: The pairs that differ, in order of time.
        cause: Explains the first of them.
    """

    place: int
    differing: list[tuple[Pair, Difference]]
    cause: Callable[[], Cause]


def _place(pair: Pair, aligned: Sequence[Pair]) -> int:
    """The number of a pair in order of time; weights, which are compared last, follow all other values."""
    later = len(aligned) if pair.first.kind in _NOT_COMPARED else 0
    return later + next(number for number, other in enumerate(aligned) if other is pair)


def _with_counts(
    found: Comparison, rank: int, aligned: Sequence[Pair], steps: Iterable[Step], phases: Sequence[str | None]
) -> Comparison:
    """Adds the values of a step of one process, and how many are missing in phases; `None` stands for all phases."""
    dropped = [count for step in steps for name, count in step.dropped.items() if None in phases or name in phases]
    return replace(
        found,
        compared=found.compared + len(aligned),
        ranks=tuple(sorted({*found.ranks, rank})),
        missing=found.missing + sum(dropped),
    )


def _with_first(found: Comparison, partings: Iterable[_Parting]) -> Comparison:
    """Adds the differences and the cause of the process that parts first."""
    first = min(partings, key=lambda parting: parting.place)
    return replace(found, differences=_by_module(d for _, d in first.differing), cause=first.cause())


def _common_ranks(number: int, first: Recording, second: Recording) -> list[int]:
    return sorted(first.steps[number].keys() & second.steps[number].keys())


def _other_ranks(first: Recording, second: Recording) -> tuple[int, ...]:
    mine, theirs = ({rank for files in recording.steps.values() for rank in files} for recording in (first, second))
    return tuple(sorted(mine ^ theirs))


def _reference(recording: Recording, number: int, rank: int) -> Step:
    if rank not in recording.steps[number]:
        raise RecordingError(
            f"{recording.path} has no recording of process {rank} in step {number}. Record it with the same number of "
            "processes"
        )
    return recording.step(number, rank)


def _rollout_pairs(step: Step) -> list[Pair]:
    """The values at the sampled tokens, and when these tokens are scored, or trained on if they are not scored."""
    for phase in (storage.SCORING, storage.FORWARD):
        aligned = align(step, step, {storage.ROLLOUT: phase})
        aligned = [pair for pair in aligned if pair.first.kind in (storage.TOKEN, storage.TOKEN_PRE)]
        if aligned:
            return aligned
    return []


def _rollout_tolerances(references: Iterable[Recording]) -> Tolerances:
    distances: dict[tuple[str, str], float] = defaultdict(float)
    known = False
    for reference in references:
        every = (reference.step(number, rank) for number, files in reference.steps.items() for rank in files)
        for pair in (pair for step in every for pair in _rollout_pairs(step)):
            known, distance = True, ulp_distance_of(pair)
            if math.isfinite(distance):
                place = pair.first.name, pair.first.slot
                distances[place] = max(distances[place], distance)

    def tolerance(pair: Pair) -> float:
        own = distances.get((pair.first.name, pair.first.slot), 0.0)
        return NOISE_FACTOR * own if known else ROLLOUT_TOLERANCE

    return tolerance


def ulp_distance_of(pair: Pair) -> float:
    """Returns the distance of the two values of a pair in ulp."""
    if pair.first.value is None or pair.second.value is None:
        return 0.0
    return ulp_distance(pair.first.value, pair.second.value)


def _is_beyond(tolerances: Tolerances, pair: Pair) -> bool:
    """Whether a pair has other dtypes, or differs by more than noise."""
    one, other = pair.first.value, pair.second.value
    other_dtype = one is not None and other is not None and one.dtype != other.dtype
    return other_dtype or ulp_distance_of(pair) > tolerances(pair)


class _Noise:
    """The distance that counts as noise, by place: the largest one in a reference pair up to there in the phase."""

    def __init__(self, step: Step, references: Sequence[Step]) -> None:
        self._at: dict[Key, float] = {}
        self._known = bool(references)
        own: dict[Key, float] = defaultdict(float)
        for reference in references:
            for pair in align(step, reference):
                own[pair.key] = max(own[pair.key], ulp_distance_of(pair))
        largest: dict[str, float] = defaultdict(float)
        for event in step.events if self._known else ():
            key = key_of(event)
            distance = own.get(key, 0.0)
            if math.isfinite(distance):
                largest[event.phase] = distance = max(largest[event.phase], distance)
            self._at[key] = NOISE_FACTOR * distance

    def __call__(self, pair: Pair) -> float:
        return self._at.get(pair.key, 0.0)


def _beyond(step: Step, aligned: Iterable[Pair], tolerances: Tolerances) -> Iterable[tuple[Pair, Difference]]:
    """Yields the values that differ beyond noise in order of time; weights only if nothing else does."""
    later = []
    any_found = False
    for pair in aligned:
        if _is_beyond(tolerances, pair):
            if pair.first.kind in _NOT_COMPARED:
                if pair.first.value is not None and pair.second.value is not None:
                    same_shape = pair.first.value.shape == pair.second.value.shape
                    later += [pair] if same_shape else []  # sharded
                continue
            any_found = True
            yield pair, _difference(step, pair, tolerances(pair))
    for pair in () if any_found else later:
        yield pair, _difference(step, pair, tolerances(pair))


def _difference(step: Step, pair: Pair, noise: float) -> Difference:
    event = pair.first
    named = {storage.GRADIENT: f"gradient of {event.slot.removesuffix('.grad')}", storage.PRE: f"input {event.slot}",
             storage.TOKEN_PRE: f"input {event.slot}", storage.STATE: f"optimizer state {event.slot}",
             storage.UPDATED: f"updated {event.slot}"}  # fmt: skip
    value = named.get(event.kind, event.slot)
    return Difference(step.number, event.phase, event.name, value, ulp_distance_of(pair), noise, step.rank)


def _by_module(found: Iterable[Difference]) -> tuple[Difference, ...]:
    first: dict[tuple[str, str], Difference] = {}
    for difference in found:
        first.setdefault((difference.phase, difference.module), difference)
    return tuple(first.values())[:SHOWN]


def _alone(first: Recording, second: Recording) -> Iterable[str]:
    aligned = pairs(first.model["kinds"], second.model["kinds"])
    yield from (name for name in first.model["kinds"] if name not in aligned)
    taken = set(aligned.values())
    yield from (name for name in second.model["kinds"] if name not in taken)


def check_same_model(first: Recording, second: Recording) -> None:
    """Checks that two recordings are of the same model, with or without adapters.

    Raises:
        RecordingError: If their classes differ, they share less than half of the parameters of the smaller model, or a
            shared parameter of the base has another shape.
    """
    mine, theirs = first.model["shapes"], second.model["shapes"]
    aligned = pairs(mine, theirs)
    kinds = [recording.model["kinds"].get("", "") for recording in (first, second)]
    base = [name for name in aligned if "lora_" not in name]
    other = next((name for name in base if mine[name] != theirs[aligned[name]]), None)
    if kinds[0] != kinds[1]:
        why = f"{kinds[0]} and {kinds[1]}"
    elif len(aligned) * 2 < min(len(mine), len(theirs)):
        why = f"they share {len(aligned)} of {len(mine)} and {len(theirs)} parameters"
    elif other is not None:
        why = f"{other} has the shapes {mine[other]} and {theirs[aligned[other]]}"
    else:
        return
    raise RecordingError(
        f"{first.path} and {second.path} are recordings of different models: {why}. Compare two runs of one model"
    )


def common_steps(first: Recording, second: Recording) -> tuple[int, ...]:
    """Returns the numbers of the steps that both recordings have of at least one process.

    Raises:
        RecordingError: If there are none.
    """
    both = tuple(number for number in first.steps if number in second.steps and _common_ranks(number, first, second))
    if not both:
        raise RecordingError(
            f"{first.path} has the steps {_listed(first)} and {second.path} has {_listed(second)}: none in common. "
            f"Record the second run with record_steps: [{next(iter(first.steps))}]"
        )
    return both


def _listed(recording: Recording) -> str:
    return ", ".join(map(str, list(recording.steps)[:8]))

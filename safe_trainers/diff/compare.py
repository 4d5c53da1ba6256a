"""Finds the first value at which two recordings part by more than the noise of a reference pair."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    """

    step: int
    phase: str
    module: str
    value: str
    ulp: float
    noise: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of two recordings.

    Attributes:
        first: Name of one recording.
        second: Name of the other.
        steps: The steps that were compared.
        compared: The number of values that were compared.
        differences: The first difference of each module, in order of time; empty if there is none beyond noise.
        cause: The cause of the first difference, and the module that is responsible.
        alone: Modules that only one recording has.
    """

    first: str
    second: str
    steps: tuple[int, ...]
    compared: int
    differences: tuple[Difference, ...] = ()
    cause: Cause | None = None
    alone: tuple[str, ...] = ()


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
    compared, alone = 0, tuple(_alone(a, b))
    for number in steps:
        mine, theirs = a.step(number), b.step(number)
        every = align(mine, theirs)
        aligned = [pair for pair in every if phase in (None, pair.first.phase)]
        tolerances = _Noise(mine, [r.step(number) for r in references if number in r.steps])
        compared += len(aligned)
        found = list(_beyond(number, aligned, tolerances))
        if found:
            sides = Side(a, mine), Side(b, theirs)
            cause = explain(found[0][0], every, *sides, partial(_is_beyond, tolerances))
            shown = _by_module(difference for _, difference in found)
            return Comparison(first, second, steps, compared, shown, cause, alone)
    if not compared:
        phases = {event.phase for number in steps for event in a.step(number).events}
        known = ", ".join(name for name in storage.PHASES[1:] if name in phases)
        where = "" if phase is None else f" in the phase {phase}"
        raise RecordingError(f"{first} and {second} have no value in common{where}. {first} has the phases {known}")
    return Comparison(first, second, steps, compared, alone=alone)


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
    compared, steps = 0, []
    for number in run.steps:
        step = run.step(number)
        aligned = _rollout_pairs(step)
        if not aligned:
            continue
        steps.append(number)
        compared += len(aligned)
        tolerances = _rollout_tolerances(references)
        found = [(p, _difference(number, p, tolerances(p))) for p in aligned if _is_beyond(tolerances, p)]
        if found:
            cause = explain_rollout(found[0][0], Side(run, step))
            shown = _by_module(difference for _, difference in found)
            return Comparison(f"{path} (rollout)", f"{path} (training)", tuple(steps), compared, shown, cause)
    if not steps:
        raise RecordingError(
            f"{path} has no step in which tokens are sampled by the model's own `generate` and then trained on. "
            "Record a step of GRPO or RLOO with a rollout, without vLLM"
        )
    return Comparison(f"{path} (rollout)", f"{path} (training)", tuple(steps), compared)


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
        for number in reference.steps:
            for pair in _rollout_pairs(reference.step(number)):
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


def _beyond(number: int, aligned: Iterable[Pair], tolerances: Tolerances) -> Iterable[tuple[Pair, Difference]]:
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
            yield pair, _difference(number, pair, tolerances(pair))
    for pair in () if any_found else later:
        yield pair, _difference(number, pair, tolerances(pair))


def _difference(number: int, pair: Pair, noise: float) -> Difference:
    event = pair.first
    named = {storage.GRADIENT: f"gradient of {event.slot.removesuffix('.grad')}", storage.PRE: f"input {event.slot}",
             storage.TOKEN_PRE: f"input {event.slot}", storage.STATE: f"optimizer state {event.slot}",
             storage.UPDATED: f"updated {event.slot}"}  # fmt: skip
    value = named.get(event.kind, event.slot)
    return Difference(number, event.phase, event.name, value, ulp_distance_of(pair), noise)


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
    """Returns the numbers of the steps that both recordings have.

    Raises:
        RecordingError: If there are none.
    """
    both = tuple(number for number in first.steps if number in second.steps)
    if not both:
        raise RecordingError(
            f"{first.path} has the steps {_listed(first)} and {second.path} has {_listed(second)}: none in common. "
            f"Record the second run with record_steps: [{next(iter(first.steps))}]"
        )
    return both


def _listed(recording: Recording) -> str:
    return ", ".join(map(str, list(recording.steps)[:8]))

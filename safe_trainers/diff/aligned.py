"""Aligns the events of two recordings of a step by module, call and slot."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from . import storage
from .digest import Digest, joined_hash
from .names import fused_parts, pairs
from .storage import Event, Recording, Step


PARAMETERS = frozenset({storage.WEIGHT, storage.BUFFER, storage.DERIVED, storage.STATE, storage.UPDATED})
TOKENS = frozenset({storage.TOKEN, storage.TOKEN_PRE})

Key = tuple[str, str, str, int | str, str]
"""Phase, kind, name, call (of a token its key) and slot."""


@dataclass
class Side:
    """One recording of a step, with its events by place.

    Attributes:
        recording: The recording.
        step: The step.
        settings: Settings by module.
        of: Events by phase, kind, name and call.
    """

    recording: Recording
    step: Step
    settings: dict[str, dict[str, object]] = field(init=False)
    of: dict[tuple[str, str, str, int], list[Event]] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = self.recording.settings(self.step)
        self.of = defaultdict(list)
        for event in self.step.events:
            self.of[event.phase, event.kind, event.name, event.call].append(event)

    def events(self, phase: str, kind: str, name: str, call: int = 0) -> list[Event]:
        """The events of a place; empty if there are none."""
        return self.of.get((phase, kind, name, call), [])


@dataclass(frozen=True)
class Pair:
    """The same value in two recordings.

    Attributes:
        key: Its place, with the names of the first recording.
        first: The event of the first recording.
        second: The event of the second recording.
    """

    key: Key
    first: Event
    second: Event


def key_of(event: Event) -> Key:
    """Returns the place of an event."""
    call = event.extra if event.kind in TOKENS else event.call
    return event.phase, event.kind, event.name, call, event.slot


def align(first: Step, second: Step, phases: Mapping[str, str] | None = None) -> list[Pair]:
    """Aligns two recordings of a step.

    Args:
        first: One recording.
        second: The other.
        phases: The phase in the second recording of each phase of the first; by default the same.

    Returns:
        The values that both have, in the order of the first recording.
    """
    chosen = {phase: phase for phase in storage.PHASES} if phases is None else phases
    mine, theirs = _valued(first.events, chosen), _valued(second.events, chosen.values())
    rename = _renamed(theirs, mine)
    known = {key: event for key, event in _keyed(_with_joined(theirs, mine), rename, phases is None)}
    found = []
    for key, event in _keyed(_with_joined(mine, theirs), lambda event: event, phases is None):
        other = known.get((chosen[key[0]], *key[1:]))
        if other is not None:
            found.append(Pair(key, event, other))
    return found


def _keyed(events: Iterable[Event], rename: Callable[[Event], Event], repeats: bool) -> Iterator[tuple[Key, Event]]:
    """Yields events by place; a token that several sequences of a batch have counts once, or by its order."""
    seen: Counter[Key] = Counter()
    for event in events:
        key = key_of(rename(event))
        seen[key] += 1
        if seen[key] == 1:
            yield key, event
        elif repeats and event.kind in TOKENS:
            yield (*key[:3], f"{key[3]} {seen[key]}", key[4]), event


def _valued(events: Iterable[Event], phases: Iterable[str]) -> list[Event]:
    kept = frozenset(phases)
    return [event for event in events if event.value is not None and event.phase in kept]


def _renamed(theirs: list[Event], mine: list[Event]) -> Callable[[Event], Event]:
    """Makes the function that gives an event of the second recording the name that it has in the first."""

    def full(event: Event) -> str:
        return f"{event.name}.{event.slot.partition('/')[0].removesuffix('.grad')}"

    modules = pairs((e.name for e in theirs if not _is_parameter(e)), (e.name for e in mine if not _is_parameter(e)))
    weights = pairs((full(e) for e in theirs if _is_parameter(e)), (full(e) for e in mine if _is_parameter(e)))

    def rename(event: Event) -> Event:
        if _is_parameter(event):
            return event._replace(name=weights.get(full(event), full(event)).rpartition(".")[0])
        return event._replace(name=modules.get(event.name, event.name))

    return rename


def _is_parameter(event: Event) -> bool:
    return event.kind in PARAMETERS or (event.kind == storage.GRADIENT and event.slot.endswith(".grad"))


def _with_joined(events: list[Event], others: list[Event]) -> list[Event]:
    """Adds the values of projections that are fused in the other recording, after those of their parts."""
    fused = {event.name for event in others if fused_parts(event.name)} - {event.name for event in events}
    parts = {part: (name, place) for name in fused for place, part in enumerate(fused_parts(name))}
    held: dict[Key, dict[int, Event]] = defaultdict(dict)
    made = []
    for event in events:
        made.append(event)
        if event.name not in parts or event.kind in TOKENS:
            continue
        name, place = parts[event.name]
        members = held[event.phase, event.kind, name, event.call, event.slot]
        members[place] = event
        if len(members) == len(fused_parts(name)):
            made.append(_fused(name, [members[place] for place in sorted(members)]))
    return made


def _fused(name: str, members: list[Event]) -> Event:
    """The value of a fused projection."""
    digests = [event.value for event in members if event.value is not None]
    if members[0].kind == storage.PRE:  # the parts have the same input
        return members[0]._replace(name=name)
    rows = _is_parameter(members[0]) and len(digests[0].shape) > 1
    return members[0]._replace(name=name, value=_concatenated(digests, rows))


def _concatenated(digests: list[Digest], rows: bool) -> Digest:
    axis = 0 if rows else -1
    sizes = [digest.shape[axis] for digest in digests]
    shape = list(digests[0].shape)
    shape[axis] = sum(sizes)
    return Digest(
        digests[0].dtype, tuple(shape), joined_hash([digest.hash for digest in digests], sizes, rows),
        max(digest.largest for digest in digests), sum(digest.not_finite for digest in digests),
        np.zeros(0, np.float32),
    )  # fmt: skip

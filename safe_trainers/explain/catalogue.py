"""The catalogue of errors that users paste: those of other packages, and every one of our own.

The errors of other packages are in known_errors.toml. Our own are built from `REFUSALS`, `WARNINGS` and the error
tree, so that a new refusal is in the catalogue as soon as it exists.
"""

import re
import string
from functools import cache
from typing import NamedTuple

from ..core import errors
from ..core.errors import PrecisionError, SafeTrainersError
from ..core.messages import WARNINGS, Finding
from ..core.refusals import REFUSALS
from .entry import ANY, Entry, Kind, squeeze
from .known_errors import upstream_entries


OURS = "safe-trainers"
"""The package of our own entries."""

_IN_BRACKETS = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)+)\]")
_MIN_LENGTH = 30
"""Characters, without white space, that a part of our own message needs to identify it."""


class Hit(NamedTuple):
    """One match of an entry in a log without white space.

    Attributes:
        entry: The entry.
        start: Its first character.
        end: One past its last character.
    """

    entry: Entry
    start: int
    end: int


@cache
def own_entries() -> dict[str, Entry]:
    """Returns the errors of this package by id: its refusals, its warnings, and its other error classes."""
    found = [_from_finding(finding, "error") for finding in REFUSALS.values()]
    found += [_from_finding(finding, "warning") for finding in WARNINGS.values()]
    for error in vars(errors).values():
        is_ours = isinstance(error, type) and issubclass(error, SafeTrainersError)
        if is_ours and error is not SafeTrainersError and not issubclass(error, PrecisionError):
            found.append(_from_class(error))
    return {entry.id: entry for entry in found}


@cache
def entries() -> dict[str, Entry]:
    """Returns the whole catalogue by id."""
    return upstream_entries() | own_entries()


def hits(squeezed: str) -> list[Hit]:
    """Finds the messages of the catalogue in a log.

    Args:
        squeezed: The log without white space (`squeeze`).

    Returns:
        The matches in their order, without those that lie inside another match.
    """
    found = [Hit(entry, *place) for entry in upstream_entries().values() for place in entry.places(squeezed)]
    ours = own_entries()
    found += [
        Hit(ours[match[1]], match.start(), match.end())
        for match in _IN_BRACKETS.finditer(squeezed)
        if match[1] in ours
    ]
    with_id = {hit.entry.id for hit in found}
    # A message that was pasted without its id is found by its words.
    found += [
        Hit(entry, *place) for entry in ours.values() if entry.id not in with_id for place in entry.places(squeezed)
    ]
    return _outermost(found)


def readable(template: str) -> str:
    """Returns a finding's template with `ANY` in place of its fields."""
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return template.replace("!r}", "}").format(**dict.fromkeys(names, ANY))


def _from_finding(finding: Finding, kind: Kind) -> Entry:
    """Makes the entry of a refusal or warning, which is recognised by the longest fixed part of its message."""
    why, fix = readable(finding.why), readable(finding.fix)
    parts = [part.strip() for part in why.split(ANY) if len(squeeze(part)) >= _MIN_LENGTH]
    return Entry(
        finding.id,
        OURS,
        tuple(sorted(parts, key=len)[-1:]),
        why if parts else "see its message.",
        "the line at the end of its message" if fix == ANY else fix,
        kind=kind,
    )


def _from_class(error: type[SafeTrainersError]) -> Entry:
    """Makes the entry of an error class, with the first line of its docstring as the cause."""
    summary = (error.__doc__ or "").strip().splitlines()[0]
    return Entry(
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", error.__name__).lower(),
        OURS,
        (f"{error.__module__}.{error.__name__}:",),
        summary[:1].lower() + summary[1:],
        "the line at the end of its message",
    )


def _outermost(found: list[Hit]) -> list[Hit]:
    """Removes matches that are inside another match, such as a general message inside a specific one."""
    kept: list[Hit] = []
    for hit in sorted(found, key=lambda hit: (hit.start, -hit.end)):
        if not kept or hit.end > kept[-1].end or (hit.start, hit.end) == kept[-1][1:]:
            kept.append(hit)
    return kept

"""The catalogue of error texts that users paste: those of the packages below, and every one of our own.

The foreign ones are data (catalogue_torch.py, catalogue_stack.py). Ours are made from `REFUSALS`, `WARNINGS` and the
error tree, so that a new refusal is in the catalogue as soon as it exists.
"""

import re
import string
from functools import cache
from typing import NamedTuple

from . import catalogue_stack, catalogue_torch, errors
from .catalogue_entry import ANY, Entry, squeeze
from .errors import PrecisionError, SafeTrainersError
from .findings import REFUSALS, WARNINGS, Finding


OURS = "safe-trainers"
"""The package of our own entries."""

FOREIGN = {entry.id: entry for entry in (*catalogue_torch.ENTRIES, *catalogue_stack.ENTRIES)}
"""The texts of other packages, by id."""

_IN_BRACKETS = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)+)\]")
_TELLING = 30
"""Characters, without white space, from which on a part of our own text says which error it is."""


class Hit(NamedTuple):
    """One place where an entry's text stands.

    Attributes:
        entry: The entry.
        start: First character, in text without white space.
        end: The one after its last.
    """

    entry: Entry
    start: int
    end: int


@cache
def own_entries() -> dict[str, Entry]:
    """The texts of this package by id: its refusals, its warnings, and its errors that are neither."""
    found = [_of_finding(finding, "error") for finding in REFUSALS.values()]
    found += [_of_finding(finding, "warning") for finding in WARNINGS.values()]
    for error in vars(errors).values():
        is_ours = isinstance(error, type) and issubclass(error, SafeTrainersError)
        if is_ours and error is not SafeTrainersError and not issubclass(error, PrecisionError):
            found.append(_of_class(error))
    return {entry.id: entry for entry in found}


@cache
def entries() -> dict[str, Entry]:
    """The whole catalogue by id."""
    return FOREIGN | own_entries()


def hits(squeezed: str) -> list[Hit]:
    """Where the texts of the catalogue stand.

    Args:
        squeezed: What to look through, without white space (`squeeze`).

    Returns:
        The places in their order; one that lies inside another of a longer text is left out.
    """
    found = [Hit(entry, *place) for entry in FOREIGN.values() for place in entry.places(squeezed)]
    ours = own_entries()
    found += [
        Hit(ours[match[1]], match.start(), match.end())
        for match in _IN_BRACKETS.finditer(squeezed)
        if match[1] in ours
    ]
    named = {hit.entry.id for hit in found}
    # Only part of one of our messages was pasted: its words say as much as its id.
    found += [
        Hit(entry, *place) for entry in ours.values() if entry.id not in named for place in entry.places(squeezed)
    ]
    return _outermost(found)


def readable(template: str) -> str:
    """A finding's template for people: what is filled in stands as `ANY`."""
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return template.replace("!r}", "}").format(**dict.fromkeys(names, ANY))


def _of_finding(finding: Finding, kind: str) -> Entry:
    why, fix = readable(finding.why), readable(finding.fix)
    parts = [part.strip() for part in why.split(ANY) if len(squeeze(part)) >= _TELLING]
    return Entry(
        finding.id,
        OURS,
        tuple(sorted(parts, key=len)[-1:]),
        why if parts else "what its message says.",
        "the line that its message ends with" if fix == ANY else fix,
        kind="warning" if kind == "warning" else "error",
    )


def _of_class(error: type[SafeTrainersError]) -> Entry:
    summary = (error.__doc__ or "").strip().splitlines()[0]
    return Entry(
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", error.__name__).lower(),
        OURS,
        (f"{error.__module__}.{error.__name__}:",),
        summary[:1].lower() + summary[1:],
        "the line that its message ends with",
    )


def _outermost(found: list[Hit]) -> list[Hit]:
    """Without those that lie inside another: a general text inside a special one."""
    kept: list[Hit] = []
    for hit in sorted(found, key=lambda hit: (hit.start, -hit.end)):
        if not kept or hit.end > kept[-1].end or (hit.start, hit.end) == kept[-1][1:]:
            kept.append(hit)
    return kept

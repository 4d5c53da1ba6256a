"""The catalogue of errors that users paste: those of other packages, and every one of our own.

The errors of other packages are in known_errors.toml and wordings.toml. Our own are built from `REFUSALS`, `WARNINGS`
and the error tree, so that a new refusal is in the catalogue as soon as it exists.

General entries explain families of messages, such as an attribute that an object does not have. Many of these are
messages of Python, which other programs raise too; so they are used only for a text that names this field.
"""

import re
import string
import tomllib
from collections.abc import Collection
from functools import cache
from importlib import resources
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

_SHARED_WORDS = ("python", "system", "network", "pip", "pillow")
"""Packages whose messages other fields have too."""

_SEARCHED = 200_000
"""Characters at the end of a text that are searched for words of the field."""
_WORDS_FILE = "words.toml"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Hit(NamedTuple):
    """One match of an entry in a log without white space.

    Attributes:
        entry: The entry.
        start: Its first character.
        end: One past its last character.
        fixed: The number of fixed characters in the message.
    """

    entry: Entry
    start: int
    end: int
    fixed: int


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


def hits(squeezed: str, general: Collection[Entry] = (), name: int = 0) -> list[Hit]:
    """Finds the messages of the catalogue in a log.

    Args:
        squeezed: The log without white space (`squeeze`).
        general: The general entries that are searched if no other entry matches (`families`).
        name: Characters at the beginning that are the name of an exception's class.

    Returns:
        The matches in their order, without those that lie inside another match. If none is the cause of an error, one
        match of a general entry too: that with the most fixed characters, where a family goes before a wording, and
        both before a family that matches only the class of the exception.
    """
    specific = [entry for entry in upstream_entries().values() if not entry.general]
    found = [Hit(entry, *place) for entry in specific for place in entry.places(squeezed)]
    ours = own_entries()
    found += [
        Hit(ours[match[1]], match.start(), match.end(), len(match[0]))
        for match in _IN_BRACKETS.finditer(squeezed)
        if match[1] in ours
    ]
    with_id = {hit.entry.id for hit in found}
    # A message that was pasted without its id is found by its words.
    found += [
        Hit(entry, *place) for entry in ours.values() if entry.id not in with_id for place in entry.places(squeezed)
    ]
    found = _outermost(found)
    if any(hit.entry.kind != "launcher" for hit in found):
        return found
    # What a launcher quotes is explained too.
    quoted = [Hit(entry, *place) for entry in general for place in entry.places(squeezed)]
    quoted = [hit for hit in quoted if not any(hit.start < other.end and other.start < hit.end for other in found)]
    if not quoted or (found and all(hit.entry.kind == "launcher" for hit in quoted)):
        return found
    best = max(
        quoted,
        key=lambda hit: (hit.end > name, hit.entry.level == "family", hit.entry.kind != "launcher", hit.fixed),
    )
    return sorted([*found, best], key=lambda hit: hit.start)


def families(text: str) -> list[Entry]:
    """Returns the general entries that are used for a text.

    Args:
        text: A message or a log, with the frames of its tracebacks.

    Returns:
        All of them if the text has a word of this field; else those whose messages no other field has.
    """
    end = text[-_SEARCHED:].lower()
    parts, words, names = _words_of_the_field()
    named = any(part in end for part in parts) or words.search(end) is not None
    named = named or not names.isdisjoint(_NAME.findall(end))
    return [
        entry
        for entry in upstream_entries().values()
        if entry.general and (named or (entry.level == "family" and entry.package not in _SHARED_WORDS))
    ]


@cache
def _words_of_the_field() -> tuple[list[str], re.Pattern[str], frozenset[str]]:
    """Returns what a text of this field contains: parts of words, a pattern of whole words, and names."""
    lists = tomllib.loads(resources.files(__package__).joinpath(_WORDS_FILE).read_text(encoding="utf-8"))
    either = {name: "|".join(map(re.escape, words)) for name, words in lists.items()}
    whole = (
        rf"(?<![a-z0-9])(?:{either['words']}|gpt[a-z0-9]{{0,9}}|[a-z0-9_]{{0,40}}(?:{either['endings']}))(?![a-z0-9])"
    )
    return lists["parts"], re.compile(rf"{whole}|'(?:{either['quoted']})'"), frozenset(lists["names"])


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
    """Removes matches that overlap one with more fixed characters, such as a general message inside a specific one."""
    kept: list[Hit] = []
    for hit in sorted(found, key=lambda hit: (hit.start, -hit.end)):
        if not kept or hit.start >= kept[-1].end or (hit.start, hit.end) == kept[-1][1:3]:
            kept.append(hit)
        elif hit.fixed > kept[-1].fixed:
            kept[-1] = hit
    return kept

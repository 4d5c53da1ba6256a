"""Reads known_errors.toml and wordings.toml, the errors of other packages."""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, get_args

from .entry import Case, Entry, Kind, Level


FILE = "known_errors.toml"
WORDINGS = "wordings.toml"

_REQUIRED = ("package", "messages", "cause", "fix")
_OPTIONAL = ("kind", "link", "level", "cases")


@cache
def upstream_entries() -> dict[str, Entry]:
    """Returns the errors of other packages by id."""
    here = resources.files(__package__)
    return {
        key: entry
        for name in (FILE, WORDINGS)
        for key, entry in parse_entries(here.joinpath(name).read_text(encoding="utf-8"), name).items()
    }


def parse_entries(toml: str, file: str = FILE) -> dict[str, Entry]:
    """Parses a table of errors.

    Args:
        toml: The content of a file like known_errors.toml.
        file: Its name, for the message of an error.

    Returns:
        The entries by id, in the order of the file.

    Raises:
        ValueError: If it is not TOML, or an entry is malformed; the message names the entry and the field.
    """
    try:
        tables = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    return {entry_id: _entry(entry_id, table, file) for entry_id, table in tables.items()}


def _entry(entry_id: str, table: Any, file: str) -> Entry:
    """Makes an entry, or raises a ValueError if it is malformed."""
    place = f"{file}, [{entry_id}]"
    _check(table, _REQUIRED, _OPTIONAL, place)
    for name, allowed in (("kind", get_args(Kind)), ("level", get_args(Level))):
        if table.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{place}: {name} must be one of {', '.join(allowed)}, got {table[name]!r}")
    prose = {name: _wrapped(table[name]) for name in ("cause", "fix")}
    cases = _cases(table, place)
    return Entry(entry_id, **{**table, **prose, "messages": tuple(table["messages"]), "cases": cases})


def _cases(table: dict[str, Any], place: str) -> tuple[Case, ...]:
    """Makes the cases of an entry or of a case, or raises a ValueError if one is malformed."""
    cases = table.get("cases", [])
    if not isinstance(cases, list):
        raise ValueError(f"{place}: cases must be a list of tables")
    place += ", cases"
    for case in cases:
        _check(case, ("cause", "fix"), ("evidence", "cases"), place)
    return tuple(
        Case(_wrapped(case["cause"]), _wrapped(case["fix"]), tuple(case.get("evidence", ())), _cases(case, place))
        for case in cases
    )


def _check(table: Any, required: Sequence[str], optional: Sequence[str], place: str) -> None:
    """Raises a ValueError if a table lacks a field, has another one, or has one of another type."""
    if not isinstance(table, dict):
        raise ValueError(f"{place}: must be a table")
    for name in required:
        if name not in table:
            raise ValueError(f"{place}: {name} is missing")
    for name, value in table.items():
        if name not in (*required, *optional):
            raise ValueError(f"{place}: {name} is not a field; expected {', '.join((*required, *optional))}")
        if name == "cases":
            continue
        is_list = name in ("messages", "evidence")
        strings = value if is_list else [value]
        if not isinstance(strings, list) or not strings or not all(isinstance(s, str) and s for s in strings):
            raise ValueError(f"{place}: {name} must be a non-empty {'list of strings' if is_list else 'string'}")


def _wrapped(text: str) -> str:
    """Returns a sentence in one line; long ones are wrapped in the file."""
    return " ".join(text.split())

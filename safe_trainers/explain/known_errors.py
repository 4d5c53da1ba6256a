"""Reads known_errors.toml, the errors of other packages."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any, get_args

from .entry import Entry, Kind


FILE = "known_errors.toml"

_REQUIRED = ("package", "messages", "cause", "fix")
_OPTIONAL = ("kind", "link", "general")


@cache
def upstream_entries() -> dict[str, Entry]:
    """Returns the errors of other packages by id."""
    return parse_entries(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def parse_entries(toml: str) -> dict[str, Entry]:
    """Parses a table of errors.

    Args:
        toml: The content of a file like known_errors.toml.

    Returns:
        The entries by id, in the order of the file.

    Raises:
        ValueError: If it is not TOML, or an entry is malformed; the message names the entry and the field.
    """
    try:
        tables = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{FILE} is not TOML: {error}") from error
    return {entry_id: _entry(entry_id, table) for entry_id, table in tables.items()}


def _entry(entry_id: str, table: Any) -> Entry:
    """Makes an entry, or raises a ValueError if it is malformed."""

    def malformed(problem: str) -> ValueError:
        return ValueError(f"{FILE}, [{entry_id}]: {problem}")

    if not isinstance(table, dict):
        raise malformed("must be a table")
    for name in _REQUIRED:
        if name not in table:
            raise malformed(f"{name} is missing")
    for name, value in table.items():
        if name not in (*_REQUIRED, *_OPTIONAL):
            raise malformed(f"{name} is not a field; expected {', '.join((*_REQUIRED, *_OPTIONAL))}")
        if name == "general":
            if not isinstance(value, bool):
                raise malformed("general must be true or false")
            continue
        strings = value if name == "messages" else [value]
        if not isinstance(strings, list) or not strings or not all(isinstance(s, str) and s for s in strings):
            raise malformed(f"{name} must be a non-empty {'list of strings' if name == 'messages' else 'string'}")
    if table.get("kind", "error") not in get_args(Kind):
        raise malformed(f"kind must be one of {', '.join(get_args(Kind))}, got {table['kind']!r}")
    # Long sentences are wrapped in the file.
    prose = {name: " ".join(table[name].split()) for name in ("cause", "fix")}
    return Entry(entry_id, **{**table, **prose, "messages": tuple(table["messages"])})

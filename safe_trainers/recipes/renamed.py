"""Keys that older recipes hold and the installed TRL does not have, each with its successor (renamed.toml)."""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import Place, Problem, leave_out, write, yaml_value


VALUE = "{value}"
"""Stands for the old value."""


@dataclass(frozen=True)
class Successor:
    """The successor of a key.

    Attributes:
        key: The key to write instead; `None` if there is none.
        value: The value to write.
        why: Why the key was replaced or removed.
    """

    key: str | None = None
    value: Any = VALUE
    why: str = ""

    @property
    def renamed(self) -> bool:
        """Whether only the name changed."""
        return self.key is not None and self.value == VALUE and not self.why


def _read() -> dict[str, Successor]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    made = {old: Successor(new) for old, new in content["renamed"].items()}
    made |= {old: Successor(**new) for old, new in content["replaced"].items()}
    return made | {old: Successor(why=why) for old, why in content["removed"].items()}


RENAMED: Mapping[str, Successor] = _read()
"""The outdated keys."""


def replacement(key: str, known: Collection[str]) -> str | None:
    """The key to write instead of an outdated one; `None` if the task has none.

    Args:
        key: The key.
        known: The keys of the task.
    """
    found = RENAMED.get(key, Successor()).key
    return found if found == "env" or found in known else None


def outdated(key: str, value: Any, known: Collection[str]) -> Problem | None:
    """The problem of an outdated key.

    Args:
        key: The key.
        value: Its value.
        known: The keys of the task.

    Returns:
        The problem, with the line to write; `None` if the key is not known to be outdated.
    """
    found, place = RENAMED.get(key), Place(key=key)
    if found is None:
        return None
    shown = yaml_value(value)
    old = value if len(shown) <= 60 else "..."
    why = found.why.replace(VALUE, shown if len(shown) <= 60 else "...")
    if found.key is None:
        return Problem(f"`{key}` was removed", why, leave_out(key), place=place)
    if replacement(key, known) is None:
        return Problem(f"`{key}` was removed, and this task has no key in its place", why, leave_out(key), place=place)
    verb = "renamed to" if found.renamed else "replaced by"
    return Problem(
        f"`{key}` was {verb} `{found.key}`", why, write(**{found.key: _filled(found.value, old)}), place=place
    )


def _filled(template: Any, value: Any) -> Any:
    """A template with the old value in it."""
    if isinstance(template, dict):
        return {key: _filled(item, value) for key, item in template.items()}
    if isinstance(template, list):
        return [_filled(item, value) for item in template]
    if not isinstance(template, str) or template == VALUE:
        return value if template == VALUE else template
    return template.replace(VALUE, str(value))

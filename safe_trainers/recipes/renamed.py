"""Keys of older recipes and of other projects that the installed TRL does not have, with successors (renamed.toml)."""

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
        chosen: The settings to write by the old value, in lower case.
        foreign: Whether TRL and transformers never had the key.
    """

    key: str | None = None
    value: Any = VALUE
    why: str = ""
    chosen: Mapping[str, Mapping[str, Any]] | None = None
    foreign: bool = False

    @property
    def renamed(self) -> bool:
        """Whether only the name changed."""
        return self.key is not None and self.value == VALUE and not self.why


def _read() -> dict[str, Successor]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    made = {old: Successor(new) for old, new in content["renamed"].items()}
    made |= {old: Successor(**new) for old, new in content["replaced"].items()}
    made |= {old: Successor(chosen=new) for old, new in content["chosen"].items()}
    made |= {old: Successor(why=why, foreign=True) for old, why in content["foreign"].items()}
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
    if found.chosen is not None:
        return _by_value(key, str(shown).lower(), found.chosen, known)
    if found.key is None:
        what = f"there is no key `{key}`" if found.foreign else f"`{key}` was removed"
        return Problem(what, why, leave_out(key), place=place)
    if value is None or (_is_off(value) and not _carries(found.value)):
        what = f"`{key}` was replaced by `{found.key}`, and {shown} is the default"
        return Problem(what, fix=leave_out(key), place=place)
    if replacement(key, known) is None:
        return Problem(f"`{key}` was removed, and this task has no key in its place", why, leave_out(key), place=place)
    verb = "renamed to" if found.renamed else "replaced by"
    return Problem(
        f"`{key}` was {verb} `{found.key}`", why, write(**{found.key: _filled(found.value, old)}), place=place
    )


def _by_value(key: str, value: str, chosen: Mapping[str, Mapping[str, Any]], known: Collection[str]) -> Problem:
    """The problem of a key whose successor depends on its value."""
    place, asked = Place(key=key), chosen.get(value)
    if asked is None:
        why = f"other projects have it, with the values {', '.join(chosen)}"
        return Problem(f"there is no key `{key}`", why, leave_out(key), place=place)
    settings = {name: setting for name, setting in asked.items() if name in known}
    if not settings:
        return Problem(f"there is no key `{key}`, and {value} is the default", fix=leave_out(key), place=place)
    names = " and ".join(f"`{name}`" for name in settings)
    return Problem(f"`{key}` was replaced by {names}", fix=write(**settings), place=place)


def _is_off(value: Any) -> bool:
    """Whether a value, of a recipe or of the command line, switches a feature off."""
    return not value or str(value).lower() in {"false", "no", "off", "none", "null", "0"}


def _carries(template: Any) -> bool:
    """Whether a template contains the old value."""
    if isinstance(template, dict):
        return any(map(_carries, template.values()))
    if isinstance(template, list):
        return any(map(_carries, template))
    return isinstance(template, str) and VALUE in template


def _filled(template: Any, value: Any) -> Any:
    """A template with the old value in it."""
    if isinstance(template, dict):
        return {key: _filled(item, value) for key, item in template.items()}
    if isinstance(template, list):
        return [_filled(item, value) for item in template]
    if not isinstance(template, str) or template == VALUE:
        return value if template == VALUE else template
    return template.replace(VALUE, str(value))

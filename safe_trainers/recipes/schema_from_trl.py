"""Writes the JSON schemas of the installed TRL: `python -m safe_trainers.recipes.schema_from_trl`, or `make schema`.

The same dataclasses feed the parser (`keys.recipe_classes`): after adding a key to one of them, run this once.
"""

import dataclasses
import enum
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from ..core.dtypes import AUTO, SHORT
from ..core.versions import stable_tasks
from ..data.images import MODES
from ..policy.settings import ACCEPTED, ADAPTER_DTYPES, ROLLOUT_COMPUTE
from .accepted_values import EXAMPLES, choices_of, entries_of
from .keys import recipe_classes
from .ranges import RANGES
from .schema import (
    BOOLEAN,
    FILES_OR_MAPPINGS,
    FOLDER,
    INTEGER,
    LAUNCH,
    LIST,
    MAPPING,
    NULL,
    NUMBER,
    OPEN,
    OWNER,
    SINGLE,
    STRING,
    VERSIONS,
    Key,
    Schema,
)


DIALECT = "https://json-schema.org/draft/2020-12/schema"

ALSO = {"scale_rewards": (BOOLEAN,), "resume_from_checkpoint": (BOOLEAN,), "fsdp": (BOOLEAN, LIST)}
"""Types that a key accepts according to its documentation or its code, but not to its annotation."""

ITEMS: Mapping[str, dict[str, Any]] = {"fsdp": {"type": STRING}}
"""The items of lists that annotations do not name."""

UPSTREAM: Mapping[str, tuple[str, ...]] = {
    "include_num_input_tokens_seen": ("no",),  # TRL's parser reads all else as true or false
    "pad_to_multiple_of": ("auto",),
}
"""Strings that keys of other types accept too, according to their documentation."""


def _spellings(dtypes: typing.Iterable[str]) -> tuple[str, ...]:
    """The spellings of dtypes that `parse_dtype` reads."""
    return tuple(
        spelling
        for dtype in dtypes
        for spelling in ((dtype,) if dtype == AUTO else (SHORT[dtype], dtype, f"torch.{dtype}"))
    )


CHOICES: Mapping[str, tuple[str, ...]] = {
    **UPSTREAM,
    **{name: accepts.values for name, accepts in ACCEPTED.items() if isinstance(accepts.values, tuple)},
    "rollout_compute": ROLLOUT_COMPUTE,
    "adapter_dtype": _spellings(ADAPTER_DTYPES),
    "precision": _spellings((AUTO, *SHORT)),
    **dict.fromkeys(("save_dtype", "bnb_4bit_compute_dtype"), _spellings(SHORT)),
    "image_mode": MODES,
}
"""The strings that keys accept, where their annotations do not name them."""

LENGTHS = {"image_resize": 2}
"""The lengths of lists, where their annotations do not name them."""

_TYPES = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: STRING, type(None): NULL, dict: MAPPING}

ENV = {
    "type": MAPPING,
    "additionalProperties": {"type": [STRING, NUMBER, BOOLEAN]},
    "description": "Environment variables that tune the run; the environment wins over them.",
}
"""The key of environment variables, which no dataclass has."""


@dataclasses.dataclass
class _Hint:
    """The content of an annotation.

    Attributes:
        types: JSON types, in their order.
        choices: The strings that it names.
        items: The schema of the items of a list.
        length: The length of a list.
    """

    types: list[str] = dataclasses.field(default_factory=list)
    choices: list[str] = dataclasses.field(default_factory=list)
    items: dict[str, Any] | None = None
    length: int | None = None


def live_schema(task: str) -> Schema:
    """The keys of a task in the installed packages.

    Args:
        task: One of `TASKS`.
    """
    return Schema.of(task, json_schema(task))


def json_schema(task: str) -> dict[str, Any]:
    """The JSON schema of a task for the installed packages.

    Args:
        task: One of `TASKS`.
    """
    properties: dict[str, Any] = {"env": ENV, **{name: _launch_property(key) for name, key in LAUNCH.items()}}
    for cls in recipe_classes(task):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.init:
                properties[field.name] = _property(cls, field, _read(hints[field.name]))
    return {
        "$schema": DIALECT,
        "title": f"A recipe for safe-trainers {task}",
        VERSIONS: {package: metadata.version(package) for package in ("trl", "transformers")},
        "type": MAPPING,
        "additionalProperties": False,
        "properties": dict(sorted(properties.items())),
    }


def to_json(schema: Mapping[str, Any]) -> str:
    """The content of a schema file.

    Args:
        schema: A JSON schema.
    """
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Writes the schemas of the installed packages.

    Returns:
        The exit status.
    """
    folder = FOLDER / f"trl-{metadata.version('trl')}"
    folder.mkdir(parents=True, exist_ok=True)
    for task in stable_tasks():
        path = folder / f"{task}.json"
        path.write_text(to_json(json_schema(task)), encoding="utf-8")
        sys.stdout.write(f"{path}\n")
    return 0


def _property(cls: type, field: Any, hint: _Hint) -> dict[str, Any]:
    name, default = field.name, _default(field)
    choices = list(field.metadata.get("choices") or CHOICES.get(name) or choices_of(cls, field) or hint.choices)
    if choices and isinstance(default, str) and default not in choices:
        choices = [default, *choices]
    kinds = [*hint.types, *(kind for kind in ALSO.get(name, ()) if kind not in hint.types)]
    items, length = ITEMS.get(name, hint.items), LENGTHS.get(name, hint.length)
    has_strings = STRING in kinds or (items or {}).get("type") == STRING
    if name in ITEMS:  # their strings hold several words, which a rule checks
        has_strings = False
    made = property_of(name, kinds, choices if has_strings else [], items, length)
    if default is not None or NULL in kinds:
        made["default"] = default
    if entries_of(name):
        made["properties"] = {entry: {} for entry in entries_of(name)}
    if name in EXAMPLES:
        made["examples"] = list(EXAMPLES[name])
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base)).__module__
    return made | _described(field.metadata.get("help", "")) | {OWNER: owner.partition(".")[0]}


def _launch_property(key: Key) -> dict[str, Any]:
    return property_of(key.name, list(key.types), []) | {"default": None} | _described(key.help)


def _described(text: object) -> dict[str, str]:
    help_text = " ".join(str(text).replace("%%", "%").split())
    return {"description": help_text} if help_text else {}


def property_of(
    name: str, kinds: list[str], choices: list[str], items: dict[str, Any] | None = None, length: int | None = None
) -> dict[str, Any]:
    """The property of a key, without its default and its description.

    Args:
        name: The key.
        kinds: The JSON types that it accepts; none if it accepts an instance of a class only.
        choices: The strings that it accepts; none for any.
        items: The schema of the items of its list.
        length: The length of its list.
    """
    kinds = kinds or [NULL]
    single = items is not None and length is None and items["type"] not in kinds
    if items is not None and single:
        kinds = [*kinds, items["type"]]
    made: dict[str, Any] = {}
    if choices and (name in OPEN or not {INTEGER, LIST}.isdisjoint(kinds)):
        # An enum would have to name every integer or list, or every string that fits the pattern.
        made["anyOf"] = [{"type": kind} | ({"enum": choices} if kind == STRING else {}) for kind in kinds]
        if name in OPEN:
            made["anyOf"].append({"type": STRING, "pattern": OPEN[name].pattern})
    else:
        made["type"] = kinds[0] if len(kinds) == 1 else kinds
        if choices:
            made["enum"] = [*choices, *([True, False] if BOOLEAN in kinds else []), *([None] if NULL in kinds else [])]
    if MAPPING in kinds and STRING in kinds and name not in FILES_OR_MAPPINGS:
        made["pattern"] = r"^\s*\{"  # a mapping as JSON
    if items is None:
        return made | _limits(name)
    if choices and items["type"] == STRING:
        items = items | {"enum": [choice for choice in choices if choice]}
    lengths = {"minItems": length, "maxItems": length} if length is not None else {}
    return made | {"items": items | _limits(name)} | lengths | ({SINGLE: True} if single else {})


def _limits(name: str) -> dict[str, float]:
    """The range of a key, in the words of JSON Schema."""
    accepted = RANGES.get(name)
    if accepted is None:
        return {}
    ends = {"low": ("exclusiveMinimum", "minimum"), "high": ("exclusiveMaximum", "maximum")}
    return {
        ends[end][0 if end in accepted.excluded else 1]: value
        for end, value in (("low", accepted.low), ("high", accepted.high))
        if math.isfinite(value)
    }


def _read(hint: Any) -> _Hint:
    """Reads an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        made = _Hint()
        for part in map(_read, arguments):
            made.types += [kind for kind in part.types if kind not in made.types]
            made.choices += part.choices
            made.items, made.length = made.items or part.items, made.length or part.length
        return made
    if origin is typing.Literal:
        kinds = list(dict.fromkeys(_TYPES[type(value)] for value in arguments))
        return _Hint(kinds, [value for value in arguments if isinstance(value, str)])
    if origin in (list, tuple):
        items = _items(arguments[0])
        return _Hint([LIST], items.get("enum", []), items, len(arguments) if origin is tuple else None)
    plain = origin or hint
    if isinstance(plain, type) and issubclass(plain, enum.Enum):
        return _Hint([STRING], [member.value for member in plain])
    return _Hint([_TYPES[plain]] if plain in _TYPES else [])


def _items(hint: Any) -> dict[str, Any]:
    """The schema of the items of a list; a dataclass is a mapping of its fields, an enum one of its values."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = {field.name: _property(hint, field, _read(hints[field.name])) for field in dataclasses.fields(hint)}
        return {"type": MAPPING, "properties": fields, "additionalProperties": False}
    made = _read(hint)
    return {"type": made.types[0]} | ({"enum": made.choices} if made.choices else {})


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None if field.default is dataclasses.MISSING else field.default
    return value.value if isinstance(value, enum.Enum) else list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    sys.exit(main())

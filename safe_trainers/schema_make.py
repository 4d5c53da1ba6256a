"""Writes the schema of the installed TRL: `python -m safe_trainers.schema_make`, or `make schema`.

The same dataclasses feed the parser (`recipes.recipe_classes`), so a key that is added to one of them needs no more
than running this once.
"""

import dataclasses
import enum
import inspect
import sys
import types
import typing
from importlib import metadata
from typing import Any

from .pictures import MODES
from .recipes import recipe_classes
from .schema import BOOLEAN, FOLDER, INTEGER, MAPPING, NULL, NUMBER, OBJECT, STRING, TASKS, Key, Schema, to_json


ALSO = {"scale_rewards": (BOOLEAN,), "resume_from_checkpoint": (BOOLEAN,)}
"""Types that a key takes beside those of its annotation, as its documentation says."""

CHOICES: dict[str, tuple[str, ...]] = {
    "debug": ("", "underflow_overflow", "tpu_metrics_debug"),
    "image_mode": MODES,
    "include_num_input_tokens_seen": ("no",),  # TRL's parser reads all else as true or false
    "pad_to_multiple_of": ("auto",),
    "precision_report": ("log", "file", "off"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "rollout_compute": ("training", "stock"),
    "scale_rewards": ("group", "batch", "none"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "vllm_mode": ("colocate", "server"),
}
"""Texts that are compared with without the field saying so; a test finds TRL's in its source."""

LENGTHS = {"image_resize": 2}
"""Lengths of lists, where the annotation does not say so."""

_PLAIN = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: STRING, type(None): NULL, dict: MAPPING}


def live_schema(task: str) -> Schema:
    """The schema of a task from the installed packages.

    Args:
        task: One of `TASKS`.
    """
    keys: dict[str, Key] = {}
    for cls in recipe_classes(task):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.init:
                keys[field.name] = _key(field, hints[field.name], _home(cls, field.name))
    versions = {package: metadata.version(package) for package in ("trl", "transformers")}
    return Schema(task, dict(sorted(keys.items())), versions)


def make() -> str:
    """The content of the schema file of the installed TRL."""
    return to_json({task: live_schema(task) for task in TASKS})


def main() -> int:
    """Writes it.

    Returns:
        The exit status.
    """
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"trl-{metadata.version('trl')}.json"
    path.write_text(make(), encoding="utf-8")
    sys.stdout.write(f"{path}\n")
    return 0


def _key(field: Any, hint: Any, source: str) -> Key:
    kinds, choices = _kinds(hint)
    own = CHOICES.get(field.name, ()) if STRING in kinds else ()
    accepted = tuple(field.metadata.get("choices") or own or choices) or None
    pair = _tuple(hint)
    length = LENGTHS.get(field.name) if pair is None else len(typing.get_args(pair))
    kinds += tuple(kind for kind in ALSO.get(field.name, ()) if kind not in kinds)
    return Key(
        name=field.name,
        types=kinds,
        default=_default(field),
        source=source,
        choices=accepted,
        length=length,
        fields=_fields(hint),
        help=" ".join(str(field.metadata.get("help", "")).replace("%%", "%").split()),
    )


def _home(cls: type, name: str) -> str:
    """The dataclass that a field is written in, of those that a class inherits from."""
    return next(base.__name__ for base in cls.__mro__ if name in inspect.get_annotations(base))


def _kinds(hint: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The types that an annotation stands for, and the choices it names."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds: list[str] = []
        choices: list[Any] = []
        for part in arguments:
            found, named = _kinds(part)
            kinds += [kind for kind in found if kind not in kinds]
            choices += [choice for choice in named if isinstance(choice, str)]
        return tuple(kinds), tuple(choices)
    if origin is typing.Literal:
        return tuple(dict.fromkeys(_PLAIN[type(value)] for value in arguments)), arguments
    if origin in (list, tuple):
        return (f"list[{_item(arguments[0])}]",), ()
    if isinstance(origin or hint, type) and issubclass(origin or hint, enum.Enum):
        return (STRING,), tuple(member.value for member in hint)
    return (_PLAIN.get(origin or hint, OBJECT),), ()


def _item(hint: Any) -> str:
    """The type of the items of a list; a dataclass is written as its fields, and an enum as its value."""
    if dataclasses.is_dataclass(hint):
        return MAPPING
    return _kinds(hint)[0][0]


def _fields(hint: Any) -> tuple[str, ...] | None:
    """The keys of each mapping in a list of a dataclass's fields."""
    made = next((part for part in typing.get_args(hint) if dataclasses.is_dataclass(part)), None)
    listed = typing.get_origin(hint) is list and made is not None
    return tuple(field.name for field in dataclasses.fields(made)) if listed and made is not None else None


def _tuple(hint: Any) -> Any:
    parts = [hint, *typing.get_args(hint)]
    return next((part for part in parts if typing.get_origin(part) is tuple), None)


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None if field.default is dataclasses.MISSING else field.default
    return value.value if isinstance(value, enum.Enum) else list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    sys.exit(main())

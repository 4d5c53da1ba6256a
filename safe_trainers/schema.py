"""The keys of a recipe as plain data: what each takes, read from a file that was made from TRL's own dataclasses.

TRL costs seconds to import, and checking a recipe should not: `schema_make` writes down the fields of the dataclasses
that the parser is built from, one file per version of TRL, and this module reads them.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from .errors import RecipeError, hint, nearest


FOLDER = Path(__file__).parent / "_schema"
"""Where the files are: `trl-<version>.json`."""

TASKS = ("grpo", "rloo", "sft", "reward")
"""The tasks of the command line."""

BOOLEAN, INTEGER, NUMBER, STRING, MAPPING, NULL = "boolean", "integer", "number", "string", "mapping", "null"
OBJECT = "object"
"""The type of a field that takes an instance of a class, which no recipe can hold."""

IN_WORDS = {
    BOOLEAN: "true or false",
    INTEGER: "a whole number",
    NUMBER: "a number",
    STRING: "text",
    MAPPING: "`key: value` pairs",
    "list[string]": "a list of texts",
    "list[integer]": "a list of whole numbers",
    "list[number]": "a list of numbers",
    "list[mapping]": "a list of `key: value` pairs",
}
FILES_OR_MAPPINGS = frozenset({"deepspeed", "fsdp_config", "accelerator_config"})
"""Keys that take a mapping, or the name of a file that holds one."""

_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+(e[-+]?\d+)?|[-+]?\d[\d_]*\.?(e[-+]?\d+)?", re.IGNORECASE)
_TRUTH = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}


class UnfitValueError(Exception):
    """A value that its key does not take.

    Args:
        text: What was written and what is taken.
        fix: The line to write, `None` where it cannot be said.
    """

    def __init__(self, text: str, fix: str | None = None) -> None:
        super().__init__(text)
        self.text, self.fix = text, fix


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: Its name.
        types: What it takes: keys of `IN_WORDS`, or `"object"`.
        default: Its value where it is not written.
        source: The dataclass that it comes from.
        choices: The values it takes, `None` where any of its types will do.
        length: Length of its list, `None` where any will do.
        fields: The keys of each mapping in its list, `None` where any will do.
        help: What it is for, in the words of its dataclass.
    """

    name: str
    types: tuple[str, ...]
    default: Any = None
    source: str = ""
    choices: tuple[Any, ...] | None = None
    length: int | None = None
    fields: tuple[str, ...] | None = None
    help: str = ""

    @property
    def taken(self) -> str:
        """What it takes, in words."""
        if self.choices is not None:
            shown = [str(choice) for choice in self.choices[:12] if choice]
            more = ["..."] if len(self.choices) > 12 else []
            others = [IN_WORDS[kind] for kind in self.types if kind in (BOOLEAN, INTEGER)]
            return " or ".join(["one of " + ", ".join([*shown, *more]), *others])
        return " or ".join(IN_WORDS[kind] for kind in self.types if kind in IN_WORDS) or "nothing a recipe can hold"

    @property
    def item(self) -> str | None:
        """The type of the items of its list, `None` where it takes no list."""
        lists = [kind for kind in self.types if kind.startswith("list[")]
        return lists[0][5:-1] if lists else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without what is left at its default."""
        kept = {name: value for name, value in asdict(self).items() if name != "name"}
        optional = {"choices": None, "length": None, "fields": None, "help": ""}
        return {name: value for name, value in kept.items() if name not in optional or value != optional[name]}


@dataclass(frozen=True)
class Schema:
    """The keys of a task.

    Attributes:
        task: Its name.
        keys: Its keys by name.
        versions: The versions of the packages it was made from: `{"trl": "1.16.0", "transformers": "5.23.0"}`.
    """

    task: str
    keys: Mapping[str, Key]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """The value of each key where nothing is written."""
        return {name: key.default for name, key in self.keys.items()}


def available() -> list[str]:
    """The versions of TRL that there is a schema for, the oldest first."""
    found = [path.stem.removeprefix("trl-") for path in FOLDER.glob("trl-*.json")]
    return sorted(found, key=Version)


def installed_trl() -> str | None:
    """The version of TRL that is installed, without importing it; `None` where there is none."""
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return None


def load(task: str, trl: str | None = None) -> Schema:
    """Reads the schema of a task.

    Args:
        task: One of `TASKS`.
        trl: A version of TRL; by default the one that is installed. Where there is no schema of just that version, the
            nearest older one is read, or the oldest; `Schema.versions` says which it was.

    Returns:
        The schema.

    Raises:
        RecipeError: If there is no such task, or the installation holds no schema.
    """
    if task not in TASKS:
        raise RecipeError(f"there is no task {task!r}: it is one of {', '.join(TASKS)}")
    known = available()
    if not known:
        raise RecipeError("this installation holds no schemas of recipes. Run: python -m safe_trainers.schema_make")
    wanted = Version(trl or installed_trl() or known[-1])
    older = [version for version in known if Version(version) <= wanted]
    return _read(older[-1] if older else known[0])[task]


def to_json(schemas: Mapping[str, Schema]) -> str:
    """The schemas of all tasks as a file; a key that is the same in all of them is written once.

    Args:
        schemas: By task.
    """
    tables = {task: {name: key.to_dict() for name, key in schema.keys.items()} for task, schema in schemas.items()}
    first = next(iter(tables.values()))
    common = {name: key for name, key in first.items() if all(t.get(name) == key for t in tables.values())}
    own = {task: {n: key for n, key in table.items() if n not in common} for task, table in tables.items()}
    content = {"versions": dict(next(iter(schemas.values())).versions), "common": common, "tasks": own}
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


@cache
def _read(version: str) -> dict[str, Schema]:
    content = json.loads((FOLDER / f"trl-{version}.json").read_text(encoding="utf-8"))
    made = {}
    for task, own in content["tasks"].items():
        keys = {name: _key(name, values) for name, values in sorted((content["common"] | own).items())}
        made[task] = Schema(task, keys, content["versions"])
    return made


def _key(name: str, values: Mapping[str, Any]) -> Key:
    made: dict[str, Any] = {k: tuple(v) if k in ("types", "choices", "fields") else v for k, v in values.items()}
    return Key(name, **made)


def convert(key: Key, value: Any, text: str | None = None) -> Any:
    """Brings a value of a file to the type that its key takes, where no meaning is lost by it.

    Text that YAML 1.1 does not read as a number (`1e-5`) is one; a whole number stands for a number; a single value
    for a list of one; the text of a number or a date for text.

    Args:
        key: The key.
        value: What YAML made of it.
        text: A scalar as it is written in the file.

    Returns:
        The value to hand on.

    Raises:
        UnfitValueError: If it is of another type, or none of the choices.
    """
    if key.types == (OBJECT,) or set(key.types) == {OBJECT, NULL}:
        if value is None and NULL in key.types:
            return None
        raise UnfitValueError(f"{key.name} takes an object, which a recipe cannot hold", f"drop `{key.name}`")
    if value is None:
        if NULL in key.types:
            return None
        raise UnfitValueError(
            f"{key.name} is null, and takes {key.taken}", f"drop the line for its default: {shown(key.default)}"
        )
    if isinstance(value, (list, tuple, set)):
        return _convert_list(key, value)
    for kind in key.types:
        made = _as(kind, value, text, key.choices)
        if made is not None:
            return _chosen(key, made[0])
    if key.item is not None and isinstance(value, dict) == (key.item == MAPPING):
        return _convert_list(key, [value], text)
    raise UnfitValueError(f"{key.name} is {shown(value)}, and takes {key.taken}", _fix(key, value))


def convert_words(key: Key, words: list[str]) -> Any:
    """Reads the words that follow `--key` on a command line; see `convert`.

    Args:
        key: The key.
        words: None for a bare `--key`.

    Raises:
        UnfitValueError: If they are not what it takes.
    """
    if not words:
        if BOOLEAN in key.types:
            return True
        raise UnfitValueError(f"--{key.name} needs {key.taken}")
    if len(words) > 1 and key.item is None:
        raise UnfitValueError(f"--{key.name} takes one value, and {' '.join(words)} are {len(words)}")
    if len(words) == 1:
        (word,) = words
        if word.lower() in {"none", "null"} and NULL in key.types and word not in (key.choices or ()):
            return word if STRING in key.types else None
        if BOOLEAN in key.types and word.lower() in _TRUTH and word not in (key.choices or ()):
            return _TRUTH[word.lower()]
        if MAPPING in key.types or key.item == MAPPING:
            return convert(key, _json(word))
        return convert(key, word, word)
    return convert(key, [_json(word) for word in words] if key.item == MAPPING else words)


def shown(value: Any) -> str:
    """A value as it stands in a message: YAML's spelling, and short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple, dict, set)):
        kinds = {dict: "`key: value` pairs", set: "a set"}
        return kinds.get(type(value), f"a list of {len(value)}")
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1] if isinstance(value, str) else ''}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _json(word: str) -> Any:
    if not word.lstrip().startswith(("{", "[")):
        return word
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _as(kind: str, value: Any, text: str | None, choices: tuple[Any, ...] | None) -> tuple[Any] | None:
    """The value as one of the types in a tuple, `None` where it is not of that type."""
    plain_number = _is_plain(value) and not isinstance(value, str)
    if kind == BOOLEAN:
        return (value,) if isinstance(value, bool) else None
    if kind in (INTEGER, NUMBER):
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            whole = re.fullmatch(r"[-+]?\d+", value.strip()) and len(value) < 19
            value, plain_number = (int(value) if whole else float(value)), True
        if kind == INTEGER:
            return (value,) if plain_number and isinstance(value, int) else None
        return (float(value),) if plain_number and abs(value) < 1e300 and math.isfinite(value) else None
    if kind == STRING:
        if isinstance(value, bool):  # `save_strategy: no`, which YAML 1.1 reads as false
            return (text,) if choices is not None and text in choices else None
        if isinstance(value, (dict, bytes)):
            return None
        return (value if isinstance(value, str) else text or str(value),)
    return (value,) if kind == MAPPING and isinstance(value, dict) else None


def _chosen(key: Key, value: Any) -> Any:
    if isinstance(value, str) and MAPPING in key.types:
        return _mapping_from(key, value)
    if key.choices is not None and isinstance(value, str) and value not in key.choices:
        accepted = [str(choice) for choice in key.choices]
        near = nearest(str(value), accepted)
        raise UnfitValueError(
            f"{key.name} is {shown(value)}, and takes {key.taken}",
            f"{key.name}: {near}" if near else None,
        )
    return value


def _mapping_from(key: Key, value: str) -> Any:
    """What a text stands for where `key: value` pairs are taken: JSON, or a file's name where the key takes one."""
    made = _json(value)
    if isinstance(made, dict):
        return made
    if key.name in FILES_OR_MAPPINGS and not value.lstrip().startswith(("{", "[")):
        return value
    example = "{dtype: bfloat16}" if key.name == "model_init_kwargs" else "{name: value}"
    raise UnfitValueError(f"{key.name} holds no `key: value` pairs", f"{key.name}: {example}")


def _convert_list(key: Key, values: Any, text: str | None = None) -> list[Any]:
    items = list(values)
    if key.item is None:
        raise UnfitValueError(
            f"{key.name} is a list of {len(items)}, and takes one value: {key.taken}",
            f"{key.name}: {items[0]}"
            if len(items) == 1 and len(shown(items[0])) <= 40 and _is_plain(items[0])
            else None,
        )
    made = []
    for item in items:
        found = None if item is None else _as(key.item, item, text, None)
        if found is None:
            raise UnfitValueError(f"{key.name} holds {shown(item)}, and takes {IN_WORDS[f'list[{key.item}]']}")
        wrong = [str(name) for name in item if name not in key.fields] if key.fields and isinstance(item, dict) else []
        if wrong:
            raise UnfitValueError(f"{key.name} has no {wrong[0]!r}{hint(nearest(wrong[0], key.fields or ()))}")
        made.append(found[0])
    if key.length is not None and len(made) != key.length:
        raise UnfitValueError(f"{key.name} is a list of {len(made)}, and takes {key.length} numbers")
    return made


def _fix(key: Key, value: Any) -> str | None:
    """The line that was probably meant."""
    if BOOLEAN in key.types and isinstance(value, str) and value.lower() in {*_TRUTH, "on", "off"}:
        return f"{key.name}: {shown(_TRUTH.get(value.lower(), value.lower() == 'on'))}"
    if BOOLEAN in key.types and value in (0, 1) and isinstance(value, int):
        return f"{key.name}: {shown(bool(value))}"
    if INTEGER in key.types and isinstance(value, float) and value.is_integer():
        return f"{key.name}: {int(value)}"
    if key.types[0] == STRING and isinstance(value, bool):
        return f'{key.name}: "{shown(value)}"'
    return None

"""The keys of a recipe as plain data, read from JSON Schema files: one per supported version of TRL and task.

TRL costs seconds to import, and checking a recipe should not: `schema_from_trl` writes the files from TRL's own
dataclasses, and this module reads them. Editors read the same files (`# yaml-language-server: $schema=...`).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..core.errors import Fix, Place, Problem, RecipeError, hint, leave_out, nearest, run_command, write, write_example
from ..core.tasks import TASKS


FOLDER = Path(__file__).parent / "_schema"
"""The folder of the files: `trl-<version>/<task>.json`."""

BOOLEAN, INTEGER, NUMBER, STRING, NULL = "boolean", "integer", "number", "string", "null"
LIST, MAPPING = "array", "object"
"""The types of JSON Schema."""

SINGLE = "x-single"
"""Marks a list for which a single value of its items' type may be written."""
OWNER = "x-owner"
"""Names the package that a key comes from: `trl`, `transformers` or `safe_trainers`."""
VERSIONS = "x-versions"
"""Holds the versions of the packages that a file was made from."""

IN_WORDS = {
    BOOLEAN: "true or false",
    INTEGER: "an integer",
    NUMBER: "a number",
    STRING: "a string",
    MAPPING: "`key: value` pairs",
}
_ITEMS = {STRING: "strings", INTEGER: "integers", NUMBER: "numbers", MAPPING: "`key: value` pairs"}
FILES_OR_MAPPINGS = frozenset({"deepspeed", "fsdp_config", "accelerator_config"})
"""Keys that accept a mapping, or the name of a file that holds one."""
OPEN: Mapping[str, re.Pattern[str]] = {"attn_implementation": re.compile("[/|:]")}
"""Patterns of strings that a key accepts beside its choices: the names of kernels on the hub."""
DTYPES = frozenset({"precision", "adapter_dtype", "save_dtype", "bnb_4bit_compute_dtype"})
"""Keys whose strings `parse_dtype` checks, with a refusal of its own."""

_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+(e[-+]?\d+)?|[-+]?\d[\d_]*\.?(e[-+]?\d+)?", re.IGNORECASE)
_TRUTH = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: Its name.
        types: The JSON types that it accepts. Empty if it accepts only an instance of a class, which no recipe holds.
        default: Its value if it is not written.
        choices: The strings that it accepts; `None` for any.
        item: The type of the items of its list; `None` if it accepts no list.
        length: The length of its list; `None` for any.
        fields: The keys of each mapping in its list; `None` for any.
        help: The description from its dataclass.
        entries: The known keys of its mapping, which may hold others; empty if none are known.
        examples: Strings with a meaning of their own, where any string is accepted.
        owner: The package that it comes from.
    """

    name: str
    types: tuple[str, ...]
    default: Any = None
    choices: tuple[str, ...] | None = None
    item: str | None = None
    length: int | None = None
    fields: tuple[str, ...] | None = None
    help: str = ""
    entries: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    owner: str = "safe_trainers"

    @classmethod
    def of(cls, name: str, content: Mapping[str, Any]) -> "Key":
        """The key that a property of a JSON schema describes.

        Args:
            name: Its name.
            content: The property, as `schema_from_trl` writes it.
        """
        types: dict[str, None] = {}
        choices: list[str] = []
        for part in content.get("anyOf", [content]):
            types |= dict.fromkeys([part["type"]] if isinstance(part["type"], str) else part["type"])
            choices += [choice for choice in part.get("enum", ()) if isinstance(choice, str)]
        items = content.get("items", {})
        item = items.get("type")
        if content.get(SINGLE):
            types.pop(item)
        fields = tuple(items["properties"]) if "properties" in items else None
        accepted = tuple(choices) if choices and name not in DTYPES else None
        return cls(
            name,
            tuple(types),
            content.get("default"),
            accepted,
            item,
            content.get("minItems"),
            fields,
            content.get("description", ""),
            tuple(content.get("properties", ())),
            tuple(choices if name in DTYPES else content.get("examples", ())),
            content.get(OWNER, "safe_trainers"),
        )

    @property
    def accepted(self) -> str:
        """A description of the accepted values, with at most 12 choices."""
        return self.describe(12)

    def describe(self, most: int | None = None) -> str:
        """Describes the accepted values.

        Args:
            most: The number of choices to name; by default all of them.
        """
        words = [IN_WORDS[kind] for kind in self.types if kind in IN_WORDS]
        if self.choices is not None:
            shown = [choice for choice in self.choices[:most] if choice]
            more = ["..."] if most is not None and len(self.choices) > most else []
            others = [IN_WORDS[kind] for kind in self.types if kind in (BOOLEAN, INTEGER)]
            others += ["a list of them"] if self.item is not None else []
            others += ["the name of a kernel on the hub"] if self.name in OPEN else []
            return " or ".join(["one of " + ", ".join([*shown, *more]), *others])
        if self.item is not None:
            words.append(f"a list of {f'{self.length} ' if self.length is not None else ''}{_ITEMS[self.item]}")
        return " or ".join(words)


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

    @classmethod
    def of(cls, task: str, content: Mapping[str, Any]) -> "Schema":
        """The keys that a JSON schema describes.

        Args:
            task: The task.
            content: The schema.
        """
        properties = {n: part for n, part in content["properties"].items() if n != "env" and n not in LAUNCH}
        return cls(task, {name: Key.of(name, part) for name, part in properties.items()}, content[VERSIONS])

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each key."""
        return {name: key.default for name, key in self.keys.items()}


LAUNCH: Mapping[str, Key] = {
    key.name: key
    for key in (
        Key("accelerate_config", (STRING, NULL), help="Launch config; `--accelerate_config` wins over it."),
        Key("num_processes", (INTEGER, NULL), help="Processes to launch; `--num_processes` wins over it."),
        Key("num_machines", (INTEGER, NULL), help="Machines of the run; `--num_machines` wins over it."),
        Key("machine_rank", (INTEGER, NULL), help="This machine's number, from 0; `--machine_rank` wins over it."),
        Key("main_process_ip", (STRING, NULL), help="Address of machine 0; `--main_process_ip` wins over it."),
        Key("main_process_port", (INTEGER, NULL), help="Port on machine 0; `--main_process_port` wins over it."),
    )
}
"""The keys that the launching command reads, as TRL's does. Launched processes ignore them."""


def available() -> list[str]:
    """The versions of TRL that have schemas, the oldest first."""
    return sorted((path.name.removeprefix("trl-") for path in FOLDER.glob("trl-*")), key=Version)


def installed(package: str = "trl") -> str | None:
    """The installed version of a package, without importing it; `None` if it is not installed.

    Args:
        package: Its name.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def path_of(task: str, trl: str | None = None) -> Path:
    """The schema file of a task.

    Args:
        task: One of `TASKS`.
        trl: A version of TRL; by default the installed one. Without a schema of exactly that version, the file
            is that of the nearest older one, or of the oldest. A trainer that became stable later has no older one.

    Returns:
        Its path.

    Raises:
        RecipeError: If the task does not exist, or the installation has no schemas.
    """
    if task not in TASKS:
        raise RecipeError(f"{task!r} is not a task; expected one of {', '.join(TASKS)}")
    files = {version: FOLDER / f"trl-{version}" / f"{task}.json" for version in available()}
    known = [version for version, file in files.items() if file.is_file()]
    if not known:
        fix = run_command("python -m safe_trainers.recipes.schema_from_trl")
        raise RecipeError(Problem("this installation has no schemas of recipes", fix=fix))
    wanted = Version(trl or installed() or known[-1])
    older = [version for version in known if Version(version) <= wanted]
    return files[older[-1] if older else known[0]]


def load(task: str, trl: str | None = None) -> Schema:
    """Reads the schema of a task.

    Args:
        task: One of `TASKS`.
        trl: A version of TRL; see `path_of`. `Schema.versions` has the version that was read.

    Returns:
        The schema.

    Raises:
        RecipeError: If the task does not exist, or the installation has no schemas.
    """
    return _read(task, path_of(task, trl))


@cache
def _read(task: str, path: Path) -> Schema:
    return Schema.of(task, json.loads(path.read_text(encoding="utf-8")))


# --- values ----------------------------------------------------------------------------------------------------------


def convert(key: Key, value: Any, text: str | None = None, written: Sequence[str | None] = ()) -> Any:
    """Converts a value of a file to a type that its key accepts, if no meaning is lost by it.

    A string is converted to a number (`"1e-5"`) or, as by TRL's parser, to true or false (`"yes"`); 1 and 0 to true
    and false; an integer to a float; a single value to a list of one; a number or a date to a string.

    Args:
        key: The key.
        value: The value as YAML reads it.
        text: A scalar as it is written in the file.
        written: The items of a list as they are written in the file.

    Returns:
        The converted value.

    Raises:
        RecipeError: If it has another type, or is not one of the choices.
    """
    if value is None and NULL in key.types:
        return None
    if set(key.types) <= {NULL}:
        raise _refused(f"{key.name} cannot be set in a recipe: it accepts a Python object only", leave_out(key.name))
    if value is None:
        raise _unfit(key, "null", None if key.default is None else write(**{key.name: key.default}))
    if isinstance(value, (list, tuple, set)):
        return _convert_list(key, value, written)
    truth = _truth(key, value)
    if truth is not None:
        return truth
    for kind in key.types:
        made = _as(kind, value, text, key.choices)
        if made is not None:
            return _chosen(key, made[0])
    if key.item is not None and isinstance(value, dict) == (key.item == MAPPING):
        return _convert_list(key, [value], [text])
    raise _unfit(key, shown(value), _meant(key, value, text))


def convert_words(key: Key, words: list[str]) -> Any:
    """Converts the words that follow `--key` on a command line; see `convert`.

    Args:
        key: The key.
        words: The words; none for a bare `--key`.

    Raises:
        RecipeError: If the key does not accept them.
    """
    if not words:
        if BOOLEAN in key.types:
            return True
        raise _refused(f"--{key.name} needs a value: {key.accepted}")
    if len(words) > 1 and key.item is None:
        raise _refused(f"--{key.name} accepts one value, got {len(words)}: {' '.join(words)}")
    if len(words) == 1:
        (word,) = words
        if word.lower() in {"none", "null"} and NULL in key.types and word not in (key.choices or ()):
            return word if STRING in key.types else None
        if BOOLEAN in key.types and word.lower() in _TRUTH and word not in (key.choices or ()):
            return _TRUTH[word.lower()]  # also if the key accepts other strings, as `--scale_rewards false`
        if MAPPING in key.types or key.item == MAPPING:
            return convert(key, _json(word))
        if key.item is not None and word.startswith("[") and isinstance(listed := _json(word), list):
            what = f"{key.name} is a list, whose values are separate words on the command line, got {word}"
            raise _refused(what, write(**{key.name: listed}))
        return convert(key, word, word)
    return convert(key, [_json(word) for word in words] if key.item == MAPPING else words)


def shown(value: Any) -> str:
    """A value in a message: as YAML writes it, and short.

    Args:
        value: Any value of a file.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple, dict, set)):
        kinds = {dict: "`key: value` pairs", set: "a set"}
        return kinds.get(type(value), f"a list of {len(value)}")
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1] if isinstance(value, str) else ''}"


def _refused(what: str, fix: Fix | None = None) -> RecipeError:
    return RecipeError(Problem(what, fix=fix))


def _unfit(key: Key, got: str, fix: Fix | None = None) -> RecipeError:
    return RecipeError(Problem(f"{key.name} must be {key.accepted}, got {got}", fix=fix, place=Place(key=key.name)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _json(word: str) -> Any:
    if not word.lstrip().startswith(("{", "[")):
        return word
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _as(kind: str, value: Any, text: str | None, choices: Iterable[str] | None) -> tuple[Any] | None:
    """The value as one of the types, in a tuple; `None` if it is not of that type."""
    plain_number = _is_plain(value) and not isinstance(value, str)
    if kind == BOOLEAN:
        return (value,) if isinstance(value, bool) else None
    if kind in (INTEGER, NUMBER):
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            whole = re.fullmatch(r"[-+]?\d[\d_]*", value.strip()) and len(value) < 19
            value, plain_number = (int(value) if whole else float(value)), True
        if kind == INTEGER:
            return (value,) if plain_number and isinstance(value, int) else None
        return (float(value),) if plain_number and abs(value) < 1e300 and math.isfinite(value) else None
    if kind == STRING:
        if isinstance(value, bool):  # `save_strategy: no`, which YAML 1.1 reads as false
            return (text,) if text is not None and choices is not None and text in choices else None
        if isinstance(value, (dict, bytes)):
            return None
        return (value if isinstance(value, str) else text or str(value),)
    return (value,) if kind == MAPPING and isinstance(value, dict) else None


def _truth(key: Key, value: Any) -> bool | None:
    """What a string, 1 or 0 means for a key that accepts true and false, and neither numbers nor any string."""
    if BOOLEAN not in key.types or {INTEGER, NUMBER} & set(key.types) or not isinstance(value, (str, int)):
        return None
    if STRING in key.types and (key.choices is None or value in key.choices or isinstance(value, bool)):
        return None
    return _TRUTH.get(str(value).lower())


def _chosen(key: Key, value: Any) -> Any:
    if isinstance(value, str) and MAPPING in key.types:
        return _mapping_from(key, value)
    if isinstance(value, str) and not _is_choice(key, value):
        near = nearest(value, key.choices or ())
        raise _unfit(key, shown(value), None if near is None else write(**{key.name: near}))
    return value


def _is_choice(key: Key, value: str) -> bool:
    if key.choices is None or value in key.choices:
        return True
    return key.name in OPEN and OPEN[key.name].search(value) is not None


def _mapping_from(key: Key, value: str) -> Any:
    """The mapping in a string: JSON, or the name of a file if the key accepts one."""
    made = _json(value)
    if isinstance(made, dict):
        return made
    if key.name in FILES_OR_MAPPINGS and not value.lstrip().startswith(("{", "[")):
        return value
    example = {"dtype": "bfloat16"} if key.name == "model_init_kwargs" else {"name": "value"}
    raise _refused(f"{key.name} must be `key: value` pairs, got {shown(value)}", write_example(**{key.name: example}))


def _convert_list(key: Key, values: Iterable[Any], written: Sequence[str | None]) -> list[Any]:
    items = list(values)
    if key.item is None:
        single = len(items) == 1 and _is_plain(items[0]) and len(shown(items[0])) <= 40
        got = f"a list of {len(items)} values"
        raise _unfit(key, got, write(**{key.name: items[0]}) if single else None)
    made = []
    for item, text in zip(items, written or [None] * len(items), strict=True):
        found = None if item is None else _as(key.item, item, text, None)
        if found is None:
            raise _unfit(key, f"a list that holds {shown(item)}")
        wrong = [str(name) for name in item if name not in key.fields] if key.fields and isinstance(item, dict) else []
        if wrong:
            raise _refused(f"{key.name} has no entry {wrong[0]!r}{hint(nearest(wrong[0], key.fields or ()))}")
        made.append(found[0])
    strange = next((item for item in made if isinstance(item, str) and not _is_choice(key, item)), None)
    if strange is not None:
        near = nearest(strange, key.choices or ())
        right = [near if item == strange else item for item in made]
        meant = right[0] if len(right) == 1 and key.types[:1] != (LIST,) else right
        raise _unfit(key, shown(strange), None if near is None else write(**{key.name: meant}))
    if key.length is not None and len(made) != key.length:
        raise _unfit(key, f"a list of {len(made)}")
    return made


def _meant(key: Key, value: Any, text: str | None) -> Fix | None:
    """The line that was probably meant."""
    meant: Any = None
    if BOOLEAN in key.types and isinstance(value, str) and value.lower() in ("on", "off"):
        meant = value.lower() == "on"
    elif INTEGER in key.types and isinstance(value, float) and value.is_integer():
        meant = int(value)
    elif key.types[:1] == (STRING,) and isinstance(value, bool) and key.choices is None:
        meant = text or shown(value)  # `run_name: yes`, which YAML 1.1 reads as true
    return None if meant is None else write(**{key.name: meant})

"""Reads a recipe's YAML as data, with the line of each key and value, and reports every problem of the file at once.

Nothing in the file is run: only YAML's safe tags are accepted. Aliases and merges are followed within limits, since a
few lines of them can expand to billions of values.
"""

import math
import os
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import Fix, Place, Problem, hint, nearest, write_example


MAX_BYTES = 2**20
"""Larger files are not read."""

MAX_VALUES = 20_000
"""The number of values that a file may hold after its aliases are expanded."""

EDITORS = "yaml-language-server:"
"""The beginning of a comment that tells editors the schema of a file."""

_TOO_LARGE = f"this is not a recipe: it is larger than {MAX_BYTES // 2**20} MiB"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+")


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` and `1.5e6` as numbers, as YAML 1.2 does; without a point and a sign, `52e4193` may be a commit."""

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        """A number as YAML reads it; text if it is larger than the largest number."""
        made = super().construct_yaml_float(node)
        return node.value if math.isinf(made) and _DIGIT.search(node.value) else made


_DIGIT = re.compile("[0-9]")

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*[eE][-+]|(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?)[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(_FLOAT, _Loader.construct_yaml_float)


@dataclass(frozen=True)
class Entry:
    """One key of a file with its value.

    Attributes:
        key: The key.
        value: The value as YAML reads it.
        line: Line of the key, from 1.
        text: The value as it is written; `None` for a list or a mapping.
        items: The lines of the items of a list.
        written: The items of a list as they are written; `None` for one that is a list or a mapping.
    """

    key: str
    value: Any
    line: int
    text: str | None = None
    items: tuple[int, ...] = ()
    written: tuple[str | None, ...] = ()


@dataclass
class RecipeFile:
    """A file that was read.

    Attributes:
        path: Its name, as it was given; `None` for a recipe that is on the command line only.
        entries: Its entries in their order, without `env`.
        env: The entries of `env`.
        problems: What is wrong with it as a file.
        header: The comments that it begins with, without their `#` and without the line for editors.
        header_line: The line of the first of them, from 1.
    """

    path: str | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    env: dict[str, Entry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    header: tuple[str, ...] = ()
    header_line: int = 1

    def add(self, line: int | None, what: str, fix: Fix | None = None) -> None:
        """Adds a problem of the file.

        Args:
            line: Its line, from 1; `None` if it is about the whole file.
            what: What is wrong.
            fix: What to do about it.
        """
        self.problems.append(Problem(what, fix=fix, place=Place(self.path, line)))


def read_file(path: str | Path) -> RecipeFile:
    """Reads a file.

    Args:
        path: Its name.

    Returns:
        What could be read of it, with its problems.
    """
    made = RecipeFile(str(path))
    data = _bytes(Path(path), made)
    return made if data is None else _read(data, made)


def read_bytes(data: bytes, name: str) -> RecipeFile:
    """Reads the content of a file.

    Args:
        data: The content.
        name: The name of the file, for messages.

    Returns:
        What could be read of it, with its problems.
    """
    made = RecipeFile(name)
    if len(data) > MAX_BYTES:
        made.add(None, _TOO_LARGE)
        return made
    return _read(data, made)


def _read(data: bytes, made: RecipeFile) -> RecipeFile:
    made.header, made.header_line = _header(data)
    try:
        loader = _Loader(data)
        try:
            node = loader.get_single_node()
            if isinstance(node, yaml.MappingNode):
                _fill(loader, node, made)
            else:
                _no_mapping(node, made)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        _syntax(error, made)
    except yaml.reader.ReaderError as error:
        before = data[: error.position] if isinstance(error.character, bytes) else _decoded(data)[: error.position]
        line = before.count(b"\n" if isinstance(before, bytes) else "\n") + 1  # type: ignore[arg-type]
        made.add(line, f"this is not YAML: {error.reason}: a byte or character that text cannot hold")
    except RecursionError:
        made.add(None, "this is not a recipe: its brackets are nested too deeply")
    return made


def _bytes(path: Path, made: RecipeFile) -> bytes | None:
    try:
        if os.path.isdir(path):
            made.add(None, "this is a folder, not a recipe")
            return None
        if not os.path.exists(path):
            siblings = [str(p) for p in path.parent.glob("*.yaml")] if os.path.isdir(path.parent) else []
            made.add(None, f"there is no such file{hint(nearest(str(path), siblings))}")
            return None
        if not os.path.isfile(path):
            made.add(None, "this is not a regular file", Fix("write the recipe to a regular file"))
            return None
        if path.stat().st_size > MAX_BYTES:
            made.add(None, _TOO_LARGE)
            return None
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        made.add(None, f"this cannot be read: {getattr(error, 'strerror', None) or error}")
        return None


def _no_mapping(node: yaml.Node | None, made: RecipeFile) -> None:
    what = "nothing" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "one value"
    line = None if node is None else node.start_mark.line + 1
    made.add(line, f"this holds {what}, and a recipe holds `key: value` lines")


def _fill(loader: yaml.SafeLoader, node: yaml.MappingNode, made: RecipeFile) -> None:
    """Reads the entries of the file's mapping."""
    size = _size(node, {})
    if size is None or size > MAX_VALUES:
        what = "are recursive" if size is None else f"stand for more than {MAX_VALUES} values"
        made.add(None, f"this is not a recipe: its YAML aliases {what}")
        return
    for part in _mappings(node, set()):
        _duplicates(part, made)
    for entry in _entries(loader, node, made):
        if entry.key == "env":
            continue
        made.entries[entry.key] = entry
    below = [value for key, value in node.value if getattr(key, "value", None) == "env"]
    for value in below[-1:]:
        if isinstance(value, yaml.MappingNode):
            made.env = {entry.key: entry for entry in _entries(loader, value, made)}
        else:
            fix = write_example(env={"TOKENIZERS_PARALLELISM": False})
            made.add(value.start_mark.line + 1, "env must hold `NAME: value` lines", fix)


def _entries(loader: yaml.SafeLoader, node: yaml.MappingNode, made: RecipeFile) -> Iterator[Entry]:
    try:
        loader.flatten_mapping(node)
    except yaml.MarkedYAMLError as error:
        _syntax(error, made)
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        try:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                # YAML 1.1 reads the keys `on`, `no` and numbers as other values than strings.
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                made.add(line, "a key must be a single word")
                continue
            value = loader.construct_object(value_node, deep=True)
        except yaml.MarkedYAMLError as error:
            _syntax(error, made)
            continue
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # `2024-13-45`, `!!int x`
            at = value_node.start_mark.line + 1
            made.add(at, f"YAML cannot read the value of {_plain(str(key_node.value))}: {error}")
            continue
        items = value_node.value if isinstance(value_node, yaml.SequenceNode) else ()
        lines = tuple(item.start_mark.line + 1 for item in items)
        yield Entry(key, value, line, _scalar(value_node), lines, tuple(map(_scalar, items)))


def _scalar(node: yaml.Node) -> str | None:
    """A scalar as it is written."""
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _mappings(node: yaml.Node, seen: set[int]) -> Iterator[yaml.MappingNode]:
    """Every mapping of the file, once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value, seen)


def _duplicates(node: yaml.MappingNode, made: RecipeFile) -> None:
    first: dict[Hashable, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        if key.value in first:
            what = f"{_plain(key.value)!r} is written twice, first in line {first[key.value]}"
            made.add(line, what, Fix("write it once"))
        first.setdefault(key.value, line)


def _size(node: yaml.Node, known: dict[int, int | None]) -> int | None:
    """The number of values of a node after aliases are expanded; `None` if an alias is recursive."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = None  # a node that is met again before it is counted is recursive
    total = 1
    children: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    for child in children:
        size = _size(child, known)
        if size is None:
            return None
        total += size
    known[id(node)] = total
    return total


def _syntax(error: yaml.MarkedYAMLError, made: RecipeFile) -> None:
    """Adds a problem of PyYAML's in one line, also where a bracket or a quote is never closed."""
    opened = error.context_mark is not None and str(error.context).startswith(
        ("while parsing a flow", "while scanning")
    )
    mark = error.context_mark if opened else error.problem_mark or error.context_mark
    what = ", ".join(_plain(part) for part in (error.context, error.problem) if part)
    fix = None
    if "'\\t'" in what:
        what, fix = f"{what}: a tab", Fix("use spaces")
    if "could not determine a constructor for the tag" in what:
        what = f"{what}: a recipe is data, and cannot name code"
    elif error.context == "while scanning a simple key":
        what, fix = f"{what}: a line without `key: value`", Fix("write `key: value`")
    made.add(None if mark is None else mark.line + 1, f"this is not YAML: {what}", fix)


def _plain(text: str) -> str:
    """Text of a file in one line, without control characters."""
    text = " ".join(_CONTROL.sub("?", text).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _decoded(data: bytes) -> str:
    return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", errors="replace")


def _header(data: bytes) -> tuple[tuple[str, ...], int]:
    """The header without the line for editors, and the number of its first line."""
    lines = []
    for number, line in enumerate(_decoded(data[:8192]).removeprefix("\ufeff").splitlines(), start=1):
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if not text.startswith(EDITORS):
            lines.append((number, text))
    return tuple(text for _, text in lines), lines[0][0] if lines else 1

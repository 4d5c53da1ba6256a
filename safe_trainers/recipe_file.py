"""Reads a recipe's YAML as data, with the line of each key and value, and every problem of the file at once.

Nothing in the file is run: YAML's safe tags alone are known. Aliases and merges are followed within limits, since a
few lines of them can stand for billions of values.
"""

import os
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import hint, nearest


MAX_BYTES = 2**20
"""Larger files are no recipes, and are not read."""

MAX_VALUES = 20_000
"""The values that a file may hold once its aliases are followed."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+")


@dataclass(frozen=True)
class Flaw:
    """What is wrong with a file as a file.

    Attributes:
        line: Where, from 1; `None` where it is about the whole file.
        text: What.
        fix: The line to write, `None` where it cannot be said.
    """

    line: int | None
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Entry:
    """One key of a file with its value.

    Attributes:
        key: The key.
        value: What YAML makes of the value.
        line: Line of the key, from 1.
        text: The value as it is written, where it is a single one.
        items: The lines of the items, where the value is a list.
    """

    key: str
    value: Any
    line: int
    text: str | None = None
    items: tuple[int, ...] = ()


@dataclass
class RecipeFile:
    """A file that was read.

    Attributes:
        path: Its name, as it was given.
        entries: Its keys, in their order; `env` is left out.
        env: The entries below `env`.
        flaws: What is wrong with it.
        header: The comments that it begins with, without their `#`.
    """

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    env: dict[str, Entry] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)
    header: tuple[str, ...] = ()


def read_file(path: str | Path) -> RecipeFile:
    """Reads a file.

    Args:
        path: Its name.

    Returns:
        What could be read of it; `flaws` holds what could not.
    """
    made = RecipeFile(str(path))
    data = _bytes(Path(path), made)
    if data is None:
        return made
    made.header = _header(data)
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            if isinstance(node, yaml.MappingNode):
                _fill(loader, node, made)
            else:
                made.flaws.append(_no_mapping(node))
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        made.flaws.append(_syntax(error))
    except yaml.reader.ReaderError as error:
        before = data[: error.position] if isinstance(error.character, bytes) else _decoded(data)[: error.position]
        line = before.count(b"\n" if isinstance(before, bytes) else "\n") + 1  # type: ignore[arg-type]
        made.flaws.append(Flaw(line, f"this is not YAML: {error.reason}: a byte or character that no text holds"))
    except RecursionError:
        made.flaws.append(Flaw(None, "this is not a recipe: its brackets are nested too deeply"))
    return made


def _bytes(path: Path, made: RecipeFile) -> bytes | None:
    try:
        if os.path.isdir(path):
            made.flaws.append(Flaw(None, "this is a folder, not a recipe"))
            return None
        if not os.path.exists(path):
            siblings = [str(p) for p in path.parent.glob("*.yaml")] if os.path.isdir(path.parent) else []
            made.flaws.append(Flaw(None, f"there is no such file{hint(nearest(str(path), siblings))}"))
            return None
        if not os.path.isfile(path):
            made.flaws.append(Flaw(None, "this is not a file that can be read twice: write it to a file of its own"))
            return None
        if path.stat().st_size > MAX_BYTES:
            made.flaws.append(Flaw(None, f"this is not a recipe: it is larger than {MAX_BYTES // 2**20} MiB"))
            return None
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        made.flaws.append(Flaw(None, f"this cannot be read: {getattr(error, 'strerror', None) or error}"))
        return None


def _no_mapping(node: yaml.Node | None) -> Flaw:
    what = "nothing" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "one value"
    line = None if node is None else node.start_mark.line + 1
    return Flaw(line, f"this holds {what}, and a recipe holds `key: value` lines")


def _fill(loader: yaml.SafeLoader, node: yaml.MappingNode, made: RecipeFile) -> None:
    """Makes the entries of the file's mapping."""
    size = _size(node, {})
    if size is None or size > MAX_VALUES:
        what = "hold themselves" if size is None else f"stand for more than {MAX_VALUES} values"
        made.flaws.append(Flaw(None, f"this is not a recipe: its aliases {what}"))
        return
    for part in _mappings(node, set()):
        made.flaws += _duplicates(part)
    for entry in _entries(loader, node, made):
        if entry.key == "env":
            continue
        made.entries[entry.key] = entry
    below = [value for key, value in node.value if getattr(key, "value", None) == "env"]
    for value in below[-1:]:
        if isinstance(value, yaml.MappingNode):
            made.env = {entry.key: entry for entry in _entries(loader, value, made)}
        else:
            text = "env holds no `NAME: value` lines"
            made.flaws.append(Flaw(value.start_mark.line + 1, text, "env: {TOKENIZERS_PARALLELISM: false}"))


def _entries(loader: yaml.SafeLoader, node: yaml.MappingNode, made: RecipeFile) -> Iterator[Entry]:
    try:
        loader.flatten_mapping(node)
    except yaml.MarkedYAMLError as error:
        made.flaws.append(_syntax(error))
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        try:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                # `on`, `no` and numbers are keys that YAML 1.1 reads as something else than what is written.
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                made.flaws.append(Flaw(line, "a key has to be a single word"))
                continue
            value = loader.construct_object(value_node, deep=True)
        except yaml.MarkedYAMLError as error:
            made.flaws.append(_syntax(error))
            continue
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # `2024-13-45`, `!!int x`
            at = value_node.start_mark.line + 1
            made.flaws.append(Flaw(at, f"{_plain(str(key_node.value))} is no value that YAML can read: {error}"))
            continue
        items = value_node.value if isinstance(value_node, yaml.SequenceNode) else ()
        text = value_node.value if isinstance(value_node, yaml.ScalarNode) else None
        yield Entry(key, value, line, text, tuple(item.start_mark.line + 1 for item in items))


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


def _duplicates(node: yaml.MappingNode) -> Iterator[Flaw]:
    first: dict[Hashable, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        if key.value in first:
            yield Flaw(line, f"{_plain(key.value)!r} is written twice, first in line {first[key.value]}", "it once")
        first.setdefault(key.value, line)


def _size(node: yaml.Node, known: dict[int, int | None]) -> int | None:
    """How many values a node stands for once aliases are followed, `None` where one holds itself."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = None  # what is met again before it is counted holds itself
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


def _syntax(error: yaml.MarkedYAMLError) -> Flaw:
    """A problem of PyYAML's in one line, where it is: at the bracket or quote that is never closed, too."""
    opened = error.context_mark is not None and str(error.context).startswith(
        ("while parsing a flow", "while scanning")
    )
    mark = error.context_mark if opened else error.problem_mark or error.context_mark
    said = ", ".join(_plain(part) for part in (error.context, error.problem) if part)
    fix = None
    if "'\\t'" in said:
        said, fix = f"{said}: a tab", "spaces"
    if "could not determine a constructor for the tag" in said:
        said = f"{said}: a recipe is data, and names no code"
    elif error.context == "while scanning a simple key":
        said, fix = f"{said}: a line without `key: value`", "key: value"
    return Flaw(None if mark is None else mark.line + 1, f"this is not YAML: {said}", fix)


def _plain(text: str) -> str:
    """Text of a file, fit for one line of a message."""
    text = " ".join(_CONTROL.sub("?", text).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _decoded(data: bytes) -> str:
    return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", errors="replace")


def _header(data: bytes) -> tuple[str, ...]:
    lines = []
    for line in _decoded(data[:8192]).removeprefix("\ufeff").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return tuple(lines)

"""Writes the fixes of a recipe's problems into its file: only the lines of the keys that change.

Every other byte stays as it is, and with it each comment. A changed text is used only if it is read back as the recipe
that was meant. The file is replaced in one step, after a copy of it was made.
"""

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import Fix, Place, Problem, RecipeError, yaml_value
from ..core.tasks import TASKS
from .schema import LAUNCH, load
from .validate import Checked, validate
from .yaml_file import RecipeFile, read_bytes


@dataclass(frozen=True)
class Fixed:
    """A recipe with its fixes.

    Attributes:
        checked: What is left of its problems.
        before: Its text.
        after: Its text with the fixes.
        done: The problems that were fixed.
    """

    checked: Checked
    before: str
    after: str
    done: tuple[Problem, ...]

    def diff(self) -> str:
        """The changes as a unified diff; empty if there are none."""
        name = self.checked.path or ""
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, name, f"{name} (fixed)")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def fix(path: Path, *, task: str | None = None, accelerate_config: str | None = None) -> Fixed:
    """Fixes what can be fixed without a decision of the user. Nothing is written.

    Args:
        path: The file of the recipe.
        task: Its task; by default detected.
        accelerate_config: The launch config to check; by default that of the recipe.

    Returns:
        The text with the fixes, and the problems that are left.
    """
    try:
        before = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):  # the check says what is wrong with the file
        return Fixed(validate(path, task=task, accelerate_config=accelerate_config), "", "", ())

    def check(text: str) -> tuple[RecipeFile, Checked]:
        file = read_bytes(text.encode("utf-8"), str(path))
        return file, validate(file, task=task, accelerate_config=accelerate_config)

    text, done = before, []
    file, checked = check(text)
    schemas = [checked.schema] if checked.schema is not None else list(map(load, TASKS))
    known = frozenset({"env", *LAUNCH}).union(*(schema.keys for schema in schemas))
    tried: set[tuple[str, str | None]] = set()
    while (problem := next(_fixable(checked, tried), None)) is not None:
        tried.add((problem.what, problem.place.key))
        changed = _apply(text, problem, file, known)
        if changed is None:
            continue
        new_file, new_checked = check(changed)
        if _problems_of(new_checked) < _problems_of(checked):  # a fix that only moves a problem is left to the user
            text, file, checked = changed, new_file, new_checked
            done.append(problem)
    return Fixed(checked, before, text, tuple(done))


def with_settings(path: Path, settings: Mapping[str, Any], drop: Sequence[str] = ()) -> Fixed:
    """Writes settings into the text of a recipe. The file itself is not written.

    Args:
        path: The file of the recipe.
        settings: The settings.
        drop: Settings to remove, if the file has them.

    Returns:
        The text with the settings.

    Raises:
        RecipeError: If they cannot be written without a change of something else.
    """
    before = path.read_bytes().decode("utf-8")
    file = read_bytes(before.encode("utf-8"), str(path))
    dropped = tuple(key for key in drop if key in file.entries and key not in settings)
    key = next((key for key in drop if key in file.entries), None)
    problem = Problem("", fix=Fix(settings=tuple(settings.items()), drop=dropped), place=Place(str(path), key=key))
    after = _apply(before, problem, file, frozenset({"env", *settings, *file.entries}))
    if after is None:
        lines = ", ".join(f"{name}: {yaml_value(value)}" for name, value in settings.items())
        raise RecipeError(f"{path} cannot be changed without a change of something else. Write by hand: {lines}")
    return Fixed(validate(path), before, after, ())


def save(path: Path, text: str) -> Path:
    """Replaces a file in one step, after a copy of it was made beside it.

    Args:
        path: The file.
        text: Its new content.

    Returns:
        The copy: the name of the file with `.bak`, and a number if that exists.

    Raises:
        RecipeError: If the copy or the file cannot be written; the file is then as it was.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary = None
    try:
        backup = _copy(path)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        temporary = Path(name)
        with os.fdopen(number, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise RecipeError(f"{path} cannot be written: {error.strerror}. It was not changed") from None
    return backup


def _copy(path: Path) -> Path:
    """Copies a file beside itself, under a name that no file has."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            with backup.open("xb") as file:
                file.write(path.read_bytes())
        except FileExistsError:
            number += 1
            continue
        shutil.copystat(path, backup)
        return backup


def _problems_of(checked: Checked) -> tuple[int, int]:
    """The numbers of errors and of warnings; a value that is read at last may have warnings of its own."""
    levels = [problem.level for problem in checked.problems]
    return levels.count("error"), levels.count("warning")


def _fixable(checked: Checked, tried: set[tuple[str, str | None]]) -> Iterator[Problem]:
    for problem in checked.problems:
        fix = problem.fix
        if problem.level not in ("error", "warning") or fix is None or problem.place.file != checked.path:
            continue
        decided = (fix.settings or fix.drop) and not fix.text and not fix.command and not fix.example
        if decided and (problem.what, problem.place.key) not in tried:
            yield problem


def _apply(text: str, problem: Problem, file: RecipeFile, known: frozenset[str]) -> str | None:
    """The text with the fix of a problem; `None` if it cannot be written without changing something else."""
    spans = _spans(text)
    if spans is None or problem.fix is None:
        return None
    written, old = dict(problem.fix.settings), problem.place.key
    if isinstance(written.get("env"), dict):
        written["env"] = {name: entry.value for name, entry in file.env.items()} | written["env"]
    dropped = {key for key in problem.fix.drop if key in spans}
    if old is not None and old in spans and old not in known and old not in written:
        dropped.add(old)  # a key that the settings replace
    meant = {key: entry.value for key, entry in file.entries.items() if key not in dropped} | written
    meant |= {} if "env" in written else {"env": {name: entry.value for name, entry in file.env.items()}}

    edits: list[_Edit] = []
    for key in (key for key in written if key in spans):
        whole = _Edit(spans[key].start, spans[key].end, f"{key}: {yaml_value(written[key])}")
        inner = list(_inner_edits(spans[key].value, written[key]))
        edits += [whole] if None in inner else [edit for edit in inner if edit is not None]
    fresh = "\n".join(f"{key}: {yaml_value(written[key])}" for key in written if key not in spans)
    if fresh and old is not None and old in dropped:
        edits.append(_Edit(spans[old].start, spans[old].end, fresh))
        dropped.discard(old)
    elif fresh:
        at = spans[old].line_end if old is not None and old in spans else len(text)
        begun = at > 0 and not text[:at].endswith("\n")
        edits.append(_Edit(at, at, ("\n" if begun else "") + fresh + "\n"))
    edits += [_Edit(spans[key].start, spans[key].line_end, "") for key in dropped]
    if any("#" in line for edit in edits for line in text[edit.start : edit.end].splitlines()[:-1]):
        return None  # a comment within a value would be lost
    newline = "\r\n" if "\r\n" in text else "\n"
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.new.replace("\n", newline) + text[edit.end :]
    return text if _means(text, meant) else None


@dataclass(frozen=True)
class _Edit:
    """The part of a text that is replaced."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class _Span:
    """Where an entry is: its key and its value, and the end of its last line."""

    start: int
    end: int
    line_end: int
    value: yaml.Node


def _spans(text: str) -> Mapping[str, _Span] | None:
    """The places of the entries of a file; `None` if they are not on lines of their own."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return None
    if not isinstance(node, yaml.MappingNode) or node.flow_style or text.startswith("\ufeff"):
        return None
    spans: dict[str, _Span] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value in spans:
            return None
        start, end = key.start_mark.index, max(_end(value), key.end_mark.index)
        if end == key.end_mark.index:  # `key:` without a value
            end = text.index(":", end) + 1
        line = text.find("\n", end)
        line_end = len(text) if line < 0 else line + 1
        spans[key.value] = _Span(start, end, line_end, value)
    return spans


def _inner_edits(node: yaml.Node, new: Any) -> Iterator[_Edit | None]:
    """The edits that turn a value into another one, each as small as possible; `None` if the value is replaced."""
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and len(node.value) == len(new) > 0:
        for (key, value), (name, item) in zip(node.value, new.items(), strict=True):
            if key.value != str(name):
                yield _Edit(key.start_mark.index, key.end_mark.index, str(name))
            yield from _inner_edits(value, item)
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and len(node.value) == len(new) > 0:
        for value, item in zip(node.value, new, strict=True):
            yield from _inner_edits(value, item)
    elif not isinstance(node, yaml.ScalarNode) or isinstance(new, (dict, list)) or node.start_mark == node.end_mark:
        yield None
    elif yaml_value(new) != node.value:
        yield _Edit(node.start_mark.index, _end(node), yaml_value(new))


def _end(node: yaml.Node) -> int:
    """The index behind a value, without the comments and empty lines that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return end - 1 if end and node.end_mark.column == 0 else end
    return end


def _means(text: str, meant: Mapping[str, Any]) -> bool:
    """Whether a text is read as these entries."""
    file = read_bytes(text.encode("utf-8"), "")
    found = {key: entry.value for key, entry in file.entries.items()}
    found["env"] = {name: entry.value for name, entry in file.env.items()}
    return not file.problems and repr(sorted(found.items())) == repr(sorted(meant.items()))

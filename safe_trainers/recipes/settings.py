"""The settings of a recipe while it is checked: their values, and where they are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import Fix, Level, Place, Problem, Syntax
from .schema import Schema
from .yaml_file import Entry


@dataclass(frozen=True)
class CommandLine(Place):
    """The command line, which has neither a file nor lines."""

    def __str__(self) -> str:
        return "on the command line"

    @property
    def syntax(self) -> Syntax:
        """Options."""
        return "options"


def printable(problem: Problem) -> Problem:
    """A problem without line breaks and other characters that a terminal would act on.

    Args:
        problem: A problem, possibly with strings from a file.
    """
    fix = problem.fix
    if fix is not None:
        settings = tuple((_one_line(key), _one_line(value)) for key, value in fix.settings)
        fix = replace(fix, text=_one_line(fix.text), settings=settings, drop=tuple(map(_one_line, fix.drop)))
    return replace(problem, what=_one_line(problem.what), why=_one_line(problem.why), fix=fix)


def _one_line(value: Any) -> Any:
    if isinstance(value, dict):
        return {_one_line(key): _one_line(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_one_line(item) for item in value]
    if not isinstance(value, str):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(value.split()))


@dataclass
class Settings:
    """The settings of a recipe and of the overrides after it.

    Attributes:
        task: The task's name.
        schema: Its keys.
        path: The recipe's name; `None` if everything came from the command line.
        entries: The entries of the file by key.
        values: The values that were set, in the types of their keys; the command line wins over the file.
        overridden: The keys that the command line set.
        broken: The keys without a usable value, from which nothing follows.
        processes: The number of processes of the run; `None` if it is not known.
        launch: The entries of the accelerate config.
        launch_path: Its name.
        launcher: The keys of `LAUNCH` in the file: `accelerate_config`, `num_processes`, ...
        for_run: Whether the recipe is run on this machine.
    """

    task: str
    schema: Schema
    path: str | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    overridden: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    processes: int | None = 1
    launch: Mapping[str, Entry] = field(default_factory=dict)
    launch_path: str | None = None
    launcher: dict[str, Any] = field(default_factory=dict)
    for_run: bool = False

    def __getitem__(self, key: str) -> Any:
        """The value of a key: the one that was set, or the default; `None` for a key that the task does not have."""
        if key in self.values:
            return self.values[key]
        known = self.schema.keys.get(key)
        return None if known is None else known.default

    def has(self, key: str) -> bool:
        """Whether the task has a key."""
        return key in self.schema.keys

    def sets(self, key: str) -> bool:
        """Whether a key was set."""
        return key in self.values

    def usable(self, key: str) -> Any:
        """The value of a key, or its default if the value is invalid, which is a separate problem."""
        return self[key] if self.sound(key) else self.schema.keys[key].default

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys is broken."""
        return not self.broken & set(keys)

    def place(self, *keys: str, item: int | None = None) -> Place:
        """The place of the first of these keys that was set; those on the command line come first.

        Args:
            *keys: The keys.
            item: The index of an item of its list.
        """
        for key in keys:
            if key in self.overridden:
                return CommandLine(key=key)
        for key in keys:
            if key in self.entries:
                entry = self.entries[key]
                listed = item is not None and item < len(entry.items)
                return Place(self.path, entry.items[item] if listed and item is not None else entry.line, key)
        first = next(iter(keys), None)
        return CommandLine(key=first) if self.path is None else Place(self.path, key=first)

    def error(
        self, keys: str | tuple[str, ...], what: str, fix: Fix | None = None, item: int | None = None
    ) -> Problem:
        """A problem that makes the run fail.

        Args:
            keys: The keys that it is about; its place is that of the first one that was set.
            what: What is wrong.
            fix: What to do about it.
            item: The index of an item of a list that it is about.
        """
        named = (keys,) if isinstance(keys, str) else keys
        return Problem(what, fix=fix, place=self.place(*named, item=item))

    def warning(self, keys: str | tuple[str, ...], what: str, fix: Fix | None = None) -> Problem:
        """A problem that is probably a mistake; see `error`."""
        return replace(self.error(keys, what, fix), level="warning")

    def note(self, key: str, what: str, item: int | None = None) -> Problem:
        """Makes a note, which is neither an error nor a warning; see `error`."""
        return replace(self.error(key, what, item=item), level="note")

    def finding(self, problem: Problem, *keys: str, level: Level | None = None) -> Problem:
        """A problem that was found elsewhere, at the first of some keys that was set.

        Args:
            problem: The problem.
            *keys: The keys; by default the key that the problem names.
            level: Its level, if it is another one here.
        """
        named = keys or ((problem.place.key,) if problem.place.key is not None else ())
        return replace(problem, place=self.place(*named), level=level or problem.level)

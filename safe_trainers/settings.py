"""The settings of a recipe while it is checked: each value, where it is written, and what was found wrong."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import Problem
from .recipe_file import Entry
from .report import Level
from .schema import Schema


COMMAND_LINE = "on the command line"

_ASSIGNED = re.compile(r"\b(\w+)=(?:'([^']*)'|(True|False)|(?=\{))")


@dataclass(frozen=True)
class Remark:
    """Something to say about a recipe.

    Attributes:
        level: `"note"`, `"warning"` or `"error"`.
        text: What was found.
        fix: The line to write, `None` where it cannot be said.
        key: The key that it is about.
        file: The file that it is in; `None` for the command line.
        line: The line, from 1; `None` where it is about the whole file.
        problem: The precision finding that it reports.
    """

    level: Level
    text: str
    fix: str | None = None
    key: str | None = None
    file: str | None = None
    line: int | None = None
    problem: Problem | None = None

    @property
    def where(self) -> str:
        """The file and the line, as editors and compilers write them."""
        return COMMAND_LINE if self.file is None else f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        said = f"{self.where}: {self.text}{_then(self.fix)}" + (f"  [{self.problem.id}]" if self.problem else "")
        return one_line(said)

    def as_problem(self) -> Problem:
        """The precision finding with its place.

        Raises:
            ValueError: If it reports none.
        """
        if self.problem is None:
            raise ValueError("this remark is no precision finding")
        return replace(self.problem, given=f"{self.where}: {self.problem.given}", fix=self.fix or self.problem.fix)


def one_line(text: str) -> str:
    """Text that a file may have had a say in, without line breaks and what else a terminal would act on."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _then(fix: str | None) -> str:
    """The end of a message that says what to do."""
    if not fix:
        return ""
    if fix.startswith("drop "):
        return f". D{fix[1:]}"
    return f". {'Run' if fix.startswith(('export ', 'huggingface-cli ')) else 'Write'}: {fix}"


@dataclass
class Settings:
    """What a recipe and the overrides after it set.

    Attributes:
        task: The task's name.
        schema: Its keys.
        path: The recipe's name, `None` where everything came from the command line.
        entries: What the file holds, by key.
        values: What was set, in the types of the keys; the command line wins over the file.
        overridden: The keys that the command line set.
        broken: The keys whose values are no good, so that nothing can follow from them.
        processes: The processes that the run is started in, `None` where that is unknown.
        launch: The entries of the accelerate config.
        launch_path: Its name.
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

    def __getitem__(self, key: str) -> Any:
        """What the run gets: what was set, or the default; `None` for a key that the task does not have."""
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
        """The value of a key, or its default where what is written is broken, which is said elsewhere."""
        return self[key] if self.sound(key) else self.schema.keys[key].default

    def sound(self, *keys: str) -> bool:
        """Whether the values of these keys are as they were meant."""
        return not self.broken & set(keys)

    def place(self, *keys: str, item: int | None = None) -> tuple[str | None, int | None]:
        """File and line of the first of these keys that was set."""
        for key in keys:
            if key in self.overridden:
                return None, None
            if key in self.entries:
                entry = self.entries[key]
                listed = item is not None and item < len(entry.items)
                return self.path, entry.items[item] if listed and item is not None else entry.line
        return self.path, None

    def remark(
        self, level: Level, keys: str | tuple[str, ...], text: str, fix: str | None = None, item: int | None = None
    ) -> Remark:
        """Says something at the first of some keys that was set.

        Args:
            level: How bad it is.
            keys: The keys that it is about.
            text: What to say.
            fix: The line to write.
            item: The item of a list that it is about.
        """
        named = (keys,) if isinstance(keys, str) else keys
        file, line = self.place(*named, item=item)
        return Remark(level, text, fix, named[0] if named else None, file, line)

    def error(self, keys: str | tuple[str, ...], text: str, fix: str | None = None, item: int | None = None) -> Remark:
        """What makes the run fail; see `remark`."""
        return self.remark("error", keys, text, fix, item)

    def finding(self, level: Level, keys: tuple[str, ...], problem: Problem) -> Remark:
        """A precision finding at the first of some keys that was set; what it says to write in Python, as YAML."""
        file, line = self.place(*keys)
        text = f"{problem.given}: {problem.why.rstrip('.')}"
        fix = _ASSIGNED.sub(lambda found: f"{found[1]}: {found[2] or (found[3] or '').lower()}", problem.fix)
        return Remark(level, text, fix, keys[0], file, line, problem)

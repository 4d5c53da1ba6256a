"""The error classes of the package, and `Problem`, which describes anything that is wrong.

```
Exception
└── SafeTrainersError
    ├── PrecisionError        (ValueError)   a run that would crash or lose precision; raised at construction
    │   └── CheckpointError                  a checkpoint that cannot be resumed, or weights that cannot be saved
    ├── ContractError         (TypeError)    a trainer class whose bases are in the wrong order
    ├── RecordingError        (ValueError)   recordings of runs that are missing, damaged or of different models
    ├── RecipeError           (ValueError)   a recipe, command line or dataset that cannot be run
    └── UnsupportedVersionError (ImportError) TRL or transformers outside the supported range
UserWarning
└── PrecisionWarning                         a supported run that loses precision or speed
```

The messages of refusals and warnings are in messages.py.
"""

import ast
import difflib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from .messages import WARNINGS, Finding
from .refusals import REFUSALS


Level: TypeAlias = Literal["ok", "note", "warning", "error"]
"""How severe a problem is. A `"warning"` works but is probably not intended; an `"error"` cannot work."""

Syntax: TypeAlias = Literal["python", "yaml", "options"]
"""How settings are written: in Python, in a recipe, or on the command line."""

_LIBRARIES = ("safe_trainers", "trl", "transformers", "accelerate", "torch", "contextlib", "functools")
"""Packages whose lines a warning never points to."""
_CODE_SPAN = re.compile(r"`([^`]+)`")


class SafeTrainersError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ContractError(SafeTrainersError, TypeError):
    """A trainer class has its bases in the wrong order; the message contains the corrected line."""


class UnsupportedVersionError(SafeTrainersError, ImportError):
    """The installed version of TRL or transformers is outside the supported range."""


class PrecisionWarning(UserWarning):
    """A run is supported but loses precision or speed; the message says what to change."""


@dataclass(frozen=True)
class Fix:
    """What to do about a problem, as text for people and as settings for programs.

    Attributes:
        text: The text, with code in backticks and settings in Python syntax, such as `` `bf16=True` ``. If it is
            empty, the text is made from the other attributes.
        settings: Settings to write, as pairs of name and value.
        drop: Settings to remove.
        command: A shell command to run.
        example: Whether the settings only show the form of a value that the user has to choose.
    """

    text: str = ""
    settings: tuple[tuple[str, Any], ...] = ()
    drop: tuple[str, ...] = ()
    command: str = ""
    example: bool = False

    def __str__(self) -> str:
        """Returns the fix in Python syntax."""
        code = _CODE_SPAN.fullmatch(self.text)
        if code is not None:
            return code[1]
        return self.text or self.command or self._changes([f"`{key}={value!r}`" for key, value in self.settings])

    def as_yaml(self) -> str:
        """Returns the fix in the syntax of a recipe."""
        code = _CODE_SPAN.fullmatch(self.text)
        if code is not None:
            return _setting_as_yaml(code[1])
        if self.text:
            return _CODE_SPAN.sub(lambda span: f"`{_setting_as_yaml(span[1])}`", self.text)
        written = [f"{key}: {yaml_value(value)}" for key, value in self.settings]
        return self.command or self._changes(written if len(written) == 1 else [f"`{line}`" for line in written])

    def as_options(self) -> str:
        """Returns the fix in the syntax of a command line."""
        code = _CODE_SPAN.fullmatch(self.text)
        if code is not None:
            return _setting_as_option(code[1])
        if self.text:
            return _CODE_SPAN.sub(lambda span: f"`{_setting_as_option(span[1])}`", self.text)
        dropped = replace(self, drop=tuple(f"--{key}" for key in self.drop))
        options = " ".join(f"--{key} {option_value(value)}" for key, value in self.settings)
        return self.command or dropped._changes([options] if options else [])

    def written(self, syntax: "Syntax") -> str:
        """Returns the fix in a syntax."""
        return {"python": self.__str__, "yaml": self.as_yaml, "options": self.as_options}[syntax]()

    def _changes(self, settings: list[str]) -> str:
        dropped = [f"drop {' and '.join(f'`{key}`' for key in self.drop)}"] if self.drop else []
        return ", and ".join([*dropped, *([" and ".join(settings)] if settings else [])])


def write(**settings: Any) -> Fix:
    """Returns a fix that writes settings.

    Args:
        **settings: The value of each setting.
    """
    return Fix(settings=tuple(settings.items()))


def write_example(**settings: Any) -> Fix:
    """Returns a fix that shows the form of settings whose values the user has to choose.

    Args:
        **settings: A value of each setting.
    """
    return Fix(settings=tuple(settings.items()), example=True)


def leave_out(*keys: str) -> Fix:
    """Returns a fix that removes settings.

    Args:
        *keys: Names of the settings.
    """
    return Fix(drop=keys)


def run_command(command: str) -> Fix:
    """Returns a fix that runs a shell command.

    Args:
        command: The command.
    """
    return Fix(command=command)


@dataclass(frozen=True)
class Place:
    """The place of a problem in the user's files.

    Attributes:
        file: Path of the file; `None` for a command line or a Python program.
        line: Line number, from 1; `None` for the whole file.
        key: Name of the setting.
    """

    file: str | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        """Returns `file:line`, the format of compilers."""
        return "" if self.file is None else f"{self.file}:{self.line}" if self.line else self.file

    @property
    def syntax(self) -> "Syntax":
        """The syntax of this place: YAML in a file, else Python."""
        return "yaml" if self.file is not None else "python"


@dataclass(frozen=True)
class Problem:
    """A problem of a run, a recipe, a machine or a checkpoint.

    Attributes:
        what: What was passed or found.
        why: Why it fails, or what follows from it; may be empty.
        fix: What to do about it; `None` if nothing can be done.
        id: Key in `REFUSALS` or `WARNINGS`; `None` for other problems.
        level: How severe the problem is.
        place: Where the value is written.
    """

    what: str
    why: str = ""
    fix: Fix | None = None
    id: str | None = None
    level: Level = "error"
    place: Place = field(default_factory=Place)

    @property
    def text(self) -> str:
        """What was found and why it fails, in one line."""
        return f"{self.what}: {self.why.rstrip('.')}" if self.why else self.what

    def at(self, place: Place) -> "Problem":
        """Returns a copy with another place."""
        return replace(self, place=place)

    def line(self) -> str:
        """Returns the problem in one line, with the fix in the syntax of a recipe, or of the command line."""
        parts = [f"{self.place}: " if str(self.place) else "", self.text]
        if self.fix is not None:
            fix = self.fix.written("options" if self.place.syntax == "options" else "yaml")
            # A fix that is neither a setting nor a command is a sentence by itself.
            setting = not self.fix.drop and (not self.fix.text or _CODE_SPAN.fullmatch(self.fix.text) is not None)
            verb = "Run: " if self.fix.command else "Write: " if setting else ""
            parts.append(f". {verb}{fix if verb else fix[:1].upper() + fix[1:]}")
        if self.id is not None:
            parts.append(f"  [{self.id}]")
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the problem as plain values for JSON, without empty entries."""
        fix = None if self.fix is None else str(self.fix)
        entries: dict[str, Any] = {"level": self.level, "what": self.what, "why": self.why, "fix": fix, "id": self.id}
        entries |= {"file": self.place.file, "line": self.place.line, "key": self.place.key}
        return {name: value for name, value in entries.items() if value not in (None, "")}

    def __str__(self) -> str:
        place = f"{self.place}: " if str(self.place) else ""
        lines = [f"{place}{self.what}", *([f"  why: {self.why}"] if self.why else [])]
        if self.fix is not None:
            lines.append(f"  fix: {self.fix.written(self.place.syntax)}")
        if self.id is not None:
            lines[-1] += f"  [{self.id}]"
        return "\n".join(lines)


class RecipeError(SafeTrainersError, ValueError):
    """A recipe, a command line or a dataset cannot be run.

    Args:
        problems: One problem, or one string, for each error; the message shows all of them.
    """

    def __init__(self, problems: "str | Problem | Sequence[str | Problem]") -> None:
        found = [problems] if isinstance(problems, (str, Problem)) else problems
        self.problems = tuple(Problem(p) if isinstance(p, str) else p for p in found)
        super().__init__("\n".join(problem.line() for problem in self.problems))

    def __reduce__(self) -> tuple[type["RecipeError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class PrecisionError(SafeTrainersError, ValueError):
    """The precision of a run is wrong. All problems are found before the first step and raised together.

    Args:
        problems: The problems, each with what was passed, why it fails and what to write instead.

    Attributes:
        subject: What the problems are about, for the first line of the message.
    """

    subject: ClassVar[str] = "the precision of this run"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} with {self.subject}:\n" + "\n".join(f"- {p}" for p in self.problems))

    def __reduce__(self) -> tuple[type["PrecisionError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class CheckpointError(PrecisionError):
    """A checkpoint cannot be resumed, or weights cannot be saved as requested. Nothing was overwritten."""

    subject = "the checkpoints of this run"


class RecordingError(SafeTrainersError, ValueError):
    """Recordings of runs are missing, damaged or cannot be compared."""


def raise_if(problems: Iterable[Problem | None], error: type[PrecisionError] = PrecisionError) -> None:
    """Raises all problems together, if there are any.

    Args:
        problems: The problems; `None` entries are ignored.
        error: The class of the error.

    Raises:
        PrecisionError: If there is at least one problem.
    """
    found = [problem for problem in problems if problem is not None]
    if found:
        raise error(found)


def refuse(finding_id: str, what: str, /, **details: object) -> Problem:
    """Makes the problem of a refusal. The caller collects problems into one `PrecisionError`.

    Args:
        finding_id: Key in `REFUSALS`.
        what: What was passed.
        **details: Values for the fields of the finding's templates.

    Returns:
        The problem, with the level `"error"`.
    """
    return _problem(REFUSALS[finding_id], what, "error", details)


def warn(finding_id: str, what: str, /, **details: object) -> Problem:
    """Makes the problem of a warning; the arguments are those of `refuse`, with a key in `WARNINGS`."""
    return _problem(WARNINGS[finding_id], what, "warning", details)


def _problem(finding: Finding, what: str, level: Level, details: dict[str, object]) -> Problem:
    fix = Fix(finding.fix.format(**details))
    return Problem(what, finding.why.format(**details), fix, finding.id, level)


def yaml_value(value: Any) -> str:
    """Formats a value as YAML in one line.

    Args:
        value: Any value of a recipe.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, float):
        return re.sub(r"e([-+])0*", r"e\1", str(value))  # 1e-5 for 1e-05
    return _yaml_string(value) if isinstance(value, str) else str(value)


def option_value(value: Any) -> str:
    """Formats a value as the words after an option of a command line.

    Args:
        value: Any value of a recipe.
    """
    if isinstance(value, (list, tuple)):
        return " ".join(map(option_value, value)) or "none"
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    return "none" if value is None else shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))


def _yaml_string(text: str) -> str:
    """A string as YAML writes it: in quotes if it would be read as something else without them."""
    import yaml

    try:
        plain = yaml.safe_load(f"[{text}]") == [text]
    except (yaml.YAMLError, ValueError):  # ValueError: what looks like a date, and is not one
        plain = False
    return text if plain and not EXPONENT.match(text) else json.dumps(text)


EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
"""Text such as 1e5, which YAML 1.2 reads as a number. Recipes need a point or a sign, and YAML 1.1 both."""


def _setting_as_yaml(code: str) -> str:
    """Converts `key=literal` to YAML; any other code is returned unchanged."""
    key, written, value = _parse_setting(code)
    return code if written is None else f"{key}: {yaml_value(value)}"


def _setting_as_option(code: str) -> str:
    """Converts `key=literal` to an option; any other code is returned unchanged."""
    key, written, value = _parse_setting(code)
    if written is None:
        bare = code.removesuffix("=")
        return f"--{bare}" if bare.isidentifier() else code
    return f"--{key} {option_value(value)}"


def _parse_setting(code: str) -> tuple[str, str | None, Any]:
    """Returns key, literal and value of `key=literal`; the literal is `None` for any other code."""
    key, _, written = code.partition("=")
    if not key.isidentifier():
        return key, None, None
    try:
        return key, written, ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return key, None, None


def nearest(value: str, accepted: Iterable[str], similarity: float = 0.6) -> str | None:
    """Finds the accepted spelling that is most similar to a value, ignoring case and the difference of `-` and `_`.

    Args:
        value: What was written.
        accepted: The accepted spellings.
        similarity: How similar they have to be, from 0 to 1: `difflib`'s ratio.

    Returns:
        The accepted spelling, or `None` if none is similar.
    """

    def normalised(text: str) -> str:
        return text.lower().replace("-", "_")

    choices = {normalised(choice): choice for choice in accepted}
    match = difflib.get_close_matches(normalised(value), choices, n=1, cutoff=similarity)
    return choices[match[0]] if match else None


def hint(match: str | None, prefix: str = "") -> str:
    """Returns the end of a message that suggests a spelling, or an empty string.

    Args:
        match: The result of `nearest`.
        prefix: Text in front of the spelling.
    """
    return f"; did you mean {prefix + match!r}?" if match else ""


def level_of_user() -> int:
    """Returns the `stacklevel` for the caller's `warnings.warn` that points to the first line outside of libraries."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level

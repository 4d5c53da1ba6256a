"""What can go wrong: the error tree, and the problems that an error names.

```
Exception
└── SafeTrainersError
    ├── PrecisionError        (ValueError)   a run that would crash or lose precision, refused at construction
    │   └── CheckpointError                  a checkpoint that cannot be resumed from, or weights that cannot be saved
    ├── ContractError         (TypeError)    a trainer class whose bases are in the wrong order
    ├── RecipeError           (ValueError)   a recipe, command line or dataset that cannot be run
    └── UnsupportedVersionError (ImportError) TRL or transformers outside the supported range
UserWarning
└── PrecisionWarning                         supported, but not what you probably want; says what to do
```

What they say is in findings.py.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .findings import REFUSALS, WARNINGS, Finding


class SafeTrainersError(Exception):
    """Base class of the errors that this package raises on purpose."""


class ContractError(SafeTrainersError, TypeError):
    """A trainer class whose bases cannot keep the precision promises; the message holds the corrected line."""


class RecipeError(SafeTrainersError, ValueError):
    """A recipe, a command line or a dataset that cannot be run.

    Args:
        problems: One text per problem; all of them are shown at once.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class UnsupportedVersionError(SafeTrainersError, ImportError):
    """TRL or transformers is installed in a version outside the supported range."""


class PrecisionWarning(UserWarning):
    """A run that is supported but loses precision or speed; the text says what to do about it."""


@dataclass(frozen=True)
class Problem:
    """A finding about one run.

    Attributes:
        id: The finding's slug, a key of `REFUSALS` or `WARNINGS`.
        given: What was passed.
        why: Why it fails.
        fix: The line to write.
    """

    id: str
    given: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.given}\n  why: {self.why}\n  fix: {self.fix}  [{self.id}]"


class PrecisionError(SafeTrainersError, ValueError):
    """Everything that makes a run wrong in precision, found before its first step and raised at once.

    Args:
        problems: What was found, each with what was passed, why it fails and the line to write.

    Attributes:
        subject: What the problems are with, for the first line.
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
    """A checkpoint that cannot be resumed from, or weights that cannot be saved as asked; nothing was overwritten."""

    subject = "the checkpoints of this run"


def refuse(finding_id: str, given: str, **details: object) -> Problem:
    """Builds the problem of a refusal.

    Args:
        finding_id: A key of `REFUSALS`.
        given: What was passed.
        **details: The values that the finding's templates name.

    Returns:
        The problem, to be collected into one `PrecisionError`.
    """
    return _problem(REFUSALS[finding_id], given, details)


def warn(finding_id: str, given: str, **details: object) -> Problem:
    """Builds the problem of a warning; see `refuse`."""
    return _problem(WARNINGS[finding_id], given, details)


def _problem(finding: Finding, given: str, details: dict[str, object]) -> Problem:
    return Problem(finding.id, given, finding.why.format(**details), finding.fix.format(**details))


def nearest(value: str, accepted: Iterable[str]) -> str | None:
    """The accepted spelling nearest to `value`, or `None` where nothing is near.

    Args:
        value: What was written.
        accepted: What could have been meant.

    Returns:
        The nearest accepted spelling, compared without regard to case, `-` and `_`.
    """

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain = {plain(choice): choice for choice in accepted}
    match = difflib.get_close_matches(plain(value), by_plain, n=1, cutoff=0.6)
    return by_plain[match[0]] if match else None


def hint(match: str | None, prefix: str = "") -> str:
    """The end of a message that names the nearest spelling; empty where there is none.

    Args:
        match: What `nearest` found.
        prefix: What stands before it where it is written.
    """
    return f"; did you mean {prefix + match!r}?" if match else ""

"""One known error: its messages, its cause, and the line to write."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias


ANY = "…"
"""Placeholder in a message for anything: a path, a number, a dtype."""

GAP = 160
"""The most characters, without white space, that `ANY` stands for."""

Kind: TypeAlias = Literal["error", "launcher", "warning", "hint"]
"""Whether it stops a run (`"error"`), only reports that another error did (`"launcher"`), does not stop a run
(`"warning"`), or says where to look for the cause of an error, which is not known (`"hint"`)."""

Level: TypeAlias = Literal["message", "family", "wording"]
"""`"message"` explains messages with one cause, `"family"` messages of one kind, and `"wording"` any sentence of a
package in which it states what it requires."""


@dataclass(frozen=True)
class Case:
    """One cause of a message that has several.

    Attributes:
        cause: The cause of the error.
        fix: The line to write or to run.
        evidence: Words of the text, such as a file in a frame of the traceback, that decide for this cause; one of
            them is enough. Without any, the cause is possible wherever no evidence decides for another.
        cases: The causes of this case, if it has several itself.
    """

    cause: str
    fix: str
    evidence: tuple[str, ...] = ()
    cases: "tuple[Case, ...]" = ()

    def fits(self, text: str) -> bool:
        """Whether a text, which is in lower case, has its evidence."""
        return any(words.casefold() in text for words in self.evidence)


class Answer(NamedTuple):
    """What an entry says about a text.

    Attributes:
        cause: The cause of the error, or what the message means if its cause is open.
        fix: The line to write or to run.
        possible: The causes that the text cannot tell apart, the most frequent first.
    """

    cause: str
    fix: str
    possible: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Entry:
    """An error that users paste.

    Attributes:
        id: Stable slug; errors of this package print it in brackets.
        package: The package that raises or logs the error.
        messages: Its messages, one for each wording that a release has. White space and capital letters are ignored,
            so that a line that a terminal has wrapped is found too, and one that was typed.
        cause: The cause of the error.
        fix: The line to write or to run.
        kind: Whether it stops a run.
        link: The upstream issue; for entries without a link tests/explain/test_catalogue.py provokes the error.
        level: What it explains. Families and wordings are used only for a text that names this field, and only where
            no other entry matches; wordings only where no family does.
        cases: The causes of a message that has several. The first whose evidence the text has is used.
    """

    id: str
    package: str
    messages: tuple[str, ...]
    cause: str
    fix: str
    kind: Kind = "error"
    link: str | None = None
    level: Level = "message"
    cases: tuple[Case, ...] = ()

    @property
    def explains(self) -> bool:
        """Whether it has the cause, and does not only say where to look for it."""
        return self.kind not in ("launcher", "hint")

    @property
    def general(self) -> bool:
        """Whether it explains more than messages with one cause."""
        return self.level != "message"

    def answer(self, text: str) -> Answer:
        """Returns the answer to a text, which is in lower case and has the frames of its tracebacks."""
        said: Entry | Case = self
        while decided := next((case for case in said.cases if case.fits(text)), None):
            said = decided
        return Answer(said.cause, said.fix, tuple(case for case in said.cases if not case.evidence))

    def places(self, squeezed: str) -> Iterator[tuple[int, int, int]]:
        """Finds the entry's messages in a log.

        A gap has an upper bound and each message begins with fixed words: the time is linear in the length of a log.

        Args:
            squeezed: The log without white space.

        Yields:
            The start and the end of each match, and the number of fixed characters in its message.
        """
        for start, pattern, fixed in self._patterns:
            if start in squeezed:  # many times faster than the pattern, and mostly false
                yield from ((*match.span(), fixed) for match in pattern.finditer(squeezed))

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str], int], ...]:
        """The first words, the pattern and the fixed characters of each message.

        A full stop at the end of a message is often lost when it is pasted.
        """
        gap = f".{{0,{GAP}}}?"
        parts = [[squeeze(part) for part in message.rstrip(".").split(ANY)] for message in self.messages]
        return tuple(
            (words[0], re.compile(gap.join(map(re.escape, words)), re.DOTALL), sum(map(len, words)))
            for words in dict.fromkeys(map(tuple, parts))
        )


def squeeze(text: str) -> str:
    """Removes white space, backticks, which forums take away, and the difference of capital and small letters."""
    return "".join(text.replace("`", "").split()).casefold()

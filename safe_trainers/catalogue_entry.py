"""One entry of the catalogue of error texts: what the text is, why it comes, and the line to write."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias


ANY = "…"
"""What stands in a text for anything: a path, a number, a dtype."""

GAP = 160
"""The most characters, without white space, that `ANY` stands for."""

Kind: TypeAlias = Literal["error", "launcher", "warning"]
"""`"error"` stops a run; `"launcher"` only says that something else did; `"warning"` stops nothing."""


@dataclass(frozen=True)
class Entry:
    """An error text that users paste.

    Attributes:
        id: Stable slug; that of an error of this package is the one in its brackets.
        package: Where the text comes from.
        texts: What it says, in each release that says it otherwise. White space counts for nothing, so that a line
            that a terminal wrapped is found too.
        cause: Why it comes.
        fix: The line to write or to run.
        kind: What it does to a run.
        link: Where upstream says so; without one, tests/test_catalogue.py provokes the error.
    """

    id: str
    package: str
    texts: tuple[str, ...]
    cause: str
    fix: str
    kind: Kind = "error"
    link: str | None = None

    def places(self, squeezed: str) -> Iterator[tuple[int, int]]:
        """Where the entry's texts stand.

        A gap has an upper bound and each text begins with fixed words: the time is linear in the length of a log.

        Args:
            squeezed: What to look through, without white space.

        Yields:
            First character, and the one after the last.
        """
        for start, pattern in self._patterns:
            if start in squeezed:  # many times faster than the pattern, and mostly false
                yield from (match.span() for match in pattern.finditer(squeezed))

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        parts = [[squeeze(part) for part in text.split(ANY)] for text in self.texts]
        return tuple((text[0], re.compile(f".{{0,{GAP}}}?".join(map(re.escape, text)), re.DOTALL)) for text in parts)


def squeeze(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())

"""Reports: facts, tables and verdicts.

The precision report of a run and the results of `compare`, `validate`, `doctor` and other commands are reports, which
render.py prints on a terminal, as Markdown and as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..core.errors import Fix, Level, Place, Problem


Cell: TypeAlias = str | int | float | bool | None
"""A value in a table: a JSON scalar."""

EXIT_STATUS: Mapping[Level, int] = {"ok": 0, "note": 0, "warning": 1, "error": 2}
"""The exit status of a command by its worst verdict."""

_KEYS = frozenset({"level", "text", "fix", "id", "file", "line"})


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: The heading.
        columns: The names of the columns.
        rows: The rows, each as long as `columns`. Integers in a column whose name ends in `bytes` are printed in MiB
            or KiB.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"table {self.title!r} has the columns {self.columns}, but a row is {wrong!r}")


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        title: The kind of report, such as `"precision report"`.
        subject: The name of the model, recipe, run or machine.
        facts: Single values by name.
        tables: The tables.
        verdicts: The findings, in display order.
    """

    title: str
    subject: str
    facts: Mapping[str, Cell] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    verdicts: tuple[Problem, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 without warnings and errors, 1 with warnings, 2 with errors."""
        return max((EXIT_STATUS[verdict.level] for verdict in self.verdicts), default=0)

    def table(self, title: str) -> Table:
        """Returns the table with a title.

        Args:
            title: The title.

        Raises:
            KeyError: If the report has no such table.
        """
        for table in self.tables:
            if table.title == title:
                return table
        raise KeyError(title)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """Creates a report from the result of `to_dict`; the columns of tables without rows are lost.

        Args:
            values: The plain values.

        Raises:
            ValueError: If the values are not a report.
        """
        try:
            tables = []
            for title, rows in values["tables"].items():
                columns = tuple(dict.fromkeys(column for row in rows for column in row))
                tables.append(Table(title, columns, tuple(tuple(_plain(row[c]) for c in columns) for row in rows)))
            verdicts = tuple(_verdict(verdict) for verdict in values["verdicts"])
            facts = {str(name): _plain(value) for name, value in values["facts"].items()}
            made = cls(str(values["title"]), str(values["subject"]), facts, tuple(tables), verdicts)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if any(table.rows and not table.columns for table in tables):
            raise ValueError("a row of a table is empty")
        return made

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON; each row of a table is a mapping from column to value."""
        return {
            "title": self.title,
            "subject": self.subject,
            "facts": dict(self.facts),
            "tables": {
                table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                for table in self.tables
            },
            "verdicts": [_verdict_to_dict(verdict) for verdict in self.verdicts],
        }


def verdict_text(verdict: Problem) -> str:
    """Returns the place and the text of a verdict in one line."""
    where = str(verdict.place)
    return f"{where}: {verdict.text}" if where else verdict.text


def verdict_fix(verdict: Problem) -> str | None:
    """Returns the fix of a verdict in the syntax of its place; `None` if it has no fix."""
    return None if verdict.fix is None else verdict.fix.written(verdict.place.syntax)


def _verdict_to_dict(verdict: Problem) -> dict[str, Any]:
    place = verdict.place
    known = {"level": verdict.level, "text": verdict_text(verdict), "fix": verdict_fix(verdict), "id": verdict.id}
    return {name: value for name, value in (known | {"file": place.file, "line": place.line}).items() if value}


def _verdict(values: Mapping[str, Any]) -> Problem:
    """The inverse of `_verdict_to_dict`."""
    unknown = sorted(values.keys() - _KEYS)
    if unknown or values["level"] not in EXIT_STATUS:
        raise KeyError(unknown[0] if unknown else values["level"])
    place, fix = Place(values.get("file"), values.get("line")), values.get("fix")
    text = str(values["text"]).removeprefix(f"{place}: " if str(place) else "")
    return Problem(
        text, fix=None if fix is None else Fix(fix), id=values.get("id"), level=values["level"], place=place
    )


def _plain(value: Any) -> Cell:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} in a table")

"""What a command or a run has to tell: facts, tables and verdicts, for people, for programs and for a model card.

One shape serves them all, so that one renderer does: the precision report of a run, the comparison of two, and what
`doctor` finds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


Cell: TypeAlias = str | int | float | bool | None
"""What a table holds: plain values, as JSON does."""

Level: TypeAlias = Literal["ok", "note", "warning", "error"]

EXIT_STATUS: Mapping[Level, int] = {"ok": 0, "note": 0, "warning": 1, "error": 2}
"""What a command ends with for its worst verdict."""


@dataclass(frozen=True)
class Verdict:
    """One line of judgement.

    Attributes:
        level: `"ok"`, `"note"` (good to know), `"warning"` (works, and is probably not meant) or `"error"`.
        text: What was found.
        fix: The line to write or to run; `None` where there is nothing to do.
        id: The finding's slug, as in `REFUSALS` and `WARNINGS`; `None` for what is no finding.
        file: The file that it is about, which its text names too; `None` where it is about none.
        line: The line in it, from 1.
    """

    level: Level
    text: str
    fix: str | None = None
    id: str | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Its heading.
        columns: Names of its columns.
        rows: Its rows, as long as `columns`. A whole number in a column whose name ends in `bytes` is shown to people
            in MiB or KiB.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"table {self.title!r} has the columns {self.columns}, and a row {wrong!r}")


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        title: What it is, such as `"precision report"`.
        subject: What it is about: a model, a recipe, a machine.
        facts: Single values by name.
        tables: Its tables.
        verdicts: Its judgements, in the order in which they are to be read.
    """

    title: str
    subject: str
    facts: Mapping[str, Cell] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 where all is well, 1 where something is warned of, 2 where something is wrong."""
        return max((EXIT_STATUS[verdict.level] for verdict in self.verdicts), default=0)

    def table(self, title: str) -> Table:
        """The table with a title.

        Raises:
            KeyError: If there is none.
        """
        for table in self.tables:
            if table.title == title:
                return table
        raise KeyError(title)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """The report that `to_dict` gave; the columns of a table without rows are not known any more.

        Args:
            values: Its plain values.

        Raises:
            ValueError: If they are those of no report.
        """
        try:
            tables = []
            for title, rows in values["tables"].items():
                columns = tuple(dict.fromkeys(column for row in rows for column in row))
                tables.append(Table(title, columns, tuple(tuple(_plain(row[c]) for c in columns) for row in rows)))
            verdicts = [Verdict(**verdict) for verdict in values["verdicts"]]
            facts = {str(name): _plain(value) for name, value in values["facts"].items()}
            made = cls(str(values["title"]), str(values["subject"]), facts, tuple(tables), tuple(verdicts))
            unknown = [verdict.level for verdict in verdicts if verdict.level not in EXIT_STATUS]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no report: {type(error).__name__}: {error}") from error
        if any(table.rows and not table.columns for table in tables):
            raise ValueError("it is no report: a row of a table is empty")
        if unknown:
            raise ValueError(f"it is no report: there is no level {unknown[0]!r}")
        return made

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON; the rows of a table as mappings by column."""
        return {
            "title": self.title,
            "subject": self.subject,
            "facts": dict(self.facts),
            "tables": {
                table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                for table in self.tables
            },
            "verdicts": [{k: v for k, v in vars(verdict).items() if v is not None} for verdict in self.verdicts],
        }


def _plain(value: Any) -> Cell:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} in a table")

"""Compares two reports."""

from collections.abc import Iterator

from ..core.errors import Problem
from .document import Cell, Report, Table, verdict_text


DIFFERENCES = "differences"
"""Title of the table."""


def compare(first: Report, second: Report) -> Report:
    """Compares two reports.

    Args:
        first: One report.
        second: The other.

    Returns:
        A report with one table of differences, and exit status 0 without differences, 1 with differences. Facts are
        matched by name, verdicts by text, and rows by their first column; rows with equal first columns, by order.
    """
    rows = [*_facts(first, second), *_tables(first, second), *_verdicts(first, second)]
    titles = ("where", "what", first.subject, second.subject)
    if first.subject == second.subject:
        titles = ("where", "what", f"{first.subject} (first)", f"{second.subject} (second)")
    count = f"{len(rows)} differences" if len(rows) > 1 else "1 difference"
    verdict = Problem(count, level="warning") if rows else Problem("no difference", level="ok")
    return Report(
        "comparison",
        f"{first.subject} and {second.subject}",
        {},
        (Table(DIFFERENCES, titles, tuple(rows)),),
        (verdict,),
    )


def _facts(first: Report, second: Report) -> Iterator[tuple[Cell, ...]]:
    for name in dict.fromkeys((*first.facts, *second.facts)):
        if first.facts.get(name) != second.facts.get(name):
            yield "facts", name, _shown(first.facts.get(name)), _shown(second.facts.get(name))


def _tables(first: Report, second: Report) -> Iterator[tuple[Cell, ...]]:
    mine, theirs = ({table.title: table for table in report.tables} for report in (first, second))
    for title in dict.fromkeys((*mine, *theirs)):
        yield from _rows(title, mine.get(title), theirs.get(title))


def _rows(title: str, first: Table | None, second: Table | None) -> Iterator[tuple[Cell, ...]]:
    mine, theirs = _by_key(first), _by_key(second)
    for key in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(key), theirs.get(key)
        if one is None or other is None:
            yield title, key[0], _whole(one), _whole(other)
            continue
        for column in dict.fromkeys((*one, *other)):
            if one.get(column) != other.get(column):
                yield title, f"{key[0]}: {column}", _shown(one.get(column)), _shown(other.get(column))


def _by_key(table: Table | None) -> dict[tuple[str, int], dict[str, Cell]]:
    """Returns the rows of a table by first column and, among rows with equal first columns, number."""
    found: dict[tuple[str, int], dict[str, Cell]] = {}
    for row in table.rows if table is not None else ():
        key, number = str(row[0]), 0
        while (key, number) in found:
            number += 1
        found[key, number] = dict(zip(table.columns, row, strict=True)) if table is not None else {}
    return found


def _verdicts(first: Report, second: Report) -> Iterator[tuple[Cell, ...]]:
    mine, theirs = (
        {verdict_text(verdict): verdict.level for verdict in report.verdicts} for report in (first, second)
    )
    for text in dict.fromkeys((*mine, *theirs)):
        if mine.get(text) != theirs.get(text):
            yield "verdicts", text, mine.get(text), theirs.get(text)


def _whole(row: dict[str, Cell] | None) -> str | None:
    """Returns a row that only one side has, as text."""
    if row is None:
        return None
    return ", ".join(f"{name} {_shown(value)}" for name, value in list(row.items())[1:] if value is not None)


def _shown(value: Cell) -> str | None:
    """Returns a value as text, because the two sides of a difference may have different types."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)

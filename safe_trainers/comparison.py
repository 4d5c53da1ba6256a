"""Two reports, and what differs between them."""

from collections.abc import Iterator

from .report import Cell, Report, Table, Verdict


DIFFERENCES = "differences"
"""Title of the table."""


def compare(first: Report, second: Report) -> Report:
    """Compares two reports.

    Args:
        first: One report.
        second: The other.

    Returns:
        A report with one table. Rows are matched by their first column, and by their order where several have the
        same one there; facts, by their name; verdicts, by their text. Its exit status is 0 where nothing differs and
        1 where something does.
    """
    rows = [*_facts(first, second), *_tables(first, second), *_verdicts(first, second)]
    titles = ("where", "what", first.subject, second.subject)
    if first.subject == second.subject:
        titles = ("where", "what", f"{first.subject} (first)", f"{second.subject} (second)")
    count = f"{len(rows)} differences" if len(rows) > 1 else "1 difference"
    verdict = Verdict("warning", count) if rows else Verdict("ok", "no difference")
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
    """The rows of a table by their first column, numbered where several have the same one."""
    found: dict[tuple[str, int], dict[str, Cell]] = {}
    for row in table.rows if table is not None else ():
        key, number = str(row[0]), 0
        while (key, number) in found:
            number += 1
        found[key, number] = dict(zip(table.columns, row, strict=True)) if table is not None else {}
    return found


def _verdicts(first: Report, second: Report) -> Iterator[tuple[Cell, ...]]:
    mine, theirs = ({verdict.text: verdict.level for verdict in report.verdicts} for report in (first, second))
    for text in dict.fromkeys((*mine, *theirs)):
        if mine.get(text) != theirs.get(text):
            yield "verdicts", text, mine.get(text), theirs.get(text)


def _whole(row: dict[str, Cell] | None) -> str | None:
    """A row that only one side has."""
    if row is None:
        return None
    return ", ".join(f"{name} {_shown(value)}" for name, value in list(row.items())[1:] if value is not None)


def _shown(value: Cell) -> str | None:
    """A value as text: the sides of a difference may be of different kinds."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)

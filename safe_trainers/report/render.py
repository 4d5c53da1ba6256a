"""Renders reports for a terminal, as Markdown and as JSON."""

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..core.errors import Fix
from .document import Cell, Report, Table, verdict_fix, verdict_text


if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
"""Terminal style of each level of a verdict."""

MOST_LINES = 25
"""The lines of a summary."""

_WIDTH = 140
_GLUE = "\xa0"
"""Stands for a blank at which lines are not wrapped."""


def cell(column: str, value: Cell) -> str:
    """Formats a value for display: sizes in MiB or KiB, `yes` and `no`, an empty string for `None`.

    Args:
        column: The name of its column.
        value: The value.

    Returns:
        The text.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return _size(value) if column.endswith("bytes") else f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def to_json(report: Report) -> str:
    """Returns the report as JSON."""
    return json.dumps(report.to_dict(), indent=1)


def to_markdown(report: Report, level: int = 2) -> str:
    """Returns the report as a section of Markdown.

    Args:
        report: The report.
        level: The level of the heading.
    """
    lines = [f"{'#' * level} {report.title[:1].upper()}{report.title[1:]}", ""]
    lines += [f"- {name}: {_escape(cell(name, value))}" for name, value in report.facts.items()]
    lines += [""] if report.facts else []
    for table in (table for table in report.tables if table.rows):
        lines += [f"{'#' * (level + 1)} {table.title[:1].upper()}{table.title[1:]}", ""]
        lines += [_line(_columns(table)), _line(["---"] * len(_columns(table)))]
        lines += [_line([_escape(text) for text in row]) for row in _formatted_rows(table)] + [""]
    for verdict in report.verdicts:
        fix = f". Fix: {_escape(_in_markdown(verdict.fix))}" if verdict.fix is not None else ""
        lines.append(f"- **{verdict.level}**: {_escape(verdict_text(verdict))}{fix}")
    return "\n".join(lines).rstrip() + "\n"


def show(report: Report, console: "Console") -> None:
    """Prints the whole report to a terminal or a file.

    Args:
        report: The report.
        console: The console; nothing is wider than it, except words and the lines of fixes, which are to be copied.
    """
    _print(_lines(report, console), console)


def show_summary(report: Report, console: "Console", rest: str) -> None:
    """Prints a report in at most `MOST_LINES` lines: its facts in one paragraph, and the first rows of its tables.

    Args:
        report: The report.
        console: The console.
        rest: Where the whole report is, which the last line says.
    """
    from rich.text import Text

    last = Text(f"the whole report: {rest}")
    for rows in range(8, 0, -1):
        lines = [*_lines(report, console, rows), last]
        if len(lines) <= MOST_LINES:
            break
    else:
        lines = [*lines[: MOST_LINES - 1], last]
    _print(lines, console)


def _print(lines: Iterable["Text"], console: "Console") -> None:
    # Through `sys.stderr`, for which a progress bar has a proxy that prints above the bar; rich would bypass it.
    with console.capture() as captured:
        for line in lines:
            console.print(line, soft_wrap=True)
    stream = sys.stderr if console.stderr else console.file
    stream.write(captured.get())
    stream.flush()


def _lines(report: Report, console: "Console", rows: int | None = None) -> list["Text"]:
    """Returns the lines of a report.

    Args:
        report: The report.
        console: The console.
        rows: The number of rows of each table, in a summary; `None` for all.
    """
    from rich.text import Text

    width = console.width
    lines = [Text.assemble((report.title, "bold"), f": {report.subject}")]
    facts = [(name, cell(name, value)) for name, value in report.facts.items()]
    if rows is None:
        lines += [Text(f"  {name}: {value}") for name, value in facts]
    else:
        paragraph = ", ".join(f"{name} {value}".replace(" ", _GLUE) for name, value in facts)
        lines += [Text(line.replace(_GLUE, " ")) for line in _wrap(paragraph, width, "  ")]
    for table in (table for table in report.tables if table.rows):
        lines.append(Text(table.title, "bold"))
        lines += map(Text, _table_lines(replace(table, rows=table.rows[:rows]), width))
        if rows is not None and len(table.rows) > rows:
            lines.append(Text(f"  and {len(table.rows) - rows} more"))
    for verdict in report.verdicts:
        text = f"{verdict.level:<7} {verdict_text(verdict)}"
        wrapped = _wrap(text, width, "", " " * 8) if console.is_terminal or rows is not None else [text]
        level = len(verdict.level)
        lines.append(Text.assemble((wrapped[0][:level], STYLES[verdict.level]), wrapped[0][level:]))
        lines += map(Text, wrapped[1:])
        fix = verdict_fix(verdict)
        if fix is not None:
            lines.append(Text(f"        fix: {fix}"))
    return lines


def _table_lines(table: Table, width: int) -> Iterator[str]:
    """Yields the lines of a table: aligned columns, or a paragraph for each row if they are too wide.

    Args:
        table: The table, with rows.
        width: The width of the terminal; words are not cut.
    """
    names = _columns(table)
    grid = [names, *_formatted_rows(table)]
    columns = list(zip(*grid, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for text in column for word in text.split() or [""]) for column in columns]
    room = width - 2 * len(names)
    if sum(least) > room:
        for row in grid[1:]:
            rest = ", ".join(f"{name} {text}" for name, text in zip(names[1:], row[1:], strict=True) if text)
            yield f"  {row[0]}"
            yield from _wrap(rest, width, "    ")
        return
    while sum(widths) > room:  # the column with the most room to give
        widest = max(range(len(widths)), key=lambda index: widths[index] - least[index])
        widths[widest] -= 1
    kept = [table.columns.index(name) for name in names]
    numbers = [all(isinstance(row[index], (int, float, type(None))) for row in table.rows) for index in kept]
    for row in grid:
        cells = [_wrap(text, size) or [""] for text, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = [
                text.rjust(size) if number else text.ljust(size)
                for text, size, number in zip(parts, widths, numbers, strict=True)
            ]
            yield "  " + "  ".join(aligned).rstrip()


def _wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Wraps a text at blanks only."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=first if rest is None else rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def present(report: Report, as_json: bool) -> int:
    """Prints the report of a command to standard output.

    Args:
        report: The report.
        as_json: Whether to print JSON.

    Returns:
        The exit status of the command.
    """
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        show(report, console())
    return report.exit_status


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def console(stderr: bool = False, width: int = _WIDTH, quiet: bool = False) -> "Console":
    """Returns a console.

    Args:
        stderr: Whether to print to standard error instead of standard output.
        width: Its width if the output is not a terminal.
        quiet: Whether to print nothing.
    """
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with status 1, which means warnings

    made = Ours(stderr=stderr, quiet=quiet)
    return made if made.is_terminal else Ours(stderr=stderr, width=width, quiet=quiet)


def _columns(table: Table) -> list[str]:
    """Returns the columns that have a value in at least one row."""
    return [name for index, name in enumerate(table.columns) if any(row[index] is not None for row in table.rows)]


def _formatted_rows(table: Table) -> Iterable[list[str]]:
    kept = [table.columns.index(name) for name in _columns(table)]
    for row in table.rows:
        yield [cell(table.columns[index], row[index]) for index in kept]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _in_markdown(fix: Fix) -> str:
    """Returns a fix with its command in backticks."""
    return fix.text or (f"`{fix.command}`" if fix.command else str(fix))


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""Renders reports for a terminal, as Markdown and as JSON."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import Fix
from .document import Cell, Report, Table, verdict_fix, verdict_text


if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
"""Terminal style of each level of a verdict."""

_WIDTH = 140


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
    """Prints the report to a terminal.

    Args:
        report: The report.
        console: The console.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    console.print(Text.assemble((report.title, "bold"), f": {report.subject}"), soft_wrap=True)
    for name, value in report.facts.items():
        console.print(Text(f"  {name}: {cell(name, value)}"), soft_wrap=True)
    for table in (table for table in report.tables if table.rows):
        drawn = RichTable(title=Text(table.title), title_justify="left", title_style="bold", header_style="bold")
        for column in _columns(table):
            numbers = all(isinstance(row[table.columns.index(column)], (int, float, type(None))) for row in table.rows)
            drawn.add_column(column, justify="right" if numbers else "left", overflow="fold")
        for row in _formatted_rows(table):
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    for verdict in report.verdicts:
        text = Text.assemble((f"{verdict.level:<7}", STYLES[verdict.level]), f" {verdict_text(verdict)}")
        console.print(text, soft_wrap=True)
        fix = verdict_fix(verdict)
        if fix is not None:
            console.print(Text(f"        fix: {fix}"), soft_wrap=True)


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


def console(stderr: bool = False) -> "Console":
    """Returns a console; if the output is not a terminal, its width is 140 columns.

    Args:
        stderr: Whether to print to standard error instead of standard output.
    """
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with status 1, which means warnings

    made = Ours(stderr=stderr)
    return made if made.is_terminal else Ours(stderr=stderr, width=_WIDTH)


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

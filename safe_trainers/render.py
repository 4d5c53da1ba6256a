"""The one renderer of reports: for a terminal, for a model card, and as JSON."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .report import Cell, Report, Table


if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
"""Style of each level of a verdict on a terminal."""


_WIDTH = 140


def cell(column: str, value: Cell) -> str:
    """A value as people read it: sizes in MiB or KiB, nothing for `None`, `yes` and `no`.

    Args:
        column: Name of its column.
        value: The value.

    Returns:
        Its text.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return _size(value) if column.endswith("bytes") else f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(report.to_dict(), indent=1)


def to_markdown(report: Report, level: int = 2) -> str:
    """The report as a section of Markdown.

    Args:
        report: The report.
        level: Level of its heading.

    Returns:
        The section.
    """
    lines = [f"{'#' * level} {report.title[:1].upper()}{report.title[1:]}", ""]
    lines += [f"- {name}: {_escape(cell(name, value))}" for name, value in report.facts.items()]
    lines += [""] if report.facts else []
    for table in filter(_has_rows, report.tables):
        lines += [f"{'#' * (level + 1)} {table.title[:1].upper()}{table.title[1:]}", ""]
        lines += [_line(_columns(table)), _line(["---"] * len(_columns(table)))]
        lines += [_line([_escape(text) for text in row]) for row in _texts(table)] + [""]
    for verdict in report.verdicts:
        fix = f" Write: {verdict.fix if '`' in verdict.fix else f'`{verdict.fix}`'}" if verdict.fix else ""
        lines.append(f"- **{verdict.level}**: {_escape(verdict.text)}{fix}")
    return "\n".join(lines).rstrip() + "\n"


def show(report: Report, console: "Console") -> None:
    """Prints the report to a terminal.

    Args:
        report: The report.
        console: Where to.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    console.print(Text.assemble((report.title, "bold"), f": {report.subject}"), soft_wrap=True)
    for name, value in report.facts.items():
        console.print(Text(f"  {name}: {cell(name, value)}"), soft_wrap=True)
    for table in filter(_has_rows, report.tables):
        drawn = RichTable(title=Text(table.title), title_justify="left", title_style="bold", header_style="bold")
        for column in _columns(table):
            numbers = all(isinstance(row[table.columns.index(column)], (int, float, type(None))) for row in table.rows)
            drawn.add_column(column, justify="right" if numbers else "left", overflow="fold")
        for row in _texts(table):
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    for verdict in report.verdicts:
        console.print(
            Text.assemble((f"{verdict.level:<7}", STYLES[verdict.level]), f" {verdict.text}"), soft_wrap=True
        )
        if verdict.fix:
            console.print(Text(f"        fix: {verdict.fix}"), soft_wrap=True)


def present(report: Report, as_json: bool) -> int:
    """Prints a command's report to standard output.

    Args:
        report: The report.
        as_json: For a program instead of for people.

    Returns:
        The command's exit status.
    """
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        show(report, console())
    return report.exit_status


def _has_rows(table: Table) -> bool:
    return bool(table.rows)


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def console(stderr: bool = False) -> "Console":
    """A console for people; where it is no terminal, and has no width of its own, wide enough for tables.

    Args:
        stderr: For standard error instead of standard output.
    """
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # where rich would end with status 1, which says that something was warned of

    made = Ours(stderr=stderr)
    return made if made.is_terminal else Ours(stderr=stderr, width=_WIDTH)


def _columns(table: Table) -> list[str]:
    """The columns that say anything: one that is empty in each row is left out for people."""
    return [name for index, name in enumerate(table.columns) if any(row[index] is not None for row in table.rows)]


def _texts(table: Table) -> Iterable[list[str]]:
    kept = [table.columns.index(name) for name in _columns(table)]
    for row in table.rows:
        yield [cell(table.columns[index], row[index]) for index in kept]


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""Reads committed results that have a heading and a row in each line."""

import json
from pathlib import Path
from typing import Any


Row = dict[str, Any]


def read_rows(file: Path) -> tuple[Row, list[Row]]:
    """Returns the heading and the rows.

    Args:
        file: The file, in `benchmarks/results/`.
    """
    heading, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return heading, rows


class Rows:
    """The committed runs of a benchmark.

    Attributes:
        heading: What is the same for all runs.
        rows: The runs.
    """

    def __init__(self, file: Path) -> None:
        self.heading, self.rows = read_rows(file)


def versions_of(heading: Row) -> str:
    """Returns the versions in a heading, for a sentence."""
    return ", ".join(f"{package} {number}" for package, number in heading["versions"].items())

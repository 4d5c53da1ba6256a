"""The columns of a dataset on this disk, from the first bytes of its files; nothing is loaded."""

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path


MAX_BYTES = 2**20
"""How much of a file is looked at."""

_TEXT = {".json", ".jsonl", ".csv", ".tsv"}


def local_columns(path: Path, split: str = "train") -> list[str] | None:
    """The columns of a local dataset.

    Args:
        path: A file, or a folder of them as `datasets.load_dataset` reads it.
        split: The split to prefer, which is part of a file's name or of its folder's.

    Returns:
        The columns; `None` where they cannot be told from a file of text or a Parquet footer.
    """
    for file in _candidates(path, split):
        columns = _columns(file)
        if columns is not None:
            return columns
    return None


def _candidates(path: Path, split: str) -> Iterator[Path]:
    if os.path.isfile(path):
        yield path
        return
    names = sorted(p for p in path.rglob("*") if p.suffix in {*_TEXT, ".parquet"} and not _hidden(p, path))
    named = [p for p in names if split in p.relative_to(path).as_posix().lower()]
    yield from (named or names)[:1]


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(root).parts) or file.name in {
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
    }


def _columns(file: Path) -> list[str] | None:
    try:
        if file.suffix == ".parquet":
            return _parquet(file)
        with file.open(encoding="utf-8-sig") as lines:  # pandas leaves a byte order mark out, too
            text = lines.read(MAX_BYTES)
        if file.suffix in {".csv", ".tsv"}:
            return next(csv.reader(text.splitlines(), delimiter="\t" if file.suffix == ".tsv" else ","), None)
    except (OSError, ValueError, csv.Error):
        return None
    try:
        first, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, list):
        first = first[0] if first else None
    return list(first) if isinstance(first, dict) else None


def _parquet(file: Path) -> list[str] | None:
    """The columns of a Parquet file; pyarrow takes a tenth of a second, and comes with `datasets`."""
    try:
        from pyarrow.lib import ArrowInvalid  # type: ignore[import-untyped]
        from pyarrow.parquet import read_schema  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        return list(read_schema(file).names)
    except ArrowInvalid:
        return None

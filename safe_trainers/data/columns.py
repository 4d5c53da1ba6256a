"""Names of the embedded models and datasets, and the columns that each task needs.

Plain values: neither torch nor TRL is imported here.
"""

import csv
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import Fix, Problem, nearest
from ..core.tasks import TASKS
from ..tiny import FAMILIES


TINY = "tiny:"
"""Prefix of the embedded models and datasets, which need no files: `tiny:aria`, `tiny:shapes`."""

EMBEDDED_MODELS = (*FAMILIES, "reward")
"""The embedded models; `reward` is a text model with a score head."""

BLIND_MODELS = frozenset({"text", "gpt_oss", "reward"})
"""The embedded models that accept no images."""

IMAGES = frozenset({"image", "images"})
"""The columns that hold images."""

EMBEDDED_DATASETS = ("shapes", "preferences")
"""The embedded datasets."""

SHAPES = {
    "sft": ("prompt", "completion", "image"),
    "dpo": ("prompt", "chosen", "rejected", "image"),
    "kto": ("prompt", "completion", "label", "image"),
}
"""The columns of `shapes` for a task; the other tasks get prompts, images and solutions."""


ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""How the names of files with the rows of a dataset end."""


def embedded_name(value: str | None) -> str | None:
    """The name after `tiny:`; `None` if the value does not name an embedded model or dataset.

    Args:
        value: A model or a dataset, as a recipe names it.
    """
    return value.removeprefix(TINY) if value is not None and value.startswith(TINY) else None


def embedded_columns(name: str, task: str) -> tuple[str, ...]:
    """The columns of an embedded dataset.

    Args:
        name: One of `EMBEDDED_DATASETS`.
        task: The task's name, for which the dataset is made.
    """
    return SHAPES.get(task, ("prompt", "image", "solution")) if name == "shapes" else ("chosen", "rejected")


def is_path(name: str) -> bool:
    """Whether a name can only be a folder or a file.

    A name on the hub has at most one slash, does not start with a dot, and does not end as the files of a dataset do.

    Args:
        name: A model or a dataset, as a recipe names it.
    """
    outside = name.startswith((".", "/", "~")) or name.count("/") > 1
    return outside or name.lower().endswith(ENDINGS) or os.path.exists(name)


def missing_columns(
    task: str, name: str, columns: Sequence[str], needs_images: bool, text_field: str = "text"
) -> Problem | None:
    """The problem of a dataset without the columns that a recipe needs.

    Args:
        task: The task's name.
        name: The dataset's name.
        columns: Its columns; empty for a stream that does not tell.
        needs_images: Whether the recipe needs images.
        text_field: The column that holds the text of SFT, `dataset_text_field`.

    Returns:
        The problem, with the columns that are there; `None` if none is missing.
    """
    groups = [[text_field if column == "text" else column for column in group] for group in TASKS[task].columns]
    if columns and not any(set(group) <= set(columns) for group in groups):
        wanted = ", or ".join(" and ".join(group) for group in groups)
        return Problem(f"dataset {name} has the columns {', '.join(columns)}; {task} needs {wanted}")
    if not needs_images or IMAGES & set(columns):
        return None
    similar = next((column for column in columns if nearest(column, sorted(IMAGES))), None)
    what = f"dataset {name} has no `image` or `images` column, only {', '.join(columns)}, and this recipe needs images"
    if similar is not None:
        return Problem(what, fix=Fix(f"rename the column {similar!r} to 'images'"))
    return Problem(what, fix=Fix("use a dataset with images, or write `needs_images=False`"))


MAX_BYTES = 2**20
"""The number of characters of a file that are read."""


_TEXT = {".json", ".jsonl", ".csv", ".tsv"}
_SPACE = re.compile(r"\s*")


_FILE_NAME = re.compile(r"(?:(?P<prefix>.+)_)?file_name(?P<several>s?)")
"""A column of the metadata of a folder of images that names files; the dataset has their images instead."""


def local_columns(path: Path, split: str = "train") -> list[str] | None:
    """The columns of a local dataset.

    Args:
        path: A file, or a folder of them as `datasets.load_dataset` reads it.
        split: The split to prefer, which is a word of a file's name or of its folder's.

    Returns:
        The columns; `None` if neither a text file nor a Parquet footer lists them, or if the folder says itself which
        files belong to which split (`configs` in its README.md).
    """
    if os.path.isfile(path):
        return _columns(path)
    if os.path.isfile(path / "README.md"):
        return None
    names = sorted(p for p in path.rglob("*") if p.suffix in {*_TEXT, ".parquet"} and not _hidden(p, path))
    word = re.compile(rf"(?:^|[-._ 0-9/]){re.escape(split)}(?:[-._ 0-9/]|$)")
    named = [p for p in names if word.search(p.relative_to(path).as_posix().lower())]
    for file in (named or names)[:1]:
        columns = _columns(file)
        if columns is not None and file.stem == "metadata":
            columns = [_of_images(column) for column in columns]
        return columns
    return None


def _of_images(column: str) -> str:
    """The column of a folder of images that `datasets` makes of a column of its metadata."""
    found = _FILE_NAME.fullmatch(column)
    if found is None:
        return column
    return found["prefix"] or ("images" if found["several"] else "image")


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
        with file.open(encoding="utf-8-sig") as lines:  # pandas skips a byte order mark, too
            text = lines.read(MAX_BYTES)
        if file.suffix in {".csv", ".tsv"}:
            return next(csv.reader(text.splitlines(), delimiter="\t" if file.suffix == ".tsv" else ","), None)
    except (OSError, ValueError, csv.Error):
        return None
    return _keys(text)


def _keys(text: str) -> list[str] | None:
    """The keys of all rows of JSON lines, or of the first row of a JSON list; a cut last row is left out."""
    decoder, found = json.JSONDecoder(), dict[str, None]()
    position, rows = _after_space(text, 0), 0
    while position < len(text):
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        if isinstance(row, list):
            row = row[0] if row else None
        if not isinstance(row, dict):
            return None
        found |= dict.fromkeys(row)
        position, rows = _after_space(text, position), rows + 1
    return list(found) if rows else None


def _after_space(text: str, position: int) -> int:
    """The position of the next character that is not white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _parquet(file: Path) -> list[str] | None:
    """The columns of a Parquet file; importing pyarrow, which `datasets` needs, takes a tenth of a second."""
    try:
        from pyarrow.lib import ArrowInvalid  # type: ignore[import-untyped]
        from pyarrow.parquet import read_schema  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        return list(read_schema(file).names)
    except ArrowInvalid:
        return None

"""Checks the rows of a dataset for values that TRL's trainers cannot read."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import Fix, Problem, write
from ..core.tasks import TASKS
from .dataset import IMAGE_KEYS, IMAGES, ROLES
from .images import holds_images


def read_columns(task: str, columns: Sequence[str], text_field: str = "text") -> list[str]:
    """The columns that TRL reads, of the first group of a task's columns that a dataset has.

    Args:
        task: The task's name.
        columns: The dataset's columns.
        text_field: The column that holds the text of SFT, `dataset_text_field`.
    """
    groups = [[text_field if column == "text" else column for column in group] for group in TASKS[task].columns]
    group = next((group for group in groups if set(group) <= set(columns)), [])
    with_prompt = "chosen" in group and "prompt" in columns and "prompt" not in group
    return [*(["prompt"] if with_prompt else []), *group]


def empty_row(dataset: Any, columns: Sequence[str], name: str, kept: bool) -> Problem | None:
    """The problem of a row with a null in a column that TRL reads.

    Args:
        dataset: A `Dataset`.
        columns: The columns to look at.
        name: Name of the dataset, for the message.
        kept: Whether rows of the dataset were left out.

    Returns:
        The problem of the first such row; `None` if there is none.
    """
    for column in columns:
        if dataset.data.column(column).null_count == 0:  # also of rows that are not selected
            continue
        values = dataset.with_format(None).select_columns([column])
        empty = [index for index, row in enumerate(values) if row[column] is None]
        if empty:
            among = " after filtering" if kept else ""
            more = f" and in {len(empty) - 1} other rows" if len(empty) > 1 else ""
            what = f"dataset {name}: column {column!r} is null in row {empty[0]}{among}{more}"
            why = "the trainer reads this column from every row; a missing key counts as null"
            return Problem(what, why, Fix(f"fill in {column!r}, or remove such rows"))
    return None


def images_beside_text(dataset: Any, column: str | None, name: str) -> Problem | None:
    """The problem of a dataset with images whose prompts are plain text without image placeholders.

    Args:
        dataset: A dataset with the columns of a run.
        column: The first of the columns that TRL reads, with the prompts; `None` if they are not known.
        name: Name of the dataset, for the message.

    Returns:
        The problem, with the `dataset_columns` that make conversations of the text; `None` for other datasets, and for
        a stream that does not tell its features.
    """
    features: Mapping[str, Any] = getattr(dataset, "features", None) or {}
    images = next((key for key in IMAGE_KEYS if key in features and holds_images(features[key])), None)
    kind = getattr(features.get(column or ""), "dtype", None)
    if images is None or kind not in ("string", "large_string"):
        return None
    what = f"dataset {name} has images, but its column {column!r} is plain text without image placeholders"
    if column not in ROLES:
        return Problem(what, fix=Fix("use a dataset with conversations in `messages`, or with `prompt`"))
    asked = {key: key for key in features if key not in IMAGE_KEYS}
    why = "with dataset_columns, text becomes a conversation with the images in the user's message"
    return Problem(what, why, write(dataset_columns={**asked, IMAGES: images}))

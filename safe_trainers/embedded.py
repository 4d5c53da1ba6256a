"""Names that recipes may use for models and data made on the spot, and the columns that each task needs.

Plain values: neither torch nor TRL is imported here.
"""

import os
from collections.abc import Sequence

from .errors import nearest
from .tiny import FAMILIES


TINY = "tiny:"
"""Prefix of the embedded models and datasets, which are made on the spot: `tiny:aria`, `tiny:shapes`."""

EMBEDDED_MODELS = (*FAMILIES, "reward")
"""The embedded models; `reward` is a text model with a score head."""

BLIND_MODELS = frozenset({"text", "gpt_oss", "reward"})
"""The embedded models that take no pictures."""

COLUMNS = {
    "grpo": (("prompt",),),
    "rloo": (("prompt",),),
    "sft": (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
    "reward": (("chosen", "rejected"),),
}
"""The columns that each task needs: one of these groups."""

IMAGES = frozenset({"image", "images"})
"""The columns that pictures are in."""

EMBEDDED_DATASETS = {"shapes": ("prompt", "image", "solution"), "preferences": ("chosen", "rejected")}
"""The embedded datasets and their columns."""


def embedded_name(value: str | None) -> str | None:
    """The name behind `tiny:`, `None` where the value names nothing embedded."""
    return value.removeprefix(TINY) if value is not None and value.startswith(TINY) else None


def is_path(name: str) -> bool:
    """Whether a name can only be a folder: hub names have at most one slash, and start with no dot."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.exists(name)


def missing_columns(task: str, name: str, columns: Sequence[str], needs_images: bool) -> str | None:
    """What is wrong with the columns of a dataset.

    Args:
        task: The task's name.
        name: The dataset's name.
        columns: Its columns; none where a stream does not tell.
        needs_images: Whether the recipe needs pictures.

    Returns:
        What is wrong, with the columns that are there; `None` where nothing is.
    """
    if columns and not any(set(group) <= set(columns) for group in COLUMNS[task]):
        wanted = ", or ".join(" and ".join(group) for group in COLUMNS[task])
        return f"dataset {name} has the columns {', '.join(columns)}; {task} needs {wanted}"
    if not needs_images or IMAGES & set(columns):
        return None
    near = next((match for column in columns if (match := nearest(column, sorted(IMAGES)))), None)
    rename = f". Rename its column, or did you mean {near!r}?" if near else ""
    return (
        f"dataset {name} has no `image` or `images` column, only {', '.join(columns)}, and this recipe needs pictures"
        f"{rename or '. Use a dataset with pictures, or write needs_images: false'}"
    )

"""What the keys about a dataset accept, as plain values: `DatasetArguments` and the rules of recipes read it here."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.errors import Place, Problem, write, write_example
from ..policy.settings import Range


RANGES: Mapping[str, Range] = dict.fromkeys(
    ("dataset_limit", "image_min_size", "image_max_size", "image_min_pixels", "image_max_pixels", "image_resize"),
    Range(1, integer=True),
)
"""The numbers that each key accepts; for a list, each of its items."""


def out_of_range(key: str, value: Any, accepted: Range, usual: Any = None) -> Problem | None:
    """The problem of a number, or a list with a number, outside the range of its key.

    Args:
        key: The key.
        value: Its value; `None` is accepted.
        accepted: Its range.
        usual: A value to recommend; by default the nearest in the range.
    """
    numbers = value if isinstance(value, list) else [value]
    wrong = [number for number in numbers if number is not None and number not in accepted]
    if not wrong:
        return None
    nearest = [min(max(number, accepted.low), accepted.high) for number in numbers]
    meant = nearest if isinstance(value, list) else usual if usual in accepted else nearest[0]
    what = f"each number in {key}" if isinstance(value, list) else key
    return Problem(f"{what} must be {accepted}, got {wrong[0]}", fix=write(**{key: meant}), place=Place(key=key))


def contradictions(get: Callable[[str], Any]) -> Iterator[Problem]:
    """What is wrong with the contents of a key of `DatasetArguments`, or with two of them together.

    Args:
        get: The value of a key by its name.

    Yields:
        Problems; their places name the key to change.
    """
    for low, high in (("image_min_size", "image_max_size"), ("image_min_pixels", "image_max_pixels")):
        least, most = get(low), get(high)
        if least is not None and most is not None and least > most:
            yield Problem(f"{low}={least} is above {high}={most}", fix=write(**{low: most}), place=Place(key=low))
    size = get("image_resize")
    if size is not None and len(size) != 2:
        what = f"image_resize must be a width and a height, got {size}"
        yield Problem(what, fix=write(image_resize=[512, 512]), place=Place(key="image_resize"))
    columns: Mapping[str, Any] = get("dataset_columns") or {}
    at = Place(key="dataset_columns")
    for ours, theirs in columns.items():
        if not isinstance(theirs, str):
            what = f"the names of columns in dataset_columns must be strings, got {theirs} for {ours}"
            yield Problem(what, fix=write(dataset_columns={**columns, ours: str(theirs)}), place=at)
    if {"image", "images"} <= set(columns):
        kept = {ours: theirs for ours, theirs in columns.items() if ours != "image"}
        what = "dataset_columns has both `image` and `images`, which name the same column of the run"
        yield Problem(what, fix=write(dataset_columns=kept), place=at)
    if get("prompt_template") is not None and columns and "prompt" not in columns:
        yield no_prompt(columns)


def no_prompt(columns: Mapping[str, Any]) -> Problem:
    """The problem of a `prompt_template` without a prompt to fill.

    Args:
        columns: The run's columns, and their names in the dataset.
    """
    what = "prompt_template makes the prompt, but dataset_columns has no `prompt`"
    fix = write_example(dataset_columns={"prompt": "COLUMN", **columns})
    return Problem(what, fix=fix, place=Place(key="prompt_template"))

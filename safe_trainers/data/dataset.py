"""Converts public datasets to the columns that TRL's trainers read, by the keys of a recipe and without Python code.

```yaml
dataset_name: lmms-lab/multimodal-open-r1-8k-verified
dataset_columns: {prompt: problem, images: image, solution: solution}
system_prompt: Think first, then answer.
image_max_size: 511
image_mode: RGB
```

Images stay encoded as they are in the dataset: they are opened, converted and resized when a row is read. They are
neither copied nor cached.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..core.errors import Fix, Place, Problem, RecipeError, hint, nearest, write, write_example
from .checks import RANGES, contradictions, no_prompt, out_of_range
from .images import MODES, as_list, encoded_feature, finish_image, holds_images, may_hold_images, open_image
from .messages import in_parts, with_roles, with_system


if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = "images"
IMAGE_KEYS = ("image", IMAGES)
"""The keys of `dataset_columns` for images; both become the column `images`, with a list for each row."""

ROLES = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
"""The role of the text in a column; such a column becomes a conversation."""

OPENING = ("prompt", "messages", "chosen", "rejected")
"""Columns that begin a conversation and get the system prompt; the answers do not if there is a prompt."""

_LOOKED_AT = 1000
"""The first rows of a stream, in which the strings for an advice are looked for."""

_FIELD = re.compile(r"\{(\{\w+\})\}|\{([A-Za-z_]\w*)\}")  # {column}; {{word}} stands for {word}, and \boxed{} is text


@dataclass
class DatasetArguments:
    """The keys of a recipe about a dataset's columns and rows.

    Attributes:
        dataset_columns: `{ours: theirs}`: the columns that the run needs, and their names in the dataset; all others
            are left out. Text in `prompt`, `completion`, `chosen` and `rejected` becomes a conversation; `image` or
            `images` holds an image or a list of images. Unset: all columns, converted as these if `prompt_template`
            or `system_prompt` is set, or a key that changes images.
        dataset_filter: `{column: value}` or `{column: [value, ...]}`: rows with other values are left out.
        dataset_limit: The number of rows to use, from the first that the filters keep.
        system_prompt: The system message of each conversation that has none.
        prompt_template: The user's text, with the dataset's columns in braces: `"{question} Answer with a number."`.
        image_min_size: Rows with an image with a shorter side than this are left out, in pixels.
        image_max_size: Rows with an image with a longer side than this are left out, in pixels.
        image_min_pixels: Images with fewer pixels than this are enlarged; the aspect ratio is kept.
        image_max_pixels: Images with more pixels than this are reduced; the aspect ratio is kept.
        image_resize: Width and height to resize each image to, in pixels.
        image_mode: The mode to convert each image to: RGB, RGBA or L (grey).
    """

    dataset_columns: dict[str, str] | str | None = field(
        default=None, metadata={"help": "Columns that the run needs, and their names in the dataset: {ours: theirs}."}
    )
    dataset_filter: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Rows to keep: {column: value} or {column: [value, ...]}."}
    )
    dataset_limit: int | None = field(default=None, metadata={"help": "Number of rows to use."})
    system_prompt: str | None = field(default=None, metadata={"help": "System message of each conversation."})
    prompt_template: str | None = field(
        default=None, metadata={"help": "The user's text, with columns in braces: '{question} Answer briefly.'"}
    )
    image_min_size: int | None = field(default=None, metadata={"help": "Drop rows with a shorter side, in pixels."})
    image_max_size: int | None = field(default=None, metadata={"help": "Drop rows with a longer side, in pixels."})
    image_min_pixels: int | None = field(default=None, metadata={"help": "Enlarge images with fewer pixels."})
    image_max_pixels: int | None = field(default=None, metadata={"help": "Reduce images with more pixels."})
    image_resize: list[int] | None = field(default=None, metadata={"help": "Width and height of each image."})
    image_mode: str | None = field(default=None, metadata={"help": "Mode of each image: RGB, RGBA or L."})

    def __post_init__(self) -> None:
        self.dataset_columns = _mapping("dataset_columns", self.dataset_columns, {"prompt": "problem"})
        self.dataset_filter = _mapping("dataset_filter", self.dataset_filter, {"answer_type": ["integer", "float"]})
        found = [out_of_range(name, getattr(self, name), accepted) for name, accepted in RANGES.items()]
        found += contradictions(lambda name: getattr(self, name))
        if self.image_mode is not None and self.image_mode not in MODES:
            near = nearest(self.image_mode, MODES)
            what = f"image_mode must be one of {', '.join(MODES)}, got {self.image_mode!r}"
            found.append(Problem(what, fix=write(image_mode=near or MODES[0]), place=Place(key="image_mode")))
        wrong = [problem for problem in found if problem is not None]
        if wrong:
            raise RecipeError(wrong)

    @property
    def asks_for_anything(self) -> bool:
        """Whether any of these keys is set."""
        return any(getattr(self, name) is not None for name in DatasetArguments.__dataclass_fields__)


def prepare_dataset(dataset: Any, arguments: DatasetArguments, name: str, *, needs_images: bool = False) -> Any:
    """Converts the columns of a dataset to those of a recipe.

    Args:
        dataset: A `Dataset` or a streamed `IterableDataset`.
        arguments: The recipe's keys.
        name: Name of the dataset, for error messages.
        needs_images: Whether a row without an image is an error.

    Returns:
        The dataset with the recipe's columns. Keys that only choose rows, and `needs_images`, change nothing in them:
        the given dataset is returned if all of its rows are kept. Rows of a stream are read when they are needed.

    Raises:
        RecipeError: For columns that are missing or hold no images, for rows without an image, and if no row is left.
            Images that cannot be read are refused when they are opened: by the size filter, or with their row.
    """
    if not (arguments.asks_for_anything or needs_images):
        return dataset
    plan = _plan(dataset, arguments, name, needs_images)
    return _streamed(dataset, plan) if _is_stream(dataset) else _mapped(dataset, plan)


@dataclass(frozen=True)
class _Plan:
    """How each row is converted: plain values, which can be sent to worker processes.

    Attributes:
        name: Name of the dataset.
        arguments: The recipe's keys.
        columns: Our columns except images, and their names in the dataset.
        images: The dataset's column with images, if there is one.
        needs_images: Whether a row without an image is an error.
    """

    name: str
    arguments: DatasetArguments
    columns: dict[str, str]
    images: str | None
    needs_images: bool

    @property
    def changes_rows(self) -> bool:
        """Whether rows are converted; keys that only choose rows leave them as they are."""
        keys = self.arguments
        asked: list[Any] = [keys.dataset_columns, keys.prompt_template, keys.system_prompt]
        if self.images is not None:
            asked += [keys.image_min_pixels, keys.image_max_pixels, keys.image_resize, keys.image_mode]
        return any(value is not None for value in asked)

    @property
    def looks_at_images(self) -> bool:
        """Whether a row is kept or refused by its images."""
        sizes = self.arguments.image_min_size, self.arguments.image_max_size
        return self.images is not None and (self.needs_images or sizes != (None, None))

    def keeps(self, row: Mapping[str, Any], where: str) -> bool:
        """Whether the filters keep a row; its images are opened only if a size is asked for.

        Raises:
            RecipeError: If it is kept and has no image, but needs one.
        """
        wanted: Mapping[str, Any] = self.arguments.dataset_filter or {}  # type: ignore[assignment]
        for column, values in wanted.items():
            if row[column] not in (values if isinstance(values, list) else [values]):
                return False
        if not self.looks_at_images:
            return True
        value = row[self.images]  # type: ignore[index]
        if self.needs_images and not as_list(value):
            fix = Fix("leave such rows out with `dataset_filter`, or write `needs_images=False`")
            raise RecipeError(Problem(f"{where} has no image", fix=fix))
        least, most = self.arguments.image_min_size, self.arguments.image_max_size
        if least is None and most is None:
            return True
        sizes = [image.size for image in self.opened(value, where)]
        return all((least or 1) <= min(size) and (most is None or max(size) <= most) for size in sizes)

    def strings(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Our columns of a row, without its images."""
        count = len(as_list(row[self.images])) if self.images is not None else None
        return {ours: self._text(ours, theirs, row, count, where) for ours, theirs in self.columns.items()}

    def _text(self, ours: str, theirs: str, row: Mapping[str, Any], count: int | None, where: str) -> Any:
        value = row[theirs]
        if ours == "prompt" and self.arguments.prompt_template is not None:
            given = {**row, **{o: row[t] for o, t in self.columns.items()}}
            value = _fill(self.arguments.prompt_template, given, where)
        if ours in ROLES and value is None:
            raise RecipeError(f"{where}: column {theirs!r}, which is the {ours}, is empty")
        if ours in ROLES and isinstance(value, str):
            value = [{"role": ROLES[ours], "content": value}]
        if not self.begins(ours) or not isinstance(value, list):
            return value
        messages = with_roles(ours, value)
        if count is not None:
            messages = in_parts(messages, count, where)
        return with_system(messages, self.arguments.system_prompt)

    def begins(self, ours: str) -> bool:
        """Whether a column of ours begins a conversation."""
        return ours in OPENING and (ours in ("prompt", "messages") or "prompt" not in self.columns)

    def opened(self, value: Any, where: str) -> list["Image"]:
        """The images of a row, opened; their pixels are not read yet."""
        return [open_image(image, f"{where}: column {self.images!r}") for image in as_list(value)]

    def finished(self, value: Any, where: str) -> list["Image"]:
        """The images of a row, converted and resized."""
        where = f"{where}: column {self.images!r}"
        return [finish_image(open_image(one, where), self.arguments, where) for one in as_list(value)]


class ImageTransform:
    """Opens, converts and resizes the images of rows when they are read; the transform of a dataset.

    Args:
        plan: How they are converted.
        source: The dataset with the encoded images.
    """

    def __init__(self, plan: _Plan, source: Any) -> None:
        self.plan = plan
        self.source = source

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Opens, converts and resizes the images of a batch.

        Args:
            batch: Rows by column; `images` holds their positions in the source.

        Returns:
            The same rows, with lists of images in `images`.
        """
        return {**batch, IMAGES: [self._row(index) for index in batch[IMAGES]]} if IMAGES in batch else batch

    def _row(self, index: int) -> list["Image"]:
        return self.plan.finished(self.source[index][self.plan.images], _row(self.plan, index))


def _plan(dataset: Any, arguments: DatasetArguments, name: str, needs_images: bool) -> _Plan:
    """Checks that the columns that the recipe names are in the dataset."""
    there = list(dataset.column_names or _first_row(dataset, name))
    asked: Mapping[str, str] = arguments.dataset_columns or {column: column for column in there}  # type: ignore[assignment]
    used = {theirs: f"dataset_columns: {{{ours}: {theirs}}}" for ours, theirs in asked.items()}
    used |= {column: f"dataset_filter: {{{column}: ...}}" for column in arguments.dataset_filter or {}}
    if arguments.prompt_template is not None:
        fields = [match[1] for match in _FIELD.findall(arguments.prompt_template) if match[1]]
        used |= {column: f"prompt_template: ...{{{column}}}..." for column in fields if column not in asked}
    missing = [
        Problem(
            f"dataset {name} has no column {column!r}{hint(nearest(column, there))}: it has {', '.join(there)} ({key})"
        )
        for column, key in used.items()
        if column not in there
    ]
    if arguments.prompt_template is not None and "prompt" not in asked:
        missing.append(no_prompt(asked))
    features = getattr(dataset, "features", None) or {}
    named = [asked[key] for key in IMAGE_KEYS if key in asked]
    if not arguments.dataset_columns:  # a column of another kind may have this name
        named = [column for column in named if column not in features or holds_images(features[column])]
    images = next(iter(named), None)
    others = [column for column in features if holds_images(features[column])]
    if images in features and images not in others and (others or not may_hold_images(features[images])):
        near = others[0] if others else None
        missing.append(Problem(f"column {images!r} of dataset {name} does not hold images{hint(near)}"))
    missing += _without_effect(arguments, name, dataset, asked)
    image_keys = [key for key in vars(arguments) if key.startswith("image_") and getattr(arguments, key) is not None]
    if images is None and (image_keys or needs_images) and arguments.dataset_columns:
        why = image_keys[0] if image_keys else "needs_images"
        fix = write(dataset_columns={**asked, IMAGES: "COLUMN"})
        missing.append(
            Problem(f"{why} is for images, but dataset_columns does not name a column with images", fix=fix)
        )
    if missing:
        raise RecipeError(missing)
    columns = {ours: theirs for ours, theirs in asked.items() if ours not in IMAGE_KEYS or theirs not in named}
    return _Plan(name, arguments, columns, images, needs_images and images is not None)


def _without_effect(
    arguments: DatasetArguments, name: str, dataset: Any, asked: Mapping[str, str]
) -> Iterator[Problem]:
    """Yields the problems of keys that would change no row, or leave out all rows, without a message."""
    if arguments.system_prompt is not None and not set(OPENING) & set(asked):
        what = f"system_prompt is for conversations, and dataset {name} has none in the columns {', '.join(asked)}"
        column = next((column for column in ("conversations", *asked) if column in asked), "COLUMN")
        yield Problem(what, fix=write_example(dataset_columns={"messages": column}))
    features = getattr(dataset, "features", None) or {}
    for column, value in (arguments.dataset_filter or {}).items():  # type: ignore[union-attr]
        if "string" not in str(getattr(features.get(column), "dtype", "")):
            continue
        values = value if isinstance(value, list) else [value]
        strange = [one for one in values if isinstance(one, (bool, int, float, date))]
        if strange:
            kind = "true or false" if isinstance(strange[0], bool) else "a number or a date"
            what = f"column {column!r} of dataset {name} holds strings, and YAML reads {strange[0]} as {kind}"
            quoted = _as_written(values, _strings(dataset, column))
            yield Problem(what, fix=write_example(dataset_filter={column: quoted}))


def _strings(dataset: Any, column: str) -> list[str]:
    """The different strings of a column; of a stream, those of its first rows."""
    if _is_stream(dataset):
        found = [row[column] for row in islice(dataset.select_columns([column]), _LOOKED_AT)]
    else:
        found = dataset.unique(column)
    return list(dict.fromkeys(string for string in found if string is not None))


def _as_written(values: Iterable[Any], strings: list[str]) -> list[Any]:
    """The values of a filter as strings of its column; some string of the column if it has none of them."""
    meant = [one if one is None else next((s for s in strings if _means(s, one)), str(one)) for one in values]
    return meant if set(meant) & {None, *strings} else strings[:1] or meant


def _means(string: str, value: Any) -> bool:
    """Whether YAML reads a string without quotes as a value."""
    if isinstance(value, bool):
        return string.lower() in (("yes", "true", "on") if value else ("no", "false", "off"))
    if isinstance(value, (int, float)):
        try:
            return float(string.replace("_", "")) == value
        except ValueError:
            return False
    return string == str(value)


def _mapped(dataset: Any, plan: _Plan) -> Any:
    """The dataset with our columns; images stay encoded until their row is read."""
    from datasets import Dataset

    column = plan.images if plan.changes_rows or plan.looks_at_images else None
    source = dataset.cast_column(column, encoded_feature(dataset.features[column])) if column else dataset
    kept = _kept(source, plan)
    if not kept:
        raise RecipeError(_nothing_left(plan))
    if not plan.changes_rows:
        return dataset if len(kept) == len(dataset) else dataset.select(kept)
    if column:
        plan.opened(source[kept[0]][column], _row(plan, kept[0]))  # so that a wrong column is found now
    chosen = source.select(kept)
    if not plan.columns:
        made = Dataset.from_dict({IMAGES: list(kept)})
    elif _strings_change(chosen, plan):

        def make(row: dict[str, Any], index: int) -> dict[str, Any]:
            strings = plan.strings(row, _row(plan, kept[index]))
            return {**strings, IMAGES: kept[index]} if column else strings

        # Never from datasets' cache, which identifies a function by its name and not by its release.
        made = chosen.map(make, with_indices=True, remove_columns=chosen.column_names, load_from_cache_file=False)
    else:
        renamed = {theirs: ours for ours, theirs in plan.columns.items() if ours != theirs}
        made = chosen.select_columns(list(plan.columns.values())).rename_columns(renamed)
        made = made.add_column(IMAGES, list(kept)) if column else made
    return made.with_transform(ImageTransform(plan, source.select_columns([column]))) if column else made


def _kept(dataset: Any, plan: _Plan) -> Sequence[int]:
    """The positions of the rows that the filters keep."""
    looked_at = list(plan.arguments.dataset_filter or {})
    looked_at += [plan.images] if plan.images is not None and plan.looks_at_images else []
    limit = plan.arguments.dataset_limit or len(dataset)
    if not looked_at:
        return range(min(limit, len(dataset)))
    rows = enumerate(dataset.select_columns(looked_at))
    return list(islice((i for i, row in rows if plan.keeps(row, _row(plan, i))), limit))


def _strings_change(dataset: Any, plan: _Plan) -> bool:
    """Whether any text changes; a dataset whose columns are only renamed is not written again."""
    from datasets import Value

    if plan.arguments.prompt_template is not None or plan.arguments.system_prompt is not None:
        return True
    if len(set(plan.columns.values())) < len(plan.columns):
        return True
    text = {ours for ours, theirs in plan.columns.items() if isinstance(dataset.features[theirs], Value)}
    opened = plan.images is not None and any(map(plan.begins, plan.columns))
    return bool(text & set(ROLES)) or opened


def _streamed(dataset: Any, plan: _Plan) -> Any:
    """The stream with our columns; each row is looked at and converted when it is read."""
    if plan.images is not None and plan.changes_rows and dataset.features is not None:
        dataset = dataset.cast_column(plan.images, encoded_feature(dataset.features[plan.images]))
    where = f"dataset {plan.name}"

    def make(row: dict[str, Any]) -> dict[str, Any]:
        strings = plan.strings(row, where)
        return strings if plan.images is None else {**strings, IMAGES: plan.finished(row[plan.images], where)}

    columns = list(dataset.column_names or _first_row(dataset, plan.name))
    kept = dataset.filter(lambda row: plan.keeps(row, where))
    if plan.changes_rows:
        kept = kept.map(make, remove_columns=columns)
    if plan.arguments.dataset_limit is not None:
        kept = kept.take(plan.arguments.dataset_limit)
    first = _first_row(kept, plan.name, _nothing_left(plan))
    if not plan.changes_rows and plan.images is not None and _left_encoded(dataset, plan.images, first):
        return kept.map(partial(_decoded, plan, where))
    return kept


def _left_encoded(dataset: Any, column: str, row: Mapping[str, Any]) -> bool:
    """Whether a filtered stream gives encoded images where the dataset gives opened ones, as datasets 4.0 and 4.1."""
    feature = None if dataset.features is None else dataset.features[column]
    return (
        holds_images(feature)
        and encoded_feature(feature) != feature
        and any(isinstance(image, dict) for image in as_list(row[column]))
    )


def _decoded(plan: _Plan, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The column with images of a row, opened."""
    value = row[plan.images]  # type: ignore[index]
    opened = plan.opened(value, where)
    return {plan.images: opened if isinstance(value, list) else next(iter(opened), None)}  # type: ignore[dict-item]


def _first_row(dataset: Any, name: str, otherwise: Problem | None = None) -> dict[str, Any]:
    rows: Iterator[dict[str, Any]] = iter(dataset)
    for row in rows:
        return row
    raise RecipeError(otherwise or f"dataset {name} has no rows")


def _nothing_left(plan: _Plan) -> Problem:
    keys = ("dataset_filter", "image_min_size", "image_max_size")
    written = [f"{key}: {getattr(plan.arguments, key)}" for key in keys if getattr(plan.arguments, key) is not None]
    if not written:
        return Problem(f"dataset {plan.name} has no rows")
    return Problem(
        f"dataset {plan.name} has no rows left after {' and '.join(written)}", fix=Fix("filter out fewer rows")
    )


def _mapping(name: str, value: Any, example: dict[str, Any]) -> dict[str, Any] | None:
    made = value
    if isinstance(value, str):
        try:
            made = json.loads(value)
        except ValueError:
            made = value
    if made is not None and (not isinstance(made, dict) or not all(isinstance(key, str) for key in made)):
        raise RecipeError(Problem(f"{name} must be `key: value` pairs, got {value!r}", fix=write(**{name: example})))
    return made or None


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """The template with the row's values; names in braces are looked up, and nothing is evaluated."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        found = row[match[2]]
        if not isinstance(found, (str, int, float)):
            kind = "empty" if found is None else f"a {type(found).__name__}, and not text or a number"
            raise RecipeError(f"{where}: column {match[2]!r}, which prompt_template writes, is {kind}")
        return str(found)

    return _FIELD.sub(value, template)


def _is_stream(dataset: Any) -> bool:
    from datasets import IterableDataset

    return isinstance(dataset, IterableDataset)


def _row(plan: _Plan, index: int) -> str:
    return f"dataset {plan.name}, row {index}"

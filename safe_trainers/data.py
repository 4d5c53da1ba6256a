"""Public datasets as TRL's trainers want them, from plain keys of a recipe and without a line of Python.

```yaml
dataset_name: lmms-lab/multimodal-open-r1-8k-verified
dataset_columns: {prompt: problem, images: image, solution: solution}
system_prompt: Think first, then answer.
image_max_size: 511
image_mode: RGB
```

Pictures stay encoded as they are in the dataset: they are opened, converted and resized when a row is read. No copy of
them is made, and nothing is cached.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from .errors import RecipeError, hint, nearest
from .pictures import MODES, as_list, encoded_feature, finish_picture, holds_pictures, open_picture


if TYPE_CHECKING:
    from PIL.Image import Image as Picture

PLACEHOLDER = "<image>"
"""Where a picture belongs in a text; in a text without any, the pictures come first."""

IMAGES = "images"
PICTURE_KEYS = ("image", IMAGES)
"""The keys of `dataset_columns` that hold pictures; both become the column `images`, a list for each row."""

ROLES = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
"""Who speaks in a column of text; such a column becomes a conversation."""

OPENING = ("prompt", "messages", "chosen", "rejected")
"""Columns that begin a conversation, and so get the system prompt; the answers do not where there is a prompt."""

_FIELD = re.compile(r"\{(\{\w+\})\}|\{([A-Za-z_]\w*)\}")  # {column}; {{word}} stands for {word}, and \boxed{} is text


@dataclass
class DatasetArguments:
    """The keys of a recipe that say what a dataset's columns are.

    Attributes:
        dataset_columns: `{ours: theirs}`: the columns that the run needs, and what they are called in the dataset; all
            others are left out. Text in `prompt`, `completion`, `chosen` and `rejected` becomes a conversation;
            `image` or `images` holds a picture or a list of them. Unset: all columns, as they are.
        dataset_filter: `{column: value}` or `{column: [value, ...]}`: rows with other values are left out.
        dataset_limit: The number of rows to use, the first ones that the filters leave.
        system_prompt: The system message of each conversation that has none.
        prompt_template: The user's text, with the dataset's columns in braces: `"{question} Answer with a number."`.
        image_min_size: Rows with a picture with a shorter side than this are left out, in pixels.
        image_max_size: Rows with a picture with a longer side than this are left out, in pixels.
        image_min_pixels: Pictures with fewer pixels than this are enlarged; the aspect ratio is kept.
        image_max_pixels: Pictures with more pixels than this are reduced; the aspect ratio is kept.
        image_resize: Width and height that each picture is brought to, in pixels.
        image_mode: What each picture is converted to: RGB, RGBA or L (grey).
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
    image_min_pixels: int | None = field(default=None, metadata={"help": "Enlarge pictures with fewer pixels."})
    image_max_pixels: int | None = field(default=None, metadata={"help": "Reduce pictures with more pixels."})
    image_resize: list[int] | None = field(default=None, metadata={"help": "Width and height of each picture."})
    image_mode: str | None = field(default=None, metadata={"help": "Mode of each picture: RGB, RGBA or L."})

    def __post_init__(self) -> None:
        self.dataset_columns = _mapping("dataset_columns", self.dataset_columns, "{prompt: problem, images: image}")
        self.dataset_filter = _mapping("dataset_filter", self.dataset_filter, "{answer_type: [integer, float]}")
        wrong = [repr(v) for v in (self.dataset_columns or {}).values() if not isinstance(v, str)]
        if wrong:
            raise ValueError(
                f"dataset_columns names {', '.join(wrong)}, and columns are text. Write: {{prompt: problem}}"
            )
        if set(PICTURE_KEYS) <= set(self.dataset_columns or {}):
            raise ValueError("dataset_columns has `image` and `images`, which are the same. Drop one of them")
        sizes = ("dataset_limit", "image_min_size", "image_max_size", "image_min_pixels", "image_max_pixels")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small. Write: {name}: 1 or more")
        for low, high in (("image_min_size", "image_max_size"), ("image_min_pixels", "image_max_pixels")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low}={least} is above {high}={most}. Write: {low}: {most} or less")
        if self.image_resize is not None and (len(self.image_resize) != 2 or min(self.image_resize) < 1):
            raise ValueError(
                f"image_resize={self.image_resize} is no width and height. Write: image_resize: [512, 512]"
            )
        if self.image_mode is not None and self.image_mode not in MODES:
            near = hint(nearest(self.image_mode, MODES))
            raise ValueError(f"image_mode={self.image_mode!r} is none of {', '.join(MODES)}{near}")

    @property
    def asks_for_anything(self) -> bool:
        """Whether any of these keys is written."""
        return any(getattr(self, name) is not None for name in DatasetArguments.__dataclass_fields__)


def prepare_dataset(dataset: Any, arguments: DatasetArguments, name: str, *, needs_images: bool = False) -> Any:
    """Makes the columns of a recipe out of those of a dataset.

    Args:
        dataset: A `Dataset` or a streamed `IterableDataset`.
        arguments: The recipe's keys.
        name: Name of the dataset, for error texts.
        needs_images: Whether a row without a picture is an error.

    Returns:
        The dataset with the recipe's columns; the same one where no key asks for anything. Rows of a stream are made
        as they are read.

    Raises:
        RecipeError: For columns that are missing or hold no pictures, for rows without a picture, and where no row is
            left. Pictures that cannot be read are refused when they are first looked at: by the size filter, or with
            their row.
    """
    if not arguments.asks_for_anything:
        return dataset
    plan = _plan(dataset, arguments, name, needs_images)
    return _streamed(dataset, plan) if _is_stream(dataset) else _mapped(dataset, plan)


@dataclass(frozen=True)
class _Plan:
    """What is done to each row: plain values alone, so that worker processes can have it.

    Attributes:
        name: Name of the dataset.
        arguments: The recipe's keys.
        columns: Our columns that are no pictures, and theirs.
        pictures: The dataset's column with pictures, if there is one.
        needs_images: Whether a row without a picture is an error.
    """

    name: str
    arguments: DatasetArguments
    columns: dict[str, str]
    pictures: str | None
    needs_images: bool

    def keeps(self, row: Mapping[str, Any], where: str) -> bool:
        """Whether the filters keep a row; its pictures are looked at only where their size matters."""
        wanted: Mapping[str, Any] = self.arguments.dataset_filter or {}  # type: ignore[assignment]
        for column, values in wanted.items():
            if row[column] not in (values if isinstance(values, list) else [values]):
                return False
        least, most = self.arguments.image_min_size or 1, self.arguments.image_max_size
        if self.pictures is None or (self.arguments.image_min_size is None and most is None):
            return True
        sizes = [picture.size for picture in self.opened(row[self.pictures], where)]
        return all(least <= min(size) and (most is None or max(size) <= most) for size in sizes)

    def texts(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Our columns of a row, without its pictures."""
        count = len(as_list(row[self.pictures])) if self.pictures is not None else None
        self.check_count(count, where)
        return {ours: self._text(ours, theirs, row, count, where) for ours, theirs in self.columns.items()}

    def _text(self, ours: str, theirs: str, row: Mapping[str, Any], count: int | None, where: str) -> Any:
        value = row[theirs]
        if ours == "prompt" and self.arguments.prompt_template is not None:
            value = _fill(self.arguments.prompt_template, {**row, **{o: row[t] for o, t in self.columns.items()}})
        if ours in ROLES and value is None:
            raise RecipeError(f"{where}: column {theirs!r} is empty, and is to be the {ours}")
        if ours in ROLES and isinstance(value, str):
            content = _content(value, count, where) if ours == "prompt" and count is not None else value
            value = [{"role": ROLES[ours], "content": content}]
        begins = ours in OPENING and (ours in ("prompt", "messages") or "prompt" not in self.columns)
        return _with_system(value, self.arguments.system_prompt) if begins and isinstance(value, list) else value

    def check_count(self, count: int | None, where: str) -> None:
        """Refuses a row without a picture, where one is needed."""
        if self.needs_images and not count:
            raise RecipeError(f"{where} has no picture. Leave such rows out, or write: needs_images: false")

    def opened(self, value: Any, where: str) -> list["Picture"]:
        """The pictures of a row, opened; their pixels are not read yet."""
        return [open_picture(picture, f"{where}: column {self.pictures!r}") for picture in as_list(value)]

    def finished(self, value: Any, where: str) -> list["Picture"]:
        """The pictures of a row as the run wants them."""
        self.check_count(len(as_list(value)), where)
        where = f"{where}: column {self.pictures!r}"
        return [finish_picture(open_picture(one, where), self.arguments, where) for one in as_list(value)]


class Pictures:
    """Makes the pictures of the rows that are read; the transform of a dataset.

    Args:
        plan: What is done to them.
        source: The dataset with the encoded pictures.
    """

    def __init__(self, plan: _Plan, source: Any) -> None:
        self.plan = plan
        self.source = source

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Opens, converts and resizes the pictures of a batch.

        Args:
            batch: Rows by column; `images` holds their positions in the source.

        Returns:
            The same, with lists of pictures in `images`.
        """
        return {**batch, IMAGES: [self._row(index) for index in batch[IMAGES]]} if IMAGES in batch else batch

    def _row(self, index: int) -> list["Picture"]:
        return self.plan.finished(self.source[index][self.plan.pictures], _row(self.plan, index))


def _plan(dataset: Any, arguments: DatasetArguments, name: str, needs_images: bool) -> _Plan:
    """Checks the columns that are named against those that are there."""
    there = list(dataset.column_names or _first_row(dataset, name))
    asked: Mapping[str, str] = arguments.dataset_columns or {column: column for column in there}  # type: ignore[assignment]
    used = {theirs: f"dataset_columns: {{{ours}: {theirs}}}" for ours, theirs in asked.items()}
    used |= {column: f"dataset_filter: {{{column}: ...}}" for column in arguments.dataset_filter or {}}
    if arguments.prompt_template is not None:
        fields = [match[1] for match in _FIELD.findall(arguments.prompt_template) if match[1]]
        used |= {column: f"prompt_template: ...{{{column}}}..." for column in fields if column not in asked}
    missing = [
        f"dataset {name} has no column {column!r}{hint(nearest(column, there))}: it has {', '.join(there)} ({key})"
        for column, key in used.items()
        if column not in there
    ]
    if arguments.prompt_template is not None and "prompt" not in asked:
        missing.append("prompt_template makes the prompt, and dataset_columns has none. Write: {prompt: COLUMN, ...}")
    pictures = next((asked[key] for key in PICTURE_KEYS if key in asked), None)
    features = getattr(dataset, "features", None) or {}
    if pictures in features and not holds_pictures(features[pictures]):
        others = [column for column in features if holds_pictures(features[column])]
        near = f"; did you mean {others[0]!r}?" if others else ""
        missing.append(f"column {pictures!r} of dataset {name} holds no pictures{near}")
    image_keys = [key for key in vars(arguments) if key.startswith("image_") and getattr(arguments, key) is not None]
    if pictures is None and (image_keys or needs_images) and arguments.dataset_columns:
        why = image_keys[0] if image_keys else "needs_images"
        missing.append(f"{why} is for pictures, and dataset_columns names none. Write: {{images: COLUMN, ...}}")
    if missing:
        raise RecipeError(missing)
    columns = {ours: theirs for ours, theirs in asked.items() if ours not in PICTURE_KEYS}
    return _Plan(name, arguments, columns, pictures, needs_images and pictures is not None)


def _mapped(dataset: Any, plan: _Plan) -> Any:
    """The dataset with our columns; pictures stay where they are, and are made when a row is read."""
    from datasets import Dataset

    column = plan.pictures
    source = dataset.cast_column(column, encoded_feature(dataset.features[column])) if column else dataset
    kept = _kept(source, plan)
    if not kept:
        raise RecipeError(_nothing_left(plan))
    if column:
        plan.opened(source[kept[0]][column], _row(plan, kept[0]))  # one look, so that a wrong column is found now
    chosen = source.select(kept)
    if not plan.columns:
        made = Dataset.from_dict({IMAGES: list(kept)})
    elif _texts_change(chosen, plan):

        def make(row: dict[str, Any], index: int) -> dict[str, Any]:
            texts = plan.texts(row, _row(plan, kept[index]))
            return {**texts, IMAGES: kept[index]} if column else texts

        # Never from datasets' cache: it knows a function by its name, and not by the release that it came with.
        made = chosen.map(make, with_indices=True, remove_columns=chosen.column_names, load_from_cache_file=False)
    else:
        renamed = {theirs: ours for ours, theirs in plan.columns.items() if ours != theirs}
        made = chosen.select_columns(list(plan.columns.values())).rename_columns(renamed)
        made = made.add_column(IMAGES, list(kept)) if column else made
    return made.with_transform(Pictures(plan, source.select_columns([column]))) if column else made


def _kept(dataset: Any, plan: _Plan) -> Sequence[int]:
    """The positions of the rows that the filters leave."""
    looked_at = list(plan.arguments.dataset_filter or {})
    sizes = plan.arguments.image_min_size, plan.arguments.image_max_size
    looked_at += [plan.pictures] if plan.pictures is not None and any(sizes) else []
    limit = plan.arguments.dataset_limit or len(dataset)
    if not looked_at:
        return range(min(limit, len(dataset)))
    rows = enumerate(dataset.select_columns(looked_at))
    return list(islice((i for i, row in rows if plan.keeps(row, _row(plan, i))), limit))


def _texts_change(dataset: Any, plan: _Plan) -> bool:
    """Whether any text becomes another one; a dataset that is only renamed is not written anew."""
    if plan.arguments.prompt_template is not None or plan.arguments.system_prompt is not None:
        return True
    if len(set(plan.columns.values())) < len(plan.columns):
        return True
    text = [
        ours for ours, theirs in plan.columns.items() if getattr(dataset.features[theirs], "dtype", "") == "string"
    ]
    return bool(set(text) & set(ROLES))


def _streamed(dataset: Any, plan: _Plan) -> Any:
    """The stream with our columns, each row made when it is read."""
    if plan.pictures is not None and dataset.features is not None:
        dataset = dataset.cast_column(plan.pictures, encoded_feature(dataset.features[plan.pictures]))
    where = f"dataset {plan.name}"

    def make(row: dict[str, Any]) -> dict[str, Any]:
        texts = plan.texts(row, where)
        return texts if plan.pictures is None else {**texts, IMAGES: plan.finished(row[plan.pictures], where)}

    columns = list(dataset.column_names or _first_row(dataset, plan.name))
    kept = dataset.filter(lambda row: plan.keeps(row, where)).map(make, remove_columns=columns)
    if plan.arguments.dataset_limit is not None:
        kept = kept.take(plan.arguments.dataset_limit)
    _first_row(kept, plan.name, _nothing_left(plan))
    return kept


def _first_row(dataset: Any, name: str, otherwise: str | None = None) -> dict[str, Any]:
    rows: Iterator[dict[str, Any]] = iter(dataset)
    for row in rows:
        return row
    raise RecipeError(otherwise or f"dataset {name} has no rows")


def _nothing_left(plan: _Plan) -> str:
    keys = ("dataset_filter", "image_min_size", "image_max_size")
    written = [f"{key}: {getattr(plan.arguments, key)}" for key in keys if getattr(plan.arguments, key) is not None]
    why = f" after {' and '.join(written)}. Ask for less" if written else ""
    return f"dataset {plan.name} has no rows left{why}" if written else f"dataset {plan.name} has no rows"


def _mapping(name: str, value: Any, example: str) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{name}={value!r} is no mapping. Write: {name}: {example}") from None
    if value is not None and (not isinstance(value, dict) or not all(isinstance(key, str) for key in value)):
        raise ValueError(f"{name}={value!r} is no mapping. Write: {name}: {example}")
    return value or None


def _fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values; what stands in braces is looked up, and nothing is evaluated."""
    return _FIELD.sub(lambda match: match[1] or str(row[match[2]]), template)


def _content(text: str, count: int, where: str) -> list[dict[str, str | None]]:
    """A message of text and pictures in parts, as chat templates of processors read it."""
    pieces = text.split(PLACEHOLDER)
    if len(pieces) == 1:
        pieces = [""] * count + pieces
    if len(pieces) - 1 != count:
        raise RecipeError(
            f"{where}: the text has {len(pieces) - 1} times {PLACEHOLDER!r}, and the row {count} pictures"
        )
    parts: list[dict[str, str | None]] = []
    for index, piece in enumerate(pieces):
        parts += [{"type": "image", "text": None}] if index else []
        parts += [{"type": "text", "text": piece}] if piece.strip() or len(pieces) == 1 else []
    return parts


def _with_system(messages: list[dict[str, Any]], text: str | None) -> list[dict[str, Any]]:
    if text is None or (messages and messages[0]["role"] == "system"):
        return messages
    in_parts = bool(messages) and isinstance(messages[0]["content"], list)
    return [{"role": "system", "content": [{"type": "text", "text": text}] if in_parts else text}, *messages]


def _is_stream(dataset: Any) -> bool:
    from datasets import IterableDataset

    return isinstance(dataset, IterableDataset)


def _row(plan: _Plan, index: int) -> str:
    return f"dataset {plan.name}, row {index}"

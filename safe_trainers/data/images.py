"""Images of a dataset: opened from the values of a column, and converted to a mode and a size."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from PIL import Image, ImageOps

from ..core.errors import RecipeError


MODES = ("RGB", "RGBA", "L")
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for broken bytes


class ImageKeys(Protocol):
    """The keys of a recipe about images; see `DatasetArguments`."""

    image_min_pixels: int | None
    image_max_pixels: int | None
    image_resize: list[int] | None
    image_mode: str | None


def as_list(value: Any) -> list[Any]:
    """The images of a row as a list.

    Args:
        value: One image, a list of them, or `None`.
    """
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if one is not None]


def open_image(value: Any, where: str) -> Image.Image:
    """Opens an image without reading its pixels.

    Args:
        value: An image, its encoded bytes, or `{"bytes": ..., "path": ...}` as datasets keeps them.
        where: The column, for error messages.

    Returns:
        The image.

    Raises:
        RecipeError: If it is not an image.
    """
    if isinstance(value, Image.Image):
        return value
    source = value if isinstance(value, Mapping) else {"bytes": value}
    content, path = source.get("bytes"), source.get("path")
    if not isinstance(content, (bytes, bytearray)) and not (content is None and isinstance(path, str)):
        raise RecipeError(f"{where} must hold images, got {type(value).__name__}")
    try:
        return Image.open(str(path) if content is None else io.BytesIO(content))
    except _BROKEN as error:
        why = str(error) if content is None else "its bytes are not an image"
        raise RecipeError(f"{where} has a broken image: {why}") from None


def finish_image(opened: Image.Image, keys: ImageKeys, where: str) -> Image.Image:
    """Reads an image's pixels, upright, in the mode and the size that a recipe asks for.

    Args:
        opened: The image.
        keys: The recipe's keys.
        where: The column, for error messages.

    Returns:
        The image.

    Raises:
        RecipeError: If its pixels cannot be read.
    """
    try:
        opened.load()
        image = ImageOps.exif_transpose(opened)
    except _BROKEN as error:
        raise RecipeError(f"{where} has a broken image: {error}") from None
    if keys.image_mode is not None and image.mode != keys.image_mode:
        image = image.convert(keys.image_mode)
    size = new_size(image.size, keys)
    return image if size == image.size else image.resize(size)


def new_size(size: tuple[int, int], keys: ImageKeys) -> tuple[int, int]:
    """The width and height that a recipe asks for, in pixels.

    Args:
        size: Width and height of the image.
        keys: The recipe's keys.
    """
    if keys.image_resize is not None:
        return keys.image_resize[0], keys.image_resize[1]
    if keys.image_max_pixels is not None and size[0] * size[1] > keys.image_max_pixels:
        size = _scaled(size, keys.image_max_pixels, math.floor)
    if keys.image_min_pixels is not None and size[0] * size[1] < keys.image_min_pixels:
        size = _scaled(size, keys.image_min_pixels, math.ceil)
    return size


def _scaled(size: tuple[int, int], pixels: int, rounded: Any) -> tuple[int, int]:
    factor = math.sqrt(pixels / (size[0] * size[1]))
    return max(1, rounded(size[0] * factor)), max(1, rounded(size[1] * factor))


def holds_images(feature: Any) -> bool:
    """Whether a feature of a dataset is an image or a list of images.

    Args:
        feature: A feature of `datasets`.
    """
    from datasets import Image as ImageFeature

    return isinstance(_item(feature), ImageFeature)


def may_hold_images(feature: Any) -> bool:
    """Whether values of a feature can be opened as images: images, encoded bytes, paths, or lists of them.

    Args:
        feature: A feature of `datasets`.
    """
    from datasets import Value

    item = _item(feature)
    if isinstance(item, Value):
        return item.dtype in {"string", "large_string", "binary", "large_binary"}
    return holds_images(feature) or (isinstance(item, Mapping) and bool({"bytes", "path"} & set(item)))


def encoded_feature(feature: Any) -> Any:
    """The feature of the same values as images that stay encoded.

    Args:
        feature: A feature for which `may_hold_images` is true.
    """
    from datasets import Image as ImageFeature
    from datasets import List

    encoded = ImageFeature(decode=False)
    return encoded if _item(feature) is feature else List(encoded)


def _item(feature: Any) -> Any:
    """The feature of the items of a list; any other feature itself."""
    if isinstance(feature, Sequence) and not isinstance(feature, str) and feature:
        return feature[0]
    return getattr(feature, "feature", feature)

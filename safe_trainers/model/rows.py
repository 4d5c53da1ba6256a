"""Divides the images of a batch among its sequences."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


IMAGES = ("pixel_values", "image_grid_thw")
"""The inputs of a model with its images, and with the number of patches of each, if they are of several sizes."""


def images_by_row(inputs: Mapping[str, Any], rows: int) -> list[torch.Tensor] | None:
    """Returns the images of each sequence, as views of `pixel_values`.

    Args:
        inputs: The inputs of the model by name.
        rows: The number of sequences, B.

    Returns:
        B tensors; `None` if there are no images, or if it is not known which image is whose.
    """
    pixels, grid = map(inputs.get, IMAGES)
    if not isinstance(pixels, torch.Tensor):
        return None
    if isinstance(grid, torch.Tensor) and len(grid) == rows:
        return list(pixels.split(grid.prod(-1).tolist()))
    return list(pixels) if len(pixels) == rows else None


def image_marks(inputs: Mapping[str, Any], rows: int) -> list[float] | None:
    """Returns a number for the images of each sequence, by which those of two batches are compared.

    It is a sum of the values with a weight for each place: equal for equal images, and nearly equal for the same image
    in another dtype.

    Args:
        inputs: The inputs of the model by name.
        rows: The number of sequences, B.

    Returns:
        B numbers; `None` as in `images_by_row`.
    """
    images = images_by_row(inputs, rows)
    if not images:
        return None
    found = []
    for image in images:
        values = image.detach().reshape(-1)
        found.append(values.float() @ torch.linspace(1.0, 2.0, len(values), device=values.device))
    return torch.stack(found).tolist()


def with_marks(method: Callable[..., Any], note: Callable[[Callable[[int], list[float] | None]], None]) -> Any:
    """Returns a function that calls a method, and then tells which images it got.

    Args:
        method: Takes the inputs of the model by name.
        note: Gets a function that returns `image_marks` of the call for a number of sequences.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        note(lambda rows: image_marks(kwargs, rows))
        return output

    return call

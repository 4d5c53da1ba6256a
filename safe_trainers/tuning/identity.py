"""What measurements depend on, so that those of another run are not taken from a file."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..core.versions import __version__


_SEARCHED = ("bf16", "fp16", "precision", "fp32_modules")
"""Arguments that a search sets; measurements are stored by precision and modules."""


def identity_of(
    target: str, trainer: Any, searched: Sequence[Sequence[Any]], selection: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Returns what the measurements of a search depend on, as plain values.

    Args:
        target: What is tuned.
        trainer: The trainer of the first precision.
        searched: The batches of the search.
        selection: The batches of the selection.
    """
    sums = [float(p.detach().flatten()[:64].double().sum()) for p in trainer.model.parameters()]
    config = getattr(trainer.model, "config", None)
    folder = str(trainer.args.output_dir)
    settings = {
        name: json.loads(json.dumps(value, default=_name_of))
        for name, value in trainer.args.to_dict().items()
        if name not in _SEARCHED and folder not in str(value)  # a search has a folder of its own
    }
    return {
        "target": target,
        "versions": [__version__, torch.__version__],
        "device": str(trainer.accelerator.device),
        "model": [
            type(trainer.model).__name__,
            str(getattr(config, "_attn_implementation", None)),
            len(sums),
            sum(sums),
        ],
        "settings": settings,
        "sequences": [len(rows) for rows in searched],
        "rows": hash_of_rows(row for batches in (searched, selection) for rows in batches for row in rows),
    }


def hash_of_rows(rows: Iterable[Any]) -> str:
    """Returns a hash of all columns of rows: a rollout uses prompts and images, its environment any other column.

    Args:
        rows: The rows.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(_plain(row)).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """The value for JSON, with a hash in place of the content of images, arrays and bytes.

    Of other objects, such as decoders of audio, only the class counts.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return [[str(key), _plain(part)] for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Image.Image):
        return [value.mode, value.size, _plain(value.tobytes()), value.getpalette()]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return [str(value.dtype), list(value.shape), _plain(content.tobytes())]
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            return _plain(value.tolist())
        return [str(value.dtype), list(value.shape), _plain(value.tobytes())]
    return type(value).__name__


def _name_of(value: Any) -> str:
    """What stands for a value that JSON does not have: an object of which only the class counts."""
    return type(value).__name__

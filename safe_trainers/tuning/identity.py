"""What measurements depend on, so that those of another run are not taken from a file."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

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
        "prompts": _hash_of(row for batches in (searched, selection) for rows in batches for row in rows),
    }


def _hash_of(rows: Iterable[Any]) -> str:
    """A hash of the prompts of rows; of images only the number counts."""
    digest = hashlib.sha256()
    for row in rows:
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        digest.update(json.dumps(prompt, default=_name_of).encode())
    return digest.hexdigest()


def _name_of(value: Any) -> str:
    """What stands for a value that JSON does not have: an object of which only the class counts."""
    return type(value).__name__

"""Whether saved adapters fit the model that they are to be loaded into, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from .errors import Problem, refuse, warn
from .towers import unwrap


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base_of(model: Any) -> str | None:
    """The name that a base model was loaded by, `None` where it has none."""
    return getattr(getattr(unwrap(model), "config", None), "_name_or_path", None) or None


def another_base(name: str, trained: str | None, model: Any) -> Problem | None:
    """The warning about an adapter that was trained on a base of another name.

    Args:
        name: What the adapter is called.
        trained: The base that its config names.
        model: The model that it sits on, or is to be loaded into.

    Returns:
        The warning; `None` where the last parts of the two names are the same, or one is unknown.
    """
    base = base_of(model)
    if not trained or not base or _folder(trained) == _folder(base):
        return None
    return warn("adapter-of-another-base", f"the adapter {name!r}", trained=trained, base=base)


def misfit(folder: Path, model: nn.Module) -> Problem | None:
    """The refusal of saved adapters whose tensors are not those of the model's adapters.

    Args:
        folder: A checkpoint.
        model: The model with its adapters.

    Returns:
        The problem, which names a tensor; `None` where all fit, and without adapters on either side.
    """
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    from peft import get_peft_model_state_dict

    for name in configs:
        file = folder / WEIGHTS if name == "default" else folder / name / WEIGHTS
        if not file.is_file():
            continue
        live = {key: list(t.shape) for key, t in get_peft_model_state_dict(model, adapter_name=name).items()}
        with safe_open(file, "pt") as opened:
            saved = {key: list(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        # PEFT saves embeddings beside an adapter, or not, by rules of its own.
        absent = [key for key in live.keys() ^ saved.keys() if ".lora_" in key]
        differing = [key for key in live.keys() & saved.keys() if live[key] != saved[key]]
        if absent or differing or not live.keys() & saved.keys():
            key = sorted(differing or absent or saved or live)[0]
            detail = f"{key} is {saved.get(key, 'absent')} in the file and {live.get(key, 'absent')} in this run"
            return refuse("adapter-does-not-fit", f"resume_from_checkpoint={str(folder)!r}", detail=detail)
    return None


def saved_base(folder: Path) -> str | None:
    """The base that the adapter of a checkpoint names; `None` where there is no adapter, or it names none."""
    config = folder / CONFIG
    if not config.is_file():
        return None
    named: str | None = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return named


def _folder(name: str) -> str:
    """The last part of a model's name, the same for the Hub's and for a folder that it was copied to."""
    return name.rstrip("/").split("/")[-1]

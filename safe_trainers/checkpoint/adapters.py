"""Checks before loading whether saved adapters match the model."""

import json
from pathlib import Path

from safetensors import safe_open
from torch import nn

from ..core.errors import Problem, refuse


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def misfit(folder: Path, model: nn.Module) -> Problem | None:
    """Refuses saved adapters that differ from those of the model, and full weights in place of adapters or vice versa.

    Args:
        folder: A checkpoint.
        model: The model with its adapters.

    Returns:
        The refusal, which names a tensor; `None` if all match.
    """
    configs, what = getattr(model, "peft_config", None), f"resume_from_checkpoint={str(folder)!r}"
    if not configs:
        if not (folder / CONFIG).is_file():
            return None
        fix = "set `use_peft=True` (or `peft_config`) as in that run, or pass the merged model to a new run"
        return refuse("checkpoint-of-other-weights", what, saved="adapters", trained="all weights", fix=fix)
    if not any(folder.rglob(CONFIG)) and any(folder.glob("model*.safetensors")):
        fix = "drop `use_peft` (or `peft_config`), or pass the checkpoint as the model of a new run"
        return refuse("checkpoint-of-other-weights", what, saved="all weights", trained="adapters", fix=fix)
    from peft import get_peft_model_state_dict

    for name in configs:
        file = folder / WEIGHTS if name == "default" else folder / name / WEIGHTS
        if not file.is_file():
            continue
        live = {key: list(t.shape) for key, t in get_peft_model_state_dict(model, adapter_name=name).items()}
        with safe_open(file, "pt") as opened:
            saved = {key: list(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        # Other tensors may be absent, because PEFT saves embeddings with an adapter only in some cases.
        absent = [key for key in live.keys() ^ saved.keys() if ".lora_" in key]
        differing = [key for key in live.keys() & saved.keys() if live[key] != saved[key]]
        if absent or differing or not live.keys() & saved.keys():
            key = sorted(differing or absent or saved or live)[0]
            detail = f"{key} is {saved.get(key, 'absent')} in the file and {live.get(key, 'absent')} in this run"
            return refuse("adapter-does-not-fit", what, detail=detail)
    return None


def saved_base(folder: Path) -> str | None:
    """Returns the base model in the adapter config of a checkpoint; `None` if there is none."""
    config = folder / CONFIG
    if not config.is_file():
        return None
    named: str | None = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return named

"""Weights on their way into files, cast to `save_dtype`, and back, under the names that they were saved by."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint_files import damaged
from .dtypes import FLOAT16, FLOAT32, to_torch
from .errors import CheckpointError, refuse
from .file_checks import replace_file, safetensors_dtypes
from .towers import adapter_parameters, is_quantized, unwrap


_FLOAT16_MAX = torch.finfo(torch.float16).max
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def saved_under_other_names(model: nn.Module, checkpoint: Path) -> bool:
    """Whether a full model's weights have other names in its files than in the live model.

    transformers writes many families, most vision-language models among them, by the names that the hub has, and reads
    its own checkpoints back by the live names: it finds none of them, says so in a log line, and trains on with the
    weights that were there.

    Args:
        model: The live model.
        checkpoint: The folder; only safetensors files in it are looked at.
    """
    live = model.state_dict().keys()
    return any(safetensors_dtypes(file).keys() - live for file in checkpoint.glob("model*.safetensors"))


def load_as_saved(model: nn.Module, checkpoint: Path) -> None:
    """Loads a checkpoint into a live model by the way that knows its names, `from_pretrained`.

    Args:
        model: The live model; its weights are overwritten in place and keep their dtypes.
        checkpoint: The folder.

    Raises:
        CheckpointError: If the files do not hold all of the weights, or some of another shape.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # widening and narrowing again is exact
    family: Any = type(model)
    own = copy.deepcopy(model.config)  # another model's config has this family build one of its default size
    try:
        saved, found = family.from_pretrained(checkpoint, config=own, dtype=dtype, output_loading_info=True)
    except RuntimeError as error:
        names = ", ".join(sorted(file.name for file in checkpoint.glob("model*.safetensors")))
        why = str(error).strip().partition("\n")[0]
        raise damaged(checkpoint, f"{names} does not fit this {family.__name__}: {why}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise damaged(checkpoint, f"{len(missing)} weights such as {missing[0]} are in none of its files")
    model.load_state_dict(saved.state_dict())


def cast_weights(model: nn.Module, state_dict: dict[str, Any], dtype: str) -> tuple[dict[str, Any], str]:
    """Casts the weights that a file will hold.

    Never cast: buffers, packed weights and what belongs to them, and weights that the model's class wants in float32.

    Args:
        model: The model, wrapped by PEFT or not.
        state_dict: Its weights by name; not changed.
        dtype: Canonical name of the dtype.

    Returns:
        A new mapping, tied weights still one tensor; and in words, what was left as it was.

    Raises:
        CheckpointError: If a finite weight becomes infinite.
    """
    target, plan = to_torch(dtype), kept_in_float32(model, dtype)
    written = _beside_base(model) if hasattr(model, "peft_config") else None
    cast: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    for name, parameter in model.named_parameters():
        tensor = state_dict.get(name)
        if tensor is None or (written is not None and id(parameter) not in written):
            continue
        if (
            is_quantized(parameter)
            or tensor.dtype not in _WEIGHT_DTYPES
            or tensor.is_meta
            or (plan and plan.search(name))
        ):
            kept.append(name)
            continue
        if dtype == FLOAT16 and tensor.dtype != torch.float16 and tensor.numel():
            largest = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
            if largest > _FLOAT16_MAX:
                given = f"save_dtype={dtype!r}"
                raise CheckpointError([refuse("save-dtype-overflows", given, name=name, value=f"{largest:,.0f}")])
        cast[name] = tensor.to(target)
    by_tensor = {_same(state_dict[name]): tensor for name, tensor in cast.items()}
    made = {
        name: by_tensor.get(_same(value), value) if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }
    return made, f"{len(kept)} weights such as {kept[0]}" if kept else ""


def _same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for two names of one tensor, as tied weights are."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _beside_base(model: nn.Module) -> set[int]:
    """The parameters, by identity, that PEFT may write: adapters, what else is trained, and resized embeddings."""
    base = unwrap(model)
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]  # type: ignore[operator]
    beside = [
        *adapter_parameters(model),
        *(p for module in embeddings if module is not None for p in module.parameters()),
    ]
    return {id(p) for p in (*beside, *(p for p in model.parameters() if p.requires_grad))}


def kept_in_float32(model: nn.Module, dtype: str) -> re.Pattern[str] | None:
    """The weights that `from_pretrained` would load in float32 whatever it is asked for."""
    lists = ["_keep_in_fp32_modules_strict"] * (dtype != FLOAT32) + ["_keep_in_fp32_modules"] * (dtype == FLOAT16)
    names = sorted({name for attribute in lists for name in getattr(model, attribute, None) or ()})
    return re.compile("|".join(rf"(^|\.){name}(\.|$)" for name in names)) if names else None


def declare_dtype(config: Path, dtype: str) -> None:
    """Writes the dtype into a config file, also for the parts of a composed model.

    Args:
        config: The file; where there is none, nothing is done.
        dtype: Canonical name of the dtype.
    """
    if not config.is_file():
        return

    def declared(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: dtype if key == "dtype" and isinstance(entry, str)
            else entry if key == "quantization_config" else declared(entry)
            for key, entry in value.items()
        }  # fmt: skip

    text = json.dumps(declared(json.loads(config.read_text(encoding="utf-8"))), indent=2, sort_keys=True) + "\n"
    replace_file(config, lambda file: file.write(text.encode()))

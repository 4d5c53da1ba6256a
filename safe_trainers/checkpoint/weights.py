"""Casts weights to `save_dtype`, and loads checkpoints whose weights have other names than in the model."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.dtypes import FLOAT16, to_torch
from ..core.errors import CheckpointError, refuse
from ..core.patches import patched
from ..model.parts import adapter_parameters, is_quantized, unwrap
from ..weights.keep_fp32 import kept_in_float32
from .folder import damaged
from .integrity import safetensors_dtypes


_FLOAT16_MAX = torch.finfo(torch.float16).max
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def saved_under_other_names(model: nn.Module, checkpoint: Path) -> bool:
    """Whether the weights of a full model have other names in a checkpoint than in the model.

    transformers saves many families, such as most vision-language models, with the names of the Hub, but resumes with
    the names of the model. It then loads nothing, reports this only in the log, and trains with the initial weights.

    Args:
        model: The model.
        checkpoint: The folder; only its safetensors files are checked.
    """
    live = model.state_dict().keys()
    return any(safetensors_dtypes(file).keys() - live for file in checkpoint.glob("model*.safetensors"))


def load_as_saved(model: nn.Module, checkpoint: Path) -> None:
    """Loads a checkpoint into a model with `from_pretrained`, which converts names.

    Args:
        model: The model; its weights are overwritten in place and keep their dtypes.
        checkpoint: The folder.

    Raises:
        CheckpointError: If weights are missing, or have another shape.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # a cast to float32 and back is exact
    family: Any = type(model)
    config = copy.deepcopy(model.config)  # with the config of another family, a model of default size would be built
    try:
        saved, found = family.from_pretrained(checkpoint, config=config, dtype=dtype, output_loading_info=True)
    except RuntimeError as error:
        names = ", ".join(sorted(file.name for file in checkpoint.glob("model*.safetensors")))
        why = str(error).strip().partition("\n")[0]
        raise damaged(checkpoint, f"{names} does not match this {family.__name__}: {why}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise damaged(checkpoint, f"its files lack {len(missing)} of the model's weights, such as {missing[0]}")
    model.load_state_dict(saved.state_dict())


def cast_weights(model: nn.Module, state_dict: dict[str, Any], dtype: str) -> tuple[dict[str, Any], str]:
    """Casts the weights that will be saved.

    Buffers, packed weights with their statistics, and weights that the model class keeps in float32 are not cast.

    Args:
        model: The model, possibly wrapped by PEFT.
        state_dict: The weights by name, which are not modified.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.

    Returns:
        A new mapping, in which tied weights are still one tensor; and a description of weights that were not cast.

    Raises:
        CheckpointError: If a finite weight becomes infinite.
    """
    plan = kept_in_float32(model, dtype)
    written = _saved_by_peft(model) if hasattr(model, "peft_config") else None
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
        cast[name] = _cast(name, tensor, dtype)
    by_tensor = {_same(state_dict[name]): tensor for name, tensor in cast.items()}
    weights = {
        name: by_tensor.get(_same(value), value) if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }
    return weights, f"{len(kept)} weights such as {kept[0]}" if kept else ""


@contextlib.contextmanager
def virtual_tokens_cast(model: nn.Module, dtype: str) -> Iterator[None]:
    """Makes PEFT save the virtual tokens of prompt learning in a dtype while the block runs.

    PEFT computes them from the prompt encoder, and not from the weights that are passed to `save_pretrained`.

    Args:
        model: The model, possibly wrapped by PEFT.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.

    Raises:
        CheckpointError: If a finite number becomes infinite; the block has not run.
    """
    configs = getattr(model, "peft_config", None) or {}
    names = [name for name, config in configs.items() if config.is_prompt_learning]
    if not names:
        yield
        return
    from peft import peft_model

    original = peft_model.get_peft_model_state_dict
    cast = {
        name: {key: _cast(key, tensor, dtype) for key, tensor in original(model, adapter_name=name).items()}
        for name in names
    }

    def get_peft_model_state_dict(owner: nn.Module, *args: Any, adapter_name: str, **kwargs: Any) -> dict[str, Any]:
        if adapter_name in cast:
            return cast[adapter_name]
        return original(owner, *args, adapter_name=adapter_name, **kwargs)

    with patched("saved-virtual-tokens", peft_model, get_peft_model_state_dict=get_peft_model_state_dict):
        yield


def _cast(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns a weight in `save_dtype`, unless a finite number becomes infinite."""
    if dtype == FLOAT16 and tensor.dtype != torch.float16 and tensor.numel():
        largest = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        if largest > _FLOAT16_MAX:
            what = f"save_dtype={dtype!r}"
            raise CheckpointError([refuse("save-dtype-overflows", what, name=name, value=f"{largest:,.0f}")])
    return tensor.to(to_torch(dtype))


def _same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two names of one tensor, such as tied weights."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _saved_by_peft(model: nn.Module) -> set[int]:
    """Returns the `id`s of parameters that PEFT may save: adapters, other trained parameters, and embeddings."""
    base = unwrap(model)
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]  # type: ignore[operator]
    saved = [
        *adapter_parameters(model),
        *(p for module in embeddings if module is not None for p in module.parameters()),
    ]
    return {id(p) for p in (*saved, *(p for p in model.parameters() if p.requires_grad))}

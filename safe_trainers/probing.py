"""Asking a live model something without changing anything of the run."""

import contextlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from .dtypes import HALVES, to_torch
from .errors import Problem, refuse
from .policy import FLAG_OF, OFF
from .towers import is_quantized, unwrap


logger = logging.getLogger(__name__)
_DTYPE_ERROR = re.compile(r"dtype|scalar ?type|should be the same", re.IGNORECASE)
"""How torch's errors about two dtypes are worded, on CPU and CUDA."""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, no running statistics, and the same random state afterwards.

    Args:
        model: The model that is asked in the block.
    """
    before = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    devices = [device] if device.type not in {"cpu", "meta"} else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        for module in before:
            # A quantised layer that evaluates may repack its weights for good (bitsandbytes on CPU).
            module.training = any(is_quantized(parameter) for parameter in module.parameters(recurse=False))
        try:
            yield
        finally:
            for module, training in before.items():
                module.training = training


def sample_inputs(processing_class: Any) -> Mapping[str, torch.Tensor]:
    """Inputs of one short question, with a grey picture or silence where the processor takes pictures or sounds.

    Args:
        processing_class: The tokenizer or processor of the trainer.

    Returns:
        Model inputs of one row; two tokens alone where there is no processor with a chat template.
    """
    sees, hears = hasattr(processing_class, "image_processor"), hasattr(processing_class, "feature_extractor")
    if not (sees or hears) or getattr(processing_class, "chat_template", None) is None:
        tokens = torch.ones((1, 2), dtype=torch.long)  # (B, T)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    media: dict[str, Any]
    if sees:
        media = {"images": [[Image.new("RGB", (64, 64), (128, 128, 128))]]}
    else:
        media = {"audio": [np.zeros(processing_class.feature_extractor.sampling_rate, np.float32)]}  # a second
    question = [{"role": "user", "content": [{"type": "image" if sees else "audio"}, {"type": "text", "text": "?"}]}]
    text = processing_class.apply_chat_template(question, add_generation_prompt=True)
    return dict(processing_class(text=[text], return_tensors="pt", **media))


def cannot_meet(
    model: nn.Module, processing_class: Any, weights: frozenset[str], autocast: str, error: str
) -> Problem:
    """The refusal of a model in which two dtypes meet whatever is done, with the line that mends it.

    Args:
        model: The model.
        processing_class: The processor, where the run has pictures; `None` for text alone.
        weights: The dtypes of its weights.
        autocast: The autocast dtype of the run, or `"off"`.
        error: What torch says.
    """
    half = sorted(weights & HALVES)[0] if autocast == OFF else autocast
    fix = (
        f"load all weights in one dtype: `from_pretrained(..., dtype='{half}')`, or "
        f"`model_init_kwargs={{'dtype': '{half}'}}`"
    )
    if autocast == OFF and failure(model, processing_class, half) is None:
        fix = f"`{FLAG_OF[half]}=True`, so that autocast gives both the same dtype"
    given = f"{' and '.join(sorted(weights))} weights " + (
        f"under {autocast} autocast" if autocast != OFF else "without autocast"
    )
    return refuse("mixed-weights-cannot-meet", given, error=error, fix=fix)


def failure(model: nn.Module, processing_class: Any, autocast: str) -> str | None:
    """Runs a short question through a model of several dtypes, to see whether it can compute.

    Boundaries mend what meets in a layer, and what towers give back. Whether a model multiplies weights of its own
    (fused experts), or casts features once more by itself, is in code that no census can read; so the model is asked.

    Args:
        model: The model, wrapped by PEFT or not.
        processing_class: The processor, where the run has pictures; `None` for text alone.
        autocast: The autocast dtype of the run, or `"off"`.

    Returns:
        What torch says where two dtypes meet; `None` where the model computes, or cannot be asked: an engine has not
        filled it yet, its kernels need a device that it is not on, or it takes other inputs.
    """
    model = unwrap(model)
    if any(parameter.is_meta or parameter.numel() == 0 for parameter in model.parameters()):
        return None
    device = next(model.parameters()).device
    context = contextlib.nullcontext() if autocast == OFF else torch.autocast(device.type, to_torch(autocast))
    try:
        inputs = sample_inputs(processing_class)
        with undisturbed(model), context:
            for cached in _caches(model):
                model(**{name: value.to(device) for name, value in inputs.items()}, **cached)
    except Exception as error:
        if isinstance(error, RuntimeError) and _DTYPE_ERROR.search(str(error)):
            return str(error)
        logger.info("the model could not be asked whether it computes: %s: %s", type(error).__name__, error)
    return None


def _caches(model: nn.Module) -> list[dict[str, bool]]:
    """With a cache, as `generate` runs a model, and without, as training does.

    A cache holds keys and values in one dtype, and so hides that they disagree.
    """
    takes = inspect.signature(model.forward).parameters.values()
    if any(parameter.name == "use_cache" or parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return [{"use_cache": True}, {"use_cache": False}]
    return [{}]

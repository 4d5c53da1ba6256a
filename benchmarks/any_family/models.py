"""Builds a tiny model of any multimodal family of transformers, and a processor that makes its sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto import modeling_auto

from safe_trainers import tiny
from safe_trainers.model.parts import find_parts

from .inputs import Inputs, find_inputs
from .overrides import CHANGES
from .shrink import small_config


LARGEST = 30_000_000
"""The largest number of parameters of a model that is built."""


def families() -> dict[str, str]:
    """Returns the class of each multimodal family that the auto classes of the installed transformers list."""
    found: dict[str, str] = {}
    for name in ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        for family, model_class in getattr(modeling_auto, name, {}).items():
            found.setdefault(family, model_class[0] if isinstance(model_class, tuple | list) else model_class)
    return dict(sorted(found.items()))


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """Builds a tiny model with random weights in float32.

    Args:
        family: One of `families()`.
        seed: Seed of the weights.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        ValueError: If the model has no forward pass, or would have more than `LARGEST` parameters.
    """
    tokenizer = tiny.build_tokenizer("text")
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = small_config(family, special, CHANGES.get(family, {}))
    model_class = getattr(transformers, families()[family])
    if model_class.forward is nn.Module.forward:
        raise ValueError(f"{model_class.__name__} has no forward pass, only parts that have one")
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"the model has {size / 1e6:.0f} million parameters, more than {LARGEST / 1e6:.0f}")
    torch.manual_seed(seed)
    return wake(model_class(config)).eval()


def wake(model: PreTrainedModel) -> PreTrainedModel:
    """Gives random values to weights that are initialised with zeros, such as gates, through which no media pass."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("bias") and parameter.numel() and parameter.abs().max() < 1e-3:
                nn.init.normal_(parameter, std=0.1 if parameter.ndim < 2 else 0.02)
    return model


class Sampler(ProcessorMixin):
    """A processor that answers every call with the sample of a family.

    Args:
        tokenizer: The tokenizer.
        sample: The inputs of the model, without labels.
        kind: `"image"` or `"sound"`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sample: Mapping[str, Any], kind: str) -> None:
        self.tokenizer, self._sample = tokenizer, sample
        self.chat_template = tokenizer.chat_template
        if kind == "image":
            self.image_processor = object()
        else:
            self.feature_extractor = _Extractor()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the sample."""
        return dict(self._sample)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        """Returns no text, because the sample does not depend on it."""
        return ""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> list[str]:
        """Saves nothing."""
        return []


class _Extractor:
    sampling_rate = 16000


def lora_targets(model: nn.Module) -> list[str]:
    """Returns the names of the linear layers of the text model, without the output head."""
    text = find_parts(model).text
    head = model.get_output_embeddings()
    chosen = {id(module) for module in text.modules() if isinstance(module, nn.Linear)} - {id(head)}
    return [name for name, module in model.named_modules() if id(module) in chosen]


__all__ = ["LARGEST", "Inputs", "Sampler", "build", "families", "find_inputs", "lora_targets", "wake"]

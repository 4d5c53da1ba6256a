"""Tiny image models of many families, as vLLM accepts them: with video processors, and with heads of 32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from benchmarks import families
from benchmarks.families import models as family_models
from safe_trainers.tiny import models as tiny_models
from safe_trainers.tiny.families import IMAGE_SIZE, PATCH_SIZE
from safe_trainers.tiny.saving import write


AREA = {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}
PATCHES = {"patch_size": PATCH_SIZE, "merge_size": 2, "temporal_patch_size": 2}


def _with_videos(name: str, videos: str, **options: Any) -> Callable[[Any], Any]:
    """Rebuilds a processor as its own class, with the video processor that vLLM requires."""

    def build(processor: Any) -> Any:
        return getattr(transformers, name)(
            image_processor=processor.image_processor,
            tokenizer=processor.tokenizer,
            video_processor=getattr(transformers, videos)(**options),
            chat_template=processor.chat_template,
            **({"image_seq_length": processor.image_seq_length} if name == "InternVLProcessor" else {}),
            **({"image_seq_len": processor.image_seq_len} if name == "SmolVLMProcessor" else {}),
        )

    return build


def _pixtral(merge: int) -> Callable[[Any], Any]:
    def build(processor: Any) -> Any:
        return transformers.PixtralProcessor(
            image_processor=transformers.PixtralImageProcessor(
                size={"longest_edge": IMAGE_SIZE}, patch_size={"height": PATCH_SIZE, "width": PATCH_SIZE}
            ),
            tokenizer=processor.tokenizer,
            patch_size=PATCH_SIZE,
            spatial_merge_size=merge,
            chat_template=processor.chat_template,
        )

    return build


PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "qwen2_vl": _with_videos("Qwen2VLProcessor", "Qwen2VLVideoProcessor", size=AREA, **PATCHES),
    "qwen2_5_vl": _with_videos("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", size=AREA, **PATCHES),
    "qwen3_vl": _with_videos("Qwen3VLProcessor", "Qwen3VLVideoProcessor", size=AREA, **PATCHES),
    "glm4v": _with_videos("Glm4vProcessor", "Glm4vVideoProcessor", size=AREA, **PATCHES),
    "internvl": _with_videos("InternVLProcessor", "InternVLVideoProcessor"),
    "smolvlm": _with_videos("SmolVLMProcessor", "SmolVLMVideoProcessor"),
    "pixtral": _pixtral(1),
    "mistral3": _pixtral(2),
}
TOKENS = {
    "gemma3": ["\n", "\n\n", "\n\n\n", "\n\n\n\n"],
    "idefics3": ["\n\n"],
    "pixtral": ["[IMG_BREAK]", "[IMG_END]"],
    "mistral3": ["[IMG_BREAK]", "[IMG_END]"],
}
"""Tokens that vLLM looks up in the vocabulary of a family."""
FAMILIES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "idefics3", "smolvlm", "gemma3", "llava", "llava_next", "internvl",
    "pixtral", "mistral3",
)  # fmt: skip


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """Writes a model that vLLM can sample from, and its processor.

    Args:
        family: One of `FAMILIES`, or a text family of `safe_trainers.tiny`.
        folder: The folder to write.
        seed: Seed of the weights.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_HEADS", 2)  # vLLM's attention on the CPU needs heads of 32 or more
        patch.setattr(family_models, "HEADS", 2)
        patch.setattr(family_models, "HEAD", 32)
        if family == "glm4v":  # vLLM requires these proportions
            rope = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.5,
            }
            patch.setattr(family_models, "_rope", lambda **more: rope | more)
        processor = families.build_processor(family)
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.add_tokens(TOKENS.get(family, []), special_tokens=True)
        processor = PROCESSORS.get(family, lambda made: made)(processor)
        model = families.build_model(family, seed=seed, tokenizer=tokenizer)
        if family == "glm4v":  # transformers always has these biases, and vLLM if the config says so
            model.config.text_config.attention_bias = True
        write(model, processor, folder)
    if family in FAMILIES:
        never_sample_markers(folder, tokenizer)
    return folder


def sharpen_head(model: Any) -> torch.Tensor:
    """Makes the distributions of a random model less uniform, and frees one component of its head's weight."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embeddings[:, 0] = 2.0  # a component that the final norm keeps positive
        head *= 5  # to a random model all prompts are alike
        head[:, 0] = 0.0
    return head


def never_sample_markers(folder: Path, tokenizer: Any) -> None:
    """Gives a saved model weights with which marker tokens have no probability: scoring fails on a sampled one.

    With weights, no processor changes log-probabilities.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder)
    markers = sorted(tokenizer.added_tokens_decoder.keys() - {tokenizer.eos_token_id})
    head = sharpen_head(model)
    with torch.no_grad():
        head[markers, 0] = -60.0
    model.save_pretrained(folder)

"""Qwen2.5-VL's processor without videos, for transformers 4.

Qwen2.5-VL's own processor requires a video processor, which needs torchvision. With transformers 5 the processor of
PaddleOCR-VL is used instead. Importing this module registers the processor with `AutoProcessor`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin, Qwen2_5_VLProcessor


class Qwen25VLPictureProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without videos.

    Args:
        image_processor: An image processor that returns rows of patches with a grid.
        tokenizer: A tokenizer with `image_token` and `video_token`.
        chat_template: The template.
        **kwargs: Passed on to `ProcessorMixin`.
    """

    attributes: ClassVar[list[str]] = ["image_processor", "tokenizer"]
    tokenizer_class: ClassVar[str] = "AutoTokenizer"

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        for name in ("image_token", "video_token"):
            token = getattr(tokenizer, name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template, **kwargs)


class _Config(PretrainedConfig):
    """A config under which the processor is registered, because Qwen2.5-VL's config has its own processor."""

    model_type = "safe_trainers_qwen2_5_vl_pictures"


AutoProcessor.register(_Config, Qwen25VLPictureProcessor, exist_ok=True)

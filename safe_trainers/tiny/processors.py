"""Processors for the tiny families, with the PIL backend, which needs neither torchvision nor downloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safe_trainers.tiny.families import IMAGE_SIZE, PATCH_SIZE, VISION_FAMILIES, Family, family_spec
from safe_trainers.tiny.tokenizer import build_tokenizer, chat_template, marker_ids


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_NORMALIZE: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def image_processor(name: str, **kwargs: Any) -> Any:
    """Build an image processor with the PIL backend that normalises to `[-1, 1]`.

    In transformers 5 the PIL classes are named `...Pil`, and the plain names are the torchvision classes.

    Args:
        name: The plain name of the class in transformers.
        kwargs: Its options.

    Returns:
        The image processor.
    """
    import transformers

    cls = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return cls(**_NORMALIZE, **kwargs)


def llava_processor(family: str | Family, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build a processor for one square image with one image token per patch, or per group of patches."""
    from transformers import LlavaProcessor

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pixels = image_processor("CLIPImageProcessor", size=size, do_center_crop=False)
    return LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=family_spec(family).patch_tokens,
        vision_feature_select_strategy="full",
        chat_template=chat_template(family),
    )


def qwen_processor(family: str | Family, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build a processor that returns patches as rows with a grid.

    `Qwen2_5_VLProcessor` requires a video processor, which needs torchvision. PaddleOCR-VL's makes the same inputs
    without videos, but transformers 4 does not have it.
    """
    import transformers

    processor: Any = getattr(transformers, "PaddleOCRVLProcessor", None)
    limits: dict[str, int] = {}
    if processor is None:
        from safe_trainers.tiny.qwen import Qwen25VLPictureProcessor

        processor = Qwen25VLPictureProcessor
        limits = {"min_pixels": IMAGE_SIZE**2, "max_pixels": IMAGE_SIZE**2}  # transformers 4 does not read `size`

    pixels = image_processor(
        "Qwen2VLImageProcessor",
        size={"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2},
        patch_size=PATCH_SIZE,
        merge_size=2,
        temporal_patch_size=2,
        **limits,
    )
    return processor(image_processor=pixels, tokenizer=tokenizer, chat_template=chat_template(family))


def idefics_processor(family: str | Family, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build a processor that returns images as `(batch, images, ...)` with a mask.

    SmolVLM's own processor needs torchvision and num2words.
    """
    from transformers import Idefics3Processor

    pixels = image_processor(
        "Idefics3ImageProcessor",
        size={"longest_edge": IMAGE_SIZE},
        max_image_size={"longest_edge": IMAGE_SIZE},
        do_image_splitting=False,
    )
    side = IMAGE_SIZE // family_spec(family).patch_tokens
    return Idefics3Processor(
        image_processor=pixels,
        tokenizer=tokenizer,
        image_seq_len=side**2,
        chat_template=chat_template(family),
    )


def gemma_processor(family: str | Family, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build a processor with a fixed number of soft tokens per image, and bidirectional attention among them."""
    from transformers import Gemma3Processor

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    side = IMAGE_SIZE // family_spec(family).patch_tokens
    return Gemma3Processor(
        image_processor=image_processor("Gemma3ImageProcessor", size=size, do_pan_and_scan=False),
        tokenizer=tokenizer,
        image_seq_length=side**2,
        chat_template=chat_template(family),
    )


_BUILDERS = {
    "qwen2_5_vl": qwen_processor,
    "smolvlm": idefics_processor,
    "idefics3": idefics_processor,
    "gemma3": gemma_processor,
}


def build_processor(family: str) -> ProcessorMixin | PreTrainedTokenizerBase:
    """Build the processor of a family, or the tokenizer of a text-only family.

    Images of any size are resized to 32 x 32 and normalised to `[-1, 1]`, float32. In every family a prompt may
    contain several images. All processors pad on the left.

    Args:
        family: One of `FAMILIES`.

    Returns:
        A processor with chat template, saved and loaded by `AutoProcessor`.

    Raises:
        ValueError: If there is no such family.
    """
    spec = family_spec(family)
    tokenizer = build_tokenizer(family)
    if spec.name not in VISION_FAMILIES:
        return tokenizer
    return _BUILDERS.get(family, llava_processor)(family, tokenizer)


def generation_kwargs(processor: ProcessorMixin | PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return generation options that suppress marker tokens, for `generation_kwargs` of `GRPOConfig` or `RLOOConfig`.

    A sampled image marker has no image features, and the run would fail. TRL 1.16 suppresses only
    `config.image_token_id`, and older releases suppress nothing.

    Args:
        processor: A processor or tokenizer.

    Returns:
        `{"suppress_tokens": [...]}`.
    """
    return {"suppress_tokens": marker_ids(getattr(processor, "tokenizer", processor))}

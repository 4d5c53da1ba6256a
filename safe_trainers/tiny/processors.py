"""Complete processors for the tiny families, on the PIL backend: no torchvision, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safe_trainers.tiny.families import IMAGE_SIZE, PATCH_SIZE, VISION_FAMILIES, family_spec
from safe_trainers.tiny.tokenizer import build_tokenizer, chat_template, marker_ids


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_NORMALIZE: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def _image_processor(name: str, **kwargs: Any) -> Any:
    """Build an image processor on the PIL backend.

    transformers 5 names the PIL classes `...Pil` and gives the plain name to torchvision; before, the plain name was
    the PIL class.
    """
    import transformers

    cls = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return cls(**_NORMALIZE, **kwargs)


def _llava_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """One square picture, one image token per patch (or per group of patches)."""
    from transformers import LlavaProcessor

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    image_processor = _image_processor("CLIPImageProcessor", size=size, do_center_crop=False)
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=family_spec(family).patch_tokens,
        vision_feature_select_strategy="full",
        chat_template=chat_template(family),
    )


def _qwen_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Patches as rows with a grid. `Qwen2_5_VLProcessor` itself demands a video processor, which needs torchvision.

    PaddleOCR-VL reads the same inputs with the same token type ids, without videos.
    """
    from transformers import PaddleOCRVLProcessor

    image_processor = _image_processor(
        "Qwen2VLImageProcessor",
        size={"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2},
        patch_size=PATCH_SIZE,
        merge_size=2,
        temporal_patch_size=2,
    )
    return PaddleOCRVLProcessor(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=chat_template(family)
    )


def _idefics_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Pictures as `(batch, images, ...)` with a mask. SmolVLM's own processor needs torchvision and num2words."""
    from transformers import Idefics3Processor

    image_processor = _image_processor(
        "Idefics3ImageProcessor",
        size={"longest_edge": IMAGE_SIZE},
        max_image_size={"longest_edge": IMAGE_SIZE},
        do_image_splitting=False,
    )
    side = IMAGE_SIZE // family_spec(family).patch_tokens
    return Idefics3Processor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        image_seq_len=side**2,
        chat_template=chat_template(family),
    )


def _gemma_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """A fixed number of soft tokens per picture, and token type ids that let them see one another."""
    from transformers import Gemma3Processor

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    side = IMAGE_SIZE // family_spec(family).patch_tokens
    return Gemma3Processor(
        image_processor=_image_processor("Gemma3ImageProcessor", size=size, do_pan_and_scan=False),
        tokenizer=tokenizer,
        image_seq_length=side**2,
        chat_template=chat_template(family),
    )


_BUILDERS = {
    "qwen2_5_vl": _qwen_processor,
    "smolvlm": _idefics_processor,
    "idefics3": _idefics_processor,
    "gemma3": _gemma_processor,
}


def build_processor(family: str) -> ProcessorMixin | PreTrainedTokenizerBase:
    """Build the processor of a family; for the text-only family, its tokenizer.

    Pictures of any size are resized to 32 x 32 and normalised to `[-1, 1]`, float32. A prompt may hold several
    pictures in every family. All processors pad on the left.

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
    return _BUILDERS.get(family, _llava_processor)(family, tokenizer)


def generation_kwargs(processor: ProcessorMixin | PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return generation options under which no marker token is sampled.

    A sampled image marker has no image feature to go with it and ends the run. TRL 1.16 suppresses
    `config.image_token_id` by itself; older releases do not, and no release suppresses the other markers. Pass this
    as `generation_kwargs` of `GRPOConfig` or `RLOOConfig`.

    Args:
        processor: A processor or tokenizer.

    Returns:
        `{"suppress_tokens": [...]}`.
    """
    return {"suppress_tokens": marker_ids(getattr(processor, "tokenizer", processor))}

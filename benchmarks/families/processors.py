"""Processors of the families that `safe_trainers.tiny` does not have, with PIL instead of torchvision.

Processors that require a video processor are built without one (`...WithoutVideos`). Importing this module registers
these classes with `AutoProcessor`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AyaVisionProcessor,
    Cohere2VisionProcessor,
    Gemma4Config,
    Glm4vConfig,
    Idefics2Processor,
    InternVLConfig,
    Lfm2Config,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaProcessor,
    MllamaProcessor,
    Ovis2Processor,
    PaliGemmaProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Siglip2ImageProcessorPil,
    WhisperFeatureExtractor,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from safe_trainers.tiny.families import IMAGE_SIZE, PATCH_SIZE
from safe_trainers.tiny.processors import image_processor, llava_processor
from safe_trainers.tiny.tokenizer import chat_template

from .specs import Spec


SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
SIDE = IMAGE_SIZE // PATCH_SIZE
SAMPLING_RATE = 16000


class _WithoutVideos(ProcessorMixin):
    """A processor of images and text only; the video processor of the family needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        # transformers reads the attributes from this signature, so the video processor is not required or saved.
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


class Qwen2VLProcessorWithoutVideos(_WithoutVideos, Qwen2VLProcessor):
    pass


class Qwen3VLProcessorWithoutVideos(_WithoutVideos, Qwen3VLProcessor):
    pass


class Glm4vProcessorWithoutVideos(_WithoutVideos, Glm4vProcessor):
    pass


class LlavaOnevisionProcessorWithoutVideos(_WithoutVideos, LlavaOnevisionProcessor):
    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        num_image_tokens=None,
        vision_feature_select_strategy=None,
        chat_template=None,
        **kwargs,
    ):
        options = {
            "num_image_tokens": num_image_tokens,
            "vision_feature_select_strategy": vision_feature_select_strategy,
        }
        super().__init__(image_processor, tokenizer, chat_template, **options, **kwargs)

    @property
    def unused_input_names(self) -> list[str]:
        return [
            "batch_num_images"
        ]  # TRL's scoring does not accept this input; without it the model assumes one image each


class InternVLProcessorWithoutVideos(_WithoutVideos, InternVLProcessor):
    def __init__(self, image_processor=None, tokenizer=None, image_seq_length=256, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template, image_seq_length=image_seq_length)


class Gemma4ProcessorForImages(Gemma4Processor):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, image_seq_length=280):
        self.image_seq_length = image_seq_length
        for name in ("image", "video", "audio"):
            setattr(self, f"{name}_token", getattr(tokenizer, f"{name}_token"))
            setattr(self, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
        for name in ("boi", "eoi", "boa", "eoa"):
            setattr(self, f"{name}_token", getattr(tokenizer, f"{name}_token"))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class _RowsAndColumns(Siglip2ImageProcessorPil.valid_kwargs, total=False):
    return_row_col_info: bool


class Lfm2VlImageProcessorOfOneTile(Siglip2ImageProcessorPil):
    """The inputs of LFM2-VL for images of one tile, by SigLIP 2's image processor, which does not need torchvision."""

    valid_kwargs = _RowsAndColumns
    downsample_factor = 2
    encoder_patch_size = PATCH_SIZE
    do_image_splitting = False
    use_thumbnail = False
    tile_size = IMAGE_SIZE

    def preprocess(self, images, return_row_col_info=False, **kwargs):
        made = super().preprocess(images, **kwargs)
        if return_row_col_info:
            ones = [1] * len(made["spatial_shapes"])
            sizes = [tuple(int(n) * self.patch_size for n in shape) for shape in made["spatial_shapes"]]
            made.update({"image_rows": torch.tensor(ones), "image_cols": torch.tensor(ones), "image_sizes": sizes})
        return made


def _registered() -> None:
    """Registers the classes of this module with `AutoProcessor`."""
    for config, processor in (
        (Qwen2VLConfig, Qwen2VLProcessorWithoutVideos),
        (Qwen3VLConfig, Qwen3VLProcessorWithoutVideos),
        (Glm4vConfig, Glm4vProcessorWithoutVideos),
        (LlavaOnevisionConfig, LlavaOnevisionProcessorWithoutVideos),
        (InternVLConfig, InternVLProcessorWithoutVideos),
        (Gemma4Config, Gemma4ProcessorForImages),
    ):
        AutoProcessor.register(config, processor, exist_ok=True)
    # It is found by its name; the config of LFM2-VL is already registered with a class that does not exist here.
    AutoImageProcessor.register(
        Lfm2Config, image_processor_classes={"pil": Lfm2VlImageProcessorOfOneTile}, exist_ok=True
    )


_registered()

Builder = Callable[[Spec, PreTrainedTokenizerBase], ProcessorMixin]


def _tokens(spec: Spec) -> int:
    """Number of tokens of one image."""
    return (IMAGE_SIZE // spec.patch_tokens) ** 2


def _qwen(cls: type[ProcessorMixin], pixels: str = "Qwen2VLImageProcessor") -> Builder:
    """Builds processors that return patches as rows, with a grid."""

    def build(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        area = {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}
        if pixels.startswith("Glm4v"):
            area = {edge: 2 * size for edge, size in area.items()}  # it counts two frames per image
        patches = {"patch_size": PATCH_SIZE, "merge_size": 2, "temporal_patch_size": 2}
        return cls(image_processor(pixels, size=area, **patches), tokenizer, chat_template=chat_template(spec))

    return build


def _llava_next(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor(
        "LlavaNextImageProcessor",
        size={"shortest_edge": IMAGE_SIZE},
        crop_size=SQUARE,
        image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]],
    )
    return LlavaNextProcessor(
        pixels,
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="full",
        chat_template=chat_template(spec),
    )


def _llava_onevision(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor(
        "LlavaOnevisionImageProcessor", size=SQUARE, image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]]
    )
    return LlavaOnevisionProcessorWithoutVideos(
        pixels,
        tokenizer,
        num_image_tokens=_tokens(spec),
        vision_feature_select_strategy="full",
        chat_template=chat_template(spec),
    )


def _pixtral(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Images with their sizes and one token per patch; breaks between rows are text tokens."""
    patch = {"height": spec.patch_tokens, "width": spec.patch_tokens}
    return LlavaProcessor(
        image_processor("PixtralImageProcessor", size={"longest_edge": IMAGE_SIZE}, patch_size=patch),
        tokenizer,
        patch_size=spec.patch_tokens,
        vision_feature_select_strategy="full",
        image_token=spec.image_token,
        chat_template=chat_template(spec),
    )


def _idefics2(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"shortest_edge": IMAGE_SIZE, "longest_edge": IMAGE_SIZE}
    pixels = image_processor("Idefics2ImageProcessor", size=size, do_image_splitting=False)
    return Idefics2Processor(pixels, tokenizer, image_seq_len=_tokens(spec), chat_template=chat_template(spec))


def _gemma4(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    # Images are enlarged to the largest number of tokens that fits: 70 is the minimum, and 64 of them are used.
    pixels = image_processor("Gemma4ImageProcessor", patch_size=PATCH_SIZE, pooling_kernel_size=2, max_soft_tokens=70)
    return Gemma4ProcessorForImages(pixels, tokenizer, chat_template(spec), image_seq_length=70)


def _paligemma(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor("SiglipImageProcessor", size=SQUARE)
    pixels.image_seq_length = _tokens(spec)
    return PaliGemmaProcessor(pixels, tokenizer, chat_template=chat_template(spec))


def _internvl(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor("GotOcr2ImageProcessor", size=SQUARE, crop_to_patches=False)
    return InternVLProcessorWithoutVideos(
        pixels, tokenizer, image_seq_length=_tokens(spec), chat_template=chat_template(spec)
    )


def _lfm2_vl(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = Lfm2VlImageProcessorOfOneTile(patch_size=PATCH_SIZE, max_num_patches=SIDE**2)
    return Lfm2VlProcessor(pixels, tokenizer, chat_template=chat_template(spec))


def _mllama(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor("MllamaImageProcessor", size=SQUARE, max_image_tiles=4)
    return MllamaProcessor(pixels, tokenizer, chat_template=chat_template(spec))


def _aya_vision(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor("GotOcr2ImageProcessor", size=SQUARE, crop_to_patches=False)
    return AyaVisionProcessor(
        pixels,
        tokenizer,
        patch_size=PATCH_SIZE,
        downsample_factor=2,
        img_size=IMAGE_SIZE,
        chat_template=chat_template(spec),
    )


def _cohere2_vision(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    # The "patch size" of its image processor is what the processor takes for the tokens along one side.
    pixels = image_processor(
        "GotOcr2ImageProcessor", size=SQUARE, crop_to_patches=False, patch_size=IMAGE_SIZE // spec.patch_tokens
    )
    return Cohere2VisionProcessor(pixels, tokenizer, chat_template=chat_template(spec))


def _ovis2(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    pixels = image_processor("Ovis2ImageProcessor", size=SQUARE, crop_to_patches=False)
    return Ovis2Processor(pixels, tokenizer, image_seq_length=_tokens(spec), chat_template=chat_template(spec))


def _qwen2_audio(spec: Spec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    template = chat_template(spec).replace("part['type'] == 'image'", "part['type'] == 'audio'")
    sounds = WhisperFeatureExtractor(feature_size=16, sampling_rate=SAMPLING_RATE, chunk_length=1, n_fft=400)
    return Qwen2AudioProcessor(sounds, tokenizer, chat_template=template)


BUILDERS: dict[str, Builder] = {
    "qwen2_vl": _qwen(Qwen2VLProcessorWithoutVideos),
    "qwen3_vl": _qwen(Qwen3VLProcessorWithoutVideos),
    "qwen3_vl_moe": _qwen(Qwen3VLProcessorWithoutVideos),
    "glm4v": _qwen(Glm4vProcessorWithoutVideos, "Glm4vImageProcessor"),
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "vipllava": llava_processor,
    "pixtral": _pixtral,
    "mistral3": _pixtral,
    "idefics2": _idefics2,
    "gemma4": _gemma4,
    "paligemma": _paligemma,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "mllama": _mllama,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "ovis2": _ovis2,
    "qwen2_audio": _qwen2_audio,
}
"""The builder of each family's processor, from the specification and the tokenizer; none for text families."""

"""The families of the matrix: names, marker tokens and known limits. Does not import torch or transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from safe_trainers import tiny
from safe_trainers.tiny.families import PATCH_SIZE, Family, check_choice
from safe_trainers.tiny.families import family_spec as tiny_spec


@dataclass(frozen=True)
class Spec(Family):
    """A family of the matrix.

    Args:
        modality: `"image"`, `"audio"` or `"text"`.
        processor: The parts of the processor if the family's own cannot be built, mostly because an image or video
            processor needs torchvision.
        not_in_stock: Trainers with which stock TRL cannot train this family in any precision, and why: part of its
            error, a semicolon, and the cause. `"grpo scoring"` is GRPO that scores before the step.
        wrong_in_stock: Trainers whose log-probabilities differ from those of sampling in any precision, and why.
        lora_targets: The `target_modules` of the `LoraConfig`.
        conversation: Whether SFT data are whole conversations, because the processor needs an image with every text.
    """

    modality: str = "image"
    processor: str = ""
    not_in_stock: dict[str, str] = field(default_factory=dict)
    wrong_in_stock: dict[str, str] = field(default_factory=dict)
    lora_targets: str | tuple[str, ...] = ("q_proj", "v_proj")
    conversation: bool = False

    def why_not(self, task: str, scoring: bool = False) -> str | None:
        """Why stock TRL cannot train this family with a trainer; `None` if it can.

        Args:
            task: `"grpo"`, `"rloo"` or `"sft"`.
            scoring: Whether GRPO scores before the step: `beta` above 0, or several steps per rollout.
        """
        before = self.not_in_stock.get(f"{task} scoring") if scoring else None
        return before or self.not_in_stock.get(task)


_LABELS = "got an unexpected keyword argument 'labels'; its processor returns labels, which TRL's scoring rejects"
_CROSS = "got an unexpected keyword argument 'cross_attention_mask'; TRL's scoring rejects this input"
_ASPECTS = "`aspect_ratio_ids` must be provided; TRL passes only known inputs of the scored batch to the loss"
_LLAMA4 = (
    "'Llama4CausalLMOutputWithPast' object has no attribute 'last_hidden_state'; "
    "TRL reads it from the output of `base_model`, which is the whole model in this family"
)
_OVIS2 = (
    "'list' object has no attribute 'tolist'; "
    "its processor requires `return_tensors`, and TRL tokenises prompts without it"
)
_SOUNDS = (
    "'Qwen2AudioConfig' object has no attribute 'image_token_id'; "
    "TRL reads it for every model with a processor, and does not read audio from datasets"
)

_FAILS: dict[str, dict[str, str]] = {
    "llama4": dict.fromkeys(("grpo", "rloo", "sft"), _LLAMA4),
    "ovis2": dict.fromkeys(("grpo", "rloo"), _OVIS2),
    "qwen2_audio": dict.fromkeys(("grpo", "rloo"), _SOUNDS),
    "mllama": {"grpo scoring": _CROSS, "grpo": _ASPECTS, "rloo": _CROSS},
    "paligemma": {"grpo scoring": _LABELS, "rloo": _LABELS},
}
# Measured in float32, where all other families differ only by rounding.
_LOGIT_SCALE = (
    "TRL's scoring multiplies the logits by the text model's `logit_scale`, and this family's forward does not: "
    "log-probabilities differ by 1 nat"
)
_BIDIRECTIONAL = (
    "TRL passes the `token_type_ids` of prompts (0) for answers, so that tokens attend to later ones: "
    "log-probabilities differ by 0.04 nats"
)
_WRONG: dict[str, dict[str, str]] = {
    "aya_vision": dict.fromkeys(("grpo", "rloo", "sft"), _LOGIT_SCALE),
    "cohere2_vision": dict.fromkeys(("grpo", "rloo", "sft"), _LOGIT_SCALE),
    "paligemma": dict.fromkeys(("grpo", "sft"), _BIDIRECTIONAL),
}
_TINY_PROCESSORS = {
    "aria": "LLaVA's",
    "llama4": "LLaVA's; its own needs torchvision",
    "qwen2_5_vl": "PaddleOCR-VL's; its own needs torchvision for videos",
    "smolvlm": "Idefics3's; its own needs torchvision and num2words",
}

_QWEN = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "video_token": "<|video_pad|>",
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TILES = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
_NO_VIDEOS = "the family's own without the video processor, which needs torchvision"
_MERGED = 2 * PATCH_SIZE


def _qwen(name: str) -> Spec:
    return Spec(name, "<|image_pad|>", _QWEN_IMAGE, _QWEN, _MERGED, processor=_NO_VIDEOS)


_OWN: tuple[Spec, ...] = (
    _qwen("qwen2_vl"),
    _qwen("qwen3_vl"),
    _qwen("qwen3_vl_moe"),
    Spec(
        "glm4v",
        "<|image|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
            "video_token": "<|video|>",
            "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
        _MERGED,
        processor=_NO_VIDEOS,
    ),
    Spec("llava_next", "<image>", "<image>"),
    Spec(
        "llava_onevision",
        "<image>",
        "<image>",
        {"video_token": "<video>"},
        processor=f"{_NO_VIDEOS}, and without `batch_num_images`, which TRL's scoring does not accept",
    ),
    Spec("vipllava", "<image>", "<image>", processor="LLaVA's, as upstream"),
    Spec("pixtral", "[IMG]", "[IMG]", processor="LLaVA's with Pixtral's image processor; its own needs torchvision"),
    Spec("mistral3", "[IMG]", "[IMG]", {}, _MERGED, processor="as pixtral"),
    Spec(
        "idefics2",
        "<image>",
        "<image>",
        {"image_boundary_token": "<fake_token_around_image>", "end_of_utterance_token": "<end_of_utterance>"},
    ),
    Spec(
        "gemma4",
        "<|image|>",
        "<|image|>",
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
        _MERGED,
        processor="the family's own without audio and videos, which need torchvision",
        # PEFT does not support `Gemma4ClippableLinear`, the projections of its tower.
        lora_targets=r".*language_model.*\.(q_proj|v_proj)",
    ),
    Spec("paligemma", "<image>", "<image>", conversation=True),
    Spec("internvl", "<IMG_CONTEXT>", "<IMG_CONTEXT>", _TILES, _MERGED, processor=_NO_VIDEOS),
    Spec(
        "lfm2_vl",
        "<image>",
        "<image>",
        {
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        _MERGED,
        processor="the family's own with SigLIP 2's image processor, one tile per image; its own needs torchvision",
    ),
    Spec("mllama", "<|image|>", "<|image|>", conversation=True),
    Spec(
        "aya_vision",
        "<|IMG_PATCH|>",
        "<image>",
        {
            "picture_token": "<image>",
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
            "tile_token": "TILE",
            "tile_global_token": "TILE_GLOBAL",
        },
        _MERGED,
    ),
    Spec(
        "cohere2_vision",
        "<|IMG_PATCH|>",
        "<|IMG_PATCH|>",
        {
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        _MERGED,
        processor="the family's own with GOT-OCR2's image processor; its own needs torchvision",
    ),
    Spec(
        "ovis2",
        "<IMG_ATOM>",
        "<image>",
        {
            "picture_token": "<image>",
            "img_start_token": "<IMG_START>",
            "img_grid_token": "<IMG_GRID>",
            "img_col_token": "<IMG_COL>",
            "img_row_token": "<IMG_ROW>",
            "img_end_token": "<IMG_END>",
        },
    ),
    Spec(
        "qwen2_audio",
        template_token="<|audio_bos|><|AUDIO|><|audio_eos|>",
        markers={
            "audio_token": "<|AUDIO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        modality="audio",
    ),
    Spec("gemma2", modality="text"),
)


def _from_tiny(name: str) -> Spec:
    spec = tiny_spec(name)
    modality = "text" if spec.image_token is None else "image"
    return Spec(**vars(spec), modality=modality, processor=_TINY_PROCESSORS.get(name, ""))


def _known(spec: Spec) -> Spec:
    return replace(spec, not_in_stock=_FAILS.get(spec.name, {}), wrong_in_stock=_WRONG.get(spec.name, {}))


_SPECS: dict[str, Spec] = {spec.name: _known(spec) for spec in (*map(_from_tiny, tiny.FAMILIES), *_OWN)}
_SPECS = dict(sorted(_SPECS.items(), key=lambda item: ("image", "audio", "text").index(item[1].modality)))

FAMILIES: tuple[str, ...] = tuple(_SPECS)
"""Names of all families: those with images, then audio, then text only."""

VISION_FAMILIES: tuple[str, ...] = tuple(name for name, spec in _SPECS.items() if spec.modality == "image")
AUDIO_FAMILIES: tuple[str, ...] = tuple(name for name, spec in _SPECS.items() if spec.modality == "audio")
TEXT_FAMILIES: tuple[str, ...] = tuple(name for name, spec in _SPECS.items() if spec.modality == "text")


def family_spec(family: str) -> Spec:
    """Returns the specification of a family, one of `FAMILIES`."""
    return _SPECS[check_choice("family", family, FAMILIES)]

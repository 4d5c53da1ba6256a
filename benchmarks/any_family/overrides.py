"""Values that some families need beside those that `shrink` gives."""

from __future__ import annotations

from typing import Any

from .shrink import HEAD, HIDDEN, PATCHES


def _rope(rotated: int = HEAD, **more: Any) -> dict[str, Any]:
    """Rotary positions whose dimensions are split by time, height and width; the default is that of a larger head."""
    half = rotated // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


_MROPE = {"text_config.rope_parameters": _rope()}
_SPLIT_BY_DEFAULT = ("glm46v", "glm4v", "glmga", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_SPLIT_BY_DEFAULT, _MROPE),
    "glm4v_moe": {"text_config.rope_parameters": _rope(HEAD // 2, partial_rotary_factor=0.5)},
    "aria": {"projector_patch_to_query_dict": {PATCHES: PATCHES}},
    "llama4": {"vision_config.intermediate_size": 4 * HIDDEN},
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 639},
    "qwen3_omni_moe_thinker": {**_MROPE, "vision_start_token_id": 639},
}

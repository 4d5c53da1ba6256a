"""Values that some families need beside those that `shrink` gives."""

from __future__ import annotations

from typing import Any

from .shrink import FIRST_MEDIA_ID, HEAD, HEADS, HIDDEN, PATCH_SIZE, PATCHES


CODES = 16
"""Size of the codebooks of models that turn images into tokens."""


def _rope(rotated: int = HEAD, **more: Any) -> dict[str, Any]:
    """Rotary positions whose dimensions are split by time, height and width; the default is that of a larger head."""
    half = rotated // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


def _codes(form: str) -> dict[str, int]:
    """The vocabulary of the image tokens of a model that turns images into tokens."""
    return {"<image>": FIRST_MEDIA_ID, **{form.format(code): FIRST_MEDIA_ID + 2 + code for code in range(CODES)}}


def _letters(code: int) -> str:
    return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"


_MROPE = {"text_config.rope_parameters": _rope()}
_SPLIT_BY_DEFAULT = ("glm46v", "glm4v", "glmga", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
_SLIDING = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": HEAD,
    "kv_lora_rank": HEAD,
    "head_dim": 2 * HEAD,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": HEAD,
    "v_head_dim": HEAD,
}
_TWO_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": HEADS}
_ENCODER = {"num_filters": 4, "depths": [1] * 7}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_SPLIT_BY_DEFAULT, _MROPE),
    "glm4v_moe": {"text_config.rope_parameters": _rope(HEAD // 2, partial_rotary_factor=0.5)},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**_rope(), "mrope_section": [6, 6, 4]}},
    "aria": {"projector_patch_to_query_dict": {PATCHES: PATCHES}},
    "llama4": {"vision_config.intermediate_size": 4 * HIDDEN},
    # These configs lack ids that the models read.
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": FIRST_MEDIA_ID + 39},
    "qwen3_omni_moe_thinker": {**_MROPE, "vision_start_token_id": FIRST_MEDIA_ID + 39},
    "udop": {"decoder_start_token_id": 0},
    "vision-encoder-decoder": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "chameleon": {
        "vocabulary_map": {"<image>": FIRST_MEDIA_ID, **{_letters(n): FIRST_MEDIA_ID + 2 + n for n in range(CODES)}},
        "vq_config.base_channels": 32,
        "vq_config.num_embeddings": CODES,
    },
    "emu3": {
        "vocabulary_map": {**_codes("<|visual token {:06d}|>"), "<|extra_200|>": FIRST_MEDIA_ID + 1},
        "vq_config.base_channels": 32,
        "vq_config.codebook_size": CODES,
        "vq_config.embed_dim": 16,
    },
    "janus": {"vq_config.base_channels": 32, "vq_config.num_embeddings": CODES},
    "cohere_compass": {
        "text_config.layer_types": ["sliding_attention", "full_attention"],
        "text_config.rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "text_config.topk_group": 1,
        "text_config.n_group": 1,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": HIDDEN,
    },
    "dots3_note": {"text_config.per_layer_config": {2: _SLIDING}},
    "florence2": {
        "vision_config.embed_dim": [32, 32, 64, 64],
        "vision_config.num_heads": [2, 2, 4, 4],
        "vision_config.num_groups": [2, 2, 4, 4],
        "vision_config.depths": [1, 1, 1, 1],
    },
    "granite4_vision": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "hunyuan_vl": {
        "text_config.head_dim": HEAD,
        "text_config.rope_parameters": {**_rope(), "mrope_section": [4, 4, 4, 4]},
    },
    "evolla": {"protein_encoder_config": {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, **_TWO_LAYERS}},
    "gemma4": {"vision_config.pooling_kernel_size": 2},
    "gemma4_unified": {
        "vision_config.pooling_kernel_size": 2,
        "vision_config.mm_embed_dim": HIDDEN,
        "vision_config.output_proj_dims": HIDDEN,
    },
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 1.0,
        }
    },
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark": {"out_hidden_size": 4 * HIDDEN},
    "kosmos-2.5": {"vision_config.patch_embed_hidden_size": 3 * PATCH_SIZE**2},
    "pix2struct": {"vision_config.patch_embed_hidden_size": 3 * PATCH_SIZE**2},
    "mllama": {"vision_config.vision_output_dim": 2 * HIDDEN},
    "qwen4_exp": {
        "text_config.indexer_n_heads": 2,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": HEAD,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 4,
    },
    "fun_asr_nano": {"adaptor_config.intermediate_size": HIDDEN // 4},
    "kyutai_speech_to_text": {"codec_config.upsample_groups": HIDDEN},
    "step3p7": {"text_config.sliding_window": 64},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _ENCODER, "semantic_tokenizer_encoder_config": _ENCODER},
}

"""Models of the families that `safe_trainers.tiny` does not have, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from safe_trainers.tiny.families import IMAGE_SIZE, PATCH_SIZE
from safe_trainers.tiny.models import text_options, vision_options

from .specs import Spec


HIDDEN = 64
HEADS = 4
HEAD = HIDDEN // HEADS
INIT_STD = 0.06

Ids = dict[str, int]
Builder = Callable[[Spec, PreTrainedTokenizerBase, Ids], PreTrainedModel]


def _model(name: str, config: Any) -> PreTrainedModel:
    return getattr(transformers, name)(config)


def _text(kind: str, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **text_options(tokenizer, **changes))


def _siglip(**changes: Any) -> Any:
    return AutoConfig.for_model("siglip_vision_model", **vision_options(vision_use_head=False, **changes))


def _rope(**more: Any) -> dict[str, Any]:
    """Rotary positions of images have three parts, which share half the head dimension."""
    half = HEAD // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


def _qwen_ids(ids: Ids) -> dict[str, int]:
    return {
        "image_token_id": ids["image_token"],
        "video_token_id": ids["video_token"],
        "vision_start_token_id": ids["vision_start_token"],
        "vision_end_token_id": ids["vision_end_token"],
    }


def _merging_tower(**changes: Any) -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_size": HIDDEN,
        "num_heads": HEADS,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **changes,
    }


def _qwen2_vl(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.Qwen2VLConfig(
        vision_config=_merging_tower(embed_dim=HIDDEN, mlp_ratio=2),
        text_config=text_options(tokenizer, rope_parameters=_rope()),
        **_qwen_ids(ids),
    )
    return _model("Qwen2VLForConditionalGeneration", config)


def _qwen3_tower() -> dict[str, Any]:
    # Features of the first layer are added to the first layer of the text model too ("deepstack").
    return _merging_tower(
        depth=2,
        intermediate_size=2 * HIDDEN,
        out_hidden_size=HIDDEN,
        num_position_embeddings=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        deepstack_visual_indexes=[0],
    )


def _qwen3_vl(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.Qwen3VLConfig(
        vision_config=_qwen3_tower(),
        text_config=text_options(tokenizer, head_dim=HEAD, rope_parameters=_rope(mrope_interleaved=True)),
        **_qwen_ids(ids),
    )
    return _model("Qwen3VLForConditionalGeneration", config)


def _qwen3_vl_moe(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    text = text_options(
        tokenizer,
        head_dim=HEAD,
        rope_parameters=_rope(mrope_interleaved=True),
        moe_intermediate_size=HIDDEN,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config = transformers.Qwen3VLMoeConfig(vision_config=_qwen3_tower(), text_config=text, **_qwen_ids(ids))
    return _model("Qwen3VLMoeForConditionalGeneration", config)


def _glm4v(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    tower = _merging_tower(intermediate_size=2 * HIDDEN, out_hidden_size=HIDDEN, image_size=IMAGE_SIZE)
    tokens = {f"{name}_id": ids[name] for name in spec.special_tokens}
    config = transformers.Glm4vConfig(
        vision_config=tower, text_config=text_options(tokenizer, rope_parameters=_rope()), **tokens
    )
    return _model("Glm4vForConditionalGeneration", config)


def _llava_next(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.LlavaNextConfig(
        vision_config=_siglip(),
        text_config=_text("llama", tokenizer),
        image_token_index=ids["image_token"],
        image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return _model("LlavaNextForConditionalGeneration", config)


def _llava_onevision(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.LlavaOnevisionConfig(
        vision_config=_siglip(),
        text_config=_text("qwen2", tokenizer),
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return _model("LlavaOnevisionForConditionalGeneration", config)


def _vipllava(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.VipLlavaConfig(
        vision_config=AutoConfig.for_model("clip_vision_model", **vision_options()),
        text_config=_text("llama", tokenizer),
        image_token_index=ids["image_token"],
        vision_feature_layer=[-1, -2],
    )
    return _model("VipLlavaForConditionalGeneration", config)


def _pixtral_tower() -> Any:
    return AutoConfig.for_model("pixtral", **vision_options())


def _pixtral(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.LlavaConfig(
        vision_config=_pixtral_tower(),
        text_config=_text("mistral", tokenizer, head_dim=HEAD),
        image_token_index=ids["image_token"],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return _model("LlavaForConditionalGeneration", config)


def _mistral3(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.Mistral3Config(
        vision_config=_pixtral_tower(),
        text_config=_text("mistral", tokenizer, head_dim=HEAD),
        image_token_index=ids["image_token"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return _model("Mistral3ForConditionalGeneration", config)


def _idefics2(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    resampler = {
        "hidden_size": HIDDEN,
        "resampler_n_latents": (IMAGE_SIZE // PATCH_SIZE) ** 2,
        "resampler_depth": 1,
        "resampler_n_heads": HEADS,
        "resampler_head_dim": HEAD,
        "num_key_value_heads": HEADS,
    }
    config = transformers.Idefics2Config(
        vision_config=vision_options(),
        perceiver_config=resampler,
        text_config=_text("mistral", tokenizer, head_dim=HEAD),
        image_token_id=ids["image_token"],
    )
    return _model("Idefics2ForConditionalGeneration", config)


def _gemma4(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    tower = vision_options(num_key_value_heads=HEADS, head_dim=HEAD, pooling_kernel_size=2, position_embedding_size=64)
    text = text_options(
        tokenizer,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=HEAD,
        global_head_dim=2 * HEAD,
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=8,
    )
    tokens = {f"{name}_id": ids[name] for name in spec.special_tokens if name != "eoa_token"}
    config = transformers.Gemma4Config(
        vision_config=tower,
        text_config=text,
        audio_config=None,
        eoa_token_index=ids["eoa_token"],
        tie_word_embeddings=False,
        **tokens,
    )
    return _model("Gemma4ForConditionalGeneration", config)


def _paligemma(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.PaliGemmaConfig(
        vision_config=_siglip(),
        text_config=_text("gemma", tokenizer, head_dim=HEAD),
        image_token_index=ids["image_token"],
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        tie_word_embeddings=False,
    )
    return _model("PaliGemmaForConditionalGeneration", config)


def _internvl(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.InternVLConfig(
        vision_config=vision_options(),
        text_config=_text("qwen2", tokenizer),
        image_token_id=ids["image_token"],
        image_seq_length=(IMAGE_SIZE // spec.patch_tokens) ** 2,
        tie_word_embeddings=False,
    )
    return _model("InternVLForConditionalGeneration", config)


def _lfm2_vl(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    tower = vision_options(num_patches=(IMAGE_SIZE // PATCH_SIZE) ** 2, vision_use_head=False)
    del tower["image_size"]
    config = transformers.Lfm2VlConfig(
        vision_config=AutoConfig.for_model("siglip2_vision_model", **tower),
        text_config=_text("lfm2", tokenizer, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        image_token_id=ids["image_token"],
        projector_hidden_size=HIDDEN,
        downsample_factor=2,
        tie_word_embeddings=False,
    )
    return _model("Lfm2VlForConditionalGeneration", config)


def _mllama(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    tower = vision_options(
        num_global_layers=1, max_num_tiles=4, intermediate_layers_indices=[0], vision_output_dim=2 * HIDDEN
    )
    # The image token is embedded but never predicted, so it must be the last id.
    config = transformers.MllamaConfig(
        vision_config={**tower, "attention_heads": tower.pop("num_attention_heads")},
        text_config=text_options(tokenizer, num_hidden_layers=2, cross_attention_layers=[1]),
        image_token_index=ids["image_token"],
    )
    model = _model("MllamaForConditionalGeneration", config)
    for name, gate in model.named_parameters():
        if name.endswith("gate") or "_gate" in name:
            torch.nn.init.constant_(gate, 0.5)  # gates are 0 by default, so that images would have no effect
    return model


def _aya_vision(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.AyaVisionConfig(
        vision_config=_siglip(),
        text_config=_text("cohere2", tokenizer),
        image_token_index=ids["image_token"],
        downsample_factor=2,
        tie_word_embeddings=False,
    )
    return _model("AyaVisionForConditionalGeneration", config)


def _cohere2_vision(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    config = transformers.Cohere2VisionConfig(
        vision_config=_siglip(),
        text_config=_text("cohere2", tokenizer),
        image_token_id=ids["image_token"],
        downsample_factor=2,
        alignment_intermediate_size=2 * HIDDEN,
        tie_word_embeddings=False,
    )
    return _model("Cohere2VisionForConditionalGeneration", config)


def _ovis2(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    indicators = ("img_start_token", "img_grid_token", "img_col_token", "img_row_token", "img_end_token")
    config = transformers.Ovis2Config(
        vision_config=vision_options(vocab_size=128, num_visual_indicator_tokens=len(indicators)),
        text_config=_text("qwen2", tokenizer),
        image_token_id=ids["image_token"],
        visual_indicator_token_ids=[ids[name] for name in indicators],
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        tie_word_embeddings=False,
    )
    return _model("Ovis2ForConditionalGeneration", config)


def _qwen2_audio(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    tower = AutoConfig.for_model(
        "qwen2_audio_encoder",
        d_model=HIDDEN,
        encoder_layers=1,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * HIDDEN,
        num_mel_bins=16,
        max_source_positions=50,
        initializer_range=INIT_STD,
    )
    config = transformers.Qwen2AudioConfig(
        audio_config=tower, text_config=_text("qwen2", tokenizer), audio_token_index=ids["audio_token"]
    )
    return _model("Qwen2AudioForConditionalGeneration", config)


def _gemma2(spec: Spec, tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedModel:
    text = _text(
        "gemma2", tokenizer, num_hidden_layers=2, head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=128
    )
    return _model("Gemma2ForCausalLM", text)


BUILDERS: dict[str, Builder] = {
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm4v": _glm4v,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "vipllava": _vipllava,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
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
    "gemma2": _gemma2,
}
"""The builder of each family's model, from the specification, the tokenizer and the ids of the marker tokens."""

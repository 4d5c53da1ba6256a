"""Tiny models with random weights, made from their configs in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaTextConfig,
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from safe_trainers.tiny.families import FAMILIES, IMAGE_SIZE, PATCH_SIZE, check_choice, family_spec
from safe_trainers.tiny.nocast import NoCastConfig, NoCastForConditionalGeneration
from safe_trainers.tiny.tokenizer import build_tokenizer, marker_ids


_HIDDEN = 64
_HEADS = 4
_MLP = 128
_TOKENS_PER_SIDE = IMAGE_SIZE // PATCH_SIZE

# The usual 0.02 is meant for much larger widths; a model of this width would first have to grow its weights.
_INIT_STD = 0.06

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def text_options(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> dict[str, Any]:
    """Return the options that every text config shares, as keywords of the config.

    Args:
        tokenizer: The tokenizer, for the size of the vocabulary and the special tokens.
        changes: Options that replace or extend the shared ones.
    """
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
        "initializer_range": _INIT_STD,
        **changes,
    }


def vision_options(**changes: Any) -> dict[str, Any]:
    """Return the options that most vision configs share, as keywords of the config.

    Args:
        changes: Options that replace or extend the shared ones.
    """
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "initializer_range": _INIT_STD,
        **changes,
    }


def _llava(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    # Siglip, because a CLIP tower without its class token returns one feature less than the processor expects.
    vision = AutoConfig.for_model("siglip_vision_model", **vision_options(vision_use_head=False))
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**text_options(tokenizer)),
        image_token_index=ids["image_token"],
        image_seq_length=_TOKENS_PER_SIDE**2,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def _aria(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    config = AriaConfig(
        # transformers 4.57 does not convert a text config that is passed as a dictionary.
        vision_config={"model_type": "idefics3_vision", **vision_options()},
        text_config=AriaTextConfig(**text_options(tokenizer, moe_num_experts=2, moe_topk=2, moe_num_shared_experts=1)),
        projector_patch_to_query_dict={_TOKENS_PER_SIDE**2: _TOKENS_PER_SIDE**2},
        image_token_index=ids["image_token"],
        initializer_range=_INIT_STD,
    )
    return AriaForConditionalGeneration(config)


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    # Rotary positions of images have three parts; they share half the head dimension.
    half = _HIDDEN // _HEADS // 2
    rope = {
        "rope_type": "default",
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 1,
            "hidden_size": _HIDDEN,
            "intermediate_size": _MLP,
            "num_heads": _HEADS,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH_SIZE,
            "fullatt_block_indexes": [0],
            "out_hidden_size": _HIDDEN,
        },
        # transformers 5 merges the two rope options.
        text_config=text_options(tokenizer, rope_scaling=rope, rope_theta=10000.0),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_start_token"],
        vision_end_token_id=ids["vision_end_token"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _idefics3(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    config = Idefics3Config(
        vision_config=vision_options(),
        text_config=LlamaConfig(**text_options(tokenizer)),
        image_token_id=ids["image_token"],
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=1,
    )
    return Idefics3ForConditionalGeneration(config)


def _smolvlm(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    config = SmolVLMConfig(
        vision_config=vision_options(),
        text_config=LlamaConfig(**text_options(tokenizer)),
        image_token_id=ids["image_token"],
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=1,
    )
    return SmolVLMForConditionalGeneration(config)


def _gemma3(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    head = _HIDDEN // _HEADS
    config = Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **vision_options(vision_use_head=False)},
        text_config=text_options(tokenizer, head_dim=head, query_pre_attn_scalar=head, sliding_window=512),
        mm_tokens_per_image=_TOKENS_PER_SIDE**2,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        tie_word_embeddings=False,
    )
    model = Gemma3ForConditionalGeneration(config)
    # Gemma initialises this projector with zeros, which would remove all information about the image.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=_INIT_STD)
    return model


def _llama4(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    config = Llama4Config(
        vision_config=vision_options(
            # `pixel_shuffle_ratio=0.5` makes the inputs of the adapter four times as wide.
            intermediate_size=int(_HIDDEN // 0.5**2),
            projector_input_dim=_HIDDEN,
            projector_output_dim=_HIDDEN,
            vision_output_dim=_HIDDEN,
        ),
        text_config=text_options(
            tokenizer,
            head_dim=_HIDDEN // _HEADS,
            intermediate_size_mlp=_MLP,
            num_local_experts=2,
            attention_chunk_size=1024,
        ),
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    return Llama4ForConditionalGeneration(config)


def _nocast(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    text = text_options(tokenizer)
    tokens = {name: text[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = NoCastConfig(text_config=text, image_token_id=ids["image_token"], **tokens)
    return NoCastForConditionalGeneration(config)


def _gpt_oss(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    config = GptOssConfig(
        # Two layers, because attention alternates between a sliding window and all tokens.
        **text_options(tokenizer, num_hidden_layers=2, head_dim=_HIDDEN // _HEADS, intermediate_size=_HIDDEN),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_scaling={"rope_type": "default"},  # the family's default is for 128k tokens
    )
    return GptOssForCausalLM(config)


def _text_only(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int]) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**text_options(tokenizer)))


_BUILDERS: dict[str, Callable[[PreTrainedTokenizerBase, dict[str, int]], PreTrainedModel]] = {
    "llava": _llava,
    "aria": _aria,
    "qwen2_5_vl": _qwen2_5_vl,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "llama4": _llama4,
    "nocast": _nocast,
    "gpt_oss": _gpt_oss,
    "text": _text_only,
}


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a weight dtype from its name.

    Args:
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, or the torch dtype itself.

    Returns:
        The torch dtype.

    Raises:
        ValueError: If it is not one of the three.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    return _DTYPES[check_choice("dtype", dtype, tuple(_DTYPES))]


def finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | str) -> PreTrainedModel:
    """Cast the weights and set the generation defaults.

    Args:
        model: A model with random weights, which is modified.
        tokenizer: The tokenizer of the model.
        dtype: Weight dtype: float32, bfloat16 or float16, or its name.

    Returns:
        The model, in evaluation mode.
    """
    resolved = resolve_dtype(dtype)
    # Buffers are not cast, as in `from_pretrained`: rotary tables stay float32, or complex in Llama 4.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(resolved)
    model.config.dtype = resolved
    model.eval()
    if model.can_generate():
        generation = model.generation_config
        generation.pad_token_id = tokenizer.pad_token_id
        generation.bos_token_id = tokenizer.bos_token_id
        generation.eos_token_id = tokenizer.eos_token_id
        # A random model would sample image markers without image features.
        generation.suppress_tokens = marker_ids(tokenizer)
    return model


def build_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype | str = torch.float32,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Build a tiny model with random weights.

    32 x 32 images, patches of 8, hidden size 64, one vision and one text layer (two in `gpt_oss`): 0.1 to 0.3
    million parameters.

    Args:
        family: One of `FAMILIES`.
        seed: Seed of the weights. torch's global random state does not change.
        dtype: Weight dtype: float32, bfloat16 or float16, or its name.
        tokenizer: The tokenizer of the model; by default the family's.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        ValueError: If there is no such family or dtype.
    """
    spec = family_spec(check_choice("family", family, FAMILIES))
    resolved = resolve_dtype(dtype)
    tokenizer = build_tokenizer(family) if tokenizer is None else tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in spec.special_tokens.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[family](tokenizer, ids)
    return finish(model, tokenizer, resolved)


def build_reward_model(
    *,
    seed: int = 0,
    dtype: torch.dtype | str = torch.float32,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Build a tiny reward model: the text family's Llama with one output.

    Args:
        seed: Seed of the weights. torch's global random state does not change.
        dtype: Weight dtype: float32, bfloat16 or float16, or its name.
        tokenizer: The tokenizer of the model; by default the text family's.

    Returns:
        A sequence classification model with one label, on the CPU, in evaluation mode.

    Raises:
        ValueError: If there is no such dtype.
    """
    resolved = resolve_dtype(dtype)
    tokenizer = build_tokenizer("text") if tokenizer is None else tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(LlamaConfig(**text_options(tokenizer), num_labels=1))
    return finish(model, tokenizer, resolved)

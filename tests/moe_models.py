"""Small mixtures of experts of many families, and their routers written again by hand with experts that are given."""

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from safe_trainers import tiny


FUSED = Version(transformers.__version__) >= Version("5")
"""Transformers 5 has one router module in each family; in older releases some blocks choose themselves."""
EXPERTS, CHOSEN = 8, 2
SHARED = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0, "initializer_range": 0.2, "norm_topk_prob": True,
}  # fmt: skip
NEEDED = {
    "qwen2_moe": {"norm_topk_prob": False, "shared_expert_intermediate_size": 16},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "llama4_text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 32},
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_layer_start_index": 0},
    "phimoe": {},
}  # fmt: skip


def moe(family="qwen3_moe", seed=0, **changes):
    """A mixture of experts with random float32 weights."""
    torch.manual_seed(seed)
    if family in ("aria", "llama4"):
        return _with_images(family)
    config = transformers.CONFIG_MAPPING[family](**(SHARED | NEEDED.get(family, {}) | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "experts" in name or "gate" in name or "router" in name:  # some initialise them to zero
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def _with_images(family):
    small = tiny.build_model(family)
    text = small.config.text_config
    counts = {
        "num_local_experts": EXPERTS,
        "moe_num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_topk": CHOSEN,
    }
    changes = {name: value for name, value in counts.items() if hasattr(text, name)}
    small.config.text_config = type(text)(**{k: v for k, v in text.to_dict().items() if k != "model_type"} | changes)
    return type(small)(small.config).eval()


def _weigh(scores, chosen, norm, scale=1.0, least=1e-20):
    weights = scores.gather(1, chosen)
    if norm:
        weights = weights / (weights.sum(1, keepdim=True) + least)
    return weights * scale


def _softmax(router, x, chosen):
    logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
    norm = getattr(router, "norm_topk_prob", True)
    return logits, _weigh(logits.softmax(-1), chosen, norm, least=0.0), chosen


def _softmax_of_chosen(router, x, chosen):
    logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight, getattr(router, "bias", None))
    return logits, logits.gather(1, chosen).softmax(-1), chosen


def _sigmoid(router, x, chosen):
    logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
    return logits, _weigh(logits.sigmoid(), chosen, router.norm_topk_prob, router.routed_scaling_factor), chosen


def _llama4(router, x, chosen):
    logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
    used = torch.zeros_like(logits).scatter(1, chosen, 1.0)
    return logits.sigmoid() * used, logits


def _ernie(router, x, chosen):
    logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
    weights = logits.softmax(-1).gather(1, chosen)
    return logits, weights / weights.sum(1, keepdim=True).clamp(min=router.norm_min), chosen


BY_HAND = {
    "qwen3_moe": _softmax, "qwen2_moe": _softmax, "mixtral": _softmax, "olmoe": _softmax, "flex_olmo": _softmax,
    "gpt_oss": _softmax_of_chosen, "granitemoe": _softmax_of_chosen,
    "aria": _softmax_of_chosen, "deepseek_v3": _sigmoid, "glm4_moe": _sigmoid,
    "llama4": _llama4, "llama4_text": _llama4, "ernie4_5_moe": _ernie,
}  # fmt: skip
"""What a router of each family returns for experts that are given, written from the papers' formulas."""

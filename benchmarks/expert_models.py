"""Small mixtures of experts of many families, made from their configs, and trained for a few steps."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from families import build_model as build_family
from families import build_processor as build_family_processor
from mismatch import source
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from safe_trainers import tiny


HIDDEN, LAYERS, EXPERTS, CHOSEN = 256, 4, 32, 4
SHARED = {
    "vocab_size": 259, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "num_experts": EXPERTS,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
"""Values of configs; each config takes those that it has."""
LATENT = {
    "num_key_value_heads": 4, "head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 64, "n_group": 4, "topk_group": 2,
}  # fmt: skip
"""Attention of DeepSeek, and groups of experts."""
TEXT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "mixtral": {"intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": LATENT,
    "glm4_moe": {"n_group": 4, "topk_group": 2},
    "olmoe": {"intermediate_size": 64},
    "granitemoe": {"intermediate_size": 64, "attention_multiplier": SHARED["head_dim"] ** -0.5},  # 1 in its config
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_layer_start_index": 0},
    "minimax_m2": {"intermediate_size": 64},
    "hunyuan_v1_moe": {"moe_topk": CHOSEN, "intermediate_size": 64},
}
"""Families of text, and what their configs need beside `SHARED`."""
IMAGES = ("qwen3_vl_moe", "aria")
TEXT_IN_IMAGES = {
    "num_hidden_layers": LAYERS, "num_experts": 16, "num_local_experts": 16, "moe_num_experts": 16,
    "num_experts_per_tok": 4, "moe_topk": 4, "layer_types": None, "no_rope_layers": [1] * LAYERS,
    "moe_layers": list(range(LAYERS)),
}  # fmt: skip
FAMILIES = (*TEXT, *IMAGES)


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Builds a model with random float32 weights.

    Args:
        family: One of `FAMILIES`.
        seed: Of the weights.
        **changes: Values of a text model's config that replace others.
    """
    torch.manual_seed(seed)
    if family in TEXT:
        config = transformers.CONFIG_MAPPING[family](**(SHARED | TEXT[family] | changes))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    else:
        small = tiny.build_model(family) if family != "qwen3_vl_moe" else build_family(family)
        config = small.config
        text = config.text_config
        for name, value in TEXT_IN_IMAGES.items():
            if hasattr(text, name):
                setattr(text, name, value)
        text = type(text)(**{k: v for k, v in text.to_dict().items() if k != "model_type"})
        config.text_config = text
        torch.manual_seed(seed)
        model = type(small)(config)
    return model.eval()


def processor(family: str) -> Any:
    """Returns the tokenizer or the processor of a family."""
    if family in TEXT:
        return transformers.ByT5Tokenizer(extra_ids=0)
    return build_family_processor(family) if family == "qwen3_vl_moe" else tiny.build_processor(family)


def texts(family: str, rows: int, width: int) -> Iterator[torch.Tensor]:
    """Yields batches of token ids, (rows, width), without end.

    They are parts of the source of Python's standard library, or walks of a fixed random chain over the vocabulary of
    a family with images.
    """
    generator = torch.Generator().manual_seed(0)
    if family in TEXT:
        text = source()
        while True:
            starts = torch.randint(len(text) - width, (rows,), generator=generator).tolist()
            yield torch.stack([text[start : start + width] for start in starts])
    made = processor(family)
    tokenizer = getattr(made, "tokenizer", made)
    words = torch.tensor([i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids])
    following = torch.randint(len(words), (len(words), 3), generator=generator)
    while True:
        walk = [torch.randint(len(words), (rows,), generator=generator)]
        for _ in range(width - 1):
            branch = torch.randint(3, (rows,), generator=generator)
            walk.append(following[walk[-1], branch])
        yield words[torch.stack(walk, dim=1)]


def learn(model: nn.Module, family: str, steps: int, rows: int = 4, width: int = 128) -> float:
    """Trains in float32, and returns the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=max(steps, 2))
    last = float("nan")
    batches = texts(family, rows, width)
    for _ in range(steps):
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last = loss.item()
    return last

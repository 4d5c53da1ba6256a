"""Models with adapters in all linear layers, and what TRL does with them in a weight sync, without the sending."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]


def lora(**changes):
    """A config of adapters with random weights, so that they change the model."""
    return LoraConfig(**{"r": 4, "target_modules": EVERYWHERE, "init_lora_weights": False, **changes})


def adapted_llama(hidden=256, layers=2, dtype=torch.bfloat16, scale=1.0):
    """A Llama with adapters whose second factor is multiplied by `scale`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip
    config.dtype = dtype
    model = get_peft_model(LlamaForCausalLM(config).to(dtype), lora(r=8))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float() * (scale if "lora_B" in name else 1.0)
    return model


def merge_for_sync(model, sync=None):
    """Merges the adapters, reads each weight and unmerges them, as TRL does, or inside `sync.merged()`."""
    if sync is not None:
        with sync.merged():
            return merge_for_sync(model)
    model.merge_adapter()
    for name, parameter in model.named_parameters():
        if model.prefix not in name:
            last = parameter.data
    model.unmerge_adapter()
    return last

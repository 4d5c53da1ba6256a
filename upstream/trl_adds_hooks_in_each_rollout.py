"""Each rollout turns gradient checkpointing on again, and transformers adds hooks to those of before."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.models.utils import disable_gradient_checkpointing


THREAD = "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py"
MECHANISMS = ("safe_trainers/model/input_gradients.py",)
QUESTION = "hooks of the embedding after 100 rollouts, minus those before; each forward pass calls them all"

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
embedding = model.get_input_embeddings()
before = len(embedding._forward_hooks)
for _ in range(100):
    with disable_gradient_checkpointing(model):  # as around `generate` and around scoring
        pass
more = len(embedding._forward_hooks) - before
print("FAULT" if more else "FIXED", more)

"""`generate` under autocast cannot use a static cache: keys and values have two dtypes, and the cache has one."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


THREAD = "https://github.com/huggingface/transformers/blob/main/src/transformers/cache_utils.py"
MECHANISMS = ("safe_trainers/rollout/cache_dtype.py",)
QUESTION = "crashes of `generate` under bfloat16 autocast with `cache_implementation='static'` (0 or 1)"

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
prompt = torch.tensor([[5, 6, 7]])
try:
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(prompt, max_new_tokens=4, cache_implementation="static")
except RuntimeError as error:
    print("FAULT", 1, f"({str(error).splitlines()[0]})")
else:
    print("FIXED", 0)

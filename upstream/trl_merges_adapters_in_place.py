"""TRL's weight sync merges adapters into the base and unmerges them again: a half-precision base drifts."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from trl.generation.vllm_generation import VLLMGeneration


THREAD = "https://github.com/huggingface/trl/issues/6688"
MECHANISMS = ("safe_trainers/rollout/weight_sync.py", "safe_trainers/weights/merged.py")
QUESTION = "largest change of a frozen bfloat16 weight after 100 syncs, divided by the mean weight"

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
model = get_peft_model(LlamaForCausalLM(config).bfloat16(), lora)
base = {name: p.detach().double() for name, p in model.named_parameters() if "base_layer" in name}
methods = [value for value in vars(VLLMGeneration).values() if hasattr(value, "__code__")]
merges = any("unmerge_adapter" in getattr(f, "__wrapped__", f).__code__.co_names for f in methods)
for _ in range(100 if merges else 0):  # what the sync does, without the sending
    model.merge_adapter()
    model.unmerge_adapter()
now = dict(model.named_parameters())
drift = max(((now[name].double() - old).abs().max() / old.abs().mean()).item() for name, old in base.items())
print("FAULT" if drift > 1e-6 else "FIXED", f"{drift:.2e}", "" if merges else "(the sync does not unmerge any more)")

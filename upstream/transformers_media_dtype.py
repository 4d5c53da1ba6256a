"""Processors return float32 pixels; Aria in bfloat16 puts the features of its tower into text of another dtype."""

import torch
from transformers import AriaConfig, AriaForConditionalGeneration


THREAD = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/aria/modeling_aria.py"
MECHANISMS = ("safe_trainers/media/inputs.py", "safe_trainers/media/caster.py")
QUESTION = "crashes of a bfloat16 Aria with float32 pixels (0 or 1)"

text = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1, pad_token_id=0,
)  # fmt: skip
vision = dict(
    model_type="idefics3_vision", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
)  # fmt: skip
config = AriaConfig(
    text_config=text,
    vision_config=vision,
    projector_patch_to_query_dict={4: 2},
    image_token_index=9,
)
model = AriaForConditionalGeneration(config).bfloat16()
inputs = {
    "input_ids": torch.tensor([[5, 9, 9, 6]]),
    "attention_mask": torch.ones(1, 4, dtype=torch.long),
    "pixel_values": torch.rand(1, 3, 28, 28),
    "pixel_mask": torch.ones(1, 28, 28, dtype=torch.bool),
}
try:
    model(**inputs)
except (RuntimeError, ValueError) as error:
    print("FAULT", 1, f"({str(error).splitlines()[0]})")
else:
    print("FIXED", 0)

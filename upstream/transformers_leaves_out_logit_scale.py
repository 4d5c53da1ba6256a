"""Aya Vision's forward pass leaves out the `logit_scale` of its text model, so that its samples are less random."""

import torch
from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration, Cohere2Config, Cohere2ForCausalLM


THREAD = (
    "https://github.com/huggingface/transformers/blob/main/src/transformers/models/aya_vision/modeling_aya_vision.py"
)
MECHANISMS = ("safe_trainers/rollout/head_scaling.py",)
QUESTION = "ratio of the logits of Aya Vision to those of its text model, with the same weights and no image"

text = Cohere2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1, logit_scale=0.25,
)  # fmt: skip
vision = dict(
    model_type="siglip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
)  # fmt: skip
torch.manual_seed(0)
model = AyaVisionForConditionalGeneration(AyaVisionConfig(text_config=text, vision_config=vision, image_token_index=9))
alone = Cohere2ForCausalLM(text)
alone.model.load_state_dict(model.model.language_model.state_dict())
alone.lm_head.load_state_dict(model.lm_head.state_dict())
ids = torch.tensor([[5, 6, 7, 8]])
with torch.no_grad():
    ratio = (model(ids).logits.norm() / alone(ids).logits.norm()).item()
print("FAULT" if abs(ratio - 1) > 1e-3 else "FIXED", f"{ratio:.2f}")

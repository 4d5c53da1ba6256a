"""A model whose vision tower overflows float16."""

import cells
import torch
from transformers import AutoModelForImageTextToText


def overflowing(dtype=torch.float32):
    """A Gemma 3 whose vision tower computes beyond 65,504, as the real one does."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("gemma3"), dtype=dtype)
    with torch.no_grad():
        for name, module in model.model.vision_tower.named_modules():
            if name.endswith("mlp"):
                module.fc1.weight.mul_(300)
                module.fc2.weight.mul_(3000)
    return model

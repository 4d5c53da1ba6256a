"""Builds tiny models."""

import torch
from torch import nn


def wake(model: nn.Module) -> nn.Module:
    """Gives random values to weights that are initialised with zeros, such as gates, through which no media pass."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("bias") and parameter.numel() and parameter.abs().max() < 1e-3:
                nn.init.normal_(parameter, std=0.1 if parameter.ndim < 2 else 0.02)
    return model

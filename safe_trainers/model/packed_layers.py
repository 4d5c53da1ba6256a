"""Finds the packed layers of a model, and measures what one of them computes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.dtypes import from_torch, to_torch
from .inventory import bits, declared_method
from .parts import adapter_layers, holds_packed, is_quantized, unwrap, wraps_tensors
from .trial_forward import compute_context, undisturbed


logger = logging.getLogger(__name__)
ROWS = 32
"""Rows of the random inputs; some integer kernels need more than 16."""
TOLERANCE = 0.25
"""How far a gradient may be from that of the output; quantised activations differ from it by a few percent."""


@dataclass(frozen=True)
class LayerTrial:
    """What a layer computed for random inputs.

    Attributes:
        dtype: Dtype of the inputs.
        output: Dtype of the output; `None` if the layer failed.
        error: The error of the forward or backward pass; `None` if both worked.
        finite: Whether output and gradient are finite.
        slope: The change of the output that the gradient predicts between two inputs, divided by the actual change:
            1 for the gradient of the function that an affine layer computes, 0 without a gradient; `None` if none was
            asked for, or the output does not depend on the input.
    """

    dtype: str
    output: str | None = None
    error: str | None = None
    finite: bool = True
    slope: float | None = None

    @property
    def computes(self) -> bool:
        """Whether the output is finite."""
        return self.error is None and self.finite

    @property
    def trains(self) -> bool:
        """Whether output and gradient are right."""
        return self.computes and (self.slope is None or abs(self.slope - 1) < TOLERANCE)

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        if not self.finite:
            return "the output or its gradient contains NaN or infinity"
        if self.slope == 0:
            return "the gradient with respect to the input is exactly 0, so that nothing before the layer is trained"
        if not self.trains:
            return f"the gradient is {self.slope:.2f} times that of the function which the layer computes"
        return f"the output is {self.output}, with its gradient"


def packed_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers with packed weights that bitsandbytes did not pack.

    Args:
        model: A transformers model, possibly wrapped.

    Yields:
        The qualified names in the base model, and the layers.
    """
    base = unwrap(model)
    declared = declared_method(base) is not None
    for name, module in base.named_modules():
        if bits(module) is None and holds_packed(module, declared):
            yield name, module


def rewritten_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields linear layers without packed weights whose `forward` is not that of `nn.Linear`; no adapters.

    Quantisers that decompress weights while they load them may round in such a `forward`.

    Args:
        model: A transformers model, possibly wrapped.

    Yields:
        The qualified names in the base model, and the layers.
    """
    base = unwrap(model)
    added = {id(part) for module in base.modules() for layer in adapter_layers(module) for part in layer.modules()}
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear) or id(module) in added or bits(module) is not None:
            continue
        rewritten = "forward" in vars(module) or type(module).forward is not nn.Linear.forward
        if rewritten and not any(map(is_quantized, module.parameters(recurse=False))):
            yield name, module


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Returns a key that is equal for layers that compute alike: class, and class and dtype of each tensor.

    Args:
        layer: A layer.
    """
    tensors = [*layer._parameters.items(), *layer._buffers.items()]
    held = tuple((name, _format(tensor), tensor.device) for name, tensor in tensors if tensor is not None)
    return type(layer), "forward" in vars(layer), held


def first_tensor(layer: nn.Module) -> torch.Tensor | None:
    """Returns a tensor of a layer, for its device."""
    tensors = (*layer._parameters.values(), *layer._buffers.values())
    return next((tensor for tensor in tensors if tensor is not None), None)


def try_layer(layer: nn.Module, dtype: str, autocast: str | None, *, backward: bool = True) -> LayerTrial | None:
    """Runs one layer forward and backward on random inputs, without changing the state of the run.

    The gradient is compared with the difference of two outputs, which needs no dequantised weight: for an affine layer
    f with weight W, and a gradient g of the output, `(x1 - x0) @ (g @ W)` is `g @ (f(x1) - f(x0))`.

    Args:
        layer: The layer.
        dtype: Dtype of the inputs.
        autocast: The autocast dtype of the run; `None` without autocast.
        backward: Whether to measure the gradient.

    Returns:
        What was measured; `None` if the layer is on the meta device, or has no weights yet.
    """
    tensor = first_tensor(layer)
    if tensor is None or tensor.is_meta or tensor.numel() == 0:
        return None
    context = compute_context(tensor.device, None if autocast is None else to_torch(autocast))
    if _ignores_scales(layer):
        return LayerTrial(dtype, error=f"{type(layer).__name__} multiplies with a packed weight without its scales")
    inputs = _inputs(layer, to_torch(dtype), tensor.device)
    if inputs is None:
        return LayerTrial(dtype, error=f"{type(layer).__name__} does not say how many inputs it has (`in_features`)")
    x0, x1 = inputs
    try:
        with undisturbed(layer), torch.enable_grad(), context:
            for part in layer.modules():
                part.training = True
            x0.requires_grad_(backward and x0.is_floating_point())
            y0, y1 = layer(x0), layer(x1)
            change = (y1 - y0).detach().float()
        finite = bool(torch.isfinite(change).all())
        output = from_torch(y0.dtype)
        if not finite or not x0.requires_grad or not change.any():
            return LayerTrial(dtype, output, finite=finite)
        seed = (change / change.square().mean().sqrt()).to(y0.dtype)
        gradient = torch.autograd.grad(y0, x0, seed, allow_unused=True)[0] if y0.requires_grad else None
    except Exception as error:  # the kernels of quantisers raise errors of any class
        return LayerTrial(dtype, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if gradient is None or not gradient.any():
        return LayerTrial(dtype, output, slope=0.0)
    predicted = (gradient.double() * (x1 - x0).detach().double()).sum().item()
    return LayerTrial(
        dtype,
        output,
        finite=bool(torch.isfinite(gradient).all()),
        slope=predicted / (seed.double() * change.double()).sum().item(),
    )


def unpack(model: nn.Module) -> None:
    """Runs the forward pass of a model whose quantiser unpacks its weights in the first one (compressed-tensors).

    Args:
        model: A model, possibly wrapped by PEFT. Other models are not changed, and not run.
    """
    base = unwrap(model)
    if not base._forward_pre_hooks or declared_method(base) is None or next(packed_layers(base), None) is None:
        return
    device = next(base.parameters()).device
    if device.type == "meta":
        return
    tokens = torch.ones((1, 2), dtype=torch.long, device=device)  # (B, T)
    try:
        with undisturbed(base):
            base(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    except Exception as error:  # its layers are measured next
        logger.info("the quantised model could not be run: %s: %s", type(error).__name__, error)


def _ignores_scales(layer: nn.Module) -> bool:
    """Whether a layer has the forward pass of `nn.Linear` and a packed weight that is a plain tensor."""
    weight = layer._parameters.get("weight")
    rewritten = "forward" in vars(layer) or type(layer).forward is not nn.Linear.forward
    return not rewritten and weight is not None and is_quantized(weight) and not wraps_tensors(type(weight))


def _inputs(layer: Any, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns two random inputs, (1, ROWS, C) or (ROWS, C, ...), or token ids; `None` if their size is unknown."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Embedding):
        drawn = torch.randint(layer.num_embeddings, (2, 1, ROWS), generator=generator)
        return drawn[0].to(device), drawn[1].to(device)
    shape: tuple[int, ...]
    if isinstance(getattr(layer, "kernel_size", None), tuple):
        shape = (ROWS, layer.in_channels, *layer.kernel_size)
    else:
        sizes = (getattr(layer, name, None) for name in ("in_features", "infeatures"))
        size = next((size for size in sizes if isinstance(size, int)), None)
        if size is None:
            return None
        shape = (1, ROWS, size)
    first, second = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return first, second


def _format(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the class and dtype of a tensor, and of the tensors that it wraps."""
    if not wraps_tensors(type(tensor)):
        return type(tensor), tensor.dtype
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return type(tensor), tensor.dtype, *(_format(getattr(tensor, name)) for name in names)

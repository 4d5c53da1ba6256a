"""Measures the gradients of module outputs in a backward pass, with hooks that do not change them.

The hooks belong to the outputs of one forward pass, and go with them. What they measure stays on the device until
`GradientWatch.finish` reads it.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..core.dtypes import FLOAT16, from_torch, join_dtypes
from .activations import floating, modules_of


BLOCK = 2**24
"""Elements of a gradient that are counted at once."""
SUSPECT = 0.1
"""Share of zeros, in rows that are not all zero, above which gradients may have underflowed."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of a module's outputs, in all calls of one backward pass.

    Attributes:
        module: The module's qualified name in the base model; empty for the model itself and for PEFT's wrappers.
        dtypes: Dtypes of the gradients.
        largest: Largest absolute value, with the loss scale; infinite or NaN if an element is not finite.
        elements: Number of elements.
        zeros: Number of elements that are 0.
        scattered_zeros: Number of elements that are 0 in rows, along the last dimension, that are not all 0.
        underflow: Share of the elements that are not 0 in float32, but 0 here; `None` if it was not measured.
    """

    module: str
    dtypes: frozenset[str]
    largest: float
    elements: int
    zeros: int
    scattered_zeros: int
    underflow: float | None = None


@dataclass(frozen=True)
class GradientReport:
    """The gradients of module outputs in one backward pass.

    Attributes:
        step: Number of optimizer steps before the pass.
        scale: The loss scale; NaN if the loss was not scaled.
        gradients: The gradients of each module, in the order of the backward pass.
    """

    step: int
    scale: float
    gradients: tuple[Gradient, ...]

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite."""
        return all(math.isfinite(gradient.largest) for gradient in self.gradients)

    @property
    def largest(self) -> float:
        """The largest absolute value among the float16 gradients, with the loss scale."""
        return max((g.largest for g in self.gradients if FLOAT16 in g.dtypes), default=0.0)

    @property
    def underflow(self) -> float | None:
        """The largest share of underflow of a module; `None` if it was not measured."""
        return max((g.underflow for g in self.gradients if g.underflow is not None), default=None)

    def suspects(self, adapters: frozenset[str]) -> bool:
        """Whether zeros among the float16 gradients may be due to underflow.

        Args:
            adapters: Modules that do not count: the second factor of a new LoRA adapter is 0, and so is the gradient
                of the first.
        """
        counted = [g for g in self.gradients if FLOAT16 in g.dtypes and g.module not in adapters]
        return any(g.zeros == g.elements or g.scattered_zeros > SUSPECT * g.elements for g in counted)

    def compared(self, reference: "GradientReport") -> "GradientReport":
        """Returns this report with the underflow of each module.

        Args:
            reference: The gradients of the same pass in float32.
        """
        exact = {gradient.module: gradient for gradient in reference.gradients}
        measured = []
        for gradient in self.gradients:
            other, share = exact.get(gradient.module), None
            if other is not None and other.elements == gradient.elements and other.zeros < other.elements:
                share = max(0, gradient.zeros - other.zeros) / (other.elements - other.zeros)
            measured.append(replace(gradient, underflow=share))
        return replace(self, gradients=tuple(measured))

    def to_dict(self) -> dict[str, Any]:
        """The report as values that can be written to JSON."""
        rows = [{**vars(g), "dtypes": sorted(g.dtypes), "largest": str(g.largest)} for g in self.gradients]
        return {"step": self.step, "scale": str(self.scale), "gradients": rows}

    def __str__(self) -> str:
        shown = sorted(self.gradients, key=lambda g: (-(g.underflow or 0.0), -g.largest))[:12]
        width = max((len(g.module or "the model") for g in shown), default=0)
        title = f"gradients of module outputs after step {self.step}, loss scale {self.scale:g}"
        lines = [f"{title}; float16 overflows at 65504", f"{'module':<{width}}     largest      zero  underflow"]
        for g in shown:
            lost = "" if g.underflow is None else f"{g.underflow:>9.2%}"
            row = f"{g.module or 'the model':<{width}}  {g.largest:>10.4g}  {g.zeros / g.elements:>8.2%}  {lost:>9}"
            lines.append(f"{row}  {join_dtypes(g.dtypes)}")
        return "\n".join(lines)


class GradientWatch:
    """Measures the gradients of the outputs of all modules that are called while it is attached.

    Args:
        model: The model, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names = {id(module): name for name, module in modules_of(model).items()}
        self._measured: list[tuple[str, torch.dtype, int, torch.Tensor]] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator["GradientWatch"]:
        """Watches the outputs of modules that are called while the block runs, also after it.

        Yields:
            This watch.
        """
        handles = [module.register_forward_hook(self._leave) for module in self.model.modules()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module), "")
        for tensor in floating(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._measure(name, gradient))

    @torch.no_grad()
    def _measure(self, name: str, gradient: torch.Tensor) -> None:
        if not gradient.numel():
            return
        row = max(1, gradient.shape[-1] if gradient.dim() else 1)
        blocks = gradient.reshape(-1, row).split(max(1, BLOCK // row))  # each is copied as booleans
        nonzero = torch.cat([block.count_nonzero(dim=1) for block in blocks])  # (rows,)
        scattered = torch.where(nonzero > 0, row - nonzero, 0).sum()  # a mask as an index would wait for the device
        low, high = torch.aminmax(gradient)
        read = torch.stack([torch.maximum(-low.float(), high.float()), nonzero.sum().float(), scattered.float()])
        self._measured.append((name, gradient.dtype, gradient.numel(), read))

    def finish(self, step: int, scale: float) -> GradientReport:
        """Reads all measured values from the device at once.

        Args:
            step: Number of optimizer steps so far.
            scale: The loss scale.

        Returns:
            The report.
        """
        device = self._measured[0][3].device if self._measured else torch.device("cpu")
        read = torch.stack([m[3].to(device) for m in self._measured]).tolist() if self._measured else []  # (N, 3)
        found: dict[str, Gradient] = {}
        for (name, dtype, elements, _), (largest, nonzero, scattered) in zip(self._measured, read, strict=True):
            old = found.get(name, Gradient(name, frozenset(), 0.0, 0, 0, 0))
            found[name] = Gradient(
                name,
                old.dtypes | {from_torch(dtype)},
                math.nan if math.isnan(largest) or math.isnan(old.largest) else max(old.largest, largest),
                old.elements + elements,
                old.zeros + elements - int(nonzero),
                old.scattered_zeros + int(scattered),
            )
        self._measured.clear()
        return GradientReport(step, scale, tuple(found.values()))


def names_of_adapters(model: nn.Module) -> frozenset[str]:
    """The qualified names of the modules that PEFT added, and of those in them.

    Args:
        model: The model, wrapped or not.
    """
    modules = modules_of(model)
    layers = (module for module in modules.values() if isinstance(module, BaseTunerLayer))
    beside = (child for layer in layers for name, child in layer.named_children() if name != "base_layer")
    added = {id(part) for child in beside for part in child.modules()}
    return frozenset(name for name, module in modules.items() if id(module) in added)

"""Finds the first module of a forward and backward pass that makes a number that is not finite.

A trace is attached only to a pass that is computed again (`replay.py`), so its hooks may read every tensor at once.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.dtypes import from_torch
from ..model.parts import is_quantized, unwrap
from .activations import floating, modules_of


WEIGHT, INPUT, OUTPUT, LOSS, LOSS_INPUT, GRADIENT, LOSS_GRADIENT = KINDS = (
    "weight", "input", "output", "loss", "loss input", "gradient", "loss gradient",
)  # fmt: skip
"""What is not finite first: a weight of a module, an input of the model, an output of a module, the loss, an input of
the loss itself, a gradient that a module computes, or the gradient that the loss passes to the model."""


SHOWN = 4
"""Number of ranges in a message; the report and `to_dict` have all of them."""


@dataclass(frozen=True)
class Values:
    """The range of a tensor.

    Attributes:
        name: Name of the argument, or the place in the output.
        dtype: Its dtype.
        shape: Its shape.
        low: The smallest finite element; NaN if there is none.
        high: The largest finite element.
        wrong: Number of elements that are not finite. Minus infinity in a mask, whose other elements are at most 0,
            does not count.
        elements: Number of elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    wrong: int
    elements: int

    @property
    def largest(self) -> float:
        """The largest absolute value of the finite elements."""
        return max(abs(self.low), abs(self.high))

    @property
    def finite_share(self) -> float:
        """The share of finite elements."""
        return 1 - self.wrong / self.elements

    def to_dict(self) -> dict[str, Any]:
        """The range as values that can be written to JSON; numbers that are not finite are strings."""
        low, high = (value if math.isfinite(value) else str(value) for value in (self.low, self.high))
        return {**vars(self), "shape": list(self.shape), "low": low, "high": high}

    def __str__(self) -> str:
        numbers = "no finite element" if math.isnan(self.low) else (
            f"min {self.low:.4g}, max {self.high:.4g}, absmax {self.largest:.4g}"
        )  # fmt: skip
        share = "all finite" if not self.wrong else f"{self.wrong} of {self.elements} not finite"
        return f"{self.name}: {self.dtype} {list(self.shape)}, {numbers}, {share}"


def values_of(name: str, tensor: torch.Tensor, masks: bool = True) -> Values:
    """Reads the range of a tensor.

    Args:
        name: Its name in messages.
        tensor: A floating-point tensor with at least one element.
        masks: Whether minus infinity is allowed next to numbers of at most 0.
    """
    tensor = tensor.detach()
    low, high = (float(value) for value in torch.aminmax(tensor))
    wrong = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = tensor.isfinite()
        wrong = int(finite.logical_not().sum())
        kept = tensor[finite]
        low, high = (float(value) for value in torch.aminmax(kept)) if kept.numel() else (math.nan, math.nan)
        if masks and high <= 0 and wrong == int((tensor == -math.inf).sum()):
            wrong = 0
    return Values(name, from_torch(tensor.dtype), tuple(tensor.shape), low, high, wrong, tensor.numel())


@dataclass
class Visit:
    """One call of a module.

    Attributes:
        name: Its qualified name in the base model; empty for the model itself and for PEFT's wrappers.
        module: The module.
        inputs: The ranges of its inputs.
        outer: The call that it is a part of; `None` for a call from outside of the model.
        outputs: The ranges of its outputs.
        gradients: The ranges of the gradients of its outputs, in the order in which they arrived.
    """

    name: str
    module: nn.Module
    inputs: list[Values]
    outer: "Visit | None" = None
    outputs: list[Values] = field(default_factory=list)
    gradients: list[Values] = field(default_factory=list)

    @property
    def makes_output(self) -> bool:
        """Whether an output is not finite although all inputs are."""
        return any(v.wrong for v in self.outputs) and not any(v.wrong for v in self.inputs)

    @property
    def place(self) -> str:
        """How messages name it."""
        return f"`{self.name}`" if self.name else f"the model, `{type(self.module).__name__}`,"


@dataclass(frozen=True)
class Cause:
    """The first number that is not finite.

    Attributes:
        kind: One of `KINDS`.
        module: The module's qualified name in the base model; empty for the model itself, and for the loss.
        type: The class of the module; empty for the loss.
        what: The weight, input or output that is not finite.
        ranges: The inputs of the module; for a gradient also the gradients of its outputs. For an input that the
            model's own code computed between two modules, the inputs of the module around them.
        outer: For such an input, the module around; empty for others.
    """

    kind: str
    module: str
    type: str
    what: Values
    ranges: tuple[Values, ...] = ()
    outer: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The cause as values that can be written to JSON."""
        ranges = [values.to_dict() for values in self.ranges]
        return {**vars(self), "what": self.what.to_dict(), "ranges": ranges}

    @property
    def sentence(self) -> str:
        """What is not finite and the first ranges, in one line."""
        shown = [str(self.what), *map(str, self.ranges[:SHOWN])]
        return f"{self.text} ({'; '.join(shown)})"

    @property
    def text(self) -> str:
        """What is not finite, without ranges."""
        place = f"`{self.module}`" if self.module else f"the model, `{self.type}`,"
        computed = f"; the code of {self.outer} computes it between two modules" if self.outer else ""
        return {
            WEIGHT: f"the weight `{self.what.name}` is not finite",
            INPUT: f"the input `{self.what.name}` of {place} is the first number that is not finite{computed}",
            OUTPUT: f"{place} is the first module whose output is not finite, for finite inputs",
            LOSS: "the loss is not finite, although every module's output and every input of the loss is",
            LOSS_INPUT: f"the input `{self.what.name}` of the loss is not finite, although every module's output is",
            GRADIENT: f"{place} is the first module that computes a gradient that is not finite, {self.what.name}, "
            "from finite gradients of its outputs",
            LOSS_GRADIENT: "the loss is finite, but the gradient that it passes to the model's output is not",
        }[self.kind]

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  {values}" for values in (self.what, *self.ranges))])


class Trace:
    """Watches one forward and backward pass of a model.

    Every input of a module is replaced by an alias of the same tensor, so that the gradient which this module returns
    for it is known, and not only the sum with those of other modules.

    Args:
        model: The model, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names = {id(module): name for name, module in modules_of(model).items()}
        self._running: list[Visit] = []
        self._visits: list[Visit] = []  # in the order in which the modules finished
        self._first: Cause | None = None  # the first input or output that is not finite
        self._made: Cause | None = None  # the first gradient that a module made not finite
        self._unexplained: Cause | None = None  # the first one of a module whose outputs have no gradient
        self._owners: dict[int, list[tuple[str, nn.Module]]] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator["Trace"]:
        """Watches the model while the block runs.

        Yields:
            This trace.
        """
        handles: list[Any] = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
            for name, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append((name, module))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._parameter))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = self._running[-1] if self._running else None
        visit = Visit(self._names.get(id(module), ""), module, [], outer)
        given = [(f"argument {number}", value) for number, value in enumerate(args)]
        for name, value in (*given, *kwargs.items()):
            tensors = list(floating(value))
            names = [name] if len(tensors) == 1 else [f"{name}[{number}]" for number in range(len(tensors))]
            visit.inputs += [values_of(n, tensor) for n, tensor in zip(names, tensors, strict=True)]
        self._running.append(visit)
        if self._first is None and any(values.wrong for values in visit.inputs):
            what = next(values for values in visit.inputs if values.wrong)
            others = visit.inputs if outer is None else outer.inputs
            ranges = tuple(values for values in others if values is not what)
            place = "" if outer is None else outer.place.rstrip(",")
            self._first = Cause(INPUT, visit.name, type(module).__name__, what, ranges, place)
        return (
            tuple(self._alias(visit, f"that of its argument {n}", value) for n, value in enumerate(args)),
            {name: self._alias(visit, f"that of its input {name}", value) for name, value in kwargs.items()},
        )

    def _alias(self, visit: Visit, name: str, value: Any) -> Any:
        """An alias of a tensor, or of those in a plain container, whose gradient is watched."""
        if isinstance(value, torch.Tensor):
            if not (value.requires_grad and torch.is_grad_enabled() and value.is_floating_point()):
                return value
            alias = value.view_as(value)
            alias.register_hook(lambda gradient: self._returned(visit, name, gradient))
            return alias
        if type(value) in (tuple, list):
            return type(value)(self._alias(visit, name, part) for part in value)
        return value

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running[-1].module is not module:
            self._running.pop()  # checkpointing stops a recomputed call before it ends
        if not self._running:
            return
        visit = self._running.pop()
        tensors = list(floating(output))
        names = ["output"] if len(tensors) == 1 else [f"output {number}" for number in range(len(tensors))]
        visit.outputs = [values_of(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        self._visits.append(visit)
        if self._first is None and visit.makes_output:
            self._first = self._made_by(visit)
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, name=name: self._arrived(visit, name, gradient))

    def _arrived(self, visit: Visit, name: str, gradient: torch.Tensor) -> None:
        if gradient.numel():
            visit.gradients.append(values_of(f"gradient of the {name}", gradient, masks=False))

    def _returned(self, visit: Visit, name: str, gradient: torch.Tensor) -> None:
        if self._made is None and gradient.numel():
            self._check(visit, values_of(name, gradient, masks=False))

    def _check(self, visit: Visit, values: Values) -> None:
        """Keeps the cause if a visit's gradient is not finite, and the gradients of its outputs are."""
        if not values.wrong:
            return
        known = visit.gradients
        ranges = (*visit.gradients, *visit.inputs)
        cause = Cause(GRADIENT, visit.name, type(visit.module).__name__, values, ranges)
        if known and not any(gradient.wrong for gradient in known):
            self._made = cause
        elif not known and self._unexplained is None:
            self._unexplained = cause

    def _parameter(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self._made is not None or gradient is None or gradient.is_sparse or not gradient.numel():
            return
        for name, module in self._owners.get(id(parameter), ()):
            values = values_of(f"that of its {name}", gradient, masks=False)
            if not values.wrong:
                return
            for visit in self._visits:
                if visit.module is module:
                    self._check(visit, values)
                    if self._made is not None:
                        return

    def cause(self, loss: torch.Tensor, inputs: Mapping[str, Any]) -> Cause | None:
        """Returns the first number that is not finite.

        Args:
            loss: The loss of this pass.
            inputs: The inputs of the loss by name.

        Returns:
            The cause; `None` if everything is finite.
        """
        if self._first is not None:
            return self._first
        of_loss = values_of("loss", loss, masks=False)
        if of_loss.wrong:
            given = [values_of(name, tensor) for name, value in inputs.items() for tensor in floating(value)]
            wrong = next((values for values in given if values.wrong), None)
            return Cause(LOSS, "", "", of_loss) if wrong is None else Cause(LOSS_INPUT, "", "", wrong)
        if self._made is not None:
            return self._made
        outermost = next((visit for visit in reversed(self._visits) if not visit.name), None)
        wrong = next((g for g in (outermost.gradients if outermost else ()) if g.wrong), None)
        return self._unexplained if wrong is None else Cause(LOSS_GRADIENT, "", "", wrong)

    def _made_by(self, visit: Visit) -> Cause:
        """The cause of an output that is not finite: a weight of the module, or the module itself."""
        what, kind = _weight_not_finite(visit), WEIGHT
        if what is None:
            what, kind = next(values for values in visit.outputs if values.wrong), OUTPUT
        return Cause(kind, visit.name, type(visit.module).__name__, what, tuple(visit.inputs))


def _weight_not_finite(visit: Visit) -> Values | None:
    """The first weight of a module, or of those in it, that is not finite; `None` if there is none."""
    prefix = f"{visit.name}." if visit.name else ""
    named = unwrap(visit.module).named_parameters()
    held = ((name, weight) for name, p in named if not is_quantized(p) for weight in floating(p))
    ranges = (values_of(f"{prefix}{name}", weight, masks=False) for name, weight in held)
    return next((values for values in ranges if values.wrong), None)

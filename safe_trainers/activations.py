"""The largest activations of a model, module by module, seen in a forward pass that is run anyway.

Hooks read the extremes of what enters and leaves each module. They change nothing, draw no random number, and are gone
afterwards; the numbers stay on the device until then.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .dtypes import FLOAT16, from_torch
from .towers import unwrap


LIMIT = 65504.0
"""The largest float16 number."""
NEAR = LIMIT / 2
"""From here on one more doubling is infinite."""
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Activation:
    """What left a module in one call.

    Attributes:
        module: Its qualified name in the base model; empty for the model itself, and for what PEFT puts around it.
        dtype: Dtype of its floating outputs.
        largest: Their largest absolute value, infinite or NaN where there is one that is not finite.
        entered_finite: Whether what entered was finite.
    """

    module: str
    dtype: str
    largest: float
    entered_finite: bool

    @property
    def overflows(self) -> bool:
        """Whether what left is not finite, and it begins here."""
        return self.entered_finite and not math.isfinite(self.largest)

    @property
    def weight(self) -> tuple[bool, bool, float]:
        """What makes one call of a module say more than another."""
        finite = math.isfinite(self.largest)
        return self.overflows, not finite, self.largest if finite else math.inf


@dataclass(frozen=True)
class OverflowReport:
    """What a probe saw.

    Attributes:
        phase: `"rollout"` or `"loss"`.
        step: Optimizer steps before it.
        result_finite: Whether what the forward pass was for, the loss or the logits that are sampled from, is finite.
        activations: What left each module, in the order in which they finished; the largest of several calls.
    """

    phase: str
    step: int
    result_finite: bool
    activations: tuple[Activation, ...]

    @property
    def first(self) -> Activation | None:
        """The first module whose output is not finite while what entered it was."""
        return next((activation for activation in self.activations if activation.overflows), None)

    @property
    def near(self) -> tuple[Activation, ...]:
        """The modules that gave float16 beyond half of its largest number, in the order in which they finished."""
        return tuple(a for a in self.activations if FLOAT16 in a.dtype.split(" and ") and NEAR < a.largest <= LIMIT)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        return {
            "phase": self.phase,
            "step": self.step,
            "result_finite": self.result_finite,
            "activations": [{**vars(a), "largest": str(a.largest)} for a in self.activations],
        }

    def __str__(self) -> str:
        finite = sorted((a for a in self.activations if math.isfinite(a.largest)), key=lambda a: -a.largest)
        shown = ([] if self.first is None else [self.first]) + finite[:10]
        width = max((len(a.module) for a in shown), default=0)
        lines = [f"{a.module or 'the model':<{width}}  {a.largest:>10.4g}  {a.dtype}" for a in shown]
        return "\n".join(
            [f"largest activations of the {self.phase} after step {self.step}; float16 ends at 65504", *lines]
        )


@dataclass
class Call:
    """A call of the outermost module, to be made again.

    Attributes:
        module: The module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        autocast: Autocast dtype of the device that it ran under, `None` without.
        device: The kind of device.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    device: str

    def again(self) -> Any:
        """Calls it in the same context; gives what it gives."""
        # TRL's fused head multiplies with the weights of the head past its module.
        kwargs = {name: value for name, value in self.kwargs.items() if name != "fused_lm_head"}
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            return self.module(*self.args, **kwargs)


@dataclass
class _Seen:
    """One call of one module: the extremes of its inputs and its outputs, still on the device."""

    module: str
    dtypes: set[torch.dtype]
    entered: list[torch.Tensor]
    left: list[torch.Tensor]


@dataclass
class Watch:
    """Reads the activations of a model while it is attached.

    Args:
        model: The model, wrapped or not.
        whole: Whether all modules are watched, or the model alone.

    Attributes:
        calls: What the outermost modules were called with, in order.
    """

    model: nn.Module
    whole: bool = True
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in modules_of(self.model).items()}
        self._seen: list[_Seen] = []
        self._entered: list[list[torch.Tensor]] = []  # of the modules that run now, outermost first
        self._handles: list[Any] = []
        self._done: Callable[[Any], None] | None = None

    @contextlib.contextmanager
    def attached(self, done: Callable[[Any], None] | None = None) -> Iterator["Watch"]:
        """Watches while the block runs, or until the model has been called once.

        Args:
            done: What is called then, with the output of the model, after the hooks are gone. Parts of it that are
                called before, as `generate` does with towers, are seen as well.

        Yields:
            The watch.
        """
        self._done = done
        for module in self.model.modules():
            if not self.whole and self._names.get(id(module)):
                continue
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        try:
            yield self
        finally:
            self._detach()

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._entered.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._entered:
            device = next((p.device.type for p in module.parameters()), "cpu")
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            self.calls.append(Call(module, args, kwargs, autocast, device))
        self._entered.append([extremes(tensor) for tensor in floating((args, kwargs))])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._entered:
            return  # it was running already when the hooks came
        entered, tensors = self._entered.pop(), list(floating(output))
        name = self._names.get(id(module), "")
        self._seen.append(_Seen(name, {t.dtype for t in tensors}, entered, [extremes(t) for t in tensors]))
        if not self._entered and not name and self._done is not None:
            self._detach()
            self._done(output)

    def finish(self, phase: str, step: int, result: torch.Tensor) -> OverflowReport:
        """Reads from the device, once, what was seen.

        Args:
            phase: `"rollout"` or `"loss"`.
            step: Optimizer steps so far.
            result: What has to be finite.
        """
        every = [extremes(result), *(pair for seen in self._seen for pair in (*seen.entered, *seen.left))]
        pairs = iter(torch.stack([pair.to(every[0].device) for pair in every]).tolist())  # (N, 2)
        finite = not _bad(*next(pairs))
        found: dict[str, Activation] = {}
        for seen in self._seen:
            entered = not any([_bad(*next(pairs)) for _ in seen.entered])
            left = [next(pairs) for _ in seen.left]
            largest = _largest(left)
            if largest is not None:
                dtype = " and ".join(sorted(from_torch(dtype) for dtype in seen.dtypes))
                now, before = Activation(seen.module, dtype, largest, entered), found.get(seen.module)
                if before is None or now.weight > before.weight:
                    found.pop(seen.module, None)  # the order is that of the calls that are kept
                    found[seen.module] = now
        self._seen.clear()
        return OverflowReport(phase, step, finite, tuple(found.values()))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the base model by qualified name, without what sharding and checkpointing put into the names.

    Args:
        model: The model, wrapped or not.
    """
    wrappers = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return {
        ".".join(piece for piece in name.split(".") if piece not in wrappers): module
        for name, module in unwrap(model).named_modules()
    }


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest element, (2,) float32; both NaN where there is a NaN.

    Args:
        tensor: A floating tensor with elements.
    """
    low, high = torch.aminmax(tensor.detach())
    return torch.stack([low.float(), high.float()])  # autocast puts nothing together in the half format that it is not


def floating(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The floating tensors in nested containers; caches and other objects are not looked into.

    Args:
        value: Anything that enters or leaves a module.
        depth: How many containers deep to look.
    """
    if isinstance(value, torch.Tensor):
        if value.dtype in _WIDE and value.numel() > 0 and not value.is_meta:
            yield value
    elif depth > 0 and isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from floating(part, depth - 1)


def _bad(low: float, high: float) -> bool:
    """Whether a tensor is not finite; masks, whose elements are 0 or minus infinity, are as they should be."""
    return math.isnan(low) or high == math.inf or (low == -math.inf and high > 0)


def _largest(pairs: list[list[float]]) -> float | None:
    """The largest absolute value of a module's outputs, `None` where it gives nothing but masks."""
    if any(math.isnan(low) for low, _ in pairs):
        return math.nan
    return max((max(-low, high) for low, high in pairs if high > 0 or low > -LIMIT), default=None)

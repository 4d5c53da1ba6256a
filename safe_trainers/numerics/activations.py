"""Measures the largest activations of each module with forward hooks, during an ordinary forward pass.

The hooks change no tensor and no random state, and are removed afterwards. The measured values stay on the device
until `Watch.finish` reads them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.dtypes import FLOAT16, from_torch, join_dtypes
from ..model.parts import unwrap


LIMIT = 65504.0
"""The largest float16 number."""
NEAR = LIMIT / 2
"""Activations above this value overflow float16 if they double."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # 8-bit types have no aminmax


@dataclass(frozen=True)
class Activation:
    """The outputs of a module in one call.

    Attributes:
        module: The module's qualified name in the base model; empty for the model itself and for PEFT's wrappers.
        dtypes: Dtypes of its floating-point outputs.
        largest: Largest absolute value of the outputs; infinite or NaN if an output is not finite.
        entered_finite: Whether all inputs were finite.
    """

    module: str
    dtypes: frozenset[str]
    largest: float
    entered_finite: bool

    @property
    def overflows(self) -> bool:
        """Whether the outputs are not finite although the inputs are."""
        return self.entered_finite and not math.isfinite(self.largest)

    @property
    def severity(self) -> tuple[bool, bool, float]:
        """A sort key: of several calls of a module, the one with the highest key is reported."""
        finite = math.isfinite(self.largest)
        return self.overflows, not finite, self.largest if finite else math.inf


@dataclass(frozen=True)
class OverflowReport:
    """The activations that an overflow probe measured in one forward pass.

    Attributes:
        phase: `"rollout"` or `"loss"`.
        step: Number of optimizer steps before the forward pass.
        result_finite: Whether the loss, or the logits that tokens are sampled from, are finite.
        activations: The outputs of each module in the order in which the modules finished. For a module that was
            called several times, the call with an overflow or the largest value.
    """

    phase: str
    step: int
    result_finite: bool
    activations: tuple[Activation, ...]

    @property
    def first(self) -> Activation | None:
        """The first module whose outputs are not finite although its inputs are; `None` if there is none."""
        return next((activation for activation in self.activations if activation.overflows), None)

    @property
    def near(self) -> tuple[Activation, ...]:
        """The modules with float16 outputs above half of the largest float16 number, in order."""
        return tuple(a for a in self.activations if FLOAT16 in a.dtypes and NEAR < a.largest <= LIMIT)

    def to_dict(self) -> dict[str, Any]:
        """The report as values that can be written to JSON."""
        return {
            "phase": self.phase,
            "step": self.step,
            "result_finite": self.result_finite,
            "activations": [
                {**vars(a), "dtypes": sorted(a.dtypes), "largest": str(a.largest)} for a in self.activations
            ],
        }

    def __str__(self) -> str:
        finite = sorted((a for a in self.activations if math.isfinite(a.largest)), key=lambda a: -a.largest)
        shown = ([] if self.first is None else [self.first]) + finite[:10]
        width = max((len(a.module) for a in shown), default=0)
        lines = [f"{a.module or 'the model':<{width}}  {a.largest:>10.4g}  {join_dtypes(a.dtypes)}" for a in shown]
        return "\n".join(
            [f"largest activations of the {self.phase} after step {self.step}; float16 overflows at 65504", *lines]
        )


@dataclass
class Call:
    """A recorded call of the outermost module.

    Attributes:
        module: The module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        autocast: Autocast dtype during the call; `None` without autocast.
        device: The type of the device, such as `"cuda"`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    device: str

    def repeat(self) -> Any:
        """Calls the module again, under the same autocast, and returns its output."""
        # TRL's fused head multiplies with the head's weight without calling the head, so it would not be watched.
        kwargs = {name: value for name, value in self.kwargs.items() if name != "fused_lm_head"}
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            return self.module(*self.args, **kwargs)


@dataclass
class _Measured:
    """One call of one module, with the extremes of its inputs and outputs still on the device."""

    module: str
    dtypes: set[torch.dtype]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class Watch:
    """Measures the activations of a model while it is attached.

    Args:
        model: The model, wrapped or not.
        whole: Whether to watch all modules, or only the model itself.

    Attributes:
        calls: The calls of the outermost modules, in order.
    """

    model: nn.Module
    whole: bool = True
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in modules_of(self.model).items()}
        self._measured: list[_Measured] = []
        self._running: list[list[torch.Tensor]] = []  # input extremes of the modules now running, outermost first
        self._handles: list[Any] = []
        self._done: Callable[[Any], None] | None = None

    @contextlib.contextmanager
    def attached(self, done: Callable[[Any], None] | None = None) -> Iterator["Watch"]:
        """Watches the model while the block runs, or until the end of its first call if `done` is passed.

        Args:
            done: Called with the model's output after its first call, when the hooks have been removed. Submodules
                called before the model itself, as `generate` calls towers, are measured too.

        Yields:
            This watch.
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
        self._running.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._running:
            device = next((p.device.type for p in module.parameters()), "cpu")
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            self.calls.append(Call(module, args, kwargs, autocast, device))
        self._running.append([extremes(tensor) for tensor in floating((args, kwargs))])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._running:
            return  # the call began before the hooks were registered
        inputs, tensors = self._running.pop(), list(floating(output))
        name = self._names.get(id(module), "")
        self._measured.append(_Measured(name, {t.dtype for t in tensors}, inputs, [extremes(t) for t in tensors]))
        if not self._running and not name and self._done is not None:
            self._detach()
            self._done(output)

    def finish(self, phase: str, step: int, result: torch.Tensor) -> OverflowReport:
        """Reads all measured values from the device at once.

        Args:
            phase: `"rollout"` or `"loss"`.
            step: Number of optimizer steps so far.
            result: The loss, or the logits that tokens are sampled from.

        Returns:
            The report.
        """
        every = [extremes(result), *(pair for call in self._measured for pair in (*call.inputs, *call.outputs))]
        pairs = iter(torch.stack([pair.to(every[0].device) for pair in every]).tolist())  # (N, 2)
        finite = not _is_nonfinite(*next(pairs))
        found: dict[str, Activation] = {}
        for call in self._measured:
            entered_finite = not any([_is_nonfinite(*next(pairs)) for _ in call.inputs])
            largest = _largest([next(pairs) for _ in call.outputs])
            if largest is not None:
                dtypes = frozenset(map(from_torch, call.dtypes))
                now, earlier = Activation(call.module, dtypes, largest, entered_finite), found.get(call.module)
                if earlier is None or now.severity > earlier.severity:
                    found.pop(call.module, None)  # so that the dict has the order of the reported calls
                    found[call.module] = now
        self._measured.clear()
        return OverflowReport(phase, step, finite, tuple(found.values()))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the base model by qualified name, without the names of FSDP and checkpointing wrappers."""
    wrappers = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return {
        ".".join(piece for piece in name.split(".") if piece not in wrappers): module
        for name, module in unwrap(model).named_modules()
    }


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest element of a non-empty tensor, (2,) float32; both are NaN if any element is."""
    low, high = torch.aminmax(tensor.detach())
    return torch.stack([low.float(), high.float()])  # under autocast, `stack` rejects the other half-precision dtype


def floating(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yields the floating-point tensors in containers nested up to `depth`; skips other objects such as caches."""
    if isinstance(value, torch.Tensor):
        if value.dtype in _FLOATS and value.numel() > 0 and not value.is_meta:
            yield value
    elif depth > 0 and isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from floating(part, depth - 1)


def _is_nonfinite(low: float, high: float) -> bool:
    """Whether a tensor with these extremes is not finite; masks of 0 and minus infinity count as finite."""
    return math.isnan(low) or high == math.inf or (low == -math.inf and high > 0)


def _largest(pairs: list[list[float]]) -> float | None:
    """The largest absolute value of a module's outputs; `None` if all outputs are masks."""
    if any(math.isnan(low) for low, _ in pairs):
        return math.nan
    return max((max(-low, high) for low, high in pairs if high > 0 or low > -LIMIT), default=None)

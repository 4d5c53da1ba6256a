"""Casts of single parameters: their description, and the function that applies them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from ..core.dtypes import from_torch, to_torch
from ..core.patches import patched
from ..model.parts import unwrap


@dataclass(frozen=True)
class ParameterCast:
    """The dtype of one parameter, before and after a cast.

    Attributes:
        name: Qualified name in the model.
        source: Dtype before the cast.
        target: Dtype after the cast; equal to `source` if the parameter is not cast.
        reason: Why it has the target dtype.
        elements: Number of elements.
    """

    name: str
    source: str
    target: str
    reason: str
    elements: int


def apply_casts(model: nn.Module, casts: Iterable[ParameterCast]) -> None:
    """Casts parameters in place, one at a time, so that at most one tensor is in memory twice.

    A second call casts only parameters whose dtype has changed since; PEFT, for example, upcasts adapters on loading.
    The names may be those of the model before `torch.compile`; parameters that it no longer has are left out.

    Args:
        model: The model.
        casts: The casts.
    """
    plain = extract_model_from_parallel(model, keep_torch_compile=False)
    parameters = {**dict(plain.named_parameters()), **dict(model.named_parameters())}
    for cast in casts:
        parameter = parameters.get(cast.name)
        if parameter is not None and from_torch(parameter.dtype) != cast.target:
            parameter.data = parameter.data.to(to_torch(cast.target))


@contextlib.contextmanager
def weights_restored(model: nn.Module, exempt: Iterable[str] = ()) -> Iterator[None]:
    """Restores the values of a model that is cast in place while the block runs, on the device that it is on then.

    While the block runs, modules hold other parameters with the same values: a parameter whose own dtype changes loses
    its gradient accumulator and the hooks on it, with which DDP averages gradients. Parameters of other types, such as
    packed or sharded ones, stay, and their values are restored. The original values and their casts are both in
    memory.

    Args:
        model: The model, wrapped or not. After the block it has the same parameters and gradients as before.
        exempt: Names, in the base model, of modules that are not cast, because their inputs are cast to float32.
    """
    places = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
    ]
    held = {id(p): _stand_in(p) for _, _, p in places}
    kept = [t for p in model.parameters() if held[id(p)] is None for t in (p, p.grad) if t is not None]
    originals = [(tensor, tensor.data) for tensor in kept]
    # `nn.Module.to` writes to `parameter.data`, but replaces buffers by new tensors.
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    with contextlib.ExitStack() as stack:
        for module in (unwrap(model).get_submodule(name) for name in exempt):
            # `nn.Module.to` calls `_apply` on each submodule.
            stack.enter_context(patched("cast-of-all", module, _apply=partial(_skip_apply, module)))
        stack.callback(_restore, places, held, originals, buffers)
        for module, name, parameter in places:
            if (stand_in := held[id(parameter)]) is not None:
                setattr(module, name, stand_in)
        yield


def _restore(
    places: list[tuple[nn.Module, str, nn.Parameter]],
    held: dict[int, nn.Parameter | None],
    originals: list[tuple[torch.Tensor, torch.Tensor]],
    buffers: list[tuple[nn.Module, dict[str, torch.Tensor | None]]],
) -> None:
    """Puts parameters, their values and buffers back."""
    for module, name, parameter in places:
        if (stand_in := held[id(parameter)]) is not None:
            setattr(module, name, parameter)
            _follow(parameter, stand_in.device)
    for tensor, data in originals:
        tensor.data = data.to(tensor.device)
    for module, own in buffers:
        for name, buffer in own.items():
            cast = module._buffers.get(name)
            module._buffers[name] = buffer if buffer is None or cast is None else buffer.to(cast.device)


def _skip_apply(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


def _stand_in(parameter: nn.Parameter) -> nn.Parameter | None:
    """Returns another parameter with the same values; `None` for packed parameters and those that an engine shards."""
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor or hasattr(parameter, "ds_id"):
        return None
    made = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _follow(parameter: nn.Parameter, device: torch.device) -> None:
    """Moves a parameter and its gradient to the device to which its stand-in was moved."""
    for tensor in (parameter, parameter.grad):
        if tensor is not None and tensor.device != device:
            tensor.data = tensor.data.to(device)


def extra_bytes(casts: Iterable[ParameterCast]) -> int:
    """Returns the additional memory that casts need, in bytes; negative if they save memory."""
    return sum(cast.elements * (_width(cast.target) - _width(cast.source)) for cast in casts)


def mebibytes(count: int) -> str:
    """Formats a number of bytes as MiB."""
    return f"{count / 2**20:.1f} MiB"


def grouped(casts: Iterable[ParameterCast]) -> dict[tuple[str, str, str], list[ParameterCast]]:
    """Groups casts by source, target and reason, in the order of their first occurrence."""
    groups: dict[tuple[str, str, str], list[ParameterCast]] = {}
    for cast in casts:
        groups.setdefault((cast.source, cast.target, cast.reason), []).append(cast)
    return groups


def table(casts: Iterable[ParameterCast]) -> str:
    """Formats casts with one line per group of `grouped`."""
    lines = []
    for (source, target, reason), members in grouped(casts).items():
        what = f"{source} kept" if source == target else f"{source} -> {target}"
        count = f"{len(members)} tensors" if len(members) > 1 else "1 tensor"
        memory = extra_bytes(members)
        cost = f", {mebibytes(memory)} more" if memory > 0 else ""
        lines.append(f"{what}: {count} ({members[0].name}{', ...' if len(members) > 1 else ''}){cost}: {reason}")
    return "\n".join(lines)


def largest_magnitude(tensor: torch.Tensor) -> float:
    """Returns the largest magnitude in a tensor without copying it; 0 if it has no data or no floating-point dtype."""
    if tensor.is_meta or tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    low, high = torch.aminmax(tensor.detach())
    return max(-low.item(), high.item())


def _width(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size

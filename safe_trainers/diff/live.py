"""Compares two live models on the same inputs, and confirms the cause by swapping one thing at a time."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.parts import tensors_in
from ..model.trial_forward import gradients_restored, restored
from . import cause as causes
from .compare import Comparison, compare_recordings
from .names import canonical, without_adapters
from .record import record


@dataclass
class _Call:
    """The first call of a module."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    output: Any = None
    state: torch.Tensor | None = None


def diff_models(first: nn.Module, second: nn.Module, inputs: Mapping[str, Any]) -> Comparison:
    """Finds the first module at which two models part on the same inputs, and swaps one thing at a time.

    The module that parts is run again in the second model: with the inputs that the first model passes to it, with
    the first model's weights, in its dtype, with its settings and mode, and from its random state. The cause is what
    makes the output equal. Afterwards both models, with their buffers and gradients, and random states are as before.

    Args:
        first: One model, wrapped or not.
        second: The other.
        inputs: Keyword arguments of both models. If the outputs have a `loss`, the backward pass is compared too,
            except if an optimizer runs in it.

    Returns:
        The comparison; `cause.text` ends with what the swap showed.

    Raises:
        RecordingError: If the models are not of the same architecture.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, model in (("first", first), ("second", second)):
            paths.append(str(Path(folder, name)))
            leaves = [tensor for _, tensor in tensors_in(inputs, "") if tensor.is_leaf and tensor.requires_grad]
            with restored(model), gradients_restored([*model.parameters(), *leaves]), record(model, paths[-1]):
                _run(model, inputs)
        found = compare_recordings(*paths)
    found = replace(found, first="the first model", second="the second model")
    if found.cause is None or found.cause.kind not in _SWAPS or found.differences[0].phase != "forward":
        return found
    return replace(found, cause=_confirmed(found.cause, first, second, inputs))


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    steps = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())
    if isinstance(loss, torch.Tensor) and loss.requires_grad and not steps:
        loss.backward()  # `torch.autograd.grad` does not work with reentrant checkpointing


_SWAPS = (causes.WEIGHTS, causes.DTYPE, causes.SETTING, causes.RANDOM_STATE, causes.KERNEL)


def _confirmed(cause: causes.Cause, first: nn.Module, second: nn.Module, inputs: Mapping[str, Any]) -> causes.Cause:
    """Runs the module of the second model with the first model's inputs, and then with one more thing of the first."""
    mine, theirs = _find(first, cause.module), _find(second, cause.module)
    if mine is None or theirs is None or not cause.module:
        return cause
    call = _first_call(first, mine, inputs)
    if call.kwargs is None:
        return cause
    if _equal(_again(theirs, call), call.output):
        return causes.Cause(cause.module, causes.INPUTS, f"{cause.text}; with the first model's inputs it is equal")
    weights, modes, attributes = _own(mine), mine.training, _attributes(mine)
    dtypes = {name: tensor.to(weights[name].dtype) for name, tensor in _own(theirs).items() if name in weights}
    trials = (
        (causes.SETTING, "settings", _Swap(theirs, {}, attributes, modes)),
        (causes.DTYPE, "dtypes", _Swap(theirs, dtypes, {}, None)),
        (causes.WEIGHTS, "weights", _Swap(theirs, weights, {}, None)),
    )
    for kind, what, swap in trials:
        with swap.done():
            equal = _equal(_again(theirs, call), call.output)
        if equal:
            kept = cause.kind if (cause.kind, kind) == (causes.DTYPE, causes.WEIGHTS) else kind
            return causes.Cause(cause.module, kept, f"{cause.text}; with the first model's {what} it is equal")
    return causes.Cause(cause.module, cause.kind, f"{cause.text}; no single swap makes it equal")


@dataclass
class _Swap:
    """Things of the first model that the module of the second gets while a block runs."""

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    training: bool | None

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        data = {name: named[name].data for name in self.tensors if name in named}
        before = {name: vars(self.module)[name] for name in self.attributes if name in vars(self.module)}
        mode = self.module.training
        try:
            for name in data:
                named[name].data = self.tensors[name]
            vars(self.module).update({name: self.attributes[name] for name in before})
            if self.training is not None:
                self.module.train(self.training)
            yield
        finally:
            for name, tensor in data.items():
                named[name].data = tensor
            vars(self.module).update(before)
            self.module.train(mode)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**{n: p.data for n, p in module.named_parameters()}, **{n: b.data for n, b in module.named_buffers()}}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are scalars, mappings of scalars, functions or configs."""
    return {
        name: value
        for name, value in vars(module).items()
        if name != "training" and (not name.startswith("_") or name == "_disable_adapters")
        and not isinstance(value, (nn.Module, torch.Tensor))
    }  # fmt: skip


def _find(model: nn.Module, name: str) -> nn.Module | None:
    modules = {canonical(full): module for full, module in model.named_modules()}
    bare = {without_adapters(full): module for full, module in modules.items()}
    return modules.get(name, bare.get(without_adapters(name)))


def _first_call(model: nn.Module, module: nn.Module, inputs: Mapping[str, Any]) -> _Call:
    """Runs a model, and returns the first call of one of its modules."""
    call = _Call()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.kwargs is None:
            call.args, call.kwargs, call.state = args, kwargs, torch.get_rng_state()

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        call.output = output if call.output is None else call.output

    handles = [module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)]
    handles.append(module.register_forward_hook(leave))
    try:
        with restored(model), torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return call


def _again(module: nn.Module, call: _Call) -> Any:
    with restored(module), torch.no_grad():
        if call.state is not None:
            torch.set_rng_state(call.state)
        try:
            return module(*call.args, **(call.kwargs or {}))
        except RuntimeError:  # such as between two dtypes
            return None


def _equal(first: Any, second: Any) -> bool:
    mine, theirs = (list(tensors_in(value, "output")) for value in (first, second))
    if not mine or len(mine) != len(theirs):
        return False
    return all(
        one.dtype == two.dtype and torch.equal(one, two) for (_, one), (_, two) in zip(mine, theirs, strict=True)
    )

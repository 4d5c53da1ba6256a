"""Modules that compute in float32 under a half policy, trained or frozen, with both their boundaries cast.

The largest float16 number is 65,504, and some towers and layers compute beyond it: Gemma 3's vision tower, for one.
They stay in float32 while the rest of the model computes in half precision.
"""

import functools
from collections.abc import Callable, Container, Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn

from . import quantization
from .boundaries import cast_floating
from .decisions import Decision
from .dtypes import FLOAT32, HALVES, from_torch
from .errors import PrecisionError, hint, nearest, refuse
from .towers import anatomy, elements_of, is_quantized, unwrap


_MARK = "_safe_trainers_fp32"


def find_modules(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Finds the modules that patterns name.

    Args:
        model: A transformers model, wrapped by PEFT or not.
        patterns: Each a qualified name (`"model.vision_tower"`), the end of one (`"vision_tower"`), or either with the
            wildcards of `fnmatch` (`"layers.[0-3].mlp"`).

    Returns:
        The outermost modules of each match by their name in the base model. What has no computation of its own
        (`nn.ModuleList`) stands for the modules in it.

    Raises:
        PrecisionError: If a pattern matches nothing, or a module whose weights cannot compute in float32.
    """
    patterns = tuple(patterns)
    if not patterns:
        return {}
    base = unwrap(model)
    modules = dict(base.named_modules())
    found: dict[str, nn.Module] = {}
    problems = []
    for pattern in patterns:
        matches = [name for name in modules if name and _matches(name, pattern)]
        if not matches:
            near = nearest(pattern.split(".")[-1], {name.split(".")[-1] for name in modules if name})
            problems.append(
                refuse(
                    "no-such-module",
                    f"fp32_modules={list(patterns)!r}: {pattern!r}",
                    model=type(base).__name__,
                    hint=hint(near),
                    fix=f"fp32_modules=[{near!r}]" if near else "take a name from `model.named_modules()`",
                )
            )
        for name in matches:
            found.update(_computing(name, modules[name]))
    outermost = {name: module for name, module in found.items() if not _inside_another(name, found)}
    shared = {id(parameter) for module in outermost.values() for parameter in module.parameters()}
    for name, module in modules.items():  # what holds the same weight (a tied head) computes in float32 too
        own = any(id(parameter) in shared for parameter in module.parameters(recurse=False))
        if own and name not in outermost and not _inside_another(name, outermost):
            outermost[name] = module
    for name, module in outermost.items():
        int8 = next((n for n, p in module.named_parameters() if type(p).__name__ == "Int8Params"), None)
        if int8 is not None:
            given = f"fp32_modules={list(patterns)!r}: {name}.{int8} is quantised to 8 bits"
            problems.append(refuse("int8-cannot-compute-in-float32", given, name=name.split(".")[-1]))
    if problems:
        raise PrecisionError(problems)
    return outermost


def decide(model: nn.Module, modules: Iterable[str]) -> tuple[Decision, ...]:
    """What modules hold so that they compute in float32: all weights in it, adapters included.

    Args:
        model: The model that the modules were found in.
        modules: Names, as `find_modules` returns them.

    Returns:
        One decision for each parameter that is not packed; the names are those in `model`.
    """
    if not (modules := tuple(modules)):
        return ()
    base = unwrap(model)
    chosen = {id(parameter) for name in modules for parameter in base.get_submodule(name).parameters()}
    return tuple(
        Decision(name, from_torch(p.dtype), FLOAT32, "fp32_modules", elements_of(p))
        for name, p in model.named_parameters()
        if id(p) in chosen and not is_quantized(p)
    )


def guard(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Makes modules compute in float32, whatever comes in, with autocast off inside.

    What comes out: under autocast it stays float32: the next operation casts by itself, and a residual stream that
    overflows float16 has to be able to go on; without autocast it has the dtype of the model around it again. A head
    whose output leaves the model is never rounded.

    Args:
        model: The model that the modules were found in, before their weights are cast.
        modules: The modules by name.
    """
    if not modules:
        return
    heads = {id(module) for module in _heads(unwrap(model))}
    for module in modules.values():
        name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hooks call the former
        method = getattr(module, name)
        if not hasattr(method, _MARK) and not hasattr(getattr(method, "__func__", method), _MARK):
            outer = None if id(module) in heads else _half_dtype(module, model)
            setattr(module, name, _in_float32(method, outer, module))
        for layer in module.modules():
            quantization.compute_in(layer, torch.float32)


def without_autocast(module: nn.Module) -> None:
    """Makes a module that casts to float32 by itself keep it: autocast would round its products again.

    Args:
        module: TRL's `cast_lm_head_to_fp32` head.
    """
    method = module.forward

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(module.parameters()).device.type, enabled=False):
            return method(*args, **kwargs)

    module.forward = forward


def _in_float32(method: Callable[..., Any], outer: torch.dtype | None, module: nn.Module) -> Callable[..., Any]:
    """A method's replacement; bound to the module where the method was, so that a copy of the model has its own."""
    function = getattr(method, "__func__", None)
    call = function or (lambda self, *args, **kwargs: method(*args, **kwargs))

    @functools.wraps(function or method)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = next((p.device.type for p in self.parameters()), "cpu")
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False):
            output = call(self, *cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))
        return output if autocast or outer is None else cast_floating(output, outer)

    setattr(forward, _MARK, True)
    return MethodType(forward, module)


def _half_dtype(module: nn.Module, model: nn.Module) -> torch.dtype | None:
    """The half dtype that a module had, or else the model around it has; `None` where there is none."""
    for parameter in (*module.parameters(), *model.parameters()):
        if not is_quantized(parameter) and from_torch(parameter.dtype) in HALVES:
            return parameter.dtype
    return None


def _heads(base: nn.Module) -> list[nn.Module]:
    """The modules whose output is the model's own: beside the text model, and no tower."""
    parts = anatomy(base)
    inside = {id(module) for module in (parts.text, *parts.containers, *parts.towers.values())}
    return [child for child in base.children() if id(child) not in inside] if parts.containers else []


def _matches(name: str, pattern: str) -> bool:
    plain = pattern.removeprefix("base_model.model.")  # as a model that PEFT wrapped names its modules
    return fnmatchcase(name, plain) or fnmatchcase(name, f"*.{plain}")


def _computing(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return {name: module}
    return {
        inner: child
        for key, part in module.named_children()
        for inner, child in _computing(f"{name}.{key}", part).items()
    }


def _inside_another(name: str, names: Container[str]) -> bool:
    """Whether one of the modules around a module is named; asked of thousands, each by thousands."""
    return any(name[:end] in names for end, character in enumerate(name) if character == ".")

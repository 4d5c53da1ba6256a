"""Modules that compute in float32 while the rest of the model computes in half precision (`fp32_modules`).

The largest float16 is 65,504, and the activations of some modules, such as Gemma 3's vision tower, exceed it.
"""

import functools
from collections.abc import Callable, Container, Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..boundaries.cast_hooks import cast_floating
from ..core.dtypes import FLOAT32, HALVES, from_torch
from ..core.errors import PrecisionError, hint, nearest, refuse
from ..core.patches import replace, replaced_by
from ..model.parts import elements_of, find_parts, is_quantized, unwrap
from ..model.routers import find_routers
from . import bitsandbytes as quantization
from .cast import ParameterCast


_PATCH = "float32-module"
ROUTERS = "@routers"
"""The pattern that stands for the routers of a mixture of experts, whatever their names are."""


def find_modules(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Finds the modules whose names match patterns.

    Args:
        model: A transformers model, possibly wrapped by PEFT.
        patterns: Qualified names (`"model.vision_tower"`) or the ends of such names (`"vision_tower"`), optionally
            with the wildcards of `fnmatch` (`"layers.[0-3].mlp"`), or `ROUTERS`.

    Returns:
        The outermost matching modules by their names in the base model, and modules that share weights with them (a
        tied head). Containers without a forward pass (`nn.ModuleList`) are replaced by their modules.

    Raises:
        PrecisionError: If a pattern matches no module, or a module whose weights cannot compute in float32.
    """
    patterns = tuple(patterns)
    if not patterns:
        return {}
    base = unwrap(model)
    modules = dict(base.named_modules())
    found: dict[str, nn.Module] = {}
    problems = []
    for pattern in patterns:
        if pattern == ROUTERS:
            matches, reason = _routers(base)
            if not matches:
                problems.append(refuse("no-routers", f"fp32_modules={list(patterns)!r}", reason=reason))
        else:
            matches = [name for name in modules if name and _matches(name, pattern)]
        if not matches and pattern != ROUTERS:
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
    for name, module in modules.items():  # modules with a shared weight, such as a tied head
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


def decide(model: nn.Module, modules: Iterable[str]) -> tuple[ParameterCast, ...]:
    """Returns the casts of all weights of modules to float32, including adapters.

    Args:
        model: The model.
        modules: Names of modules from `find_modules`.

    Returns:
        One cast for each parameter that is not packed, with its name in `model`.
    """
    if not (modules := tuple(modules)):
        return ()
    base = unwrap(model)
    chosen = {id(parameter) for name in modules for parameter in base.get_submodule(name).parameters()}
    return tuple(
        ParameterCast(name, from_torch(p.dtype), FLOAT32, "fp32_modules", elements_of(p))
        for name, p in model.named_parameters()
        if id(p) in chosen and not is_quantized(p)
    )


def guard(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Makes modules cast their inputs to float32 and run without autocast.

    Under autocast the output stays float32, because the next operation casts it, and because a residual stream may
    exceed float16. Without autocast the output is cast back to the dtype of the surrounding model, except the output
    of a head, which leaves the model.

    Args:
        model: The model, before the weights of the modules are cast.
        modules: The modules by name.
    """
    if not modules:
        return
    heads = {id(module) for module in _heads(unwrap(model))}
    for module in modules.values():
        name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hooks call `_old_forward`
        if _PATCH not in replaced_by(module, name):
            outer = None if id(module) in heads else _half_dtype(module, model)
            replace(_PATCH, module, name, _in_float32(getattr(module, name), outer, module))
        for layer in module.modules():
            quantization.compute_in(layer, torch.float32)


def covers_head(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether a model's output head is one of the modules with these names, or inside of one.

    Args:
        model: The model, wrapped or not.
        names: Names of modules in the base model.
    """
    base: Any = unwrap(model)
    head = base.get_output_embeddings()
    return any(part is head for name in names for part in base.get_submodule(name).modules())


def without_autocast(module: nn.Module) -> None:
    """Disables autocast in a head that TRL casts to float32; autocast would round its matrix products again.

    Args:
        module: The head that TRL casts with `cast_lm_head_to_fp32`.
    """
    method = module.forward
    call = _unbound(method)

    @functools.wraps(getattr(method, "__func__", method))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            return call(self, *args, **kwargs)

    replace("float32-head", module, "forward", MethodType(forward, module))


def _in_float32(method: Callable[..., Any], outer: torch.dtype | None, module: nn.Module) -> Callable[..., Any]:
    """Returns the replacement of a method, bound to the module, so that a `deepcopy` of the model uses its own."""
    call = _unbound(method)

    @functools.wraps(getattr(method, "__func__", method))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = next((p.device.type for p in self.parameters()), "cpu")
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False):
            output = call(self, *cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))
        return output if autocast or outer is None else cast_floating(output, outer)

    return MethodType(forward, module)


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a method, which takes the module first, so that a `deepcopy` can call its own."""
    return getattr(method, "__func__", None) or (lambda self, *args, **kwargs: method(*args, **kwargs))


def _half_dtype(module: nn.Module, model: nn.Module) -> torch.dtype | None:
    """Returns the half dtype of a module, or else of its model; `None` if there is none."""
    for parameter in (*module.parameters(), *model.parameters()):
        if not is_quantized(parameter) and from_torch(parameter.dtype) in HALVES:
            return parameter.dtype
    return None


def _heads(base: nn.Module) -> list[nn.Module]:
    """Returns the modules whose outputs are outputs of the model: children that are neither text model nor towers."""
    parts = find_parts(base)
    inside = {id(module) for module in (parts.text, *parts.containers, *parts.towers.values())}
    return [child for child in base.children() if id(child) not in inside] if parts.containers else []


def _routers(base: nn.Module) -> tuple[list[str], str]:
    """Returns the names of the modules with the weights of routers, and why there are none."""
    reason = ""
    for autocast in (None, torch.bfloat16):  # a model with weights of two dtypes may need autocast
        routers = find_routers(base, autocast)
        if routers.found:
            return [router.scorer for router in routers.found], ""
        reason = reason or routers.why
    return [], reason or "no module of the model chooses experts with `torch.topk`"


def _matches(name: str, pattern: str) -> bool:
    plain = pattern.removeprefix("base_model.model.")  # the prefix of names in a PEFT model
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
    """Whether `names` contains a module around the named one. Tests prefixes, because both may be thousands."""
    return any(name[:end] in names for end, character in enumerate(name) if character == ".")

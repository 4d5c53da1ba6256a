"""Finds the `fp32_modules` that fix a float16 overflow.

Runs the forward pass that overflowed again with one more module in float32 each time, until its result is finite.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import PrecisionError, Problem, refuse, warn
from ..core.patches import keep
from ..model.inventory import bits
from ..model.parts import find_parts, is_quantized, unwrap
from ..model.trial_forward import DIAGNOSED, undisturbed
from ..weights import fp32_modules
from ..weights.bitsandbytes import compute_in
from ..weights.cast import apply_casts
from .activations import Call, OverflowReport, Watch, extremes, floating, modules_of


logger = logging.getLogger(__name__)

Rerun = Callable[[Watch], torch.Tensor]
"""Runs a forward pass again with the watch attached, and returns a tensor that must be finite."""

Attempt = Callable[[], tuple[str | None, bool] | None]
"""Computes something again, and returns the first module that is still wrong and whether the result is right; `None`
if it could not be computed."""

TRIES = 32
"""Largest number of modules tried in float32."""


def explain(report: OverflowReport, model: nn.Module, patterns: Sequence[str], again: Rerun | None) -> Problem:
    """Describes an overflow, with the line that fixes it.

    Args:
        report: A report with an overflow.
        model: The model, wrapped or not.
        patterns: The current `fp32_modules`.
        again: Runs the reported forward pass again; `None` if that is not possible, as with sharded weights.

    Raises:
        ValueError: If the report has no overflow.
    """
    first = report.first
    if first is None:
        raise ValueError("the report has no overflow")
    given = f"`{first.module or type(unwrap(model)).__name__}` returns {first.largest:g} for finite inputs, in the "
    given += f"{report.phase} after step {report.step}"
    holding = _not_finite(modules_of(model).get(first.module or candidate(model, "", ()) or ""))
    if holding is not None:
        return refuse("weights-not-finite", given, name=holding)
    try:
        chosen, fixed = find_fp32_modules(report, model, again)
    except PrecisionError as error:  # an 8-bit layer, which cannot compute in float32
        return refuse("activations-overflow-fp16", given, fix=error.problems[0].fix)
    broken = weight_not_finite(model) if fixed is False else None
    if broken is not None:  # neither float32 nor bfloat16 would fix it
        module, _, holding = broken.rpartition(".")
        given = f"`{module or type(unwrap(model)).__name__}`, in the {report.phase} after step {report.step}"
        return refuse("weights-not-finite", given, name=holding)
    line = f"`fp32_modules={[*patterns, *shortest(model, chosen)]!r}`"
    bf16 = "`bf16=True` on a device that computes it"
    if fixed is None:
        line += ", and the modules that the next run names,"
    return refuse("activations-overflow-fp16", given, fix=bf16 if fixed is False else f"{line} or {bf16}")


def find_fp32_modules(report: OverflowReport, model: nn.Module, again: Rerun | None) -> tuple[list[str], bool | None]:
    """Finds the modules that must compute in float32 for a forward pass to be finite.

    Weights, methods and random states are restored afterwards.

    Args:
        report: A report with an overflow.
        model: The model, wrapped or not.
        again: Runs the reported forward pass again; `None` if that is not possible.

    Returns:
        Qualified names in the base model, and whether they fix the overflow; `None` if that could not be tried.
    """
    if report.first is None:
        return [], False

    def attempt() -> tuple[str | None, bool] | None:
        watch = Watch(model)
        with undisturbed(model):
            result = again(watch) if again is not None else None
        if result is None:
            return None
        seen = watch.finish(report.phase, report.step, result)
        return None if seen.first is None else seen.first.module, seen.result_finite

    return search(model, report.first.module, attempt if again is not None else None)


def search(model: nn.Module, first: str, attempt: Attempt | None) -> tuple[list[str], bool | None]:
    """Makes one more module compute in float32 each time, until a computation is finite.

    Args:
        model: The model, wrapped or not.
        first: Qualified name in the base model of the first module to hold in float32.
        attempt: Computes with the chosen modules in float32; `None` if that is not possible.

    Returns:
        Qualified names in the base model, and whether they fix the computation; `None` if that could not be tried.
    """
    names: list[str] = []
    module: str | None = first
    while module is not None and len(names) < TRIES:
        name = candidate(model, module, names)
        if name is None:
            return names, False
        names = [*(n for n in names if not _within(n, name)), name]
        if attempt is None:
            return names, None
        try:
            with computing_in_float32(model, names):
                found = attempt()
        except PrecisionError:
            raise
        except Exception as error:  # no memory for a float32 copy, or a model that fails when called again
            logger.info("fp32_modules=%r could not be tried: %s: %s", names, type(error).__name__, error)
            return names, None
        if found is None:
            return names, None
        module, fixed = found
        if fixed:
            return names, True
    return names, False


def candidate(model: nn.Module, name: str, chosen: Sequence[str]) -> str | None:
    """Chooses the next module to compute in float32.

    Args:
        model: The model, wrapped or not.
        name: `Activation.module` of the module that overflows.
        chosen: Names of the modules that already compute in float32.

    Returns:
        For a module of a tower, the tower. Otherwise the smallest enclosing module, or the module itself, that has
        weights and is not chosen yet; if the model's own code overflows, its head. `None` if only the text model or a
        larger module is left.
    """
    modules, parts = modules_of(model), find_parts(model)
    names = {id(module): name for name, module in modules.items()}
    if not name:
        base: Any = unwrap(model)
        head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        name = names.get(id(head), "")
        return name if name and not any(_within(name, other) for other in chosen) else None
    for tower in parts.towers.values():
        around = names[id(tower)]
        if _within(name, around) and around not in chosen:
            return around
    whole = {id(module) for module in (parts.text, *parts.containers)}
    pieces = name.split(".")
    for count in range(1, len(pieces)):  # PEFT's submodules do not belong to the base model
        outer = modules[".".join(pieces[:count])]
        if getattr(outer, "adapter_layer_names", None) or hasattr(outer, "modules_to_save"):
            name = ".".join(pieces[:count])
            break
    while name:
        module = modules[name]
        computes = type(module) not in (nn.ModuleList, nn.ModuleDict) and next(module.parameters(), None) is not None
        if id(module) in whole:
            return None
        if computes and not any(_within(name, other) for other in chosen):
            return name
        name = name.rpartition(".")[0]
    return None


def shortest(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Shortens each qualified name in the base model to the shortest suffix that matches no other module."""
    known = list(modules_of(model))
    found = []
    for name in names:
        pieces = name.split(".")
        ends = (".".join(pieces[-count:]) for count in range(1, len(pieces) + 1) if not pieces[-count].isdigit())
        found.append(next((e for e in ends if sum(n == e or n.endswith(f".{e}") for n in known) == 1), name))
    return found


@contextlib.contextmanager
def computing_in_float32(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Makes modules compute in float32 while the block runs; afterwards the same objects and values are restored.

    Args:
        model: The model, wrapped or not.
        names: Qualified names in the base model.

    Raises:
        PrecisionError: If a module cannot compute in float32.
    """
    modules = fp32_modules.find_modules(model, names)
    packed: list[Any] = [layer for module in modules.values() for layer in module.modules() if bits(layer) == 4]
    before = [(layer, layer.compute_dtype) for layer in packed]
    held = [(parameter, parameter.data) for module in modules.values() for parameter in module.parameters()]
    methods = [keep(module, "forward", "_old_forward") for module in modules.values()]
    try:
        DIAGNOSED.add(unwrap(model))
        decisions = fp32_modules.decide(model, modules)
        fp32_modules.guard(model, modules)
        apply_casts(model, decisions)
        yield
    finally:
        DIAGNOSED.discard(unwrap(model))
        for parameter, data in held:
            parameter.data = data
        for layer, dtype in before:
            compute_in(layer, dtype)
        for put_back in methods:
            put_back()


def called_again(calls: Sequence[Call]) -> Rerun:
    """Returns a function that repeats recorded calls of a model, for `find_fp32_modules`."""

    def again(watch: Watch) -> torch.Tensor:
        with watch.attached():
            outputs = [call.repeat() for call in calls]
        return torch.cat([result_of(output) for output in outputs])

    return again


def sampled_from(output: Any) -> torch.Tensor:
    """The logits that the next tokens are sampled from, (B, V); without logits, the extremes of the output."""
    logits = getattr(output, "logits", None)
    return logits[:, -1] if isinstance(logits, torch.Tensor) else result_of(output)


def result_of(output: Any) -> torch.Tensor:
    """The extremes of all N floating-point tensors of a module's output, (2N,)."""
    found = [extremes(tensor) for tensor in floating(output)]
    return torch.cat(found) if found else torch.zeros(1)


def warn_near_overflow(report: OverflowReport, model: nn.Module, patterns: Sequence[str]) -> Problem | None:
    """The warning for a finite forward pass with an overflow inside or values near the limit; otherwise `None`."""
    worst = report.first or (report.near[0] if report.near else None)
    if worst is None:
        return None
    name = candidate(model, worst.module, ())  # later ones may be consequences
    fix = f"`fp32_modules={[*patterns, *shortest(model, [name])]!r}`" if name is not None else "`bf16=True`"
    given = f"`{worst.module or type(unwrap(model)).__name__}` returns {worst.largest:g}, in the {report.phase} "
    given += f"after step {report.step}"
    if report.first is not None:
        return warn("overflow-without-effect", given, fix=fix)
    return warn("activations-near-overflow", given, fix=fix)


def _not_finite(module: nn.Module | None) -> str | None:
    """The name of a module's first own weight with a value that is not finite; `None` if there is none."""
    own = () if module is None else module.named_parameters(recurse=False)
    held = ((name, weight) for name, p in own if not is_quantized(p) for weight in floating(p))
    return next((name for name, weight in held if not torch.isfinite(weight).all()), None)


def weight_not_finite(model: nn.Module) -> str | None:
    """The qualified name of a model's first weight with a value that is not finite; `None` if there is none."""
    found = ((name, _not_finite(module)) for name, module in modules_of(model).items())
    return next((f"{name}.{holding}" for name, holding in found if holding is not None), None)


def _within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")

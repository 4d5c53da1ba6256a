"""The line that mends a model that overflows float16: found by trying it.

Modules are brought to float32 for a moment, one after the other, and the same forward pass is run again, until its
result is finite.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import fp32_modules
from .activations import Call, OverflowReport, Watch, extremes, floating, modules_of
from .census import bits
from .decisions import carry_out
from .errors import PrecisionError, Problem, refuse, warn
from .probing import undisturbed
from .quantization import compute_in
from .towers import anatomy, is_quantized, unwrap


logger = logging.getLogger(__name__)

Again = Callable[[Watch], torch.Tensor]
"""Runs a forward pass once more under the eyes of a watch, and gives what has to be finite."""

TRIES = 32
"""Modules that are tried in float32 before it is given up."""


def explain(report: OverflowReport, model: nn.Module, patterns: Sequence[str], again: Again | None) -> Problem:
    """The refusal of a model that overflows, with the line that mends it.

    Args:
        report: What was seen, an overflow.
        model: The model, wrapped or not.
        patterns: The `fp32_modules` that are there already.
        again: Runs what was seen again; `None` where nothing can be tried, as with weights that are sharded.

    Returns:
        The problem.
    """
    first = report.first
    if first is None:
        raise ValueError("nothing overflowed in what was seen")
    given = f"`{first.module or type(unwrap(model)).__name__}` gives {first.largest:g} for what is finite, in the "
    given += f"{report.phase} after step {report.step}"
    holding = _not_finite(modules_of(model).get(first.module or candidate(model, "", ()) or ""))
    if holding is not None:
        return refuse("weights-not-finite", given, name=holding)
    try:
        chosen, mended = mend(report, model, again)
    except PrecisionError as error:  # an 8-bit layer, which float32 is not for
        return refuse("activations-overflow-fp16", given, fix=error.problems[0].fix)
    broken = None if mended is not False else _broken(model)
    if broken is not None:  # what is tried in float32 cannot mend it, and bfloat16 would not either
        module, _, holding = broken.rpartition(".")
        given = f"`{module or type(unwrap(model)).__name__}`, in the {report.phase} after step {report.step}"
        return refuse("weights-not-finite", given, name=holding)
    line = f"`fp32_modules={[*patterns, *shortest(model, chosen)]!r}`"
    bf16 = "`bf16=True` on a device that computes it"
    if mended is None:
        line += ", and what is named after that,"
    return refuse("activations-overflow-fp16", given, fix=bf16 if mended is False else f"{line} or {bf16}")


def mend(report: OverflowReport, model: nn.Module, again: Again | None) -> tuple[list[str], bool | None]:
    """Finds the modules that have to compute in float32 so that a forward pass is finite.

    Nothing of the run changes: weights, methods and random states are put back.

    Args:
        report: What was seen, an overflow.
        model: The model, wrapped or not.
        again: Runs what was seen again; `None` where nothing can be tried.

    Returns:
        Qualified names in the base model, and whether they mend it; `None` where it could not be tried.
    """
    names: list[str] = []
    seen: OverflowReport | None = report
    while seen is not None and seen.first is not None and len(names) < TRIES:
        name = candidate(model, seen.first.module, names)
        if name is None:
            return names, False
        names = [*(n for n in names if not _within(n, name)), name]
        if again is None:
            return names, None
        try:
            watch = Watch(model)
            with computing_in_float32(model, names), undisturbed(model):
                result = again(watch)
            seen = watch.finish(report.phase, report.step, result)
        except PrecisionError:
            raise
        except Exception as error:  # out of memory for a float32 copy, or a model that cannot be called so
            logger.info("fp32_modules=%r could not be tried: %s: %s", names, type(error).__name__, error)
            return names, None
        if seen.result_finite:
            return names, True
    return names, False


def candidate(model: nn.Module, name: str, chosen: Sequence[str]) -> str | None:
    """The module to compute in float32 where another overflows.

    Args:
        model: The model, wrapped or not.
        name: What overflows, as an `Activation` names it.
        chosen: What computes in float32 already.

    Returns:
        In a tower the tower. Elsewhere the module itself, or the smallest around it that has weights and is not chosen
        yet; where the model's own code overflows, its head. `None` where nothing smaller than the text model is left.
    """
    modules, parts = modules_of(model), anatomy(model)
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
    for count in range(1, len(pieces)):  # what PEFT put inside a module is no module of the model
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
    """The shortest ends of names that no other module has.

    Args:
        model: The model, wrapped or not.
        names: Qualified names in the base model.
    """
    known = list(modules_of(model))
    found = []
    for name in names:
        pieces = name.split(".")
        ends = (".".join(pieces[-count:]) for count in range(1, len(pieces) + 1) if not pieces[-count].isdigit())
        found.append(next((e for e in ends if sum(n == e or n.endswith(f".{e}") for n in known) == 1), name))
    return found


@contextlib.contextmanager
def computing_in_float32(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Lets modules compute in float32 while the block runs; afterwards everything is the same objects and bits.

    Args:
        model: The model, wrapped or not.
        names: Qualified names in the base model.

    Raises:
        PrecisionError: If one of them cannot compute in float32.
    """
    modules = fp32_modules.find_modules(model, names)
    methods = [(vars(module), key) for module in modules.values() for key in ("forward", "_old_forward")]
    own = [(attributes, key, attributes.get(key)) for attributes, key in methods]
    packed: list[Any] = [layer for module in modules.values() for layer in module.modules() if bits(layer) == 4]
    before = [(layer, layer.compute_dtype) for layer in packed]
    held = [(parameter, parameter.data) for module in modules.values() for parameter in module.parameters()]
    try:
        decisions = fp32_modules.decide(model, modules)
        fp32_modules.guard(model, modules)
        carry_out(model, decisions)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data
        for layer, dtype in before:
            compute_in(layer, dtype)
        for attributes, key, method in own:
            if method is None:
                attributes.pop(key, None)
            else:
                attributes[key] = method


def called_again(calls: Sequence[Call]) -> Again:
    """Makes calls of a model again, as `mend` wants it.

    Args:
        calls: What was called with what.
    """

    def again(watch: Watch) -> torch.Tensor:
        with watch.attached():
            outputs = [call.again() for call in calls]
        return torch.cat([result_of(output) for output in outputs])

    return again


def sampled_from(output: Any) -> torch.Tensor:
    """The logits that the next tokens are sampled from, (B, V), or all of an output without logits.

    Args:
        output: What the model gave.
    """
    logits = getattr(output, "logits", None)
    return logits[:, -1] if isinstance(logits, torch.Tensor) else result_of(output)


def result_of(output: Any) -> torch.Tensor:
    """The extremes of all floating tensors of an output, (2N,).

    Args:
        output: What a module gave.
    """
    found = [extremes(tensor) for tensor in floating(output)]
    return torch.cat(found) if found else torch.zeros(1)


def foresee(report: OverflowReport, model: nn.Module, patterns: Sequence[str]) -> Problem | None:
    """The warning of a forward pass whose result is finite all the same."""
    worst = report.first or (report.near[0] if report.near else None)
    if worst is None:
        return None
    name = candidate(model, worst.module, ())  # what comes after it may follow from it
    fix = f"`fp32_modules={[*patterns, *shortest(model, [name])]!r}`" if name is not None else "`bf16=True`"
    given = f"`{worst.module or type(unwrap(model)).__name__}` gives {worst.largest:g}, in the {report.phase} after "
    given += f"step {report.step}"
    if report.first is not None:
        return warn("overflow-without-effect", given, fix=fix)
    return warn("activations-near-overflow", given, fix=fix)


def _not_finite(module: nn.Module | None) -> str | None:
    """The first weight of a module itself that holds a number that is not finite."""
    own = {} if module is None else dict(module.named_parameters(recurse=False))
    held = {
        n: p for n, p in own.items() if p.is_floating_point() and not is_quantized(p)
    }  # packed bytes are no numbers
    return next((n for n, p in held.items() if not torch.isfinite(p).all()), None)


def _broken(model: nn.Module) -> str | None:
    """The qualified name of the first weight of a model that holds a number that is not finite."""
    found = ((name, _not_finite(module)) for name, module in modules_of(model).items())
    return next((f"{name}.{holding}" for name, holding in found if holding is not None), None)


def _within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")

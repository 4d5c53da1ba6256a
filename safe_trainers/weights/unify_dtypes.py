"""Brings the frozen weights of a model to one dtype if it cannot compute with several.

transformers casts a checkpoint to one dtype while loading. Weights may still have several dtypes: a model declares
modules that stay float32, k-bit preparation upcasts weights that are not quantised, or the user changed the model. If
such a model cannot compute, as few of its frozen weights as necessary are cast, in place, one tensor at a time.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..boundaries.cast_hooks import guard_fused, guard_leaves
from ..core.dtypes import FLOAT16, FLOAT32, HALVES, SHORT, from_torch, join_dtypes, to_torch
from ..core.errors import PrecisionError, Problem, refuse
from ..model.inventory import ModelInventory
from ..model.parts import adapter_parameters, is_quantized, unwrap
from ..model.trial_forward import trial_error
from .cast import ParameterCast, largest_magnitude, table
from .keep_fp32 import declared_float32


Keep = Callable[[str], bool] | Iterable[str]
"""Parameters that are not cast: a function of a parameter's name, or names of parameters and of modules."""

_PEFT_PARTS = re.compile(r"\.(?:base_layer|original_module)(?=\.|$)")


@dataclass(frozen=True)
class CastPlan:
    """The changes that let a model with weights of several dtypes compute.

    Attributes:
        guarded: Number of modules whose inputs are cast to the dtype of their weights.
        casts: The weights that were cast; empty if casts of inputs were enough.
        error: PyTorch's remaining error; `None` if the model computes.
    """

    guarded: int = 0
    casts: tuple[ParameterCast, ...] = ()
    error: str | None = None

    def without_error(self) -> "CastPlan":
        """Returns a copy without the error, for a model that computes for another reason."""
        return replace(self, error=None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON."""
        return {"guarded": self.guarded, "casts": [vars(cast) for cast in self.casts], "error": self.error}

    def __str__(self) -> str:
        guards = [f"inputs of {self.guarded} modules are cast to the dtype of their weights"] if self.guarded else []
        casts = [table(self.casts)] if self.casts else []
        return "\n".join([*guards, *casts]) or "no changes: the model computes without them"


@dataclass(frozen=True)
class _Weight:
    """A frozen weight that may be cast, with all its names; tied parameters have several."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    matrix: nn.Parameter | None  # itself if it is a matrix, else the largest of its module; `None` if there is none

    @property
    def dtype(self) -> str:
        return from_torch(self.parameter.dtype)


def dominant(model: nn.Module, compute: frozenset[str]) -> str:
    """Returns the dtype to which a model with weights of several dtypes is brought.

    Args:
        model: The model, possibly wrapped.
        compute: The compute dtypes of the run; several if each operation uses the dtype of its weights.

    Returns:
        The compute dtype if it is one half dtype. Otherwise the dtype of most elements of the frozen matrices, without
        those that the model declares to stay float32; the wider dtype if two have as many elements. `"float32"` if
        no such matrix exists.
    """
    if len(compute) == 1 and compute <= HALVES:
        return next(iter(compute))
    declared = declared_float32(model, FLOAT16)
    count: Counter[str] = Counter()
    for weight in _frozen(model):
        if weight.parameter.ndim > 1 and weight.dtype in SHORT and not any(map(declared, weight.names)):
            count[weight.dtype] += weight.parameter.numel()
    return max(count, key=lambda dtype: (count[dtype], to_torch(dtype).itemsize), default=FLOAT32)


def plan_layout(model: nn.Module, target: str, *, keep: Keep = (), vectors: bool = False) -> tuple[ParameterCast, ...]:
    """Plans the casts of frozen weights to one dtype, without changing the model.

    Matrices are cast to `target`, and biases to the dtype of the matrix of their module. Vectors of modules without a
    matrix (norms) keep `target` or float32, and are upcast to float32 from other dtypes, which is exact and needs
    little memory. Weights that the model declares to stay float32 are never cast down. Trainable parameters, adapters,
    buffers, and packed weights with their scales are not cast.

    Args:
        model: A transformers model, possibly wrapped by PEFT, on any device including meta.
        target: `"float32"`, `"bfloat16"` or `"float16"`, usually from `dominant`.
        keep: Further parameters that are not cast.
        vectors: Whether vectors are also cast to `target`, for a model that cannot compute otherwise.

    Returns:
        The casts; empty if no weight needs one.

    Raises:
        PrecisionError: If weights would overflow; the message names them.
    """
    declared, kept = declared_float32(model, target), _keeps(keep)
    casts, overflowing = [], []
    goals: dict[int, str] = {}
    # Matrices come first, because biases get the dtype of their matrix.
    for weight in sorted(_frozen(model), key=lambda weight: weight.parameter.ndim < 2):
        if any(map(kept, weight.names)):
            continue
        goal, reason = _goal(weight, target, vectors, any(map(declared, weight.names)), goals)
        goals[id(weight.parameter)] = goal
        if goal == weight.dtype:
            continue
        largest = largest_magnitude(weight.parameter)
        if largest > torch.finfo(to_torch(goal)).max:
            overflowing.append((largest, weight, goal))
        casts.append(ParameterCast(weight.names[0], weight.dtype, goal, reason, weight.parameter.numel()))
    if overflowing:
        raise PrecisionError([_overflow(overflowing)])
    return tuple(casts)


def apply_layout(model: nn.Module, casts: Iterable[ParameterCast]) -> None:
    """Applies planned casts in place, with at most one tensor in memory twice.

    Parameters remain the same objects, so that tied parameters and parameters with a common storage stay tied.

    Args:
        model: The model that was planned for.
        casts: The casts from `plan_layout`.
    """
    weights = {weight.names[0]: weight.parameter for weight in _frozen(model)}
    shared: dict[tuple[Any, ...], torch.Tensor] = {}
    for cast in casts:
        parameter = weights[cast.name]
        storage = _storage(parameter)
        data = shared.get((storage, cast.target)) if storage is not None else None
        parameter.data = parameter.data.to(to_torch(cast.target)) if data is None else data
        if storage is not None:
            shared[storage, cast.target] = parameter.data


def make_computable(
    model: nn.Module, compute: frozenset[str], failure: Callable[[], str | None], *, keep: Keep = ()
) -> CastPlan:
    """Lets a model with weights of several dtypes compute, with as few changes as possible.

    The steps are tried in this order until the model computes: no change, casts of inputs, casts of matrices, casts of
    vectors. A model that computes already therefore stays bit-identical, and casts of inputs do not change weights.

    Args:
        model: The model, possibly wrapped by PEFT.
        compute: The compute dtypes of the run, for `dominant`.
        failure: Runs the model and returns PyTorch's error about dtypes; `None` if the model computes.
        keep: Parameters that are not cast, for `plan_layout`.

    Returns:
        The changes, and the error if none of the steps helped.

    Raises:
        PrecisionError: If weights would overflow.
    """
    error = failure()
    if error is None:
        return CastPlan()
    guarded = guard_leaves([model]) + guard_fused(model)
    error = failure()
    casts: list[ParameterCast] = []
    before: dict[nn.Parameter, torch.Tensor] = {}
    for vectors in (False, True):
        plan = () if error is None else plan_layout(model, dominant(model, compute), keep=keep, vectors=vectors)
        if plan:
            names = {cast.name for cast in plan}
            for weight in _frozen(model):
                if weight.names[0] in names:
                    before.setdefault(weight.parameter, weight.parameter.data)
            apply_layout(model, plan)
            casts += plan
            error = failure()
    if error is not None:  # the caller refuses the model, so its weights are restored
        for parameter, data in before.items():
            parameter.data = data
        casts = []
    return CastPlan(guarded, tuple(casts), error)


def _goal(weight: _Weight, target: str, vectors: bool, declared: bool, goals: dict[int, str]) -> tuple[str, str]:
    """Returns the dtype to which a weight is cast, and the reason."""
    wide = target if weight.dtype == target else FLOAT32
    if declared:
        return wide, "the model declares that it stays float32"
    if weight.matrix is weight.parameter:
        return target, f"matrices are {target}"
    if weight.matrix is not None:
        return goals.get(id(weight.matrix), from_torch(weight.matrix.dtype)), "the dtype of its module's matrix"
    if vectors:
        return target, "the model can compute only if vectors have the dtype of its matrices"
    return wide, "a vector without a matrix; the cast to float32 is exact"


def _frozen(model: nn.Module) -> Iterator[_Weight]:
    """Yields the weights that may be cast, each once, in the order of the model."""
    base = unwrap(model)
    adapters = {id(parameter) for parameter in adapter_parameters(base)}
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_PEFT_PARTS.sub("", name))
    seen: set[int] = set()
    for module in base.modules():
        own = list(module.parameters(recurse=False))
        # The other parameters of a packed layer are its scales, whose dtype must not change, and a bias, which its
        # kernel casts.
        if any(is_quantized(parameter) for parameter in own):
            continue
        matrix = max((p for p in own if p.ndim > 1), key=torch.Tensor.numel, default=None)
        for parameter in own:
            if id(parameter) in seen or id(parameter) in adapters or parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if parameter.numel() > 0:  # an engine that shards weights may leave empty parameters
                yield _Weight(tuple(names[id(parameter)]), parameter, parameter if parameter.ndim > 1 else matrix)


def _keeps(keep: Keep) -> Callable[[str], bool]:
    if callable(keep):
        return keep
    names = frozenset(keep)
    # Looks up prefixes instead of comparing all names, because both sides may be thousands.
    return lambda name: name in names or any(name[:end] in names for end, part in enumerate(name) if part == ".")


def _overflow(found: list[tuple[float, _Weight, str]]) -> Problem:
    names = ", ".join(weight.names[0] for _, weight, _ in found[:3]) + (", ..." if len(found) > 3 else "")
    largest, weight, goal = max(found, key=lambda item: item[0])
    what = f"a cast to {goal} of {weight.dtype} weights with numbers up to {largest:.3g}: {names}"
    return refuse("weights-overflow", what, target=goal, limit=f"{torch.finfo(to_torch(goal)).max:g}")


def _storage(parameter: nn.Parameter) -> tuple[Any, ...] | None:
    """Returns a key that is equal for parameters with the same storage; `None` on the meta device."""
    if parameter.is_meta:
        return None
    return (parameter.data_ptr(), parameter.dtype, tuple(parameter.shape), parameter.stride())


def dtype_conflict(
    model: nn.Module,
    processing_class: Any,
    inventory: ModelInventory,
    autocast: str | None,
    switches: Mapping[str, str],
    error: str,
) -> Problem:
    """Makes the refusal of a model that cannot compute with its dtypes, with the line that fixes it.

    Args:
        model: The model.
        processing_class: The processor if the run has images; `None` for text only.
        inventory: The dtypes of the model.
        autocast: The autocast dtype of the run; `None` without autocast.
        switches: The settings that select autocast, by half dtype, for those that the device supports.
        error: PyTorch's error.
    """
    weights, adapters = inventory.weights, frozenset(inventory.elements["adapters"])
    half = sorted(adapters & HALVES or weights & HALVES)[0] if autocast is None else autocast
    one = half if half in switches else FLOAT32
    fix = (
        f"load all weights in one dtype: `from_pretrained(..., dtype='{one}')`, or "
        f"`model_init_kwargs={{'dtype': '{one}'}}`"
    )
    if autocast is None and half in switches and trial_error(model, processing_class, half) is None:
        fix = f"{switches[half]}: autocast then casts both to one dtype"
    context = "without autocast" if autocast is None else f"under {autocast} autocast"
    trained = f" and {join_dtypes(adapters)} adapters" if adapters and adapters != weights else ""
    what = f"{join_dtypes(weights)} weights{trained} {context}"
    return refuse("mixed-weights-cannot-meet", what, error=error, fix=fix)

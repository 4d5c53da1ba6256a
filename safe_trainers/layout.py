"""One stated dtype for the frozen weights of a model whose weights disagree.

transformers casts a checkpoint to one dtype while it loads, whatever dtypes the file holds. Weights disagree after it
nonetheless: a model declares modules that stay float32, k-bit preparation widens what it did not quantise, a live
model was edited. Where such a model cannot compute, its frozen weights are brought to one dtype: tensor by tensor, in
place, each with its reason, and as few of them as it takes.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .boundaries import guard_leaves
from .decisions import Decision, table
from .dtypes import FLOAT16, FLOAT32, HALVES, SHORT, from_torch, to_torch
from .errors import PrecisionError, Problem, refuse
from .fused import guard_fused
from .towers import adapter_parameters, is_quantized, unwrap


Keep = Callable[[str], bool] | Iterable[str]
"""What stays as it is: a function of a parameter's name, or names of parameters and of modules that contain them."""

_PEFT_PARTS = re.compile(r"\.(?:base_layer|original_module)(?=\.|$)")


@dataclass(frozen=True)
class Reconciliation:
    """What was done so that a model computes.

    Attributes:
        guarded: How many modules got a boundary: what enters follows their weights.
        casts: The weights that were cast, empty where boundaries were enough.
        error: What torch still says, `None` where the model computes.
    """

    guarded: int = 0
    casts: tuple[Decision, ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The reconciliation as plain values, ready for JSON."""
        return {"guarded": self.guarded, "casts": [vars(cast) for cast in self.casts], "error": self.error}

    def __str__(self) -> str:
        boundaries = [f"boundaries: what enters {self.guarded} modules follows their weights"] if self.guarded else []
        casts = [table(self.casts)] if self.casts else []
        return "\n".join([*boundaries, *casts]) or "nothing: the model computes as it is"


@dataclass(frozen=True)
class _Weight:
    """A frozen weight that may be cast, with all its names: tied parameters have several."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    matrix: nn.Parameter | None  # the largest of its module, itself where it is one; `None` for a vector alone

    @property
    def dtype(self) -> str:
        return from_torch(self.parameter.dtype)


def declared_float32(model: nn.Module, target: str) -> Callable[[str], bool]:
    """Which parameters a model declares to stay float32 when it is loaded in a half dtype.

    transformers reads two lists: `_keep_in_fp32_modules`, for float16 alone, and `_keep_in_fp32_modules_strict`, for
    both half dtypes. 4.57 matches an entry as whole parts of a name, 5 as an expression found anywhere in it; what
    either of them would keep is declared.

    Args:
        model: A transformers model, wrapped or not.
        target: The half dtype that it would be loaded in.

    Returns:
        A function of a parameter's name in the base model.
    """
    lists = ["_keep_in_fp32_modules_strict"] if target in HALVES else []
    lists += ["_keep_in_fp32_modules"] if target == FLOAT16 else []
    # 4.57 reads the lists of the outermost model alone, 5 those of every model in it.
    entries = {
        entry for module in unwrap(model).modules() for name in lists for entry in getattr(module, name, None) or ()
    }
    if not entries:
        return lambda name: False
    pattern = re.compile("|".join(entry.replace("*", ".*") for entry in sorted(entries)))
    return lambda name: pattern.search(name) is not None


def dominant(model: nn.Module, compute: str) -> str:
    """The dtype that a model whose weights disagree is brought to.

    Args:
        model: The model, wrapped or not.
        compute: The compute dtype of the run, `"bfloat16 and float32"` or the like where each operation follows its
            own weights.

    Returns:
        `compute` where it is a half dtype; else the dtype of most elements among the frozen matrices that no
        declaration keeps in float32, the wider one of two with as many. `"float32"` where there is no such matrix.
    """
    if compute in HALVES:
        return compute
    declared = declared_float32(model, FLOAT16)
    count: Counter[str] = Counter()
    for weight in _frozen(model):
        if weight.parameter.ndim > 1 and weight.dtype in SHORT and not any(map(declared, weight.names)):
            count[weight.dtype] += weight.parameter.numel()
    return max(count, key=lambda dtype: (count[dtype], to_torch(dtype).itemsize), default=FLOAT32)


def plan_layout(model: nn.Module, target: str, *, keep: Keep = (), vectors: bool = False) -> tuple[Decision, ...]:
    """Decides which frozen weights are brought to another dtype; reads only.

    Matrices get `target`, and so does what hangs beside a matrix in one module: its bias. A vector alone (a norm) is
    left in `target` and in float32, which loses nothing and costs next to no memory, and is widened to float32 from
    anything else. What the model declares to stay float32 is never narrowed. Never touched: trainable parameters,
    adapters, packed weights and the scales beside them, buffers.

    Args:
        model: A transformers model, wrapped by PEFT or not, on any device (meta too).
        target: `"float32"`, `"bfloat16"` or `"float16"`; `dominant` names one.
        keep: Further parameters that stay as they are.
        vectors: Whether vectors get `target` too: for a model that cannot compute with wide ones.

    Returns:
        The casts, empty where nothing disagrees.

    Raises:
        PrecisionError: If weights hold numbers that `target` does not have; it names them.
    """
    declared, kept = declared_float32(model, target), _keeps(keep)
    casts, overflowing = [], []
    goals: dict[int, str] = {}
    # Matrices first: what hangs beside one follows it, also where that stays as it is.
    for weight in sorted(_frozen(model), key=lambda weight: weight.parameter.ndim < 2):
        if any(map(kept, weight.names)):
            continue
        goal, reason = _goal(weight, target, vectors, any(map(declared, weight.names)), goals)
        goals[id(weight.parameter)] = goal
        if goal == weight.dtype:
            continue
        largest = _largest(weight.parameter)
        if largest > torch.finfo(to_torch(goal)).max:
            overflowing.append((largest, weight, goal))
        casts.append(Decision(weight.names[0], weight.dtype, goal, reason, weight.parameter.numel()))
    if overflowing:
        raise PrecisionError([_overflow(overflowing)])
    return tuple(casts)


def apply_layout(model: nn.Module, casts: Iterable[Decision]) -> None:
    """Casts what was planned, in place, one tensor at a time: no more than the largest of them is held twice.

    Parameters stay the same objects, so that tied ones stay tied, and so do those that share their storage.

    Args:
        model: The model that was planned for.
        casts: What was planned.
    """
    weights = {weight.names[0]: weight.parameter for weight in _frozen(model)}
    shared: dict[tuple[Any, ...], torch.Tensor] = {}
    for cast in casts:
        parameter = weights[cast.name]
        place = _place(parameter)
        data = shared.get((place, cast.target)) if place is not None else None
        parameter.data = parameter.data.to(to_torch(cast.target)) if data is None else data
        if place is not None:
            shared[place, cast.target] = parameter.data


def reconcile(model: nn.Module, compute: str, failure: Callable[[], str | None], *, keep: Keep = ()) -> Reconciliation:
    """Makes a model compute whose weights disagree, by the least that does it.

    In this order, and no further than needed: nothing, boundaries, the layout of matrices, that of vectors. So a model
    that computes as it is stays bit-identical, and what boundaries mend keeps all bits of its weights.

    Args:
        model: The model, wrapped by PEFT or not.
        compute: The compute dtype of the run, for `dominant`.
        failure: Asks the model: what torch says where two dtypes meet, `None` where the model computes.
        keep: Parameters that stay as they are, for `plan_layout`.

    Returns:
        What was done, and what torch still says after all of it.

    Raises:
        PrecisionError: If weights hold numbers that they would lose to infinity.
    """
    error = failure()
    if error is None:
        return Reconciliation()
    guarded = guard_leaves([model]) + guard_fused(model)
    error = failure()
    casts: list[Decision] = []
    before: dict[nn.Parameter, torch.Tensor] = {}
    for vectors in (False, True):
        plan = () if error is None else plan_layout(model, dominant(model, compute), keep=keep, vectors=vectors)
        if plan:
            names = {decision.name for decision in plan}
            for weight in _frozen(model):
                if weight.names[0] in names:
                    before.setdefault(weight.parameter, weight.parameter.data)
            apply_layout(model, plan)
            casts += plan
            error = failure()
    if error is not None:  # it will be refused: the weights stay as they were given
        for parameter, data in before.items():
            parameter.data = data
        casts = []
    return Reconciliation(guarded, tuple(casts), error)


def _goal(weight: _Weight, target: str, vectors: bool, declared: bool, goals: dict[int, str]) -> tuple[str, str]:
    """The dtype that a weight gets, and why."""
    wide = target if weight.dtype == target else FLOAT32
    if declared:
        return wide, "the model declares that it stays float32"
    if weight.matrix is weight.parameter:
        return target, f"matrices are {target}"
    if weight.matrix is not None:
        held = goals.get(id(weight.matrix), from_torch(weight.matrix.dtype))
        return held, "it hangs beside a matrix of this dtype, as a bias does"
    if vectors:
        return target, "the model cannot compute with it in another dtype than its matrices"
    return wide, "a vector alone, of which float32 keeps all bits"


def _frozen(model: nn.Module) -> Iterator[_Weight]:
    """The weights that may be cast, each once, in the order of the model."""
    base = unwrap(model)
    adapters = {id(parameter) for parameter in adapter_parameters(base)}
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_PEFT_PARTS.sub("", name))
    seen: set[int] = set()
    for module in base.modules():
        own = list(module.parameters(recurse=False))
        # Beside a packed weight hang its scales, whose dtype is part of the format, and a bias that its kernel casts.
        if any(is_quantized(parameter) for parameter in own):
            continue
        matrix = max((p for p in own if p.ndim > 1), key=torch.Tensor.numel, default=None)
        for parameter in own:
            if id(parameter) in seen or id(parameter) in adapters or parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if parameter.numel() > 0:  # an engine that shards weights holds them elsewhere
                yield _Weight(tuple(names[id(parameter)]), parameter, parameter if parameter.ndim > 1 else matrix)


def _keeps(keep: Keep) -> Callable[[str], bool]:
    if callable(keep):
        return keep
    names = frozenset(keep)
    # Not name by name: thousands of parameters may be asked about, and thousands of modules be kept.
    return lambda name: name in names or any(name[:end] in names for end, part in enumerate(name) if part == ".")


def _largest(parameter: nn.Parameter) -> float:
    """The largest magnitude in a tensor, without a copy of it; 0 where there is no data."""
    if parameter.is_meta:
        return 0.0
    low, high = torch.aminmax(parameter.detach())
    return max(-low.item(), high.item())


def _overflow(found: list[tuple[float, _Weight, str]]) -> Problem:
    names = ", ".join(weight.names[0] for _, weight, _ in found[:3]) + (", ..." if len(found) > 3 else "")
    largest, weight, goal = max(found, key=lambda item: item[0])
    given = f"{weight.dtype} weights with numbers up to {largest:.3g}, to be brought to {goal}: {names}"
    return refuse("weights-overflow", given, target=goal, limit=f"{torch.finfo(to_torch(goal)).max:g}")


def _place(parameter: nn.Parameter) -> tuple[Any, ...] | None:
    """Where a tensor's numbers are, to find another parameter with the same; `None` where it has none."""
    if parameter.is_meta:
        return None
    return (parameter.data_ptr(), parameter.dtype, tuple(parameter.shape), parameter.stride())

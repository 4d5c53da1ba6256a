"""Decides from the policy and the inventory where a model needs casts, and installs them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.dtypes import FLOAT32, HALVES, join_dtypes
from ..model.inventory import ModelInventory
from ..model.parts import find_parts, unwrap
from ..model.trial_forward import Trial, try_sample
from ..policy.resolve import PrecisionPolicy
from .cast_hooks import guard_features, guard_leaves, widen_embeddings
from .operation_casts import MatchDtypes, Places, guard_operations


INPUT, OUTPUT, OPERATIONS = "input", "output", "operations"
FEATURES, EMBEDDINGS = "features", "embeddings"


@dataclass(frozen=True)
class Boundary:
    """A place in the model where two dtypes can meet.

    Attributes:
        side: `"input"`: inputs of the layers of `module` are cast to the dtype of their weights. `"output"`: outputs
            of towers are cast to the dtype of the input embeddings, or those of the embeddings to float32.
            `"operations"`: operations in the forward pass of `module` that PyTorch refuses get arguments of one
            dtype.
        module: Name of the tower or module; `"model"` for the whole model; `"features"` for the `get_*_features`
            methods; `"embeddings"` for the input embeddings. For operations, the qualified name, `""` for the model.
        reason: The dtypes that meet.
    """

    side: str
    module: str
    reason: str


@dataclass(frozen=True)
class BoundaryPlan:
    """The casts that a model needs.

    Attributes:
        boundaries: Where to cast; empty if no two dtypes can meet.
    """

    boundaries: tuple[Boundary, ...]

    @property
    def operations(self) -> tuple[Boundary, ...]:
        """The boundaries at single operations, which a trial has found."""
        return tuple(boundary for boundary in self.boundaries if boundary.side == OPERATIONS)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON."""
        return {"boundaries": [vars(boundary) for boundary in self.boundaries]}

    def __str__(self) -> str:
        lines = [
            f"{boundary.side} of {boundary.module or 'the model'}: {boundary.reason}" for boundary in self.boundaries
        ]
        return "\n".join(lines or ["no boundaries: this model never combines two dtypes"])


def plan_boundaries(
    policy: PrecisionPolicy, inventory: ModelInventory, late_cast: bool = False, *, features: bool = True
) -> BoundaryPlan:
    """Decides where a model needs casts. This is a pure function.

    Args:
        policy: The policy of the run.
        inventory: The dtypes of the model.
        late_cast: Whether an engine (DeepSpeed) will cast the weights to the compute dtype later.
        features: Whether to cast the outputs of towers; `False` if the model casts them itself.

    Returns:
        The plan.
    """
    found = _boundaries(policy, inventory, late_cast)
    return BoundaryPlan(tuple(boundary for boundary in found if features or boundary.module != FEATURES))


def rounds_in_embeddings(policy: PrecisionPolicy, inventory: ModelInventory, late_cast: bool = False) -> bool:
    """Whether the input embeddings have the other half format than autocast, and so round away bits that it has.

    Args:
        policy: The policy of the run.
        inventory: The dtypes of the model.
        late_cast: Whether an engine (DeepSpeed) will cast the weights to the compute dtype later.
    """
    return not late_cast and {policy.autocast.value, inventory.embeddings} == HALVES


def widen(plan: BoundaryPlan, model: nn.Module, works: Callable[[], bool]) -> BoundaryPlan:
    """Casts the output of a model's input embeddings to float32, unless the model does not work with it.

    Args:
        plan: The plan of the model.
        model: The model.
        works: Whether a forward pass of the model succeeds.

    Returns:
        The plan, with the cast if it was placed.
    """
    embeddings = find_parts(model).embeddings
    if embeddings is None:
        return plan
    handle = widen_embeddings(embeddings)
    if not works():
        handle.remove()
        return plan
    reason = "their half format would round away bits that the other one, of autocast, has"
    return BoundaryPlan((*plan.boundaries, Boundary(OUTPUT, EMBEDDINGS, reason)))


def cast_operations(
    plan: BoundaryPlan, model: nn.Module, processing_class: Any, autocast: torch.dtype | None
) -> tuple[BoundaryPlan, Trial]:
    """Runs a model on a sample, and places casts at the operations that fail because of their dtypes.

    Args:
        plan: The plan of the model, which was placed.
        model: The model.
        processing_class: The processor if the run has images or audio; `None` for text only.
        autocast: The autocast dtype of the run; `None` without autocast.

    Returns:
        The plan with the new casts, and the result of the trial with them.
    """
    plain = contextlib.nullcontext()
    trial = try_sample(model, processing_class, autocast, plain)
    if trial.error is None:
        return plan, trial
    places = Places(unwrap(model))
    trial = try_sample(model, processing_class, autocast, MatchDtypes(places.add))
    if trial.error is not None or not places.operations:
        return plan, trial
    found = BoundaryPlan(
        tuple(
            Boundary(OPERATIONS, name, f"`{operation}` gets two dtypes, which PyTorch does not combine")
            for name, operation in places.operations.items()
        )
    )
    place(found, model)
    # A method that cannot be replaced fails in this last trial.
    trial = try_sample(model, processing_class, autocast, plain)
    return BoundaryPlan((*plan.boundaries, *found.boundaries)), trial


def place(plan: BoundaryPlan, model: nn.Module) -> None:
    """Installs the casts of a plan. A second call has no effect.

    Args:
        plan: The plan.
        model: The model that was planned for, or one of the same class (the reference model).
    """
    parts = find_parts(model)
    for boundary in plan.boundaries:
        if boundary.module == FEATURES:
            guard_features(parts)
        elif boundary.side == OPERATIONS:
            guard_operations(unwrap(model).get_submodule(boundary.module))
        else:
            guard_leaves([model] if boundary.module == "model" else [parts.towers[boundary.module]])


def _boundaries(policy: PrecisionPolicy, inventory: ModelInventory, late_cast: bool) -> Iterator[Boundary]:
    autocast = policy.autocast.value
    if autocast is None and len(inventory.weights) > 1:
        yield Boundary(INPUT, "model", f"{join_dtypes(inventory.weights)} weights without autocast")
    else:
        for tower in inventory.towers:
            if tower.dtypes & HALVES:
                reason = f"{join_dtypes(tower.dtypes)} weights, and inputs may be float32, as processors return them"
                yield Boundary(INPUT, tower.name, reason)
            elif late_cast and autocast is not None:
                reason = f"the engine casts the weights to {autocast}, and inputs are float32"
                yield Boundary(INPUT, tower.name, reason)
    if inventory.features and inventory.embeddings is not None:
        if autocast is None:
            outputs = {dtype for tower in inventory.towers for dtype in tower.dtypes}
        else:  # autocast returns its own dtype, or float32 if the last operation is a norm
            outputs = {autocast, FLOAT32}
        if outputs - {inventory.embeddings}:
            reason = f"towers return {join_dtypes(outputs)}, and the embeddings are {inventory.embeddings}"
            yield Boundary(OUTPUT, FEATURES, reason)

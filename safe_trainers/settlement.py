"""What is done to one live model, decided from the policy and the census, with reasons; then done, once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .boundaries import guard_features, guard_leaves
from .census import Census
from .dtypes import FLOAT32, HALVES
from .policy import OFF, PrecisionPolicy
from .towers import anatomy


INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class Boundary:
    """A place in the model where dtypes can meet.

    Attributes:
        side: `"input"`: what enters the leaves of `module` follows their weights. `"output"`: what towers give back
            follows the input embeddings.
        module: Name of the tower, `"model"` for the whole model, `"features"` for the `get_*_features` methods.
        reason: Which dtypes meet there, and when.
    """

    side: str
    module: str
    reason: str


@dataclass(frozen=True)
class Settlement:
    """What is done to a model.

    Attributes:
        boundaries: The dtype boundaries to place; empty where no two dtypes can meet.
    """

    boundaries: tuple[Boundary, ...]

    def without_features(self) -> "Settlement":
        """The same, with what towers give back as it is."""
        return Settlement(tuple(boundary for boundary in self.boundaries if boundary.side != OUTPUT))

    def to_dict(self) -> dict[str, Any]:
        """The settlement as plain values, ready for JSON."""
        return {"boundaries": [vars(boundary) for boundary in self.boundaries]}

    def __str__(self) -> str:
        lines = [f"{boundary.side} of {boundary.module}: {boundary.reason}" for boundary in self.boundaries]
        return "\n".join(lines or ["no boundaries: no two dtypes can meet in this model"])


def settle(policy: PrecisionPolicy, census: Census, late_cast: bool = False) -> Settlement:
    """Decides what a model needs; a pure function.

    Args:
        policy: The policy of the run.
        census: The count of the model.
        late_cast: Whether an engine will cast the weights to the compute dtype after the census (DeepSpeed).

    Returns:
        The settlement.
    """
    return Settlement(tuple(_boundaries(policy, census, late_cast)))


def apply(settlement: Settlement, model: nn.Module) -> None:
    """Does what was decided. Doing it again changes nothing.

    Args:
        model: The model that the census was taken of, or one of the same class (the reference model).
        settlement: What was decided for it.
    """
    parts = anatomy(model)
    for boundary in settlement.boundaries:
        if boundary.side == OUTPUT:
            guard_features(parts)
        else:
            guard_leaves([model] if boundary.module == "model" else [parts.towers[boundary.module]])


def _boundaries(policy: PrecisionPolicy, census: Census, late_cast: bool) -> Iterator[Boundary]:
    autocast = policy.autocast.value
    if autocast == OFF and len(census.weights) > 1:
        yield Boundary(INPUT, "model", f"{_list(census.weights)} weights meet, and there is no autocast")
    else:
        for tower in census.towers:
            if tower.dtypes & HALVES:
                reason = f"{_list(tower.dtypes)} weights, and what enters may be float32, as processors return it"
                yield Boundary(INPUT, tower.name, reason)
            elif late_cast and autocast != OFF:
                yield Boundary(
                    INPUT, tower.name, f"the engine casts the weights to {autocast}, and inputs are float32"
                )
    if census.features and census.embeddings is not None:
        # Autocast gives its own dtype, or float32 where the last operation is a norm.
        given = (
            {dtype for tower in census.towers for dtype in tower.dtypes} if autocast == OFF else {autocast, FLOAT32}
        )
        if given - {census.embeddings}:
            reason = f"towers give {_list(given)}, and the embeddings are {census.embeddings}"
            yield Boundary(OUTPUT, "features", reason)


def _list(dtypes: Any) -> str:
    return " and ".join(sorted(dtypes))

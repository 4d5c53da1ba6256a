"""What single parameters are held in: decided elsewhere, carried out and told here."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .dtypes import from_torch, to_torch


@dataclass(frozen=True)
class Decision:
    """What one parameter is held in.

    Attributes:
        name: Its qualified name in the model.
        source: Dtype that it has.
        target: Dtype that it gets; the same where it keeps its bits.
        reason: Why.
        elements: How many numbers it holds.
    """

    name: str
    source: str
    target: str
    reason: str
    elements: int


def carry_out(model: nn.Module, decisions: Iterable[Decision]) -> None:
    """Casts what is to be cast, one tensor at a time: no more than the largest of them is held twice.

    Doing it again changes nothing, but for what was replaced meanwhile: PEFT widens adapters that it loads.

    Args:
        model: The model that was decided on.
        decisions: What was decided.
    """
    parameters = dict(model.named_parameters())
    for decision in decisions:
        parameter = parameters[decision.name]
        if from_torch(parameter.dtype) != decision.target:
            parameter.data = parameter.data.to(to_torch(decision.target))


def extra_bytes(decisions: Iterable[Decision]) -> int:
    """The memory in bytes that decisions cost; negative where they save some."""
    return sum(d.elements * (_width(d.target) - _width(d.source)) for d in decisions)


def mebibytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**20:.1f} MiB"


def grouped(decisions: Iterable[Decision]) -> dict[tuple[str, str, str], list[Decision]]:
    """The decisions that are alike: by source, target and reason, in the order of the first of each."""
    groups: dict[tuple[str, str, str], list[Decision]] = {}
    for decision in decisions:
        groups.setdefault((decision.source, decision.target, decision.reason), []).append(decision)
    return groups


def table(decisions: Iterable[Decision]) -> str:
    """The decisions for people: one line for all tensors that have one reason."""
    lines = []
    for (source, target, reason), members in grouped(decisions).items():
        what = f"{source} kept" if source == target else f"{source} -> {target}"
        count = f"{len(members)} tensors" if len(members) > 1 else "1 tensor"
        memory = extra_bytes(members)
        cost = f", {mebibytes(memory)} more" if memory > 0 else ""
        lines.append(f"{what}: {count} ({members[0].name}{', ...' if len(members) > 1 else ''}){cost}: {reason}")
    return "\n".join(lines)


def _width(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size

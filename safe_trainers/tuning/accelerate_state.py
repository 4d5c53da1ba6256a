"""Accelerate's state, which all trainers of a process share, and which allows one precision."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState


VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""The precision of the last training arguments, which transformers 4 keeps in the environment."""


def forget_precision() -> None:
    """Lets the next accelerator have another precision."""
    os.environ.pop(VARIABLE, None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextlib.contextmanager
def precision_kept() -> Iterator[None]:
    """Restores the state after the block, so that trainers that were built before it can train.

    The accelerators of these trainers hold the dictionaries themselves, so that their content is restored.
    """
    shared: list[dict[str, Any]] = [state._shared_state for state in (AcceleratorState, PartialState, GradientState)]
    before, variable = [dict(state) for state in shared], os.environ.get(VARIABLE)
    try:
        yield
    finally:
        forget_precision()
        for state, content in zip(shared, before, strict=True):
            state.update(content)
        if variable is not None:
            os.environ[VARIABLE] = variable

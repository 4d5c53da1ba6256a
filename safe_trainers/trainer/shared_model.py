"""Models that several trainers get, one after another: each is built without the casts of the one before."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..boundaries.cast_hooks import count_casts, remove_casts
from ..core.errors import warn
from ..core.feature import Run
from ..model.parts import unwrap
from ..policy.distributed import release_preparation
from ..weights.cast import revert_casts


@contextlib.contextmanager
def taken_over(run: Run, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Removes what earlier trainers have left on the models of a trainer, which is built while the block runs.

    Their dtypes are kept, because they are those of trained weights. If the construction fails, what it has placed on
    the policy model is removed, and casts of its weights to a wider dtype are undone.

    Args:
        run: The run of the trainer.
        arguments: The arguments of the trainer's constructor by name.
    """
    for value in arguments.values():
        if isinstance(value, nn.Module):
            release_preparation(value)
    model = arguments.get("model")
    if not isinstance(model, nn.Module):
        yield
        return
    remove_casts(model)
    try:
        yield
    except BaseException:
        remove_casts(model)
        weights = getattr(run, "weights", None)
        if weights is not None:
            layout = () if weights.layout is None else weights.layout.casts
            revert_casts(run.model, (*weights.decisions, *layout))
        raise


class Placements:
    """Notices that a trainer which was built later has prepared the model of this one.

    Args:
        run: The run, whose trainer has been built.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._model = weakref.ref(unwrap(run.model))
        self._casts: Counter[Any] = count_casts(run.model)

    def check(self) -> None:
        """Warns if the casts on the model are not those that the run has placed."""
        model = unwrap(self._run.model)
        if model is self._model() and count_casts(model) != self._casts:
            name = type(self._run.trainer).__name__
            self._run.warn_once(
                warn("model-of-another-trainer", f"the {type(model).__name__} of {name}", trainer=name)
            )

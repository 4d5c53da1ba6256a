"""Models that several trainers get, one after another: each is built without the casts of the one before."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..boundaries.cast_hooks import casts_kept_on_error, count_casts, remove_casts
from ..core.errors import warn
from ..core.feature import Run
from ..model.parts import unwrap
from ..policy.distributed import release_preparation


@contextlib.contextmanager
def taken_over(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Removes what earlier trainers have left on the models of a trainer, which is built while the block runs.

    The weights keep their dtypes. If the construction fails, the models get back what they had.

    Args:
        arguments: The arguments of the trainer's constructor by name.
    """
    models = {name: value for name, value in arguments.items() if isinstance(value, nn.Module)}
    with contextlib.ExitStack() as stack:
        for name, model in models.items():
            stack.enter_context(casts_kept_on_error(model))
            release_preparation(model)
            if name == "model":
                remove_casts(model)
        yield


class Placements:
    """Notices that a trainer which was built later has taken over the model of this one.

    Args:
        run: The run, whose trainer has been built.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._model = weakref.ref(unwrap(run.model))
        self._casts: Counter[Any] = count_casts(run.model)

    def check(self) -> None:
        """Prepares the model again if another accelerator has prepared it, and warns if the run's casts are gone."""
        self._run.preparation.renew(self._run.model)
        model = unwrap(self._run.model)
        if model is self._model() and count_casts(self._run.model) != self._casts:
            name = type(self._run.trainer).__name__
            self._run.warn_once(
                warn("model-of-another-trainer", f"the {type(model).__name__} of {name}", trainer=name)
            )

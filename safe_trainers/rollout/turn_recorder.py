"""Records the turns of rollouts for the features that compare the sampler with the trainer."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..core.feature import Feature, Run
from ..core.patches import patched
from ..model.parts import unwrap
from ..model.rows import with_marks
from .logprob_recorder import ARGUMENT, RECORDED_MODES, Turn, recording_into, takes_recording


class TurnRecorder(Feature):
    """Records the tokens and the log-probabilities of each call of `generate`, while another feature asks for it.

    Attributes:
        processors: Makes the logits processors of a call by its number in the rollout, from 0; `None` for none.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.processors: Callable[[int], Any] | None = None
        self._turns: list[Turn] | None = None  # the turns so far; `None` if no feature asks for them

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Turn]]:
        """Records turns while the block runs.

        Yields:
            The turns, in order, which are added as they are generated. A block inside of another one gets its list.
        """
        if self._turns is not None:
            yield self._turns
            return
        turns: list[Turn] = []
        self._turns = turns
        try:
            yield turns
        finally:
            self._turns = None

    def why_not_recordable(self) -> str | None:
        """Why `generate` cannot be recorded, by the configs of trainer and model and its signature; else `None`."""
        model = unwrap(self.run.model)
        configs = [getattr(owner, "generation_config", None) for owner in (self.run.trainer, model)]
        if not all(config is None or config.get_generation_mode() in RECORDED_MODES for config in configs):
            return "generation neither samples nor decodes greedily"
        if not takes_recording(model):
            return f"the `generate` of {type(model).__name__} does not accept `custom_generate`"
        return None

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn, and records the calls of the policy's `generate` in it.

        A call with a function of its own to sample with is not recorded.
        """
        temperature, turns = getattr(self.run.trainer, "temperature", None), self._turns
        if turns is None or temperature is None or self.why_not_recordable() is not None:
            return call()
        model: Any = unwrap(self.run.model)
        generate = functools.partial(model.generate, **{ARGUMENT: recording_into(turns, temperature, self.processors)})
        noted = [len(turns)]

        def note(marks: Callable[[int], Any]) -> None:
            for turn in turns[noted[0] :]:
                turn.images = marks(len(turn.prompts))
            noted[0] = len(turns)

        with patched("recorded-generate", model, generate=with_marks(generate, note)):
            return call()

"""Records the turns of rollouts for the features that compare the sampler with the trainer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..core.feature import Feature, Run
from ..core.trl import has_rollouts
from ..model.parts import unwrap
from .logprob_recorder import ARGUMENT, RECORDED_MODES, Turn, takes_recording


class TurnRecorder(Feature):
    """Records the tokens and the log-probabilities of each call of `generate`, while another feature asks for it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._turns: list[Turn] | None = None  # the turns so far; `None` if no feature asks for them
        self._turn: Turn | None = None  # the turn that is being generated
        self._prompts: Any = ()  # token ids of the prompts of the next turn

    def on_train_begin(self) -> None:
        """Rests in a trainer without rollouts."""
        if not has_rollouts(type(self.run.trainer)):
            self.rest("on_inputs")

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

    @property
    def position(self) -> int | None:
        """The number of the turn that is being recorded, from 0; `None` between turns."""
        return None if self._turn is None or self._turns is None else len(self._turns)

    def why_not_recordable(self) -> str | None:
        """Why `generate` cannot be recorded, by the configs of trainer and model and its signature; else `None`."""
        model = unwrap(self.run.model)
        configs = [getattr(owner, "generation_config", None) for owner in (self.run.trainer, model)]
        if not all(config is None or config.get_generation_mode() in RECORDED_MODES for config in configs):
            return "generation neither samples nor decodes greedily"
        if not takes_recording(model):
            return f"the `generate` of {type(model).__name__} does not accept `custom_generate`"
        return None

    # ---- Around what TRL does ----

    def before_rollout(self, prompt_ids: Any) -> None:
        """Keeps the prompts of the turn, by which later turns are matched to their sequences."""
        self._prompts = prompt_ids

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn, and keeps the sampler's log-probabilities."""
        temperature = getattr(self.run.trainer, "temperature", None)
        if self._turns is None or temperature is None or self.why_not_recordable() is not None:
            return call()
        self._turn = turn = Turn(temperature, self._prompts)
        try:
            result = call()
        finally:
            self._turn = None
        turn.lengths = [len(ids) for ids in (result[0] if isinstance(result, tuple) else result)]
        self._turns.append(turn)
        return result

    def on_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Adds the recording function to the inputs of `generate`, if this turn is recorded."""
        if self._turn is None or "input_ids" not in inputs:
            return inputs
        return {**inputs, ARGUMENT: self._turn.recording()}

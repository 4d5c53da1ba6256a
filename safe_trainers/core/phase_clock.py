"""Measures how the time of a training process divides into the phases of a step."""

import contextlib
import time
from collections.abc import Callable, Iterator


ROLLOUT, REWARDS, SCORING, REFERENCE, BATCH = "rollout", "rewards", "scoring", "reference", "batch"
LOSS, BACKWARD, OPTIMIZER, EVALUATION = "loss", "backward", "optimizer", "evaluation"
FEATURES, OTHER = "safe_trainers", "other"
PHASES = (ROLLOUT, REWARDS, SCORING, REFERENCE, BATCH, LOSS, BACKWARD, OPTIMIZER, EVALUATION, FEATURES, OTHER)
"""The phases of a step, in their order. `FEATURES` is the work of this package, `OTHER` all that is in no phase."""

_WHOLE = (LOSS, EVALUATION)
"""Phases that include the phases inside them, except `FEATURES`."""


class PhaseClock:
    """Adds up the time of each phase. A phase inside another one is not counted in the outer one.

    Args:
        wait: Waits for the device, so that its work counts in the phase that started it.
        now: Returns the time in seconds.

    Attributes:
        seconds: The seconds of each phase since `start`.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, now: Callable[[], float] = time.perf_counter) -> None:
        self._wait, self._now = wait, now
        self._open: list[str] = []
        self._since: float | None = None
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @property
    def running(self) -> bool:
        """Whether the clock has been started."""
        return self._since is not None

    def start(self) -> None:
        """Starts to measure; what was measured before is forgotten."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._open, self._since = [], self._now()

    def stop(self) -> None:
        """Ends the measurement."""
        self._settle()
        self._since = None

    def _settle(self) -> None:
        """Adds the time since the last change of phase to the innermost open phase."""
        if self._since is None:
            return
        self._wait()
        now = self._now()
        self.seconds[self._open[-1] if self._open else OTHER] += now - self._since
        self._since = now

    def begin(self, name: str) -> None:
        """Begins a phase.

        Args:
            name: One of `PHASES`.
        """
        self._settle()
        whole = next((phase for phase in self._open if phase in _WHOLE), None)
        self._open.append(name if whole is None or name == FEATURES else whole)

    def end(self, depth: int | None = None) -> None:
        """Ends the innermost phase.

        Args:
            depth: The number of phases that remain open; by default one less than now.
        """
        self._settle()
        del self._open[len(self._open) - 1 if depth is None else depth :]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a block.

        Args:
            name: One of `PHASES`.
        """
        depth = len(self._open)
        self.begin(name)
        try:
            yield
        finally:
            self.end(depth)

    def snapshot(self) -> dict[str, float]:
        """Returns the seconds of each phase up to now."""
        self._settle()
        return dict(self.seconds)

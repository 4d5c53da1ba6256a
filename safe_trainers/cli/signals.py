"""SIGINT and SIGTERM: when they end a process, and when they only ask it to stop; imports nothing slow."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from .launch_env import PROCESSES


SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEATED = 0.5
"""Seconds in which a signal that arrives twice counts once: `timeout` and `srun` signal a process and its group."""


class StopSignals:
    """While this context is entered, SIGINT and SIGTERM end the process; during training, the first one is recorded.

    A second signal ends a process that records the first one. Launched processes ignore it: the launching process
    kills them.

    Attributes:
        received: The number of the recorded signal; `None` without one.
        training: Whether a training loop runs that ends at its next step.
        silent: Whether something else shows that a signal was recorded.
        until: What is finished before a recorded signal ends the run, in words.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.training = False
        self.until = "this step"
        self.silent = os.environ.get("RANK", "0") != "0"
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.training:
            self.received = number  # libraries may swallow what `end_by` raises; then training ends when it begins
            end_by(number)
        if self.received is None:
            self.received, self._at = number, time.monotonic()
            if not self.silent:
                os.write(2, f"{self}\n".encode())  # `print` is not allowed to be interrupted by itself
        elif PROCESSES not in os.environ and time.monotonic() - self._at > REPEATED:
            end_by(number)

    def __str__(self) -> str:
        """Returns what happens next, in one line; an empty string without a signal."""
        if self.received is None:
            return ""
        return f"{signal.Signals(self.received).name}: stopping after {self.until}; a second signal stops at once"


def end_by(number: int) -> None:
    """Ends this process because of a signal, with the exit status that a shell reports for it.

    Args:
        number: SIGINT or SIGTERM.

    Raises:
        KeyboardInterrupt: For SIGINT.
        SystemExit: For other signals.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

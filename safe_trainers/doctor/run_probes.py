"""Runs the probes of `doctor` in separate processes and returns their results, also if a process crashes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .probes import MARK


LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Environment variables that launchers set; hidden from probes, because some packages act on them when imported."""

_PACKAGE = re.compile(r'File "[^"\n]*?(?:site|dist)-packages[/\\]([\w.-]+)')


@dataclass(frozen=True)
class Outcome:
    """The result of a probe.

    Attributes:
        loaded: Whether the probe succeeded.
        seconds: Duration of the probe in seconds; `None` if it failed.
        facts: The findings of the probe.
        said: Standard error of its process.
        ended: How the process ended, if not by an exception, such as "its process was ended by SIGSEGV".
        at: The package in whose code the process ended.
        limit: The time limit in seconds that the process has exceeded; `None` if it has not.
    """

    loaded: bool
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""
    ended: str = ""
    at: str | None = None
    limit: float | None = None


def probe(groups: Sequence[Sequence[str]], timeout: float, *, distributed: bool = False) -> dict[str, Outcome]:
    """Runs each group of probes in a separate process; after a failure, the rest of the group runs in another one.

    Args:
        groups: Names of probes.
        timeout: Time limit of a process in seconds.
        distributed: Whether the probes get the environment variables of the launcher.

    Returns:
        The results by name.
    """
    hidden = () if distributed else LAUNCHED
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and (distributed or not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")))
    } | {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", "PYTHONIOENCODING": "utf-8"}
    # At most two at a time, because each takes seconds of CPU time and, with CUDA, GPU memory.
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        made = list(pool.map(lambda group: _group(list(group), timeout, environ), groups))
    return {name: outcome for group in made for name, outcome in group.items()}


def _group(names: list[str], timeout: float, environ: Mapping[str, str]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    while names:
        found = _once(names, timeout, environ)
        outcomes |= found
        names = [name for name in names if name not in found]
    return outcomes


def _once(names: list[str], timeout: float, environ: Mapping[str, str]) -> dict[str, Outcome]:
    """Runs one process; returns the results up to and including the first failure."""
    command = [sys.executable, "-P", "-m", f"{__package__}.probes", *names]
    ended, limit = "", None
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environ)
    )
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        ended, limit = f"loading did not finish within {timeout:g} s", timeout
    said = err.decode("utf-8", errors="replace")
    marks = [
        json.loads(line.removeprefix(MARK))
        for line in out.decode("utf-8", errors="replace").split("\n")
        if line.startswith(MARK)
    ]
    outcomes = {
        mark["name"]: Outcome(True, mark["seconds"], mark["facts"], said) for mark in marks if "seconds" in mark
    }
    if len(outcomes) == len(names):
        return outcomes
    failed = marks[-1]["name"] if marks else names[0]
    if not ended and child.returncode < 0:
        ended = f"its process was ended by {signal.Signals(-child.returncode).name}"
    elif not ended and "Traceback (most recent call last)" not in said:
        ended = f"its process ended with exit status {child.returncode}"
    return outcomes | {failed: Outcome(False, None, {}, said, ended, _package(said, crashed=bool(ended)), limit)}


def _package(said: str, *, crashed: bool) -> str | None:
    """Returns the package of the innermost frame: of the first exception, or of the crash."""
    if crashed:  # the fault handler writes the most recent call first
        first = _PACKAGE.search(said, max(said.rfind("most recent call first"), 0))
        return first[1] if first else None
    start = said.find("Traceback (most recent call last)")
    stop = said.find("\n\n", start)
    inside = _PACKAGE.findall(said, start, stop if stop > start else len(said))
    return inside[-1] if inside else None

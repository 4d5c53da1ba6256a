"""The files of a recording: `recordings/model.json`, and one safetensors file for each step and process.

A file of a step contains `values` (digests of tensors) and `events` (which module had which value, in order of time).
It has no pickled objects, is written atomically, and is at most `most_bytes` long.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from ..core.errors import RecordingError
from ..core.files import read_json, replace_file
from .digest import Digest


FOLDER, MODEL = "recordings", "model.json"
"""The folder in a run's `output_dir`, and the file that describes the model."""
VERSION = 3
MOST_BYTES, MOST_MODULES = 1_000_000, 1500
"""Bytes of the file of a step for each pass of the model, if at most so many of its modules are called."""
MOST_CALLS = 8
"""Calls of a module inside the model that are recorded in a phase of a step."""
PHASES = START, ROLLOUT, SCORING, REFERENCE, FORWARD, LOSS, BACKWARD, OPTIMIZER = (
    "start", "rollout", "scoring", "reference", "forward", "loss", "backward", "optimizer",
)  # fmt: skip
"""The phases of a step. `start` has the weights; `reference` has passes of the policy without its adapters, or with
other ones; `backward` has the forward passes that checkpointing repeats."""
KINDS = PRE, POST, GRADIENT, WEIGHT, BUFFER, DERIVED, STATE, UPDATED, TOKEN_PRE, TOKEN, ARGUMENTS, RANDOM, LEFT_OUT = (
    "pre", "post", "gradient", "weight", "buffer", "derived", "state", "updated", "token_pre", "token", "arguments",
    "random", "left_out",
)  # fmt: skip
"""What an event is: an input or output of a module; a gradient of an output or a parameter; a parameter, a buffer, or
a buffer that is not saved; optimizer state; a parameter after the step; an input or output at one token; the arguments
of a call that are not tensors; the random state; calls of a module that are not recorded."""
WITH_EXTRA = frozenset({TOKEN_PRE, TOKEN, ARGUMENTS, RANDOM, LEFT_OUT})
"""The kinds with an `extra`."""

STEP_NAME = "step-{:06d}{}.safetensors"
_FILE = re.compile(r"step-(\d+)(?:-rank-(\d+))?\.safetensors")


class Event(NamedTuple):
    """One recorded value.

    Attributes:
        phase: One of `PHASES`.
        kind: One of `KINDS`.
        name: Canonical name of the module; in parentheses if it is not a module, such as `(loss)`.
        call: Number of the module's call in the phase, and of the token in a rollout.
        slot: Name of the input, output, parameter or state.
        value: The digest; `None` for arguments and the random state.
        autocast: Autocast dtype; empty without autocast.
        training: Whether the module was in training mode.
        extra: Hash of the random state, the arguments as JSON, the key of a token, or the number of calls left out, as
            a string.
    """

    phase: str
    kind: str
    name: str
    call: int
    slot: str
    value: Digest | None
    autocast: str
    training: bool
    extra: str


@dataclass
class Step:
    """The recording of one step.

    Attributes:
        number: The number of the step, from 1.
        events: The events in order of time.
        settings: Settings that differ from those of the recording, by module.
        rows: Hashes of the tokens of each sequence without padding, by phase and number of the pass.
        dropped: By phase the number of events that are missing because the file would have been too large.
        rank: The process.
    """

    number: int
    events: list[Event]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    rank: int = 0


@dataclass
class Recording:
    """A recording: the model, and the steps in their order.

    Attributes:
        path: Its folder.
        model: What `model.json` contains: `kinds` and `settings` by module, `shapes` by parameter, `environment`.
        steps: The path of each step's file by number and process.
    """

    path: Path
    model: dict[str, Any]
    steps: dict[int, dict[int, Path]]

    def step(self, number: int, rank: int = 0) -> Step:
        """Reads a step.

        Args:
            number: The number of the step.
            rank: The process.

        Raises:
            RecordingError: If the file is damaged.
        """
        return read_step(self.steps[number][rank], number, rank)

    def settings(self, step: Step) -> dict[str, dict[str, Any]]:
        """Returns the settings of each module in a step."""
        return {**self.model["settings"], **step.settings}


class Interned(dict[Any, int]):
    """Numbers for strings and other hashable values, in the order of first use. `interned[value]` is the number."""

    def __missing__(self, value: Any) -> int:
        """Numbers a value that was not used before."""
        self[value] = number = len(self)
        return number

    @property
    def by_number(self) -> list[Any]:
        """The values by number."""
        return list(self)


def write_model(folder: Path, model: Mapping[str, Any]) -> None:
    """Writes `model.json`.

    Args:
        folder: The folder of the recording; made if it does not exist.
        model: The description, see `Recording`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": VERSION, **model}, default=str)
    replace_file(folder / MODEL, lambda file: file.write(text.encode()))


def settings_of(folder: Path, model: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Returns the settings in `model.json`, to which those of further steps of the same model can be relative.

    Args:
        folder: The folder of the recording.
        model: The description of the model now.

    Returns:
        The settings by module, or `None` if the file is missing or describes another model or environment.
    """
    try:
        known = read_json(folder / MODEL)
    except (OSError, ValueError):  # it is written again
        return None
    now = json.loads(json.dumps({"version": VERSION, **model}, default=str))
    found = known.pop("settings", None)
    return found if known == {name: value for name, value in now.items() if name != "settings"} else None


def remove_steps(folder: Path, first: int = 0) -> None:
    """Removes recorded steps.

    Args:
        folder: The folder of the recording.
        first: The number of the first step to remove.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and int(match[1]) >= first:
            path.unlink()


def read_step(path: Path, number: int, rank: int = 0) -> Step:
    """Reads the file of a step.

    Args:
        path: Path of the file.
        number: The number of the step.
        rank: The process.

    Raises:
        RecordingError: If the file is damaged.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata()
            tables = json.loads(metadata["tables"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        events = list(_events(tables, arrays))
        return Step(number, events, tables["settings"], tables["rows"], json.loads(metadata["dropped"]), rank)
    except (SafetensorError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} is not a complete recording of a step: {error}. Record the run again") from error


def _events(tables: dict[str, Any], arrays: dict[str, Any]) -> Iterator[Event]:
    ends = np.cumsum(arrays["lengths"].astype(np.int64))
    starts, kinds = ends - arrays["lengths"], arrays["kinds"]
    digests = [
        Digest(tables["dtypes"][kinds[i, 0]], tuple(tables["shapes"][kinds[i, 1]]), int(arrays["hashes"][i]),
               float(arrays["stats"][i, 0]), int(arrays["stats"][i, 1]), arrays["samples"][starts[i] : ends[i]])
        for i in range(len(ends))
    ]  # fmt: skip
    extras = arrays["extra"].tolist()[::-1]
    for codes, places in zip(arrays["codes"].tolist(), arrays["places"].tolist(), strict=True):
        phase, kind, autocast, training = codes
        name, call, slot, value = places
        extra = extras.pop() if KINDS[kind] in WITH_EXTRA else 0
        detail = tables["arguments"][extra] if KINDS[kind] == ARGUMENTS else str(extra)
        yield Event(
            PHASES[phase], KINDS[kind], tables["names"][name], call, tables["slots"][slot],
            digests[value] if value >= 0 else None, tables["autocasts"][autocast], bool(training), detail,
        )  # fmt: skip


def folder_of(path: Path) -> Path | None:
    """Returns the folder with the recording of a run folder, or of the folder itself; `None` if there is none."""
    return next((place for place in (path / FOLDER, path) if (place / MODEL).is_file()), None)


def read_recording(path: str | Path) -> Recording:
    """Opens a recording.

    Args:
        path: A run's `output_dir`, its folder `recordings`, or the folder that was passed to `record`.

    Returns:
        The recording; its steps are read on demand.

    Raises:
        RecordingError: If there is no recording, or it was made by another version of the format.
    """
    given = Path(path)
    folder = folder_of(given)
    if folder is None:
        what = "has no recordings" if given.is_dir() else "is not a folder"
        raise RecordingError(
            f"{given} {what}. Record the run: write record_steps: [1] in its recipe (`record_steps=[1]` in its "
            "config), or run it in `safe_trainers.record(trainer, PATH)`"
        )
    try:
        model = read_json(folder / MODEL)
    except (OSError, ValueError) as error:
        raise RecordingError(f"{folder / MODEL} cannot be read: {error}. Record the run again") from error
    if model.get("version") != VERSION:
        raise RecordingError(
            f"{folder} has version {model.get('version')} of the format, and this release reads {VERSION}. "
            "Record the run again"
        )
    missing = [name for name in ("kinds", "settings", "shapes") if not isinstance(model.get(name), dict)]
    if missing:
        raise RecordingError(f"{folder / MODEL} is not complete: it has no {missing[0]}. Record the run again")
    steps: dict[int, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match:
            steps.setdefault(int(match[1]), {})[int(match[2] or 0)] = file
    if not steps:
        raise RecordingError(f"{folder} has no steps: the run ended before the first step of `record_steps`")
    return Recording(folder, model, steps)

"""Writes the file of a step, and makes it fit: samples are thinned first, then events are left out by importance."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from . import storage
from .digest import thinned
from .storage import KINDS, PHASES, VERSION


_PHASE, _KIND, _NAME, _CALL, _SLOT, _VALUE, _AUTOCAST, _TRAINING = range(8)
"""The columns of events."""
_EVENT_BYTES, _EXTRA_BYTES, _VALUE_BYTES, _SAMPLE_BYTES = 20, 8, 34, 4
_HALVINGS = 4
"""How often a sample is halved before events are left out."""
_STEP, _WEIGHTS, _INSIDE = range(3)
"""Importance, the first most: the model from outside, loss, gradients and optimizer; the weights; and what happens
inside the model, its first calls first."""

Array = np.ndarray[Any, Any]


def most_bytes(passes: int, modules: int) -> int:
    """Returns the largest size of the file of a step.

    Args:
        passes: Passes of the model: micro-batches and scored batches. A rollout counts as one.
        modules: Modules that are called.
    """
    return int(storage.MOST_BYTES * max(1, passes) * max(1.0, modules / storage.MOST_MODULES))


def write_step(folder: Path, number: int, rank: int, columns: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Writes the file of a step; keeps fewer samples, and then fewer events, if it would be too large.

    Args:
        folder: The folder of the recording.
        number: The number of the step.
        rank: The number of the process.
        columns: `events`, (E, 8) int32; `extra`, (E,) int64; `hashes`, (V,) int64; `stats`, (V, 2) float64;
            `kinds`, (V, 2) int32; `samples`, V arrays of float32.
        tables: The values that the numbers stand for, `settings`, `rows`, and `passes` and `modules` of `most_bytes`.
    """
    written = json.dumps({**tables, "version": VERSION}, default=str)
    escaped = len(written) + written.count('"') + written.count("\\")  # as a string in the JSON of the file's header
    room = most_bytes(tables["passes"], tables["modules"]) - escaped - 2000
    kept, sizes = _fitting(columns, tables, room)
    events, extra = columns["events"][kept], columns["extra"][kept]
    used = np.unique(events[events[:, _VALUE] >= 0, _VALUE])
    numbers = np.full(len(sizes) + 1, -1, np.int32)  # the last one stays -1, for events without a value
    numbers[used] = np.arange(len(used))
    thin = [thinned(columns["samples"][value], int(sizes[value])) for value in used]
    tensors = {
        "codes": events[:, [_PHASE, _KIND, _AUTOCAST, _TRAINING]].astype(np.uint8),
        "places": np.column_stack([events[:, [_NAME, _CALL, _SLOT]], numbers[events[:, _VALUE]]]),
        "extra": extra[_has_extra(events)],
        "hashes": columns["hashes"][used],
        "stats": columns["stats"][used],
        "kinds": columns["kinds"][used],
        "lengths": np.array([len(sample) for sample in thin], np.int16),
        "samples": np.concatenate([*thin, np.zeros(0, np.float32)]),
    }
    dropped = Counter(PHASES[phase] for phase in columns["events"][~kept, _PHASE])
    metadata = {"tables": written, "dropped": json.dumps(dropped)}
    content = save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata)
    name = storage.STEP_NAME.format(number, f"-rank-{rank}" if rank else "")
    temporary = folder / f".{name}.part"
    temporary.write_bytes(content)  # not synced to the disk, which takes milliseconds
    temporary.replace(folder / name)


def _fitting(columns: Mapping[str, Any], tables: Mapping[str, Any], room: int) -> tuple[Array, Array]:
    """Chooses what is written.

    Args:
        columns: As `write_step` takes them.
        tables: As `write_step` takes them.
        room: The bytes for events and values.

    Returns:
        Which events are kept, (E,) bool; and the size of the sample of each value, (V,).
    """
    events, values = columns["events"], columns["events"][:, _VALUE]
    sizes = np.array([len(sample) for sample in columns["samples"]], np.int64)
    extras = _has_extra(events)
    fixed = len(events) * _EVENT_BYTES + int(extras.sum()) * _EXTRA_BYTES + len(sizes) * _VALUE_BYTES
    if fixed + int(sizes.sum()) * _SAMPLE_BYTES <= room:
        return np.ones(len(events), bool), sizes
    ranks = _importance(events, tables["names"], tables["slots"])
    of_values = np.full(len(sizes), np.iinfo(np.int64).max)
    np.minimum.at(of_values, values[values >= 0], ranks[values >= 0])
    for least in [_INSIDE] * _HALVINGS + [_STEP] * _HALVINGS:
        if fixed + int(sizes.sum()) * _SAMPLE_BYTES <= room:
            break
        sizes = np.where((of_values >= least) & (sizes > 4), (sizes + 1) // 2, sizes)
    order = np.argsort(ranks, kind="stable")
    ordered, first = values[order], np.zeros(len(order), bool)
    first[np.unique(ordered, return_index=True)[1]] = True
    own = np.where(first & (ordered >= 0), _VALUE_BYTES + _SAMPLE_BYTES * np.append(sizes, 0)[ordered], 0)
    needed = np.cumsum(_EVENT_BYTES + extras[order] * _EXTRA_BYTES + own)
    kept = np.zeros(len(order), bool)
    kept[order[needed <= room]] = True
    return kept, sizes


def _importance(events: Array, names: list[str], slots: list[str]) -> Array:
    """The importance of each event, (E,): the smallest number is the most important."""
    kinds, found = events[:, _KIND], _INSIDE + events[:, _CALL].astype(np.int64)
    found[_is_of(kinds, storage.WEIGHT, storage.BUFFER, storage.DERIVED)] = _WEIGHTS
    outside = np.array([not name or name.startswith("(") for name in names], bool)[events[:, _NAME]]
    of_parameter = np.array([slot.endswith(".grad") for slot in slots], bool)[events[:, _SLOT]]
    gradients = of_parameter & _is_of(kinds, storage.GRADIENT)
    found[outside | gradients | _is_of(kinds, storage.STATE, storage.UPDATED, storage.LEFT_OUT)] = _STEP
    return found


def _has_extra(events: Array) -> Array:
    return _is_of(events[:, _KIND], *storage.WITH_EXTRA)


def _is_of(kinds: Array, *names: str) -> Array:
    """Which kinds are one of some kinds, (E,) bool."""
    return np.isin(kinds, [KINDS.index(name) for name in names])

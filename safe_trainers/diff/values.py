"""The digests of the tensors of a step. A tensor that several modules receive or return is measured once."""

import weakref
from typing import Any

import numpy as np
import torch

from . import digest
from .storage import Interned


MOST_WAITING, MOST_ELEMENTS = 256, 2**20
"""Small tensors, and their elements, that are copied before they are measured together."""
MOST_OF_STATE = 1024
"""Values of each tensor of the optimizer's state that are recorded."""


class Values:
    """Digests by number.

    Attributes:
        dtypes: Dtypes by number.
        shapes: Shapes by number.
    """

    def __init__(self) -> None:
        self.dtypes, self.shapes = Interned(), Interned()
        self._values: list[tuple[Any, Any, Any]] = []
        self._kinds: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int, torch.Tensor]] = []  # number of the first value, count of rows, tensor
        self._elements = 0
        self._seen: dict[int, tuple[Any, int, int]] = {}

    def add(self, tensor: torch.Tensor, known: bool = True, final: bool = False) -> int:
        """Returns the number of a tensor's digest.

        A tensor that was not changed since is not measured again.

        Args:
            tensor: The tensor.
            known: Whether its version tells if it was changed; optimizers may change parameters without a new version.
            final: Whether it stays as it is until the digests are read, so that no copy is needed.
        """
        version = -1 if not known or tensor.is_inference() else tensor._version
        seen = self._seen.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1] == version >= 0:
            return seen[2]
        number = len(self._values)
        flat = digest.plain(tensor)
        if flat.is_cpu and 0 < flat.numel() <= digest.BATCHED:
            copied = flat if final or flat.data_ptr() != tensor.data_ptr() else flat.clone()
            self._values.append((0, (), ()))
            self._wait(number, 1, copied)
        else:
            self._values.append(digest.measure(flat))
        self._kinds.append((self.dtypes[tensor.dtype], self.shapes[tensor.shape]))
        if version >= 0:
            self._seen[id(tensor)] = weakref.ref(tensor), version, number
        elif seen is not None:
            del self._seen[id(tensor)]
        return number

    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds the digests of the rows of a matrix, which is not shared, and returns the number of the first."""
        first, (count, width) = len(self._values), rows.shape
        self._kinds += [(self.dtypes[rows.dtype], self.shapes[(width,)])] * count
        if rows.is_cpu:
            self._values += [(0, (), ())] * count
            self._wait(first, count, rows)
        else:
            self._values += [digest.measure(row) for row in rows]
        return first

    def columns(self) -> dict[str, Any]:
        """Returns the digests as `storage.write_step` takes them, read from their devices."""
        self._measure()
        hashes, stats, samples = _fetched(self._values)
        return {
            "hashes": hashes,
            "stats": stats,
            "kinds": np.array(self._kinds, np.int32).reshape(-1, 2),
            "samples": samples,
        }

    def _wait(self, first: int, count: int, tensor: torch.Tensor) -> None:
        self._waiting.append((first, count, tensor))
        self._elements += tensor.numel()
        if len(self._waiting) >= MOST_WAITING or self._elements >= MOST_ELEMENTS:
            self._measure()

    def _measure(self) -> None:
        """Measures the small tensors that were copied; large ones are measured at once, to copy nothing large."""
        measured = iter(digest.measure_many([(tensor, count) for _, count, tensor in self._waiting]))
        for first, count, _ in self._waiting:
            for index in range(first, first + count):
                self._values[index] = next(measured)
        self._waiting.clear()
        self._elements = 0


def sample_of_state(held: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Returns values of the state of a parameter at a fixed stride, float32; all would take as long as a step."""
    flats = [digest.plain(tensor).view(-1) for _, tensor in held]
    steps = [max(1, -(-flat.numel() // MOST_OF_STATE)) for flat in flats]
    return torch.cat([(flat[::step] if step > 1 else flat).float() for flat, step in zip(flats, steps, strict=True)])


def _fetched(values: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, list[Any]]:
    """Reads all measured values from their devices at once: hashes (V,), stats (V, 2), samples."""
    hashes, stats, samples = (
        np.zeros(len(values), np.int64),
        np.zeros((len(values), 2)),
        [np.zeros(0, np.float32)] * len(values),
    )
    waiting = []
    for index, (value, measured, sample) in enumerate(values):
        if isinstance(value, torch.Tensor):
            waiting.append(index)
        else:
            hashes[index], stats[index], samples[index] = value, measured, sample
    for device in {values[index][0].device for index in waiting}:
        here = [index for index in waiting if values[index][0].device == device]
        hashes[here] = torch.stack([values[index][0] for index in here]).cpu().numpy()
        stats[here] = torch.stack([values[index][1] for index in here]).cpu().numpy()
        joined = torch.cat([values[index][2] for index in here]).cpu().numpy()
        lengths = [len(values[index][2]) for index in here]
        for index, part in zip(here, np.split(joined, np.cumsum(lengths)[:-1]), strict=True):
            samples[index] = part
    return hashes, stats, samples

"""The most bytes of tensors that were alive at one time."""

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is entered, and when they are freed.

    torch keeps no peak for the CPU, and the process's resident memory holds everything else too; this is exact.

    Attributes:
        now: Bytes alive that were made inside, less bytes of the watched tensors that were freed.
        peak: The largest value of `now`.
    """

    def __init__(self, watched: Any = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        self.watch(watched)
        self.now = self.peak = 0

    def watch(self, tensors: Any) -> None:
        """Counts tensors too that no operation has given back, as weights that were read from a file."""
        for tensor in tensors:
            self._watch(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._watch(leaf)
        self.peak = max(self.peak, self.now)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def alive_at_the_loss(trainer: Any) -> int:
    """Trains, and returns the bytes that were alive, of those that training has made, when its last loss began."""
    found = []
    compute_loss = trainer.compute_loss

    def watching(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        found.append(live.now)
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = watching
    with LiveBytes() as live:
        trainer.train()
    return found[-1]

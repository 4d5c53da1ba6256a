"""Records what the routers of a model choose, and compares later passes with the record or makes them choose the same.

A record has K integers for each token: the choices of all routers, in the order in which they run. A router's call
gets the tokens of some rows. In scoring, which may be done in chunks, the calls of a router take the rows of the
record in order. Calls after the last row are those of gradient checkpointing, which runs layers again in the backward
pass, the last chunk first.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.dtypes import to_torch
from ..core.errors import PrecisionError, refuse
from ..model.choices import Choice, Choosing
from ..model.parts import unwrap
from ..model.routers import Routers, unknown


class Recorder:
    """Records the choices of one call of `generate`.

    Args:
        routers: The routers.
        rows: Number of sequences, B.

    Attributes:
        width: Number of prompt tokens in the record, padding included. `finish` sets it.
    """

    def __init__(self, routers: Routers, rows: int) -> None:
        self._routers, self._rows = routers, rows
        self.width = 0
        self._now: list[torch.Tensor] = []  # the choices of this forward pass so far, each (B * S, k)
        self._parts: list[torch.Tensor] = []  # of each forward pass, (B, S, K)
        self._call = 0  # calls of `topk` in the router that runs

    def begin(self, number: int) -> None:
        """Called when a router begins to run."""
        self._call = 0
        if number == 0:
            self._now = []

    def choose(self, number: int, choice: Choice) -> Any:
        """Records a choice, which stays as it is."""
        self._call += 1
        if self._call - 1 not in self._routers.found[number].calls or choice.rows % self._rows:
            return None
        result = choice.run(choice.scores)
        self._now.append(result[1].reshape(choice.rows, choice.count))
        if number == len(self._routers.found) - 1 and sum(c.shape[1] for c in self._now) == self._routers.width:
            packed = torch.cat(self._now, dim=1).to(self._routers.dtype)
            self._parts.append(packed.view(self._rows, -1, packed.shape[1]))
            self._now = []
        return result

    def finish(self) -> torch.Tensor | None:
        """Returns the record of all tokens that the model got, (B, S, K); `None` if nothing was recorded."""
        kept: list[torch.Tensor] = []
        length = 0
        for part in self._parts:
            again = bool(kept) and part.shape[1] == length + 1  # without a cache, all tokens are passed in each step
            kept.append(part[:, -1:] if again else part)
            length += kept[-1].shape[1]
            if len(kept) == 1 or kept[-1].shape[1] > 1:  # a prompt may be passed in several chunks
                self.width = length
        return torch.cat(kept, dim=1) if kept else None


class Follower:
    """Compares the choices of a pass with a record, and replaces them if asked to.

    Where a router chooses the recorded experts itself, its own choice stays, in its own order, so that such
    tokens keep their bits. Tokens without a record keep the router's choice too.

    Args:
        routers: The routers.
        record: The record of the tokens of all rows, (B, T, K).
        replays: Whether the record replaces the choices.
        counts_ties: Whether to count near ties.

    Attributes:
        ties: Of each router, the number of tokens whose last chosen score is within the spacing of the router's dtype
            of the next one, and the number of tokens, (2,) float64; empty if they are not counted.
    """

    def __init__(self, routers: Routers, record: torch.Tensor, replays: bool, counts_ties: bool = False) -> None:
        self._routers, self._record, self._replays = routers, record, replays
        self._unknown = unknown(record.dtype)
        self._calls = [_Calls(columns) for columns in _columns(routers)]
        self._counts_ties = counts_ties
        self.ties: dict[int, torch.Tensor] = {}

    def begin(self, number: int) -> None:
        """Called when a router begins to run."""
        calls = self._calls[number]
        calls.rows, calls.choices, calls.call = None, 0, 0

    def choose(self, number: int, choice: Choice) -> Any:
        """Compares a choice with the record.

        Returns:
            What `topk` returns; `None` to let it choose.

        Raises:
            PrecisionError: If the choice is to be replaced, and the pass has other tokens than the record.
        """
        calls, (of, length, _) = self._calls[number], self._record.shape
        calls.call += 1
        if calls.call - 1 not in self._routers.found[number].calls:
            return None
        if choice.rows % length or not calls.take(choice.rows // length, of):
            if not self._replays:
                calls.lost = True
                return None
            given = f"{choice.rows} tokens in {self._routers.found[number].name}"
            raise PrecisionError([refuse("routes-do-not-fit", given, rows=of, length=length)])
        first, last = calls.columns[calls.choices]
        start, rows = calls.rows or (0, 0)
        recorded = self._record[start : start + rows, :, first:last].reshape(choice.rows, last - first).long()
        known = recorded[:, :1] != self._unknown  # (N, 1)
        result = None if self._replays else choice.run(choice.scores)
        live = choice.live() if result is None else result[1]
        own = live.reshape(choice.rows, last - first)
        differs = known & (_ordered(own) != _ordered(recorded)).any(1, keepdim=True)  # (N, 1)
        final = calls.choices == len(calls.columns) - 1
        if not calls.again and (final or self._replays):
            calls.note(differs.view(rows, length), calls.choices > 0 and self._replays)
        if self._counts_ties and final and not calls.again:
            self._count_ties(number, choice, known)
        calls.choices += 1
        return choice.with_indices(torch.where(differs, recorded, own).view_as(live)) if result is None else result

    def differing(self) -> torch.Tensor | None:
        """Returns for which tokens each router's own choice was not the recorded one, (B, T, R); `None` if unknown."""
        found = [call.joined(self._record.shape[0]) for call in self._calls]
        return None if any(part is None for part in found) else torch.stack(found, dim=-1)  # type: ignore[arg-type]

    @property
    def known(self) -> torch.Tensor:
        """Which tokens have a record, (B, T)."""
        return self._record[:, :, 0] != self._unknown

    def _count_ties(self, number: int, choice: Choice, known: torch.Tensor) -> None:
        router = self._routers.found[number]
        if choice.count >= choice.scores.shape[-1]:
            return
        scores = choice.scores.detach().float().reshape(choice.rows, -1)
        values = scores.topk(choice.count + 1, dim=-1)[0][:, -2:]
        near = values[:, 0] - values[:, 1] <= torch.finfo(to_torch(router.compute)).eps * values[:, 0].abs()
        counted = torch.stack([(near & known[:, 0]).sum(), known.sum()]).double()
        self.ties[number] = self.ties[number] + counted if number in self.ties else counted


class _Calls:
    """The calls of one router in a pass.

    Args:
        columns: Where in the record each choice of a call begins and ends.
    """

    def __init__(self, columns: list[tuple[int, int]]) -> None:
        self.columns = columns
        self.call = 0  # calls of `topk` in the call that runs
        self.choices = 0  # how many of them were choices
        self.rows: tuple[int, int] | None = None  # its first row, and the number of rows
        self.again = False  # whether it runs again in the backward pass
        self.lost = False
        self._chunks: list[tuple[int, int]] = []
        self._next = 0
        self._differs: list[torch.Tensor] = []

    def take(self, rows: int, of: int) -> bool:
        """Decides which rows of the record the call that runs has got; returns whether there are such rows."""
        if self.rows is not None:
            return self.rows[1] == rows
        self.again = self._next >= of
        if not self.again:
            self.rows = (self._next, rows)
            self._chunks.append(self.rows)
            self._next += rows
            return self._next <= of
        self.rows = self._chunks.pop() if len(self._chunks) > 1 else self._chunks[0]
        return self.rows[1] == rows

    def note(self, differs: torch.Tensor, adds: bool) -> None:
        """Keeps for which tokens the choice differs, (b, T)."""
        if adds:
            self._differs[-1] = self._differs[-1] | differs
        else:
            self._differs.append(differs)

    def joined(self, rows: int) -> torch.Tensor | None:
        """Returns for which tokens of all rows the choice differs, (B, T); `None` if the pass was another one."""
        return None if self.lost or self._next != rows else torch.cat(self._differs)


class Tape:
    """Passes the choices of a model's routers to a recorder or a follower.

    Args:
        model: The model, possibly wrapped.
        routers: Its routers.
    """

    def __init__(self, model: nn.Module, routers: Routers) -> None:
        base = unwrap(model)
        self._numbers = {base.get_submodule(router.name): number for number, router in enumerate(routers.found)}
        self._taken: Recorder | Follower | None = None
        self._modes: list[Choosing] = []
        self._handles: list[RemovableHandle] = []

    def follow(self, taken: Recorder | Follower | None) -> None:
        """Passes choices to an object from now on.

        Args:
            taken: The object; `None` passes them to none, and removes the hooks.
        """
        self._taken = taken
        while self._modes:  # those of a router that was interrupted
            self._leave_mode()
        for handle in self._handles:  # a replay of a loss may have deleted their hooks
            handle.remove()
        self._handles = []
        for module in () if taken is None else self._numbers:
            # Functions, because a `deepcopy` of the model would copy the object of a bound method.
            self._handles.append(module.register_forward_pre_hook(lambda m, _: self._enter(m)))
            self._handles.append(module.register_forward_hook(lambda m, *_: self._leave(m), always_call=True))

    def _enter(self, module: nn.Module) -> None:
        if module not in self._numbers or self._taken is None:  # a copy of the model has the hooks too
            return
        number = self._numbers[module]
        self._taken.begin(number)
        mode = Choosing(partial(self._taken.choose, number))
        mode.__enter__()
        self._modes.append(mode)

    def _leave(self, module: nn.Module) -> None:
        if module in self._numbers and self._modes:
            self._leave_mode()

    def _leave_mode(self) -> None:
        self._modes.pop().__exit__(None, None, None)


def _columns(routers: Routers) -> list[list[tuple[int, int]]]:
    """Returns where in a record each choice of each router begins and ends."""
    columns, start = [], 0
    for router in routers.found:
        own = []
        for count in router.counts:
            own.append((start, start + count))
            start += count
        columns.append(own)
    return columns


def _ordered(indices: torch.Tensor) -> torch.Tensor:
    """Returns indices, (N, k), in ascending order."""
    return indices if indices.shape[1] == 1 else indices.sort(dim=1)[0]

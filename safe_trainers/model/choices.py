"""Sees, and may replace, what `torch.topk` chooses inside of a block.

Routers of transformers that choose the largest scores call `torch.topk`, and compute the weights of the experts
from the values or the indices that it returns. Whoever decides these decides the routing, and the family's own code
still computes the weights from the live scores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


_TOPK = (torch.topk, torch.Tensor.topk)
_PRODUCTS = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm)


@dataclass(frozen=True)
class Choice:
    """A call of `topk` along the last dimension.

    Attributes:
        scores: What is chosen from, (..., W).
        count: Number of largest entries, k.
        run: Makes the call with other scores.
    """

    scores: torch.Tensor
    count: int
    run: Callable[[torch.Tensor], Any]

    @property
    def rows(self) -> int:
        """Number of rows: the product of the leading dimensions."""
        return self.scores.shape[:-1].numel()

    def live(self) -> torch.Tensor:
        """Returns the indices that `topk` chooses, (..., k) int64, without a gradient."""
        chosen: torch.Tensor = self.run(self.scores.detach())[1]
        return chosen

    def with_indices(self, indices: torch.Tensor) -> Any:
        """Returns what `topk` would return if it chose other indices: the values are gathered from the scores.

        Args:
            indices: (..., k) int64.
        """
        return torch.return_types.topk((self.scores.gather(-1, indices), indices))


class Choosing(TorchFunctionMode):
    """Passes calls of `topk` along the last dimension to a function while a block runs.

    Args:
        choose: Gets the call, and returns what the call returns; `None` to let `topk` choose.
        product: Gets the result of each matrix product, if it is not `None`.
    """

    def __init__(self, choose: Callable[[Choice], Any], product: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self._choose, self._product = choose, product

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs a function of torch, or lets `choose` answer."""
        kwargs = kwargs or {}
        if func in _TOPK:
            choice = _choice(func, args, kwargs)
            result = None if choice is None else self._choose(choice)
            if result is not None:
                return result
        result = func(*args, **kwargs)
        if self._product is not None and func in _PRODUCTS:
            self._product(result)
        return result


def _choice(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Choice | None:
    """Returns the call if it chooses the largest entries along the last dimension."""
    named = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | dict(kwargs)
    scores, dim = named.pop("input", None), named.get("dim", -1)
    if not isinstance(scores, torch.Tensor) or "out" in named or not named.get("largest", True):
        return None
    if not scores.ndim or dim not in (-1, scores.ndim - 1):
        return None
    return Choice(scores, int(named["k"]), lambda tensor: func(tensor, **named))

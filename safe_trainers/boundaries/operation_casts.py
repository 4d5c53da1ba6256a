"""Casts the arguments of single operations that PyTorch refuses because of their dtypes.

Hooks reach the inputs of layers, but not operations between layers: a product with a parameter of the module itself
(`F.conv2d(x, self.weight)`), or features that are written into text embeddings by a method of any name. A forward pass
that runs in `MatchDtypes` repeats such an operation with arguments of one dtype. Operations that work are not changed.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..core.patches import replace, replaced_by
from ..model.parts import is_quantized
from ..model.trial_forward import is_dtype_error
from .cast_hooks import map_floating


_PATCH = "operations"
_INTO_FIRST = ("scatter", "index_", "__setitem__")
"""Parts of the names of operations whose result has the dtype of their first argument."""


class MatchDtypes(TorchFunctionMode):
    """Repeats operations that fail with floating-point arguments of several dtypes, with arguments of one dtype.

    Arguments are cast to the dtype of the tensor that an operation writes into, or of its parameter. Otherwise they
    are cast to the half-precision dtype among them. If that fails too, they are cast to float32.

    Args:
        found: Called with each operation that was repeated; `None` if they are not recorded.
    """

    def __init__(self, found: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not is_dtype_error(error):
                raise
            for dtype in _targets(func, args, kwargs):
                try:
                    result = func(*_cast(args, dtype), **_cast(kwargs, dtype))
                except RuntimeError:
                    continue  # the first error is raised if no dtype works
                if self._found is not None:
                    self._found(func)
                return result
            raise error


def guard_operations(module: nn.Module) -> bool:
    """Runs the forward pass of a module in `MatchDtypes`; `torch.compile` leaves the module out.

    Args:
        module: The module.

    Returns:
        Whether the method was replaced; `False` if it was replaced before, or is not a method of the module's class.
    """
    function = getattr(module.forward, "__func__", None)
    if function is None or _PATCH in replaced_by(module, "forward"):
        return False

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with MatchDtypes():
            return function(self, *args, **kwargs)

    # A compiled graph would not contain the mode.
    replace(_PATCH, module, "forward", MethodType(torch.compiler.disable(forward), module))
    return True


class Places:
    """Collects the innermost modules of a model whose forward pass ran operations that had to be repeated.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.operations: dict[str, str] = {}
        """The first repeated operation by the name of the module."""

    def add(self, operation: Any) -> None:
        """Records the module in whose forward pass this is called.

        Args:
            operation: The operation.
        """
        name = next((self._names[id(m)] for m in running(inspect.currentframe()) if id(m) in self._names), None)
        if name is not None:
            self.operations.setdefault(name, getattr(operation, "__name__", str(operation)).strip("_"))


def running(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yields the modules whose `forward` method runs in a frame or in its callers, innermost first.

    Args:
        frame: A frame of the current thread.
    """
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


def _targets(func: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[torch.dtype]:
    """Yields the dtypes to which the arguments of a failed operation may be cast; none if they have one dtype."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_floating(collect, (*args, *kwargs.values()))
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2 or kwargs.get("out") is not None or any(map(is_quantized, tensors)):
        return  # a cast of `out` would lose the result
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or any(part in name for part in _INTO_FIRST):
        yield tensors[0].dtype
        return  # a cast of the tensor that is written into would lose the result
    weight = next((tensor for tensor in tensors if isinstance(tensor, nn.Parameter)), None)
    half = next((tensor for tensor in tensors if tensor.dtype.itemsize == 2), tensors[0])
    yield (half if weight is None else weight).dtype
    yield torch.float32


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_floating(lambda tensor: tensor.to(dtype), value)

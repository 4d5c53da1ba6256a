"""Makes the results of matrix products depend on the order in which a kernel sums.

Kernels may sum in another order for another number of rows. In half precision the results are rounded so much that
two orders give the same bits for most values, and other bits for a few: a comparison on one batch does not show the
difference. In the block of `OrderProbe`, each product is computed a second time, with operands of the same shapes and
dtypes whose exact product is zero. That result is the rounding error alone, which almost every change of the order
changes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


_SPREAD = 14
"""Number of powers of two by which terms are scaled. Sums of terms of one size could be exact."""
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Matrix products, by the position of their first factor; what is before it is added to the product."""
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
)


class OrderProbe(TorchDispatchMode):
    """Adds rounding errors to the results of matrix products, convolutions and attention in a block.

    If a kernel sums equal rows in another order, their results in the block differ. Results and errors are scaled to
    between 0.5 and 1 in size first, so that neither is lost in the sum, and so that later operations depend on both.
    Other operations are computed as they are.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes one operation with other operands, if it is a product."""
        packet, kwargs = getattr(func, "overloadpacket", None), kwargs or {}
        if torch.is_inference_mode_enabled() and packet is not None:
            with self:  # in inference mode, operations that are made of others arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if packet in _PRODUCTS and args[_PRODUCTS[packet]].shape[-1] > 1:
            errors = func(*_product(args, _PRODUCTS[packet]), **kwargs)
        elif packet is _aten.convolution and args[1][0].numel() > 1 and not args[6]:  # not transposed
            errors = func(*_convolution(args), **kwargs)
        elif packet in _ATTENTION and args[2].shape[-2] > 1:
            errors = func(*_attention(args), **kwargs)
        else:
            return result
        if isinstance(result, torch.Tensor):
            return _mantissas(result) + _mantissas(errors)
        # The further results of attention are for its backward pass.
        return type(result)((_mantissas(result[0]) + _mantissas(errors[0]), *result[1:]))


def _product(args: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """Returns other factors of a product of matrices, (..., M, K) and (..., K, N), to which zeros are added."""
    left, right = args[first : first + 2]
    added = (torch.zeros_like(value) for value in args[:first])
    return (*added, _paired(left, -1, opposite=True), _paired(right, -2), *args[first + 2 :])


def _convolution(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns another input, (N, C, ...), another weight, (K, C / groups, ...), and no bias.

    The input repeats the first entries of an axis with alternating signs, so that entries cancel in every window,
    whether windows overlap or not. If windows have one entry, channels of a group cancel.
    """
    value, weight, bias, stride, padding, dilation, *rest = args
    axis = next((axis for axis, size in enumerate(weight.shape[2:], 2) if size > 1), 1)
    if axis > 1:
        value = _alternating(value, axis, weight.shape[axis] // 2, dilation[axis - 2])
    else:
        groups = value.shape[1] // weight.shape[1]
        value = _paired(value.unflatten(1, (groups, -1)), 2, opposite=True).flatten(1, 2)
    bias = None if bias is None else torch.zeros_like(bias)
    return (value, _paired(weight, axis, flipped=axis == 1), bias, stride, padding, dilation, *rest)


def _attention(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns other keys, of which two and two are equal and have the same weight, and values with opposite signs."""
    query, key, value, *rest = args
    return (query, _paired(key, -2), _paired(value, -2, opposite=True), *rest)


def _paired(value: torch.Tensor, axis: int, opposite: bool = False, flipped: bool = True) -> torch.Tensor:
    """Returns a tensor whose second half along an axis repeats the first; an odd entry at the end becomes zero.

    Args:
        value: The tensor; the result has its shape, dtype and strides.
        axis: The axis over which a kernel sums.
        opposite: Whether the second half has the opposite sign. Both are then scaled by powers of two.
        flipped: Whether the second half is in reverse order. Kernels that add sums of blocks would else find zero.
    """
    axis %= value.ndim
    half = value.shape[axis] // 2
    first = _mantissas(value.narrow(axis, 0, half))
    if opposite:
        first = first * _powers(first.shape[axis:], first)
    second = first.flip(axis) if flipped else first
    odd = torch.zeros_like(value.narrow(axis, 0, value.shape[axis] - 2 * half))
    return _with_strides(value, torch.cat([first, -second if opposite else second, odd], axis))


def _alternating(value: torch.Tensor, axis: int, size: int, dilation: int) -> torch.Tensor:
    """Returns a tensor that repeats its first entries along an axis, with the opposite sign every other time."""
    index = torch.arange(value.shape[axis], device=value.device) // dilation
    first = _mantissas(value.narrow(axis, 0, min(size, value.shape[axis])))
    first = first * _powers(first.shape[axis:], first)
    sign = 1 - 2 * (index // size % 2)
    repeated = first.index_select(axis, index % size) * sign.view(-1, *[1] * (value.ndim - axis - 1)).to(value.dtype)
    return _with_strides(value, repeated)


def _with_strides(value: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Returns a content in a tensor with the strides of another one, on which the choice of a kernel may depend."""
    if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return content
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(content)


def _powers(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """Returns powers of two that change from entry to entry."""
    exponents = torch.arange(shape.numel(), device=like.device) * 5 % _SPREAD
    return torch.exp2(exponents.float()).to(like.dtype).view(shape)


def _mantissas(value: torch.Tensor) -> torch.Tensor:
    """Returns the mantissas of a tensor with their signs, between 0.5 and 1 in size; zeros stay, NaN becomes 0."""
    return torch.frexp(value.float().nan_to_num()).mantissa.to(value.dtype)

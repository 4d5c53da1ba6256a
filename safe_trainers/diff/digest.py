"""Digests of tensors: a hash of the bytes, exact statistics, and a few sampled values.

The hash is a polynomial over the bits, modulo 2**64, with one base for rows and one for columns (the last dimension).
It is the same on every device, does not depend on strides, and composes: the hash of a fused projection follows from
the hashes of its parts (`joined_hash`).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


SAMPLES = 64
"""Most values that are kept of a tensor."""
EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The distance between 1 and the next larger number, by dtype."""
UNSEEN = 0.5
"""The distance in ulp of tensors with other bits and no difference in the sampled values."""

_ROWS, _COLUMNS = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95  # odd, so that a difference of one element never vanishes
_MODULUS = 2**64
_CHUNK = 2**22
_KEPT = 2**16
"""Size of the largest table of factors that is kept between recorded steps."""
_NUMPY = (torch.float32, torch.float64, torch.int64, torch.int32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digest:
    """What is recorded of a tensor.

    Attributes:
        dtype: Name of its dtype.
        shape: Its shape.
        hash: Hash of its bytes, a signed 64-bit integer.
        largest: The largest absolute value; NaN if an element is NaN.
        not_finite: The number of elements that are NaN or infinite.
        sample: At most `SAMPLES` of its values at a fixed stride, float32.
    """

    dtype: str
    shape: tuple[int, ...]
    hash: int
    largest: float
    not_finite: int
    sample: np.ndarray[Any, Any]

    @property
    def floating(self) -> bool:
        """Whether the tensor has a floating-point dtype of at least 16 bits."""
        return self.dtype in EPSILONS


def stride_of(count: int) -> int:
    """Returns the stride of the sampled values in a tensor with `count` elements.

    It is odd, so that the samples are spread over the columns of a tensor whose width is a power of 2.
    """
    return 1 if count <= SAMPLES else -(-count // SAMPLES) | 1


def _made(base: int, size: int) -> np.ndarray[Any, Any]:
    """`base ** i` modulo 2**64 for i < size, as int64."""
    made = np.full(size, base, dtype=np.uint64)
    made[0] = 1
    return np.multiply.accumulate(made).view(np.int64)


_small_table, _table = functools.cache(_made), functools.cache(_made)


@functools.cache
def _device_table(base: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_table(base, size).copy()).to(device)


def _size_of_table(count: int) -> int:
    """The next power of 2, so that the tables of all counts up to `_CHUNK` take at most 128 MiB."""
    return int(2 ** (count - 1).bit_length())


def _powers(base: int, count: int) -> np.ndarray[Any, Any]:
    size = _size_of_table(count)
    return (_small_table if size <= _KEPT else _table)(base, size)[:count]


def _device_powers(base: int, count: int, device: torch.device) -> torch.Tensor:
    return _device_table(base, _size_of_table(count), device)[:count]


def forget_factors() -> None:
    """Frees the large tables of factors, which are kept while a step is recorded."""
    for cache in (_table, _device_table):
        cache.cache_clear()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without gradient, contiguous, with complex numbers as pairs, and this rank's shard of it."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor as integers, (rows, columns)."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    return tensor.reshape(-1, columns).view(_BITS[tensor.element_size()])


def hash_of(tensor: torch.Tensor) -> torch.Tensor | int:
    """Hashes the bytes of a tensor.

    Args:
        tensor: A contiguous tensor that is not complex.

    Returns:
        A signed 64-bit integer; on another device than the CPU a tensor with one element.
    """
    if tensor.numel() == 0:
        return 0
    bits = _matrix(tensor)
    rows, columns = bits.shape
    step = max(1, _CHUNK // columns)
    places = [(row, column) for row in range(0, rows, step) for column in range(0, columns, _CHUNK)]
    if tensor.device.type == "cpu":
        array, found = bits.numpy(), 0
        with np.errstate(over="ignore"):
            for row, column in places:
                part = array[row : row + step, column : column + _CHUNK]
                # Widens a few elements at a time; `astype` and a product take two to three times as long.
                by_row = np.einsum("ij,j->i", part, _powers(_COLUMNS, part.shape[1]))  # (rows,)
                found += int(by_row @ _powers(_ROWS, len(part))) * _factor_of(row, column)
        return _signed(found)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for row, column in places:
        wide = bits[row : row + step, column : column + _CHUNK].to(torch.int64)
        sums = (wide * _device_powers(_COLUMNS, wide.shape[1], tensor.device)).sum(1)  # (rows,)
        total += (sums * _device_powers(_ROWS, len(sums), tensor.device)).sum() * _factor_of(row, column)
    return total


def _factor_of(row: int, column: int) -> int:
    """The factor of one element in the hash, signed."""
    return _signed(pow(_ROWS, row, _MODULUS) * pow(_COLUMNS, column, _MODULUS))


def joined_hash(hashes: list[int], sizes: list[int], rows: bool) -> int:
    """Returns the hash of tensors that are concatenated, from the hashes of the tensors.

    Args:
        hashes: The hash of each tensor.
        sizes: The size of each tensor in the dimension of the concatenation.
        rows: Whether that dimension is the first of two; otherwise it is the last.
    """
    base, offset, total = _ROWS if rows else _COLUMNS, 0, 0
    for value, size in zip(hashes, sizes, strict=True):
        total += value * pow(base, offset, _MODULUS)
        offset += size
    return _signed(total)


def _signed(value: int) -> int:
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS // 2 else value


def measure(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """Measures a tensor, without waiting for its device.

    Args:
        tensor: The result of `plain`.

    Returns:
        Hash; largest absolute value and count of values that are not finite, (2,) float64; sampled values, float32.
        NumPy arrays and integers on the CPU, otherwise tensors on the device.
    """
    if tensor.device.type != "cpu":
        if tensor.numel() == 0:
            return 0, np.zeros(2), np.zeros(0, np.float32)
        wide = tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.float()
        absolute = wide.abs().amax().double()
        counts = (tensor.numel() - wide.isfinite().sum()).double()
        return hash_of(tensor), torch.stack([absolute, counts]), tensor.view(-1)[:: stride_of(tensor.numel())].float()
    if tensor.numel() == 0:
        return 0, (0.0, 0.0), np.zeros(0, np.float32)
    array = (tensor if tensor.dtype in _NUMPY else tensor.float()).numpy()
    low, high = float(array.min()), float(array.max())  # both are NaN if any element is
    largest = max(-low, high) if low == low else math.nan
    count = 0 if math.isfinite(largest) else int(array.size - np.isfinite(array).sum())
    sample = array.reshape(-1)[:: stride_of(array.size)].astype(np.float32)
    return hash_of(tensor), (largest, float(count)), sample


BATCHED = 2**13
"""Tensors with at most this many elements are measured together; larger ones take less time alone."""


def measure_many(tensors: list[tuple[torch.Tensor, int]]) -> list[tuple[Any, Any, Any]]:
    """Measures small tensors on the CPU, those of one shape together: a fraction of the time of `measure` for each.

    Args:
        tensors: Results of `plain` on the CPU, not empty, of at most `BATCHED` elements each, and in how many rows,
            which are measured on their own, each is to be split.

    Returns:
        For each tensor or row what `measure` returns, with the same values.
    """
    groups: dict[tuple[torch.dtype, tuple[int, ...]], tuple[list[int], list[torch.Tensor]]] = {}
    total = 0
    for tensor, count in tensors:
        shape = tuple(tensor.shape) if count == 1 else tuple(tensor.shape[1:])
        members, parts = groups.setdefault((tensor.dtype, shape), ([], []))
        members.extend(range(total, total + count))
        parts.append(tensor.view(count, -1))
        total += count
    if not total:
        return []
    order: list[int] = []
    hashes: list[Any] = []
    lows: list[Any] = []
    highs: list[Any] = []
    samples: list[Any] = []
    arrays: list[tuple[Any, int]] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for (dtype, shape), (members, parts) in groups.items():
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)  # (tensors, elements)
            array = (flat if dtype in _NUMPY else flat.float()).numpy()
            arrays.append((array, len(order)))
            order += members
            hashes.append(np.einsum("ij,j->i", flat.view(_BITS[flat.element_size()]).numpy(), _factors(shape)))
            lows.append(array.min(1))
            highs.append(array.max(1))
            samples += list(array[:, :: stride_of(array.shape[1])].astype(np.float32))
        largest = np.maximum(-np.concatenate(lows, dtype=np.float64), np.concatenate(highs, dtype=np.float64))
    counts = np.zeros(total)  # both bounds are NaN if any element is
    for place in np.flatnonzero(~np.isfinite(largest)).tolist():
        array, first = next(pair for pair in reversed(arrays) if pair[1] <= place)
        counts[place] = array.shape[1] - np.isfinite(array[place - first]).sum()
    found: list[Any] = [None] * total
    stats = zip(largest.tolist(), counts.tolist(), strict=True)
    for index, *measured in zip(order, np.concatenate(hashes).tolist(), stats, samples, strict=True):
        found[index] = tuple(measured)
    return found


@functools.lru_cache(maxsize=256)
def _factors(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The factor of each element of a tensor in its hash, flat int64."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // columns
    with np.errstate(over="ignore"):
        return np.multiply.outer(_powers(_ROWS, rows), _powers(_COLUMNS, columns)).reshape(-1)


def ulp_distance(first: Digest, second: Digest) -> float:
    """Estimates the distance of two tensors.

    Args:
        first: The digest of one tensor.
        second: The digest of the other.

    Returns:
        0 for equal bits; infinity if the shapes or the numbers of values that are not finite differ, or if integers
        differ; otherwise the largest difference of the sampled values in units in the last place of the coarser dtype.
        The unit belongs to the larger of the value and the root mean square of the samples, so that values near zero
        do not count more than others. `UNSEEN` if no sampled value differs.
    """
    if first.hash == second.hash and (first.dtype, first.shape) == (second.dtype, second.shape):
        return 0.0
    if first.shape != second.shape or first.not_finite != second.not_finite:
        return math.inf
    if not (first.floating and second.floating):
        return math.inf
    size = min(len(first.sample), len(second.sample))
    if size == 0:
        return UNSEEN
    mine, theirs = thinned(first.sample, size), thinned(second.sample, size)
    finite = np.isfinite(mine) & np.isfinite(theirs)
    mine, theirs = mine[finite].astype(np.float64), theirs[finite].astype(np.float64)
    if not mine.size:
        return UNSEEN
    typical = float(np.sqrt(np.mean(np.square(mine)))) or float(np.sqrt(np.mean(np.square(theirs)))) or 1.0
    scale = np.maximum(np.maximum(np.abs(mine), np.abs(theirs)), typical)
    unit = max(EPSILONS[first.dtype], EPSILONS[second.dtype]) * np.exp2(np.floor(np.log2(scale)))
    return max(float(np.max(np.abs(mine - theirs) / unit)), UNSEEN)


def thinned(sample: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Returns every n-th value of a sample, at most `size`.

    n is a power of 2, so that samples of the same tensor that were thinned to two sizes have values in common.

    Args:
        sample: The sampled values.
        size: The most values, at least 1.
    """
    stride = 1
    while -(-len(sample) // stride) > size:
        stride *= 2
    return sample[::stride]


def rounded_to(digest: Digest) -> str | None:
    """Returns the half-precision dtype that all sampled values of a float32 tensor fit into; `None` if there is none.

    Fewer than 8 different values decide nothing.
    """
    sample = digest.sample[np.isfinite(digest.sample)]
    if digest.dtype not in ("float32", "float64") or len(np.unique(sample)) < 8:
        return None
    values = torch.from_numpy(np.ascontiguousarray(sample))
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if bool((values.to(dtype).float() == values).all()):
            return name
    return None

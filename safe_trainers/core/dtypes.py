"""The dtype parser of the package. It never guesses, and importing it does not import torch.

The package names dtypes with the strings `"float32"`, `"bfloat16"` and `"float16"`; `to_torch` converts them where
tensors are used.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import PrecisionError, Problem, nearest, refuse, warn


if TYPE_CHECKING:
    import torch

FLOAT32, BFLOAT16, FLOAT16, AUTO = "float32", "bfloat16", "float16", "auto"
HALVES = frozenset({BFLOAT16, FLOAT16})
"""The half-precision dtypes."""
SHORT = {FLOAT32: "fp32", BFLOAT16: "bf16", FLOAT16: "fp16"}
"""The short name of each dtype."""
KBIT = ("4bit", "8bit")
"""How bitsandbytes quantises, as in `ModelInventory.quantization`."""
FLOAT16_OVERFLOW = 65520.0
"""The smallest number that a cast to float16 rounds to infinity; the largest float16 is 65,504."""

_SPELLINGS = {spelling: name for name, short in SHORT.items() for spelling in (short, name, f"torch.{name}")}
_ALIASES = {"half": FLOAT16, "torch.half": FLOAT16, "16-mixed": FLOAT16, "bf16-mixed": BFLOAT16, "32-true": FLOAT32}
"""Spellings of PyTorch and Lightning, which are accepted and not advertised."""


def join_dtypes(dtypes: Iterable[str], empty: str = "") -> str:
    """Joins dtype names for a message, sorted and without duplicates: `"bfloat16 and float32"`.

    Args:
        dtypes: The names.
        empty: The result if there are none.
    """
    return " and ".join(sorted(set(dtypes))) or empty


def parse_dtype(value: "str | torch.dtype", *, field: str = "dtype", allow_auto: bool = True) -> str:
    """Parses a dtype. No spelling falls back to another dtype.

    Args:
        value: `"fp32"`, `"float32"`, `"torch.float32"`, and the same for bf16 (`"bfloat16"`) and fp16 (`"float16"`);
            a `torch.dtype` of these three; `"half"`, and Lightning's `"16-mixed"`, `"bf16-mixed"` and `"32-true"`; or
            `"auto"`.
        field: Name of the setting, for the error message.
        allow_auto: Whether `"auto"` is accepted.

    Returns:
        `"float32"`, `"bfloat16"`, `"float16"` or `"auto"`.

    Raises:
        PrecisionError: If `value` is anything else; the message lists the accepted values.
    """
    accepted = [*_SPELLINGS, *([AUTO] if allow_auto else [])]
    # `str(torch.float32)` is "torch.float32", a key of the table, so torch need not be imported.
    is_dtype = (type(value).__module__, type(value).__name__) == ("torch", "dtype")
    text = str(value) if is_dtype or isinstance(value, str) else None
    if text == AUTO and allow_auto:
        return AUTO
    if text in _SPELLINGS or text in _ALIASES:
        return {**_SPELLINGS, **_ALIASES}[text]
    suggestion = nearest(text, accepted) if text is not None else None
    raise PrecisionError(
        [
            refuse(
                "unknown-dtype",
                f"{field}={value!r}",
                value=value,
                accepted=", ".join(f'"{spelling}"' for spelling in accepted) + ", or the torch.dtype of each",
                field=field,
                suggestion=suggestion or FLOAT32,
            )
        ]
    )


def rename_torch_dtype(declared: Mapping[str, Any]) -> tuple[dict[str, Any], Problem | None]:
    """Replaces `torch_dtype` in `model_init_kwargs`, which TRL overrides with its default, by `dtype`.

    Args:
        declared: The `model_init_kwargs`; not modified.

    Returns:
        The arguments to use, and a warning if TRL would have ignored `torch_dtype`; a refusal if `dtype` is also set,
        to another dtype.

    Raises:
        PrecisionError: If both are set and one is not a dtype.
    """
    kept = {key: value for key, value in declared.items() if key != "torch_dtype"}
    older = declared.get("torch_dtype")
    if older is None:
        return kept, None
    given = f"model_init_kwargs={{'torch_dtype': {older!r}}}"
    dtype = kept.get("dtype")
    if dtype is None:
        return {**kept, "dtype": older}, warn("torch-dtype-renamed", given, dtype=older)
    names = [parse_dtype(value, field=f"model_init_kwargs[{name!r}]")
             for name, value in (("torch_dtype", older), ("dtype", dtype))]  # fmt: skip
    if names[0] == names[1]:
        return kept, None
    return kept, refuse("two-load-dtypes", f"{given} with 'dtype': {dtype!r}", dtype=dtype)


def to_torch(name: str) -> "torch.dtype":
    """Returns the `torch.dtype` of `"float32"`, `"bfloat16"` or `"float16"`."""
    import torch

    dtypes: dict[str, Any] = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
    return dtypes[name]


def from_torch(dtype: "torch.dtype") -> str:
    """Returns the name of any `torch.dtype`, such as `"float32"` or `"uint8"`."""
    return str(dtype).removeprefix("torch.")

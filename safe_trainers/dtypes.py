"""The one dtype parser of the package: strict, and without importing torch.

Inside the package a dtype that is *decided* is one of the canonical names `"float32"`, `"bfloat16"`, `"float16"`, so
that decisions stay plain values; `to_torch` turns a name into the `torch.dtype` where tensors are touched.
"""

from typing import TYPE_CHECKING, Any

from .errors import PrecisionError, nearest, refuse


if TYPE_CHECKING:
    import torch

FLOAT32, BFLOAT16, FLOAT16, AUTO = "float32", "bfloat16", "float16", "auto"
HALVES = frozenset({BFLOAT16, FLOAT16})
SHORT = {FLOAT32: "fp32", BFLOAT16: "bf16", FLOAT16: "fp16"}

_SPELLINGS = {spelling: name for name, short in SHORT.items() for spelling in (short, name, f"torch.{name}")}


def parse_dtype(value: "str | torch.dtype", *, field: str = "dtype", allow_auto: bool = True) -> str:
    """Reads a dtype, and never guesses one.

    Args:
        value: `"fp32"`, `"float32"`, `"torch.float32"`, and the same for bf16 (`"bfloat16"`) and fp16 (`"float16"`);
            a `torch.dtype` of these three; or `"auto"`.
        field: The name of the setting, for the error text.
        allow_auto: Whether `"auto"` is accepted.

    Returns:
        `"float32"`, `"bfloat16"`, `"float16"` or `"auto"`.

    Raises:
        PrecisionError: For anything else, with the list of what is accepted. No spelling falls back to another dtype.
    """
    accepted = [*_SPELLINGS, *([AUTO] if allow_auto else [])]
    # A `torch.dtype` prints as "torch.float32": the table has that spelling, so torch need not be imported to read it.
    is_dtype = (type(value).__module__, type(value).__name__) == ("torch", "dtype")
    text = str(value) if is_dtype or isinstance(value, str) else None
    if text == AUTO and allow_auto:
        return AUTO
    if text in _SPELLINGS:
        return _SPELLINGS[text]
    suggestion = nearest(text, accepted) if text is not None else None
    raise PrecisionError(
        [
            refuse(
                "unknown-dtype",
                f"{field}={value!r}",
                value=value,
                accepted=", ".join(f'"{spelling}"' for spelling in accepted) + ", and the torch.dtype of each",
                field=field,
                suggestion=suggestion or FLOAT32,
            )
        ]
    )


def to_torch(name: str) -> "torch.dtype":
    """The `torch.dtype` of a canonical name."""
    import torch

    dtypes: dict[str, Any] = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
    return dtypes[name]


def from_torch(dtype: "torch.dtype") -> str:
    """The canonical name of any `torch.dtype`, also of those that cannot be decided on (`"float64"`, `"uint8"`)."""
    return str(dtype).removeprefix("torch.")

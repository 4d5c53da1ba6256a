"""The weights that a model class declares to stay in float32."""

import re
from collections.abc import Callable

from torch import nn

from ..core.dtypes import FLOAT16, FLOAT32, HALVES
from ..model.parts import unwrap


def kept_in_float32(model: nn.Module, dtype: str) -> re.Pattern[str] | None:
    """Returns a pattern of the weights that `from_pretrained(..., dtype=dtype)` loads in float32; `None` if none."""
    lists = ["_keep_in_fp32_modules_strict"] * (dtype != FLOAT32) + ["_keep_in_fp32_modules"] * (dtype == FLOAT16)
    names = sorted({name for attribute in lists for name in getattr(model, attribute, None) or ()})
    return re.compile("|".join(rf"(^|\.){name}(\.|$)" for name in names)) if names else None


def declared_float32(model: nn.Module, target: str) -> Callable[[str], bool]:
    """Finds the parameters that a model declares to stay float32 when it is loaded in a half dtype.

    transformers has two lists: `_keep_in_fp32_modules` for float16 only, and `_keep_in_fp32_modules_strict` for both
    half dtypes. Version 4.57 matches entries with whole parts of a name, version 5 searches for them as regular
    expressions. The result covers what either version keeps.

    Args:
        model: A transformers model, possibly wrapped.
        target: The half dtype.

    Returns:
        A function that returns whether the parameter with a name in the base model stays float32.
    """
    lists = ["_keep_in_fp32_modules_strict"] if target in HALVES else []
    lists += ["_keep_in_fp32_modules"] if target == FLOAT16 else []
    # Version 4.57 reads only the lists of the outermost model, version 5 those of every model in it.
    entries = {
        entry for module in unwrap(model).modules() for name in lists for entry in getattr(module, name, None) or ()
    }
    if not entries:
        return lambda name: False
    pattern = re.compile("|".join(entry.replace("*", ".*") for entry in sorted(entries)))
    return lambda name: pattern.search(name) is not None

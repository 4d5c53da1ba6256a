"""TRL trainers that are right in precision, or stop at construction with the line to change.

```python
from safe_trainers import SafeGRPOTrainer  # was: from trl import GRPOTrainer; nothing else changes
```
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    ContractError,
    PrecisionError,
    PrecisionWarning,
    RecipeError,
    SafeTrainersError,
    UnsupportedVersionError,
)
from .findings import REFUSALS, WARNINGS
from .version import __version__


if TYPE_CHECKING:
    from .arguments import PrecisionArguments, SafeGRPOConfig, SafeRewardConfig, SafeRLOOConfig, SafeSFTConfig
    from .census import Census, take_census
    from .contract import SafetyContract, contract_of
    from .dtypes import parse_dtype
    from .media import MEDIA_KEYS
    from .merging import MergeCheck, merge_and_save
    from .mixin import PrecisionBase, PrecisionMixin
    from .policy import PrecisionPolicy, resolve
    from .settlement import Settlement, settle
    from .trainers import SafeGRPOTrainer, SafeRewardTrainer, SafeRLOOTrainer, SafeSFTTrainer

_HOMES = {
    "arguments": ("PrecisionArguments", "SafeGRPOConfig", "SafeRLOOConfig", "SafeRewardConfig", "SafeSFTConfig"),
    "census": ("Census", "take_census"),
    "contract": ("SafetyContract", "contract_of"),
    "dtypes": ("parse_dtype",),
    "media": ("MEDIA_KEYS",),
    "merging": ("MergeCheck", "merge_and_save"),
    "mixin": ("PrecisionBase", "PrecisionMixin"),
    "policy": ("PrecisionPolicy", "resolve"),
    "settlement": ("Settlement", "settle"),
    "trainers": ("SafeGRPOTrainer", "SafeRLOOTrainer", "SafeRewardTrainer", "SafeSFTTrainer"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_NEEDS_TRL = {"arguments", "mixin", "trainers"}

__all__ = [
    "MEDIA_KEYS",
    "REFUSALS",
    "WARNINGS",
    "Census",
    "CheckpointError",
    "ContractError",
    "MergeCheck",
    "PrecisionArguments",
    "PrecisionBase",
    "PrecisionError",
    "PrecisionMixin",
    "PrecisionPolicy",
    "PrecisionWarning",
    "RecipeError",
    "SafeGRPOConfig",
    "SafeGRPOTrainer",
    "SafeRLOOConfig",
    "SafeRLOOTrainer",
    "SafeRewardConfig",
    "SafeRewardTrainer",
    "SafeSFTConfig",
    "SafeSFTTrainer",
    "SafeTrainersError",
    "SafetyContract",
    "Settlement",
    "UnsupportedVersionError",
    "__version__",
    "contract_of",
    "merge_and_save",
    "parse_dtype",
    "resolve",
    "settle",
    "take_census",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: importing the package costs no torch and no TRL."""
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if module in _NEEDS_TRL:
        from .versions import check_versions

        check_versions()
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return __all__

"""TRL trainers that train at the right precision, or fail at construction and tell you which line to change.

```python
from safe_trainers import SafeGRPOTrainer  # was: from trl import GRPOTrainer; nothing else changes
```
"""

from typing import TYPE_CHECKING, Any

from .core.errors import (
    CheckpointError,
    ContractError,
    PrecisionError,
    PrecisionWarning,
    RecipeError,
    RecordingError,
    SafeTrainersError,
    UnsupportedVersionError,
)
from .core.messages import WARNINGS
from .core.refusals import REFUSALS
from .core.tasks import TASKS
from .core.versions import __version__, absent_names


if TYPE_CHECKING:
    from .boundaries.placement import BoundaryPlan, plan_boundaries
    from .cli.tune import tune
    from .config import (
        PrecisionArguments,
        SafeDistillationConfig,
        SafeDPOConfig,
        SafeGRPOConfig,
        SafeKTOConfig,
        SafeRewardConfig,
        SafeRLOOConfig,
        SafeSFTConfig,
    )
    from .core.coverage import SafetyContract
    from .core.dtypes import parse_dtype
    from .diff.live import diff_models
    from .diff.record import record
    from .media.caster import MEDIA_KEYS
    from .model.inventory import ModelInventory, take_inventory
    from .policy.resolve import PrecisionPolicy, resolve
    from .trainer.base import PrecisionBase
    from .trainer.coverage import contract_of
    from .trainer.mixin import PrecisionMixin
    from .trainers import (
        SafeDistillationTrainer,
        SafeDPOTrainer,
        SafeGRPOTrainer,
        SafeKTOTrainer,
        SafeRewardTrainer,
        SafeRLOOTrainer,
        SafeSFTTrainer,
    )
    from .weights.merge_and_save import MergeCheck, merge_and_save

_NAMES_BY_MODULE = {
    "config": ("PrecisionArguments", *(task.config for task in TASKS.values())),
    "model.inventory": ("ModelInventory", "take_inventory"),
    "trainer.coverage": ("SafetyContract", "contract_of"),
    "core.dtypes": ("parse_dtype",),
    "diff.live": ("diff_models",),
    "diff.record": ("record",),
    "media.caster": ("MEDIA_KEYS",),
    "weights.merge_and_save": ("MergeCheck", "merge_and_save"),
    "trainer.base": ("PrecisionBase",),
    "trainer.mixin": ("PrecisionMixin",),
    "policy.resolve": ("PrecisionPolicy", "resolve"),
    "cli.tune": ("tune",),
    "boundaries.placement": ("BoundaryPlan", "plan_boundaries"),
    "trainers": tuple(task.trainer for task in TASKS.values()),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_NEEDS_TRL = {"config", "trainer.base", "trainer.mixin", "trainers"}

__all__ = [
    "MEDIA_KEYS",
    "REFUSALS",
    "WARNINGS",
    "BoundaryPlan",
    "CheckpointError",
    "ContractError",
    "MergeCheck",
    "ModelInventory",
    "PrecisionArguments",
    "PrecisionBase",
    "PrecisionError",
    "PrecisionMixin",
    "PrecisionPolicy",
    "PrecisionWarning",
    "RecipeError",
    "RecordingError",
    "SafeDPOConfig",
    "SafeDPOTrainer",
    "SafeDistillationConfig",
    "SafeDistillationTrainer",
    "SafeGRPOConfig",
    "SafeGRPOTrainer",
    "SafeKTOConfig",
    "SafeKTOTrainer",
    "SafeRLOOConfig",
    "SafeRLOOTrainer",
    "SafeRewardConfig",
    "SafeRewardTrainer",
    "SafeSFTConfig",
    "SafeSFTTrainer",
    "SafeTrainersError",
    "SafetyContract",
    "UnsupportedVersionError",
    "__version__",
    "contract_of",
    "diff_models",
    "merge_and_save",
    "parse_dtype",
    "plan_boundaries",
    "record",
    "resolve",
    "take_inventory",
    "tune",
]
for _name in absent_names():  # so that `from safe_trainers import *` works with older releases of TRL
    __all__.remove(_name)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that importing the package imports neither torch nor TRL."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if module not in _NEEDS_TRL:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    from .core.versions import check_stable, check_versions, check_vllm

    check_versions()
    check_stable(name)
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except RuntimeError:  # TRL raises it for every error in the imports of a trainer
        check_vllm()
        raise


def __dir__() -> list[str]:
    return __all__

"""TRL configs with the precision settings.

`GRPOConfig.__post_init__` sets `bf16=True` when `bf16` is unset, and fails on a machine without bfloat16. The classes
here resolve the precision first, while they can still see what the user left unset.
"""

from dataclasses import dataclass
from typing import Any

import trl
from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

from .core.device import detect_device
from .core.dtypes import BFLOAT16, FLOAT16, parse_dtype
from .core.errors import raise_if
from .core.versions import absent_names
from .policy.resolve import Requested, resolve_compute
from .policy.settings import PrecisionSettings


@dataclass
class PrecisionArguments(PrecisionSettings):
    """Adds the precision settings to any TRL config: `class SafeXConfig(PrecisionArguments, XConfig)`.

    `PrecisionSettings` documents each setting.

    Raises:
        PrecisionError: If the settings contradict one another, or a value is out of range.
    """

    def __post_init__(self) -> None:
        settings: Any = self
        device = detect_device("cpu" if settings.use_cpu else None)
        requested = Requested(
            bf16=settings.bf16, fp16=settings.fp16, precision=self.precision, config=type(self).__name__
        )
        compute, problems = resolve_compute(requested, device)
        raise_if([*problems, *self.invalid_settings()])
        if self.save_dtype is not None:
            self.save_dtype = parse_dtype(self.save_dtype, field="save_dtype", allow_auto=False)
        settings.bf16, settings.fp16 = compute.value == BFLOAT16, compute.value == FLOAT16
        super().__post_init__()  # type: ignore[misc]


@dataclass
class SafeGRPOConfig(PrecisionArguments, GRPOConfig):
    """`GRPOConfig` with the precision settings."""


@dataclass
class SafeRLOOConfig(PrecisionArguments, RLOOConfig):
    """`RLOOConfig` with the precision settings."""


@dataclass
class SafeSFTConfig(PrecisionArguments, SFTConfig):
    """`SFTConfig` with the precision settings."""


@dataclass
class SafeRewardConfig(PrecisionArguments, RewardConfig):
    """`RewardConfig` with the precision settings."""


@dataclass
class SafeDPOConfig(PrecisionArguments, DPOConfig):
    """`DPOConfig` with the precision settings."""


if "SafeKTOConfig" not in absent_names():

    @dataclass
    class SafeKTOConfig(PrecisionArguments, trl.KTOConfig):
        """`KTOConfig` with the precision settings; needs TRL 1.8."""


if "SafeDistillationConfig" not in absent_names():

    @dataclass
    class SafeDistillationConfig(PrecisionArguments, trl.DistillationConfig):
        """`DistillationConfig` with the precision settings; needs TRL 1.10."""

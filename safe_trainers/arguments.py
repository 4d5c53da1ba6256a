"""Configs that see what the user left unset, before upstream decides it.

A plain `GRPOConfig` turns `bf16` on when it is unset and refuses it on a machine without it, before any trainer is
reached; so the switch has to sit in front of TRL's own `__post_init__`.
"""

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

from .device import detect_device
from .dtypes import BFLOAT16, FLOAT16
from .errors import PrecisionError
from .policy import Flags, resolve_compute


@dataclass
class PrecisionArguments:
    """The precision settings, in front of any TRL config: `class SafeXConfig(PrecisionArguments, XConfig)`.

    Attributes:
        precision: `"auto"`, `"fp32"`, `"bf16"` or `"fp16"`, in any spelling of `parse_dtype`. Decides `bf16` and
            `fp16`. Unset, these two decide; with neither set it is `"auto"`: bf16 where the device computes it
            natively, fp16 on older GPUs, fp32 on CPU.
        rollout_compute: `"training"` generates in the compute context of training; `"stock"` as upstream does.
    """

    precision: str | None = field(
        default=None,
        metadata={"help": "Compute dtype: auto, fp32, bf16 or fp16. Unset: from bf16 and fp16; neither set: auto."},
    )
    rollout_compute: str = field(
        default="training",
        metadata={"help": "What generation computes in: `training` (the same as training) or `stock` (upstream's)."},
    )

    def __post_init__(self) -> None:
        settings: Any = self
        device = detect_device("cpu" if settings.use_cpu else None)
        flags = Flags(
            bf16=settings.bf16, fp16=settings.fp16, precision=self.precision, config=type(self).__name__
        )  # fmt: skip
        compute, problems = resolve_compute(flags, device)
        if problems:
            raise PrecisionError(problems)
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

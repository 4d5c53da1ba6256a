"""Configs that see what the user left unset, before upstream decides it.

A plain `GRPOConfig` turns `bf16` on when it is unset and refuses it on a machine without it, before any trainer is
reached; so the switch has to sit in front of TRL's own `__post_init__`.
"""

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

from .device import detect_device
from .dtypes import AUTO, BFLOAT16, FLOAT16, parse_dtype
from .errors import PrecisionError, refuse
from .policy import Flags, resolve_compute
from .reports import problems as report_problems
from .scaler import problems as scaler_problems
from .skips import problems as step_problems
from .sync import SYNC_LOST_LIMIT


@dataclass
class PrecisionArguments:
    """The precision settings, in front of any TRL config: `class SafeXConfig(PrecisionArguments, XConfig)`.

    Attributes:
        precision: `"auto"`, `"fp32"`, `"bf16"` or `"fp16"`, in any spelling of `parse_dtype`. Decides `bf16` and
            `fp16`. Unset, these two decide; with neither set it is `"auto"`: bf16 where the device computes it
            natively, fp16 on older GPUs, fp32 on CPU.
        rollout_compute: `"training"` generates in the compute context of training; `"stock"` as upstream does.
        adapter_dtype: `"auto"`, `"float32"` or `"bfloat16"`: what adapters are held in. `"auto"` keeps the bits that
            PEFT made, and follows TRL's bfloat16 cast of a quantised model's adapters only where it loses nothing
            that matters.
        upcast_trainables: Whether half-precision trainables become float32 where the loss is scaled; `False` refuses.
        fp32_modules: Patterns of module names that compute in float32 under a half policy (`"vision_tower"`,
            `"*.layers.3.mlp"`).
        loss_scale_init: First loss scale under fp16.
        loss_scale_growth_interval: Steps without an overflow after which the scale grows. Torch's own 2000 is longer
            than many RL runs.
        loss_scale_growth_factor: What the scale is multiplied with then.
        loss_scale_backoff_factor: What the scale is multiplied with after an overflow.
        max_consecutive_skips: The optimizer steps in a row that may be skipped because gradients were not finite; then
            the run stops. 50 halvings take a loss scale of 2**16 to 2**-34, where gradients of 1e15 still fit float16:
            what is not finite then does not come from the scale.
        overflow_probe_steps: Look for activations that overflow float16 on the first batch of every so many optimizer
            steps; unset, on the first rollout and the first batch of a run alone.
        sync_lost_limit: Above which share a weight sync to vLLM is said to lose the adapter, from 0 to 1: the elements
            that the adapters change, and that are the base's again in the dtype of the sampler. At one half, most of
            the change does not arrive.
        precision_metrics: Whether `precision/...` is logged beside TRL's metrics.
        precision_report: `"log"` shows the precision report once, on standard error, after the first optimizer step;
            `"file"` writes it as `precision_report.json` into `output_dir`; `"off"` makes none unless it is asked for
            as `trainer.precision_report`.
        save_dtype: `"float32"`, `"bfloat16"` or `"float16"`: what `save_model` writes; unset, what is held.
            Checkpoints always hold the trained bits.
    """

    precision: str | None = field(
        default=None,
        metadata={"help": "Compute dtype: auto, fp32, bf16 or fp16. Unset: from bf16 and fp16; neither set: auto."},
    )
    rollout_compute: str = field(
        default="training",
        metadata={"help": "What generation computes in: `training` (the same as training) or `stock` (upstream's)."},
    )

    adapter_dtype: str = field(
        default=AUTO,
        metadata={"help": "What adapters are held in: auto, float32 or bfloat16."},
    )
    upcast_trainables: bool = field(
        default=True,
        metadata={"help": "Whether half trainables become float32 where the loss is scaled; false refuses them."},
    )
    fp32_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Patterns of names of modules that compute in float32 under a half policy."},
    )
    loss_scale_init: float = field(default=2.0**16, metadata={"help": "First loss scale under fp16."})
    loss_scale_growth_interval: int = field(
        default=400, metadata={"help": "Steps without an overflow after which the loss scale grows."}
    )
    loss_scale_growth_factor: float = field(default=2.0, metadata={"help": "How much the loss scale grows."})
    loss_scale_backoff_factor: float = field(
        default=0.5, metadata={"help": "What an overflow multiplies the loss scale with."}
    )
    max_consecutive_skips: int = field(
        default=50, metadata={"help": "Skipped optimizer steps in a row after which an fp16 run stops."}
    )
    overflow_probe_steps: int | None = field(
        default=None,
        metadata={"help": "Steps between looks for activations that overflow float16. Unset: the first batch alone."},
    )
    sync_lost_limit: float = field(
        default=SYNC_LOST_LIMIT,
        metadata={"help": "Share of the adapters' change that a weight sync may lose without a warning."},
    )
    precision_metrics: bool = field(default=True, metadata={"help": "Whether precision/... metrics are logged."})
    precision_report: str = field(
        default="log",
        metadata={"help": "Where the precision report goes, once: log (standard error), file or off."},
    )
    save_dtype: str | None = field(
        default=None,
        metadata={"help": "What save_model writes: float32, bfloat16 or float16. Unset: what is held."},
    )

    def __post_init__(self) -> None:
        settings: Any = self
        device = detect_device("cpu" if settings.use_cpu else None)
        flags = Flags(
            bf16=settings.bf16, fp16=settings.fp16, precision=self.precision, config=type(self).__name__
        )  # fmt: skip
        compute, problems = resolve_compute(flags, device)
        found = [*problems, *scaler_problems(self), *step_problems(self), *report_problems(self)]
        patterns = self.fp32_modules
        if patterns is not None and (isinstance(patterns, str) or not all(p and isinstance(p, str) for p in patterns)):
            name = patterns if patterns and isinstance(patterns, str) else "vision_tower"
            given = f"fp32_modules={patterns!r}"
            found.append(refuse("not-a-list-of-patterns", given, fix=f"fp32_modules=[{name!r}]"))
        if not 0 <= self.sync_lost_limit <= 1:
            given = f"sync_lost_limit={self.sync_lost_limit!r}"
            found.append(refuse("share-out-of-range", given, field="sync_lost_limit", usual=SYNC_LOST_LIMIT))
        if found:
            raise PrecisionError(found)
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

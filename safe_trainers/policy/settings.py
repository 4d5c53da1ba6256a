"""Every precision setting, with its default, its accepted values and its help text.

The Safe configs inherit from `PrecisionSettings`; recipes and the documentation read the same fields.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..core.dtypes import AUTO, BFLOAT16, FLOAT32, parse_dtype
from ..core.errors import PrecisionError, Problem, nearest, refuse


ROLLOUT_COMPUTE = ("training", "stock")
OLD_LOGPS = SCORED, LOSS = ("scored", "loss")
ADAPTER_SYNC = MERGED, NATIVE = ("merged", "native")
ADAPTER_DTYPES = (AUTO, FLOAT32, BFLOAT16)
LOG, FULL, FILE, OFF = REPORT_MODES = ("log", "full", "file", "off")
MEDIA_SHARING = IDENTICAL, ALWAYS, _ = ("identical", "always", OFF)
ROUTER_REPLAY = _, ROLLOUT = (OFF, "rollout")

LARGEST_SCALE = 2.0**126
"""The largest loss scale whose reciprocal, by which gradients are multiplied, is a normal float32 number."""
SMALLEST_SCALE = 1 / LARGEST_SCALE
"""Below this scale the reciprocal is infinite; zero gradients become NaN after the scaler has checked them."""

LOSS_SCALE = {
    "loss_scale_init": "scale",
    "loss_scale_growth_interval": "growth_interval",
    "loss_scale_growth_factor": "growth_factor",
    "loss_scale_backoff_factor": "backoff_factor",
}
"""Each setting of the loss scale, and its key in `torch.amp.GradScaler.state_dict()`."""


@dataclass(frozen=True)
class Range:
    """The numbers that a setting accepts.

    Attributes:
        low: The smallest number.
        high: The largest number.
        excluded: The ends that are not accepted themselves: `"low"`, `"high"` or both.
        integer: Whether the number must be an integer.
        text: Description of the range; by default made from the other attributes.
    """

    low: float
    high: float = math.inf
    excluded: frozenset[str] = frozenset()
    integer: bool = False
    text: str = ""

    def __contains__(self, value: object) -> bool:
        # Not converted to float, because an integer may be too large for it.
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        if not -math.inf < value < math.inf:
            return False
        above = value > self.low if "low" in self.excluded else value >= self.low
        below = value < self.high if "high" in self.excluded else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.text:
            return self.text
        kind = "an integer" if self.integer else "a number"
        low = f"above {self.low:g}" if "low" in self.excluded else f"of at least {self.low:g}"
        if math.isinf(self.high):
            return f"{kind} {low}"
        return f"{kind} between {self.low:g} and {self.high:g}" + (", both excluded" if self.excluded else "")


@dataclass(frozen=True)
class Accepts:
    """The values that a setting accepts, and the refusal of other values.

    Attributes:
        values: The range of numbers, or the choices with the default first.
        finding: Id of the refusal.
        recommended: The value that the refusal recommends; by default the default of the setting.
        unset: Whether `None` is accepted.
    """

    values: Range | tuple[str, ...]
    finding: str
    recommended: Any = None
    unset: bool = False


_SCALE, _STEPS = "loss-scale-out-of-range", "steps-out-of-range"

_STEP = Range(1, integer=True)

ACCEPTED: Mapping[str, Accepts] = {
    "loss_scale_init": Accepts(
        Range(
            SMALLEST_SCALE,
            LARGEST_SCALE,
            text=f"a number from 2**-126 ({SMALLEST_SCALE:.3g}) to 2**126 ({LARGEST_SCALE:.3g})",
        ),
        _SCALE,
    ),
    "loss_scale_growth_interval": Accepts(Range(1, integer=True), _SCALE),
    "loss_scale_growth_factor": Accepts(Range(1, excluded=frozenset({"low"})), _SCALE),
    "loss_scale_backoff_factor": Accepts(Range(0, 1, frozenset({"low", "high"})), _SCALE),
    "max_consecutive_skips": Accepts(Range(1, integer=True), _STEPS),
    "overflow_probe_steps": Accepts(Range(1, integer=True), _STEPS, recommended=100, unset=True),
    "sync_lost_limit": Accepts(Range(0, 1), "share-out-of-range"),
    "old_logps": Accepts(OLD_LOGPS, "unknown-choice"),
    "adapter_sync": Accepts(ADAPTER_SYNC, "unknown-choice"),
    "share_media_features": Accepts(MEDIA_SHARING, "unknown-choice"),
    "router_replay": Accepts(ROUTER_REPLAY, "unknown-choice"),
    "precision_report": Accepts(REPORT_MODES, "unknown-choice"),
}
"""The accepted values of each setting. `resolve` checks dtypes, and settings that depend on the device."""


@dataclass
class PrecisionSettings:
    """The precision settings of a run.

    Attributes:
        precision: Compute dtype: `"auto"`, `"fp32"`, `"bf16"` or `"fp16"`, in any spelling of `parse_dtype`. Sets
            `bf16` and `fp16`. By default these two apply, and `"auto"` if neither is set: bf16 if the device has
            bfloat16 arithmetic, fp16 on older GPUs, fp32 on CPU. `dataclasses.replace` passes the values of these two
            on as if they were written; unset them: `replace(config, precision="fp32", bf16=None, fp16=False)`.
        rollout_compute: `"training"` generates in the same autocast context as training; `"stock"` as TRL does.
        adapter_dtype: Dtype of adapter weights: `"auto"`, `"float32"` or `"bfloat16"`. `"auto"` keeps the values that
            PEFT made. Only new, randomly initialised adapters of a quantised model are cast to bfloat16, as TRL does,
            and only if that loses at most 1 % of their updates.
        upcast_trainables: Whether half-precision trainable weights are cast to float32 if the loss is scaled; `False`
            refuses them.
        fp32_modules: Patterns of names of modules that compute in float32 in a half-precision run
            (`"vision_tower"`, `"*.layers.3.mlp"`); `"@routers"` stands for the routers of a mixture of experts.
        loss_scale_init: Initial loss scale for fp16.
        loss_scale_growth_interval: Steps without an overflow after which the scale grows. PyTorch's default, 2000, is
            longer than many RL runs.
        loss_scale_growth_factor: Factor by which the scale grows.
        loss_scale_backoff_factor: Factor by which the scale is multiplied after an overflow.
        max_consecutive_skips: Number of consecutive optimizer steps that may be skipped because gradients were not
            finite, before the run stops. 50 halvings reduce a loss scale of 2**16 to 2**-34, at which gradients of
            1e15 still fit float16, so the scale is not the cause of further skips.
        overflow_probe_steps: Number of optimizer steps between checks of an fp16 run for overflow: of the activations
            of one rollout and one loss, and of the gradients of that loss. By default only the first ones are checked.
        rollout_correction: Whether the losses of samples of the model's own `generate` are weighted by importance
            weights, with TRL's `vllm_importance_sampling_mode` and its limits. TRL weights samples of vLLM itself.
        old_logps: Where the log-probabilities before an update come from if the policy has not changed since the
            rollout: `"scored"` from TRL's scoring, if there is one; `"loss"` from the loss, so that the ratio is 1.
        sync_lost_limit: Share, from 0 to 1, above which a weight sync to vLLM is reported to lose the adapter. The
            share counts the elements that the adapters change and that equal the base's in the sampler's dtype.
        adapter_sync: How a colocated vLLM gets LoRA adapters: `"merged"` sends every weight, with the adapters merged;
            `"native"` sends the base once and then only the factors. Adapters that vLLM does not apply are merged.
        media_trial: Whether a model in half precision runs a sample image or sound forward and backward at
            construction, if the dataset has media. Operations that get two dtypes are found in it, and get casts.
        keep_frozen_casts: Whether autocast's casts of frozen float32 weights, and dequantised 4-bit weights of
            bitsandbytes on a CPU, are kept while completions are generated and scored, instead of being computed for
            every token. The values are the same. The casts take half the bytes of their weights until the loss is
            computed, and dequantised weights two bytes per element. They are not kept if they would raise the peak of
            allocated memory on CUDA, or take more than half of the free memory elsewhere.
        compile_decode: Whether `generate` uses a static cache and compiles the forward pass of each token after the
            first, from the second rollout on. It saves time where the host starts kernels more slowly than the device
            computes them, as on a GPU. Attention over a cache of fixed size may round otherwise, so that other tokens
            may be sampled.
        share_media_features: Whether a tower runs once for all equal images of a batch, while no gradient flows into
            it: `"identical"` if the features are bit-identical, which is measured for each shape of a batch;
            `"always"`; or `"off"`.
        router_replay: `"rollout"` makes the routers of a mixture of experts choose the experts of the rollout again in
            scoring and losses; the weights of the experts are computed from the live router. `"off"` lets them choose.
        precision_metrics: Whether `precision/...` metrics are logged with TRL's metrics.
        precision_report: `"log"` writes the precision report as `precision_report.json` into `output_dir` after the
            first optimizer step, and prints a summary of at most 25 lines to standard error; `"full"` prints all of
            it; `"file"` prints nothing; `"off"` makes none unless `trainer.precision.report` is read.
        profile: Whether the time of each phase of a step (rollout, rewards, scoring, reference, loss, backward pass,
            optimizer, this package) is measured: logged as `profile/...` in seconds per optimizer step, printed at the
            end, and written to `profile.json` in `output_dir`. On a GPU, each change of phase waits for the device.
        record_steps: The optimizer steps, from 1, whose values are recorded in `output_dir/recordings` for
            `safe-trainers diff`: a list of their numbers, or in Python the number of first steps. A recorded
            step takes at most 1 MB for each micro-batch; the recording changes no value.
        save_dtype: Dtype in which `save_model` writes: `"float32"`, `"bfloat16"` or `"float16"`; by default the
            dtype of each weight. Checkpoints always store the trained values exactly.
    """

    precision: str | None = field(
        default=None,
        metadata={"help": "Compute dtype: auto, fp32, bf16 or fp16. Unset: from bf16 and fp16; neither set: auto."},
    )
    rollout_compute: str = field(
        default="training",
        metadata={"help": "Dtypes of generation: `training` (the same as in training) or `stock` (TRL's own)."},
    )
    adapter_dtype: str = field(default=AUTO, metadata={"help": "Dtype of adapter weights: auto, float32 or bfloat16."})
    upcast_trainables: bool = field(
        default=True,
        metadata={
            "help": "Whether half-precision trainable weights become float32 if the loss is scaled; else refused."
        },
    )
    fp32_modules: list[str] | None = field(
        default=None, metadata={"help": "Patterns of names of modules that compute in float32 in half-precision runs."}
    )
    loss_scale_init: float = field(default=2.0**16, metadata={"help": "Initial loss scale for fp16."})
    loss_scale_growth_interval: int = field(
        default=400, metadata={"help": "Steps without an overflow after which the loss scale grows."}
    )
    loss_scale_growth_factor: float = field(default=2.0, metadata={"help": "Factor by which the loss scale grows."})
    loss_scale_backoff_factor: float = field(
        default=0.5, metadata={"help": "Factor by which the loss scale is multiplied after an overflow."}
    )
    max_consecutive_skips: int = field(
        default=50, metadata={"help": "Number of consecutive skipped optimizer steps after which the run stops."}
    )
    overflow_probe_steps: int | None = field(
        default=None,
        metadata={"help": "Steps between checks for activations that overflow float16. Unset: the first batch only."},
    )
    rollout_correction: bool = field(
        default=False,
        metadata={"help": "Whether losses of samples of `generate` get importance weights, as those of vLLM do."},
    )
    old_logps: str = field(
        default=SCORED,
        metadata={"help": "Old log-probabilities of an unchanged policy: `scored` (TRL's) or `loss` (a ratio of 1)."},
    )
    sync_lost_limit: float = field(
        default=0.5, metadata={"help": "Share of the adapters' changes that a weight sync may lose without a warning."}
    )
    adapter_sync: str = field(
        default=MERGED,
        metadata={"help": "How vLLM gets LoRA adapters: `merged` (into all weights) or `native` (only the factors)."},
    )
    media_trial: bool = field(
        default=True, metadata={"help": "Whether a sample image or sound is run through the model at construction."}
    )
    keep_frozen_casts: bool = field(
        default=True,
        metadata={"help": "Whether rollouts keep casts of frozen weights and dequantised weights between tokens."},
    )
    compile_decode: bool = field(
        default=False,
        metadata={"help": "Whether rollouts with `generate` use a static cache and a compiled forward pass."},
    )
    share_media_features: str = field(
        default=IDENTICAL,
        metadata={"help": "Whether towers run once for equal images: identical (if bit-identical), always or off."},
    )
    router_replay: str = field(
        default=OFF,
        metadata={"help": "Which experts scoring and losses use: those of the `rollout`, or `off`: the router's own."},
    )
    precision_metrics: bool = field(default=True, metadata={"help": "Whether precision/... metrics are logged."})
    precision_report: str = field(
        default=LOG,
        metadata={"help": "How the precision report is printed: log (a summary), full, file (not printed) or off."},
    )
    profile: bool = field(
        default=False, metadata={"help": "Whether the time of each phase of a step is measured, logged and printed."}
    )
    record_steps: list[int] | None = field(
        default=None, metadata={"help": "Numbers of the steps to record for `safe-trainers diff`, from 1."}
    )
    save_dtype: str | None = field(
        default=None,
        metadata={"help": "Dtype that save_model writes: float32, bfloat16 or float16. Unset: each weight's dtype."},
    )

    @classmethod
    def of(cls, args: Any) -> "PrecisionSettings":
        """Reads the settings of a run. Settings that its config does not have get their defaults.

        Args:
            args: A training config, Safe or plain.
        """
        return cls(
            **{setting.name: getattr(args, setting.name) for setting in fields(cls) if hasattr(args, setting.name)}
        )

    def invalid_settings(self) -> Iterator[Problem]:
        """Yields a refusal for each invalid value.

        `resolve` checks dtypes, and settings that depend on the device.
        """
        for name, accepts in ACCEPTED.items():
            value = getattr(self, name)
            if value in accepts.values or (accepts.unset and value is None):
                continue
            if isinstance(accepts.values, Range):
                default = self.__dataclass_fields__[name].default
                recommended = default if accepts.recommended is None else accepts.recommended
                accepted = f"{accepts.values}" + (", or unset" if accepts.unset else "")
                details = {"accepted": accepted, "field": name, "recommended": recommended}
                yield refuse(accepts.finding, f"{name}={value!r}", **details)
            else:
                yield unknown_choice(name, value, accepts.values)
        patterns = self.fp32_modules
        if patterns is not None and (isinstance(patterns, str) or not all(p and isinstance(p, str) for p in patterns)):
            name = patterns if patterns and isinstance(patterns, str) else "vision_tower"
            yield refuse("not-a-list-of-patterns", f"fp32_modules={patterns!r}", fix=f"`fp32_modules=[{name!r}]`")
        steps = self.record_steps
        if steps is not None and not all(n in _STEP for n in ([steps] if isinstance(steps, int) else steps)):
            yield refuse(_STEPS, f"record_steps={steps!r}", accepted="a list of integers of at least 1",
                         field="record_steps", recommended="[1]")  # fmt: skip
        if self.save_dtype is not None:
            try:
                parse_dtype(self.save_dtype, field="save_dtype", allow_auto=False)
            except PrecisionError as error:
                yield from error.problems


def unknown_choice(name: str, value: object, accepted: tuple[str, ...]) -> Problem:
    """Makes the refusal of a value that is not one of a setting's choices.

    Args:
        name: Name of the setting.
        value: Its value.
        accepted: The choices, the default first.
    """
    return refuse(
        "unknown-choice",
        f"{name}={value!r}",
        value=value,
        accepted=", ".join(map(repr, accepted)),
        field=name,
        suggestion=nearest(str(value), accepted) or accepted[0],
    )

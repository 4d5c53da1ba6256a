"""What the engine that runs a model in several processes computes in: the policy decides it, not the engine.

FSDP2 as accelerate sets it up under bf16 gathers every weight in bfloat16, norms and embeddings too, so that the
residual stream is rounded where a single process keeps float32; it sums gradients in bfloat16; and what leaves the
model is rounded to bfloat16 once more, log-probabilities with it. Here it gathers what is held, sums in float32 and
hands values on as they are, and the forward pass runs under the autocast that a single process runs under: each token
has the log-probability that it has there.

The gathered weights of a float32 model take twice the bytes for it; those of a half-precision base with adapters are
what they were. Autocast keeps no copies of weights meanwhile: its cache would hold the whole model in half precision
until the forward pass ends, which sharding is there to avoid.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import AutocastKwargs, convert_outputs_to_fp32
from torch import nn
from transformers.training_args import ParallelMode

from .dtypes import BFLOAT16, FLOAT16, FLOAT32, SHORT, from_torch
from .errors import Problem, refuse
from .policy import FLAG_OF, Choice, PrecisionPolicy
from .scaler import SETTINGS


ALONE, DDP, FSDP1, FSDP2, DEEPSPEED = "one process", "DDP", "FSDP1", "FSDP2", "DeepSpeed"

_AS_HELD = Choice("as held", "autocast rounds what enters a product, and nothing else, as in a single process")
_AS_GIVEN = Choice("as given", "media are cast by name, integer positions and log-probabilities are not")
_AS_COMPUTED = Choice("as computed", "log-probabilities are taken in float32, and are not rounded again")
_REDUCED = Choice(FLOAT32, "gradients of half-precision weights lose nothing more in the sum")


@dataclass(frozen=True)
class Engine:
    """What runs a model in several processes, and what it computes in.

    Attributes:
        name: `"one process"`, `"DDP"`, `"FSDP1"`, `"FSDP2"`, or DeepSpeed with its stage, `"DeepSpeed ZeRO-3"`.
        processes: How many.
        gathered: Dtype that weights are gathered in; `None` where no weight is sharded.
        reduced: Dtype that gradients are summed in.
        inputs: What happens to what enters the model.
        outputs: What happens to what leaves it.
    """

    name: str
    processes: int
    gathered: Choice | None
    reduced: Choice
    inputs: Choice
    outputs: Choice

    @property
    def summary(self) -> str | None:
        """The engine and its processes in words; `None` for one process."""
        return None if self.name == ALONE else f"{self.name}, {self.processes} processes"

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """Every decision with its name; none for one process."""
        if self.name == ALONE:
            return
        if self.gathered is not None:
            yield "gathered weights", self.gathered
        yield "gradient sums", self.reduced
        yield "engine's inputs", self.inputs
        yield "engine's outputs", self.outputs

    def to_dict(self) -> dict[str, Any]:
        """The engine as plain values, ready for JSON."""
        return {
            "name": self.name,
            "processes": self.processes,
            **{name: {"value": choice.value, "reason": choice.reason} for name, choice in self.choices()},
        }

    def __str__(self) -> str:
        lines = [f"{name}: {choice.value}: {choice.reason}" for name, choice in self.choices()]
        return "\n".join([self.summary or self.name, *lines])


def fsdp_version(args: Any) -> int | None:
    """Which FSDP a run asks for, known before its accelerator is built.

    Args:
        args: The training arguments.

    Returns:
        1 or 2; `None` without FSDP, also in a single process, where accelerate leaves it out and says nothing.
    """
    if args.parallel_mode != ParallelMode.DISTRIBUTED:
        return None
    told = getattr(args, "fsdp_plugin_args", None)  # transformers 5, from `fsdp` of the arguments
    if told:
        return int(told.get("fsdp_version", 2))
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in {"1", "true"}:  # accelerate, and transformers 4
        return int(os.environ.get("FSDP_VERSION", "1"))
    return None


def engine_copies(args: Any) -> str | None:
    """The half dtype that DeepSpeed casts every weight to, while it trains float32 copies of its own.

    Args:
        args: The training arguments.

    Returns:
        `"bfloat16"` or `"float16"`; `None` in float32, and without DeepSpeed.
    """
    if getattr(args, "deepspeed_plugin", None) is None:
        return None
    return FLOAT16 if args.fp16 else BFLOAT16 if args.bf16 else None


def asked_otherwise(args: Any, policy: PrecisionPolicy) -> Iterator[Problem]:
    """What an engine, or the file that it is launched with, is told that the run does not do.

    Args:
        args: The training arguments.
        policy: The policy of the run.

    Yields:
        The refusals.
    """
    said = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    decided = FLAG_OF.get(policy.autocast.value, "no")
    requested = "fp16" if args.fp16 else decided  # without a scaler there is no autocast
    # transformers 4 writes the variable itself, for the last config that was made: accelerate then does what it says.
    written = not hasattr(args, "mixed_precision")
    if said not in ("no", requested) and not written:
        given = f"mixed_precision={said!r} in the accelerate config (ACCELERATE_MIXED_PRECISION)"
        asked = policy.autocast.reason
        yield refuse("launched-with-another-precision", given, said=said, asked=asked, compute=policy.compute.value)
    copies = engine_copies(args)
    patterns = list(getattr(args, "fp32_modules", None) or ())
    if copies is not None and patterns:
        given = f"fp32_modules={patterns!r} in {SHORT[copies]} under DeepSpeed"
        yield refuse("deepspeed-casts-every-weight", given, dtype=copies)
    if copies == FLOAT16:
        usual = {name: field.default for name, field in getattr(args, "__dataclass_fields__", {}).items()}
        own = [name for name in SETTINGS if hasattr(args, name) and getattr(args, name) != usual.get(name)]
        if own:
            given = f"{', '.join(f'{name}={getattr(args, name)!r}' for name in own)} with fp16=True under DeepSpeed"
            yield refuse("deepspeed-scales-the-loss", given, fields=" and ".join(f"`{name}`" for name in own))


def flattens(model: nn.Module, accelerator: Any) -> Iterator[Problem]:
    """What FSDP1 cannot flatten: the weights of a layer in several dtypes.

    Args:
        model: The policy model, in the dtypes that it is trained in.
        accelerator: The trainer's own.

    Yields:
        The refusal of the first such layer; nothing under another engine, or where units are made by size.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 1 or getattr(plugin, "min_num_params", None):
        return
    named = getattr(plugin, "transformer_cls_names_to_wrap", None) or getattr(model, "_no_split_modules", None)
    wrapped = set(named or ()) if plugin.auto_wrap_policy is not None else set()
    adapted = hasattr(model, "peft_config")
    for unit, members in flat_units(model, lambda module: type(module).__name__ in wrapped or (
        adapted and _is_trained_leaf(module)
    )).items():  # fmt: skip
        dtypes: dict[str, str] = {}
        for name, parameter in members.items():
            dtypes.setdefault(from_torch(parameter.dtype), name)
        if len(dtypes) > 1:
            listed = " and ".join(sorted(dtypes))
            given = f"FSDP1 over {unit or 'the model'}, which holds {listed}"
            yield refuse("fsdp1-flattens-one-dtype", given, examples=", ".join(dtypes.values()))
            return


def flat_units(model: nn.Module, wraps: Callable[[nn.Module], bool]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters that FSDP1 flattens into one tensor each.

    Args:
        model: The model.
        wraps: Whether a module is a unit of its own; the model itself always is.

    Returns:
        For each unit that holds parameters, by its name, those below it that are in no unit further down; a tied one
        in each unit that holds it.
    """
    units: dict[str, dict[str, nn.Parameter]] = {"": {}}

    def visit(module: nn.Module, name: str, unit: str) -> None:
        if name and wraps(module):
            units[unit := name] = {}
        for own, parameter in module.named_parameters(recurse=False):
            units[unit][f"{name}.{own}".lstrip(".")] = parameter
        for own, child in module.named_children():
            visit(child, f"{name}.{own}".lstrip("."), unit)

    visit(model, "", "")
    return {name: members for name, members in units.items() if members}


def _is_trained_leaf(module: nn.Module) -> bool:
    """Whether PEFT's wrap policy, which transformers sets, makes a module a unit of its own."""
    weight = getattr(module, "weight", None)
    return not any(True for _ in module.children()) and isinstance(weight, nn.Parameter) and weight.requires_grad


def configure(accelerator: Any) -> Engine:
    """Gives the engine of an accelerator, which has prepared nothing yet, what the policy says.

    Args:
        accelerator: The trainer's own.

    Returns:
        What the engine computes in.
    """
    processes = accelerator.num_processes
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        if plugin.fsdp_version == 1:
            _configure_fsdp1(plugin)
            return Engine(FSDP1, processes, _AS_HELD, _REDUCED, _AS_GIVEN, _AS_COMPUTED)
        _configure_fsdp2(plugin)
        if accelerator.autocast_handler is None:
            accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
        return Engine(FSDP2, processes, _AS_HELD, _REDUCED, _AS_GIVEN, _AS_COMPUTED)
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return _deepspeed(accelerator)
    follows = Choice("as trained", "each gradient has the dtype of its weight")
    return Engine(DDP if processes > 1 else ALONE, processes, None, follows, _AS_GIVEN, _AS_COMPUTED)


def _deepspeed(accelerator: Any) -> Engine:
    """What DeepSpeed computes in, which its config decides when the engine is built."""
    stage, half = accelerator.state.deepspeed_plugin.zero_stage, accelerator.mixed_precision
    dtype = {"bf16": BFLOAT16, "fp16": FLOAT16}.get(half, FLOAT32)
    held = f"the engine casts every weight to {dtype}, and trains float32 copies of them"
    gathered = Choice(dtype, held if dtype != FLOAT32 else "as held")
    reduced = Choice(dtype, "DeepSpeed's own, `communication_data_type` in its config")
    name = f"{DEEPSPEED} ZeRO-{stage}"
    return Engine(name, accelerator.num_processes, gathered, reduced, _AS_GIVEN, _AS_COMPUTED)


def _configure_fsdp2(plugin: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=None, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    )


def _configure_fsdp1(plugin: Any) -> None:
    from torch.distributed.fsdp import MixedPrecision

    plugin.mixed_precision_policy = MixedPrecision(
        param_dtype=None,
        reduce_dtype=torch.float32,
        buffer_dtype=None,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def compute_as_alone(model: nn.Module, accelerator: Any) -> None:
    """Makes the forward pass of a model run as accelerate makes it run in a single process.

    accelerate puts autocast around it, and float32 behind it, everywhere but under FSDP2, where it relies on weights
    that are gathered in half precision.

    Args:
        model: The policy model, not prepared yet; doing it again changes nothing.
        accelerator: The trainer's own.
    """
    sharded = getattr(accelerator.state, "fsdp_plugin", None)
    if sharded is None or sharded.fsdp_version != 2 or not accelerator.native_amp:
        return
    if "_original_forward" in vars(model):
        return
    forward = model.forward

    @functools.wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    held: Any = model
    held._original_forward = forward  # where accelerate looks for it when it unwraps a model
    held.forward = convert_outputs_to_fp32(autocast_forward)

"""The dtypes of the engines that run a model in several processes: DDP, FSDP and DeepSpeed.

With bf16, accelerate configures FSDP2 to gather every weight in bfloat16 (including norms and embeddings, which rounds
a residual stream that is float32 in a single process), to reduce gradients in bfloat16, and to round the model's
outputs to bfloat16, including log-probabilities. This module configures FSDP2 to gather weights in the dtype they are
stored in, to reduce gradients in float32 and not to cast inputs or outputs, and runs the forward pass under the
autocast of a single process, so that each token gets the same log-probability as there.

The gathered weights of a float32 model therefore take twice the memory. Autocast's weight cache is disabled, because
it would hold the whole model in half precision until the forward pass ends.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import AutocastKwargs, DistributedType, convert_outputs_to_fp32, extract_model_from_parallel
from torch import nn
from transformers.training_args import ParallelMode

from ..core.dtypes import BFLOAT16, FLOAT16, FLOAT32, SHORT, from_torch, join_dtypes
from ..core.errors import Problem, refuse
from ..core.patches import replace
from .resolve import FLAG_OF, Choice, PrecisionPolicy
from .settings import LOSS_SCALE


ALONE, DDP, FSDP1, FSDP2, DEEPSPEED = "one process", "DDP", "FSDP1", "FSDP2", "DeepSpeed"

_AS_STORED = Choice("as stored", "autocast casts only the inputs of matrix products, as in a single process")
_NOT_CAST = Choice("not cast", "media tensors are cast by name; positions and log-probabilities keep their dtypes")
_AS_COMPUTED = Choice("as computed", "log-probabilities are computed in float32 and not rounded afterwards")
_REDUCED = Choice(FLOAT32, "summing gradients of half-precision weights adds no rounding errors")


@dataclass(frozen=True)
class Engine:
    """The engine that runs a model in several processes, and its dtypes.

    Attributes:
        name: `"one process"`, `"DDP"`, `"FSDP1"`, `"FSDP2"`, or DeepSpeed with its stage, `"DeepSpeed ZeRO-3"`.
        processes: Number of processes.
        gathered: Dtype in which weights are gathered; `None` if weights are not sharded.
        reduced: Dtype in which gradients are summed.
        inputs: Whether the engine casts the model's inputs.
        outputs: Whether the engine casts the model's outputs.
    """

    name: str
    processes: int
    gathered: Choice[str] | None
    reduced: Choice[str]
    inputs: Choice[str]
    outputs: Choice[str]

    @property
    def summary(self) -> str | None:
        """The name and the number of processes, for messages; `None` for one process."""
        return None if self.name == ALONE else f"{self.name}, {self.processes} processes"

    def choices(self) -> Iterator[tuple[str, Choice[str]]]:
        """Yields each choice with its name; nothing for one process."""
        if self.name == ALONE:
            return
        if self.gathered is not None:
            yield "gathered weights", self.gathered
        yield "gradient sums", self.reduced
        yield "engine's inputs", self.inputs
        yield "engine's outputs", self.outputs

    def to_dict(self) -> dict[str, Any]:
        """Returns the engine as plain values for JSON."""
        return {
            "name": self.name,
            "processes": self.processes,
            **{name: {"value": choice.text, "reason": choice.reason} for name, choice in self.choices()},
        }

    def __str__(self) -> str:
        lines = [f"{name}: {choice.text}: {choice.reason}" for name, choice in self.choices()]
        return "\n".join([self.summary or self.name, *lines])


def fsdp_version(args: Any) -> int | None:
    """Returns the requested version of FSDP, before the accelerator is built.

    Args:
        args: The training arguments.

    Returns:
        1 or 2; `None` without FSDP, and in a single process, where accelerate silently ignores FSDP.
    """
    if args.parallel_mode != ParallelMode.DISTRIBUTED:
        return None
    plugin_args = getattr(args, "fsdp_plugin_args", None)  # transformers 5: the argument `fsdp`
    if plugin_args:
        return int(plugin_args.get("fsdp_version", 2))
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in {"1", "true"}:  # accelerate, and transformers 4
        return int(os.environ.get("FSDP_VERSION", "1"))
    return None


def engine_copies(args: Any) -> str | None:
    """Returns the half dtype to which DeepSpeed casts every weight; DeepSpeed trains float32 copies of the weights.

    Args:
        args: The training arguments.

    Returns:
        `"bfloat16"` or `"float16"`; `None` in float32 runs and without DeepSpeed.
    """
    if getattr(args, "deepspeed_plugin", None) is None:
        return None
    return FLOAT16 if args.fp16 else BFLOAT16 if args.bf16 else None


def engine_conflicts(args: Any, policy: PrecisionPolicy) -> Iterator[Problem]:
    """Finds settings of the launcher or of DeepSpeed that contradict the run.

    Args:
        args: The training arguments.
        policy: The policy of the run.

    Yields:
        The refusals.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    autocast = "no" if policy.autocast.value is None else FLAG_OF[policy.autocast.value]
    requested = "fp16" if args.fp16 else autocast  # on a device without a loss scaler, fp16 has no autocast
    # transformers 4 itself writes the variable, for the config that was created last; accelerate then follows it.
    written_by_transformers = not hasattr(args, "mixed_precision")
    if launched not in ("no", requested) and not written_by_transformers:
        yield refuse(
            "launched-with-another-precision",
            f"mixed_precision={launched!r} in the accelerate config (ACCELERATE_MIXED_PRECISION)",
            reason=policy.autocast.reason,
            compute=policy.compute.text,
        )
    copies = engine_copies(args)
    patterns = list(getattr(args, "fp32_modules", None) or ())
    if copies is not None and patterns:
        what = f"fp32_modules={patterns!r} in {SHORT[copies]} under DeepSpeed"
        yield refuse("deepspeed-casts-every-weight", what, dtype=copies)
    if copies == FLOAT16:
        defaults = {name: field.default for name, field in getattr(args, "__dataclass_fields__", {}).items()}
        changed = [name for name in LOSS_SCALE if hasattr(args, name) and getattr(args, name) != defaults.get(name)]
        if changed:
            what = f"{', '.join(f'{name}={getattr(args, name)!r}' for name in changed)} with fp16=True under DeepSpeed"
            yield refuse("deepspeed-scales-the-loss", what, fields=" and ".join(f"`{name}`" for name in changed))


def mixed_dtype_units(model: nn.Module, accelerator: Any) -> Iterator[Problem]:
    """Finds a unit of FSDP1 whose weights have several dtypes, which FSDP1 cannot flatten into one tensor.

    Args:
        model: The policy model; its weights have their final dtypes.
        accelerator: The trainer's accelerator.

    Yields:
        The refusal of the first such unit; nothing with other engines, or if units are chosen by size.
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
            what = f"FSDP1 with {unit or 'the model'}, whose weights are {join_dtypes(dtypes)}"
            yield refuse("fsdp1-flattens-one-dtype", what, examples=", ".join(dtypes.values()))
            return


def flat_units(model: nn.Module, wraps: Callable[[nn.Module], bool]) -> dict[str, dict[str, nn.Parameter]]:
    """Returns the groups of parameters that FSDP1 flattens, each into one tensor.

    Args:
        model: The model.
        wraps: Whether a module is a unit; the model itself always is.

    Returns:
        By name of the unit, its parameters by name, without those of units inside it. A tied parameter is in every
        unit that contains it. Units without parameters are left out.
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
    """Whether PEFT's wrap policy, which transformers uses, makes the module a unit."""
    weight = getattr(module, "weight", None)
    return not any(True for _ in module.children()) and isinstance(weight, nn.Parameter) and weight.requires_grad


def configure(accelerator: Any) -> Engine:
    """Sets the dtypes of an accelerator's engine.

    Args:
        accelerator: The trainer's accelerator; it must not have prepared anything yet.

    Returns:
        The engine with its dtypes.
    """
    processes = accelerator.num_processes
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        if plugin.fsdp_version == 1:
            _configure_fsdp1(plugin)
            return Engine(FSDP1, processes, _AS_STORED, _REDUCED, _NOT_CAST, _AS_COMPUTED)
        _configure_fsdp2(plugin)
        if accelerator.autocast_handler is None:
            accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
        return Engine(FSDP2, processes, _AS_STORED, _REDUCED, _NOT_CAST, _AS_COMPUTED)
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return _deepspeed(accelerator)
    reduced = Choice("as trained", "each gradient has the dtype of its weight")
    return Engine(DDP if processes > 1 else ALONE, processes, None, reduced, _NOT_CAST, _AS_COMPUTED)


def _deepspeed(accelerator: Any) -> Engine:
    """Returns the dtypes of DeepSpeed, which its config sets."""
    dtype = {"bf16": BFLOAT16, "fp16": FLOAT16}.get(accelerator.mixed_precision, FLOAT32)
    cast = f"the engine casts every weight to {dtype} and trains float32 copies"
    gathered = Choice(dtype, cast if dtype != FLOAT32 else "as stored")
    reduced = Choice(dtype, "DeepSpeed's default; `communication_data_type` in its config overrides it")
    name = f"{DEEPSPEED} ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return Engine(name, accelerator.num_processes, gathered, reduced, _NOT_CAST, _AS_COMPUTED)


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


def release_preparation(model: nn.Module) -> None:
    """Undoes what an accelerator has done to the forward pass of a model, so that another one can prepare it.

    accelerate marks a model that it has prepared, and another accelerator then leaves it as it is, with the autocast
    of the first one.

    Args:
        model: The model, wrapped or not. It is not changed if no accelerator has prepared it, and its forward pass is
            not if something else has replaced it since.
    """
    for module in model.modules():
        attributes = vars(module)
        attributes.pop("_is_accelerate_prepared", None)
        original, forward = attributes.get("_original_forward"), attributes.get("forward")
        if original is None or forward is None:
            continue
        function = getattr(original, "__func__", original)
        layers = list(_layers(forward))
        if _is_of_accelerate(layers[0]) and any(layer is function or layer == original for layer in layers):
            del attributes["_original_forward"], attributes["forward"]
            if function is not getattr(type(module), "forward", None):
                attributes["forward"] = original


def _layers(method: Any) -> Iterator[Any]:
    """Yields a method and the functions that it wraps, outermost first."""
    layer = getattr(method, "__func__", method)
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def _made_by_accelerate(model: nn.Module) -> list[Any]:
    """Returns the functions around a model's forward pass that accelerate has made, outermost first."""
    return list(filter(_is_of_accelerate, _layers(vars(model).get("forward"))))


def _is_of_accelerate(function: Any) -> bool:
    """Whether a function is defined in accelerate; `functools.wraps` copies its `__module__` to other functions."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0] == "accelerate"


_SHARDING = frozenset({DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM})


class OwnPreparation:
    """Makes an accelerator prepare models that another accelerator has prepared, which it would leave as they are.

    Args:
        accelerator: The trainer's accelerator, which must not have prepared anything yet. Its `prepare_model` is
            replaced.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._prepare_model = accelerator.prepare_model
        self._prepared: dict[int, tuple[nn.Module, list[Any]]] = {}

        @functools.wraps(self._prepare_model)
        def prepare(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            known = any(model is one for one in accelerator._models)
            if not known and extract_model_from_parallel(model) is model:
                release_preparation(model)
            prepared = self._prepare_model(model, *args, **kwargs)
            self._prepared[id(model)] = model, _made_by_accelerate(model)
            return prepared

        replace("model-preparation", accelerator, "prepare_model", prepare)

    def renew(self, model: nn.Module) -> None:
        """Prepares a model again whose forward pass another accelerator has prepared since.

        transformers prepares a model for an evaluation only if the accelerator has prepared nothing, such as a
        reference model, and under DDP only for the first training. Models that an engine shards are left.

        Args:
            model: The policy model, without the wrapper of DDP.
        """
        accelerator = self._accelerator
        if id(model) in self._prepared:
            if _made_by_accelerate(model) == self._prepared[id(model)][1]:
                return
        elif not accelerator._models:
            return
        if accelerator.distributed_type in _SHARDING:
            return
        release_preparation(model)
        known = list(accelerator._models)
        self._prepare_model(model, evaluation_mode=True)
        accelerator._models[:] = known
        self._prepared[id(model)] = model, _made_by_accelerate(model)


def wrap_forward_in_autocast(model: nn.Module, accelerator: Any) -> None:
    """Runs a model's forward pass under FSDP2 as accelerate runs it in a single process.

    In a single process, accelerate runs the forward pass under autocast and converts its outputs to float32. With
    FSDP2 it does neither, because it relies on weights that are gathered in half precision.

    Args:
        model: The policy model, before the accelerator prepares it.
        accelerator: The trainer's accelerator.
    """
    sharded = getattr(accelerator.state, "fsdp_plugin", None)
    if sharded is None or sharded.fsdp_version != 2 or not accelerator.native_amp:
        return
    forward = model.forward

    @functools.wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    # accelerate restores this attribute when it unwraps a model.
    replace("fsdp2-forward", model, "_original_forward", forward)
    replace("fsdp2-forward", model, "forward", convert_outputs_to_fp32(autocast_forward))


def shards_weights(args: Any) -> bool:
    """Whether FSDP or DeepSpeed's ZeRO-3 will shard the weights over processes.

    Args:
        args: The training arguments.
    """
    return fsdp_version(args) is not None or getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0) == 3

"""The sampler computes as the trainer does, whatever generates, and generation leaves the trainer's weights alone."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from . import engine
from .captures import VLLM_MODULE, engines
from .census import Census
from .contract import ABSENT, COVERED, ROLLOUT_METHOD, SafetyContract, batches_continuously
from .device import Device
from .dtypes import HALVES, from_torch, to_torch
from .engines import fsdp_version
from .errors import PrecisionError, PrecisionWarning, Problem, refuse, warn
from .merged import unmergeable
from .policy import PrecisionPolicy
from .preparation import Preparation
from .sync import METRIC, PATIENCE, SYNC_LOST_LIMIT, AdapterSync, ties_weights
from .towers import anatomy, is_quantized, unwrap


logger = logging.getLogger(__name__)


SCORE_METHOD = "_get_per_token_logps_and_entropies"
"""The method by which TRL scores completions, in rollouts and in the loss."""


class AlignedRollouts:
    """Above TRL: what a rollout computes in, and on which weights; a base of `PrecisionMixin`.

    Overrides construction, to tell an engine its dtype and to wrap this trainer's own weight sync; what is settled on
    the live model, before anything is built on it; `_generate_single_turn`; and the scoring of completions, until it
    was seen what that computes in.
    """

    # What the trainers bring, for the type checker.
    args: Any
    accelerator: Any
    model: Any
    ref_model: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    safety_contract: SafetyContract
    precision_policy: PrecisionPolicy
    precision_census: Census
    precision_preparation: Preparation
    precision_device: Callable[[Any], Device]
    compute_context: Callable[[], contextlib.AbstractContextManager[Any]]

    _scored_in: torch.dtype | None = None
    """Autocast dtype of the first scoring or loss, float32 where there was none; `None` before it."""
    _sync: AdapterSync | None = None
    _rollout_warnings: tuple[Problem, ...] = ()
    _losing: int = 0
    """How many syncs in a row have lost more than `sync_lost_limit`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with engines(type(self), self._told):
            super().__init__(*args, **kwargs)
        generation = getattr(self, "vllm_generation", None)
        if generation is not None:
            self._check_server(generation)
            self._wrap_sync(generation)
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module):
            self._align(reference)

    @property
    def sampler_dtype(self) -> str:
        """The dtype that the sampler computes in where it has one of its own, such as `"float16"`."""
        return engine.sampler_dtype(self.precision_policy, self.precision_census)

    def _is_aligned(self, args: Any) -> bool:
        return getattr(args, "rollout_compute", "training") != "stock"

    def _settle(self, model: nn.Module, training_args: Any) -> None:
        """Settles the precision of the live model, and refuses what its sampler could not take."""
        super()._settle(model, training_args)  # type: ignore[misc]
        self._rollout_warnings = (*misplaced_positions(model), *self._warnings(model, training_args))
        problems = list(self._refused(model, training_args))
        if problems:
            raise PrecisionError(problems)

    def _refused(self, model: nn.Module, args: Any) -> Iterator[Problem]:
        if getattr(args, "use_vllm", False):
            dtype = self.sampler_dtype if self._is_aligned(args) else None
            yield from engine.refused(model, dtype, _is_colocated(args), fsdp_version(args) is not None)
            problem = unmergeable(model) if hasattr(model, "peft_config") and not _shards(args) else None
            if problem is not None:
                fix = "`use_vllm=False`: the model's own `generate` runs with the adapter as it is"
                yield replace(problem, fix=fix)
        elif batches_continuously(args) and (args.bf16 or args.fp16):
            half = torch.bfloat16 if args.bf16 else torch.float16
            packed = ((name, p.dtype) for name, p in model.named_parameters() if is_quantized(p))
            cast = next(((name, dtype) for name, dtype in packed if dtype.is_floating_point and dtype != half), None)
            if cast is not None:
                given = f"{cast[0]}, packed and stored as {from_torch(cast[1])}, with continuous batching"
                yield refuse("continuous-batching-casts-packed-weights", given)

    def _say_what_was_done(self, training_args: Any) -> None:
        super()._say_what_was_done(training_args)  # type: ignore[misc]
        if training_args.process_index == 0:
            for warning in self._rollout_warnings:
                warnings.warn(str(warning), PrecisionWarning, stacklevel=7)

    def _warnings(self, model: nn.Module, args: Any) -> Iterator[Problem]:
        if self.safety_contract["rollout"].state == ABSENT:
            return
        uses_vllm = getattr(args, "use_vllm", False)
        dropout = 0.0 if getattr(args, "disable_dropout", False) else adapter_dropout(model)
        if dropout:
            where = ", and vLLM samples without any" if uses_vllm else ""
            yield warn("adapter-dropout-in-rollouts", f"lora_dropout={dropout:g}", where=where)
        modules = self.precision_preparation.fp32_modules
        if modules and uses_vllm:
            given = f"fp32_modules, such as {modules[0]}, with use_vllm=True"
            yield warn("sampler-without-fp32-modules", given, dtype=self.sampler_dtype)
        if not (uses_vllm and _is_colocated(args)):  # of a server's version and GPU nothing is known here
            return
        version = engine.installed_version()
        if engine.cascade_is_wrong(type(self).precision_device(args), version):
            yield warn("cascade-attention-off", f"vLLM {version}", mended=engine.CASCADE_ATTENTION_MENDED)

    def _told(self, module: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What an engine is built with that TRL builds in a module."""
        dtype = self.sampler_dtype if self._is_aligned(self.args) else None
        device, version = type(self).precision_device(self.args), engine.installed_version()
        told = engine.told(arguments, dtype, device, version)
        if module != VLLM_MODULE and "quantization" in arguments:
            told["quantization"] = arguments["quantization"]  # it is not by our sync that weights reach this one
        logger.info("vLLM engine: %s", {k: v for k, v in told.items() if k not in arguments or arguments[k] != v})
        return told

    def _check_server(self, generation: Any) -> None:
        client = getattr(generation, "vllm_client", None)
        if client is not None and self._is_aligned(self.args):
            warning = engine.check_server(client, self.sampler_dtype)
            if warning is not None:
                warnings.warn(str(warning), PrecisionWarning, stacklevel=5)

    def _wrap_sync(self, generation: Any) -> None:
        """Lets TRL's weight sync send merged weights without merging; this trainer's alone."""
        if not hasattr(generation.model, "peft_config"):
            return
        if self.is_fsdp_enabled:  # the layers that TRL merges are gathered in a way of their own
            halves = " and ".join(sorted(self.precision_census.weights & HALVES))
            if halves:
                self._warn_once(warn("fsdp-merges-in-place", f"adapters on a {halves} base under FSDP, with vLLM"))
            return
        measure = getattr(self.args, "precision_metrics", True)
        dtype = to_torch(self.sampler_dtype) if self._is_aligned(self.args) else None
        self._sync = sync = AdapterSync(generation.model, dtype, measure)
        original = generation.sync_weights

        def sync_weights(*args: Any, **kwargs: Any) -> Any:
            with sync.merged():
                result = original(*args, **kwargs)
            self._note_sync(sync)
            return result

        generation.sync_weights = sync_weights

    def _note_sync(self, sync: AdapterSync) -> None:
        """Logs what a sync lost, and warns once of what it keeps losing."""
        if sync.lost is not None:
            metrics = getattr(self, "_metrics", None)
            if metrics is not None:
                metrics["train" if self.model.training else "eval"][METRIC].append(sync.lost)
            limit = getattr(self.args, "sync_lost_limit", SYNC_LOST_LIMIT)
            before, self._losing = self._losing, self._losing + 1 if sync.lost > limit else 0
            if before < PATIENCE == self._losing:
                self._warn_once(self._losing_sync(sync.lost, limit))
        if sync.tied and ties_weights(self.model):
            names, sync.tied = " and ".join(sync.tied), ()
            self._warn_once(warn("sampler-ties-weights", "tied weights under adapters", names=names))

    def _losing_sync(self, lost: float, limit: float) -> Problem:
        half = (
            "" if engine.refuses_float16(self.model) else "`precision='fp16'`, whose steps are an eighth as wide, or "
        )
        fixes = {
            "bfloat16": f"{half}a larger learning rate",
            "float16": "a larger learning rate, or `precision='fp32'`",
        }
        return warn(
            "sync-loses-the-adapter",
            f"{METRIC}={lost:.2f}, above sync_lost_limit={limit:g}",
            share=f"{lost:.0%}",
            dtype=self.sampler_dtype,
            syncs=PATIENCE,
            fix=fixes.get(self.sampler_dtype, "a larger learning rate"),
        )

    def _warn_once(self, warning: Problem) -> None:
        said: set[str] = vars(self).setdefault("_said", set())
        if warning.id not in said and self.args.process_index == 0:
            warnings.warn(str(warning), PrecisionWarning, stacklevel=2)
        said.add(warning.id)

    def _align(self, reference: nn.Module) -> None:
        """Holds a reference model that TRL loaded by itself in the dtypes of the policy, weight by weight."""
        changes = differing_dtypes(reference, self.model)
        if not changes:
            return
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            held, wanted = next((from_torch(p.dtype), from_torch(dtype)) for p, dtype in changes)
            self._warn_once(warn("reference-in-another-dtype", "the reference model", held=held, wanted=wanted))
            return
        for parameter, dtype in changes:
            parameter.data = parameter.data.to(dtype)
        logger.info("reference model: %d weights are held as the policy holds them", len(changes))

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one turn of generation in what training computes in, and hands the weights back as they were.

        What it computes in is left alone where the contract says that it is not covered.
        """
        generate: Callable[..., Any] = getattr(super(), ROLLOUT_METHOD)
        covered = self.safety_contract["rollout"].state == COVERED
        self.safety_contract.fired["rollout"] += covered
        with self._rollout_context(covered):
            return generate(*args, **kwargs)

    def _rollout_context(self, covered: bool) -> contextlib.AbstractContextManager[Any]:
        if getattr(self.args, "use_vllm", False):
            # It has a compute dtype of its own; and weights are synchronised here, never in half precision.
            return contextlib.nullcontext()
        if batches_continuously(self.args):
            return casts_undone(self.model, self.precision_preparation.fp32_modules)
        in_float32 = self._scored_in == torch.float32
        return self.compute_context() if covered and not in_float32 else contextlib.nullcontext()

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Scores completions, and looks once at what that computes in.

        Whether TRL's forward pass runs under autocast is a matter of its version, and of whether accelerate has
        wrapped the model yet; so it is looked at, and later rollouts follow.
        """
        score: Callable[..., Any] = getattr(super(), SCORE_METHOD)
        if self._scored_in is not None or getattr(self.args, "torch_compile", False):
            return score(*args, **kwargs)  # a hook would be compiled into the model

        def look(*_: Any) -> None:
            kind = self.accelerator.device.type
            autocast = torch.is_autocast_enabled(kind)
            self._scored_in = torch.get_autocast_dtype(kind) if autocast else torch.float32

        handle = anatomy(self.model).text.register_forward_pre_hook(look)
        try:
            return score(*args, **kwargs)
        finally:
            handle.remove()


def adapter_dropout(model: nn.Module) -> float:
    """The largest dropout in the adapters of a model; 0.0 where there is none.

    Args:
        model: Any model.
    """
    inside = (module._modules.get("lora_dropout") for module in model.modules())
    layers = (layer for drops in inside if isinstance(drops, nn.Module) for layer in drops.modules())
    return max((float(layer.p) for layer in layers if isinstance(layer, nn.Dropout)), default=0.0)


def misplaced_positions(model: nn.Module) -> Iterator[Problem]:
    """Warns of rotary frequencies in half precision, as a cast of a whole model leaves them.

    Args:
        model: Any model.
    """
    for name, buffer in model.named_buffers():
        half = from_torch(buffer.dtype)
        if name.endswith("inv_freq") and half in HALVES:
            yield warn("rotary-frequencies-in-half", f"{name} in {half}", dtype=half)
            return


def differing_dtypes(model: nn.Module, like: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """The weights of a model that another one holds in another dtype, by name.

    Args:
        model: The model.
        like: The other one, either of them wrapped or not. Its class may be one of the user's own, which TRL knows
            nothing of when it loads a reference.

    Returns:
        Each such weight, with the dtype that it has in the other model; none that is packed in either.
    """
    wanted = dict(unwrap(like).named_parameters())
    pairs = ((p, wanted[name]) for name, p in unwrap(model).named_parameters() if name in wanted)
    return [
        (held, other.dtype)
        for held, other in pairs
        if held.dtype != other.dtype and not is_quantized(held) and not is_quantized(other)
    ]


def _is_colocated(args: Any) -> bool:
    return getattr(args, "vllm_mode", None) == "colocate"


def _shards(args: Any) -> bool:
    """Whether weights will not all be in this process: FSDP, or DeepSpeed's ZeRO-3."""
    return fsdp_version(args) is not None or getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0) == 3


@contextlib.contextmanager
def casts_undone(model: nn.Module, exempt: Iterable[str] = ()) -> Iterator[None]:
    """Gives a model its own tensors back after something has cast it in place.

    For continuous batching TRL casts the live model to half precision at each rollout and never back: master weights,
    and what the optimizer makes of them, would be half from the first rollout on. While the block runs, the weights
    are alive in both: one half copy of what is not half already is the memory that this costs. Buffers that no
    checkpoint holds are not cast at all, as in a model that was loaded in half: rotary frequencies in half precision
    place tokens elsewhere than the trainer does, the farther the later they are.

    Args:
        model: The model, wrapped or not. Its parameters stay the same objects.
        exempt: Names, in the base model, of modules that are not cast at all: what enters them is made float32, which
            half weights could not multiply.
    """
    # What `to` of a model calls on each module in it.
    casts = {m: partial(_cast_but_for_buffers, m) for m in model.modules() if m._non_persistent_buffers_set}
    casts |= {m: partial(_uncast, m) for m in (unwrap(model).get_submodule(name) for name in exempt)}
    tensors = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    held = [(tensor, tensor.data) for tensor in tensors if tensor is not None]
    # A cast puts new buffers into a module, where it writes into parameters.
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        for module, cast in casts.items():
            vars(module)["_apply"] = cast
        yield
    finally:
        for module in casts:
            vars(module).pop("_apply", None)
        for tensor, data in held:
            tensor.data = data
        for module, own in buffers:
            module._buffers.update(own)


def _uncast(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


def _cast_but_for_buffers(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    held = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    type(module)._apply(module, *args, **kwargs)
    module._buffers.update(held)
    return module

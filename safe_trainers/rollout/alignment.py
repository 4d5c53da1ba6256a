"""Makes rollouts compute in the dtype of training, and keeps generation from changing the trainer's weights."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.coverage import COVERED, NOT_APPLICABLE
from ..core.dtypes import HALVES, from_torch, join_dtypes, to_torch
from ..core.errors import Fix, PrecisionError, Problem, refuse, warn
from ..core.feature import Feature, Run
from ..core.patches import patched
from ..core.patches import replace as replace_method
from ..core.trl import VLLM_MODULE, uses_continuous_batching
from ..core.versions import installed_version
from ..model.parts import find_parts, is_quantized, unwrap
from ..policy.distributed import fsdp_version, shards_weights
from ..policy.settings import NATIVE
from ..weights.cast import weights_restored
from ..weights.fp32_modules import covers_head
from ..weights.merged import unmergeable
from . import head_scaling, native_adapters, vllm, vllm_images
from .cache_dtype import asks_for_cache, cache_prepared
from .weight_sync import METRIC, PATIENCE, AdapterSync, ties_weights


logger = logging.getLogger(__name__)


class RolloutAlignment(Feature):
    """Aligns the compute dtype and the weights of rollouts with those of training.

    Attributes:
        scored_in: Autocast dtype of the first scoring or loss, float32 without autocast; `None` before the first.
        sync: Merges adapters for each weight sync to vLLM; `None` if no adapters are merged.
        warnings: The warnings that `check` found at construction.
        synced_step: The optimizer step of the last weight sync to vLLM; `None` before the first.
        scale: What rollouts do to the logits of the head, as scoring does and the model's own forward pass does not;
            `None` if both agree.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.scored_in: torch.dtype | None = None
        self.sync: AdapterSync | None = None
        self.warnings: tuple[Problem, ...] = ()
        self.synced_step: int | None = None
        self.scale: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._is_native = False  # whether adapters are sent to vLLM as factors
        self._lossy_syncs = 0  # consecutive syncs that lost more than `sync_lost_limit`

    @property
    def sampler_dtype(self) -> str:
        """The dtype in which a separate sampler such as vLLM computes, for example `"float16"`."""
        return vllm.sampler_dtype(self.run.policy, self.run.inventory)

    @property
    def _engine_dtype(self) -> str | None:
        """The dtype that is passed to a vLLM engine; `None` to keep TRL's."""
        return self.sampler_dtype if self.run.settings.rollout_compute == "training" else None

    # ---- Construction ----

    def check(self, model: nn.Module) -> Iterator[Problem]:
        """Refusals of models and settings that the sampler cannot handle, and warnings of where it differs."""
        self.warnings = (*half_rotary_frequencies(model), *self._warnings(model))
        yield from self.warnings
        args = self.run.args
        if getattr(args, "use_vllm", False):
            yield from vllm.refusals(model, self._engine_dtype, _is_colocated(args), fsdp_version(args) is not None)
            yield from self._choose_sync(model)
            problem = unmergeable(model) if hasattr(model, "peft_config") and not shards_weights(args) else None
            if problem is not None:
                fix = "`use_vllm=False`: the model's own `generate` applies the adapter without merging it"
                yield replace(problem, fix=Fix(fix))
        elif uses_continuous_batching(args) and (args.bf16 or args.fp16):
            half = torch.bfloat16 if args.bf16 else torch.float16
            packed = ((name, p.dtype) for name, p in model.named_parameters() if is_quantized(p))
            cast = next(((name, dtype) for name, dtype in packed if dtype.is_floating_point and dtype != half), None)
            if cast is not None:
                given = f"{cast[0]}, packed and stored as {from_torch(cast[1])}, with continuous batching"
                yield refuse("continuous-batching-casts-packed-weights", given)

    def _choose_sync(self, model: nn.Module) -> Iterator[Problem]:
        """Decides whether vLLM gets factors; warns if they were asked for and merged weights are sent."""
        if self.run.settings.adapter_sync != NATIVE or not hasattr(model, "peft_config"):
            return
        args = self.run.args
        reason = native_adapters.reason_against(model, _is_colocated(args), shards_weights(args))
        if reason is None and getattr(args, "vllm_enable_sleep_mode", False):
            reason = "`vllm_enable_sleep_mode=True` discards the weights of the base after each rollout"
        self._is_native = reason is None
        if reason is not None:
            yield warn("adapters-are-merged", "adapter_sync='native'", reason=reason)

    def _warnings(self, model: nn.Module) -> Iterator[Problem]:
        args = self.run.args
        if self.run.coverage["rollout"].state == NOT_APPLICABLE:
            return
        uses_vllm = getattr(args, "use_vllm", False)
        dropout = 0.0 if getattr(args, "disable_dropout", False) else adapter_dropout(model)
        if dropout:
            where = ", and vLLM samples without dropout" if uses_vllm else ""
            yield warn("adapter-dropout-in-rollouts", f"lora_dropout={dropout:g}", where=where)
        modules = [name for name in self.run.weights.fp32_modules if not covers_head(model, [name])]
        if modules and uses_vllm:
            given = f"fp32_modules, such as {modules[0]}, with use_vllm=True"
            yield warn("sampler-without-fp32-modules", given, dtype=self.sampler_dtype)
        if not (uses_vllm and _is_colocated(args)):  # the version and the GPU of a server are not known here
            return
        version = installed_version("vllm")
        if vllm.cascade_attention_is_wrong(self._device(), version):
            yield warn("cascade-attention-off", f"vLLM {version}", fixed_in=vllm.CASCADE_ATTENTION_FIXED)

    def _device(self) -> Any:
        return type(self.run.trainer).precision_device(self.run.args)

    def engine_kwargs(self, module: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for TRL's vLLM engine, with the dtype and the quantization that the run needs."""
        dtype, version = self._engine_dtype, installed_version("vllm")
        complete = vllm.engine_kwargs(arguments, dtype, self._device(), version, self._has_float32_head())
        complete = vllm_images.engine_kwargs(complete, getattr(self.run.trainer, "model", None))
        if self._is_native:
            complete = native_adapters.engine_kwargs(complete, self.run.model)
        if module != VLLM_MODULE and "quantization" in arguments:
            complete["quantization"] = arguments["quantization"]  # our weight sync does not serve this engine
        changed = {key: value for key, value in complete.items() if key not in arguments or arguments[key] != value}
        logger.info("vLLM engine: %s", changed)
        return complete

    def _has_float32_head(self) -> bool:
        if self.sampler_dtype not in HALVES:
            return False
        asked = getattr(self.run.args, "cast_lm_head_to_fp32", False)
        return asked or covers_head(self.run.model, self.run.weights.fp32_modules)

    def ready(self) -> None:
        """Wraps the weight sync of vLLM, compares the heads, and casts a reference model to the policy's dtypes."""
        generation = getattr(self.run.trainer, "vllm_generation", None)
        if generation is not None:
            client = getattr(generation, "vllm_client", None)
            if client is not None:
                dtype = self._engine_dtype
                found = vllm.check_server(client, dtype) if dtype is not None else None
                for warning in filter(None, (found, vllm.check_served_model(client, generation.model))):
                    self.run.warn_once(warning)
            self._wrap_sync(generation)
            vllm_images.forbid_markers(generation)
            llm = getattr(generation, "llm", None)
            samples = llm is not None or client is not None  # one process alone asks a server
            if samples and self._has_float32_head() and not vllm.has_float32_head(generation):
                given = "a float32 head with use_vllm=True"
                self.run.warn_once(warn("sampler-without-float32-head", given, dtype=self.sampler_dtype))
            _check_prompts_of(generation, None if llm is None else vllm_images.keep_image_tokens(llm))
        elif self.run.coverage["rollout"].state == COVERED:
            temperature = getattr(self.run.trainer, "temperature", 1.0)
            self.scale = head_scaling.left_out(self.run.model, temperature, self.run.trainer.compute_context)
        reference = getattr(self.run.trainer, "ref_model", None)
        if isinstance(reference, nn.Module):
            self._align_reference(reference)

    # ---- Weight sync to vLLM ----

    def _wrap_sync(self, generation: Any) -> None:
        """Makes this trainer's weight sync send merged weights without merging them in the model."""
        self.sync, original = self._adapter_sync(generation), generation.sync_weights
        trains_features = vllm_images.trains_features(generation.model)

        def sync_weights(*args: Any, **kwargs: Any) -> Any:
            sync = self.sync
            with vllm.weights_reloaded(generation) if sync is None else sync.sending(generation):
                result = original(*args, **kwargs)
            self.synced_step = self.run.step
            if trains_features:
                vllm_images.forget_features(generation)
            if self.sync is not None:
                self._report_sync(self.sync)
            return result

        replace_method("weight-sync", generation, "sync_weights", sync_weights)

    def _adapter_sync(self, generation: Any) -> AdapterSync | None:
        """Makes the object that merges adapters for each sync; `None` without adapters, or if FSDP shards them."""
        if not hasattr(generation.model, "peft_config"):
            return None
        if self.run.trainer.is_fsdp_enabled:  # there TRL gathers and merges layer by layer, with its own code
            halves = join_dtypes(self.run.inventory.weights & HALVES)
            if halves:
                self.run.warn_once(warn("fsdp-merges-in-place", f"adapters on a {halves} base under FSDP, with vLLM"))
            return None
        dtype = None if self._engine_dtype is None else to_torch(self._engine_dtype)
        if self._is_native:
            return native_adapters.NativeSync(generation.model, dtype, generation.llm)
        return AdapterSync(generation.model, dtype, self.run.settings.precision_metrics)

    def _report_sync(self, sync: AdapterSync) -> None:
        """Logs the share that a sync lost, and warns once if `PATIENCE` syncs in a row lost too much."""
        if sync.lost is not None:
            self.run.log_metric(METRIC, [sync.lost])
            limit = self.run.settings.sync_lost_limit
            self._lossy_syncs = self._lossy_syncs + 1 if sync.lost > limit else 0
            if self._lossy_syncs == PATIENCE:
                self.run.warn_once(self._lossy_sync_warning(sync.lost, limit))
        if sync.tied and ties_weights(self.run.model):
            names, sync.tied = " and ".join(sync.tied), ()
            self.run.warn_once(warn("sampler-ties-weights", "tied weights under adapters", names=names))

    def _lossy_sync_warning(self, lost: float, limit: float) -> Problem:
        fp16 = "`precision='fp16'`, whose rounding steps are an eighth as wide, or "
        fixes = {
            "bfloat16": f"{'' if vllm.rejects_float16(self.run.model) else fp16}a larger learning rate",
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

    def _align_reference(self, reference: nn.Module) -> None:
        """Casts each weight of a reference model that TRL loaded to the dtype that it has in the policy model.

        A model that the user passed, or that has been sharded already, is left as it is.
        """
        changes = differing_dtypes(reference, self.run.model)
        if not changes:
            return
        if self.run.reference_is_live or self.run.trainer.is_fsdp_enabled or self.run.trainer.is_deepspeed_enabled:
            held, wanted = next((from_torch(p.dtype), from_torch(dtype)) for p, dtype in changes)
            loaded = f"`model_init_kwargs={{'dtype': {wanted!r}}}`, and pass the model by name"
            fix = f"pass a `ref_model` in {wanted}" if self.run.reference_is_live else loaded
            self.run.warn_once(
                warn("reference-in-another-dtype", "the reference model", held=held, wanted=wanted, fix=fix)
            )
            return
        for parameter, dtype in changes:
            parameter.data = parameter.data.to(dtype)
        logger.info("reference model: cast %d weights to their dtype in the policy model", len(changes))

    # ---- Rollouts ----

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn in the compute context of training, without changing the weights.

        The context is not changed if the contract says that the rollout is not covered.
        """
        covered = self.run.coverage["rollout"].state == COVERED
        self.run.coverage.fired["rollout"] += covered
        with self._rollout_context(covered), self._cache_context(), self._head_context():
            return call()

    def _head_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.scale is None else head_scaling.applied(self.run.model, self.scale)

    def _cache_context(self) -> contextlib.AbstractContextManager[None]:
        model = unwrap(self.run.model)
        if getattr(self.run.args, "torch_compile", False) and not asks_for_cache(self.run.trainer, model):
            return contextlib.nullcontext()  # torch.compile would compile the hook into the model
        return cache_prepared(find_parts(model).text, self.run.policy.autocast.value is not None)

    def _rollout_context(self, covered: bool) -> contextlib.AbstractContextManager[Any]:
        args = self.run.args
        if getattr(args, "use_vllm", False):
            # vLLM has its own compute dtype, and the weight sync in this block must not run under autocast.
            return contextlib.nullcontext()
        if uses_continuous_batching(args):
            return undo_casts(self.run.model, self.run.weights.fp32_modules)
        in_float32 = self.scored_in == torch.float32
        return self.run.trainer.compute_context() if covered and not in_float32 else contextlib.nullcontext()

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions, and records in the first scoring whether it runs under autocast.

        That depends on TRL's version, and on whether accelerate has wrapped the model yet. Later rollouts use the
        recorded dtype.
        """
        if self.scored_in is not None or getattr(self.run.args, "torch_compile", False):
            return call()  # torch.compile would compile the hook into the model

        def record(*_: Any) -> None:
            kind = self.run.accelerator.device.type
            autocast = torch.is_autocast_enabled(kind)
            self.scored_in = torch.get_autocast_dtype(kind) if autocast else torch.float32

        handle = find_parts(self.run.model).text.register_forward_pre_hook(record)
        try:
            return call()
        finally:
            handle.remove()


def _check_prompts_of(generation: Any, without_images: Problem | None) -> None:
    """Makes this trainer's vLLM generation compare the prompts that vLLM used with the prompts that were sent.

    Args:
        generation: TRL's `VLLMGeneration`.
        without_images: The refusal of prompts with images, if the engine cannot take them.
    """
    original = generation.generate

    def generate(prompts: Any, images: Any = None, *args: Any, **kwargs: Any) -> Any:
        if without_images is not None and any(images or ()):
            raise PrecisionError([without_images])
        result = original(prompts, images, *args, **kwargs)
        vllm.check_prompts(prompts, result[0], images)
        return result

    replace_method("prompt-check", generation, "generate", generate)


def adapter_dropout(model: nn.Module) -> float:
    """The largest dropout rate in a model's LoRA adapters; 0.0 without dropout."""
    inside = (module._modules.get("lora_dropout") for module in model.modules())
    layers = (layer for drops in inside if isinstance(drops, nn.Module) for layer in drops.modules())
    return max((float(layer.p) for layer in layers if isinstance(layer, nn.Dropout)), default=0.0)


def half_rotary_frequencies(model: nn.Module) -> Iterator[Problem]:
    """Yields a warning if rotary frequencies are in half precision, as after a cast of the whole model."""
    for name, buffer in model.named_buffers():
        half = from_torch(buffer.dtype)
        if name.endswith("inv_freq") and half in HALVES:
            yield warn("rotary-frequencies-in-half", f"{name} in {half}", dtype=half)
            return


def differing_dtypes(model: nn.Module, like: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Compares the weights of two models by name.

    Args:
        model: The model, wrapped or not.
        like: The model to compare with, wrapped or not. It may have other weights, since TRL loads a reference by its
            config's class and not by the user's.

    Returns:
        The weights of `model` that have another dtype in `like`, each with that dtype; no quantised weights.
    """
    others = dict(unwrap(like).named_parameters())
    pairs = ((p, others[name]) for name, p in unwrap(model).named_parameters() if name in others)
    return [
        (own, other.dtype)
        for own, other in pairs
        if own.dtype != other.dtype and not is_quantized(own) and not is_quantized(other)
    ]


def _is_colocated(args: Any) -> bool:
    return getattr(args, "vllm_mode", None) == "colocate"


@contextlib.contextmanager
def undo_casts(model: nn.Module, exempt: Iterable[str] = ()) -> Iterator[None]:
    """Restores the parameters and buffers of a model that is cast in place while the block runs.

    For continuous batching TRL casts the live model to half precision at each rollout and never casts it back, so that
    master weights and optimizer updates would be half precision from the first rollout on. While the block runs, the
    original weights and a half-precision copy are both in memory.

    Non-persistent buffers are not cast, as in a model loaded in half precision: with half-precision rotary frequencies
    the sampler's position embeddings would differ from the trainer's, the more the later the token.

    Args:
        model: The model, wrapped or not. After the block it has the same parameters as before.
        exempt: Names, in the base model, of modules that are not cast, because their inputs are cast to float32.
    """
    casts = {m: partial(_apply_except_buffers, m) for m in model.modules() if m._non_persistent_buffers_set}
    with weights_restored(model, exempt), contextlib.ExitStack() as stack:
        for module, cast in casts.items():
            stack.enter_context(patched("cast-of-all", module, _apply=cast))
        yield


def _apply_except_buffers(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    kept = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    type(module)._apply(module, *args, **kwargs)
    module._buffers.update(kept)
    return module

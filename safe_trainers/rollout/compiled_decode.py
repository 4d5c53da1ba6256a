"""Compiles the forward pass of each token after the first, if it is asked for, with a key-value cache of fixed size.

A rollout with `generate` runs the model once per token. On a GPU the kernels of such a pass are so short that the host
cannot start them fast enough, whatever their dtype. transformers compiles this pass into one graph if the cache has a
fixed size; TRL turns that off. With `compile_decode=True` rollouts get both.

On CUDA the pass is recorded as a CUDA graph of PyTorch's own kernels (the backend `"cudagraphs"`), unless the
generation config has a `compile_config`. The default of transformers, Inductor, fuses operations and leaves out
roundings between them, so that the sampler differs more from the trainer. Attention over a cache of fixed size may
use another kernel than over a growing one, so that other tokens may be sampled.

The first rollout is not compiled: in it the model has hooks that observe it once. The size of the cache is a multiple
of `CACHE_STEP`, so that prompts of other lengths seldom compile the pass again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, update_wrapper
from typing import Any

from torch import nn
from transformers.generation.configuration_utils import CompileConfig

from ..core.errors import Problem, raise_if, refuse, warn
from ..core.feature import Feature, Run
from ..core.patches import patched
from ..core.trl import has_rollouts, uses_continuous_batching
from ..model.input_gradients import without_hooks
from ..model.parts import unwrap


CACHE_STEP = 256
"""Sizes of the cache are multiples of this number of tokens."""
STATIC = "static"


class CompiledDecode(Feature):
    """Lets `generate` use a static cache and a compiled forward pass, from the second rollout on."""

    name = "compiled-decode"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._rollouts = 0
        self._longest = 0

    def check(self, model: nn.Module) -> Iterator[Problem]:
        """Refuses the setting where rollouts cannot be compiled."""
        reason = self._why_not(model) if self.run.settings.compile_decode else None
        if reason is not None:
            yield _refusal(reason)

    def ready(self) -> None:
        """Refuses the setting with sharded weights, which the accelerator knows."""
        sharded = self.run.sharded if self.run.settings.compile_decode else None
        if sharded is not None:
            raise_if([_refusal(f"{sharded} gathers weights in each forward pass")])

    def on_train_begin(self) -> None:
        """Rests without the setting."""
        if not self.run.settings.compile_decode:
            self.rest("before_rollout", "around_rollout")

    def _why_not(self, model: nn.Module) -> str | None:
        run, args = self.run, self.run.args
        adapters = (getattr(model, "peft_config", None) or {}).values()
        generation = getattr(args, "generation_kwargs", None) or {}
        cache = getattr(args, "cache_implementation", None) or generation.get("cache_implementation")
        reasons = {
            f"{type(run.trainer).__name__} has no rollouts": not has_rollouts(type(run.trainer)),
            "the user's rollout_func generates": getattr(run.trainer, "rollout_func", None) is not None,
            "vLLM generates, and compiles its model itself": getattr(args, "use_vllm", False),
            "continuous batching has a cache of its own": uses_continuous_batching(args),
            "`torch_compile=True` has compiled the whole model": getattr(args, "torch_compile", False),
            "`nn.DataParallel` runs copies of the model": args.n_gpu > 1,
            f"`cache_implementation={cache!r}` is not of fixed size": cache not in (None, STATIC),
            "beam search moves the entries of the cache": (generation.get("num_beams") or 1) > 1,
            "prompt learning puts tokens into the cache": any(config.is_prompt_learning for config in adapters),
            "`use_cache=False` uses no cache": generation.get("use_cache") is False,
        }
        return next((text for text, applies in reasons.items() if applies), None)

    def before_rollout(self, prompt_ids: Any) -> None:
        """Measures the longest prompt of the turn, in tokens."""
        self._longest = max(map(_length, prompt_ids), default=0) if isinstance(prompt_ids, Iterable) else 0

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn."""
        config = getattr(self.run.trainer, "generation_config", None)
        self._rollouts += 1
        if not self.run.settings.compile_decode or self._rollouts == 1 or config is None:
            return call()
        needed = self._longest + (config.max_new_tokens or 0)
        device = self.run.accelerator.device.type
        changes: dict[str, Any] = {"cache_implementation": STATIC, "disable_compile": False}
        if device == "cuda" and config.compile_config is None:
            changes["compile_config"] = CompileConfig(backend="cudagraphs", mode=None)
        if getattr(config, "max_cache_len", 0) is None:  # older releases of transformers do not have it
            changes["max_cache_len"] = -(-needed // CACHE_STEP) * CACHE_STEP
        before = {name: getattr(config, name) for name in changes}
        try:
            vars(config).update(changes)
            base: Any = unwrap(self.run.model)
            generate = update_wrapper(partial(_compiling, base.generate), base.generate)
            with without_hooks(base), patched("compiled-generate", base, generate=generate):
                result = call()
        finally:
            vars(config).update(before)
        if getattr(unwrap(self.run.model), "_compiled_call", None) is None:
            self.run.warn_once(warn("decode-not-compiled", "compile_decode=True", device=device))
        return result

    def state_dict(self) -> dict[str, Any]:
        """How many rollouts there were; the first one is not compiled."""
        return {"rollouts": self._rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores how many rollouts there were."""
        self._rollouts = int(state["rollouts"])


def _compiling(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `generate` without the argument that turns compilation off."""
    kwargs.pop("disable_compile", None)
    return generate(*args, **kwargs)


def _refusal(reason: str) -> Problem:
    return refuse("decode-cannot-be-compiled", "compile_decode=True", reason=reason)


def _length(prompt: Any) -> int:
    return len(prompt) if hasattr(prompt, "__len__") else 0

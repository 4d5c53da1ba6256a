"""Patches of TRL's modules while a trainer is built, and of the trainer; `core.patches` lists them with reasons."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from ..core.patches import patched, replace
from ..core.trl import VLLM_MODULE


ZERO3_NEEDS_ONE_DTYPE = Version("0.19.2")
"""The last DeepSpeed release whose ZeRO-3 can only gather parameters of one dtype
(https://github.com/deepspeedai/DeepSpeed/issues/8072)."""


class AdapterGuard:
    """Protects the trainable weights of a quantised model from TRL's cast to bfloat16.

    TRL casts parameters that require a gradient. The guard keeps a reference to each tensor and sets
    `requires_grad=False` until `release`, right before `Trainer.__init__`, so that TRL skips them. If something sets
    `requires_grad` again in between, `release` restores the original tensor. Nothing is copied.

    Attributes:
        fresh: Whether TRL created adapters from a `peft_config` while the guard was active.
        chunked: Whether TRL uses the chunked loss, which bypasses the head module and so its float32 cast.
    """

    def __init__(self) -> None:
        self.fresh = self.chunked = False
        self._originals: dict[nn.Parameter, torch.Tensor] = {}

    def protect(self, model: nn.Module) -> None:
        """Protects the trainable weights of a model that TRL would cast."""
        if not _is_cast_by_trl(model):
            return
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._originals[parameter] = parameter.data
                parameter.requires_grad_(False)

    def release(self, model: nn.Module | None = None) -> list[str]:
        """Restores the protected tensors and their `requires_grad`.

        Args:
            model: The model to check for trainable weights that were not protected.

        Returns:
            Names of the model's bfloat16 trainable weights that were not protected, so that TRL may have rounded them.
        """
        missed = []
        if model is not None and _is_cast_by_trl(model):
            missed = [name for name, parameter in model.named_parameters() if self._may_be_rounded(parameter)]
        for parameter, data in self._originals.items():
            parameter.data = data
            parameter.requires_grad_(True)
        self._originals.clear()
        return missed

    def _may_be_rounded(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and parameter.dtype == torch.bfloat16 and parameter not in self._originals


@contextlib.contextmanager
def construction(
    trainer_class: type,
    model: Any,
    computes_in_float32: Callable[[nn.Module], Any],
    engine_kwargs: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda module, arguments: arguments,
) -> Iterator[AdapterGuard]:
    """Patches TRL while a trainer is built: protects adapters, keeps a float32 head, completes vLLM's arguments.

    Args:
        trainer_class: The class of the trainer; the modules of its bases are patched.
        model: The trainer's `model` argument.
        computes_in_float32: Whether the head of a model must compute in float32; called when TRL fuses the head. TRL
            uses the truth of its result in each forward pass.
        engine_kwargs: Takes the name of a module and the keyword arguments of its vLLM engine; returns the arguments
            to use.

    Yields:
        The guard. It is released when the block ends, if not earlier.
    """
    guard = AdapterGuard()
    given = isinstance(model, nn.Module) and hasattr(model, "peft_config") and hasattr(model, "add_adapter")

    def add_adapter(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        guard.protect(model)  # PEFT leaves some kinds of second adapters (TRL's reference) trainable
        return result

    def make_adapters(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "autocast_adapter_dtype" in kwargs and not _zero3_needs_one_dtype():
            del kwargs["autocast_adapter_dtype"]
        made = original(*args, **kwargs)
        guard.fresh = True
        guard.protect(made)
        return made

    def fuse(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("cast_lm_head_to_fp32"):
            kwargs["cast_lm_head_to_fp32"] = computes_in_float32(model)
        return original(model, *args, **kwargs)

    def chunk(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guard.chunked = True  # only recorded: whether the head must be float32 is decided later
        return original(*args, **kwargs)

    def build_engine(module: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **engine_kwargs(module, kwargs))

    in_modules = (
        ("peft-maker", "get_peft_model", make_adapters),
        ("fused-head", "add_fused_lm_head", fuse),
        ("chunked-head", "_patch_chunked_ce_lm_head", chunk),
    )
    if given:
        guard.protect(model)
    try:
        with contextlib.ExitStack() as stack:
            if given:
                wrapped = partial(add_adapter, model.add_adapter)
                stack.enter_context(patched("given-adapter", model, add_adapter=wrapped))
            modules = _modules(trainer_class)
            for patch, name, replacement in in_modules:
                for module in modules:
                    if name in vars(module):
                        value = partial(replacement, vars(module)[name])
                        stack.enter_context(patched(patch, module, **{name: value}))
            for module in {*modules, *filter(None, [sys.modules.get(VLLM_MODULE)])}:
                if "LLM" in vars(module):
                    value = partial(build_engine, module.__name__, vars(module)["LLM"])
                    stack.enter_context(patched("vllm-engine", module, LLM=value))
            yield guard
    finally:
        guard.release()


def compute_redirected_in_autocast(trainer: Any) -> None:
    """Runs a loss that TRL redirects through the model (`DistillationTrainer`) under the autocast of the run.

    accelerate runs the forward pass of a model under autocast. TRL's redirection replaces that forward pass by the
    loss, which then computes in the dtype of the weights.

    Args:
        trainer: The trainer, after its construction.
    """
    redirection = vars(trainer).get("_forward_redirection")
    if redirection is None:
        return

    def redirect(wrapper: nn.Module, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def in_autocast(*args: Any, **kwargs: Any) -> Any:
            with trainer.accelerator.autocast():
                return method(*args, **kwargs)

        return redirection(wrapper, module, in_autocast, *args, **kwargs)

    replace("redirected-loss", trainer, "_forward_redirection", redirect)


def _modules(trainer_class: type) -> list[ModuleType]:
    """The modules of a class's bases, and the TRL modules that they import functions from (`prepare_peft_model`)."""
    names = {base.__module__ for base in trainer_class.__mro__}
    own = [sys.modules[name] for name in names if name in sys.modules]
    trl = [module for module in own if module.__name__.split(".")[0] == "trl"]
    helpers = {
        value.__module__ for module in trl for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__.split(".")[0] == "trl"
    }  # fmt: skip
    return [*own, *(sys.modules[name] for name in sorted(helpers - names) if name in sys.modules)]


def _is_cast_by_trl(model: nn.Module) -> bool:
    """Whether TRL casts the trainable weights of a model; it checks these two attributes, which PEFT forwards."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def _zero3_needs_one_dtype() -> bool:
    """Whether `autocast_adapter_dtype=False`, which TRL passes only under ZeRO-3, is still needed."""
    try:
        return Version(metadata.version("deepspeed")) <= ZERO3_NEEDS_ONE_DTYPE
    except metadata.PackageNotFoundError:
        return True

"""The few names of foreign modules that construction has to hold for a moment.

Nothing else in this package sets an attribute outside it. Each capture is undone when its block ends, however it ends.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import nn


MAKER = "get_peft_model"
"""The name in each TRL trainer's module by which it makes adapters."""
FUSER = "add_fused_lm_head"
"""The name by which TRL makes a head that multiplies and takes log-probabilities in one."""
CHUNKER = "_patch_chunked_ce_lm_head"
"""What SFT has in its place in some releases before 1.16; it has no argument for float32."""
ENGINE, VLLM_MODULE = "LLM", "trl.generation.vllm_generation"
"""The name by which TRL builds a vLLM engine, and the module where its trainers do."""
ZERO3_NEEDS_ONE_DTYPE = Version("0.19.2")
"""The last DeepSpeed whose ZeRO-3 gathers parameters of one dtype only
(https://github.com/deepspeedai/DeepSpeed/issues/8072)."""


class AdapterGuard:
    """Keeps the bits of a quantised model's trainables while TRL builds a trainer around them.

    TRL casts what requires a gradient. So what PEFT made is held and does not require one until the guard is released,
    right before `Trainer.__init__`: nothing is rounded, and nothing is copied. Should something turn gradients on
    again in between, TRL's cast is undone with the tensor that was held.

    Attributes:
        fresh: Whether the adapters were made while the guard was on, by a `peft_config`.
        chunked: Whether TRL multiplies with the head's weight past the head, which float32 would not reach.
    """

    def __init__(self) -> None:
        self.fresh = self.chunked = False
        self._held: dict[nn.Parameter, torch.Tensor] = {}

    def hold(self, model: nn.Module) -> None:
        """Holds the trainables of a model, if it is one that TRL casts.

        Args:
            model: What PEFT returned, or what the user passed.
        """
        if not _is_cast_by_trl(model):
            return
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._held[parameter] = parameter.data
                parameter.requires_grad_(False)

    def release(self, model: nn.Module | None = None) -> list[str]:
        """Gives the held tensors back to their parameters, exactly as they were, and forgets them.

        Args:
            model: The model that they belong to, to look for what was not held.

        Returns:
            Names of bfloat16 trainables of the model that were never held: what TRL may have rounded.
        """
        missed = []
        if model is not None and _is_cast_by_trl(model):
            missed = [name for name, parameter in model.named_parameters() if self._may_be_rounded(parameter)]
        for parameter, data in self._held.items():
            parameter.data = data
            parameter.requires_grad_(True)
        self._held.clear()
        return missed

    def _may_be_rounded(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and parameter.dtype == torch.bfloat16 and parameter not in self._held


@contextlib.contextmanager
def construction(
    trainer_class: type, model: Any, computes_in_float32: Callable[[nn.Module], bool]
) -> Iterator[AdapterGuard]:
    """Guards the adapters that a trainer of a class is built with, given or made, and tells TRL of a float32 head.

    TRL's fused head multiplies with the head's weight and never calls the head itself, so that nothing on the module
    reaches it; but it has an argument for float32.

    Args:
        trainer_class: The class; the modules of its bases are where adapters and fused heads are made.
        model: What the user passed as the model.
        computes_in_float32: Whether the head of a model is to compute in float32; asked when TRL fuses it.

    Yields:
        The guard. It is released when the block ends, if it was not before.
    """
    guard = AdapterGuard()
    given = isinstance(model, nn.Module) and hasattr(model, "peft_config") and hasattr(model, "add_adapter")

    def adding(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_adapter(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            guard.hold(model)  # PEFT leaves some kinds of a second adapter, TRL's reference, trainable
            return result

        return add_adapter

    def making(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if "autocast_adapter_dtype" in kwargs and not _zero3_needs_one_dtype():
                del kwargs["autocast_adapter_dtype"]
            made = original(*args, **kwargs)
            guard.fresh = True
            guard.hold(made)
            return made

        return make

    def fusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def fuse(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if computes_in_float32(model):
                kwargs["cast_lm_head_to_fp32"] = True
            return original(model, *args, **kwargs)

        return fuse

    def chunking(original: Callable[..., Any]) -> Callable[..., Any]:
        def chunk(*args: Any, **kwargs: Any) -> Any:
            guard.chunked = True  # before anything is settled: whether the head is to be float32 is not known yet
            return original(*args, **kwargs)

        return chunk

    modules = _modules(trainer_class)
    captured = [
        (module, name, vars(module)[name], wrap)
        for name, wrap in ((MAKER, making), (FUSER, fusing), (CHUNKER, chunking))
        for module in modules
        if name in vars(module)
    ]
    if given:
        guard.hold(model)
    try:
        if given:
            vars(model)["add_adapter"] = adding(model.add_adapter)
        for module, name, original, wrap in captured:
            setattr(module, name, wrap(original))
        yield guard
    finally:
        for module, name, original, _ in captured:
            setattr(module, name, original)
        if given:
            vars(model).pop("add_adapter", None)
        guard.release()


@contextlib.contextmanager
def engines(trainer_class: type, told: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Completes what each vLLM engine is built with while the block runs.

    Args:
        trainer_class: The class of the trainer; the modules of its bases, and TRL's module for vLLM, are where engines
            are built.
        told: Given the name of the module and the keywords of an engine, returns those that it gets.

    Yields:
        Nothing.
    """
    modules = {module.__name__: module for module in _modules(trainer_class)}
    if VLLM_MODULE in sys.modules:
        modules[VLLM_MODULE] = sys.modules[VLLM_MODULE]
    originals = {name: vars(module)[ENGINE] for name, module in modules.items() if ENGINE in vars(module)}

    def building(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **told(name, kwargs))

    try:
        for name, original in originals.items():
            setattr(modules[name], ENGINE, building(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(modules[name], ENGINE, original)


def _modules(trainer_class: type) -> list[ModuleType]:
    """The modules of a class's bases, and those of TRL whose functions they use (`prepare_peft_model`)."""
    names = {base.__module__ for base in trainer_class.__mro__}
    own = [sys.modules[name] for name in names if name in sys.modules]
    trl = [module for module in own if module.__name__.split(".")[0] == "trl"]
    helpers = {
        value.__module__ for module in trl for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__.split(".")[0] == "trl"
    }  # fmt: skip
    return [*own, *(sys.modules[name] for name in sorted(helpers - names) if name in sys.modules)]


def _is_cast_by_trl(model: nn.Module) -> bool:
    """Whether TRL casts the trainables of a model: by these two attributes, which PEFT hands on."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def _zero3_needs_one_dtype() -> bool:
    """Whether TRL's `autocast_adapter_dtype=False`, which it passes under ZeRO-3 alone, is still needed."""
    try:
        return Version(metadata.version("deepspeed")) <= ZERO3_NEEDS_ONE_DTYPE
    except metadata.PackageNotFoundError:
        return True

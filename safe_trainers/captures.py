"""The few names of foreign modules that construction has to hold for a moment.

Nothing else in this package sets an attribute outside it. Each capture is undone when its block ends, however it ends.
"""

import contextlib
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import nn


MAKER = "get_peft_model"
"""The name in each TRL trainer's module by which it makes adapters."""
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
    """

    def __init__(self) -> None:
        self.fresh = False
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
def adapters_held(trainer_class: type, model: Any) -> Iterator[AdapterGuard]:
    """Guards the adapters that a trainer of a class is built with, given or made.

    Args:
        trainer_class: The class; the modules of its bases are where adapters are made.
        model: What the user passed as the model.

    Yields:
        The guard. It is released when the block ends, if it was not before.
    """
    guard = AdapterGuard()
    if isinstance(model, nn.Module) and hasattr(model, "peft_config"):
        guard.hold(model)
    modules = {sys.modules[base.__module__] for base in trainer_class.__mro__}
    originals = {module: vars(module)[MAKER] for module in modules if MAKER in vars(module)}

    def capturing(original: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            if "autocast_adapter_dtype" in kwargs and not _zero3_needs_one_dtype():
                del kwargs["autocast_adapter_dtype"]
            made = original(*args, **kwargs)
            guard.fresh = True
            guard.hold(made)
            return made

        return make

    try:
        for module, original in originals.items():
            setattr(module, MAKER, capturing(original))
        yield guard
    finally:
        for module, original in originals.items():
            setattr(module, MAKER, original)
        guard.release()


def _is_cast_by_trl(model: nn.Module) -> bool:
    """Whether TRL casts the trainables of a model: by these two attributes, which PEFT hands on."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def _zero3_needs_one_dtype() -> bool:
    """Whether TRL's `autocast_adapter_dtype=False`, which it passes under ZeRO-3 alone, is still needed."""
    try:
        return Version(metadata.version("deepspeed")) <= ZERO3_NEEDS_ONE_DTYPE
    except metadata.PackageNotFoundError:
        return True

"""Reads the safety contract of a trainer class: which parts of a run it covers, and by which hook."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from ..core.coverage import COVERED, NOT_APPLICABLE, UNCOVERED, Coverage, SafetyContract
from ..core.errors import ContractError
from ..core.trl import BUFFER_METHOD, ROLLOUT_METHOD, trl_bases, uses_continuous_batching


ABOVE, BELOW = "PrecisionMixin", "PrecisionBase"
"""Names of the classes above and below TRL's trainer."""


_GENERATES = {"generate", "generate_batch", "unwrap_model_for_generation", "rollout_worker"}
"""Names of which a method that generates calls at least one."""
_PREPARE, _STEP = "_prepare_inputs", "training_step"


def contract_of(
    trainer_class: type, not_aligned: str | None = None, engine: str | None = None, takes_media: bool = True
) -> SafetyContract:
    """Returns the safety contract of a trainer class.

    What a class does is read from the names that its methods use: whether one calls a function that generates, and
    whether the `_prepare_inputs` of `Trainer` is still called. A run then counts how often each hook fires.

    Args:
        trainer_class: A class built from `PrecisionMixin`, a TRL trainer and `PrecisionBase`.
        not_aligned: Why a run does not generate in the compute context of training; `None` if it does.
        engine: Which engine generates and in which dtype; `None` for the model's own `generate`.
        takes_media: Whether the model takes images or audio.

    Returns:
        The contract, with no hook fired.
    """
    methods = _methods(trainer_class)
    generates = any(name.startswith(("_generate", "generate")) or _GENERATES & names for name, names in methods)
    if not takes_media:
        media = Coverage("media", NOT_APPLICABLE, "the model takes no images or audio")
    elif _prepares_inputs(methods):
        media = Coverage("media", COVERED, f"{_PREPARE} casts media inputs to the dtype of their tower", "inputs")
    else:
        media = Coverage("media", UNCOVERED, f"the class prepares its batches without the {_PREPARE} of `Trainer`")
    if not_aligned is not None and generates:
        rollout = Coverage("rollout", UNCOVERED, not_aligned)
    elif _inherits(trainer_class, ROLLOUT_METHOD):
        detail = engine or f"{ROLLOUT_METHOD} runs in the compute context of training"
        rollout = Coverage("rollout", COVERED, detail, "rollout")
    elif generates:
        detail = f"the class generates, but not in {ROLLOUT_METHOD}: its rollouts compute as in stock TRL"
        rollout = Coverage("rollout", UNCOVERED, detail)
    else:
        rollout = Coverage("rollout", NOT_APPLICABLE, "the class does not generate")
    if _inherits(trainer_class, BUFFER_METHOD):
        buffer = Coverage("buffer", COVERED, "media in the scored batch have the dtype of their tower", "buffer")
    elif generates:
        buffer = Coverage("buffer", UNCOVERED, f"the class generates, but not in {BUFFER_METHOD}")
    else:
        buffer = Coverage("buffer", NOT_APPLICABLE, "the class does not buffer rollouts")
    return SafetyContract(
        trainer_class.__name__,
        (
            media,
            Coverage("boundaries", COVERED, "placed in the model and in a reference model where two dtypes can meet"),
            Coverage("adapters", COVERED, "_adapters_ready restores the values that PEFT created", "adapters"),
            rollout,
            buffer,
        ),
    )


@functools.lru_cache(maxsize=64)
def _methods(trainer_class: type) -> tuple[tuple[str, frozenset[str]], ...]:
    """Returns the methods of TRL's and the user's classes, most derived first, each with the names that it uses."""
    bases = [
        base
        for base in trainer_class.__mro__
        if base.__module__.split(".")[0] not in {"safe_trainers", "transformers", "builtins"}
    ]
    functions = ((name, _function(value)) for base in bases for name, value in vars(base).items())
    return tuple((name, frozenset(_names(f.__code__))) for name, f in functions if f is not None)


def _function(value: Any) -> FunctionType | None:
    """Returns the function in an attribute of a class, without its decorators; `None` if there is none."""
    if isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that a function uses, and the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _prepares_inputs(methods: Sequence[tuple[str, frozenset[str]]]) -> bool:
    """Whether batches pass the `_prepare_inputs` below TRL's trainer, or a method calls `_prepare_input` itself."""

    def is_replaced(method: str) -> bool:
        return any(name == method and not {"super", method} <= names for name, names in methods)

    if any("_prepare_input" in names for _, names in methods):
        return True
    if is_replaced(_PREPARE):
        return any(name != _PREPARE and {"super", _PREPARE} <= names for name, names in methods)
    return not is_replaced(_STEP) or any(_PREPARE in names for _, names in methods)


def why_not_aligned(trainer: Any, args: Any) -> str | None:
    """Why a run does not generate in the compute context of training; `None` if it does."""
    if getattr(trainer, "rollout_func", None) is not None:
        return "the user's rollout_func generates"
    return "rollout_compute='stock'" if getattr(args, "rollout_compute", None) == "stock" else None


def describe_engine(args: Any) -> str | None:
    """Which engine generates and in which dtype; `None` for the model's own `generate`."""
    if getattr(args, "use_vllm", False):
        server = getattr(args, "vllm_mode", None) == "server"
        dtype = "the vLLM server's dtype is compared with the trainer's" if server else "vLLM gets the trainer's dtype"
        return f"{dtype}, and merged weights are sent without changing the base weights"
    if uses_continuous_batching(args):
        return "continuous batching computes in a half-precision copy; the original weights are restored afterwards"
    return None


def check_bases(trainer_class: type) -> None:
    """Raises `ContractError`, with the corrected line, if the order of the bases would bypass a hook."""
    order = {cls: position for position, cls in enumerate(trainer_class.__mro__)}
    positions = [order[cls] for cls in trl_bases(trainer_class)]
    if not positions:
        return  # the user's own mixin or base class, without a TRL trainer yet
    sides = {vars(cls)["_side"]: position for cls, position in order.items() if "_side" in vars(cls)}
    if "above" in sides and "below" in sides and sides["above"] < min(positions) and max(positions) < sides["below"]:
        return
    bases = [cls.__name__ for cls in trainer_class.__bases__]
    trainers = [name for name in bases if name not in (ABOVE, BELOW, "object")]
    corrected = ", ".join([ABOVE, *trainers, BELOW])
    why = (
        f"{ABOVE} must come before the TRL trainer, to receive the calls that TRL makes on `self`, and {BELOW} after "
        "it, to receive the calls that TRL makes through `super()`"
    )
    raise ContractError(
        f"class {trainer_class.__name__}({', '.join(bases)}): {why}. "
        f"Write:\n    class {trainer_class.__name__}({corrected}): ..."
    )


def _inherits(trainer_class: type, method: str) -> bool:
    return any(method in vars(base) for base in trl_bases(trainer_class))

"""Reads the safety contract of a trainer class: which parts of a run it covers, and by which hook."""

from typing import Any

from ..core.coverage import COVERED, NOT_APPLICABLE, UNCOVERED, Coverage, SafetyContract
from ..core.errors import ContractError
from ..core.trl import BUFFER_METHOD, ROLLOUT_METHOD, trl_bases, uses_continuous_batching


ABOVE, BELOW = "PrecisionMixin", "PrecisionBase"
"""Names of the classes above and below TRL's trainer."""


def contract_of(trainer_class: type, not_aligned: str | None = None, engine: str | None = None) -> SafetyContract:
    """Returns the safety contract of a trainer class.

    Args:
        trainer_class: A class built from `PrecisionMixin`, a TRL trainer and `PrecisionBase`.
        not_aligned: Why a run does not generate in the compute context of training; `None` if it does.
        engine: Which engine generates and in which dtype; `None` for the model's own `generate`.

    Returns:
        The contract, with no hook fired.
    """
    generates = any(
        name.startswith(("_generate", "generate")) or name == "rollout_worker"
        for base in trainer_class.__mro__
        if base.__module__.split(".")[0] not in {"safe_trainers", "transformers", "builtins"}
        for name in vars(base)
    )
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
            Coverage("media", COVERED, "_prepare_input(s) casts media inputs to the dtype of their tower", "inputs"),
            Coverage("boundaries", COVERED, "placed in the model and in a reference model where two dtypes can meet"),
            Coverage("adapters", COVERED, "_adapters_ready restores the values that PEFT created", "adapters"),
            rollout,
            buffer,
        ),
    )


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

"""What a trainer class covers, which of its hooks have really fired in this run, and what it does not cover."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .errors import ContractError


COVERED, ABSENT, UNCOVERED = "covered", "not applicable", "not covered"

HOOKS = {
    "adapters": "the moment after TRL made its adapters and before anything moves or an optimizer exists",
    "inputs": "every batch that TRL prepares for a model: training, rollout, scoring, tool images, evaluation",
    "rollout": "each turn of generation",
    "buffer": "the scored rollout batch, before TRL buffers and slices it",
}
"""The hooks of the sandwich, and when each fires."""

ROLLOUT_METHOD, BUFFER_METHOD = "_generate_single_turn", "_generate_and_score_completions"


@dataclass(frozen=True)
class Coverage:
    """One promise of a trainer class.

    Attributes:
        area: What it is about.
        state: `"covered"`, `"not applicable"` or `"not covered"`.
        detail: By which hook, or why not.
        hook: The hook that has to fire for it, `None` where there is none.
    """

    area: str
    state: str
    detail: str
    hook: str | None = None


@dataclass
class SafetyContract:
    """The promises of a trainer class, and what of it has been seen in this run.

    Attributes:
        trainer: Name of the class.
        coverage: The promises.
        fired: How often each hook has fired, by hook.
    """

    trainer: str
    coverage: tuple[Coverage, ...]
    fired: Counter[str] = field(default_factory=Counter)

    def __getitem__(self, area: str) -> Coverage:
        return next(coverage for coverage in self.coverage if coverage.area == area)

    def missing(self) -> list[Coverage]:
        """The covered promises whose hook has not fired yet; none after a run of any length that needed them."""
        return [c for c in self.coverage if c.state == COVERED and c.hook and not self.fired[c.hook]]

    def to_dict(self) -> dict[str, Any]:
        """The contract as plain values, ready for JSON."""
        return {
            "trainer": self.trainer,
            "coverage": [vars(coverage) for coverage in self.coverage],
            "fired": {hook: self.fired[hook] for hook in HOOKS},
        }

    def __str__(self) -> str:
        width = max(len(coverage.area) for coverage in self.coverage)
        lines = [f"{c.area:<{width}}  {c.state}: {c.detail}{self._count(c)}" for c in self.coverage]
        return "\n".join([f"safety contract of {self.trainer}", *lines])

    def _count(self, coverage: Coverage) -> str:
        return f" (fired {self.fired[coverage.hook]} times)" if coverage.hook and coverage.state == COVERED else ""


def contract_of(trainer_class: type, elsewhere: str | None = None, how: str | None = None) -> SafetyContract:
    """Reads the contract off a class.

    Args:
        trainer_class: A class made of `PrecisionMixin`, a TRL trainer and `PrecisionBase`.
        elsewhere: Why a run of the class does not generate in what it trains in; `None` where it does.
        how: How it generates, where not by the model's own `generate`.

    Returns:
        Its contract, nothing fired yet.
    """
    generates = any(
        name.startswith(("_generate", "generate")) or name == "rollout_worker"
        for base in trainer_class.__mro__
        if base.__module__.split(".")[0] not in {"safe_trainers", "transformers", "builtins"}
        for name in vars(base)
    )
    if elsewhere is not None and generates:
        rollout = Coverage("rollout", UNCOVERED, elsewhere)
    elif _inherits(trainer_class, ROLLOUT_METHOD):
        detail = how or f"{ROLLOUT_METHOD} runs in the compute context of training"
        rollout = Coverage("rollout", COVERED, detail, "rollout")
    elif generates:
        detail = f"the class generates, and not in {ROLLOUT_METHOD}: its rollout computes as upstream's"
        rollout = Coverage("rollout", UNCOVERED, detail)
    else:
        rollout = Coverage("rollout", ABSENT, "the class does not generate")
    if _inherits(trainer_class, BUFFER_METHOD):
        buffer = Coverage("buffer", COVERED, "media in the scored batch are in their tower's dtype", "buffer")
    elif generates:
        buffer = Coverage("buffer", UNCOVERED, f"the class generates, and not in {BUFFER_METHOD}")
    else:
        buffer = Coverage("buffer", ABSENT, "the class buffers no rollouts")
    return SafetyContract(
        trainer_class.__name__,
        (
            Coverage("media", COVERED, "media inputs follow their tower, through _prepare_input(s)", "inputs"),
            Coverage("boundaries", COVERED, "placed in the model, and in a reference model, where dtypes can meet"),
            Coverage("adapters", COVERED, "the PEFT init hook sees them before the optimizer exists", "adapters"),
            rollout,
            buffer,
        ),
    )


def generates_elsewhere(trainer: Any, args: Any) -> str | None:
    """Why a run does not generate in what it trains in, `None` where it does.

    Args:
        trainer: The trainer, which may still be being built.
        args: Its training arguments.
    """
    if getattr(trainer, "rollout_func", None) is not None:
        return "a rollout_func of the user's generates"
    return "as asked by rollout_compute='stock'" if getattr(args, "rollout_compute", None) == "stock" else None


def generates_how(args: Any) -> str | None:
    """How a run generates, where not by the model's own `generate`.

    Args:
        args: The training arguments.
    """
    if getattr(args, "use_vllm", False):
        told = "was asked its dtype" if getattr(args, "vllm_mode", None) == "server" else "is told its dtype"
        return f"vLLM {told}, and gets merged weights without the base being touched"
    if batches_continuously(args):
        return "continuous batching computes in a half copy of the weights, which TRL's cast leaves beside them"
    return None


def batches_continuously(args: Any) -> bool:
    """Whether transformers' continuous batching generates.

    Args:
        args: The training arguments; in older releases of TRL the setting has another name.
    """
    names = ("use_transformers_continuous_batching", "use_transformers_paged")
    return any(getattr(args, name, False) for name in names)


def trl_bases(trainer_class: type) -> list[type]:
    """The classes of TRL that a class inherits from, most derived first."""
    return [base for base in trainer_class.__mro__ if base.__module__.split(".")[0] == "trl"]


def check_bases(trainer_class: type, mixin: type, base: type) -> None:
    """Refuses a class whose bases are in an order in which a hook would never be reached.

    Args:
        trainer_class: The class being made.
        mixin: The class that belongs above TRL's.
        base: The class that belongs below TRL's.

    Raises:
        ContractError: With the corrected line.
    """
    order = {cls: position for position, cls in enumerate(trainer_class.__mro__)}
    positions = [order[cls] for cls in trl_bases(trainer_class)]
    if not positions:
        return  # a mixin or a base of the user's own, still without its trainer
    if mixin in order and base in order and order[mixin] < min(positions) and max(positions) < order[base]:
        return
    trainers = [cls.__name__ for cls in trainer_class.__bases__ if cls not in (mixin, base, object)]
    corrected = ", ".join([mixin.__name__, *trainers, base.__name__])
    given = ", ".join(cls.__name__ for cls in trainer_class.__bases__)
    why = (
        f"{mixin.__name__} has to come before the TRL trainer, to receive what TRL calls on `self`, and "
        f"{base.__name__} after it, to receive what TRL calls through `super()`"
    )
    raise ContractError(
        f"class {trainer_class.__name__}({given}): {why}. Write:\n    class {trainer_class.__name__}({corrected}): ..."
    )


def _inherits(trainer_class: type, method: str) -> bool:
    return any(method in vars(base) for base in trl_bases(trainer_class))

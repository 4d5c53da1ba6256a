"""Names in TRL that several packages use."""

from typing import Any


ROLLOUT_METHOD, BUFFER_METHOD = "_generate_single_turn", "_generate_and_score_completions"
VLLM_MODULE = "trl.generation.vllm_generation"
"""The module in which TRL's trainers build vLLM engines."""


def uses_continuous_batching(args: Any) -> bool:
    """Whether a run generates with transformers' continuous batching.

    Args:
        args: The training arguments. Older releases of TRL have another name for the setting.
    """
    names = ("use_transformers_continuous_batching", "use_transformers_paged")
    return any(getattr(args, name, False) for name in names)


def has_rollouts(trainer_class: type) -> bool:
    """Whether a trainer makes rollout batches in `BUFFER_METHOD`."""
    return any(BUFFER_METHOD in vars(base) for base in trl_bases(trainer_class))


def trl_bases(trainer_class: type) -> list[type]:
    """Returns the TRL classes in a class's MRO, most derived first."""
    return [base for base in trainer_class.__mro__ if base.__module__.split(".")[0] == "trl"]

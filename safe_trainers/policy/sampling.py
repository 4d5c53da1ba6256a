"""Sampling settings that change vLLM's log-probabilities, checked from plain values."""

from collections.abc import Callable
from typing import Any

from ..core.errors import Problem, refuse


CORRECTION = "vllm_importance_sampling_correction"

CORRECTABLE: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
}
"""Settings that make vLLM's log-probabilities differ from those of `logits / temperature`, with the values (besides
`None`) that have no effect. The trainer's log-probabilities can be renormalised by the same rule. TRL requests
`logprobs_mode="processed_logprobs"`: the log-probabilities of the distribution that vLLM samples from."""

UNCORRECTABLE: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "min_tokens": (0,),
    "structured_outputs": (),
    "vllm_structured_outputs_regex": (),
}
"""Settings with the same effect, whose rule depends on the engine's tokenizer or state."""

IN_ONE_TURN = ("presence_penalty", "frequency_penalty")
"""Penalties for which vLLM counts the tokens of one turn, which is not the whole completion if tools are called."""


def changed_settings(get: Callable[[str], Any]) -> list[tuple[str, str]]:
    """The settings of a run that change vLLM's log-probabilities in a way that can be corrected.

    Args:
        get: Returns the value of a setting by name, `None` if it is unset.

    Returns:
        Each setting as it was passed, and as a message names it.
    """
    return _changed(get, CORRECTABLE)


def uncorrectable_settings(get: Callable[[str], Any], tools: bool = False) -> list[tuple[str, str]]:
    """The settings of a run that change vLLM's log-probabilities in a way that cannot be corrected.

    Args:
        get: Returns the value of a setting by name, `None` if it is unset.
        tools: Whether the run calls tools.

    Returns:
        Each setting as it was passed, and as a message names it.
    """
    # `generation_kwargs` override the settings, and the trainer scores with the temperature of the settings.
    neutral = {**UNCORRECTABLE, "temperature": (get("temperature"),)}
    return _changed(get, neutral | {name: CORRECTABLE[name] for name in IN_ONE_TURN if tools})


def uncorrectable(get: Callable[[str], Any], tools: bool = False) -> Problem | None:
    """Refuses settings under which TRL's importance weights for vLLM compare two different distributions.

    Args:
        get: Returns the value of a setting by name, `None` if it is unset.
        tools: Whether the run calls tools.

    Returns:
        The refusal; `None` if vLLM is not used, its samples are not corrected, or the difference can be corrected.
    """
    if not get("use_vllm") or not get(CORRECTION):
        return None
    named = uncorrectable_settings(get, tools)
    if not named:
        return None
    given = ", ".join(setting for setting, _ in named)
    drop = " and ".join(name for _, name in named)
    return refuse("truncated-sampling-with-correction", f"{given} with use_vllm=True and {CORRECTION}=True", drop=drop)


def _changed(get: Callable[[str], Any], neutral: dict[str, tuple[Any, ...]]) -> list[tuple[str, str]]:
    inner = get("generation_kwargs")
    inner = inner if isinstance(inner, dict) else {}
    own = {name: get(name) for name in neutral if name not in inner and name != "temperature"}
    named = [(f"{name}={value!r}", f"`{name}`") for name, value in own.items() if _changes(value, neutral[name])]
    return named + [
        (f"generation_kwargs={{{name!r}: {value!r}}}", f"`{name}` from `generation_kwargs`")
        for name, value in inner.items()
        if name in neutral and _changes(value, neutral[name])
    ]


def _changes(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is not None and value not in neutral

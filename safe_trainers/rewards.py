r"""Reward functions by name: TRL's own, those below, and anyone's by dotted path.

The rewards below read a completion and the column `solution`; they need no other package.
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .answers import final_answer, same_answer
from .errors import RecipeError, hint, nearest
from .tiny.rewards import completion_text


_THINK_ANSWER = re.compile(r"\s*<think>(?!.*<think>).*?</think>\s*<answer>(?!.*<answer>).*?</answer>\s*", re.DOTALL)
_THINK_BOXED = re.compile(r"\s*<think>(?!.*<think>).*?</think>.*\\boxed\{.*\}.*", re.DOTALL)


def math_answer_reward(
    completions: Sequence[Any], solution: Sequence[str | None], choices: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""Rewards 1 for the right final answer, 0 for any other.

    The answer is what stands in `<answer>` tags, in `\boxed{}` or after "the answer is"; texts, letters of choices,
    and numbers with units, fractions, roots and percentages are compared by what they say. No algebra is done.

    Args:
        completions: `B` completions, texts or conversations.
        solution: `B` right answers, or worked solutions that end in one.
        choices: `B` lists of the choices' texts, where the dataset has such a column: then a letter names one.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1; `None` where there is no right answer to compare with.
    """
    options = choices if choices is not None else [None] * len(completions)
    return [
        float(same_answer(final_answer(completion_text(completion)), right, offered)) if right else None
        for completion, right, offered in zip(completions, map(_right, solution), options, strict=True)
    ]


def _right(solution: str | None) -> str:
    return final_answer(str(solution)) if solution is not None else ""


def think_answer_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Rewards 1 for `<think>...</think><answer>...</answer>` and nothing else, 0 for any other form.

    Args:
        completions: `B` completions, texts or conversations.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1.
    """
    return [float(_THINK_ANSWER.fullmatch(completion_text(one)) is not None) for one in completions]


def think_boxed_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""Rewards 1 for `<think>...</think>` followed by a text with `\boxed{}`, 0 for any other form.

    Args:
        completions: `B` completions, texts or conversations.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1.
    """
    return [float(_THINK_BOXED.fullmatch(completion_text(one)) is not None) for one in completions]


REWARDS: dict[str, Callable[..., list[Any]]] = {
    reward.__name__: reward for reward in (math_answer_reward, think_answer_format_reward, think_boxed_format_reward)
}
"""The rewards of this package, by the name that a recipe calls them."""

NEEDS_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")
SOFT_OVERLONG = "get_soft_overlong_punishment"
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", SOFT_OVERLONG)


def import_reward(name: str) -> Any:
    """The reward function of a name.

    Args:
        name: One of `REWARDS` or `TRL_REWARDS`, or a dotted path such as `my_package.rewards.exact_match`.

    Returns:
        The function.

    Raises:
        RecipeError: If there is none, it cannot be imported, or it is no reward function.
    """
    if name in REWARDS:
        return REWARDS[name]
    if name in TRL_REWARDS:
        import trl.rewards

        if name in NEEDS_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
            raise RecipeError(f"{name} needs the math_verify package. Run: pip install math_verify")
        reward = getattr(trl.rewards, name)
        # The numbers of TRL's own command line.
        return reward(max_completion_len=1280, soft_punish_cache=256) if name == SOFT_OVERLONG else reward
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        meant = hint(nearest(name, (*TRL_REWARDS, *REWARDS)))
        raise RecipeError(
            f"there is no reward function {name!r}{meant or '.'} There are {', '.join((*REWARDS, *TRL_REWARDS))}, and "
            "dotted paths such as my_package.rewards.exact_match"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise RecipeError(f"reward function {name!r} cannot be imported: {said}") from None
    reward = getattr(module, attribute, None)
    if not callable(reward):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(attribute, functions)
        raise RecipeError(f"module {module_name} has no function {attribute!r}{hint(near, f'{module_name}.')}")
    if not _takes_what_trl_gives(reward):
        raise RecipeError(
            f"{name!r} is no reward function: TRL calls it with prompts, completions, the dataset's columns and more, "
            f"by name. Write: def {attribute}(completions, **kwargs) -> list[float]"
        )
    return reward


def _takes_what_trl_gives(reward: Callable[..., Any]) -> bool:
    """Whether a function can be called as TRL calls rewards; one that does not show its arguments is believed."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except ValueError:
        return True
    names = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    # A class is built by a call, and gives no list of rewards.
    return not isinstance(reward, type) and (takes_any or {"completions", "trainer_state"} <= names)

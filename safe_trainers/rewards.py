"""Reward functions by name: TRL's own, and anyone's by dotted path."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from .errors import RecipeError, hint, nearest


NEEDS_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def import_reward(name: str) -> Any:
    """The reward function of a name.

    Args:
        name: One of `TRL_REWARDS`, or a dotted path such as `my_package.rewards.exact_match`.

    Returns:
        The function.

    Raises:
        RecipeError: If there is none, it cannot be imported, or it is no reward function.
    """
    if name in TRL_REWARDS:
        import trl.rewards

        if name in NEEDS_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
            raise RecipeError(f"{name} needs the math_verify package. Run: pip install math_verify")
        return getattr(trl.rewards, name)
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise RecipeError(
            f"there is no reward function {name!r}{hint(nearest(name, TRL_REWARDS))}: it is one of "
            f"{', '.join(TRL_REWARDS)}, or a dotted path such as my_package.rewards.exact_match"
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

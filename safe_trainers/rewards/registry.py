r"""Reward functions by name: those of TRL, those defined here, and others by dotted path.

The functions defined here use the completions and the column `solution`, and need no other package.
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import Fix, Problem, RecipeError, hint, nearest, run_command, write, write_example
from ..tiny.rewards import completion_text
from .math_answer import final_answer, same_answer


_THINK_ANSWER = re.compile(r"\s*<think>(?!.*<think>).*?</think>\s*<answer>(?!.*<answer>).*?</answer>\s*", re.DOTALL)
_THINK_BOXED = re.compile(r"\s*<think>(?!.*<think>).*?</think>.*\\boxed\{.*\}.*", re.DOTALL)


def math_answer_reward(
    completions: Sequence[Any], solution: Sequence[str | None], choices: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""Rewards 1 for a correct final answer, 0 for any other.

    The answer is the content of `<answer>` tags or of `\boxed{}`, or follows "the answer is". Strings, letters of
    choices, and numbers with units, fractions, roots and percentages are compared by meaning, without algebra.

    Args:
        completions: `B` completions, strings or conversations.
        solution: `B` correct answers, or solutions that end with one.
        choices: `B` lists with the strings of the choices, if the dataset has such a column; the answer may then be a
            letter.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1; `None` for rows without a solution.
    """
    options = choices if choices is not None else [None] * len(completions)
    return [
        float(same_answer(final_answer(completion_text(completion)), right, offered)) if right else None
        for completion, right, offered in zip(completions, map(_right, solution), options, strict=True)
    ]


def _right(solution: str | None) -> str:
    return final_answer(str(solution)) if solution is not None else ""


def think_answer_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Rewards 1 for the format `<think>...</think><answer>...</answer>`, 0 for any other.

    Args:
        completions: `B` completions, strings or conversations.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1.
    """
    return [float(_THINK_ANSWER.fullmatch(completion_text(one)) is not None) for one in completions]


def think_boxed_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""Rewards 1 for `<think>...</think>` followed by text with `\boxed{}`, 0 for any other format.

    Args:
        completions: `B` completions, strings or conversations.
        **kwargs: Ignored; the trainers pass further columns.

    Returns:
        `B` rewards, 0 or 1.
    """
    return [float(_THINK_BOXED.fullmatch(completion_text(one)) is not None) for one in completions]


REWARDS: dict[str, Callable[..., list[Any]]] = {
    reward.__name__: reward for reward in (math_answer_reward, think_answer_format_reward, think_boxed_format_reward)
}
"""The reward functions of this package, by their names in recipes."""

NEEDS_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")
SOFT_OVERLONG = "get_soft_overlong_punishment"
PASSED = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
)
"""What TRL passes to reward functions besides the columns of the dataset."""
NOT_PASSED = frozenset(("prompt", "completion", "completion_ids"))
"""The columns that TRL does not pass to reward functions under their own names."""
PROMPT_COLUMNS = ("prompt", "image", "images")
"""The columns that `remove_unused_columns` keeps."""
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", SOFT_OVERLONG)


def import_reward(name: str) -> Any:
    """Imports a reward function.

    Args:
        name: One of `REWARDS` or `TRL_REWARDS`, or a dotted path such as `my_package.rewards.exact_match`.

    Returns:
        The function.

    Raises:
        RecipeError: If it does not exist, cannot be imported, or cannot be called as a reward function.
    """
    if name in REWARDS:
        return REWARDS[name]
    if name in TRL_REWARDS:
        import trl.rewards

        if name in NEEDS_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
            raise RecipeError(needs_math_verify(name))
        reward = getattr(trl.rewards, name)
        # The defaults of TRL's command line.
        return reward(max_completion_len=1280, soft_punish_cache=256) if name == SOFT_OVERLONG else reward
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        suggestion = hint(nearest(name, (*TRL_REWARDS, *REWARDS)))
        raise RecipeError(
            f"{name!r} is not a reward function{suggestion or '.'} Expected one of "
            f"{', '.join((*REWARDS, *TRL_REWARDS))}, or a dotted path such as my_package.rewards.exact_match"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a module can raise any error
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise RecipeError(f"reward function {name!r} cannot be imported: {why}") from None
    reward = getattr(module, attribute, None)
    if not callable(reward):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(attribute, functions)
        raise RecipeError(f"module {module_name} has no function {attribute!r}{hint(near, f'{module_name}.')}")
    if not _accepts_trl_arguments(reward):
        raise RecipeError(not_a_reward(name))
    return reward


def needed_columns(reward: Any) -> list[str]:
    """The columns that a reward function cannot be called without.

    Args:
        reward: A function, or the name of one of `REWARDS` or `TRL_REWARDS`.

    Returns:
        Its parameters without a default that TRL does not pass itself; empty if it has no readable signature.
    """
    if isinstance(reward, str):
        if reward not in REWARDS:  # TRL is not imported to read a name
            return ["solution"] if reward in NEEDS_MATH_VERIFY else []
        reward = REWARDS[reward]
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (ValueError, TypeError):  # not a function of Python, such as a model
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [one.name for one in parameters if one.kind in named and one.default is one.empty]
    return [name for name in required if name not in PASSED]


def missing_for_reward(
    name: str,
    needed: Sequence[str],
    columns: Sequence[str],
    there: Sequence[str],
    asked: Mapping[str, Any] | None,
    removes_unused: bool,
) -> Problem | None:
    """The problem of a reward function that needs a column which TRL does not pass to it.

    Args:
        name: The reward.
        needed: Its `needed_columns`.
        columns: The columns of the run.
        there: The columns of the dataset.
        asked: The recipe's `dataset_columns`.
        removes_unused: The recipe's `remove_unused_columns`.

    Returns:
        The problem of the first such column; `None` if there is none.
    """
    passed = [column for column in columns if column in PROMPT_COLUMNS or not removes_unused]
    missing = next((one for one in needed if one not in passed or one in NOT_PASSED), None)
    if missing is None:
        return None
    what = f"reward {name} needs the column {missing!r}"
    if missing in NOT_PASSED:
        return Problem(f"{what}, which TRL passes as {missing}s", fix=Fix(f"rename its parameter to `{missing}s`"))
    if missing in columns:
        return Problem(f"{what}, which remove_unused_columns removes", fix=write(remove_unused_columns=False))
    what += f", and the run has only {', '.join(columns)}"
    used = set(asked.values()) if asked else set(PROMPT_COLUMNS)
    spare = [column for column in there if column not in used]
    if not spare:
        return Problem(what, fix=Fix(f"use a dataset with a column {missing!r}, or drop `{name}` from `reward_funcs`"))
    chosen = nearest(missing, spare) or spare[0]
    kept = asked or {column: column for column in there if column != chosen}
    return Problem(what, fix=write_example(dataset_columns={**kept, missing: chosen}))


def needs_math_verify(name: str) -> Problem:
    """The problem of a reward whose package is not installed.

    Args:
        name: The reward.
    """
    return Problem(f"{name} needs the math_verify package", fix=run_command("pip install math_verify"))


def not_a_reward(name: str) -> Problem:
    """The problem of a function, or of something else, that cannot be called as TRL calls rewards.

    Args:
        name: Its dotted name.
    """
    what = f"{name!r} is not a reward function"
    why = "TRL passes prompts, completions, the dataset's columns and more as keyword arguments"
    line = f"def {name.rpartition('.')[2]}(completions, **kwargs) -> list[float]"
    return Problem(what, why, Fix(f"define it as `{line}`"))


def _accepts_trl_arguments(reward: Callable[..., Any]) -> bool:
    """Whether a function can be called as TRL calls reward functions; true if it has no readable signature."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())
    except ValueError:
        return True
    names = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    # Calling a class returns an instance, not a list of rewards.
    return not isinstance(reward, type) and (takes_any or {"completions", "trainer_state"} <= names)

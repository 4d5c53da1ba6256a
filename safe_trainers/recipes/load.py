"""Recipes: a YAML file of TRL's own keys plus those of `RecipeArguments`, read strictly.

Everything that can be wrong with a recipe is found before anything is written or loaded, and reported at once:
`validate` checks the file as plain data, and passes its values to TRL's own parser.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trl import TrlParser

from ..core.errors import Place, PrecisionError, Problem, RecipeError, write_example
from ..data.columns import missing_columns
from ..rewards.registry import import_reward, missing_for_reward, needed_columns
from .keys import RecipeArguments, recipe_classes
from .settings import CommandLine
from .validate import Checked, check_recipe, split_config


@dataclass
class Recipe:
    """A recipe that was read and checked.

    Attributes:
        task: Its algorithm's name.
        extra: The keys of `RecipeArguments`.
        script: Dataset and reward keys.
        training: The Safe config.
        model: TRL's `ModelConfig`.
        mixture: TRL's `DatasetMixtureConfig`.
        source: The recipe file; `None` if everything came from the command line.
        values: What was written, by key.
    """

    task: str
    extra: RecipeArguments
    script: Any
    training: Any
    model: Any
    mixture: Any
    source: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


class _Parser(TrlParser):
    """TRL's parser, but errors are raised instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(message)


def read_recipe(task: str, argv: Sequence[str]) -> Recipe:
    """Reads a recipe and the overrides that follow it.

    Args:
        task: One of `TASKS`.
        argv: `["--config", "recipe.yaml", "--learning_rate", "1e-5", ...]`; the command line wins.

    Returns:
        The recipe, checked as far as possible without loading a model.

    Raises:
        RecipeError: With all problems at once; an unknown key with the nearest valid one.
        PrecisionError: If all of them are refusals of the precision.
    """
    path, overrides = split_config(list(argv))
    return load_recipe(check_recipe(path, task, overrides))


def load_recipe(checked: Checked) -> Recipe:
    """Builds the config objects of a checked recipe.

    Args:
        checked: The recipe, without errors.

    Returns:
        The recipe.

    Raises:
        RecipeError: If the configs of TRL and transformers refuse a value.
        PrecisionError: If the Safe config refuses the precision on this device.
    """
    parser = _Parser(recipe_classes(checked.task))
    # As TRL passes the values of a file: argparse does not check defaults, and these have been checked.
    parser.set_defaults_with_config(**checked.values)
    place = CommandLine() if checked.path is None else Place(checked.path)
    try:
        extra, script, training, model, mixture = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
    except PrecisionError:
        raise
    except RecipeError as error:
        raise RecipeError([problem.at(place) for problem in error.problems]) from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        # The configs of TRL and transformers refused a value.
        raise RecipeError(Problem(str(error), place=place)) from error
    source = None if checked.path is None else Path(checked.path)
    recipe = Recipe(checked.task, extra, script, training, model, mixture, source, checked.values)
    if hasattr(script, "reward_funcs"):
        load_rewards(recipe)
    return recipe


def load_rewards(recipe: Recipe) -> list[Any]:
    """The reward functions of a recipe: TRL's by name, any function by dotted path, a reward model by its folder.

    Args:
        recipe: A `grpo` or `rloo` recipe.

    Returns:
        What the trainers accept as `reward_funcs`.

    Raises:
        RecipeError: If one cannot be imported, with the nearest valid spelling.
    """
    script = recipe.script
    rewards: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    rewards += [import_reward(name) for name in script.reward_funcs or []]
    if not rewards:
        raise RecipeError(Problem("reward_funcs is empty", fix=write_example(reward_funcs=["think_format_reward"])))
    return rewards


def check_columns(recipe: Recipe, columns: Sequence[str]) -> None:
    """Refuses a dataset without the columns that the task needs, and one without images if the recipe needs images.

    Args:
        recipe: The recipe.
        columns: The dataset's columns; empty for a stream that does not tell.

    Raises:
        RecipeError: With the columns that are there.
    """
    text_field = getattr(recipe.training, "dataset_text_field", None) or "text"
    name, images = str(recipe.script.dataset_name), recipe.extra.needs_images
    wrong = missing_columns(recipe.task, name, columns, images, text_field)
    if wrong is not None:
        raise RecipeError(wrong)


def check_reward_columns(recipe: Recipe, columns: Sequence[str], there: Sequence[str]) -> None:
    """Refuses a dataset without a column that a reward function cannot be called without.

    Args:
        recipe: The recipe; other tasks than `grpo` and `rloo` have no reward functions.
        columns: The columns of the run.
        there: The columns of the dataset.

    Raises:
        RecipeError: With all such reward functions, and the line that names the column.
    """
    asked: Mapping[str, str] | None = recipe.extra.dataset_columns  # type: ignore[assignment]
    removes = bool(recipe.training.remove_unused_columns)
    found = [
        missing_for_reward(name, needed_columns(import_reward(name)), columns, there, asked, removes)
        for name in getattr(recipe.script, "reward_funcs", None) or []
    ]
    wrong = [problem for problem in found if problem is not None]
    if wrong:
        raise RecipeError(wrong)

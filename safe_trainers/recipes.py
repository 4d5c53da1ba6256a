"""Recipes: a YAML file of TRL's own keys plus the few below, read strictly.

Everything that can be wrong with a recipe is found before anything is written or loaded, and said at once:
`validation` checks the file as plain data, and what it lets through goes to TRL's own parser.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from . import packaged
from .arguments import SafeGRPOConfig, SafeRewardConfig, SafeRLOOConfig, SafeSFTConfig
from .data import DatasetArguments
from .dtypes import parse_dtype
from .embedded import COLUMNS, EMBEDDED_DATASETS, EMBEDDED_MODELS, TINY, embedded_name, missing_columns
from .errors import PrecisionError, RecipeError
from .rewards import import_reward
from .settings import Remark
from .validation import split_config, validate


__all__ = [
    "COLUMNS",
    "EMBEDDED_DATASETS",
    "EMBEDDED_MODELS",
    "TASKS",
    "TINY",
    "Recipe",
    "RecipeArguments",
    "Task",
    "check_columns",
    "embedded_name",
    "find_recipe",
    "load_rewards",
    "read_recipe",
    "recipe_classes",
]


@dataclass
class RecipeArguments(DatasetArguments):
    """The keys of a recipe beside TRL's; those about the dataset's columns are in `DatasetArguments`.

    Attributes:
        needs_images: Refuse a dataset without an `image` or `images` column.
        dataset_size: Number of training examples of an embedded dataset.
        evaluation_size: Number of held-out examples that the result is measured on, by greedy decoding; 0 for none.
        shuffle_images: Give every question the picture of another, as a control: nothing can be learned.
        warm_up_steps: Steps of supervised training of an embedded model before the run.
        warm_up_learning_rate: Its learning rate.
        warm_up_batch_size: Its batch size.
        warm_up_bias: Share of its answers that name the same colour whatever the picture shows. The model then says
            that colour when it is asked for its best answer, and has to be taught better by the reward.
        bnb_4bit_compute_dtype: What 4-bit layers compute in; unset, and else the same, the compute dtype of the run.
        progress: Show a progress bar.
    """

    needs_images: bool = field(default=False, metadata={"help": "Refuse a dataset without images."})
    dataset_size: int = field(default=1024, metadata={"help": "Training examples of an embedded dataset."})
    evaluation_size: int = field(default=192, metadata={"help": "Held-out examples to measure the result on."})
    shuffle_images: bool = field(default=False, metadata={"help": "Control: every question gets another's picture."})
    warm_up_steps: int = field(default=0, metadata={"help": "Supervised steps of an embedded model before the run."})
    warm_up_learning_rate: float = field(default=6e-4, metadata={"help": "Learning rate of the warm-up."})
    warm_up_batch_size: int = field(default=32, metadata={"help": "Batch size of the warm-up."})
    warm_up_bias: float = field(default=0.0, metadata={"help": "Share of warm-up answers that name one colour."})
    bnb_4bit_compute_dtype: str | None = field(
        default=None, metadata={"help": "Compute dtype of 4-bit layers; that of the run where it is left unset."}
    )
    progress: bool = field(default=True, metadata={"help": "Show a progress bar."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bnb_4bit_compute_dtype is not None:
            parse_dtype(self.bnb_4bit_compute_dtype, field="bnb_4bit_compute_dtype", allow_auto=False)
        at_least = {"dataset_size": 1, "evaluation_size": 0, "warm_up_steps": 0, "warm_up_batch_size": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small. Write: {name}: {least} or more")
        if not 0 <= self.warm_up_bias <= 1:
            raise ValueError(f"warm_up_bias={self.warm_up_bias} is no share. Write: warm_up_bias: 0.6, or 0 to 1")


@dataclass(frozen=True)
class Task:
    """One algorithm of the command line.

    Attributes:
        trainer: Name of the trainer class.
        config: Its config class.
        script: TRL's dataclass with the dataset and reward keys.
    """

    trainer: str
    config: type
    script: type


TASKS = {
    "grpo": Task("SafeGRPOTrainer", SafeGRPOConfig, GRPOScriptArguments),
    "rloo": Task("SafeRLOOTrainer", SafeRLOOConfig, RLOOScriptArguments),
    "sft": Task("SafeSFTTrainer", SafeSFTConfig, ScriptArguments),
    "reward": Task("SafeRewardTrainer", SafeRewardConfig, ScriptArguments),
}


def recipe_classes(task: str) -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe.

    They feed the parser and the schema alike: what a field is added to needs no more than one `make schema`.

    Args:
        task: One of `TASKS`.
    """
    return RecipeArguments, TASKS[task].script, TASKS[task].config, ModelConfig, DatasetMixtureConfig


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
        source: The recipe file, `None` where everything came from the command line.
        remarks: What there is to say about it that does not stop the run.
    """

    task: str
    extra: RecipeArguments
    script: Any
    training: Any
    model: Any
    mixture: Any
    source: Path | None = None
    remarks: tuple[Remark, ...] = ()


class _Parser(TrlParser):
    """TRL's parser, which raises instead of printing its whole usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(message)


def read_recipe(task: str, argv: Sequence[str]) -> Recipe:
    """Reads a recipe and the overrides that follow it.

    Args:
        task: `"grpo"`, `"rloo"`, `"sft"` or `"reward"`.
        argv: `["--config", "recipe.yaml", "--learning_rate", "1e-5", ...]`; the command line wins.

    Returns:
        The recipe, checked as far as it can be without loading a model.

    Raises:
        RecipeError: For whatever cannot be run, all problems at once; every unknown key with the nearest valid one.
        PrecisionError: Where all that is wrong is the precision.
    """
    from .schema_make import live_schema

    path, overrides = split_config(list(argv))
    checked = validate(path, task=task, overrides=overrides, schema=live_schema(task), started=True)
    checked.check()
    parser = _Parser(recipe_classes(task))
    # As TRL hands on what a file says: argparse checks no defaults, and these have been checked.
    parser.set_defaults_with_config(**checked.values)
    try:
        parsed = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
    except PrecisionError:
        raise
    except RecipeError as error:
        raise RecipeError(f"{path or 'command line'}: {error}") from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        # What the configs of TRL and transformers refuse by themselves, in their own words.
        raise RecipeError(f"{path or 'command line'}: {error}") from error
    extra, script, training, model, mixture = parsed
    recipe = Recipe(task, extra, script, training, model, mixture, path, checked.remarks)
    if hasattr(recipe.script, "reward_funcs"):
        load_rewards(recipe)
    return recipe


def load_rewards(recipe: Recipe) -> list[Any]:
    """The reward functions of a recipe: TRL's by name, anyone's by dotted path, a reward model by its folder.

    Args:
        recipe: A `grpo` or `rloo` recipe.

    Returns:
        What the trainers take as `reward_funcs`.

    Raises:
        RecipeError: If one cannot be imported, with the nearest valid spelling.
    """
    script = recipe.script
    rewards: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    rewards += [import_reward(name) for name in script.reward_funcs or []]
    if not rewards:
        raise RecipeError(
            "reward_funcs is empty. Write: reward_funcs: [think_format_reward], or a dotted path of your own"
        )
    return rewards


def find_recipe(name: str) -> Path:
    """The file of a recipe that comes with the package.

    Args:
        name: Such as `grpo/tiny_vlm_bf16.yaml`.

    Returns:
        Its path: inside an installed package, or in the checkout that the package runs from.

    Raises:
        RecipeError: If there is none of that name, with the nearest one.
    """
    return packaged.find(name, "recipes")


def check_columns(recipe: Recipe, columns: Sequence[str]) -> None:
    """Refuses a dataset without the columns that the task needs, and one without pictures where they are needed.

    Args:
        recipe: The recipe.
        columns: The dataset's columns; none where a stream does not tell.

    Raises:
        RecipeError: With the columns that are there.
    """
    wrong = missing_columns(recipe.task, str(recipe.script.dataset_name), columns, recipe.extra.needs_images)
    if wrong is not None:
        raise RecipeError(wrong)

"""Recipes: a YAML file of TRL's own keys plus the few below, read strictly.

Everything that can be wrong with a recipe is found before anything is written or loaded: unknown keys, values of the
wrong type, contradicting precision, rewards that cannot be imported, folders that are missing. TRL's parser takes
values from a file unchecked, as argparse does with defaults; here they go through the same door as the command line's.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from .arguments import SafeGRPOConfig, SafeRewardConfig, SafeRLOOConfig, SafeSFTConfig
from .data import DatasetArguments
from .dtypes import parse_dtype
from .errors import PrecisionError, RecipeError, hint, nearest
from .quantized_loading import checkpoint_config
from .rewards import import_reward
from .tiny import FAMILIES


TINY = "tiny:"
"""Prefix of the embedded models and datasets, which are made on the spot: `tiny:aria`, `tiny:shapes`."""

EMBEDDED_MODELS = (*FAMILIES, "reward")
"""The embedded models; `reward` is a text model with a score head."""

COLUMNS = {
    "grpo": (("prompt",),),
    "rloo": (("prompt",),),
    "sft": (("messages",), ("prompt", "completion"), ("text",), ("input_ids",)),
    "reward": (("chosen", "rejected"),),
}
"""The columns that each task needs: one of these groups."""

EMBEDDED_DATASETS = {"shapes": ("prompt", "image", "solution"), "preferences": ("chosen", "rejected")}
"""The embedded datasets and their columns."""


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
    """

    task: str
    extra: RecipeArguments
    script: Any
    training: Any
    model: Any
    mixture: Any
    source: Path | None = None


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
        RecipeError: For whatever cannot be run; every unknown key is named with the nearest valid one.
        PrecisionError: For contradicting precision settings.
    """
    path, overrides = _split_config(list(argv))
    classes = (RecipeArguments, TASKS[task].script, TASKS[task].config, ModelConfig, DatasetMixtureConfig)
    values = _load_yaml(path) if path is not None else {}
    known = {f.name for cls in classes for f in dataclasses.fields(cls) if f.init}
    overridden = [arg[2:].split("=")[0] for arg in overrides if arg.startswith("--")]
    _check_keys(values, known, f"in {path}")
    _check_keys([key for key in overridden if key.replace("-", "_") not in known], known, "on the command line")
    # A value from the file is dropped where the command line has one, so that argparse sees each key once.
    taken = {key.replace("-", "_") for key in overridden}
    arguments = [arg for key, value in values.items() if key not in taken for arg in _as_arguments(key, value)]
    try:
        parsed = _Parser(classes).parse_args_into_dataclasses(args=[*arguments, *overrides], look_for_args_file=False)
    except PrecisionError:
        raise
    except RecipeError as error:
        raise RecipeError(f"{path or 'command line'}: {error}") from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        # What the configs of TRL and transformers refuse by themselves, in their own words.
        raise RecipeError(f"{path or 'command line'}: {error}") from error
    extra, script, training, model, mixture = parsed
    recipe = Recipe(task, extra, script, training, model, mixture, path)
    _check(recipe)
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
    package = Path(__file__).parent
    for folder in (package / "_data" / "recipes", package.parent / "recipes"):
        if (folder / name).is_file():
            return folder / name
        if folder.is_dir():
            known = [path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")]
            raise RecipeError(f"there is no recipe {name}{hint(nearest(name, known))}")
    raise RecipeError("this installation holds no recipes")


def embedded_name(value: str | None) -> str | None:
    """The name behind `tiny:`, `None` where the value names nothing embedded."""
    return value.removeprefix(TINY) if value is not None and value.startswith(TINY) else None


def _split_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in argv:
        return None, argv
    position = argv.index("--config")
    if position + 1 == len(argv):
        raise RecipeError("--config needs a file. Write: --config recipes/grpo/tiny_vlm_bf16.yaml")
    return Path(argv[position + 1]), [*argv[:position], *argv[position + 2 :]]


def _load_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        raise RecipeError(f"there is no recipe {path}{hint(nearest(str(path), siblings))}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {type(values).__name__}, not `key: value` lines")
    return values


def _check_keys(keys: Iterable[Any], known: set[str], where: str) -> None:
    unknown = [str(key) for key in keys if key not in known]
    if unknown:
        raise RecipeError([f"{where}: there is no key {key!r}{hint(nearest(key, known))}" for key in unknown])


def _as_arguments(key: str, value: Any) -> list[str]:
    """A value of a file as the command line would give it, so that both are checked by the same parser."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    if isinstance(value, dict):
        return [f"--{key}", json.dumps(value)]
    return [f"--{key}={value}"]


def _check(recipe: Recipe) -> None:
    """What needs more than the parser: names that have to exist, before anything is made."""
    problems = [
        *_attempt(lambda: _check_model(recipe)),
        *_attempt(lambda: _check_dataset(recipe)),
        *_attempt(lambda: load_rewards(recipe) if hasattr(recipe.script, "reward_funcs") else None),
        *_attempt(lambda: _check_output(recipe)),
    ]
    if problems:
        raise RecipeError(problems)


def _attempt(check: Callable[[], Any]) -> tuple[str, ...]:
    try:
        check()
    except RecipeError as error:
        return error.problems
    return ()


def _check_model(recipe: Recipe) -> None:
    name = recipe.model.model_name_or_path
    if name is None:
        raise RecipeError(
            "model_name_or_path is missing. Write: model_name_or_path: tiny:aria, or a folder or hub name"
        )
    family = embedded_name(name)
    if family is not None and family not in EMBEDDED_MODELS:
        raise RecipeError(f"there is no embedded model {name!r}{hint(nearest(family, EMBEDDED_MODELS), TINY)}")
    if family is None and recipe.extra.warm_up_steps:
        raise RecipeError(f"warm_up_steps is for embedded models, and {name!r} is none. Drop `warm_up_steps`")
    if family is None and _is_path(name) and not (Path(name) / "config.json").is_file():
        where = Path(name)
        siblings = [str(p.parent) for p in where.parent.glob("*/config.json")] if where.parent.is_dir() else []
        raise RecipeError(f"there is no model in the folder {name}{hint(nearest(name, siblings))}")
    if family == "reward" and recipe.task != "reward":
        raise RecipeError(f"{name} only scores; {recipe.task} needs a model that answers, such as tiny:text")
    if not isinstance(recipe.training.model_init_kwargs or {}, dict):
        raise RecipeError("model_init_kwargs holds no `key: value` pairs. Write: model_init_kwargs: {dtype: bfloat16}")
    if recipe.model.dtype is not None:
        parse_dtype(recipe.model.dtype)
    if recipe.extra.bnb_4bit_compute_dtype is not None and not recipe.model.load_in_4bit:
        saved = checkpoint_config(name, recipe.training).get("quantization_config") or {}
        if family is not None or (Path(name).is_dir() and not saved.get("load_in_4bit")):
            raise RecipeError(
                f"bnb_4bit_compute_dtype is for 4-bit models, and {name} is none. Write: load_in_4bit: true"
            )


def _check_dataset(recipe: Recipe) -> None:
    name = recipe.script.dataset_name
    embedded = embedded_name(name)
    if name is None and not recipe.mixture.datasets:
        raise RecipeError("dataset_name is missing. Write: dataset_name: tiny:shapes, or a folder or hub name")
    if embedded is not None and embedded not in EMBEDDED_DATASETS:
        raise RecipeError(f"there is no embedded dataset {name!r}{hint(nearest(embedded, EMBEDDED_DATASETS), TINY)}")
    if name is not None and embedded is None and _is_path(name) and not Path(name).exists():
        raise RecipeError(f"there is no dataset at {name}")
    if embedded is not None:
        columns = EMBEDDED_DATASETS[embedded]
        check_columns(recipe, (*columns, "completion") if recipe.task == "sft" and "prompt" in columns else columns)
        family = embedded_name(recipe.model.model_name_or_path)
        if "image" in columns and family in {"text", "gpt_oss", "reward"}:
            raise RecipeError(
                f"{name} has pictures, and {TINY}{family} takes none. Write: model_name_or_path: tiny:llava"
            )


def check_columns(recipe: Recipe, columns: Sequence[str]) -> None:
    """Refuses a dataset without the columns that the task needs, and one without pictures where they are needed.

    Args:
        recipe: The recipe.
        columns: The dataset's columns; none where a stream does not tell.

    Raises:
        RecipeError: With the columns that are there.
    """
    needed = COLUMNS[recipe.task]
    if columns and not any(set(group) <= set(columns) for group in needed):
        wanted = ", or ".join(" and ".join(group) for group in needed)
        raise RecipeError(
            f"dataset {recipe.script.dataset_name} has the columns {', '.join(columns)}; {recipe.task} needs {wanted}"
        )
    if recipe.extra.needs_images and not {"image", "images"} & set(columns):
        raise RecipeError(_no_images(str(recipe.script.dataset_name), columns))


def _no_images(name: str, columns: Sequence[str]) -> str:
    near = next((match for column in columns if (match := nearest(column, ("image", "images")))), None)
    rename = f". Rename its column, or did you mean {near!r}?" if near else ""
    return (
        f"dataset {name} has no `image` or `images` column, only {', '.join(columns)}, and this recipe needs pictures"
        f"{rename or '. Use a dataset with pictures, or write needs_images: false'}"
    )


def _check_output(recipe: Recipe) -> None:
    output = Path(recipe.training.output_dir)
    if output.exists() and not output.is_dir():
        raise RecipeError(f"output_dir {output} is a file. Write: output_dir: {output}-run")
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise RecipeError(f"output_dir {output} cannot be written: {existing} is read-only")
    resume = recipe.training.resume_from_checkpoint
    if resume and str(resume).lower() not in {"true", "false"} and not Path(resume).is_dir():
        raise RecipeError(f"there is no checkpoint {resume}. Write: resume_from_checkpoint: {output}/checkpoint-100")


def _is_path(name: str) -> bool:
    """Whether a name can only be a folder: hub names have at most one slash, and start with no dot."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()

"""`safe-trainers grpo|rloo|sft|reward`: checks a recipe, makes what it needs, trains, and writes what came out."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import RecipeError, SafeTrainersError


@dataclass
class Run:
    """What a training run left behind.

    Attributes:
        trainer: The trainer, trained.
        output_dir: The folder with the checkpoint, the log and the plot.
        score_name: What was measured on held-out examples, `None` where nothing was.
        before: The score before the run.
        after: The score after it.
        chance: The score of the best constant answer.
    """

    trainer: Any
    output_dir: Path
    score_name: str | None = None
    before: float | None = None
    after: float | None = None
    chance: float | None = None


def train(task: str, argv: Sequence[str], console: Console | None = None) -> Run:
    """Runs a recipe.

    Args:
        task: `"grpo"`, `"rloo"`, `"sft"` or `"reward"`.
        argv: `["--config", FILE, "--key", "value", ...]`.
        console: Where to write; by default standard output.

    Returns:
        The run.

    Raises:
        RecipeError: If the recipe cannot be run; nothing has been written then.
        PrecisionError: If its precision cannot work; nothing has been written then, where it can be known before the
            model is loaded.
    """
    from ..recipes import read_recipe

    console = console or Console()
    recipe = read_recipe(task, argv)
    return run_recipe(recipe, console)


def run_recipe(recipe: Any, console: Console, trainer_class: type | None = None) -> Run:
    """Runs a recipe that was read.

    Args:
        recipe: The `Recipe`.
        console: Where to write.
        trainer_class: Another trainer class than the task's, to compare with.

    Returns:
        The run.
    """
    from trl import get_peft_config, get_quantization_config

    import safe_trainers

    from ..declared import declared_policy
    from ..recipes import TASKS, load_rewards
    from .progress import show_progress

    trainer_class = trainer_class or getattr(safe_trainers, TASKS[recipe.task].trainer)
    arguments = recipe.training
    arguments.model_init_kwargs = _model_init_kwargs(recipe)
    asked = get_quantization_config(dataclasses.replace(recipe.model, dtype="float32"))
    policy = declared_policy(arguments, recipe.model.model_name_or_path, trainer_class, asked)
    policy.check()
    compute_of_4bit = _compute_of_4bit(recipe, policy)
    dataset, evaluation, held_out = _datasets(recipe)
    _check_model_exists(recipe)

    output_dir = Path(arguments.output_dir)
    with _only_if_it_works(output_dir):
        settings: dict[str, Any] = {
            "model": _model(recipe, console),
            "args": arguments,
            "train_dataset": dataset,
            "eval_dataset": evaluation if arguments.eval_strategy != "no" else None,
            "quantization_config": get_quantization_config(dataclasses.replace(recipe.model, dtype=compute_of_4bit)),
            "peft_config": get_peft_config(dataclasses.replace(recipe.model, lora_task_type=_lora_task_type(recipe))),
        }
        if hasattr(recipe.script, "reward_funcs"):
            settings["reward_funcs"] = load_rewards(recipe)
        trainer = trainer_class(**settings)
    show_progress(trainer, console, recipe.task, recipe.extra.progress)
    run = Run(trainer, output_dir)
    score = _score(recipe, trainer, held_out)
    if score is not None:
        run.score_name, measure, run.chance = score
        run.before = measure()
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if score is not None:
        run.after = measure()
    trainer.save_model(arguments.output_dir)
    if trainer.accelerator.is_main_process:
        write_run(run, recipe, console)
    return run


def _lora_task_type(recipe: Any) -> str:
    """What PEFT has to know of the task; TRL's default fits language models alone."""
    asked: str = recipe.model.lora_task_type
    return "SEQ_CLS" if recipe.task == "reward" and asked == "CAUSAL_LM" else asked


@contextlib.contextmanager
def _only_if_it_works(output_dir: Path) -> Iterator[None]:
    """Makes the output folder for what is built inside, and removes it again where that fails.

    What TRL, transformers and PEFT refuse while a trainer is built is bad input too: it is said in their own words.

    Args:
        output_dir: The folder; one that was there before is left there.

    Raises:
        RecipeError: In place of an error of theirs.
    """
    # Innermost first; empty where the folder itself was there before.
    missing = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        if missing and os.environ.get("RANK", "0") == "0":
            shutil.rmtree(output_dir, ignore_errors=True)
            for parent in missing[1:]:
                if parent.is_dir() and not any(parent.iterdir()):  # another run may live there by now
                    parent.rmdir()
        upstream = isinstance(error, (ValueError, TypeError, ImportError, OSError, LookupError, AttributeError))
        if upstream and not isinstance(error, SafeTrainersError):
            raise RecipeError(f"the trainer cannot be built: {type(error).__name__}: {error}") from error
        raise


def write_run(run: Run, recipe: Any, console: Console) -> None:
    """Writes the log and the plot of a run, and says where they are.

    Args:
        run: The run.
        recipe: Its recipe.
        console: Where to write.
    """
    from .plot import plot_run, why_not

    log, trainer = run.output_dir / "log.json", run.trainer
    content = {
        "recipe": None if recipe.source is None else str(recipe.source),
        "score": {"name": run.score_name, "before": run.before, "after": run.after, "best_constant": run.chance},
        "precision": _precision(trainer),
        "log": trainer.state.log_history,
    }
    temporary = log.with_suffix(".json.part")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    temporary.replace(log)
    plot = plot_run(trainer.state.log_history, run.output_dir / "plot.png", type(trainer).__name__)
    if run.score_name is not None:
        console.print(
            f"{run.score_name} on held-out examples: {run.before:.3f} -> [bold]{run.after:.3f}[/] "
            f"(best constant answer {run.chance:.3f})",
            soft_wrap=True,
            highlight=False,
        )
    console.print(f"checkpoint  {run.output_dir}", highlight=False)
    console.print(f"log         {log}", highlight=False)
    drawn = str(plot) if plot else f"not drawn: {why_not(trainer.state.log_history)}"
    console.print(f"plot        {drawn}", highlight=False, markup=False)


def _precision(trainer: Any) -> dict[str, Any] | None:
    if not hasattr(trainer, "precision_policy"):
        return None
    return {
        "policy": trainer.precision_policy.to_dict(),
        "census": trainer.precision_census.to_dict(),
        "preparation": trainer.precision_preparation.to_dict(),
        "settlement": trainer.precision_settlement.to_dict(),
        "media": [vars(decision) for decision in trainer.media_decisions],
        "contract": trainer.safety_contract.to_dict(),
    }


def _model_init_kwargs(recipe: Any) -> dict[str, Any]:
    """What TRL's own scripts make of `ModelConfig`; `model_init_kwargs` of the recipe wins."""
    model = recipe.model
    declared = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    return {key: value for key, value in declared.items() if value is not None} | (
        recipe.training.model_init_kwargs or {}
    )


def _compute_of_4bit(recipe: Any, policy: Any) -> str:
    """What 4-bit layers compute in: as the run does.

    TRL's own scripts take `dtype`, what the weights are loaded in: float32 where nothing is written, and `auto` fails.

    Raises:
        PrecisionError: If the recipe asks for another dtype than the run computes in.
    """
    from ..dtypes import FLOAT32, SHORT, parse_dtype
    from ..errors import PrecisionError
    from ..policy import OFF
    from ..quantized_loading import contradiction

    asked = recipe.extra.bnb_4bit_compute_dtype
    decided = str(policy.compute.value if policy.autocast.value == OFF else policy.autocast.value)
    if decided not in SHORT:  # without autocast operations follow weights that are not known before they are loaded
        return FLOAT32 if asked is None else parse_dtype(asked)
    problem = contradiction(asked, decided)
    if problem is not None:
        raise PrecisionError([problem])
    return decided


def _check_model_exists(recipe: Any) -> None:
    """Refuses a model that cannot be found, before anything is written."""
    from transformers import AutoConfig

    from ..recipes import embedded_name

    name = recipe.model.model_name_or_path
    if embedded_name(name) is not None:
        return
    try:
        AutoConfig.from_pretrained(
            name, revision=recipe.model.model_revision, trust_remote_code=recipe.training.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"model {name} cannot be read: {str(error).splitlines()[0]}") from None


def _datasets(recipe: Any) -> tuple[Any, Any, Any]:
    """The training set, the evaluation set, and held-out examples to score, the last where the data is embedded."""
    from .. import tiny
    from ..recipes import embedded_name

    extra, seed = recipe.extra, recipe.training.seed
    embedded = embedded_name(recipe.script.dataset_name)
    if embedded is None:
        splits = _load_dataset(recipe)
        train = _prepared(recipe, splits, recipe.script.dataset_train_split)
        evaluated = recipe.training.eval_strategy != "no"
        return train, _prepared(recipe, splits, recipe.script.dataset_test_split) if evaluated else None, None
    size = max(extra.evaluation_size, 1)
    if embedded == "preferences":
        held_out = tiny.preference_dataset(size, seed, split="heldout")
        return tiny.preference_dataset(extra.dataset_size, seed, split="train"), held_out, held_out
    make = tiny.sft_dataset if recipe.task == "sft" else tiny.prompt_dataset
    return (
        make(extra.dataset_size, seed, split="train", shuffle_images=extra.shuffle_images),
        make(size, seed, split="heldout"),
        tiny.prompt_dataset(size, seed, split="heldout"),
    )


def _load_dataset(recipe: Any) -> Any:
    from datasets import load_dataset
    from trl import get_dataset

    script = recipe.script
    if recipe.mixture.datasets:
        splits = get_dataset(recipe.mixture)
    else:
        try:
            splits = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
        except (FileNotFoundError, ConnectionError, ValueError) as error:
            raise RecipeError(f"dataset {script.dataset_name} cannot be loaded: {error}") from error
    return splits


def _prepared(recipe: Any, splits: Any, split: str) -> Any:
    """A split of the dataset with the columns that the recipe makes of it."""
    from ..data import prepare_dataset
    from ..recipes import check_columns

    name = recipe.script.dataset_name or "of the mixture"
    made = prepare_dataset(_split(recipe, splits, split), recipe.extra, name, needs_images=recipe.extra.needs_images)
    check_columns(recipe, made.column_names or list(next(iter(made), {})))
    return made


def _split(recipe: Any, splits: Any, name: str) -> Any:
    from ..errors import nearest

    if name not in splits:
        near = nearest(name, list(splits))
        hint = f"; did you mean {near!r}?" if near else f", only {', '.join(splits)}"
        raise RecipeError(f"dataset {recipe.script.dataset_name} has no split {name!r}{hint}")
    return splits[name]


def _model(recipe: Any, console: Console) -> str:
    """The model to train: its name, or a folder that an embedded model was made in and warmed up."""
    import torch

    from .. import tiny
    from ..recipes import embedded_name

    family = embedded_name(recipe.model.model_name_or_path)
    if family is None:
        return str(recipe.model.model_name_or_path)
    # Threads cost so small a model more than they give, and on a busy machine many times more.
    torch.set_num_threads(1)
    output_dir = Path(recipe.training.output_dir)
    folder = output_dir / "model"
    # Beside its place until it is whole: a run that is stopped leaves no half model.
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".model-") as scratch:
        made = tiny.save(family, Path(scratch) / "model", seed=recipe.training.seed)
        if recipe.extra.warm_up_steps:
            _warm_up(recipe, made, console)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    return str(folder)


def _warm_up(recipe: Any, folder: Path, console: Console) -> None:
    """Trains an embedded model on answers for a while, and writes it back in float32.

    Under the autocast of the run itself: accelerate keeps one mixed precision for the life of a process.
    """
    from .. import SafeSFTConfig, SafeSFTTrainer, tiny
    from .progress import show_progress

    extra, training = recipe.extra, recipe.training
    arguments = SafeSFTConfig(
        output_dir=str(folder.parent),
        bf16=training.bf16,
        fp16=training.fp16,
        use_cpu=training.use_cpu,
        max_steps=extra.warm_up_steps,
        per_device_train_batch_size=extra.warm_up_batch_size,
        learning_rate=extra.warm_up_learning_rate,
        completion_only_loss=True,
        gradient_checkpointing=False,
        max_length=None,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=training.seed,
    )
    dataset = tiny.sft_dataset(extra.dataset_size, training.seed, split="train", bias=extra.warm_up_bias)
    trainer = SafeSFTTrainer(model=str(folder), args=arguments, train_dataset=dataset)
    show_progress(trainer, console, "warm-up", extra.progress)
    trainer.train()
    trainer.save_model(str(folder))


def _score(recipe: Any, trainer: Any, held_out: Any) -> tuple[str, Any, float] | None:
    """What is measured on held-out examples: its name, the measurement, and the best constant answer's score."""
    from .. import tiny

    if held_out is None or recipe.extra.evaluation_size < 1:
        return None
    model, processor = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    if recipe.task == "reward":
        return "preference accuracy", lambda: tiny.preference_accuracy(model, processor, held_out), 0.5
    return (
        "exact match, greedy,",
        lambda: tiny.exact_match_rate(model, processor, held_out),
        tiny.constant_baseline(held_out),
    )

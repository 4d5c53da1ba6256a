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

    console = console or Console(quiet=os.environ.get("RANK", "0") != "0")
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
    from .progress import show_progress

    arguments = recipe.training
    trainer, held_out = build(recipe, console, trainer_class)
    show_progress(trainer, console, recipe.task, recipe.extra.progress)
    run = Run(trainer, Path(arguments.output_dir))
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


def dry_run(task: str, argv: Sequence[str]) -> Any:
    """Builds all that a recipe needs, and trains no step.

    Args:
        task: `"grpo"`, `"rloo"`, `"sft"` or `"reward"`.
        argv: As for `train`.

    Returns:
        The precision report as planned, `None` on all processes but the first.

    Raises:
        RecipeError: If the recipe cannot be run.
        PrecisionError: If its precision cannot work.
    """
    from ..launch import ERRORS
    from ..recipes import read_recipe

    recipe = read_recipe(task, argv)
    _check_resume(recipe)
    recipe.training.resume_from_checkpoint = None
    recipe.extra.warm_up_steps = 0
    with tempfile.TemporaryDirectory(prefix="safe-trainers-dry-run-") as own:
        # Launched processes share a folder; what is built goes there, and nothing into the run's own.
        recipe.training.output_dir = str(Path(os.environ.get(ERRORS, own), "dry-run"))
        trainer, _ = build(recipe, Console(quiet=True))
        return trainer.precision_report if trainer.accelerator.is_main_process else None


def build(recipe: Any, console: Console, trainer_class: type | None = None) -> tuple[Any, Any]:
    """Makes all that a recipe needs.

    Args:
        recipe: The `Recipe`.
        console: Where to write.
        trainer_class: Another trainer class than the task's, to compare with.

    Returns:
        The trainer, and the held-out examples to measure the result on, `None` where the data is not embedded.

    Raises:
        RecipeError: If the recipe cannot be run.
        PrecisionError: If its precision cannot work.
    """
    from trl import get_peft_config, get_quantization_config

    import safe_trainers

    from ..declared import declared_policy
    from ..launch import check_launched
    from ..recipes import TASKS, load_rewards
    from .material import check_model_exists, make_datasets, make_model

    trainer_class = trainer_class or getattr(safe_trainers, TASKS[recipe.task].trainer)
    arguments = recipe.training
    _check_resume(recipe)
    arguments.model_init_kwargs = _model_init_kwargs(recipe)
    asked = get_quantization_config(dataclasses.replace(recipe.model, dtype="float32"))
    policy = declared_policy(arguments, recipe.model.model_name_or_path, trainer_class, asked)
    policy.check()
    compute_of_4bit = _compute_of_4bit(recipe, policy)
    dataset, evaluation, held_out = make_datasets(recipe)
    check_model_exists(recipe)

    with _only_if_it_works(Path(arguments.output_dir)):
        settings: dict[str, Any] = {
            "model": make_model(recipe, console),
            "args": arguments,
            "train_dataset": dataset,
            "eval_dataset": evaluation if arguments.eval_strategy != "no" else None,
            "quantization_config": get_quantization_config(dataclasses.replace(recipe.model, dtype=compute_of_4bit)),
            "peft_config": get_peft_config(dataclasses.replace(recipe.model, lora_task_type=_lora_task_type(recipe))),
        }
        if hasattr(recipe.script, "reward_funcs"):
            settings["reward_funcs"] = load_rewards(recipe)
        trainer = trainer_class(**settings)
        check_launched(trainer.accelerator)
    return trainer, held_out


def _check_resume(recipe: Any) -> None:
    """Refuses to go on from the newest checkpoint where there is none that is complete."""
    from ..checkpoint_files import checkpoints_in, choose_checkpoint

    arguments = recipe.training
    if str(arguments.resume_from_checkpoint).lower() != "true" or Path("true").is_dir():
        return
    found = checkpoints_in(Path(arguments.output_dir))
    if any(checkpoint.complete for checkpoint in found):
        return
    if found:
        choose_checkpoint(True, Path(arguments.output_dir))
        return
    raise RecipeError(
        f"there is no checkpoint in output_dir {arguments.output_dir} to go on from. Drop --resume, or write: "
        "--resume FOLDER"
    )


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
    from ..precision_report import FILE
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
    written: dict[str, object] = {"checkpoint": run.output_dir, "log": log}
    if (run.output_dir / FILE).is_file():
        written["report"] = run.output_dir / FILE
    written["plot"] = plot or f"not drawn: {why_not(trainer.state.log_history)}"
    for what, place in written.items():
        console.print(f"{what:<11} {place}", highlight=False, markup=False, soft_wrap=True)


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
        "report": trainer.precision_report.to_dict(),
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


def _score(recipe: Any, trainer: Any, held_out: Any) -> tuple[str, Any, float] | None:
    """What is measured on held-out examples: its name, the measurement, and the best constant answer's score."""
    from .. import tiny

    if held_out is None or recipe.extra.evaluation_size < 1:
        return None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return None  # no process holds the weights to generate with
    model, processor = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    if recipe.task == "reward":
        return "preference accuracy", lambda: tiny.preference_accuracy(model, processor, held_out), 0.5
    return (
        "exact match, greedy,",
        lambda: tiny.exact_match_rate(model, processor, held_out),
        tiny.constant_baseline(held_out),
    )

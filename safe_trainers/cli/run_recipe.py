"""The training commands: builds the trainer of a recipe, trains, and writes the results."""

import contextlib
import dataclasses
import json
import os
import pickle
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core.errors import RecipeError, SafeTrainersError
from .phases import show_phase


@dataclass
class RunResult:
    """The result of a training run.

    Attributes:
        trainer: The trainer after training.
        output_dir: The folder with the checkpoint, the log and the plot.
        score_name: The name of the score on held-out examples; `None` if no score was measured.
        before: The score before the run.
        after: The score after the run.
        chance: The score of the best constant answer.
        stopped: The number of the signal that ended training before its last step; `None` if none did.
    """

    trainer: Any
    output_dir: Path
    score_name: str | None = None
    before: float | None = None
    after: float | None = None
    chance: float | None = None
    stopped: int | None = None


def run_recipe(
    recipe: Any, console: Console | None = None, trainer_class: type | None = None, resume_command: str = ""
) -> RunResult:
    """Runs a recipe. SIGINT or SIGTERM during training ends it after a step, with a checkpoint.

    After the last step, a signal ends the process when the results are written.

    Args:
        recipe: The `Recipe`.
        console: Receives the output; by default standard output.
        trainer_class: The trainer class, for comparisons; by default the safe trainer of the task.
        resume_command: The command line of the run, which is printed with `--resume CHECKPOINT` if a signal ends it.

    Returns:
        The result.

    Raises:
        RecipeError: If the trainer cannot be built, and no file is written then, or if no step was trained.
        PrecisionError: If the precision settings cannot work; no file is written then.
    """
    from ..recipes.identity import identity
    from ..report.render import console as standard_output
    from .batches import check_steps
    from .progress import LOG, LogFile, show_progress
    from .run_folder import explain_full_disk
    from .signals import StopSignals, end_by
    from .stop import StopAtStep

    console = console or standard_output(width=80, quiet=os.environ.get("RANK", "0") != "0")
    arguments = recipe.training
    with explain_full_disk(Path(arguments.output_dir)), StopSignals() as signals:
        trainer, held_out = build(recipe, console, trainer_class)
        run = RunResult(trainer, Path(arguments.output_dir))
        score = _score(recipe, trainer, held_out)
        if score is not None:
            run.score_name, measure, run.chance = score
            show_phase(f"measuring {run.score_name.rstrip(',')} on {recipe.extra.evaluation_size} examples")
            run.before = measure()
        trainer.recipe = identity(recipe.task, recipe.values)
        stop = StopAtStep(signals)
        trainer.add_callback(LogFile(run.output_dir / LOG))
        trainer.add_callback(stop)
        show_phase(f"training {arguments.max_steps} steps" if arguments.max_steps > 0 else "training")
        with show_progress(trainer, console, recipe.task, recipe.extra.progress, signals):
            trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
        signals.until = "the results are written"
        if stop.stopped:
            run.stopped = signals.received
        else:
            check_steps(trainer, recipe)
            trainer.save_model(arguments.output_dir)
            if score is not None and signals.received is None:
                run.after = measure()
        if trainer.accelerator.is_main_process:
            write_run(run, recipe, console)
            if run.stopped is not None:
                _say_stopped(run, resume_command, console)
        if run.stopped is None and signals.received is not None:
            end_by(signals.received)
    return run


def _say_stopped(run: RunResult, command: str, console: Console) -> None:
    """Prints where a run was stopped, and the command that resumes it."""
    from ..checkpoint.folder import checkpoints_in, inspect_checkpoint

    state = run.trainer.state
    checkpoint: Path | None = _checkpoint(run)
    lines = [f"stopped by {signal.Signals(run.stopped or 0).name} after step {state.global_step} of {state.max_steps}"]
    saved = inspect_checkpoint(_checkpoint(run))
    if saved.faults:
        lines.append(f"{saved}: no run can resume from it")
        complete = [found.path for found in checkpoints_in(run.output_dir) if found.complete]
        checkpoint = complete[0] if complete else None
    if command and checkpoint is not None:
        lines.append(f"resume with: {command} --resume {shlex.quote(str(checkpoint))}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _checkpoint(run: RunResult) -> Path:
    """The checkpoint of a run that was stopped, else the folder with its weights."""
    return run.output_dir if run.stopped is None else run.output_dir / f"checkpoint-{run.trainer.state.global_step}"


def dry_run(recipe: Any) -> Any:
    """Builds the trainer of a recipe without training.

    Args:
        recipe: The `Recipe`.

    Returns:
        The planned precision report; `None` on all processes but the first.

    Raises:
        RecipeError: If the trainer cannot be built.
        PrecisionError: If the precision settings cannot work.
    """
    from .build_inputs import teacher_of

    recipe.training.resume_from_checkpoint = None
    recipe.extra.warm_up_steps = 0
    if teacher_of(recipe) is not None:
        recipe.script.teacher_warm_up_steps = 0
    with _shared_scratch() as scratch:
        recipe.training.output_dir = str(scratch / "dry-run")  # the output_dir of the recipe stays untouched
        trainer, _ = build(recipe, Console(quiet=True))
        return trainer.precision.report if trainer.accelerator.is_main_process else None


@contextlib.contextmanager
def _shared_scratch() -> Iterator[Path]:
    """Yields an empty folder, the same for all processes, which is removed when all have left the block."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    from .launch_env import SHARED_FOLDER

    with tempfile.TemporaryDirectory(prefix="safe-trainers-dry-run-") as own:
        shared, state = os.environ.get(SHARED_FOLDER), PartialState()
        scratch = Path(shared or broadcast_object_list([own])[0])  # under torchrun, the one of the main process
        yield scratch
        state.wait_for_everyone()
        if state.is_local_main_process and shared is None:  # another machine has a folder of the same name
            shutil.rmtree(scratch, ignore_errors=True)


def build(recipe: Any, console: Console, trainer_class: type | None = None) -> tuple[Any, Any]:
    """Builds the trainer of a recipe, with its model and datasets.

    Args:
        recipe: The `Recipe`.
        console: Receives the output.
        trainer_class: The trainer class, for comparisons; by default the safe trainer of the task.

    Returns:
        The trainer, and the held-out examples to score; `None` if the dataset is not embedded.

    Raises:
        RecipeError: If the trainer cannot be built.
        PrecisionError: If the precision settings cannot work.
    """
    from transformers.trainer_utils import has_length
    from trl import get_peft_config, get_quantization_config

    import safe_trainers

    from ..core.tasks import TASKS
    from ..recipes.load import load_rewards
    from ..trainer.from_config import declared_policy
    from .batches import check_batches, check_images
    from .build_inputs import check_model_exists, make_datasets, make_model, make_teacher, teacher_of
    from .launch_env import check_launched

    trainer_class = trainer_class or getattr(safe_trainers, TASKS[recipe.task].trainer)
    arguments = recipe.training
    arguments.model_init_kwargs = _model_init_kwargs(recipe)
    asked = get_quantization_config(dataclasses.replace(recipe.model, dtype="float32"))
    policy = declared_policy(arguments, recipe.model.model_name_or_path, trainer_class, asked)
    policy.check()
    compute_of_4bit = _compute_of_4bit(recipe, policy)
    show_phase(f"loading data {recipe.script.dataset_name or 'of the mixture'}")
    dataset, evaluation, held_out = make_datasets(recipe)
    check_model_exists(recipe)

    show_phase(f"loading model {recipe.model.model_name_or_path}")
    with _remove_on_failure(Path(arguments.output_dir)):
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
        if teacher_of(recipe) is not None:
            settings["teacher_model"] = make_teacher(recipe, console)
            arguments.teacher_model_init_kwargs = _teacher_init_kwargs(recipe)
        rows = len(dataset) if has_length(dataset) else None
        trainer = trainer_class(**settings)
        check_launched(trainer.accelerator)
        check_batches(trainer, recipe, rows)
        check_images(trainer, recipe)
    return trainer, held_out


def _lora_task_type(recipe: Any) -> str:
    """Returns PEFT's task type: TRL's default, `CAUSAL_LM`, is wrong for reward models."""
    asked: str = recipe.model.lora_task_type
    return "SEQ_CLS" if recipe.task == "reward" and asked == "CAUSAL_LM" else asked


@contextlib.contextmanager
def _remove_on_failure(output_dir: Path) -> Iterator[None]:
    """Creates the output folder; if the `with` block fails, removes what it made there, and the folder if it is empty.

    Args:
        output_dir: The folder.

    Raises:
        RecipeError: If TRL, transformers or PEFT raise an error; the message is theirs.
    """
    from safetensors import SafetensorError

    from ..checkpoint.folder import remove
    from ..report.run_report import FILE
    from ..report.stored_weights import PICKLED
    from .build_inputs import MODEL, TEACHER

    missing = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]  # innermost first
    # Other processes may write to the folder meanwhile.
    made = [path for path in (output_dir / name for name in (MODEL, TEACHER, FILE)) if not path.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        if os.environ.get("RANK", "0") == "0":
            for path in filter(Path.exists, made):
                remove(path)
            for folder in missing:
                if folder.is_dir() and not any(folder.iterdir()):  # another run may have written to it meanwhile
                    folder.rmdir()
        if isinstance(error, pickle.UnpicklingError):
            raise RecipeError(
                f"the trainer cannot be built: a weight file cannot be read: {PICKLED}. Save the model in the "
                "safetensors format, with the release that wrote the file"
            ) from error
        upstream = isinstance(
            error, (ValueError, TypeError, ImportError, OSError, LookupError, AttributeError, SafetensorError)
        )
        if upstream and not isinstance(error, SafeTrainersError):
            why = " ".join(str(error).split())
            raise RecipeError(f"the trainer cannot be built: {type(error).__name__}: {why}") from error
        raise


def write_run(run: RunResult, recipe: Any, console: Console) -> None:
    """Writes the log and the plot of a run, and prints their paths.

    Args:
        run: The result of the run.
        recipe: The `Recipe`.
        console: Receives the output.
    """
    from ..report.run_report import FILE
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
    if run.after is not None:
        console.print(
            f"{run.score_name} on held-out examples: {run.before:.3f} -> [bold]{run.after:.3f}[/] "
            f"(best constant answer {run.chance:.3f})",
            soft_wrap=True,
            highlight=False,
        )
    written: dict[str, object] = {"checkpoint": _checkpoint(run), "log": log}
    if (run.output_dir / FILE).is_file():
        written["report"] = run.output_dir / FILE
    written["plot"] = plot or f"not written: {why_not(trainer.state.log_history)}"
    for what, place in written.items():
        console.print(f"{what:<11} {place}", highlight=False, markup=False, soft_wrap=True)


def _precision(trainer: Any) -> dict[str, Any] | None:
    from ..trainer.mixin import PrecisionMixin

    if not isinstance(trainer, PrecisionMixin):
        return None
    return {
        "policy": trainer.precision.policy.to_dict(),
        "model": trainer.precision.model.to_dict(),
        "weights": trainer.precision.weights.to_dict(),
        "boundaries": trainer.precision.boundaries.to_dict(),
        "media": [vars(decision) for decision in trainer.precision.media],
        "coverage": trainer.precision.coverage.to_dict(),
        "report": trainer.precision.report.to_dict(),
    }


def _model_init_kwargs(recipe: Any) -> dict[str, Any]:
    """Returns `model_init_kwargs` as TRL's scripts derive them from `ModelConfig`; those of the recipe win."""
    model = recipe.model
    declared = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    return {key: value for key, value in declared.items() if value is not None} | (
        recipe.training.model_init_kwargs or {}
    )


def _teacher_init_kwargs(recipe: Any) -> dict[str, Any]:
    """Returns `teacher_model_init_kwargs` as TRL's script derives them; those of the recipe win."""
    model, training = recipe.model, recipe.training
    declared = {
        "revision": training.teacher_model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    return {key: value for key, value in declared.items() if value is not None} | (
        training.teacher_model_init_kwargs or {}
    )


def _compute_of_4bit(recipe: Any, policy: Any) -> str:
    """Returns the compute dtype of 4-bit layers: that of the run.

    TRL's scripts use `dtype` instead, the load dtype of the weights, which is float32 by default; `auto` fails.

    Raises:
        PrecisionError: If the recipe sets another dtype.
    """
    from ..core.dtypes import FLOAT32, SHORT, parse_dtype
    from ..core.errors import PrecisionError
    from ..weights.bitsandbytes_loading import contradiction

    asked = recipe.extra.bnb_4bit_compute_dtype
    decided = policy.compute.text if policy.autocast.value is None else policy.autocast.text
    if decided not in SHORT:  # without autocast, it depends on the weights, which are not loaded yet
        return FLOAT32 if asked is None else parse_dtype(asked)
    problem = contradiction(asked, decided)
    if problem is not None:
        raise PrecisionError([problem])
    return decided


def _score(recipe: Any, trainer: Any, held_out: Any) -> tuple[str, Any, float] | None:
    """Returns the name of the score, a function that measures it, and the score of the best constant answer."""
    from .. import tiny

    if held_out is None or recipe.extra.evaluation_size < 1:
        return None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return None  # the weights are sharded, so that `generate` cannot run on one process
    model, processor = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    if recipe.task == "reward":
        return "preference accuracy", lambda: tiny.preference_accuracy(model, processor, held_out), 0.5
    return (
        "exact match, greedy,",
        lambda: tiny.exact_match_rate(model, processor, held_out),
        tiny.constant_baseline(held_out),
    )

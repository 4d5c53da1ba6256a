"""Checks whether the rows of a run make batches: without one, transformers trains no step and reports no error."""

import math
from dataclasses import replace
from typing import Any

from ..core.errors import Fix, Problem, RecipeError, write


def check_batches(trainer: Any, recipe: Any, given: int | None) -> None:
    """Refuses a trainer whose rows make no batch.

    Args:
        trainer: The trainer, before it trains.
        recipe: The `Recipe`.
        given: The number of rows that the trainer was given; `None` for a stream.

    Raises:
        RecipeError: If its dataloader is empty, with the rows that one batch needs. A stream that does not know its
            length is not refused.
    """
    from transformers.trainer_utils import has_length

    if given is not None and len(trainer.train_dataset) == 0:
        raise RecipeError(_all_left_out(recipe, given))
    loader = trainer.get_train_dataloader()
    if has_length(loader) and len(loader) == 0:
        raise RecipeError(_too_few_rows(trainer, recipe, len(trainer.train_dataset)))


def check_images(trainer: Any, recipe: Any) -> None:
    """Refuses a dataset with images and text prompts if its first batch cannot be made.

    Rollouts need conversations. Other trainers pass text to the processor, which may need marks for the images in it.

    Args:
        trainer: The trainer, before it trains.
        recipe: The `Recipe`.

    Raises:
        RecipeError: With the line that makes conversations of the prompts.
    """
    from ..core.trl import has_rollouts
    from ..data.rows import images_beside_text, read_columns

    dataset = trainer.train_dataset
    text_field = getattr(recipe.training, "dataset_text_field", None) or "text"
    column = next(iter(read_columns(recipe.task, dataset.column_names or [], text_field)), None)
    problem = images_beside_text(dataset, column, str(recipe.script.dataset_name or "of the mixture"))
    if problem is None:
        return
    if has_rollouts(type(trainer)):
        raise RecipeError(problem)
    rows = [row for row, _ in zip(dataset, range(trainer._train_batch_size), strict=False)]
    try:
        trainer.data_collator(rows)
    except (ValueError, TypeError, LookupError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise RecipeError(replace(problem, what=f"{problem.what} ({type(error).__name__}: {why})")) from error


def check_steps(trainer: Any, recipe: Any) -> None:
    """Refuses the result of a training that has ended without any step.

    Args:
        trainer: The trainer after training.
        recipe: The `Recipe`.

    Raises:
        RecipeError: If it has trained no step.
    """
    if trainer.state.global_step == 0:
        what = f"no step was trained, and nothing is saved: {_name(recipe)} has too few rows for one batch"
        raise RecipeError(Problem(what, fix=Fix("use more rows, or write a smaller `per_device_train_batch_size`")))


def _name(recipe: Any) -> str:
    return f"dataset {recipe.script.dataset_name or 'of the mixture'}"


def _all_left_out(recipe: Any, given: int) -> Problem:
    """The problem of rows of which TRL has kept none: it leaves out those that `max_length` cuts too short."""
    length = getattr(recipe.training, "max_length", None)
    what = f"all {given} rows of {_name(recipe)} were dropped before training"
    if length is None:
        return Problem(what, "TRL drops rows without tokens to train on", Fix("use rows with an answer to train on"))
    why = f"with max_length={length}, each row is too long, or is truncated before the tokens to train on"
    return Problem(what, why, Fix("write a larger `max_length`, or `max_length=None` to truncate nothing"))


def _too_few_rows(trainer: Any, recipe: Any, rows: int) -> Problem:
    args, processes = trainer.args, trainer.accelerator.num_processes
    sampler = trainer._get_train_sampler()
    if hasattr(sampler, "mini_repeat_count"):  # TRL's sampler of rollouts, which leaves out a batch that is not full
        needed = sampler.batch_size
        why = "a batch that is not full is left out"
        fix = _smaller_batch(args, processes, recipe, needed, rows)
    else:
        needed = trainer._train_batch_size * processes
        why = "dataloader_drop_last leaves out a batch that is not full"
        fix = write(dataloader_drop_last=False)
    what = f"{_name(recipe)} has {rows} rows to train on, and one batch needs {needed}"
    return Problem(what, f"{why}, so that no step would be trained", fix)


def _smaller_batch(args: Any, processes: int, recipe: Any, needed: int, rows: int) -> Fix:
    """The largest batch of rollouts that the rows fill; more rows if there is none."""
    size = args.per_device_train_batch_size
    if recipe.values.get("generation_batch_size") is not None:
        unit = math.lcm(size * processes, args.num_generations)
        total = rows * args.num_generations // unit * unit
        if total:
            return write(generation_batch_size=total)
    else:
        for smaller in range(size - 1, 0, -1):  # the rows of a batch are proportional to it
            if needed * smaller % size == 0 and needed * smaller // size <= rows:
                return write(per_device_train_batch_size=smaller)
        steps = "gradient_accumulation_steps"
        steps = "steps_per_generation" if recipe.values.get("steps_per_generation") is not None else steps
        return Fix(f"use a dataset with {needed} rows or more, or a smaller `{steps}`")
    return Fix(f"use a dataset with {needed} rows or more")

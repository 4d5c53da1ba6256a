"""`safe-trainers report MODEL|RECIPE|CHECKPOINT`: shows the dtypes that each of them stores and computes in."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import Problem, RecipeError
from ..core.tasks import TASKS


if TYPE_CHECKING:
    from ..report.document import Report

EPILOG = """accepted:
  a model       a folder, tiny:NAME, or the name of a repository on the hub
  a checkpoint  a checkpoint-N folder, or the output_dir of a run
  a recipe      a *.yaml file
  a report      a precision_report.json of a run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "target", metavar="MODEL|RECIPE|CHECKPOINT", help="model, recipe, checkpoint or report; see below"
    )
    parser.add_argument("--task", choices=tuple(TASKS), help="the task of a recipe; by default detected")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the report.

    Returns:
        0 without warnings and errors, 1 with warnings, 2 with errors.
    """
    from ..report.render import present

    return present(report_on(options.target, options.task), options.json)


def report_on(target: str, task: str | None = None) -> "Report":
    """Reports on a model, a recipe, a checkpoint, a run or a saved report.

    Args:
        target: A recipe (`*.yaml`), a saved report (`*.json`), an embedded model (`tiny:llava`), the folder of a
            model, an adapter, a checkpoint or a run, or the name of a repository on the hub.
        task: The task of a recipe, one of `TASKS`; by default detected from the recipe.

    Returns:
        The report.

    Raises:
        RecipeError: If the target does not exist or cannot be read.
    """
    from ..data.columns import embedded_name
    from ..report.stored_report import read_report, report_on_folder, report_on_hub

    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return report_on_recipe(path, task)
    if path.suffix == ".json":
        return read_report(path)
    family = embedded_name(target)
    if family is not None:
        return _report_on_embedded(target, family)
    if os.path.isdir(path):
        return report_on_folder(path)
    if os.path.exists(path) or target.startswith((".", "/", "~")) or target.count("/") > 1:
        raise RecipeError(f"{target} is not a recipe, report, model, checkpoint or run")
    return report_on_hub(target)


def report_on_recipe(path: Path, task: str | None = None) -> "Report":
    """Reports on the run of a recipe, without loading the model.

    Args:
        path: The recipe: a file, or the name of a packaged recipe.
        task: The task; by default detected from the folder, the header or the keys of the recipe.

    Returns:
        The report.

    Raises:
        RecipeError: If the recipe is invalid, or fits several tasks.
        PrecisionError: If its precision settings contradict each other.
    """
    from trl import get_quantization_config

    import safe_trainers

    from ..core.dtypes import FLOAT32
    from ..data.columns import embedded_name
    from ..recipes import packaged
    from ..recipes.load import load_recipe
    from ..recipes.validate import check_recipe, only_task_of
    from ..recipes.yaml_file import read_file
    from ..report.document import Cell, Report, Table
    from ..report.run_report import POLICY, TITLE
    from ..report.stored_report import stored_table, stored_weights
    from ..trainer.from_config import declared_policy
    from ..weights.bitsandbytes_loading import asked_quantization

    file = read_file(path if os.path.isfile(path) else packaged.find(path.as_posix(), "recipes"))
    recipe = load_recipe(check_recipe(file, task or only_task_of(file)))
    arguments, model = recipe.training, recipe.model
    trainer_class = getattr(safe_trainers, TASKS[recipe.task].trainer)
    loaded = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    arguments.model_init_kwargs = {k: v for k, v in loaded.items() if v is not None} | dict(
        arguments.model_init_kwargs or {}
    )
    quantization = get_quantization_config(replace(model, dtype=FLOAT32))
    policy = declared_policy(arguments, model.model_name_or_path, trainer_class, quantization)
    facts: dict[str, Cell] = {
        "phase": "declared",
        "task": recipe.task,
        "model": model.model_name_or_path,
        "device": str(trainer_class.precision_device(arguments)),
        "compute": policy.compute.text,
        "autocast": policy.autocast.text,
        "loss scale": policy.loss_scale.text,
        "quantisation": asked_quantization(model.model_name_or_path, arguments, quantization),
        "adapter": f"LoRA of rank {model.lora_r}" if model.use_peft else None,
        "optimizer": str(getattr(arguments.optim, "value", arguments.optim)),
    }
    choices = dict(policy.choices()) | ({"master": policy.adapter} if model.use_peft else {})
    rows = tuple((decision, choice.text, choice.reason) for decision, choice in choices.items())
    tables = [Table(POLICY, ("decision", "value", "why"), rows)]
    name = str(model.model_name_or_path)
    if embedded_name(name) is None and Path(name).is_dir():
        parts, _ = stored_weights(Path(name))
        tables += [stored_table(parts)] if parts else []
    verdicts = (*policy.problems, *policy.warnings) or (
        Problem("no problem is known before the model is loaded", level="ok"),
    )
    return Report(TITLE, str(path), {k: v for k, v in facts.items() if v is not None}, tuple(tables), verdicts)


def _report_on_embedded(target: str, family: str) -> "Report":
    from .. import tiny
    from ..data.columns import EMBEDDED_MODELS
    from ..report.stored_report import report_on_folder

    if family not in EMBEDDED_MODELS:
        raise RecipeError(f"{target} is not an embedded model; expected one of {', '.join(EMBEDDED_MODELS)}")
    with tempfile.TemporaryDirectory() as scratch:
        made = report_on_folder(tiny.save(family, Path(scratch) / "model"))
    return replace(made, subject=target)

"""`safe-trainers tune RECIPE|MODEL`: finds the precision and the modules in float32 that hold the mismatch."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import RecipeError
from .outputs import check_output, written
from .tune_targets import OWN, TOKENS, ModelTarget, RecipeTarget, explain_memory, is_recipe


if TYPE_CHECKING:
    from ..tuning.result import Tuning

EPILOG = """accepted:
  a recipe      a *.yaml file or a name from `safe-trainers list`, of grpo or rloo; measured on prompts of its dataset
  a model       a folder, tiny:NAME, or a repository on the hub; measured on random tokens of its vocabulary
exit status: 0: the goal is met, 1: it is not, and the best that was found is printed, 2: errors
  safe-trainers tune my_recipe.yaml --max_mismatch 1e-3 --write
  safe-trainers tune my_recipe.yaml --max_bytes 200M --json tune.json --plot tune.png
"""

PRECISIONS = ("bf16", "fp16", "fp32")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("target", metavar="RECIPE|MODEL", help="recipe or model; see below")
    parser.add_argument("--task", choices=("grpo", "rloo"), help="the task of a recipe; by default detected")
    options: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
        ("--max_mismatch", "NATS", _positive, "largest mean mismatch; by default a tenth of that without a module"),
        ("--min_ess", "SHARE", _positive, "smallest effective sample size of sequences, from 0 to 1"),
        ("--max_bytes", "N", _bytes, "most bytes of weights beyond half precision, such as 500000 or 200M"),
        (
            "--max_time",
            "FACTOR",
            _positive,
            "longest time of a rollout with its scoring, as a factor of half precision's",
        ),
        ("--sequences", "N", _count, "prompts of the search (default: 32)"),
        ("--max_tokens", "N", _count, f"most tokens of a completion (default: the recipe's, at most {TOKENS})"),
        ("--time_limit", "SECONDS", _positive, "time after which the best set so far is printed (default: 300)"),
    )
    for name, metavar, kind, text in options:
        parser.add_argument(name, metavar=metavar, type=kind, help=text)
    parser.add_argument(
        "--precision", choices=PRECISIONS, action="append", help="a precision to try, may be repeated; by default all"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result and all measurements; a second run resumes")
    parser.add_argument("--plot", metavar="FILE", help="draw mismatch by bytes (.png, .pdf or .svg)")
    parser.add_argument(
        "--write", action="store_true", help="write the lines into the recipe if the goal is met, and keep a copy"
    )


def _is_packaged(name: str) -> bool:
    from ..recipes.packaged import recipe_path

    try:
        return is_recipe(name) and recipe_path(name).is_file()
    except RecipeError:
        return False


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 500000 or 200M, got {text!r}")
    return int(value * unit)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the lines to write and what was measured.

    Returns:
        0 if the goal is met, 1 if it is not.
    """
    from .phases import show_phase

    has_recipe = is_recipe(options.target)
    if options.write and not (has_recipe and os.path.isfile(options.target)):
        copied = f"Run: safe-trainers copy {options.target}" if _is_packaged(options.target) else "Write its name"
        raise RecipeError(f"--write changes the file of a recipe, and {options.target} is not one. {copied}")
    _check_files(options)
    show_phase(f"reading {options.target}")
    names = ("max_mismatch", "min_ess", "max_bytes", "max_time", "sequences", "max_tokens", "time_limit", "json")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    found = tune(
        options.target,
        task=options.task,
        precisions=options.precision or PRECISIONS,
        progress=show_phase,
        **given,
    )
    _print(found)
    if options.plot:
        from ..tuning.draw import draw_front

        with written("--plot", options.plot):
            draw_front(found.to_dict(), Path(options.plot))
    for what, place in {"json": options.json, "plot": options.plot}.items():
        if place:
            print(f"{what:<5} {place}")
    if options.write:
        _write(Path(options.target), found)
    return 0 if found.reached else 1


def tune(
    target: Any,
    *,
    task: str | None = None,
    precisions: Sequence[str] = PRECISIONS,
    max_mismatch: float | None = None,
    min_ess: float | None = None,
    max_bytes: int | None = None,
    max_time: float | None = None,
    sequences: int = 32,
    max_tokens: int | None = None,
    time_limit: float = 300.0,
    json: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> "Tuning":
    """Finds the precision, and the smallest set of modules in float32, that holds the mismatch of sampler and trainer.

    The model's own `generate` and the trainer's loss are compared, as a run does. Without a goal, the mismatch is to
    become a tenth of what it is without a module in float32.

    Args:
        target: A recipe (`*.yaml`, or the name of a packaged one), a model (a folder, `tiny:NAME`, or a repository),
            or a function `build(precision, measured)` that builds a trainer: `measured(SafeGRPOTrainer)(model, args=
            SafeGRPOConfig(precision=precision, ...), ...)`.
        task: The task of a recipe, `"grpo"` or `"rloo"`; by default detected.
        precisions: The precisions to try: `"bf16"`, `"fp16"` and `"fp32"`.
        max_mismatch: The largest mean of abs(D), in nats.
        min_ess: The smallest effective sample size of sequences, as a share.
        max_bytes: The most bytes of weights beyond those of half precision.
        max_time: The longest time of a rollout with its scoring, as a factor of that without a module in float32.
        sequences: Number of prompts of the search. Selection and promise use further ones, 4 times and up to 64 times
            as many.
        max_tokens: The most tokens of a completion; by default those of the recipe, at most 128.
        time_limit: Seconds after which the search ends with the best set so far.
        json: A file for the result and all measurements; with an existing one the search resumes.
        progress: Receives lines of progress.

    Returns:
        The result: `lines` to write, `promise` on held-out prompts, `reached`, and everything that was measured.

    Raises:
        RecipeError: If the target has no rollouts, does not build, or does not fit into memory.
        PrecisionError: If no precision can be trained in.
    """
    from ..tuning.plan import Plan
    from ..tuning.search import Goal
    from ..tuning.store import Store
    from ..tuning.tune import tune_trainer

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("tune runs in one process. Run it without a launcher")
    _check_values(
        max_mismatch=max_mismatch, min_ess=min_ess, max_bytes=max_bytes, max_time=max_time, sequences=sequences,
        max_tokens=max_tokens, time_limit=time_limit,
    )  # fmt: skip
    if isinstance(precisions, str) or not precisions or not set(precisions) <= set(PRECISIONS):
        raise RecipeError(f"precisions must be a list of {', '.join(PRECISIONS)}, got {precisions!r}")
    goal = Goal(max_mismatch, min_ess, max_bytes, max_time)
    plan = Plan(goal=goal, sequences=sequences, time_limit=time_limit, progress=progress or (lambda line: None))
    store = Store(None if json is None else Path(json))
    with tempfile.TemporaryDirectory(prefix="safe-trainers-tune-") as scratch, explain_memory(str(target)):
        if callable(target):
            plan.target, plan.prompts, build = "a trainer", "prompts of its dataset", target
        elif is_recipe(str(target)):
            source = RecipeTarget(str(target), task, max_tokens, Path(scratch))
            plan.target, plan.prompts, build = str(target), f"prompts of {source.dataset}", source.build
            precisions = sorted(precisions, key=lambda name: name != source.own)
            plan.settings = source.settings
        else:
            model = ModelTarget(str(target), max_tokens or TOKENS, sequences, Path(scratch))
            plan.target, plan.prompts, build = str(target), model.prompts, model.build
        plan.precisions = precisions
        return tune_trainer(build, plan, store)


def _check_values(**given: float | None) -> None:
    """Raises `RecipeError` for a goal or an effort that cannot be."""
    for name, value in given.items():
        least = {"max_bytes": 0, "sequences": 1, "max_tokens": 1}.get(name)
        most = 1.0 if name == "min_ess" else float("inf")
        if value is None or ((value > 0 if least is None else value >= least) and value <= most):
            continue
        accepted = "above 0" if least is None else f"from {least}"
        raise RecipeError(f"{name} must be a number {accepted}{' and at most 1' if most == 1 else ''}, got {value:g}")


def _check_files(options: argparse.Namespace) -> None:
    """Raises `RecipeError` for files that could not be written at the end."""
    from .plot import FORMATS

    if options.plot and Path(options.plot).suffix.lower() not in FORMATS:
        raise RecipeError(f"--plot must end in {', '.join(FORMATS)}, got {options.plot}")
    for name in ("json", "plot"):
        if getattr(options, name):
            check_output(f"--{name}", getattr(options, name))


def _print(found: "Tuning") -> None:
    from ..report.render import console, show

    for line in (*found.lines, "", found.verdict, *(f"note: {note}" for note in found.notes), ""):
        print(line)
    show(found.report(), console())


def _write(path: Path, found: "Tuning") -> None:
    """Writes the lines into a recipe, if the goal is met."""
    from ..recipes.fix import save, with_settings

    if not found.reached:
        print(f"{path} was not changed, because the goal is not met", file=sys.stderr)
        return
    fixed = with_settings(path, found.settings, drop=OWN)
    if fixed.after == fixed.before:
        print(f"{path} has these lines already, and was not changed")
        return
    backup = save(path, fixed.after)
    print(f"{fixed.diff()}written to {path}; the file before: {backup}")

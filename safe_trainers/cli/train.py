"""`safe-trainers TASK --config FILE --key value ...`, such as `safe-trainers grpo`."""

import argparse
import atexit
import gc
import io
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import RecipeError, SafeTrainersError
from .launch_env import REFUSED
from .machines import FLAGS, PORT


if TYPE_CHECKING:
    from ..recipes.validate import Checked

PROGRAMS = frozenset({"safe_trainers.cli.__main__", "safe-trainers"})
"""Names of the main module of a training command."""
UNFLUSHED = 120
"""Exit status of a process that cannot write its output at the end, as that of Python."""
EPILOG = """every key of a recipe is also an option, which overrides the file:
  safe-trainers grpo --config recipes/grpo/tiny_vlm_bf16.yaml --learning_rate 1e-4
in several processes:
  safe-trainers grpo --config RECIPE --accelerate_config zero3 --num_processes 8
on two machines, with 8 processes each; the other one gets --machine_rank 1:
  safe-trainers grpo --config RECIPE --accelerate_config fsdp2 --num_processes 16 \\
    --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1
"""

NEWEST = "true"
"""The value of `resume_from_checkpoint` for `--resume` without a folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are not recipe keys."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="the recipe: a YAML file")
    parser.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        metavar="NAME|FILE",
        help="launch config: single_gpu, ddp, fsdp2, zero2, zero3, or an accelerate config file",
    )
    parser.add_argument(
        "--num_processes",
        "--num-processes",
        metavar="N",
        type=_count,
        help="processes to launch, on all machines together; by default one per GPU",
    )
    parser.add_argument(
        "--num_machines", "--num-machines", metavar="N", type=_count, help="machines of the run; by default 1"
    )
    parser.add_argument(
        "--machine_rank",
        "--machine-rank",
        metavar="RANK",
        type=_number,
        help="number of this machine, from 0; needed for several machines",
    )
    parser.add_argument(
        "--main_process_ip",
        "--main-process-ip",
        metavar="ADDRESS",
        help="name or IP address of machine 0; needed for several machines",
    )
    parser.add_argument(
        "--main_process_port",
        "--main-process-port",
        metavar="PORT",
        type=_number,
        help=f"free port on machine 0; by default {PORT}, or any free one of a single machine",
    )
    parser.add_argument(
        "--resume",
        metavar="CHECKPOINT",
        nargs="?",
        const=NEWEST,
        help="resume from a checkpoint; by default from the newest complete one in output_dir",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="build the trainer, print the precision report, and exit without training",
    )
    parser.add_argument(
        "--accept-changes",
        "--accept_changes",
        action="store_true",
        help="resume although the recipe has changed since the checkpoint",
    )
    parser.add_argument("--verbose", action="store_true", help="print the whole precision report, not a summary")
    parser.add_argument("--json", action="store_true", help="print the report of --dry-run as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer from 0, got {text!r}")
    return int(text)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Trains in this process, or in launched processes.

    Returns:
        The exit status.
    """
    if options.json and not options.dry_run:
        raise RecipeError("--json prints the report of --dry-run, which is missing. Write: --dry-run --json")
    from .phases import show_phase

    show_phase(f"reading recipe {options.config or 'from the command line'}")
    from ..recipes.validate import prepare

    argv = recipe_arguments(options, rest)
    machines = {flag: getattr(options, flag) for flag in FLAGS if getattr(options, flag) is not None}
    launched = "WORLD_SIZE" in os.environ  # such a process does not launch others
    config = options.accelerate_config
    if not launched and config is None and machines.get("num_machines", 1) > 1:
        config = "ddp"
    checked = prepare(options.command, argv, config, options.num_processes)
    config = config or checked.launch.get("accelerate_config")
    if launched:
        from .join import join

        join(config, options.num_processes, machines)
        return _run_launched(options, checked)
    machines = {flag: checked.launch[flag] for flag in FLAGS if checked.launch.get(flag) is not None} | machines
    processes = options.num_processes or checked.launch.get("num_processes")
    if config is None and processes is None and not machines:
        return run_here(options, checked, resume_command(options, rest))
    from .launch import launch

    given = {"--dry-run": options.dry_run, "--verbose": options.verbose, "--json": options.json}
    given["--accept-changes"] = options.accept_changes
    flags = [flag for flag, is_given in given.items() if is_given]
    command = [options.command, *flags, *argv]
    return launch(command, config, processes, resume_command(options, rest), machines)


def _run_launched(options: argparse.Namespace, checked: "Checked") -> int:
    """Trains in this process, which another launcher has started."""
    try:
        status = run_here(options, checked, "")
    except SafeTrainersError:
        if _is_program():
            leave_at_exit(REFUSED)
        raise
    if _is_program():
        leave_at_exit(status)
    return status


def run_here(options: argparse.Namespace, checked: "Checked", command: str) -> int:
    """Trains in this process.

    Args:
        options: The options of the command line.
        checked: The recipe, without errors.
        command: The command line that resumes the run, without `--resume`.

    Returns:
        The exit status.
    """
    from .run_folder import choose_start, claim, folder_of, note_earlier_run
    from .signals import StopSignals

    if os.environ.get("RANK", "0") != "0":  # this process asks the main process for the checkpoint
        return _train(options, checked, command)
    if options.dry_run:
        return _train(options, choose_start(checked, options.accept_changes), command)
    with StopSignals(), claim(folder_of(checked)):  # a signal during imports removes the lock, too
        start = choose_start(checked, options.accept_changes)
        if start is checked:
            note_earlier_run(folder_of(checked))
        return _train(options, start, command)


def leave_at_exit(status: int) -> None:
    """Makes this process, if it has process groups, end right after its exit handlers.

    gloo's threads run as long as anything refers to their group, such as a model in DDP. One that frees a tensor while
    Python's interpreter ends aborts the process. So the interpreter is not ended; what it does at its end for files
    that are still open is done before.

    Args:
        status: The exit status. With 0, the groups are closed; after an error that may wait for other processes.
    """
    from torch import distributed

    def leave(world: Any, status: int = status) -> None:
        atexit.unregister(leave)
        try:
            atexit._run_exitfuncs()  # those that were registered before this one
            if not _flush_files():
                status = status or UNFLUSHED
        finally:
            os._exit(status)

    if distributed.is_available() and distributed.is_initialized():
        # The group is held: if a collected model freed it, that would wait for a thread that may wait for Python.
        world = distributed.group.WORLD
        if status == 0:
            distributed.destroy_process_group()
        atexit.register(leave, world)


def _flush_files() -> bool:
    """Writes what open files hold in memory, and says what cannot be written; returns whether everything was."""
    errors: dict[str, Exception] = {}
    for file in gc.get_objects():
        # Not `isinstance`, which asks a proxy for the class of its object.
        if issubclass(type(file), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            try:
                file.flush()
            except (OSError, ValueError) as error:
                if isinstance(error, OSError):  # a ValueError is about a file that is closed or has no stream
                    errors[str(getattr(file, "name", "a file"))] = error
    for name, reason in errors.items():
        os.write(2, f"error: {name} cannot be written: {reason}\n".encode())
    return not errors


def _is_program() -> bool:
    """Whether this process is the command, and not a script or a notebook that calls it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (Path(sys.argv[0]).stem if spec is None else spec.name) in PROGRAMS


def _train(options: argparse.Namespace, checked: "Checked", command: str) -> int:
    from .phases import show_phase

    show_phase("importing torch, transformers and TRL")
    from ..policy.settings import FULL
    from ..recipes.load import load_recipe
    from .run_recipe import dry_run, run_recipe

    if options.verbose:
        checked = replace(checked, values={**checked.values, "precision_report": FULL})
    recipe = load_recipe(checked)
    _compare_ranks(checked)
    if not options.dry_run:
        stopped = run_recipe(recipe, resume_command=command).stopped
        return 0 if stopped is None else 128 + stopped
    report = dry_run(recipe)
    if report is None:
        return 0
    from ..report.render import console, present, show_summary
    from ..report.run_report import summarize

    if options.json or options.verbose:
        return present(report, options.json)
    show_summary(summarize(report), console(width=80), "--dry-run --verbose, or --dry-run --json")
    return report.exit_status


def _compare_ranks(checked: "Checked") -> None:
    """Raises `RecipeError` if other processes of the run have another recipe or other versions."""
    from ..trainer.fingerprint import compare, settings_of, versions

    defaults = {} if checked.schema is None else checked.schema.defaults
    problem = compare({**versions(), "task": checked.task, **settings_of({**defaults, **checked.values})})
    if problem is not None:
        raise RecipeError(problem)


def recipe_arguments(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Returns the recipe and its overrides as command-line arguments.

    Args:
        options: The options of the command line.
        rest: The overrides.
    """
    config = ["--config", options.config] if options.config else []
    return [*config, *rest, *(["--resume_from_checkpoint", options.resume] if options.resume else [])]


def resume_command(options: argparse.Namespace, rest: Sequence[str]) -> str:
    """Returns the command line of a run without the checkpoint that it resumes from.

    Args:
        options: The options of the command line.
        rest: The overrides.
    """
    typed = Path(sys.argv[0])
    words = [sys.executable, "-m", "safe_trainers.cli"] if typed.name.endswith(".py") else [str(typed)]
    if shutil.which(typed.name) == str(typed):
        words = [typed.name]
    words += [options.command, *(["--config", options.config] if options.config else [])]
    words += ["--accelerate_config", options.accelerate_config] if options.accelerate_config else []
    words += ["--verbose"] if options.verbose else []
    words += ["--num_processes", str(options.num_processes)] if options.num_processes else []
    for flag in FLAGS:
        words += [f"--{flag}", str(getattr(options, flag))] if getattr(options, flag) is not None else []
    kept, dropped = [], False
    for word in rest:
        if word.startswith("--"):
            dropped = word[2:].partition("=")[0].replace("-", "_") == "resume_from_checkpoint"
        kept += [] if dropped else [word]
    return shlex.join([*words, *kept])

"""`safe-trainers demo`: runs one recipe with stock TRL, which crashes, and with the safe trainer, which learns."""

import argparse
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from rich.console import Console

    from .run_recipe import RunResult

RECIPE = "grpo/tiny_vlm_bf16.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--output_dir", default="runs/demo", help="the folder for checkpoint, log and plot")
    parser.epilog = "keys of the recipe can be given as options, as for grpo"


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs the demo.

    Returns:
        The exit status.
    """
    stopped = demo(options.output_dir, rest).stopped
    return 0 if stopped is None else 128 + stopped


def demo(output_dir: str, overrides: Sequence[str] = (), console: "Console | None" = None) -> "RunResult":
    """Runs the embedded recipe twice.

    Args:
        output_dir: The folder for the checkpoint, the log and the plot.
        overrides: Options that change the recipe, for both runs.
        console: Receives the output; by default standard output.

    Returns:
        The result of the safe trainer; that of stock TRL if a signal stopped it.
    """
    import torch
    import trl

    from ..recipes.load import read_recipe
    from ..recipes.packaged import find
    from ..report.render import console as standard_output
    from .run_recipe import run_recipe

    console = console or standard_output(width=80)
    # The report is written to a file, so that the output fits one screen.
    argv = [
        "--config",
        str(find(RECIPE, "recipes")),
        "--precision_report",
        "file",
        *overrides,
        "--output_dir",
        output_dir,
    ]
    # Read first, so that invalid options are reported before stock TRL runs.
    recipe = read_recipe("grpo", argv)
    # One step without warm-up is enough: stock TRL crashes in the first rollout.
    stock = ["--warm_up_steps", "0", "--max_steps", "1", "--evaluation_size", "0", "--progress", "false"]

    console.print("[bold]trl.GRPOTrainer[/], bfloat16 weights, bf16=True:")
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = run_recipe(read_recipe("grpo", [*argv, *stock, "--output_dir", folder]), console, trl.GRPOTrainer)
        if run.stopped is not None:
            return run
        console.print("  training succeeded: the installed TRL and transformers have fixed the bug", style="yellow")
    except RuntimeError as error:
        console.print(
            f"  {type(error).__name__}: {str(error).splitlines()[0]}", style="red", soft_wrap=True, markup=False
        )
        # accelerate leaves autocast enabled after a failed forward pass; the next run must not start inside it.
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()

    console.print("[bold]safe_trainers.SafeGRPOTrainer[/], the same recipe:")
    return run_recipe(recipe, console)

"""`safe-trainers demo`: the same recipe with stock TRL, which crashes, and with the safe trainer, which learns."""

import argparse
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from rich.console import Console

    from .train import Run

RECIPE = "grpo/tiny_vlm_bf16.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--output_dir", default="runs/demo", help="where checkpoint, log and plot go")
    parser.epilog = "keys of the recipe can be given as options, as for grpo"


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Shows both runs.

    Returns:
        The exit status.
    """
    demo(options.output_dir, rest)
    return 0


def demo(output_dir: str, overrides: Sequence[str] = (), console: "Console | None" = None) -> "Run":
    """Runs the embedded recipe twice.

    Args:
        output_dir: Where the checkpoint, the log and the plot go.
        overrides: Options that change the recipe, for both runs.
        console: Where to write; by default standard output.

    Returns:
        The run of the safe trainer.
    """
    import torch
    import trl
    from rich.console import Console

    from ..recipes import find_recipe, read_recipe
    from .train import run_recipe

    console = console or Console()
    # The report goes beside the log: what the demo shows fits one screen.
    argv = ["--config", str(find_recipe(RECIPE)), "--precision_report", "file", *overrides, "--output_dir", output_dir]
    # Read before anything runs: what is wrong with the options is wrong with both.
    recipe = read_recipe("grpo", argv)
    # One step without warm-up is enough for stock: it crashes in the first rollout.
    stock = ["--warm_up_steps", "0", "--max_steps", "1", "--evaluation_size", "0", "--progress", "false"]

    console.print("[bold]trl.GRPOTrainer[/], bfloat16 weights, bf16=True:")
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_recipe(read_recipe("grpo", [*argv, *stock, "--output_dir", folder]), console, trl.GRPOTrainer)
        console.print("  it trained: this TRL and transformers no longer have the fault", style="yellow")
    except RuntimeError as error:
        console.print(
            f"  {type(error).__name__}: {str(error).splitlines()[0]}", style="red", soft_wrap=True, markup=False
        )
        # Accelerate's autocast leaks out of a forward that failed; the next run must not start inside it.
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()

    console.print("[bold]safe_trainers.SafeGRPOTrainer[/], the same recipe:")
    return run_recipe(recipe, console)

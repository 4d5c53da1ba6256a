"""`safe-trainers demo`: the same recipe with stock TRL, which crashes, and with the safe trainer, which learns."""

from pathlib import Path

from rich.console import Console

from ..errors import RecipeError
from .train import Run, run_recipe


RECIPE = "grpo/tiny_vlm_bf16.yaml"


def demo(output_dir: str, console: Console | None = None) -> Run:
    """Runs the embedded recipe twice.

    Args:
        output_dir: Where the checkpoint, the log and the plot go.
        console: Where to write; by default standard output.

    Returns:
        The run of the safe trainer.
    """
    import torch
    import trl

    from ..recipes import find_recipe, read_recipe

    console = console or Console()
    argv = ["--config", str(find_recipe(RECIPE)), "--output_dir", output_dir]
    stock_argv = [*argv, "--warm_up_steps", "0", "--max_steps", "1", "--progress", "false", "--evaluation_size", "0"]
    if Path(output_dir).is_file():
        raise RecipeError(f"output_dir {output_dir} is a file. Write: --output_dir {output_dir}-run")

    console.print("[bold]trl.GRPOTrainer[/], bfloat16 weights, bf16=True:")
    try:
        run_recipe(read_recipe("grpo", [*stock_argv, "--output_dir", f"{output_dir}/stock"]), console, trl.GRPOTrainer)
        console.print("  it trained: this TRL and transformers no longer have the fault", style="yellow")
    except RuntimeError as error:
        console.print(f"  {type(error).__name__}: {str(error).splitlines()[0]}", style="red", soft_wrap=True)
        # Accelerate's autocast leaks out of a forward that failed; the next run must not start inside it.
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()

    console.print("[bold]safe_trainers.SafeGRPOTrainer[/], the same recipe:")
    return run_recipe(read_recipe("grpo", argv), console)

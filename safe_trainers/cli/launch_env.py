"""Environment variables that the launching process sets for the processes that it launches."""

import os
from typing import Any

from ..core.errors import RecipeError


SHARED_FOLDER = "SAFE_TRAINERS_LAUNCH_FOLDER"
"""Environment variable: a folder that the launched processes of a machine share; it is removed at the end."""
PROCESSES = "SAFE_TRAINERS_PROCESSES"
"""Environment variable: the requested number of processes on all machines."""
ENGINE = "SAFE_TRAINERS_ENGINE"
"""Environment variable: the requested `distributed_type`."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch: the file in which a process records the exception that ends it."""

RESUME_COMMAND = "SAFE_TRAINERS_RESUME_COMMAND"
"""Environment variable: the command line of the run, which is printed with `--resume` if a signal ends it."""
STOPPED = "stopped"
"""Name of a file in the shared folder: the exit status of a run that a signal ended at a step boundary. The processes
themselves exit with 0, because torch's launcher ends all others when one fails."""

REFUSED, CRASHED = 2, 1
"""Exit statuses of a process whose input was refused, and of one that failed."""

SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Values of `distributed_type` that shard the model."""


def check_launched(accelerator: Any) -> None:
    """Compares accelerate's state with the requested launch: it may silently run fewer processes or another engine.

    Args:
        accelerator: The trainer's accelerator.

    Raises:
        RecipeError: If the number of processes is not the requested one, or the model is not sharded as requested.
    """
    if ENGINE not in os.environ:
        return
    requested, engine = int(os.environ.get(PROCESSES) or os.environ["WORLD_SIZE"]), os.environ[ENGINE]
    if accelerator.num_processes != requested:
        raise RecipeError(f"requested {requested} processes, but accelerate runs {accelerator.num_processes}")
    found = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if engine in SHARDED and found != engine:
        raise RecipeError(
            f"requested {engine}, but accelerate runs {found}: {engine} needs GPUs. "
            "Write: --accelerate_config ddp, or drop use_cpu"
        )

"""A training command in a process that torchrun, `accelerate launch` or another launcher has started."""

import os
from collections.abc import Mapping
from typing import Any

from ..core.errors import RecipeError
from .launch import find_config, read_config
from .launch_env import ENGINE


LAUNCHED_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""Environment variable that `accelerate launch` sets in every process that it starts."""


def join(config: str | None, processes: int | None, machines: Mapping[str, Any]) -> None:
    """Sets the environment variables with which accelerate selects an engine, unless its launcher has set them.

    Nothing is launched: the launcher that started this process has decided how many processes there are, and where.

    Args:
        config: Name or file of the launch config; `None` for data parallelism.
        processes: The written `--num_processes`.
        machines: The written options of several machines, by name.

    Raises:
        RecipeError: If an option is written that only a launching command uses, or contradicts the launcher.
    """
    world = os.environ["WORLD_SIZE"]
    started = f"this process is one of {world} that another launcher has started (WORLD_SIZE is set)"
    if machines:
        flags = " and ".join(f"--{flag}" for flag in machines)
        raise RecipeError(
            f"{started}, which decides about the machines. Drop {flags}, or start the command without a launcher"
        )
    if processes is not None and str(processes) != world:
        raise RecipeError(f"{started}, but --num_processes is {processes}. Drop --num_processes")
    if config is None or LAUNCHED_BY_ACCELERATE in os.environ:
        return
    path = find_config(config)
    engine, _, _ = read_config(path, int(world), None)
    os.environ.update(_variables(str(path), world) | {ENGINE: engine})


def _variables(path: str, world: str) -> dict[str, str]:
    """The environment variables of accelerate's launcher for a config, without those of the process group."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    options = ["--config_file", path, "--num_processes", world, "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--main_process_port", "0", "--module", "safe_trainers.cli"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, variables = prepare_deepspeed_cmd_env(arguments)
    else:
        variables = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in variables.items() if name.startswith(("ACCELERATE_", "FSDP_"))}

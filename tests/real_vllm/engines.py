"""Trainers with the real vLLM in this process, on the CPU. Importing this module sets vLLM's environment."""

import gc
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any


# Before vLLM is imported, which reads these once.
os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, as TRL needs it
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",  # eager mode: seconds instead of a minute for each engine
        "VLLM_USE_AOT_COMPILE": "0",  # else its cache hashes the configuration for each token, a fifth of the time
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
)

import cells
import image_families
import torch
from policing import reset_accelerate

from safe_trainers.rollout.vllm import weights_reloaded
from safe_trainers.testing import fp16_on_cpu


# TRL writes these into the environment for vLLM; a later accelerator would read them.
PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
VLLM = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 256,
    "max_completion_length": 16,
}  # fmt: skip


class Folders(dict[str, Path]):
    """Saved tiny models by family, made on first use.

    Args:
        root: Where they are saved.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, family: str) -> Path:
        self[family] = image_families.save(family, self._root / family)
        return self[family]


def free_port() -> int:
    """A port that no process uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def end_engines() -> None:
    """Ends the engines of this process, so that another one can be built."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    for name in PROCESS:
        os.environ.pop(name, None)
    reset_accelerate()
    gc.collect()


def reload_in_sync(generation: Any) -> None:
    """Lets stock TRL sync weights on a CPU, whose kernels pack them: on a GPU nothing is packed."""
    original = generation.sync_weights

    def sync_weights() -> None:
        with weights_reloaded(generation):
            original()

    generation.sync_weights = sync_weights


def build(
    folders: Folders,
    cell: cells.Cell,
    *,
    safe: bool = True,
    config: type | None = None,
    one_row: bool = False,
    **changes: Any,
) -> Any:
    """Builds a trainer of a cell, stock or safe, with an engine of its own.

    Args:
        folders: Where the models are.
        cell: What is trained.
        safe: Whether to build the safe trainer.
        config: The class of the config, by default TRL's.
        one_row: Whether every step has the same prompt and the same images.
        **changes: Changed settings; `model` replaces the model of the family, and `peft_config` the adapters.
    """
    end_engines()
    torch.manual_seed(0)
    model, adapter = changes.pop("model", None), changes.pop("peft_config", None)
    # Every image family takes the same rows.
    data = replace(cell, family="llava") if cell.family in image_families.FAMILIES else cell
    made = cells.arguments(data, config or cells.PLAIN[cell.task], **{**VLLM, **changes})
    made["model"] = str(folders[cell.family]) if model is None else model
    if adapter is not None:
        made["peft_config"] = adapter
    if one_row:
        made["train_dataset"] = made["train_dataset"].select([0] * len(made["train_dataset"]))
    trainer_class = (cells.SAFE if safe else cells.STOCK)[cell.task]
    trainer = (fp16_on_cpu(trainer_class) if cell.flag == "fp16" else trainer_class)(**made)
    if not safe:
        reload_in_sync(trainer.vllm_generation)
    return trainer

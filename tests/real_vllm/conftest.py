"""Training with the real vLLM, in the trainer's process and on the CPU. Run with `make vllm`."""

import gc
import os
import socket
from collections.abc import Iterator
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
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
)

import cells
import image_families
import pytest
import torch
from policing import reset_accelerate

from safe_trainers.rollout.vllm import weights_reloaded


HERE = Path(__file__).parent
# TRL writes these into the environment for vLLM; a later accelerator would read them.
PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
VLLM = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 256,
    "max_completion_length": 16,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test in this folder, and skips it unless it was asked for."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved tiny models by family, made on first use."""
    root = tmp_path_factory.mktemp("models")

    class Folders(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = image_families.save(family, root / family)
            return self[family]

    return Folders()


@pytest.fixture(autouse=True)
def _engines_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends every engine of a test, and what TRL and vLLM leave in the process."""
    before = dict(os.environ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    yield
    end_engines()
    os.environ.clear()
    os.environ.update(before)


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


@pytest.fixture
def build(folders):
    """Builds a trainer of a cell, stock or safe, with an engine of its own."""

    def make(
        cell: cells.Cell,
        *,
        safe: bool = True,
        trainer_class: type | None = None,
        config=None,
        one_row=False,
        **changes,
    ):
        end_engines()
        torch.manual_seed(0)
        model = changes.pop("model", None)
        if cell.family not in image_families.FAMILIES:
            data = cell
        else:  # every image family takes the same rows
            data = replace(cell, family="llava")
        made = cells.arguments(data, config or cells.PLAIN[cell.task], **{**VLLM, **changes})
        made["model"] = str(folders[cell.family]) if model is None else model
        if one_row:  # every step has the same prompt and the same images
            made["train_dataset"] = made["train_dataset"].select([0] * len(made["train_dataset"]))
        trainer = (trainer_class or (cells.SAFE if safe else cells.STOCK)[cell.task])(**made)
        if not safe:
            reload_in_sync(trainer.vllm_generation)
        return trainer

    return make

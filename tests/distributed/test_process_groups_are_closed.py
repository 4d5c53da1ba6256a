"""Processes of a finished run end normally, although gloo's threads still release tensors."""

import os
import signal
import subprocess
import sys

import pytest


FREES_A_TENSOR = """
import sys, time
import torch
from torch import distributed
from safe_trainers.cli.train import _close_process_groups

store, rank = sys.argv[1], int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2)
distributed.barrier()
sys.setswitchinterval(1000)  # gloo's thread waits for the interpreter lock until the main thread waits for something
distributed.all_reduce(torch.zeros(1), async_op=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
{close}
"""
REPORTS = """
import atexit, os

def report():
    from torch import distributed

    open(f"open-{os.environ['RANK']}", "w").write(str(distributed.is_initialized()))

if "RANK" in os.environ:
    atexit.register(report)
"""
RECIPE = """
model_name_or_path: tiny:reward
dataset_name: tiny:preferences
precision: bf16
use_cpu: true
max_steps: 1
dataset_size: 16
evaluation_size: 0
per_device_train_batch_size: 4
report_to: none
save_strategy: "no"
output_dir: out
"""


def end_of_two(store, close):
    """The exit statuses of two processes whose last collective is not yet released when they end."""
    command = [sys.executable, "-c", FREES_A_TENSOR.format(close=close), str(store)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.DEVNULL) for rank in range(2)]
    return [process.wait(timeout=120) for process in both]


def test_a_process_that_frees_a_tensor_at_its_end_is_aborted_unless_its_groups_are_closed(tmp_path):
    assert -signal.SIGABRT in end_of_two(tmp_path / "open", "")
    assert end_of_two(tmp_path / "closed", "_close_process_groups()") == [0, 0]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_training_command_closes_its_groups(tmp_path, options):
    (tmp_path / "sitecustomize.py").write_text(REPORTS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "safe_trainers.cli", "reward", "--config", "recipe.yaml", "--num_processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("open-*")} == {"open-0": "False", "open-1": "False"}

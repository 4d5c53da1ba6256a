"""Processes of a finished run end normally, although gloo's threads still release tensors."""

import os
import signal
import subprocess
import sys

import pytest

from safe_trainers.cli import train


FREES_A_TENSOR = """
def free_a_tensor(store, rank):
    import sys, time
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    distributed.barrier()
    sys.setswitchinterval(1000)  # gloo's thread gets the interpreter lock when the main thread waits for something
    distributed.all_reduce(torch.zeros(1), async_op=True)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    return distributed.group.WORLD  # as a model in DDP refers to it
"""
"""A collective whose tensor a thread of gloo frees after the function."""
ABORTED = """
import sys

held = free_a_tensor(sys.argv[1], int(sys.argv[2]))
"""
LEAVES = """
import atexit, sys, time, weakref
from concurrent.futures import ThreadPoolExecutor
from safe_trainers.cli.train import leave_at_exit
from torch import distributed

def end():
    if not distributed.is_initialized():
        end.held = free_a_tensor(store + "-2", rank)
    print(" and its first exit handler has run", end="")

store, rank, status = sys.argv[1], int(sys.argv[2]), {status}
distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
atexit.register(end)
pool = ThreadPoolExecutor()
pool.submit(lambda: (time.sleep(3), print("a thread has ended", end="")))  # after what the exit handler waits for
proxy = weakref.proxy(type("Gone", (), dict())())  # whose class cannot be asked
kept_open = open(store + "-" + str(rank), "w")
kept_open.write("written")
leave_at_exit(status)
sys.exit(status)
"""
ENDS = """
import atexit, os

def end():
    from torch import distributed

    found = f"{os.environ['RANK']} {distributed.is_initialized()}"
    end.held = free_a_tensor(os.path.abspath("store"), int(os.environ["RANK"]))
    open(f"ended-{os.getpid()}", "w").write(found)

if "RANK" in os.environ:
    atexit.register(end)
"""
"""`sitecustomize.py` of a training command: at the end of each launched process, a thread of gloo frees a tensor."""
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


def end_of_two(store, script, output=subprocess.PIPE):
    """What two processes print, and their exit statuses, when they end while a thread of gloo frees a tensor.

    If the output goes to a file, what they print as errors.
    """
    command = [sys.executable, "-c", FREES_A_TENSOR + script, str(store)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=output, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    read = 0 if output == subprocess.PIPE else 1
    return [(process.communicate(timeout=120)[read].decode(), process.returncode) for process in both]


def test_a_process_that_frees_a_tensor_at_its_end_is_aborted(tmp_path):
    """By chance, so it is tried several times."""
    ends = (end_of_two(tmp_path / f"store-{attempt}", ABORTED) for attempt in range(5))
    assert any(-signal.SIGABRT in {status for _, status in both} for both in ends)


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_leaves_has_its_status_its_output_and_its_exit_handlers(status, tmp_path):
    printed = "a thread has ended and its first exit handler has run"
    assert end_of_two(tmp_path / "store", LEAVES.format(status=status)) == [(printed, status), (printed, status)]
    assert [(tmp_path / f"store-{rank}").read_text() for rank in range(2)] == ["written", "written"]


def test_a_process_whose_output_cannot_be_written_at_the_end_has_pythons_status(tmp_path):
    with open("/dev/full", "w") as full:
        both = end_of_two(tmp_path / "store", LEAVES.format(status=0), output=full)
    assert [status for _, status in both] == [120, 120]
    assert all("error: <stdout> cannot be written: [Errno 28]" in printed for printed, _ in both)


def test_a_program_that_calls_a_command_does_not_leave():
    assert not train._is_program()


COMMAND = ("-m", "safe_trainers.cli", "reward", "--config", "recipe.yaml")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    "command",
    [
        (*COMMAND, "--num_processes", "2"),
        (*COMMAND, "--num_processes", "2", "--dry-run"),
        (*TORCHRUN, *COMMAND),
        (*TORCHRUN, *COMMAND, "--dry-run"),
    ],
    ids=["launched", "dry run", "torchrun", "dry run under torchrun"],
)
def test_a_training_command_closes_its_groups_and_leaves(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FREES_A_TENSOR + ENDS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.read_text() for path in tmp_path.glob("ended-*")) == ["0 False", "1 False"]

"""A run over several machines: two launchers on the loopback address, each with one process, on CPUs over gloo.

Each launcher runs in a folder of its own, so that the machines share no files.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import yaml


pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
TIMEOUT = 150
BOUND = 60
"""Seconds after the loss of a machine within which the other one has to end."""
RECIPE = {
    "model_name_or_path": "tiny:llava", "dtype": "float32", "bf16": True, "use_cpu": True, "max_steps": 4,
    "dataset_name": "tiny:shapes", "dataset_size": 16, "evaluation_size": 0, "warm_up_steps": 1,
    "warm_up_batch_size": 4, "per_device_train_batch_size": 2, "completion_only_loss": True,
    "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2,
    "report_to": "none", "disable_tqdm": True, "output_dir": "out",
}  # fmt: skip
FSDP2 = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
}  # fmt: skip
CHANGED = """
import faulthandler, os, pathlib, signal
stacks = pathlib.Path(__file__).with_name(f"stacks-{os.getpid()}").open("w")
faulthandler.register(signal.SIGUSR1, stacks)
if "RANK" in os.environ and "SHARDED_ON_CPU" in os.environ:
    # accelerate shards on machines with accelerators only, and transformers asks a GPU whether it computes bfloat16.
    import accelerate.state
    import transformers.training_args
    from accelerate.utils import DistributedType

    accelerate.state.PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_GPU)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
if os.environ.get("RANK") == "1" and "DIES_IN_STEP" in os.environ:
    # The machine of rank 1 is lost: its launcher and all its processes end at once, between forward and backward.
    import signal
    from trl import SFTTrainer

    compute = SFTTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        if self.state.global_step == int(os.environ["DIES_IN_STEP"]) and self.args.max_steps > 1:
            os.killpg(int(os.environ["MACHINE"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    SFTTrainer.compute_loss = compute_loss
"""
"""`sitecustomize.py` of the started processes."""


def free_port():
    """Returns a free port that no connection takes in the seconds before a launcher listens on it.

    It is below the range from which the kernel takes the ports of connections.
    """
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


class Written:
    """What a machine has printed and written."""

    def __init__(self, folder):
        self.folder = folder

    @property
    def printed(self):
        return (self.folder / "printed").read_text(errors="replace")

    @property
    def log(self):
        return json.loads((self.folder / "out/log.json").read_text())

    @property
    def weights(self):
        return hashlib.sha256((self.folder / "out/model.safetensors").read_bytes()).hexdigest()

    @property
    def files(self):
        """The files in its output folder, without the embedded model and what only a rank of its own reads."""
        out = self.folder / "out"
        names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        of_rank = re.compile(r"checkpoint-\d+/(rng_state_1\.pth|safe_trainers_state_1\.pt)|model/.*")
        return {name for name in names if not of_rank.fullmatch(name)}


class Machine(Written):
    """A command in a folder, with all its processes in one group."""

    def __init__(self, folder, command, changes):
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = dict(RECIPE)
        if "SHARDED_ON_CPU" in changes:
            recipe.pop("use_cpu")
            (folder / "fsdp2.yaml").write_text(yaml.safe_dump(FSDP2))
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (folder / "sitecustomize.py").write_text(CHANGED)
        left_over = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "PYTEST_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_over)}
        paths = [str(folder), *filter(None, [changes.pop("PYTHONPATH", "")]), str(ROOT)]
        kept |= {
            "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), **changes,
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        if "SHARDED_ON_CPU" in changes:
            kept["ACCELERATE_TORCH_DEVICE"] = "cpu"
        self.out = (folder / "printed").open("w+")
        self.process = subprocess.Popen(
            ["bash", "-c", 'export MACHINE=$$; exec "$@"', "bash", *command],
            cwd=folder, env=kept, stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait(self, timeout=TIMEOUT):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after {timeout} s\n{self._state()}") from None

    def _state(self):
        """What this machine and those beside it have printed, and where their processes are."""
        for stacks in self.folder.parent.glob("*/stacks-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(stacks.name.removeprefix("stacks-")), signal.SIGUSR1)
        time.sleep(2)
        beside = self.folder.parent
        texts = [(path, path.read_text(errors="replace")[-3000:]) for path in beside.glob("*/printed")]
        texts += [(path, path.read_text()[:3000]) for path in beside.glob("*/stacks-*")]
        return "\n".join(f"{path}:\n{text}" for path, text in texts if text)

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.out.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a command as a machine; none is left at the end."""
    started = []

    def begin(command, folder=None, **changes):
        started.append(Machine(folder or tmp_path_factory.mktemp("machine"), command, changes))
        return started[-1]

    yield begin
    for machine in started:
        machine.end()


@pytest.fixture(scope="module")
def launched(start):
    """Starts two launchers with one process each."""

    def begin(*arguments, config="ddp", second=(), folders=(None, None), changes=({}, {})):
        command = [sys.executable, "-m", "safe_trainers.cli", "sft", "--config", "recipe.yaml"]
        command += ["--accelerate_config", config, "--num_processes", "2", "--num_machines", "2"]
        command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), *arguments]
        return [
            start([*command, "--machine_rank", str(rank), *(second if rank else ())], folders[rank], **changes[rank])
            for rank in range(2)
        ]

    return begin


def one_launcher(start, config, **changes):
    """What one launcher of two processes trains."""
    command = [sys.executable, "-m", "safe_trainers.cli", "sft", "--config", "recipe.yaml", "--num_processes", "2"]
    machine = start([*command, "--accelerate_config", config], **changes)
    assert machine.wait() == 0, machine.printed[-3000:]
    return machine


@pytest.fixture(scope="module")
def ddp(start):
    return one_launcher(start, "ddp")


def trained(first, second, engine):
    """Checks that two processes trained, and that only machine 0 printed and wrote."""
    assert first.log["precision"]["report"]["facts"]["engine"] == f"{engine}, 2 processes"
    # In a step, two processes see 2 * 2 of 16 rows.
    losses = [entry for entry in first.log["log"] if "loss" in entry]
    assert [(entry["step"], entry["epoch"]) for entry in losses] == [(step, step / 4) for step in (1, 2, 3, 4)]
    assert first.printed.count("checkpoint  out") == 1
    assert "sft 4/4" in first.printed
    assert second.files == set()
    assert not re.search(r"sft \d/4|precision report|checkpoint", second.printed)


def succeeded(machines, engine):
    """Waits for two machines that train."""
    assert [machine.wait() for machine in machines] == [0, 0], "\n".join(m.printed[-2500:] for m in machines)
    trained(*machines, engine)
    return machines[0]


STAND_INS = """
scontrol() { echo 127.0.0.1; }
srun() {  # starts the command on two "machines", each in its folder, and ends both when one fails
    shift
    (cd ../0 && SLURM_NODEID=0 exec "$@" > printed 2>&1) & local first=$!
    (cd ../1 && SLURM_NODEID=1 exec "$@" > printed 2>&1) & local second=$!
    while kill -0 $first && kill -0 $second; do sleep 0.2; done 2> /dev/null
    local ended=$first left=$second
    kill -0 $first 2> /dev/null && ended=$second left=$first
    wait $ended || kill -KILL $left
    wait $first && wait $second
}
export -f scontrol srun
safe-trainers copy slurm.sbatch
exec bash slurm.sbatch sft --config recipe.yaml
"""
"""Stand-ins for SLURM's commands, which are not installed here, and the packaged script."""


def test_the_packaged_script_with_stand_ins_for_slurm_trains_as_one_launcher(start, ddp, tmp_path):
    for name in "01":
        assert start(["true"], tmp_path / name).wait() == 0  # writes the recipe
    command = tmp_path / "safe-trainers"  # the environment of DeepSpeed has the package, and not its command
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m safe_trainers.cli \"$@\"\n")
    command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    job = start(
        ["bash", "-c", STAND_INS], tmp_path / "job", SLURM_NNODES="2", SLURM_JOB_NODELIST="node[0-1]", ENGINE="ddp",
        PROCESSES_PER_MACHINE="1", MAIN_PORT=str(free_port()), PATH=path,
    )  # fmt: skip
    status = job.wait()
    first, second = (Written(tmp_path / name) for name in "01")
    assert status == 0, job.printed + first.printed[-2500:] + second.printed[-2500:]
    trained(first, second, "DDP")
    assert first.weights == ddp.weights
    assert first.log["log"][0]["loss"] == ddp.log["log"][0]["loss"]


def test_a_machine_that_is_lost_ends_the_other_one_and_the_run_resumes_exactly(launched, ddp):
    machines = launched(changes=({"DIES_IN_STEP": "2"}, {"DIES_IN_STEP": "2"}))
    first, second = machines
    assert second.wait() == -signal.SIGKILL
    lost = time.monotonic()
    assert first.wait() == 1
    assert time.monotonic() - lost < BOUND
    assert "process 0 of 2 failed:" in first.printed
    assert "note: this is machine 0 of 2; if another one failed first, its launcher printed why" in first.printed
    assert not (first.folder / "out/log.json").exists()
    folders = (first.folder, second.folder)
    checkpoint = Path("out/checkpoint-2")

    refused = launched("--resume", folders=folders)
    assert [machine.wait() for machine in refused] == [2, 2]
    for machine in refused:
        assert re.search(r"rank 1 \(.+\) cannot find model.safetensors, optimizer.pt, scheduler.pt and 1 more",
                         machine.printed)  # fmt: skip
        assert "[checkpoint-on-another-machine]" in machine.printed

    # As `rsync -a` copies it: the files of rank 1 stay.
    shutil.copytree(first.folder / checkpoint, second.folder / checkpoint, dirs_exist_ok=True)
    resumed = launched("--resume", folders=folders)
    assert [machine.wait() for machine in resumed] == [0, 0], "\n".join(m.printed[-2500:] for m in resumed)
    assert "resuming from out/checkpoint-2" in resumed[0].printed
    assert "sft 3/4" in resumed[0].printed
    assert "sft 2/4" not in resumed[0].printed
    assert resumed[0].weights == ddp.weights


def test_another_version_and_another_recipe_are_refused_before_the_first_step(launched, tmp_path):
    other = tmp_path / "site" / f"peft-{metadata.version('peft')}.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
    machines = launched(
        "--learning_rate", "1e-4", second=("--learning_rate", "1e-5", "--max_grad_norm", "0.5"),
        changes=({}, {"PYTHONPATH": str(tmp_path / "site")}),
    )  # fmt: skip
    assert [machine.wait() for machine in machines] == [2, 2]
    host = socket.gethostname()
    changes = f"peft version 0.0.1, not {metadata.version('peft')}; learning_rate 1e-05, not 0.0001; max_grad_norm 0.5"
    for machine in machines:
        assert f"error: differences from rank 0 ({host}): rank 1 ({host}): {changes}, not 1.0: " in machine.printed
        assert "[ranks-differ]" in machine.printed
        assert "loading model" not in machine.printed
    assert not any((machine.folder / "out").exists() for machine in machines)


SHARDED = {"SHARDED_ON_CPU": "1"}


@pytest.fixture(scope="module")
def fsdp2(start):
    return one_launcher(start, "fsdp2.yaml", **SHARDED)


def test_two_launchers_shard_as_one_launcher(launched, fsdp2):
    first = succeeded(launched(config="fsdp2.yaml", changes=(dict(SHARDED), dict(SHARDED))), "FSDP2")
    assert first.weights == fsdp2.weights


def test_under_torchrun_the_same_command_shards_and_launches_nothing(start, fsdp2):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = ["-m", "safe_trainers.cli", "sft", "--config", "recipe.yaml", "--accelerate_config", "fsdp2.yaml"]
    machines = [start([*torchrun, "--node_rank", str(rank), *command], **SHARDED) for rank in range(2)]
    first = succeeded(machines, "FSDP2")
    assert first.weights == fsdp2.weights

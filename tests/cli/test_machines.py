"""The options of a launch over several machines, without any process: validation, precedence, and torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from safe_trainers import RecipeError
from safe_trainers.cli import join, launch, launch_env
from safe_trainers.cli.launch import read_config
from safe_trainers.cli.machines import FLAGS, PORT, Machines, read_machines
from safe_trainers.cli.main import build_parser, main
from safe_trainers.cli.train import resume_command


TWO = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
RECIPE = {
    "model_name_or_path": "tiny:reward", "dataset_name": "tiny:preferences", "precision": "bf16", "use_cpu": True,
    "max_steps": 1, "dataset_size": 8, "evaluation_size": 0, "per_device_train_batch_size": 4, "report_to": "none",
    "output_dir": "out",
}  # fmt: skip


def test_one_machine_is_the_default_and_takes_any_free_port():
    assert read_machines({}, {}, "ddp.yaml") == Machines(1, 0, None, 0)
    assert read_machines({"main_process_port": 1234}, {}, "ddp.yaml").port == 1234
    # What `accelerate config` writes for one machine.
    own = {"num_machines": 1, "machine_rank": 0, "main_process_ip": None, "main_process_port": None}
    assert read_machines({}, own, "own.yaml") == Machines()


def test_options_win_over_the_config_and_its_values_are_used_without_them():
    config = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "head", "main_process_port": 1}
    assert read_machines({}, config, "own.yaml") == Machines(2, 0, "head", 1)
    assert read_machines({"machine_rank": 1}, config, "own.yaml") == Machines(2, 1, "head", 1)
    assert read_machines(TWO, {}, "ddp.yaml") == Machines(2, 1, "10.0.0.1", PORT)
    assert Machines(2, 1, "head", 7).options() == [
        "--num_machines", "2", "--machine_rank", "1", "--main_process_port", "7", "--main_process_ip", "head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"machine_rank": 2}, {}, "machine_rank must be from 0 to 1, got 2"),
        (
            {"machine_rank": None},
            {},
            "2 machines need machine_rank, which is different on each of them. Write: --mach",
        ),
        (
            {"main_process_ip": None},
            {},
            "2 machines need main_process_ip, the address of machine 0. Write: --main_pro",
        ),
        ({"main_process_ip": ""}, {}, "2 machines need main_process_ip"),
        ({"main_process_port": 0}, {}, "main_process_port must be an integer between 1 and 65535, got 0"),
        ({"main_process_port": 65536}, {}, "main_process_port must be an integer between 1 and 65535, got 65536"),
        ({}, {"num_machines": 4}, "--num_machines 2 contradicts num_machines: 4 of own.yaml. Write: --num_machines 4"),
        ({"num_machines": None}, {}, "machine_rank must be 0 with one machine, got 1. Write: --num_machines 2"),
        ({"num_machines": None}, {"num_machines": "many"}, "num_machines must be an integer of at least 1, got many"),
        ({"machine_rank": None}, {"machine_rank": -1}, "machine_rank must be an integer of at least 0, got -1"),
    ],
)
def test_a_fault_is_one_error(change, config, message):
    with pytest.raises(RecipeError) as caught:
        read_machines({**TWO, **change}, config, "own.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("processes", "each"), [(2, 1), (8, 4), (3, None), (1, None)])
def test_processes_are_the_total_of_all_machines(processes, each):
    if each is not None:
        assert Machines(2, 0, "head").share(processes) == each
        return
    fix = {3: "--num_processes 2", 1: "--num_processes 2"}[processes]
    with pytest.raises(RecipeError, match=f"total of all machines, and {processes} cannot be divided.*{fix}"):
        Machines(2, 0, "head").share(processes)


def test_by_default_there_is_a_process_for_each_gpu_of_each_machine(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\n")
    assert read_config(own, None, TWO)[:2] == ("MULTI_GPU", 8)
    assert read_config(own, None, {})[:2] == ("MULTI_GPU", 4)


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Runs the command with a stand-in for accelerate's launcher, and returns the options that this gets."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    given = []

    def run_accelerate(options):
        given.append((options, {name: os.environ[name] for name in (launch_env.PROCESSES, launch_env.ENGINE)}))
        return 0, False

    monkeypatch.setattr(launch, "_run_accelerate", run_accelerate)

    def run(*arguments, **recipe):
        Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | recipe))
        status = main(["reward", "--config", "recipe.yaml", *arguments])
        return status, given.pop() if given else None

    return run


ARGUMENTS = ["--num_processes", "4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "head"]


@pytest.mark.parametrize("from_recipe", [False, True])
def test_the_launcher_gets_the_machines_of_the_options_or_of_the_recipe(options, from_recipe, capsys):
    written = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "main_process_ip": "head"}
    status, (passed, environment) = options(**written) if from_recipe else options(*ARGUMENTS)
    assert status == 0
    pairs = dict(zip(passed[::2], passed[1::2], strict=False))
    assert {f"--{flag}": pairs[f"--{flag}"] for flag in FLAGS} == {
        "--num_machines": "2", "--machine_rank": "1", "--main_process_ip": "head", "--main_process_port": str(PORT),
    }  # fmt: skip
    assert pairs["--num_processes"] == "4"
    assert Path(pairs["--config_file"]).stem == "ddp"
    assert environment == {launch_env.PROCESSES: "4", launch_env.ENGINE: "MULTI_GPU"}
    assert f"machine 1 of 2: waiting for the others at head:{PORT}" in capsys.readouterr().err


def test_an_option_wins_over_the_recipe(options):
    _, (passed, _) = options(
        "--machine_rank", "0", num_processes=2, num_machines=2, machine_rank=1, main_process_ip="a"
    )
    assert passed[passed.index("--machine_rank") + 1] == "0"


@pytest.mark.parametrize(
    ("arguments", "recipe", "message"),
    [
        ([*ARGUMENTS, "--num_processes", "3"], {}, "3 cannot be divided among 2. Write: --num_processes 2"),
        (ARGUMENTS[:-2], {}, "2 machines need main_process_ip"),
        ([*ARGUMENTS, "--accelerate_config", "single_gpu"], {}, "runs one process, but 4 were requested"),
        (
            ARGUMENTS,
            {"main_process_port": 70000},
            "main_process_port must be an integer between 1 and 65535, got 70000",
        ),
        (ARGUMENTS, {"num_machines": 0}, "num_machines must be an integer of at least 1, got 0"),
        (ARGUMENTS, {"machine_rank": "one"}, "machine_rank"),
    ],
)
def test_faults_are_found_before_anything_is_launched(options, arguments, recipe, message, capsys, tmp_path):
    assert options(*arguments, **recipe) == (2, None)
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_command_that_resumes_has_the_machines(monkeypatch):
    monkeypatch.setattr("sys.argv", ["safe-trainers"])
    words = ["grpo", "--config", "r.yaml", *ARGUMENTS, "--main_process_port", "1"]
    parsed, rest = build_parser("grpo").parse_known_args(words)
    command = resume_command(parsed, rest)
    assert command.endswith(
        "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip head --main_process_port 1"
    )


# ---- Under another launcher ----


@pytest.fixture
def started(monkeypatch):
    """An environment as torchrun leaves it, which is restored."""
    monkeypatch.setattr(os, "environ", {**os.environ, "WORLD_SIZE": "2", "RANK": "0"})
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def test_under_torchrun_a_config_selects_the_engine_and_nothing_is_launched(started):
    before = dict(os.environ)
    join.join("fsdp2", None, {})
    added = {name: value for name, value in os.environ.items() if name not in before}
    assert added["ACCELERATE_USE_FSDP"] == "true"
    assert added["FSDP_VERSION"] == "2"
    assert added["ACCELERATE_MIXED_PRECISION"] == "no"
    assert added[launch_env.ENGINE] == "FSDP"
    assert {name: value for name, value in os.environ.items() if name in before} == before
    assert not {"MASTER_PORT", "OMP_NUM_THREADS"} & added.keys()


def test_under_accelerate_launch_its_own_config_stays(started):
    os.environ[join.LAUNCHED_BY_ACCELERATE] = "no"
    before = dict(os.environ)
    join.join("fsdp2", 2, {})
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("config", "processes", "machines", "message"),
    [
        (None, None, {"num_machines": 2, "machine_rank": 0}, "Drop --num_machines and --machine_rank, or start the"),
        (None, 4, {}, "is one of 2 that another launcher has started.*but --num_processes is 4. Drop --num_proc"),
        ("single_gpu", None, {}, "runs one process, but 2 were requested"),
        ("zer3", None, {}, "there is no config zer3; did you mean 'zero3'?"),
    ],
)
def test_options_that_only_launch_are_refused_under_torchrun(started, config, processes, machines, message):
    before = dict(os.environ)
    with pytest.raises(RecipeError, match=message.replace("?", r"\?")):
        join.join(config, processes, machines)
    assert dict(os.environ) == before


def test_a_config_of_several_machines_is_only_an_engine_under_torchrun(started, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nfsdp_config: {fsdp_version: 2}\n")
    join.join(str(own), None, {})
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_an_engine_that_accelerate_does_not_run_under_torchrun_is_refused(started):
    from types import SimpleNamespace

    os.environ[launch_env.ENGINE] = "FSDP"
    found = SimpleNamespace(num_processes=2, distributed_type=SimpleNamespace(value="MULTI_CPU"))
    with pytest.raises(RecipeError, match="requested FSDP, but accelerate runs MULTI_CPU"):
        launch_env.check_launched(found)


# ---- Processes that are left ----

ORPHAN = """
import os, subprocess, sys, time
from safe_trainers.cli.launched import end_with_parent
if len(sys.argv) > 1:
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
child = subprocess.Popen([sys.executable, "-c", os.environ["CODE"], "child"], stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
time.sleep(60)
"""


def test_a_launched_process_ends_when_its_launcher_was_killed():
    import psutil

    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], env={**os.environ, "CODE": ORPHAN}, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.5)
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs([child], timeout=10)[1] == []

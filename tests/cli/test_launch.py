"""How the failures of launched processes are printed, dry runs, and which checkpoint a run resumes from."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.utils import patch_environment
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure

from safe_trainers import PrecisionError, RecipeError
from safe_trainers.cli import launch, launch_env, launched
from safe_trainers.cli.main import main
from safe_trainers.cli.run_recipe import run_recipe
from safe_trainers.recipes.load import read_recipe


RECIPE = {
    "model_name_or_path": "tiny:text", "dataset_name": "tiny:preferences", "precision": "bf16", "use_cpu": True,
    "max_steps": 1, "dataset_size": 8, "evaluation_size": 0, "per_device_train_batch_size": 4, "progress": False,
    "report_to": "none", "disable_tqdm": True, "output_dir": "out", "precision_report": "file", "save_strategy": "no",
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = RECIPE | {"model_name_or_path": "tiny:reward"}
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    return ["reward", "--config", "recipe.yaml"]


def accelerator(processes, kind):
    return SimpleNamespace(num_processes=processes, distributed_type=SimpleNamespace(value=kind))


@pytest.mark.parametrize(
    ("asked", "engine", "runs", "message"),
    [
        ("2", "MULTI_GPU", (2, "MULTI_CPU"), None),
        ("1", "NO", (1, "NO"), None),
        ("2", "FSDP", (2, "FSDP"), None),
        ("2", "MULTI_GPU", (1, "NO"), "requested 2 processes, but accelerate runs 1"),
        (
            "2",
            "FSDP",
            (2, "MULTI_CPU"),
            "requested FSDP, but accelerate runs MULTI_CPU: FSDP needs GPUs. Write: --acc",
        ),
    ],
)
def test_a_run_that_is_not_what_was_launched_is_refused(asked, engine, runs, message, monkeypatch):
    monkeypatch.setenv(launch_env.PROCESSES, asked)
    monkeypatch.setenv(launch_env.ENGINE, engine)
    if message is None:
        launch_env.check_launched(accelerator(*runs))
    else:
        with pytest.raises(RecipeError, match=message):
            launch_env.check_launched(accelerator(*runs))


def test_a_run_that_nobody_launched_is_let_be(monkeypatch):
    monkeypatch.delenv(launch_env.PROCESSES, raising=False)
    monkeypatch.delenv(launch_env.ENGINE, raising=False)
    assert launch_env.check_launched(accelerator(1, "NO")) is None


def record(folder, rank, error):
    """Records an exception as a launched process of that rank does."""
    file = Path(folder, "attempt_0", str(rank), "error.json")
    file.parent.mkdir(parents=True)

    with patch_environment(TORCHELASTIC_ERROR_FILE=file):
        try:
            raise error
        except Exception as caught:  # with its traceback
            ErrorHandler().record_exception(caught)
    return str(file)


@pytest.mark.parametrize(
    ("earlier", "shown"), [(1, (2, "error: no such: column")), (0, (1, "process 0 of 2 failed:"))]
)
def test_the_first_failure_is_the_one_that_is_shown(tmp_path, earlier, shown):
    for rank, error in {0: RuntimeError("connection lost"), 1: RecipeError("no such: column")}.items():
        file = record(tmp_path, rank, error)
        # Within one second: torch's own timestamps do not tell which rank failed first.
        os.utime(file, ns=(0, 1_000_000 * (rank != earlier)))
    status, message = launch._first_failure(tmp_path, 2)
    assert status == shown[0]
    assert message.startswith(shown[1])
    if status == 1:
        assert message.splitlines()[1] == "Traceback (most recent call last):"
        assert message.endswith("RuntimeError: connection lost")


def test_no_failure_was_recorded(tmp_path):
    assert launch._first_failure(tmp_path, 2) is None


@pytest.fixture
def launched_process(monkeypatch):
    """Runs a launched process in this one, with an error in place of a checked recipe."""

    def run(error):
        def fails(options, checked, command):
            raise error

        monkeypatch.setattr(launched, "check_recipe", lambda *arguments: None)
        monkeypatch.setattr(launched, "run_here", fails)
        return launched.main(["sft", "--config", "recipe.yaml"])

    monkeypatch.setattr(launched, "quieten", lambda: None)  # it sets environment variables
    return run


@pytest.mark.parametrize(
    ("error", "status"),
    [(RecipeError("no"), 2), (PrecisionError([]), 2), (OSError("disk"), 1), (KeyboardInterrupt(), 130)],
)
def test_a_launched_process_prints_nothing(error, status, launched_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(launch_env.ERROR_FILE, str(tmp_path / "error.json"))
    assert launched_process(error) == status
    assert (tmp_path / "error.json").is_file() is (status != 130)
    assert capsys.readouterr() == ("", "")


def test_a_launched_process_keeps_its_fault_handler(launched_process, tmp_path, monkeypatch):
    # torch enables it: each process that NCCL aborts would print a stack of its own.
    enabled = []
    monkeypatch.setattr("faulthandler.enable", lambda *args, **options: enabled.append(args))
    monkeypatch.setenv(launch_env.ERROR_FILE, str(tmp_path / "error.json"))
    assert launched_process(OSError("disk")) == 1
    assert enabled == []


def test_a_failure_that_cannot_be_recorded_is_raised(launched_process, monkeypatch):
    monkeypatch.delenv(launch_env.ERROR_FILE, raising=False)
    with pytest.raises(RecipeError, match="no such column"):
        launched_process(RecipeError("no such column"))


KILLED = "error: a process was ended by SIGKILL: the machine may have run out of memory"
FAILED = "process 0 of 2 failed:"


@pytest.mark.parametrize(
    ("second", "later", "recorded", "status", "said"),
    [
        (-9, 0, False, 137, KILLED),
        (-11, 0, False, 139, "error: a process was ended by SIGSEGV"),
        (-11, 0, True, 1, FAILED),  # during its shutdown, after it had recorded its failure
        (-9, 30, False, 1, FAILED),  # by the launcher, because it ignored SIGTERM
        (-15, 0, False, 1, FAILED),  # by the launcher, because the other process has failed
        (-6, 0, False, 1, FAILED),  # by NCCL, for the same reason
    ],
)
def test_a_process_that_was_killed_is_the_cause(monkeypatch, capsys, second, later, recorded, status, said):
    """A stand-in for the launcher: the process that loses the connection may be seen to fail before the killed one."""

    def fails(options):
        files = [record(options.log_dir, rank, RuntimeError("lost")) for rank in ((0, 1) if recorded else (0,))]
        failures = {0: ProcessFailure(0, 0, 1, files[0]), 1: ProcessFailure(1, 0, second, (*files, "none")[1])}
        failures[1].timestamp = failures[0].timestamp + later
        raise ChildFailedError("", failures)

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fails)
    assert launch.launch(["sft"], "ddp", 2) == status
    printed = capsys.readouterr().err
    assert printed.splitlines()[0] == said
    assert ("Traceback" in printed) is (said == FAILED)
    assert "ChildFailedError" not in printed


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3, "a process ended with exit status 3"),
        (130, "interrupted"),
        (137, "a process was ended by SIGKILL: the machine may have run out of memory"),
        (143, "a process was ended by SIGTERM"),
        (255, "a process was ended by signal 127"),
    ],
)
def test_a_process_that_left_no_message(status, said):
    assert launch._describe(status) == said


def test_statuses_are_those_of_a_shell():
    assert (launch._shell_status(2), launch._shell_status(-9)) == (2, 137)


def test_a_dry_run_builds_everything_trains_nothing_and_leaves_nothing(recipe, capsys, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert main([*recipe, "--dry-run", "--json", "--num_train_epochs", "1"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["phase"] == "planned"
    assert report["facts"]["compute"] == "bfloat16"
    assert report["facts"]["optimizer"] == "adamw_torch_fused"
    assert sorted(tmp_path.rglob("*")) == before
    assert main([*recipe, "--dry-run"]) in (0, 1)
    assert "precision report" in capsys.readouterr().out
    assert main([*recipe, "--dry-run", "--learning_rte", "1"]) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_json_is_for_a_dry_run(recipe, capsys):
    assert main([*recipe, "--json"]) == 2
    assert "Write: --dry-run --json" in capsys.readouterr().err


def test_a_run_goes_on_from_its_newest_complete_checkpoint(recipe, capsys, tmp_path):
    saving = ["--save_strategy", "steps", "--save_steps", "1"]
    assert main([*recipe, "--resume"]) == 2
    assert "output_dir out has no checkpoint to resume from. Drop --resume" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    argv = [*recipe[1:], *saving, "--max_steps", "2", "--logging_steps", "1"]
    run = run_recipe(read_recipe("reward", argv))
    assert run.trainer.state.global_step == 2
    (tmp_path / "out/checkpoint-2/model.safetensors").unlink()
    assert main([*recipe, *saving, "--max_steps", "3", "--logging_steps", "1", "--resume"]) == 0
    log = json.loads((tmp_path / "out/log.json").read_text())["log"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3]
    assert main([*recipe, "--resume", "out/checkpoint-9"]) == 2
    assert "out/checkpoint-9" in capsys.readouterr().err
    for checkpoint in (tmp_path / "out").glob("checkpoint-*/model.safetensors"):
        checkpoint.unlink()
    assert main([*recipe, "--resume"]) == 2
    assert "[no-complete-checkpoint]" in capsys.readouterr().err


def test_an_unknown_launch_config_is_refused_before_anything_is_launched(recipe, capsys, tmp_path):
    assert main([*recipe, "--accelerate_config", "zer3"]) == 2
    assert "there is no config zer3; did you mean 'zero3'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

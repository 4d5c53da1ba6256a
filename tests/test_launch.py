"""What a launched process tells the one that launched it, dry runs, and where a run goes on."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from safe_trainers import RecipeError, launch
from safe_trainers.cli.main import main
from safe_trainers.cli.train import train


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
        ("2", "MULTI_GPU", (1, "NO"), "2 processes were asked for, and 1 run"),
        ("2", "FSDP", (2, "MULTI_CPU"), "FSDP was asked for, and MULTI_CPU runs: it needs GPUs. Write: --accelerate_"),
    ],
)
def test_a_run_that_is_not_what_was_launched_is_refused(asked, engine, runs, message, monkeypatch):
    monkeypatch.setenv(launch.PROCESSES, asked)
    monkeypatch.setenv(launch.ENGINE, engine)
    if message is None:
        launch.check_launched(accelerator(*runs))
    else:
        with pytest.raises(RecipeError, match=message):
            launch.check_launched(accelerator(*runs))


def test_a_run_that_nobody_launched_is_let_be(monkeypatch):
    monkeypatch.delenv(launch.PROCESSES, raising=False)
    monkeypatch.delenv(launch.ENGINE, raising=False)
    assert launch.check_launched(accelerator(1, "NO")) is None


def raised(error):
    try:
        raise error
    except Exception as caught:  # with its traceback
        return caught


def test_the_first_failure_is_the_one_that_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv(launch.ERRORS, str(tmp_path))
    monkeypatch.setenv(launch.PROCESSES, "2")
    monkeypatch.setenv("RANK", "1")
    assert launch.report_failure(raised(RecipeError("no such column"))) == 2
    monkeypatch.setenv("RANK", "0")
    assert launch.report_failure(raised(RuntimeError("connection lost"))) == 1
    first, second = sorted(launch._failures(tmp_path), key=lambda failure: failure.when)
    assert (first.rank, first.status, first.text) == (1, 2, "error: no such column")
    assert second.text.startswith("process 0 of 2 failed:\nTraceback (most recent call last):")
    assert second.text.endswith("RuntimeError: connection lost")
    assert sorted(os.listdir(tmp_path)) == ["0.json", "1.json"]


KILLED = "error: a process was ended by SIGKILL: the machine may have run out of memory"


@pytest.mark.parametrize(
    ("second", "later", "spoke", "status", "said"),
    [
        (-9, 0, False, 137, KILLED),
        (-11, 0, False, 139, "error: a process was ended by SIGSEGV"),
        (-11, 0, True, 1, "process 0 of 2 failed"),  # on its way out, after it had said why it fails
        (-9, 30, False, 1, "process 0 of 2 failed"),  # by the launcher, whose SIGTERM it did not follow
        (-15, 0, False, 1, "process 0 of 2 failed"),  # by the launcher, since the other has failed
        (-6, 0, False, 1, "process 0 of 2 failed"),  # by NCCL, for the same reason
    ],
)
def test_a_process_that_was_killed_is_the_cause(monkeypatch, capsys, second, later, spoke, status, said):
    """A stand-in for the launcher: the one that lost the other's connection may be seen to fail before it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fails(options):
        for rank in (0, 1) if spoke else (0,):
            text = f"process {rank} of 2 failed"
            told = {"rank": rank, "when": 1.0 + rank, "status": 1, "text": text}
            Path(os.environ[launch.ERRORS], f"{rank}.json").write_text(json.dumps(told))
        failures = {0: ProcessFailure(0, 0, 1, ""), 1: ProcessFailure(1, 0, second, "")}
        failures[1].timestamp = failures[0].timestamp + later
        raise ChildFailedError("", failures)

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fails)
    assert launch.launch(["sft"], "ddp", 2) == status
    assert capsys.readouterr().err == said + "\n"


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
    assert launch._ended(status) == said


def test_statuses_are_those_of_a_shell():
    assert (launch._status(2), launch._status(-9)) == (2, 137)


def test_a_dry_run_builds_everything_trains_nothing_and_leaves_nothing(recipe, capsys, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert main([*recipe, "--dry-run", "--json", "--num_train_epochs", "1"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["phase"] == "planned"
    assert report["facts"]["compute"] == "bfloat16"
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
    assert "there is no checkpoint in output_dir out to go on from. Drop --resume" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    run = train("reward", [*recipe[1:], *saving, "--max_steps", "2", "--logging_steps", "1"])
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

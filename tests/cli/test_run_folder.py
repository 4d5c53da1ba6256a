"""The output folder of a training command: its lock, an earlier run in it, and checkpoints of other recipes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from safe_trainers import RecipeError, SafeRewardTrainer
from safe_trainers.cli.main import main
from safe_trainers.cli.run_folder import LOCK
from safe_trainers.cli.run_recipe import _remove_on_failure
from safe_trainers.recipes.identity import differences, identity


RECIPE = {
    "model_name_or_path": "tiny:reward", "dataset_name": "tiny:preferences", "precision": "bf16", "use_cpu": True,
    "max_steps": 1, "dataset_size": 8, "evaluation_size": 0, "per_device_train_batch_size": 4, "progress": False,
    "report_to": "none", "disable_tqdm": True, "output_dir": "out", "precision_report": "file", "save_steps": 1,
}  # fmt: skip
COMMAND = ["reward", "--config", "recipe.yaml"]
PROGRAM = [sys.executable, "-m", "safe_trainers.cli"]
# A shell without job control ignores SIGINT in what it starts in the background, and children inherit that.
INTERRUPTIBLE = [
    sys.executable, "-c", "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('safe_trainers.cli', run_name='__main__')",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def begin(*arguments):
    """Starts a run that trains for minutes, and waits until it has its output folder."""
    run = subprocess.Popen(
        [*INTERRUPTIBLE, *COMMAND, "--max_steps", "100000", "--save_strategy", "no", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not Path("out", LOCK).exists() or not Path("out", LOCK).read_text():
        assert time.monotonic() < end
        assert run.poll() is None
        time.sleep(0.05)
    return run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_second_run_into_a_folder_is_refused_until_the_first_one_has_ended(number, folder, capsys):
    first = begin()
    try:
        assert main(COMMAND) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: output_dir out is in use by another run (process {first.pid} on ")
        assert error.endswith("Wait until it ends, or write: --output_dir out-2")
    finally:
        first.send_signal(number)
        first.wait(60)
    assert main(COMMAND) == 0
    assert not Path("out", LOCK).exists()


def test_the_main_process_of_several_holds_the_lock(folder, capsys):
    first = begin("--num_processes", "2")
    try:
        assert main(COMMAND) == 2
        holder = int(capsys.readouterr().err.partition("(process ")[2].split()[0])
        assert holder != first.pid
        done = subprocess.run(
            [*PROGRAM, *COMMAND, "--num_processes", "2"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "error: output_dir out is in use by another run" in done.stderr
    finally:
        first.terminate()
        first.wait(60)


def test_a_refused_run_leaves_no_folder_and_keeps_what_there_was(folder, capsys):
    wrong = [*COMMAND, "--use_peft", "--lora_target_modules", "absent"]
    assert main(wrong) == 2
    assert "the trainer cannot be built" in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()
    Path("out").mkdir()
    assert main(wrong) == 2
    assert list(Path("out").iterdir()) == []
    Path("out", "notes.txt").write_text("mine")
    assert main(wrong) == 2
    assert [path.name for path in Path("out").iterdir()] == ["notes.txt"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
@pytest.mark.parametrize("output", ["/proc/x", "/proc/x/y"])
def test_a_folder_that_the_system_does_not_make_is_one_line(output, folder, capsys):
    assert main([*COMMAND, "--output_dir", output]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: output_dir {output} cannot be written: No such file or directory. Set `--output_dir` to a writable "
        "folder"
    )


def test_what_others_write_while_a_construction_fails_is_kept(folder):
    def build():
        (folder / "model").mkdir()
        (folder / "another-run").mkdir()
        (folder / "another-run" / "model.safetensors").write_text("weights")
        (folder / "slurm-77.out").write_text("log")
        raise ValueError("no")

    with pytest.raises(RecipeError, match="the trainer cannot be built: ValueError: no"), _remove_on_failure(folder):
        build()
    assert sorted(os.listdir(folder)) == ["another-run", "recipe.yaml", "slurm-77.out"]
    assert os.listdir(folder / "another-run") == ["model.safetensors"]


def test_a_signal_after_the_last_step_waits_for_the_results(folder, monkeypatch, capfd):
    original = SafeRewardTrainer.save_model

    def save(self, *args, **kwargs):
        if not kwargs.get("_internal_call"):  # not that of a checkpoint
            signal.raise_signal(signal.SIGTERM)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SafeRewardTrainer, "save_model", save)
    with pytest.raises(SystemExit) as ended:
        main(COMMAND)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "stopping after the results are written" in capfd.readouterr().err
    for name in ("model.safetensors", "tokenizer_config.json", "log.json"):
        assert Path("out", name).is_file()


def test_a_used_folder_is_noted_and_a_resumed_run_names_its_checkpoint(folder, capsys):
    assert main(COMMAND) == 0
    assert "earlier run" not in capsys.readouterr().err
    assert main(COMMAND) == 0
    assert (
        "note: output_dir out contains an earlier run (checkpoint-1), whose log and plot are replaced. To continue "
        "it, write: --resume. To keep it, write: --output_dir out-2\n"
    ) in capsys.readouterr().err
    assert main([*COMMAND, "--resume", "--max_steps", "2"]) == 0
    error = capsys.readouterr().err
    assert "resuming from out/checkpoint-1\n" in error
    assert "earlier run" not in error
    log = [json.loads(line) for line in Path("out", "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log][-1] == 2


def test_a_checkpoint_of_another_recipe_is_refused_unless_it_is_accepted(folder, capsys):
    assert main(COMMAND) == 0
    marker = json.loads(Path("out/checkpoint-1/safe_trainers_checkpoint.json").read_text())
    assert marker["complete"]
    assert marker["recipe"]["model_name_or_path"] == "tiny:reward"
    assert "output_dir" not in marker["recipe"]
    other = [*COMMAND, "--learning_rate", "0.5", "--max_steps", "2", "--logging_steps", "1", "--resume"]
    capsys.readouterr()
    for argv in (other, [*other, "--dry-run"]):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert "[checkpoint-of-another-recipe]" in error
        assert "learning_rate: 0.0001 there, 0.5 here" in error
        assert "--accept-changes" in error
    assert main([*other, "--accept-changes"]) == 0
    assert "note: out/checkpoint-1 is of another recipe: learning_rate" in capsys.readouterr().err


def test_a_checkpoint_of_a_trainer_without_a_recipe_is_taken(folder):
    assert main(COMMAND) == 0
    marker = Path("out/checkpoint-1/safe_trainers_checkpoint.json")
    content = json.loads(marker.read_text())
    del content["recipe"]
    marker.write_text(json.dumps(content))
    assert main([*COMMAND, "--learning_rate", "0.5", "--max_steps", "2", "--resume"]) == 0


def test_recipes_are_compared_by_what_decides_the_training():
    first = identity("sft", {"learning_rate": 1e-4, "output_dir": "a", "max_steps": 3, "logging_steps": 1})
    assert first == {"task": "sft", "learning_rate": 1e-4}
    second = identity("sft", {"output_dir": "b", "seed": 42})
    assert differences(first, second, {"seed": 42, "learning_rate": 1e-4}) == []
    assert differences(first, second, {"seed": 0, "learning_rate": 1e-5}) == [
        ("learning_rate", 1e-4, 1e-5),
        ("seed", 0, 42),
    ]


def test_folders_are_claimed_and_checkpoints_chosen_without_torch(folder):
    script = "import sys, safe_trainers.cli.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ}).returncode == 0

"""The command line in two real processes under accelerate's launcher: gloo on a CPU."""

import json
import os
import subprocess
import sys

import pytest
import yaml


RECIPE = {
    "model_name_or_path": "tiny:llava", "dtype": "float32", "bf16": True, "use_cpu": True, "max_steps": 2,
    "dataset_name": "tiny:shapes", "dataset_size": 16, "evaluation_size": 0, "warm_up_steps": 1,
    "warm_up_batch_size": 4, "per_device_train_batch_size": 4, "completion_only_loss": True,
    "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "output_dir": "out",
}  # fmt: skip


@pytest.fixture
def launch(tmp_path):
    """Runs the command line in a folder of its own."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))

    def run(*arguments, **changes):
        command = [sys.executable, "-m", "safe_trainers.cli", "sft", "--config", "recipe.yaml", *arguments]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **changes}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    return run


def test_two_processes_train_and_speak_once(launch, tmp_path):
    done = launch("--accelerate_config", "ddp", "--num_processes", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("checkpoint  out") == 1
    assert done.stderr.count("precision report: SafeSFTTrainer") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.yaml"]
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    assert [entry["step"] for entry in log["log"] if "loss" in entry] == [1, 2]
    # Two processes see 2 * 4 of the 16 rows in a step; accelerate's own `mixed_precision: no` did not win.
    assert [entry["epoch"] for entry in log["log"] if "loss" in entry] == [0.5, 1.0]
    assert log["precision"]["policy"]["compute"]["value"] == "bfloat16"
    assert "bfloat16" in done.stderr


def test_a_wrong_recipe_is_one_message(launch, tmp_path):
    done = launch("--num_processes", "2", "--learning_rte", "1")
    assert done.returncode == 2
    assert done.stderr.count("there is no key 'learning_rte'; did you mean 'learning_rate'?") == 1
    assert done.stderr.startswith("reading recipe recipe.yaml\nerror: ")
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.slow
def test_a_process_that_is_killed_is_said_and_the_other_ends(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import threading, time\n"
        "    threading.Thread(target=lambda: (time.sleep(8), os.kill(os.getpid(), 9)), daemon=True).start()\n"
    )
    done = launch("--num_processes", "2", "--max_steps", "100000", PYTHONPATH=str(tmp_path))
    assert done.returncode == 137
    assert "error: a process was ended by SIGKILL: the machine may have run out of memory" in done.stderr
    assert "ChildFailedError" not in done.stderr

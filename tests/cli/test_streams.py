"""Commands whose standard streams are closed, full, or read only at their beginning: real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


RECIPE = {
    "model_name_or_path": "tiny:text", "dataset_name": "data.jsonl", "dtype": "float32", "bf16": False,
    "use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2, "gradient_checkpointing": False,
    "report_to": "none", "output_dir": "out", "save_strategy": "no", "logging_steps": 1, "precision_report": "off",
}  # fmt: skip
TRAIN = ["sft", "--config", "recipe.yaml"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 32)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def run(redirection, *arguments, **environment):
    """Runs a command in a shell with a redirection; returns its exit status and the last line of standard error."""
    script = f'exec "$@" {redirection}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "safe_trainers.cli", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize("arguments", [
    ["list"], ["validate", "recipe.yaml", "--task", "sft"], ["keys", "sft", "--json"],
    ["explain", "Attempting to unscale FP16 gradients."], ["report", "tiny:text", "--json"],
], ids=lambda arguments: arguments[0])  # fmt: skip
def test_a_command_without_standard_output_ends_as_with_the_null_device(arguments):
    assert run(">&-", *arguments)[0] == run(">/dev/null", *arguments)[0] == 0


def test_a_run_without_any_standard_stream_trains():
    assert run("<&- >&- 2>&-", *TRAIN)[0] == 0
    assert Path("out", "model.safetensors").is_file()
    assert Path("out", "log.json").read_text().startswith("{")


def test_closed_standard_input_is_empty():
    status, line = run("<&-", "explain")
    assert status == 2
    assert line.startswith("error: the input is empty. Write: safe-trainers explain")
    assert run("<&-", "validate", "-", "--task", "sft")[0] == run("</dev/null", "validate", "-", "--task", "sft")[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_not_that_of_the_run(unbuffered):
    said = run(">/dev/full", *TRAIN, PYTHONUNBUFFERED=unbuffered)
    assert said == (2, "error: the output cannot be written: No space left on device")


@pytest.mark.parametrize("processes", [[], ["--num_processes", "2"]], ids=["one process", "two processes"])
def test_a_run_whose_output_is_not_read_to_its_end_has_the_exit_status_of_a_broken_pipe(processes):
    command = [sys.executable, "-m", "safe_trainers.cli", *TRAIN, "--max_steps", "400", *processes]
    with open("errors.txt", "w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert process.stdout.readline().startswith(b"sft 1/400 ")
        process.stdout.close()  # as `head -1` does
        assert process.wait(120) == 141
    assert "Traceback" not in Path("errors.txt").read_text()
    assert "BrokenPipe" not in Path("errors.txt").read_text()

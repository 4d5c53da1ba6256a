"""Errors of the system, of files and of libraries that end a training command with one line."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from safe_trainers import tiny
from safe_trainers.cli.main import main
from upstream import TRANSFORMERS_4, TRL_0


RECIPE = {
    "model_name_or_path": "tiny:text", "dataset_name": "data.jsonl", "precision": "bf16", "use_cpu": True,
    "max_steps": 1, "evaluation_size": 0, "per_device_train_batch_size": 4, "progress": False, "report_to": "none",
    "output_dir": "out", "save_steps": 1, "logging_steps": 1, "precision_report": "file", "max_length": 32,
}  # fmt: skip
COMMAND = ["sft", "--config", "recipe.yaml"]
ADAPTERS = ["--use_peft", "--lora_target_modules", "all-linear"]


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 32)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def error_of(capsys, *arguments):
    capsys.readouterr()
    assert main([*COMMAND, *arguments]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    before, _, error = printed.partition("error: ")
    assert before.endswith("\n")
    assert len(error.splitlines()) in (1, 4)  # a refusal has a heading, a reason and a fix
    return error


def test_a_loading_script_is_one_line(capsys):
    Path("scripted").mkdir()
    Path("scripted/scripted.py").write_text("import datasets\n\nclass Rows(datasets.GeneratorBasedBuilder): ...\n")
    line = error_of(capsys, "--dataset_name", "./scripted")
    assert "dataset ./scripted cannot be loaded: Dataset scripts are no longer supported" in line
    assert "JSON lines, CSV or Parquet" in line


@pytest.mark.parametrize(("first", "second", "said"), [
    (ADAPTERS, [], "the checkpoint contains adapters, and this run trains all weights"),
    ([], ADAPTERS, "the checkpoint contains all weights, and this run trains adapters"),
], ids=["full from adapters", "adapters from full"])  # fmt: skip
def test_a_checkpoint_of_another_kind_of_training_is_one_line(first, second, said, capsys):
    assert main([*COMMAND, *first]) == 0
    assert "use_peft" in error_of(capsys, *second, "--resume")  # the recipes differ
    refused = error_of(capsys, *second, "--resume", "--accept-changes")
    assert said in refused
    assert "[checkpoint-of-other-weights]" in refused
    assert said in error_of(capsys, *second, "--resume", "out/checkpoint-1", "--accept-changes")


class Runs:
    """Unpickling it would run a command."""

    def __reduce__(self):
        return os.system, ("touch was-run",)


def test_pickled_weights_with_code_are_one_line_and_not_run(capsys):
    tiny.save("text", Path("model"), seed=0)
    weights = load_file("model/model.safetensors")
    Path("model/model.safetensors").unlink()
    torch.save({**weights, "more": Runs()}, "model/pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        torch.load("model/pytorch_model.bin", weights_only=True)
    line = error_of(capsys, "--model_name_or_path", "./model")
    if not TRANSFORMERS_4:  # it tries to load them in another way, and raises an error about that
        assert "a weight file cannot be read: it contains more than tensors" in line
        assert "safetensors" in line
    assert not Path("was-run").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(trusted):
    tiny.save("text", Path("model"), seed=0)
    Path("model/mine.py").write_text(CODE)
    config = json.loads(Path("model/config.json").read_text())
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    config |= {"model_type": "mine", "architectures": ["Mine"], "auto_map": classes}
    Path("model/config.json").write_text(json.dumps(config))
    trust = ["--trust_remote_code", "true"] if trusted else []
    run = subprocess.run(
        [sys.executable, "-m", "safe_trainers.cli", *COMMAND, "--model_name_or_path", "./model", *trust],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HOME": os.path.abspath("cache")},
    )  # fmt: skip
    trains = trusted and not TRL_0  # whose trainers load the config without it
    assert run.returncode == (0 if trains else 2), run.stderr
    assert Path("out", "model.safetensors").exists() == trains
    failed = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(failed) == (not trains)
    assert all("custom code" in line for line in failed)


def test_truncated_weights_are_one_line(capsys):
    tiny.save("text", Path("model"), seed=0)
    os.truncate("model/model.safetensors", 2000)
    assert "the trainer cannot be built: SafetensorError: " in error_of(capsys, "--model_name_or_path", "./model")


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def run(folder, **options):
    command = [sys.executable, "-m", "safe_trainers.cli", *COMMAND, "--model_name_or_path", "./model"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command += ["--output_dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **options)


def test_a_file_that_must_not_be_so_large_is_one_line():
    tiny.save("text", Path("model"), seed=0)
    done = run("out", preexec_fn=small_files)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "error: output_dir out cannot be written: File too large. Free space"
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few hundred KiB more than one checkpoint needs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1900k", "tmpfs", str(folder)], check=False)
    if made.returncode:
        pytest.skip("this user must not mount file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount")
def test_a_full_disk_is_one_line_that_names_the_checkpoint_to_resume_from(small_disk):
    tiny.save("text", Path("model"), seed=0)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"max_steps": 9}))
    done = run(small_disk / "out")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        f"error: output_dir {small_disk}/out cannot be written: No space left on device. Free space"
    )
    assert line.endswith("/out/checkpoint-1 is complete, and --resume continues from it")
    steps = [json.loads(line)["step"] for line in (small_disk / "out/log.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_an_error_with_space_on_the_disk_keeps_its_traceback():
    Path("model").mkdir()
    tiny.save("text", Path("model"), seed=0)
    Path("rewarding.py").write_text("def reward(completions, **kwargs):\n    raise OSError(5, 'broken')\n")
    Path("data.jsonl").write_text('{"prompt": "a"}\n' * 32)
    settings = {key: value for key, value in RECIPE.items() if key != "max_length"}
    settings |= {"reward_funcs": ["rewarding.reward"], "num_generations": 2, "max_completion_length": 4}
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "safe_trainers.cli", "grpo", "--config", "recipe.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "OSError: [Errno 5] broken"

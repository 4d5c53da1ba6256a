"""What is installed from the wheel works in an empty folder, away from the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that a freshly built wheel was installed into; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    for command in (
        ["hatchling", "build", "-t", "wheel", "-d", str(folder)],
        ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder / "site"), str(folder)],
    ):
        if command[0] == "pip":
            (command[-1],) = map(str, folder.glob("*.whl"))
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def program(installed, tmp_path):
    """Runs the installed program in an empty folder."""

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "safe_trainers.cli", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_the_program_is_the_installed_one(installed, program, tmp_path):
    code = "import safe_trainers; print(safe_trainers.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                         check=True)  # fmt: skip
    assert out.stdout.startswith(str(installed))
    assert (installed / "safe_trainers" / "py.typed").is_file()


def test_a_recipe_is_found_copied_validated_and_trained(program, tmp_path):
    listed = program("list")
    assert listed.returncode == 0, listed.stderr
    assert "grpo/tiny_vlm_bf16" in listed.stdout
    copied = program("copy", "grpo/tiny_vlm_bf16.yaml")
    assert copied.returncode == 0, copied.stderr
    assert (tmp_path / "tiny_vlm_bf16.yaml").is_file()
    validated = program("validate", "tiny_vlm_bf16.yaml", "--task", "grpo")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    small = ["--max_steps", "1", "--warm_up_steps", "1", "--dataset_size", "64", "--evaluation_size", "8",
             "--per_device_train_batch_size", "8", "--logging_steps", "1", "--output_dir", "run"]  # fmt: skip
    trained = program("grpo", "--config", "tiny_vlm_bf16.yaml", *small)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (tmp_path / "run" / "plot.png").is_file()
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()

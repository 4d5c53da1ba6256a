"""The embedded recipe in fp16, with a real autocast and loss scaler: it learns there what it learns elsewhere."""

from statistics import fmean

import benchmark_modules
import pytest
from policing import reset_accelerate
from rich.console import Console

from safe_trainers import SafeGRPOTrainer
from safe_trainers.cli.run_recipe import run_recipe
from safe_trainers.recipes.load import read_recipe
from safe_trainers.testing import fp16_on_cpu


RECIPE = "recipes/grpo/tiny_vlm_bf16.yaml"
FP16 = ["--bf16", "false", "--fp16", "true", "--dtype", "float16"]


def run_in_fp16(folder, *changes):
    """The trainer of a finished run."""
    reset_accelerate()
    argv = ["--config", RECIPE, *FP16, "--output_dir", str(folder),
            "--progress", "false", *changes]  # fmt: skip
    return run_recipe(read_recipe("grpo", argv), Console(quiet=True), fp16_on_cpu(SafeGRPOTrainer)).trainer


def test_the_recipe_in_fp16_is_real(tmp_path):
    trainer = run_in_fp16(tmp_path, "--max_steps", "2", "--warm_up_steps", "2", "--dataset_size", "64",
                          "--evaluation_size", "8", "--per_device_train_batch_size", "8")  # fmt: skip
    assert trainer.accelerator.native_amp
    assert trainer.accelerator.scaler is not None
    assert trainer.precision.policy.autocast.text == "float16"
    assert trainer.precision.model.weights == {"float16"}
    assert set(trainer.precision.model.trainable) == {"float32"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_recipe_learns_as_much_in_fp16_as_in_fp32_and_bf16(monkeypatch):
    """Each run in a process of its own: accelerate keeps one precision for the life of a process."""
    tiny_task = benchmark_modules.load(monkeypatch, "tiny_task")
    means = {}
    for precision, name in tiny_task.PRECISIONS.items():
        command, recipe, overrides, seeds = tiny_task.RUNS[name]
        runs = [tiny_task.run(command, recipe, overrides, seed) for seed in seeds]
        assert len(runs) == 3
        assert all(run["after"] - run["before"] >= 0.5 for run in runs), (name, runs)
        means[precision] = fmean(run["after"] for run in runs)
    assert set(means) == {"bf16", "fp32", "fp16"}
    assert max(means.values()) - min(means.values()) <= 0.05, means

"""The embedded recipe in fp16, with a real autocast and a loss scaler, learns what it learns in fp32 and bf16."""

import statistics

import pytest
from policing import reset_accelerate
from rich.console import Console

from safe_trainers import SafeGRPOTrainer
from safe_trainers.cli.train import run_recipe
from safe_trainers.recipes import read_recipe
from safe_trainers.testing import fp16_on_cpu


RECIPE = "recipes/grpo/tiny_vlm_bf16.yaml"
PRECISIONS = {
    "fp32": ["--bf16", "false", "--dtype", "float32"],
    "bf16": [],
    "fp16": ["--bf16", "false", "--fp16", "true", "--dtype", "float16"],
}


def score(precision, seed, folder, *changes):
    """Held-out exact match by greedy decoding after a run, and the trainer."""
    reset_accelerate()
    argv = ["--config", RECIPE, *PRECISIONS[precision], "--seed", str(seed), "--output_dir", str(folder),
            "--progress", "false", *changes]  # fmt: skip
    run = run_recipe(read_recipe("grpo", argv), Console(quiet=True), fp16_on_cpu(SafeGRPOTrainer))
    return run.after, run.trainer


def test_the_recipe_in_fp16_is_real(tmp_path):
    _, trainer = score("fp16", 0, tmp_path, "--max_steps", "2", "--warm_up_steps", "2", "--dataset_size", "64",
                       "--evaluation_size", "8", "--per_device_train_batch_size", "8")  # fmt: skip
    assert trainer.accelerator.native_amp
    assert trainer.accelerator.scaler is not None
    assert trainer.precision_policy.autocast.value == "float16"
    assert trainer.precision_census.weights == {"float16"}
    assert set(trainer.precision_census.trainable) == {"float32"}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_fp16_learns_what_fp32_and_bf16_learn(tmp_path):
    means = {}
    for precision in PRECISIONS:
        scores = [score(precision, seed, tmp_path / f"{precision}-{seed}")[0] for seed in (0, 1, 2)]
        print(precision, scores)
        means[precision] = statistics.mean(scores)
    assert means["fp16"] >= means["fp32"] - 0.05
    assert means["fp16"] >= means["bf16"] - 0.05
    assert min(means.values()) > 0.8

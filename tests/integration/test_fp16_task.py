"""The embedded recipe runs in fp16 with a real autocast and a loss scaler."""

from policing import reset_accelerate
from rich.console import Console

from safe_trainers import SafeGRPOTrainer
from safe_trainers.cli.train import run_recipe
from safe_trainers.recipes import read_recipe
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
    assert trainer.precision_policy.autocast.value == "float16"
    assert trainer.precision_census.weights == {"float16"}
    assert set(trainer.precision_census.trainable) == {"float32"}

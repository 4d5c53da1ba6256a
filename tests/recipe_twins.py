"""The twin of a recipe: the same keys, a tiny model, and local files with the columns of its dataset.

What differs is in the tables below.
"""

import math
from pathlib import Path

import datasets
import public_schemas
import yaml
from rich.console import Console

import safe_trainers
from safe_trainers.cli.run_recipe import run_recipe
from safe_trainers.core.tasks import TASKS
from safe_trainers.recipes.load import read_recipe
from safe_trainers.testing import fp16_on_cpu


ROOT = Path(__file__).parent.parent / "recipes"
RECIPES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.yaml")) if "tiny" not in path.name}
MODELS = {
    "Qwen/Qwen2.5-VL": "tiny:qwen2_5_vl",
    "Qwen/Qwen3-VL": "tiny:qwen2_5_vl",
    "HuggingFaceTB/SmolVLM": "tiny:smolvlm",
    "google/gemma-3": "tiny:gemma3",
    "llava-hf/llava-1.5": "tiny:llava",
    "Qwen/Qwen2-0.5B": "tiny:reward",
}
"""The embedded model for what a recipe's model begins with."""

SIZES = {
    "max_steps": 2, "max_completion_length": 6, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
    "image_min_pixels": 1024, "image_max_pixels": 1024, "dataset_limit": 4, "warmup_steps": 1, "eval_steps": 2,
}  # fmt: skip
"""Sizes that are brought down to these, where a recipe has more."""

DROPPED = {
    "use_vllm": "vLLM needs a GPU",
    "vllm_mode": "vLLM needs a GPU",
    "vllm_gpu_memory_utilization": "vLLM needs a GPU",
    "num_train_epochs": "two steps are less than an epoch",
    "log_completions": "it prints",
}
"""Keys without a twin, and why."""

ADDED = {
    "use_cpu": True, "max_steps": 2, "logging_steps": 1, "output_dir": "out", "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "progress": False, "evaluation_size": 0, "precision_report": "off",
}  # fmt: skip
"""What a run in a test needs."""

LOSS_SCALE = 256.0
"""The first loss scale under fp16: the gradients of a random model are large, and the first steps would be skipped."""

REWARD = "public_schemas.alternating_reward"
"""A reward beside the recipe's own: a random model earns none of those, and would have nothing to learn from."""


def twin(path, folder):
    """The values of a recipe's twin."""
    values = yaml.safe_load(path.read_text())
    name = values["model_name_or_path"]
    values["model_name_or_path"] = next(small for start, small in MODELS.items() if name.startswith(start))
    values["dataset_name"] = str(public_schemas.write(values["dataset_name"], folder))
    values |= {key: min(most, values[key]) for key, most in SIZES.items() if key in values}
    if "image_resize" in values:
        values["image_resize"] = [32, 32]
    if "reward_funcs" in values:
        values["reward_funcs"] = [*values["reward_funcs"], REWARD]
    if "reward_weights" in values:
        values["reward_weights"] = [*values["reward_weights"], 1.0]
    values |= {"loss_scale_init": LOSS_SCALE} if values.get("fp16") else {}
    return {key: value for key, value in values.items() if key not in DROPPED} | ADDED


def train(values, task, folder, monkeypatch):
    """Trains the two steps of a twin in a folder, and returns the trainer and the logs of the steps."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    Path("twin.yaml").write_text(yaml.safe_dump(values))
    recipe = read_recipe(task, ["--config", "twin.yaml"])
    trainer_class = fp16_on_cpu(getattr(safe_trainers, TASKS[task].trainer))
    trainer = run_recipe(recipe, Console(quiet=True), trainer_class).trainer

    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert all(entry["grad_norm"] > 0 for entry in steps)
    return trainer, steps

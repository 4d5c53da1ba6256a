"""Runs whose rows make no batch: they are refused before training, or their result is."""

import json
from pathlib import Path

import pytest
import yaml

from safe_trainers.cli.main import main
from safe_trainers.recipes.schema import load
from upstream import needs_trl_1


RECIPE = {
    "model_name_or_path": "tiny:text", "dataset_name": "data.jsonl", "dtype": "float32", "bf16": False,
    "use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_checkpointing": False,
    "progress": False, "report_to": "none", "output_dir": "out", "save_strategy": "no", "logging_steps": 1,
    "precision_report": "off",
}  # fmt: skip
ROLLOUTS = {"reward_funcs": ["think_answer_format_reward"], "num_generations": 2, "max_completion_length": 4}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "completion": "b"}) + "\n" for i in range(10)))

    def go(task, *options, **changes):
        values = RECIPE | (ROLLOUTS if task in ("grpo", "rloo") else {}) | changes
        Path("recipe.yaml").write_text(yaml.safe_dump(values))
        capsys.readouterr()
        status = main([task, "--config", "recipe.yaml", *options])
        return status, capsys.readouterr().err.splitlines()[-1]

    return go


def written(line):
    """The settings after `Write: ` as options."""
    _, _, setting = line.partition("Write: ")
    key, _, value = setting.partition(": ")
    return f"--{key}", value


@pytest.mark.parametrize(("task", "changes", "needed", "fix"), [
    ("grpo", {"per_device_train_batch_size": 64}, 32, ("--per_device_train_batch_size", "20")),
    ("grpo", {"per_device_train_batch_size": 6, "num_generations": 3, "gradient_accumulation_steps": 6}, 12,
     ("--per_device_train_batch_size", "5")),
    ("grpo", {"generation_batch_size": 32}, 16, ("--generation_batch_size", "20")),
    ("rloo", {"per_device_train_batch_size": 64}, 32, ("--per_device_train_batch_size", "20")),
    ("sft", {"dataloader_drop_last": True, "per_device_train_batch_size": 11}, 11,
     ("--dataloader_drop_last", "false")),
])  # fmt: skip
def test_too_few_rows_for_one_batch_are_refused_with_a_line_that_works(task, changes, needed, fix, run):
    status, line = run(task, **changes)
    assert status == 2
    assert line.startswith(f"error: dataset data.jsonl has 10 rows to train on, and one batch needs {needed}: ")
    assert written(line) == fix
    assert not Path("out").exists()
    assert run(task, *fix, **changes)[0] == 0
    assert Path("out", "model.safetensors").is_file()


@pytest.mark.skipif("train_sampling_strategy" not in load("sft").keys, reason="another key in this transformers")
def test_the_sampler_by_length_is_not_taken_for_that_of_rollouts(run):
    changes = {"dataloader_drop_last": True, "per_device_train_batch_size": 11, "gradient_accumulation_steps": 2}
    status, line = run("sft", train_sampling_strategy="group_by_length", **changes)
    assert status == 2
    assert "one batch needs 11: " in line
    assert line.endswith("Write: dataloader_drop_last: false")


def test_a_batch_that_no_batch_size_makes_small_enough_asks_for_rows(run):
    for key in ("gradient_accumulation_steps", "steps_per_generation"):
        status, line = run("grpo", **{key: 64})
        assert status == 2
        assert line.endswith(f"Use a dataset with 128 rows or more, or a smaller `{key}`")
    assert run("grpo", generation_batch_size=64, per_device_train_batch_size=32)[1].endswith("with 32 rows or more")


def test_a_dry_run_is_refused_too(run):
    status, line = run("grpo", "--dry-run", per_device_train_batch_size=64)
    assert status == 2
    assert "one batch needs 32" in line


@needs_trl_1("has no rollouts for streams")
def test_a_stream_without_a_batch_saves_no_result(run):
    status, line = run("grpo", per_device_train_batch_size=64, dataset_streaming=True)
    assert status == 2
    assert line.startswith("error: no step was trained, and nothing is saved: dataset data.jsonl has too few rows ")
    assert not Path("out", "model.safetensors").exists()
    assert not Path("out", "log.json").exists()


@needs_trl_1("keeps rows without a token to train on")
def test_rows_of_which_max_length_leaves_no_answer_are_refused(run):
    status, line = run("sft", max_length=1)
    assert status == 2
    assert line == (
        "error: all 10 rows of dataset data.jsonl were dropped before training: with max_length=1, each row is too "
        "long, or is truncated before the tokens to train on. Write a larger `max_length`, or `max_length: null` to "
        "truncate nothing"
    )
    assert run("sft", "--max_length", "none")[0] == 0

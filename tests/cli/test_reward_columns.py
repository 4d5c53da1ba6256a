"""Reward functions that need a column which the dataset does not have."""

import json
from pathlib import Path

import pytest
import yaml

from safe_trainers.cli.main import main


RECIPE = {
    "model_name_or_path": "tiny:text", "dataset_name": "data.jsonl", "dtype": "float32", "bf16": False,
    "use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_checkpointing": False,
    "progress": False, "report_to": "none", "output_dir": "out", "save_strategy": "no", "logging_steps": 1,
    "precision_report": "off", "num_generations": 2, "max_completion_length": 4,
}  # fmt: skip
REWARD = "def reward(completions, answer, **kwargs):\n    return [float(len(one)) for one in answer]\n"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": f"what is {i}?", "answers": f"{i}"} for i in range(8)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewarding_by_column.py").write_text(REWARD)


def refused(name, capsys):
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"reward_funcs": [name]}))
    assert main(["grpo", "--config", "recipe.yaml"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"reward {name} needs the column " in line
    assert not Path("out").exists()
    return line


@pytest.mark.parametrize("name", ["math_answer_reward", "rewarding_by_column.reward"])
def test_a_run_whose_reward_has_no_column_is_refused_with_a_line_that_works(name, capsys):
    written = yaml.safe_load(refused(name, capsys).partition("Write: ")[2])
    assert list(written) == ["dataset_columns"]
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"reward_funcs": [name]} | written))
    assert main(["grpo", "--config", "recipe.yaml"]) == 0


def test_validate_knows_the_columns_of_the_rewards_of_the_package(capsys):
    Path("recipe.yaml").write_text(
        "model_name_or_path: tiny:text\ndataset_name: data.jsonl\nreward_funcs:\n- math_answer_reward\n"
    )
    assert main(["validate", "recipe.yaml", "--task", "grpo"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "recipe.yaml:4: reward math_answer_reward needs the column 'solution'" in shown
    assert "dataset_columns: {prompt: prompt, solution: answers}" in shown

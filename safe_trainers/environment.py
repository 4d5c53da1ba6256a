"""The `env:` entries of a recipe: which variables it may set, and why not the others.

A recipe is a file that people hand on. What it may set is what tunes a run: processes, threads, memory, logging. What
loads code, holds a secret, or says where files and requests go is the environment's own to say.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import hint, nearest
from .recipe_file import Entry, Flaw, read_file


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
"""What the name of a variable has to begin with."""

CODE, SECRET, PLACE, FILES = "code that is loaded", "a secret", "where requests go", "where files are"

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
    **dict.fromkeys(("ENDPOINT", "URL", "URI", "HOST", "IP", "SERVER", "PROXY", "MODELSCOPE"), PLACE),
    **dict.fromkeys(("PATH", "PATHS", "DIR", "HOME", "CACHE", "FILE", "ROOT", "EXECUTABLES"), FILES),
}
"""Words of a name, between underscores, that say more than how a run is tuned, the worst first, and what they say."""

LET_THROUGH = frozenset({"CUDA_MODULE_LOADING", "HF_HUB_DISABLE_IMPLICIT_TOKEN"})
"""Names with such a word that only tune."""


def why_not(name: str) -> str | None:
    """Why a recipe may not set a variable.

    Args:
        name: Its name.

    Returns:
        The reason, `None` where it may.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "it is no name of a variable"
    words = name.upper().split("_")
    said = next((what for word, what in REFUSED.items() if word in words), None)
    if said is not None and name not in LET_THROUGH:
        return f"it says {said}, which is for your own environment to say"
    if not name.startswith(PREFIXES):
        near = nearest(name, [prefix for prefix in PREFIXES if not prefix.endswith("_")])
        return f"a recipe may only set what tunes a run{hint(near)}"
    return None


def flaws(env: Mapping[str, Entry]) -> Iterator[Flaw]:
    """What is wrong with the entries of `env`.

    Args:
        env: As `recipe_file.read_file` reads them.

    Yields:
        One flaw for each that cannot be set.
    """
    for name, entry in env.items():
        reason = why_not(name)
        if reason is not None:
            yield Flaw(entry.line, f"env cannot set {name}: {reason}", f"export {name}=... in your shell")
        elif _value(entry) is None:
            yield Flaw(entry.line, f"env sets {name} to no single value", f"{name}: value")


def variables(env: Mapping[str, Entry]) -> dict[str, str]:
    """The variables that the entries of `env` set; what may not be set is left out, and refused by `flaws`."""
    values = {name: _value(entry) for name, entry in env.items() if why_not(name) is None}
    return {name: value for name, value in values.items() if value is not None}


def apply(path: str | Path, environment: Any = None) -> dict[str, str]:
    """Sets the variables of a recipe, before torch is imported; what the environment says already, stays.

    Args:
        path: The recipe. A file that cannot be read sets nothing here, and is refused when the recipe is checked.
        environment: What to set them in; by default the process's.

    Returns:
        What was set.
    """
    environment = os.environ if environment is None else environment
    made = {name: value for name, value in variables(read_file(path).env).items() if name not in environment}
    environment.update(made)
    return made


def _value(entry: Entry) -> str | None:
    """A value as it is written; YAML would make `True` of `true`. None of a list, a mapping, nothing and a NUL."""
    if entry.text is None or entry.value is None or "\0" in entry.text:
        return None
    return entry.text

"""Compares versions, settings and precision of all processes of a run, before the first step.

Processes on one machine share an environment and a recipe; those of several machines share them only if the user has
copied both. DDP and FSDP average gradients without noticing that they are of different functions.
"""

import json
import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import metadata
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import distributed

from ..core.errors import Problem, refuse
from ..core.feature import Feature
from ..core.versions import __version__


PACKAGES = ("trl", "transformers", "accelerate", "torch", "peft", "datasets", "tokenizers", "deepspeed")
"""The packages whose versions are compared, in addition to this one, if both processes have them."""
LOCAL = frozenset(
    (
        "debug", "disable_tqdm", "generation_kwargs", "local_rank", "logging_dir", "output_dir", "precision_report",
        "profile", "progress", "project", "record_steps", "report_to", "resume_from_checkpoint", "run_name", "seed",
        "skip_memory_metrics", "torch_empty_cache_steps", "vllm_gpu_memory_utilization", "vllm_group_port",
    )
)  # fmt: skip
LOCAL_PREFIXES = ("dataloader_num_", "dataloader_p", "ddp_", "hub_", "log_", "push_to_", "trackio_", "vllm_server_")
"""Settings that may differ between processes: of devices, of one process, and of output that only one of them writes.

`seed` is one of them, because some scripts add the rank to it, and so is `generation_kwargs`, which can have a seed of
the sampler; `data_seed` and `temperature` are compared.
"""
_MOST = 5
"""The number of differences of one process that a message shows."""
_LONGEST = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class Fingerprint:
    """What must be the same in all processes of a run.

    Attributes:
        rank: The rank of the process.
        host: The name of its machine.
        parts: Values by name, as JSON.
    """

    rank: int
    host: str
    parts: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def versions() -> dict[str, str]:
    """Returns the versions of Python, this package and `PACKAGES`, without labels such as `+cu128`."""
    found = {"safe-trainers": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("safe-trainers", *PACKAGES):
        try:
            found[package] = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return {f"{name} version": version for name, version in found.items()}


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that must be the same in all processes, without local files and folders.

    Args:
        values: The settings by name.
    """
    return {
        name: _plain(value)
        for name, value in values.items()
        if name not in LOCAL
        and not name.startswith(LOCAL_PREFIXES)
        and not name.endswith("_token")
        and not (isinstance(value, str) and value and os.path.exists(value))
    }


def arguments_of(args: Any) -> dict[str, Any]:
    """Returns the training arguments that must be the same in all processes.

    Args:
        args: The training arguments, a dataclass.
    """
    values = {field.name: getattr(args, field.name, None) for field in fields(args) if field.init}
    return settings_of(values)


def differences(fingerprints: Sequence[Fingerprint]) -> Problem | None:
    """Compares the fingerprints of all processes with that of the first one.

    Args:
        fingerprints: One for each rank, in order.

    Returns:
        The refusal, which names the ranks and what differs; `None` if all are the same.
    """
    first, *others = fingerprints
    found: dict[tuple[str, str], list[int]] = {}
    for other in others:
        names = [name for name in first.parts if other.parts.get(name, first.parts[name]) != first.parts[name]]
        if names:
            shown = [f"{name} {_short(other.parts[name])}, not {_short(first.parts[name])}" for name in names[:_MOST]]
            shown += [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
            found.setdefault((other.host, "; ".join(shown)), []).append(other.rank)
    if not found:
        return None
    described = (f"{_ranks(ranks)} ({host}): {changes}" for (host, changes), ranks in found.items())
    return refuse("ranks-differ", f"differences from {first}: {'. '.join(described)}")


def is_alone() -> bool:
    """Whether this process is the only one of the run."""
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def compare(parts: Mapping[str, Any]) -> Problem | None:
    """Compares values of this process with those of the others; every process has to call it.

    Args:
        parts: Plain values by name. Those that only one of two processes has are not compared.

    Returns:
        The refusal, the same in all processes; `None` if there is one process, or all values are the same.
    """
    if is_alone():
        return None
    as_json = {name: json.dumps(value, sort_keys=True) for name, value in parts.items()}
    return differences(gather_object([Fingerprint(distributed.get_rank(), socket.gethostname(), as_json)]))


class SameOnAllRanks(Feature):
    """Refuses a run whose processes have different versions, training arguments or precision policies."""

    def check(self, model: Any) -> Iterable[Problem]:
        """Compares this process with the others, if there are any."""
        if is_alone():
            return ()
        policy = {f"policy: {name}": choice.text for name, choice in self.run.policy.choices()}
        problem = compare({**versions(), **arguments_of(self.run.args), **policy})
        return () if problem is None else (problem,)


def _plain(value: Any) -> Any:
    """A value as JSON holds it; of other objects only the class, because their text may have an address in memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key != "device_map"}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name, None)) for field in fields(value)}
    return f"a {type(value).__name__}"


def _short(text: str) -> str:
    plain = str(json.loads(text)) if text.startswith('"') else text
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

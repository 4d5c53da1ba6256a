"""Detects the launcher of this process, the requested number of processes, and accelerate's default config."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import Fix, Problem


@dataclass(frozen=True)
class Launch:
    """How this process was launched, and the settings of the next `accelerate launch`.

    Attributes:
        live: Whether a launcher started this process.
        asked: Number of processes in the launcher's command line or config; `None` if unknown.
        by: The name of the launcher; `None` without a launcher.
        fix: How to start as many processes as requested.
        planned: Number of processes in accelerate's config.
        cpu: Whether the processes run on the CPU.
        machines: Number of machines in accelerate's config.
        world_size: `WORLD_SIZE` of the environment; 1 if it is not set.
        mixed_precision: `mixed_precision` of accelerate's config; `None` if it is not set.
        config: The path of accelerate's config; `None` without a config.
        problem: A problem with the config or the environment.
    """

    LEFT_OVER: ClassVar[Fix] = Fix(
        "run `unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT`, or start the run with torchrun"
    )

    live: bool = False
    asked: int | None = None
    by: str | None = None
    fix: Fix | None = None
    planned: int | None = None
    cpu: bool = False
    machines: int = 1
    world_size: int = 1
    mixed_precision: str | None = None
    config: str | None = None
    problem: Problem | None = None


def read_launch(environ: Mapping[str, str], command_lines: Sequence[Sequence[str]] | None = None) -> Launch:
    """Reads the environment, accelerate's config, and the command line of the launcher that started this process.

    Args:
        environ: The environment.
        command_lines: Command lines of the parent processes, the nearest first; by default read from the system.

    Returns:
        The launch.
    """
    lines = _ancestors() if command_lines is None else command_lines
    accelerate = next((after for line in lines if (after := _after(line, "accelerate")) is not None), None)
    torchrun = next((after for line in lines if (after := _after(line, "torchrun")) is not None), None)
    written = _option(accelerate, "config_file") if accelerate is not None else None
    path = Path(written) if written else default_config(environ)
    config, problem = _read(path) if written or os.path.isfile(path) else ({}, None)
    world_size = _number(environ.get("WORLD_SIZE")) or 1
    planned = _number(config.get("num_processes"))
    cpu = bool(config.get("use_cpu")) or (accelerate is not None and "--cpu" in accelerate)
    asked = by = None
    if accelerate is not None:
        given = _number(_option(accelerate, "num_processes"))
        asked, by = given or planned, "accelerate launch"
    elif torchrun is not None:
        each, nodes = (_number(_option(torchrun, name)) for name in ("nproc_per_node", "nnodes"))
        asked, by = (each * (nodes or 1) if each else None), "torchrun"
    count = asked or planned or world_size
    torchrun_line = f"`torchrun --nproc_per_node {count} ...`"
    fix = Fix(f"start it with {torchrun_line}, or `accelerate launch --multi_gpu --num_processes {count} ...`")
    if cpu:
        fix = Fix(f"start it with {torchrun_line}, and write `use_cpu: true` in the recipe")
    if accelerate is None and problem is None and cpu and (planned or 1) > 1 and _is_single(config):
        what = f"{path} requests {planned} processes on the CPU, but `accelerate launch` silently starts 1"
        problem = Problem(what, fix=fix, level="warning")
    if problem is None and world_size == 1 and "WORLD_SIZE" not in environ and {"RANK", "LOCAL_RANK"} & set(environ):
        what = "RANK or LOCAL_RANK is set, but WORLD_SIZE is not: another launch left them in the environment"
        problem = Problem(what, fix=Launch.LEFT_OVER, level="warning")
    return Launch(
        live=accelerate is not None or torchrun is not None,
        asked=asked,
        by=by,
        fix=fix,
        planned=planned,
        cpu=cpu,
        machines=_number(config.get("num_machines")) or 1,
        world_size=world_size,
        mixed_precision=str(config["mixed_precision"]) if config.get("mixed_precision") else None,
        config=str(path) if config or problem else None,
        problem=problem,
    )


def default_config(environ: Mapping[str, str]) -> Path:
    """Returns the path of accelerate's default config.

    Args:
        environ: The environment.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.path.expanduser(environ.get("HF_HOME") or os.path.join(cache, "huggingface"))
    return Path(home, "accelerate", "default_config.yaml")


def _read(path: Path) -> tuple[Mapping[str, Any], Problem | None]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, Problem(f"{path} cannot be read: {error.strerror}", level="warning")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, Problem(f"{path} is not YAML: {' '.join(str(error).split())}", level="warning")
    if not isinstance(values, dict):
        return {}, Problem(f"{path} must have `key: value` lines", level="warning")
    return values, None


def _is_single(config: Mapping[str, Any]) -> bool:
    """Returns whether `accelerate launch` starts one process with this config."""
    return str(config.get("distributed_type", "NO")).upper() in ("NO", "FALSE", "MULTI_CPU")


def _ancestors(most: int = 4) -> list[list[str]]:
    """Returns the command lines of the parent processes; an empty list without `/proc`."""
    lines: list[list[str]] = []
    pid = os.getppid()
    while pid > 1 and len(lines) < most and os.path.exists(f"/proc/{pid}/cmdline"):
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended meanwhile
            break
        lines.append([part.decode("utf-8", errors="replace") for part in raw.split(b"\0") if part])
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        pid = int(parent[1]) if parent else 0
    return lines


def _after(line: Sequence[str], launcher: str) -> Sequence[str] | None:
    """Returns the arguments of a launcher; `None` for the command line of another program."""
    for index, part in enumerate(line[:4]):
        name = os.path.basename(part)
        if launcher == "torchrun" and (name == "torchrun" or part == "torch.distributed.run"):
            return line[index + 1 :]
        if launcher == "accelerate" and (name == "accelerate-launch" or part == "accelerate.commands.launch"):
            return line[index + 1 :]
        if launcher == "accelerate" and name == "accelerate" and "launch" in line[index + 1 : index + 2]:
            return line[index + 2 :]
    return None


def _option(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of an option, written with `_` or `-`, and with or without `=`."""
    for index, part in enumerate(arguments):
        key, equals, value = part.partition("=")
        if key.startswith("--") and key[2:].replace("-", "_") == name:
            return value if equals else arguments[index + 1] if index + 1 < len(arguments) else None
    return None


def _number(value: Any) -> int | None:
    text = str(value).strip()
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None

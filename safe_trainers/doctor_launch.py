"""How many processes a run was asked for, by which launcher, and what accelerate's config decides behind its back."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class Launch:
    """How this process was started, and how the next one would be.

    Attributes:
        live: Whether a launcher started this process.
        asked: Processes that it was asked for, `None` where there is none or it was not told.
        by: The launcher, in words.
        fix: How to get as many.
        planned: Processes that accelerate's config asks for, for the next launch.
        cpu: Whether they are to run on the CPU.
        machines: Machines of the launch.
        world_size: Processes that the environment announces.
        mixed_precision: That of accelerate's config, `None` where there is none.
        config: The config's path.
        problem: What is wrong with the config or the environment, in words.
    """

    LEFT_OVER: ClassVar[str] = "unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT, or start it with torchrun"

    live: bool = False
    asked: int | None = None
    by: str | None = None
    fix: str | None = None
    planned: int | None = None
    cpu: bool = False
    machines: int = 1
    world_size: int = 1
    mixed_precision: str | None = None
    config: str | None = None
    problem: str | None = None


def read_launch(environ: Mapping[str, str], command_lines: Sequence[Sequence[str]] | None = None) -> Launch:
    """Reads the environment, accelerate's config, and the command line of the launcher that started this process.

    Args:
        environ: The environment.
        command_lines: Command lines of the processes above this one, the nearest first; by default the system's.

    Returns:
        What was found.
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
    fix = f"torchrun --nproc_per_node {count} ..., or accelerate launch --multi_gpu --num_processes {count} ..."
    if accelerate is None and problem is None and cpu and (planned or 1) > 1 and _is_single(config):
        problem = (
            f"{path} asks for {planned} processes on the CPU, of which `accelerate launch` starts 1, and says nothing"
        )
    if problem is None and world_size == 1 and "WORLD_SIZE" not in environ and {"RANK", "LOCAL_RANK"} & set(environ):
        problem = "RANK or LOCAL_RANK is set, and WORLD_SIZE is not: what is left of another launch"
    left = problem is not None and problem.startswith("RANK")
    return Launch(
        live=accelerate is not None or torchrun is not None,
        asked=asked,
        by=by,
        fix=Launch.LEFT_OVER if left else f"{fix} with use_cpu: true in the recipe" if cpu else fix,
        planned=planned,
        cpu=cpu,
        machines=_number(config.get("num_machines")) or 1,
        world_size=world_size,
        mixed_precision=str(config["mixed_precision"]) if config.get("mixed_precision") else None,
        config=str(path) if config or problem else None,
        problem=problem,
    )


def default_config(environ: Mapping[str, str]) -> Path:
    """Where accelerate looks for the config that it uses when it is given none.

    Args:
        environ: The environment.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.path.expanduser(environ.get("HF_HOME") or os.path.join(cache, "huggingface"))
    return Path(home, "accelerate", "default_config.yaml")


def _read(path: Path) -> tuple[Mapping[str, Any], str | None]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, f"{path} cannot be read: {error.strerror}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, f"{path} is not YAML: {' '.join(str(error).split())}"
    if not isinstance(values, dict):
        return {}, f"{path} holds no `key: value` lines"
    return values, None


def _is_single(config: Mapping[str, Any]) -> bool:
    """Whether `accelerate launch` starts one process with it: unless it names a launcher of several."""
    return str(config.get("distributed_type", "NO")).upper() in ("NO", "FALSE", "MULTI_CPU")


def _ancestors(most: int = 4) -> list[list[str]]:
    """Command lines of the processes above this one; none where the system does not show them."""
    lines: list[list[str]] = []
    pid = os.getppid()
    while pid > 1 and len(lines) < most and os.path.exists(f"/proc/{pid}/cmdline"):
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended meanwhile
            break
        lines.append([part.decode("utf-8", errors="replace") for part in raw.split(b"\0") if part])
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        pid = int(parent[1]) if parent else 0
    return lines


def _after(line: Sequence[str], launcher: str) -> Sequence[str] | None:
    """The arguments of a launcher, `None` where the command line is not its."""
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
    """The value of the first option of that name, written with `_` or `-`, with `=` or without."""
    for index, part in enumerate(arguments):
        key, equals, value = part.partition("=")
        if key.startswith("--") and key[2:].replace("-", "_") == name:
            return value if equals else arguments[index + 1] if index + 1 < len(arguments) else None
    return None


def _number(value: Any) -> int | None:
    text = str(value).strip()
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None

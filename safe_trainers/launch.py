"""Runs a training command in several processes, under accelerate's launcher, and says once what went wrong in them.

The launcher runs here, each process runs `python -m safe_trainers.launch TASK ...`. A process that fails writes why
into a folder of this one, and prints nothing: what the first of them wrote is shown, without the launcher's own
traceback and the copies of the other processes.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import RecipeError, SafeTrainersError


ERRORS = "SAFE_TRAINERS_ERRORS"
"""Environment variable: where a launched process writes why it failed."""
PROCESSES = "SAFE_TRAINERS_PROCESSES"
"""Environment variable: how many processes were asked for."""
ENGINE = "SAFE_TRAINERS_ENGINE"
"""Environment variable: the `distributed_type` that was asked for."""

ALONE = "NO"
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
PATIENCE = 20
"""Seconds after the first failure within which the launcher kills nothing: it waits 30 for those that are left."""
REFUSED, CRASHED = 2, 1
"""Exit statuses of a process whose input was refused, and of one that failed."""


@dataclass(frozen=True)
class Failure:
    """Why a launched process ended.

    Attributes:
        rank: The process.
        when: Seconds since the epoch; the first failure is the cause of the others.
        status: Its exit status.
        text: What to show: one clear message, or a traceback.
    """

    rank: int
    when: float
    status: int
    text: str


def find_config(name: str) -> Path:
    """The launch config of a name.

    Args:
        name: A file, or the name of one that comes with the package, such as `ddp`.

    Returns:
        Its path.

    Raises:
        RecipeError: If there is none, with the nearest name.
    """
    from .packaged import find

    return Path(name) if os.path.isfile(name) else find(name, "configs")


def launch(arguments: Sequence[str], config: str | None, processes: int | None) -> int:
    """Runs a training command as a launch config says.

    Args:
        arguments: The command line: the task, the recipe and what follows.
        config: Name or file of the config; by default one process, or data parallelism where more are asked for.
        processes: How many; by default as the config says, else one for each GPU.

    Returns:
        The exit status: that of the process that was killed, or else failed first; 0 where none did.

    Raises:
        RecipeError: If it cannot be launched like this.
    """
    path = find_config(config or ("ddp" if (processes or 1) > 1 else "single_gpu"))
    engine, number = _read_config(path, processes)
    options = ["--config_file", str(path), "--num_processes", str(number), "--mixed_precision", "no"]
    options += ["--main_process_port", "0", "--quiet", "--module", "safe_trainers.launch", *arguments]
    with tempfile.TemporaryDirectory(prefix="safe-trainers-launch-") as folder:
        told = {ERRORS: folder, PROCESSES: str(number), ENGINE: engine}
        with _environment(told), _children_end():
            status, said = _accelerate(options)
        failures = sorted(_failures(Path(folder)), key=lambda failure: failure.when)
    if said or not failures:
        if status and not said:
            print(f"error: {_ended(status)}", file=sys.stderr)
        return status
    print(failures[0].text, file=sys.stderr)
    return failures[0].status


def _read_config(path: Path, processes: int | None) -> tuple[str, int]:
    """The engine of a config, and how many processes it runs."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise RecipeError(
            f"{path} is no config of accelerate: it has no distributed_type. Write: distributed_type: NO"
        )
    engine = str(content["distributed_type"]) if content["distributed_type"] is not False else ALONE  # YAML 1.1's NO
    precision = content.get("mixed_precision") or "no"
    if str(precision).lower() not in ("no", "false"):
        print(f"note: mixed_precision: {precision} of {path} is not used: what a run computes in is in its recipe",
              file=sys.stderr)  # fmt: skip
    number = processes or content.get("num_processes") or _gpus()
    if not isinstance(number, int) or number < 1:
        raise RecipeError(f"there is no number of processes in {path}, and no GPU to count. Write: --num_processes 2")
    if engine == ALONE and number > 1:
        raise RecipeError(f"{path} runs one process, and {number} are asked for. Write: --accelerate_config ddp")
    if engine.startswith("MULTI_") and number < 2:
        raise RecipeError(
            f"{path} is for several processes, and {number} is asked for. Write: --accelerate_config single_gpu, "
            "or --num_processes 2"
        )
    return engine, number


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _accelerate(options: list[str]) -> tuple[int, bool]:
    """Runs accelerate's launcher in this process; its own reports of failed processes are left out.

    Returns:
        The exit status, and whether it was said why: a process was killed, and all else follows from that.
    """
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):  # torch gives each of its loggers a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        parsed = launch_command_parser().parse_args(options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            launch_command(parsed)
    except ChildFailedError as error:
        killed = next(_killed(error.failures), None)
        if killed is not None:
            print(f"error: {_ended(killed)}", file=sys.stderr)
            return killed, True
        return _status(error.get_first_failure()[1].exitcode), False
    except CalledProcessError as error:
        return _status(error.returncode), False
    except SignalException as error:
        return 128 + int(error.sigval), False
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, False
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else CRASHED, False
    except (ValueError, ImportError, ConnectionError, AssertionError) as error:
        raise RecipeError(f"accelerate cannot launch this: {error}") from error
    return 0, False


def _status(exitcode: int) -> int:
    """A process's exit status as a shell has it; below zero it is the signal that ended it."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def _killed(failures: Mapping[int, Any]) -> Iterator[int]:
    """The exit statuses of processes that were ended so that they could say nothing: the others fail without them.

    Not by SIGTERM, which the launcher sends to those that are left, nor by SIGABRT, with which NCCL ends them.

    Args:
        failures: What torch's launcher knows of each rank that has failed.
    """
    fatal = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
    first = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        spoke = Path(os.environ[ERRORS], f"{rank}.json").exists()
        by_launcher = failure.timestamp - first >= PATIENCE
        if -failure.exitcode in fatal and not spoke and not by_launcher:
            yield _status(failure.exitcode)


def _ended(status: int) -> str:
    if status <= 128:
        return f"a process ended with exit status {status}"
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        name = f"signal {status - 128}"
    why = ": the machine may have run out of memory" if name == "SIGKILL" else ""
    return "interrupted" if name == "SIGINT" else f"a process was ended by {name}{why}"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _children_end() -> Iterator[None]:
    """Ends what was started inside, also where this process is told to end: no process goes on alone."""
    import psutil  # type: ignore[import-untyped]  # accelerate brings it

    here = psutil.Process()
    before = {child.pid for child in here.children(recursive=True)}

    def told_to_end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    handler = signal.signal(signal.SIGTERM, told_to_end)
    try:
        yield
    finally:
        left = [child for child in here.children(recursive=True) if child.pid not in before]
        for child in left:
            _end(child, signal.SIGTERM)
        for child in psutil.wait_procs(left, timeout=10)[1]:
            _end(child, signal.SIGKILL)
        signal.signal(signal.SIGTERM, handler)


def _end(child: Any, number: signal.Signals) -> bool:
    """Sends a signal to a process; whether it was still there."""
    import psutil

    try:
        child.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def _failures(folder: Path) -> Iterator[Failure]:
    for file in folder.glob("*.json"):
        yield Failure(**json.loads(file.read_text(encoding="utf-8")))


def check_launched(accelerator: Any) -> None:
    """Refuses a run that is not what was launched: accelerate runs less than it was asked for, and says nothing.

    Args:
        accelerator: The trainer's accelerator.

    Raises:
        RecipeError: If there are other than the processes asked for, or the model is not sharded as asked.
    """
    if PROCESSES not in os.environ:
        return
    asked, engine = int(os.environ[PROCESSES]), os.environ[ENGINE]
    if accelerator.num_processes != asked:
        raise RecipeError(f"{asked} processes were asked for, and {accelerator.num_processes} run")
    found = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if engine in SHARDED and found != engine:
        raise RecipeError(
            f"{engine} was asked for, and {found} runs: it needs GPUs. Write: --accelerate_config ddp, or drop use_cpu"
        )


def report_failure(error: BaseException) -> int:
    """Writes why this process fails, for the one that launched it.

    Args:
        error: What was raised.

    Returns:
        The exit status.
    """
    refused = isinstance(error, SafeTrainersError)
    rank, number = int(os.environ.get("RANK", "0")), os.environ.get(PROCESSES, "1")
    said = "".join(traceback.format_exception(error)).rstrip()
    text = f"error: {error}" if refused else f"process {rank} of {number} failed:\n{said}"
    failure = Failure(rank, time.time(), REFUSED if refused else CRASHED, text)
    file = Path(os.environ[ERRORS], f"{rank}.json")
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    part.replace(file)
    return failure.status


def main(argv: Sequence[str]) -> int:
    """One launched process.

    Args:
        argv: The command line, without what says how to launch it.

    Returns:
        The exit status.
    """
    from .cli.main import build_parser, quieten
    from .cli.training import run_here

    quieten()
    try:
        options, rest = build_parser(argv[0]).parse_known_args(list(argv))
        return run_here(options, rest)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # whatever ends a process is shown by the one that launched it
        return report_failure(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

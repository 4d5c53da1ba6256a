"""Runs a training command in several processes under accelerate's launcher, and prints the first failure once.

The launcher runs in this process; each launched process is `python -m safe_trainers.cli.launched TASK ...` and records
its failure with torch's elastic error records. The launcher's own traceback and the failures that only follow from the
first one are not printed.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..core import errors
from ..core.errors import RecipeError, SafeTrainersError
from .launch_env import CRASHED, ENGINE, ERROR_FILE, PROCESSES, REFUSED, RESUME_COMMAND, SHARED_FOLDER, STOPPED
from .machines import Machines, read_machines
from .phases import show_phase
from .signals import REPEATED, SIGNALS, end_by


logger = logging.getLogger(__name__)

ALONE = "NO"
"""The `distributed_type` of a single process."""
GRACE_PERIOD = 20
"""Seconds after the first failure in which torch's launcher does not send SIGKILL: it waits 30 s after its SIGTERM."""
FATAL = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals that the launcher and NCCL do not end processes with, unlike SIGTERM and SIGABRT."""

_REFUSALS = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SafeTrainersError)
)


def find_config(name: str) -> Path:
    """Finds a launch config.

    Args:
        name: A file, or the name of a config of this package, such as `ddp`.

    Returns:
        Its path.

    Raises:
        RecipeError: If no config has that name; the message contains the nearest one.
    """
    from ..recipes.packaged import find

    return Path(name) if os.path.isfile(name) else find(name, "configs")


def launch(
    arguments: Sequence[str],
    config: str | None,
    processes: int | None,
    resume_command: str = "",
    machines: Mapping[str, Any] | None = None,
) -> int:
    """Runs a training command with a launch config.

    Args:
        arguments: The command line: the task, the recipe and its overrides.
        config: Name or file of the config; by default one process, or data parallelism for several.
        processes: The number of processes on all machines; by default that of the config, else one per GPU.
        resume_command: The command line of the run, which is printed with `--resume` if a signal ends it.
        machines: The written ones of the options `FLAGS`, by name; by default those of the config.

    Returns:
        The exit status: 0, that of the process that was killed or failed first, or that of the signal that ended all.

    Raises:
        RecipeError: If the command cannot be launched with this config.
    """
    from accelerate.utils import patch_environment

    path = find_config(config or default_config(processes, machines or {}))
    engine, count, nodes = read_config(path, processes, machines or {})
    first_rank = nodes.rank * nodes.share(count)
    if nodes.count > 1:
        where = f"{nodes.address}:{nodes.port}"
        show_phase(f"machine {nodes.rank} of {nodes.count}: waiting for the others at {where}")
    with tempfile.TemporaryDirectory(prefix="safe-trainers-launch-") as folder:
        options = ["--config_file", str(path), "--num_processes", str(count), "--mixed_precision", "no"]
        options += [*nodes.options(), "--log_dir", folder]
        options += ["--module", "safe_trainers.cli.launched", *arguments]
        # torch's launcher gives each process an error file of its own; a single process is launched without it.
        error_file = Path(folder, "0", "error.json")
        error_file.parent.mkdir()
        environment = {SHARED_FOLDER: folder, PROCESSES: count, ENGINE: engine, ERROR_FILE: error_file}
        environment[RESUME_COMMAND] = resume_command
        with patch_environment(**environment), _no_orphans() as received:
            status, is_cause = _run_accelerate(options)
        stopped = Path(folder, STOPPED)
        if stopped.is_file():
            return int(stopped.read_text())
        if received and status:
            status, is_cause = 128 + received[0], True
        failure = None if is_cause else _first_failure(Path(folder), count, first_rank)
    if failure is not None and status:
        status, message = failure
        print(message, file=sys.stderr)
    elif status:
        print(f"error: {_describe(status)}", file=sys.stderr)
    if status and status != REFUSED and nodes.count > 1:
        here = f"machine {nodes.rank} of {nodes.count}"
        print(f"note: this is {here}; if another one failed first, its launcher printed why", file=sys.stderr)
    return status


def default_config(processes: int | None, machines: Mapping[str, Any]) -> str:
    """Returns the name of the config for a launch without one.

    Args:
        processes: The requested number of processes.
        machines: The written ones of the options `FLAGS`, by name.
    """
    return "ddp" if (processes or 1) > 1 or (machines.get("num_machines") or 1) > 1 else "single_gpu"


def read_config(path: Path, processes: int | None, machines: Mapping[str, Any] | None) -> tuple[str, int, Machines]:
    """Reads a launch config.

    Args:
        path: Its file.
        processes: The number of processes on all machines; by default that of the config, else one per GPU.
        machines: The written ones of the options `FLAGS`, by name; they win over the config. `None` if another
            launcher has decided about the machines.

    Returns:
        Its `distributed_type`, how many processes it runs, and on which machines.

    Raises:
        RecipeError: If the command cannot be launched with this config.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise RecipeError(
            f"{path} is not an accelerate config: distributed_type is missing. Write: distributed_type: NO"
        )
    engine = str(content["distributed_type"]) if content["distributed_type"] is not False else ALONE  # YAML 1.1's NO
    precision = content.get("mixed_precision") or "no"
    if str(precision).lower() not in ("no", "false"):
        print(f"note: mixed_precision: {precision} of {path} is ignored: the recipe sets the precision of the run",
              file=sys.stderr)  # fmt: skip
    nodes = Machines() if machines is None else read_machines(machines, content, path.name)
    count = processes or content.get("num_processes") or _gpu_count() * nodes.count
    if count == 0:
        raise RecipeError(f"{path} does not set num_processes, and this machine has no GPU. Write: --num_processes 2")
    if not isinstance(count, int) or count < 1:
        raise RecipeError(f"num_processes of {path} must be an integer from 1, got {count}. Write: --num_processes 2")
    if engine == ALONE and count > 1:
        raise RecipeError(f"{path} runs one process, but {count} were requested. Write: --accelerate_config ddp")
    if engine.startswith("MULTI_") and count < 2:
        raise RecipeError(
            f"{path} is for several processes, but {count} was requested. Write: --accelerate_config single_gpu, or "
            "--num_processes 2"
        )
    nodes.share(count)
    return engine, count, nodes


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _run_accelerate(options: list[str]) -> tuple[int, bool]:
    """Runs accelerate's launcher in this process, without its reports of failed processes.

    Returns:
        The exit status; and whether the signal in it is the cause of every failure, because it killed a process or
        interrupted the launcher.
    """
    from subprocess import CalledProcessError

    import torch.distributed.run  # noqa: F401  # creates its loggers
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):  # torch sets the level of each of its loggers
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        parsed = launch_command_parser().parse_args(options)
        # torch's launcher would end the processes 30 s after a signal; releases without this option still do.
        parsed.signals_to_handle = "SIGHUP,SIGQUIT"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            launch_command(parsed)
    except ChildFailedError as error:
        killed = next(_killed(error.failures), None)
        if killed is not None:
            return killed, True
        return _shell_status(error.get_first_failure()[1].exitcode), False
    except CalledProcessError as error:
        return _shell_status(error.returncode), False
    except SignalException as error:
        return 128 + int(error.sigval), True
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, True
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else CRASHED, False
    except DistError as error:
        raise RecipeError(f"the machines did not meet: {str(error).splitlines()[0]}") from error
    except (ValueError, ImportError, ConnectionError, AssertionError) as error:
        raise RecipeError(f"accelerate cannot launch this: {error}") from error
    return 0, False


def _shell_status(exitcode: int) -> int:
    """A process's exit status as a shell reports it; a negative one is the signal that ended the process."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def _killed(failures: Mapping[int, Any]) -> Iterator[int]:
    """Yields the exit statuses of processes that were killed before they recorded an exception.

    Args:
        failures: torch's `ProcessFailure` by rank.
    """
    first = min(failure.timestamp for failure in failures.values())
    for failure in failures.values():
        recorded = os.path.isfile(failure.error_file)
        by_launcher = failure.timestamp - first >= GRACE_PERIOD
        if -failure.exitcode in FATAL and not recorded and not by_launcher:
            yield _shell_status(failure.exitcode)


def _first_failure(folder: Path, count: int, first_rank: int = 0) -> tuple[int, str] | None:
    """Exit status and message of the process that recorded the first exception; `None` if no process did.

    Each file is in a folder whose name is the local rank; `first_rank` is the rank of this machine's first process.
    """
    # The timestamps in the records are in seconds, and a failure reaches the other processes within one second.
    files = sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        return None
    recorded = json.loads(files[0].read_text(encoding="utf-8"))["message"]
    name, _, message = recorded["message"].partition(": ")  # torch writes the class and the message like this
    if name in _REFUSALS:
        return REFUSED, f"error: {message}"
    if name == BrokenPipeError.__name__ and "on_broken_pipe" in recorded["extraInfo"]["py_callstack"]:
        raise BrokenPipeError  # the processes print to the output of this one
    rank, stack = first_rank + int(files[0].parent.name), recorded["extraInfo"]["py_callstack"].rstrip()
    return CRASHED, f"process {rank} of {count} failed:\n{stack}"


def _describe(status: int) -> str:
    """Describes an exit status."""
    if status <= 128:
        return f"a process ended with exit status {status}"
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        name = f"signal {status - 128}"
    why = ": the machine may have run out of memory" if name == "SIGKILL" else ""
    return "interrupted" if name == "SIGINT" else f"a process was ended by {name}{why}"


@contextlib.contextmanager
def _no_orphans() -> Iterator[list[int]]:
    """Passes the first SIGINT or SIGTERM on to the processes that are started in the `with` block, and ends them all.

    The processes stop at a step boundary. A second signal kills them, and ends this process.

    Yields:
        The signals that were received.
    """
    import psutil

    received: list[int] = []
    first = 0.0

    def started(recursive: bool) -> list[Any]:
        return [child for child in here.children(recursive=recursive) if child not in before]

    def on_signal(number: int, frame: Any) -> None:
        nonlocal first
        if received and time.monotonic() - first < REPEATED:
            return
        received.append(number)
        if len(received) > 1:
            for child in started(recursive=True):
                send(child.kill)
            end_by(number)
        first = time.monotonic()
        for child in started(recursive=False):
            send(partial(child.send_signal, number))

    def send(send_signal: Callable[[], None]) -> None:
        try:
            send_signal()
        except psutil.NoSuchProcess as error:
            logger.debug("process %s has ended already", error.pid)

    here = psutil.Process()
    before = here.children(recursive=True)
    handlers = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield received
    finally:
        left = started(recursive=True)
        for child in left:
            send(child.terminate)
        for child in psutil.wait_procs(left, timeout=10)[1]:
            send(child.kill)
        for number, handler in handlers.items():
            signal.signal(number, handler)

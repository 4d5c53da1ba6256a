"""Runs the checks of a trainer class, each in a process of its own where the system can fork.

```python
from safe_trainers.bench.run import bench_trainer

result = bench_trainer(MyTrainer, only=["resume", "nan"])
assert result.exit_status == 0, result["nan"].detail
```
"""

import importlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..core.errors import RecipeError, hint, nearest
from ..core.versions import installed_version
from .build import Workshop, scratch
from .checks import CHECKS, TIME_LIMIT
from .outcome import Bench, Result, Row
from .subject import Subject, describe, load_class


PACKAGES = ("safe_trainers", "trl", "transformers", "peft", "accelerate", "torch", "bitsandbytes")


def bench_trainer(
    trainer: type | str,
    *,
    args: Mapping[str, Any] | None = None,
    task: str | None = None,
    only: Sequence[str] | None = None,
    time_limit: float = TIME_LIMIT,
    isolate: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Runs checks on a trainer class, with tiny models on the CPU and without network access.

    Args:
        trainer: A class that extends a trainer of TRL or transformers, or `"MODULE:CLASS"`.
        args: Further settings of its config.
        task: The task whose data it takes, of `TASKS`; by default that of its base class, or of the arguments of its
            constructor.
        only: The names of the checks to run, of `CHECKS`; by default all.
        time_limit: Seconds after which a running check is ended, and further ones are not started.
        isolate: Whether to run each check in a process of its own, so that a crash of the process ends only the
            check, and no check changes the state of another. Systems that cannot fork run all in one process, in
            which a check that hangs is not ended.
        progress: Receives one line before and one after each check.

    Returns:
        The results.

    Raises:
        RecipeError: If the class is not a trainer, cannot be imported, or does not have a setting, or if a check does
            not exist.
    """
    names = chosen_checks(only)
    written = trainer if isinstance(trainer, str) else ""
    subject = describe(load_class(trainer) if isinstance(trainer, str) else trainer, written, args, task)
    say = progress or (lambda line: None)
    results, started = [], time.monotonic()
    for number, name in enumerate(names, 1):
        say(f"[{number}/{len(names)}] {name}: {CHECKS[name].summary}")
        left = time_limit - (time.monotonic() - started)
        if left <= 0:
            result = Result(name, (Row("", "could not run", f"the time limit of {time_limit:g} s had passed"),))
        else:
            run = run_isolated if isolate and can_fork() else run_check
            result = run(subject, name, left)
        say(f"      {describe_result(result)}")
        results.append(result)
    found = {package: installed_version(package.replace("_", "-")) for package in PACKAGES}
    versions = {package: version for package, version in found.items() if version}
    return Bench(subject.name, subject.task, subject.args, tuple(results), versions)


def chosen_checks(only: Sequence[str] | None) -> list[str]:
    """The names of the checks to run, in their order.

    Args:
        only: Names of checks; `None` for all.

    Raises:
        RecipeError: If a check does not exist.
    """
    for name in only or ():
        if name not in CHECKS:
            raise RecipeError(
                f"there is no check {name!r}{hint(nearest(name, CHECKS))}. The checks are {', '.join(CHECKS)}"
            )
    return [name for name in CHECKS if only is None or name in only]


def describe_result(result: Result) -> str:
    """The status, the numbers of runs and the duration of a check, in one line.

    Args:
        result: The result.
    """
    counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
    return f"{result.status} ({counts}) in {result.seconds:.0f} s"


def run_check(subject: Subject, name: str, limit: float) -> Result:
    """Runs a check in this process.

    Args:
        subject: The trainer class.
        name: The name of the check.
        limit: Seconds after which no further run of the check begins.

    Returns:
        The result. An error of the check itself is a row that could not run.
    """
    module, _, function = CHECKS[name].place.partition(":")
    started, rows = time.monotonic(), []
    with scratch() as folder:
        try:
            measure = getattr(importlib.import_module(f".{module}", __package__), function)
            for row in _until(measure(Workshop(subject, Path(folder))), started + limit):
                rows.append(row)
        except Exception as error:  # a check that fails does not end the others
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"
            rows.append(Row("", "could not run", " ".join(text.split())))
    stand_in = CHECKS[name].stand_in and not torch.cuda.is_available()
    return Result(name, tuple(rows), time.monotonic() - started, stand_in)


def _until(rows: Iterator[Row], end: float) -> Iterator[Row]:
    for row in rows:
        yield row
        if time.monotonic() > end:
            yield Row("", "could not run", "the time limit had passed before the last run")
            return


def can_fork() -> bool:
    """Whether processes can be forked; on macOS libraries of the system do not allow it."""
    return "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"


def run_isolated(subject: Subject, name: str, limit: float) -> Result:
    """Runs a check in a forked process.

    Args:
        subject: The trainer class.
        name: The name of the check.
        limit: Seconds after which the process is ended.

    Returns:
        The result. If the process ends without one, a row has its exit status or signal.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    started = time.monotonic()
    process = context.Process(target=_send_result, args=(sender, subject, name, limit), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            result: Result = receiver.recv()
            return result
        row = Row("", "could not run", f"ended after {limit:.0f} s, the rest of the time limit")
        process.kill()
    except EOFError:  # the process ended without a result
        process.join()
        code = process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        row = Row("", "crashed", f"the process of the check was ended {how}", "trains")
    except BaseException:  # such as Ctrl-C, which the process of the check does not receive
        process.kill()
        raise
    finally:
        process.join()
        receiver.close()
    return Result(name, (row,), time.monotonic() - started)


def _send_result(sender: Connection, subject: Subject, name: str, limit: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to both processes, and the parent ends this one
    torch.set_num_threads(1)  # more cost tiny models time, and the threads of the parent are not in a forked process
    sender.send(run_check(subject, name, limit))
    sender.close()

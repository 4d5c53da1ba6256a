"""Starts real processes of one run on CPUs, which talk over gloo, and gives what each of them has found.

Nothing here waits for ever: processes that are not done in time are ended, and the test fails with what they wrote.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
CHILD = HERE / "child.py"
TIMEOUT = 200
"""Seconds after which the processes of a run are ended."""

_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}
_ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
ENGINES: dict[str, dict[str, str]] = {
    "alone": {},
    "ddp": {},
    "fsdp1": {**_FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_USE_ORIG_PARAMS": "true"},
    "fsdp2": {**_FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "zero2": {**_ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {**_ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
"""What accelerate's launcher puts into the environment for each engine."""
DISTRIBUTED_TYPES = {
    "alone": "NO",
    "ddp": "MULTI_CPU",
    "fsdp1": "FSDP",
    "fsdp2": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}
"""`accelerator.distributed_type` of a run that is what was asked for."""
SHARDED = ("fsdp2", "zero3")
"""Engines of which each process holds parts of the parameters only, which the processes assert."""


@dataclass
class Run:
    """What came of the processes of a run.

    Attributes:
        statuses: Their exit statuses, by rank.
        results: What each of them has written; `None` where it did not come to that.
        stderr: What each of them said.
        seconds: How long it took.
    """

    statuses: list[int]
    results: list[Any]
    stderr: list[str]
    seconds: float

    def found(self, part: str) -> list[Any]:
        """What each process has found in one part; fails with what was said where a process failed."""
        assert self.statuses == [0] * len(self.statuses), "\n".join(text[-1500:] for text in self.stderr)
        return [result[part] for result in self.results]


@dataclass
class Processes:
    """Running processes.

    Attributes:
        processes: One for each rank.
        folder: Where they write: `<rank>.json`, `<rank>.err`.
    """

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    began: float = field(default_factory=time.monotonic)

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)

    def wait(self, timeout: float = TIMEOUT) -> Run:
        """Waits until all have ended.

        Raises:
            TimeoutError: If they have not; they are ended first.
        """
        limit = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(timeout=max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            said = "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.err")))
            raise TimeoutError(f"not done after {timeout} s\n{said}") from None
        ranks = range(len(self.processes))
        files = [self.folder / f"{rank}.json" for rank in ranks]
        return Run(
            [process.returncode for process in self.processes],
            [json.loads(file.read_text()) if file.exists() else None for file in files],
            [(self.folder / f"{rank}.err").read_text(errors="replace") for rank in ranks],
            time.monotonic() - self.began,
        )

    def end(self) -> None:
        """Ends what still runs, with all that it started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def started(
    engine: str,
    parts: dict[str, dict[str, Any]],
    folder: Path,
    processes: int | None = None,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
) -> Iterator[Processes]:
    """Starts the processes of a run; none of them is left when the block ends.

    Args:
        engine: One of `ENGINES`.
        parts: What they do, in order: a name, and the keywords of `child.run`.
        folder: An empty folder for what they write.
        processes: How many; by default 2, or 1 for `"alone"`.
        python: The interpreter.
        environment: More of what the launcher would say.

    Yields:
        The processes.
    """
    count = processes or (1 if engine == "alone" else 2)
    (folder / "parts.json").write_text(json.dumps({"engine": engine, "parts": parts}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    left_over = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "PYTEST_")
    told = {name: value for name, value in os.environ.items() if not name.startswith(left_over)}
    told |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE.parent)]),
        **ENGINES[engine],
        **(environment or {}),
    }
    if count > 1 or engine not in ("alone", "ddp"):
        told |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = []
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if "WORLD_SIZE" in told else {}
            with (folder / f"{rank}.err").open("wb") as errors:
                command = [python, str(CHILD), str(folder)]
                running.append(
                    subprocess.Popen(
                        command, env=told | own, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors,
                        start_new_session=True,
                    )
                )  # fmt: skip
        yield Processes(running, folder)
    finally:
        Processes(running, folder).end()


def run(engine: str, parts: dict[str, dict[str, Any]], folder: Path, timeout: float = TIMEOUT, **options: Any) -> Run:
    """Runs the processes of a run to their end; see `started`."""
    folder.mkdir(parents=True, exist_ok=True)
    with started(engine, parts, folder, **options) as processes:
        return processes.wait(timeout)

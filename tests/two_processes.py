"""Runs a script of a test in two processes, which torch launches."""

import os
import subprocess
import sys
from pathlib import Path


TESTS = Path(__file__).parent
ENDING = """
import os as _os
import torch.distributed as _distributed
_distributed.barrier()
_os._exit(0)
"""
"""Ends both processes together, before the interpreter does: a thread of gloo that releases a tensor after that asks
for the interpreter's lock and aborts the process (`terminate called without an active exception`, pytorch 179291)."""


def environment(beside: str) -> dict[str, str]:
    """The environment of a process that imports the package, the shared modules of the tests and those of one folder.

    Args:
        beside: A file in that folder.
    """
    paths = [str(TESTS.parent), str(TESTS), str(Path(beside).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_in_two_processes(script: str, folder: Path, *arguments: str, beside: str) -> None:
    """Runs a script, which gets `folder` and the arguments; both processes have to succeed.

    Args:
        script: The source of the script.
        folder: Where the script is written, and its results.
        *arguments: More arguments.
        beside: The file of the test, whose folder the script can import from.
    """
    path = folder / "script.py"
    path.write_text(script + ENDING)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous, str(path)]
    done = subprocess.run(
        [*command, str(folder), *arguments],
        env=environment(beside), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

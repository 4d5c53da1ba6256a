"""`safe-trainers doctor`: checks whether this machine and environment can train, and prints a fix for each problem."""

import argparse
import math
import os
from collections.abc import Sequence


EPILOG = """exit status: 0: ready, 1: warnings, 2: errors
  safe-trainers doctor
  torchrun --nproc_per_node 2 -m safe_trainers.cli doctor     # checks the number of processes too
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--timeout", type=_seconds, default=180, help="seconds allowed for loading a package; by default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _seconds(text: str) -> float:
    """A time limit above 0, in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"--timeout must be a number above 0, got {text}. Write: --timeout 180")
    return seconds


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the report, on the first process only.

    Returns:
        0 without warnings and errors, 1 with warnings, 2 with errors.
    """
    from ..doctor.diagnose import diagnose, examine
    from ..doctor.run_probes import probe
    from ..report.render import present

    if os.environ.get("RANK", "0") != "0":
        probe([["processes"]], options.timeout, distributed=True)
        return 0
    return present(diagnose(examine(options.timeout)), options.json)

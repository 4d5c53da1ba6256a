"""`safe-trainers doctor`: whether this machine and this environment can train, with what to do where they cannot."""

import argparse
import os
from collections.abc import Sequence


EPILOG = """exit status: 0 if a run can be tried, 1 if something may not be meant, 2 if something cannot work
  safe-trainers doctor
  torchrun --nproc_per_node 2 -m safe_trainers.cli doctor     # do as many processes run as were asked for?
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--timeout", type=float, default=180, help="seconds that loading a package may take (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Examines and reports; of several processes the first speaks.

    Returns:
        The exit status.
    """
    from ..doctor import diagnose, examine
    from ..doctor_run import probe
    from ..render import present

    if os.environ.get("RANK", "0") != "0":
        probe([["processes"]], options.timeout, distributed=True)
        return 0
    return present(diagnose(examine(options.timeout)), options.json)

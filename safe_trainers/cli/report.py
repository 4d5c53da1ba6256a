"""`safe-trainers report MODEL|RECIPE|CHECKPOINT`."""

import argparse
from collections.abc import Sequence


EPILOG = """what can be reported on:
  a model       a folder, tiny:NAME, or the name of a repository on the hub
  a checkpoint  a checkpoint-N folder, or the output_dir of a run
  a recipe      a *.yaml file
  a report      a precision_report.json that a run wrote
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("target", metavar="MODEL|RECIPE|CHECKPOINT", help="what to report on")
    parser.add_argument("--task", choices=("grpo", "rloo", "sft", "reward"), help="what a recipe is for")
    parser.add_argument("--json", action="store_true", help="for a program")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Reports.

    Returns:
        0 where all is well, 1 where something is warned of, 2 where something is wrong.
    """
    from ..file_reports import report_on
    from ..render import present

    return present(report_on(options.target, options.task), options.json)

"""`safe-trainers bench --trainer MODULE:CLASS`: runs named checks on any TRL trainer."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.checks import CHECKS, TIME_LIMIT
from ..core.errors import RecipeError
from ..core.files import replace_file
from ..core.tasks import TASKS
from .outputs import check_output, written


if TYPE_CHECKING:
    from ..bench.outcome import Bench
    from ..report.document import Report

EPILOG = """exit status: 0: nothing wrong, 1: a check found a fault or could not run, 2: invalid input
  safe-trainers bench --trainer trl:GRPOTrainer
  safe-trainers bench --trainer my_package.trainers:MyTrainer --args beta=0.1 --only resume,nan --json bench.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("--trainer", metavar="MODULE:CLASS", help="the class; modules of this folder can be imported")
    parser.add_argument(
        "--args", metavar="KEY=VALUE", nargs="+", default=[], help="further settings of its config; values are YAML"
    )
    parser.add_argument("--task", choices=tuple(TASKS), help="the task whose data it takes; by default detected")
    parser.add_argument("--only", metavar="CHECK,...", help="the checks to run; by default all")
    parser.add_argument("--json", metavar="FILE", help="write the results and every run")
    parser.add_argument(
        "--time_limit", metavar="SECONDS", type=float, default=TIME_LIMIT, help="(default: %(default)g)"
    )
    parser.add_argument("--list", action="store_true", help="print the checks and exit")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the results.

    Returns:
        0 if nothing is wrong, 1 if a check found a fault or could not run.

    Raises:
        RecipeError: If the command line is not as described.
    """
    from ..report.render import console, show

    if options.list:
        show(list_of_checks(), console())
        return 0
    if not options.trainer:
        raise RecipeError("write the class: safe-trainers bench --trainer MODULE:CLASS, such as trl:GRPOTrainer")
    if options.json:
        check_output("--json", options.json)
    if not options.time_limit > 0:
        raise RecipeError(f"--time_limit must be a number of seconds above 0, got {options.time_limit:g}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here
    from ..bench.run import bench_trainer
    from ..bench.subject import parse_args
    from .phases import show_phase

    found = bench_trainer(
        options.trainer,
        args=parse_args(options.args),
        task=options.task,
        only=None if options.only is None else [name.strip() for name in options.only.split(",")],
        time_limit=options.time_limit,
        progress=show_phase,
    )
    show(report_on(found), console())
    if options.json:
        text = json.dumps(found.to_dict(), indent=1) + "\n"
        with written("--json", options.json):
            replace_file(Path(options.json), lambda file: file.write(text.encode()))
        print(f"json  {options.json}")
    return found.exit_status


def report_on(found: "Bench") -> "Report":
    """The results as a report.

    Args:
        found: The results.
    """
    from ..report.document import Report, Table

    rows = []
    for result in found.results:
        status = (
            f"{result.status} (stand-in)" if result.stand_in and result.status != "not applicable" else result.status
        )
        ran = sum(count for state, count in result.counts.items() if state != "not applicable")
        wrong = sum(count for state, count in result.counts.items() if state in ("fault", "crashed", "could not run"))
        rows.append((result.check, status, f"{wrong} of {ran}" if ran else "–", result.detail))
    facts = {
        "task": found.task,
        "time": f"{sum(result.seconds for result in found.results):.0f} s",
        "settings": ", ".join(f"{key}={value}" for key, value in found.args.items()) or None,
    }
    return Report(
        "bench",
        found.trainer,
        {name: value for name, value in facts.items() if value is not None},
        (Table("checks", ("check", "result", "wrong runs", "first of them"), tuple(rows)),),
    )


def list_of_checks() -> "Report":
    """The checks as a report."""
    from ..report.document import Report, Table

    rows = tuple((name, check.summary) for name, check in CHECKS.items())
    return Report("bench", "checks", {}, (Table("checks", ("check", "what must hold"), rows),))

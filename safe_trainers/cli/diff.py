"""`safe-trainers diff A B` and `safe-trainers diff RUN --rollout`."""

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.errors import Problem, RecordingError
from ..report.document import Cell, Report, Table


if TYPE_CHECKING:
    from ..diff.compare import Comparison


PHASES = ("rollout", "scoring", "reference", "forward", "loss", "backward", "optimizer")
EPILOG = """A and B: run folders with recordings (record_steps), or folders that `safe_trainers.record` wrote
exit status: 0: no difference beyond noise, 1: a difference, or values that are not recorded, 2: errors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("first", metavar="A", help="a run folder with recordings")
    parser.add_argument("second", metavar="B", nargs="?", help="another one")
    parser.add_argument("--rollout", action="store_true", help="compare the rollout and the training of run A")
    parser.add_argument(
        "--noise", metavar="C", nargs="+", default=[], help="recordings of the same as A, whose distance is noise"
    )
    parser.add_argument("--phase", choices=PHASES, help="compare only this phase of the steps")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the first difference and its cause.

    Returns:
        0 without a difference beyond noise, 1 with one, or if values are missing in a recording.

    Raises:
        RecordingError: If the command line or a recording is not as described.
    """
    if options.rollout == (options.second is not None):
        raise RecordingError(
            "write two run folders, or one and --rollout: safe-trainers diff A B, safe-trainers diff RUN --rollout"
        )
    if options.rollout and options.phase is not None:
        raise RecordingError(
            f"--rollout compares the rollout with the training, so that --phase {options.phase} has no effect. "
            "Drop one of the two"
        )
    from ..diff.compare import compare_recordings, compare_rollout
    from ..report.render import present

    if options.rollout:
        comparison = compare_rollout(options.first, options.noise)
    else:
        comparison = compare_recordings(options.first, options.second, options.noise, options.phase)
    return present(report_on(comparison), options.json)


def report_on(comparison: "Comparison") -> Report:
    """Makes the report of a comparison.

    Args:
        comparison: The comparison.
    """
    facts: dict[str, Cell] = {
        "steps": ", ".join(map(str, comparison.steps)),
        "values compared": comparison.compared,
        "modules of one recording only": len(comparison.alone),
    }
    several = comparison.ranks != (0,)
    if several:
        facts["processes"] = ", ".join(map(str, comparison.ranks))
    if comparison.other_ranks:
        facts["processes of one recording only"] = ", ".join(map(str, comparison.other_ranks))
    if comparison.missing:
        facts["values not recorded"] = comparison.missing
    subject = f"{comparison.first} and {comparison.second}"
    cause = comparison.cause
    if cause is None:
        return Report("diff", subject, facts, (), (_without_difference(comparison),))
    rows = tuple(
        (named(d.module), d.phase, d.value, "" if math.isinf(d.ulp) else round(d.ulp, 1), round(d.noise, 1))
        for d in comparison.differences
    )
    first = comparison.differences[0]
    place = f"step {first.step}, process {first.rank}" if several else f"step {first.step}"
    facts = {
        **facts,
        "first difference": f"{place}, {first.phase}, {named(first.module)}, {first.value}",
        "module": named(cause.module),
        "cause": cause.kind,
    }
    table = Table("differences in order", ("module", "phase", "value", "ulp", "noise in ulp"), rows)
    verdict = Problem(f"{named(cause.module)} differs: {cause.kind}: {cause.text}", level="warning")
    return Report("diff", subject, facts, (table,), (verdict,))


def _without_difference(comparison: "Comparison") -> Problem:
    """The verdict if nothing differs in what was compared."""
    if not comparison.missing:
        return Problem("no difference beyond noise", level="ok")
    return Problem(
        "no difference beyond noise in what was recorded",
        f"{comparison.missing:,} values are not recorded, because the files of the steps would have been too large",
        level="warning",
    )


def named(module: str) -> str:
    """Returns the name of a module for display."""
    return module or "the model"

"""Stock and safe side by side in the cells that users are in: family, trainer, weights, flag, adapter, reference.

    python benchmarks/matrix.py            # the axes covered pairwise; 5 to 20 minutes on 2 cores
    python benchmarks/matrix.py --slice    # three minutes
    python benchmarks/matrix.py --all      # every cell; an hour

Each cell runs in a process that runs both. Results are written as they come, one line each; what is there already is
not run again, unless a version has changed. `docs/build.py` makes `docs/evidence.md` of them.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

from rich.console import Console
from rich.table import Table


RESULT = Path(__file__).parent / "results" / "matrix.jsonl"
PACKAGES = ("safe-trainers", "torch", "trl", "transformers", "peft", "bitsandbytes")
OUTCOMES = ("trained", "refused", "crashed", "wrong")


def every_cell(chosen: Iterable[str] | None = None) -> list[Any]:
    """All cells that TRL can train in some precision, in a fixed order.

    Args:
        chosen: Families; by default all.
    """
    import families
    from matrix_cell import DTYPES, FLAGS, KINDS, Cell

    cells = []
    for family in chosen or families.FAMILIES:
        if why_absent(family):
            continue
        tasks = (*families.TASKS, "reward") if family in families.TEXT_FAMILIES else families.TASKS
        for task, weights, flag, kind in itertools.product(tasks, DTYPES, FLAGS, KINDS):
            cells += [
                Cell(family, task, weights, flag, kind, beta)
                for beta in ((0.0, 0.1) if task in ("grpo", "rloo") else (0.0,))
                if families.family_spec(family).why_not(task, scoring=beta > 0) is None
            ]
    return cells


def pairwise(cells: Sequence[Any], seed: int = 0) -> list[Any]:
    """As few cells as a greedy choice needs so that every pair of two axes' values occurs that occurs in all of them.

    Args:
        cells: The cells.
        seed: Of the order in which equally good ones are taken.

    Returns:
        The chosen cells, in the order of `cells`. Weights and flag together count as one axis too: which flag meets
        which weights is what most faults come from, so each family has all nine.
    """

    def pairs(cell: Any) -> set[tuple[Any, ...]]:
        values = [(f.name, getattr(cell, f.name)) for f in fields(cell)]
        values.append(("mode", (cell.weights, cell.flag)))
        return set(itertools.combinations(values, 2))

    open_pairs = set().union(*map(pairs, cells))
    left, chosen = list(cells), []
    random.Random(seed).shuffle(left)
    gains = {cell: pairs(cell) for cell in left}
    while open_pairs:
        best = max(left, key=lambda cell: len(gains[cell] & open_pairs))
        chosen.append(best)
        left.remove(best)
        open_pairs -= gains[best]
    return sorted(chosen, key=cells.index)


SLICE = ("aria", "llava", "qwen2_5_vl", "text")


def the_slice() -> list[Any]:
    """About three minutes: the modes in which faults are known, of a few families."""
    return [cell for cell in pairwise(every_cell(SLICE)) if (cell.weights, cell.flag) != ("fp32", "none")][:30]


def run_both(cell: Any) -> dict[str, Any]:
    """A cell with the stock and with the safe trainer, and, where safe refuses, with what its message says."""
    import datasets
    import torch
    from matrix_cell import FOLLOWED, run_cell

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    stock, safe = run_cell(cell, safe=False), run_cell(cell, safe=True)
    row = {"id": cell.id, **asdict(cell), "stock": stock.to_dict(), "safe": safe.to_dict()}
    if safe.outcome == "refused" and safe.ids and set(safe.ids) <= FOLLOWED.keys():
        mended = cell
        for found in safe.ids:
            mended = FOLLOWED[found](mended)
        row["followed"] = {"id": mended.id, **run_cell(mended, safe=True).to_dict()}
    return row


def versions() -> dict[str, str]:
    """The versions that a result is about."""
    return {package: version(package) for package in PACKAGES}


@functools.cache
def why_absent(family: str) -> str | None:
    """Why the installed transformers cannot build a family or load what was built; `None` where it can."""
    import families
    from upstream import why_not_built

    from safe_trainers import tiny

    return families.ABSENT.get(family) or (why_not_built(family) if family in tiny.VISION_FAMILIES else None)


def absent_families() -> dict[str, str]:
    """Families that the installed transformers cannot build or load, and why."""
    import families

    return {family: why for family in families.FAMILIES if (why := why_absent(family))}


def read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The heading of a results file and its rows; both empty where there is none."""
    if not file.is_file():
        return {}, []
    heading, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return heading, rows


def measure(cells: Sequence[Any], file: Path, jobs: int) -> list[dict[str, Any]]:
    """Runs the cells that the file does not hold yet; the file is whole after every cell.

    Args:
        cells: The cells.
        file: Where the results are and go.
        jobs: How many processes.

    Returns:
        A row for each of the cells.
    """
    heading, rows = read(file)
    if heading.get("versions") != versions():
        rows = []
    heading = {
        "command": "python benchmarks/matrix.py",
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        **({"absent": absent} if (absent := absent_families()) else {}),
    }
    found = {row["id"]: row for row in rows}
    todo = [cell for cell in cells if cell.id not in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8") as stream:
        for line in (heading, *rows):
            stream.write(json.dumps(line) + "\n")
        stream.flush()
        for row in _run(todo, jobs):
            found[row["id"]] = row
            stream.write(json.dumps(row) + "\n")
            stream.flush()
    return [found[cell.id] for cell in cells]


def _run(cells: Sequence[Any], jobs: int) -> Iterable[dict[str, Any]]:
    """Rows as they come. A process that dies takes the cell it was in with it, and nothing else."""
    left = list(cells)
    while left:
        # New processes now and then: what upstream keeps for the life of a process adds up.
        some = left[: 30 * jobs]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(run_both, cell): cell for cell in some}
            try:
                for future in as_completed(futures):
                    row = future.result()
                    left.remove(futures[future])
                    print(f"{len(left)} cells left, {row['id']}: {row['safe']['outcome']}", file=sys.stderr)
                    yield row
            except BrokenProcessPool:
                # Which cell it was is not told: one process alone runs them in order, until it is found.
                if jobs == 1:
                    died = left.pop(0)
                    dead = {"outcome": "crashed", "message": "the process died"}
                    yield {"id": died.id, **asdict(died), "stock": dead, "safe": dead}
                jobs = 1


def summary(rows: Sequence[dict[str, Any]]) -> Table:
    """How many cells ended in each outcome."""
    table = Table("trainer", *OUTCOMES)
    for side in ("stock", "safe"):
        counts = [sum(row[side]["outcome"] == outcome for row in rows) for outcome in OUTCOMES]
        table.add_row(side, *map(str, counts))
    return table


def bad(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What must not be: a safe cell that crashed or is wrong, refused what stock trains correctly or what is not on
    the list, or whose refusal's line does not train."""
    from matrix_cell import FOLLOWED

    lines = []
    for row in rows:
        safe, stock = row["safe"], row["stock"]
        if safe["outcome"] in ("crashed", "wrong"):
            why = safe.get("message") or "; ".join(safe.get("faults", []))
            lines.append(f"{row['id']}: safe {safe['outcome']}: {why} {safe.get('frame', '')}")
        elif safe["outcome"] == "refused":
            if not safe.get("ids") or not set(safe["ids"]) <= FOLLOWED.keys():
                lines.append(f"{row['id']}: refused for what is not on the list: {safe.get('message', '')[:300]}")
            elif stock["outcome"] == "trained":
                lines.append(f"{row['id']}: refused ({', '.join(safe['ids'])}), and stock trains it")
            elif row.get("followed", {}).get("outcome") != "trained":
                lines.append(f"{row['id']}: the line of its refusal was followed, and: {row.get('followed')}")
    return lines


def main() -> int:
    """Runs what was asked for and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every cell")
    parser.add_argument("--slice", action="store_true", help="the few of the test suite")
    parser.add_argument("--families", help="these alone, separated by commas")
    parser.add_argument("--cell", help="one cell by its id; prints what came of it and writes nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    cells = every_cell(options.families.split(",") if options.families else None)
    if options.cell:
        print(json.dumps(run_both(next(cell for cell in cells if cell.id == options.cell)), indent=1))
        return 0
    cells = cells if options.all else the_slice() if options.slice else pairwise(cells)
    started = time.perf_counter()
    rows = measure(cells, options.out, options.jobs)
    Console().print(summary(rows))
    problems = bad(rows)
    print(*problems, sep="\n")
    print(f"{len(rows)} cells, {time.perf_counter() - started:.0f} s, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

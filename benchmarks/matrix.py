"""Compares stock and safe trainers by model family, trainer, weights, flag, adapter and reference model.

    python benchmarks/matrix.py            # the axes covered pairwise; 5 to 20 minutes on 2 cores
    python benchmarks/matrix.py --slice    # three minutes
    python benchmarks/matrix.py --all      # every cell; an hour; `results/matrix_all.json` gets the counts by family

Each cell runs both trainers in one process. Each result is written as a line when its cell is done. Cells with a
result are not run again, unless a version has changed. `tools/build_docs.py` writes `docs/evidence.md` from the
results.
"""

import argparse
import functools
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  (sets the environment)
from provenance import measured_with, read_results
from rich.console import Console
from rich.table import Table


RESULT = Path(__file__).parent / "results" / "matrix.jsonl"
EVERY = RESULT.with_name("matrix_all.jsonl")
"""The rows of all cells, which are not committed; their counts are in the file with the suffix `.json`."""
PACKAGES = ("safe-trainers", "torch", "trl", "transformers", "peft", "bitsandbytes")
OUTCOMES = ("trained", "refused", "crashed", "wrong")


def every_cell(chosen: Iterable[str] | None = None) -> list[Any]:
    """Returns all cells that TRL can train in at least one precision, in a fixed order.

    Args:
        chosen: Families; all by default.
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
    """Chooses few cells, greedily, such that every pair of values of two axes in `cells` occurs in one of them.

    Args:
        cells: The cells.
        seed: Seed of the order in which equally good cells are chosen.

    Returns:
        The chosen cells, in the order of `cells`. The combination of weights and flag counts as another axis, because
        it causes most faults; each family therefore has all nine combinations.
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
    """Returns cells for about three minutes: combinations with known faults, of a few families."""
    return [cell for cell in pairwise(every_cell(SLICE)) if (cell.weights, cell.flag) != ("fp32", "none")][:30]


def run_both(cell: Any) -> dict[str, Any]:
    """Runs a cell with the stock and the safe trainer, and with the suggested fix if the safe trainer refuses it."""
    import datasets
    import torch
    from matrix_cell import FOLLOWED, run_cell

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    stock, safe = run_cell(cell, safe=False), run_cell(cell, safe=True)
    row = {"id": cell.id, **asdict(cell), "stock": stock.to_dict(), "safe": safe.to_dict()}
    if safe.outcome == "refused" and safe.ids and set(safe.ids) <= FOLLOWED.keys():
        fixed = cell
        for found in safe.ids:
            fixed = FOLLOWED[found](fixed)
        row["followed"] = {"id": fixed.id, **run_cell(fixed, safe=True).to_dict()}
    return row


@functools.cache
def why_absent(family: str) -> str | None:
    """Why the installed transformers cannot build or load a family; `None` if it can."""
    import families

    from safe_trainers import tiny
    from upstream import why_not_built

    return families.ABSENT.get(family) or (why_not_built(family) if family in tiny.VISION_FAMILIES else None)


def absent_families() -> dict[str, str]:
    """The families that the installed transformers cannot build or load, with the reasons."""
    import families

    return {family: why for family in families.FAMILIES if (why := why_absent(family))}


def measure(cells: Sequence[Any], file: Path, jobs: int) -> list[dict[str, Any]]:
    """Runs the cells that are not in the file yet; the file is complete after every cell.

    Args:
        cells: The cells.
        file: The results file, which is read and extended if it is of the same package and versions.
        jobs: Number of processes.

    Returns:
        A row for each cell.
    """
    heading, rows = read_results(file)
    now = measured_with("python benchmarks/matrix.py", *PACKAGES)
    if {key: heading.get(key) for key in now} != now:
        rows = []
    heading = {
        **now,
        "rows": len(cells),
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
    """Yields rows as cells finish. If a process dies, only its current cell is lost."""
    left = list(cells)
    while left:
        # New processes from time to time, because upstream libraries accumulate memory.
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
                # The pool does not report the cell, so a single process runs them in order until it is found.
                if jobs == 1:
                    died = left.pop(0)
                    dead = {"outcome": "crashed", "message": "the process died"}
                    yield {"id": died.id, **asdict(died), "stock": dead, "safe": dead}
                jobs = 1


def counted(rows: Sequence[dict[str, Any]], heading: dict[str, Any]) -> dict[str, Any]:
    """Counts outcomes by family.

    Args:
        rows: The rows of all cells.
        heading: The heading of their file.

    Returns:
        The heading; by family, the number of cells and for each trainer of each outcome; by message id, the number of
        refusals; and the unacceptable results.
    """
    families: dict[str, Any] = {}
    for row in rows:
        found = families.setdefault(row["family"], {"cells": 0, "stock": Counter(), "safe": Counter()})
        found["cells"] += 1
        for side in ("stock", "safe"):
            found[side][row[side]["outcome"]] += 1
    refusals = Counter(found for row in rows for found in row["safe"].get("ids", []))
    command = {"command": "python benchmarks/matrix.py --all"}
    return {**heading, **command, "families": families, "refusals": refusals, "problems": bad(rows)}


def summary(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the number of cells by outcome."""
    table = Table("trainer", *OUTCOMES)
    for side in ("stock", "safe"):
        counts = [sum(row[side]["outcome"] == outcome for row in rows) for outcome in OUTCOMES]
        table.add_row(side, *map(str, counts))
    return table


def bad(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Describes unacceptable results of the safe trainer.

    These are a crash, a wrong result, an unexpected refusal, a refusal of a cell that stock trains correctly, and a
    suggested fix that does not train.
    """
    from matrix_cell import FOLLOWED

    lines = []
    for row in rows:
        safe, stock = row["safe"], row["stock"]
        if safe["outcome"] in ("crashed", "wrong"):
            why = safe.get("message") or "; ".join(safe.get("faults", []))
            lines.append(f"{row['id']}: safe {safe['outcome']}: {why} {safe.get('frame', '')}")
        elif safe["outcome"] == "refused":
            if not safe.get("ids") or not set(safe["ids"]) <= FOLLOWED.keys():
                lines.append(f"{row['id']}: refused with an unexpected id: {safe.get('message', '')[:300]}")
            elif stock["outcome"] == "trained":
                lines.append(f"{row['id']}: refused ({', '.join(safe['ids'])}), and stock trains it")
            elif row.get("followed", {}).get("outcome") != "trained":
                lines.append(f"{row['id']}: the suggested fix did not train: {row.get('followed')}")
    return lines


def main() -> int:
    """Runs the requested cells and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every cell")
    parser.add_argument("--slice", action="store_true", help="the cells of the test suite")
    parser.add_argument("--families", help="run only these families, separated by commas")
    parser.add_argument("--cell", help="run one cell by its id; prints the result and does not write it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the file of the rows")
    options = parser.parse_args()
    cells = every_cell(options.families.split(",") if options.families else None)
    if options.cell:
        print(json.dumps(run_both(next(cell for cell in cells if cell.id == options.cell)), indent=1))
        return 0
    cells = cells if options.all else the_slice() if options.slice else pairwise(cells)
    started = time.perf_counter()
    out = options.out or (EVERY if options.all else RESULT)
    rows = measure(cells, out, options.jobs)
    if options.all:
        content = json.dumps(counted(rows, read_results(out)[0]), indent=1)
        out.with_suffix(".json").write_text(content + "\n", encoding="utf-8")
    Console().print(summary(rows))
    problems = bad(rows)
    print(*problems, sep="\n")
    print(f"{len(rows)} cells, {time.perf_counter() - started:.0f} s, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

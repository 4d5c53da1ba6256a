"""What the safe trainers cost beside stock: time, memory, bytes of media, and how each grows.

    python benchmarks/cost.py             # measures everything and writes benchmarks/results/cost.json
    python benchmarks/cost.py --check     # measures again, and fails outside the committed spread
    python benchmarks/cost.py --only sync,import

Every time is CPU time of one thread, so that what else runs on the machine disturbs it little, and every figure is a
ratio of safe over stock. Of steps, it is the median over pairs of windows: two trainers take turns in one process, so
that what disturbs one disturbs the other too. Bytes are exact: the most bytes of tensors alive at one time, counted
operation by operation, and the bytes of what a trainer moves to its device.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

RESULT = Path(os.environ.get("COST_OUT", Path(__file__).parent / "results" / "cost.json"))
PACKAGES = ("safe-trainers", "torch", "trl", "transformers", "peft", "accelerate")
MARGIN = 0.02
"""What medians of the same code differ by from day to day, beside their spread: caches, and where memory lies."""
EXACT = ("peak", "media", "moved", "drift")
"""Quantities that are counted and not timed: one measurement each, and no spread."""

from cost_runs import Point, construct, counted, timed


# ---- What is measured ----

CELLS = [
    {"family": family, "task": task, "kind": kind}
    for family in ("text", "llava")
    for task in ("sft", "grpo")
    for kind in ("full", "lora")
]
PICTURES = {"family": "llava", "task": "grpo", "kind": "lora"}
TEXT = {"family": "text", "task": "sft", "kind": "lora"}
SERIES: dict[str, tuple[str, Point, tuple[int, ...]]] = {
    "completions per step": ("batch", PICTURES, (4, 16, 64)),
    "images per prompt": ("images", PICTURES, (1, 4, 8)),
    "steps per generation": ("steps_per_generation", PICTURES, (1, 4, 8)),
    "tokens per sequence": ("tokens", TEXT, (64, 256, 1024)),
    "hidden size": ("hidden", TEXT, (64, 256, 1024)),
    "hidden size, GRPO": ("hidden", TEXT | {"task": "grpo"}, (64, 256, 1024)),
}


def compare_times(point: Point, repetitions: int) -> dict[str, Any]:
    """The times of a point: the ratios of safe over stock, and stock's own median."""
    timed(point | {"steps": 3 * point.get("steps_per_generation", 1)}, False)  # caches and imports
    runs = [timed(point, safe_first=bool(repetition % 2)) for repetition in range(repetitions)]
    found: dict[str, Any] = {
        name: {
            "stock": statistics.median(run[name]["stock"] for run in runs),
            "ratios": [run[name]["ratio"] for run in runs],
        }
        for name in runs[0]
    }
    found["step"]["more"] = statistics.median(run["step"]["more"] for run in runs)
    return found


def compare(point: Point, repetitions: int) -> dict[str, Any]:
    """Every quantity of a point: the ratios of safe over stock, and stock's own median or bytes."""
    found = compare_times(point, repetitions)
    exact = {safe: counted(point, safe) for safe in (False, True)}
    for name, stock in exact[False].items():
        found[name] = {"stock": stock, "ratios": [exact[True][name] / stock]}
    return found


def alternate(run: Callable[[bool], Mapping[str, float]], repetitions: int) -> dict[str, Any]:
    """Runs stock and safe by turns; who is first alternates.

    Args:
        run: Runs one of them, safe or not, and gives its quantities.
        repetitions: How often.

    Returns:
        For each quantity stock's median, and the ratios of safe over stock.
    """
    runs: list[dict[bool, Mapping[str, float]]] = []
    for repetition in range(repetitions):
        runs.append({safe: run(safe) for safe in ((False, True) if repetition % 2 else (True, False))})
    return {
        name: {
            "stock": statistics.median(one[False][name] for one in runs),
            "ratios": [one[True][name] / one[False][name] for one in runs],
        }
        for name in runs[0][False]
    }


def measure_cells(repetitions: int) -> dict[str, Any]:
    """Text and pictures, SFT and GRPO, full and LoRA."""
    found = {}
    for point in CELLS:
        found[" ".join(point.values())] = compare(point | {"steps": 26}, repetitions)
        said("cells", *point.values())
    return found


def measure_growth(repetitions: int) -> dict[str, Any]:
    """How the ratios change as runs get larger."""
    found: dict[str, Any] = {}
    for name, (axis, point, values) in SERIES.items():
        found[name] = {}
        for value in values:
            asked = point | {axis: value}
            windows = 10 if value == values[-1] else 18  # of which two are not counted
            steps = windows * asked.get("steps_per_generation", 1)
            found[name][str(value)] = compare(asked | {"steps": steps}, repetitions)
            said(name, value)
    return found


SWITCHES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "`precision_metrics=False`": {"precision_metrics": False},
    "`rollout_compute='stock'`": {"rollout_compute": "stock"},
    "both": {"precision_metrics": False, "rollout_compute": "stock"},
}
"""What of a step's cost can be switched off: the metrics, and rollouts that compute as the loss does."""


def measure_switches(repetitions: int) -> dict[str, Any]:
    """What a step costs without what can be switched off, with pictures and without."""
    found = {}
    for point in (TEXT | {"task": "grpo"}, PICTURES):
        for name, switched in SWITCHES.items():
            asked = point | {"steps": 26, "switched": switched}
            times = compare_times(asked, repetitions)
            found[f"{' '.join(point.values())}, {name}"] = {"step": times["step"]}
            said("switches", *point.values(), name)
    return found


def measure_sync(repetitions: int) -> dict[str, Any]:
    """What TRL does with a model at each weight sync, without the sending; the base's drift after a hundred."""
    import torch
    from test_sync import walk
    from test_sync import wide as adapted

    from safe_trainers.sync import AdapterSync

    found = {}
    for hidden in (64, 128, 256, 512, 1024):
        torch.manual_seed(0)
        model = adapted(hidden=hidden)
        sync = AdapterSync(model, torch.bfloat16)

        def run(safe: bool, model: Any = model, sync: Any = sync) -> dict[str, float]:
            started = time.process_time()
            for _ in range(3):
                walk(model, sync if safe else None)
            return {"time": (time.process_time() - started) / 3}

        run(True), run(False)
        found[f"hidden size {hidden}"] = alternate(run, 3 * repetitions)
        drifts = []
        for mine in (None, sync):
            model = adapted(hidden=hidden)
            sync = AdapterSync(model, torch.bfloat16)
            before = {n: p.detach().double() for n, p in model.named_parameters() if "base_layer" in n}
            for _ in range(100):
                walk(model, None if mine is None else sync)
            after = dict(model.named_parameters())
            drifts.append(max((after[n].double() - old).abs().max().item() for n, old in before.items()))
        found[f"hidden size {hidden}"]["drift"] = {"stock": drifts[0], "ratios": [drifts[1] / drifts[0]]}
        said("sync", hidden)
    return found


IMPORTS = {
    False: "from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer",
    True: "from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeSFTConfig, SafeSFTTrainer",
}
"""What a script begins with, stock and safe."""
_CLOCK = "import time; begun = time.process_time(); {}; print(time.process_time() - begun)"


def measure_import(repetitions: int) -> dict[str, Any]:
    """The import of a script's trainers, in fresh processes."""

    def run(safe: bool) -> dict[str, float]:
        return {"time": float(fresh("-c", _CLOCK.format(IMPORTS[safe])))}

    run(True), run(False)
    return {"two trainers": alternate(run, repetitions)}


def measure_process(repetitions: int) -> dict[str, Any]:
    """Whole processes: import, construction and steps, CPU time and the most memory that was resident."""
    found = {}
    for point in (CELLS[0], CELLS[-1]):
        asked = point | {"steps": 50}

        def run(safe: bool, asked: Point = asked) -> dict[str, float]:
            given = json.dumps({"point": asked, "safe": safe})
            return dict(json.loads(fresh(__file__, "--process", given)))

        found[" ".join(point.values())] = alternate(run, repetitions)
        said("process", *point.values())
    return found


def fresh(*argv: str) -> str:
    """The last line that a new Python process prints."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def whole_process(given: str) -> None:
    """What `measure_process` starts: imports what is asked for alone, runs, and prints what the process took."""
    asked = json.loads(given)
    __import__(IMPORTS[asked["safe"]].split()[1])
    trainer = construct(asked["point"], asked["safe"])
    trainer.train()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"time": used.ru_utime + used.ru_stime, "resident": used.ru_maxrss * 1024.0}))


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "cells": measure_cells,
    "switches": measure_switches,
    "growth": measure_growth,
    "sync": measure_sync,
    "import": measure_import,
    "process": measure_process,
}


# ---- Results ----


def said(*what: Any) -> None:
    """Tells how far it is."""
    print(*what, file=sys.stderr)


def leaves(content: Mapping[str, Any], *path: str) -> Iterable[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every figure of a file of results, with where it stands.

    Args:
        content: A file's sections, or a part of them.
        *path: Where that stands itself.

    Yields:
        The path, and stock's own value with the ratios.
    """
    for name, value in content.items():
        if "ratios" in value:
            yield (*path, name), value
        else:
            yield from leaves(value, *path, name)


def outside(committed: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which medians are outside what the committed repetitions spread over; exact quantities have to be the same.

    Medians of times may be outside by `MARGIN`.

    Args:
        committed: The sections of the committed file.
        now: Those that were measured again.
    """
    known = dict(leaves(committed))
    found = []
    for path, value in leaves(now):
        name = ", ".join(path)
        if path not in known:
            found.append(f"{name}: not in the committed results")
            continue
        ratios, median = known[path]["ratios"], statistics.median(value["ratios"])
        margin = 0.0 if path[-1] in EXACT else MARGIN
        low, high = min(ratios) - margin, max(ratios) + margin
        if not low <= median <= high:
            found.append(f"{name}: {median:.3f} is outside {low:.3f} to {high:.3f}")
    return found


def main() -> int:
    """Measures what was asked for; writes it, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(SECTIONS)}, separated by commas; the others are kept")
    parser.add_argument("--check", action="store_true", help="compare with the committed results, write nothing")
    parser.add_argument("--repetitions", type=int, default=7, help="of each comparison")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        whole_process(options.process)
        return 0
    names = options.only.split(",") if options.only else list(SECTIONS)
    now, minutes = {}, {}
    for name in names:
        started = time.perf_counter()
        now[name] = SECTIONS[name](options.repetitions)
        minutes[name] = round((time.perf_counter() - started) / 60, 1)
    committed = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {"sections": {}}
    if options.check:
        problems = outside(committed["sections"], now)
        print(*problems, f"{len(list(leaves(now)))} figures, {len(problems)} outside their spread", sep="\n")
        return bool(problems)
    content = {
        "command": "python benchmarks/cost.py",
        "versions": {package: version(package) for package in PACKAGES},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "minutes": {**committed.get("minutes", {}), **minutes},
        "sections": {name: now.get(name) or committed["sections"].get(name) for name in SECTIONS},
    }
    RESULT.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")
    for path, value in leaves(now):
        print(f"{', '.join(path)}: {statistics.median(value['ratios']):.3f}")
    return 0


def rounded(value: Any) -> Any:
    """The same with numbers of five digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())

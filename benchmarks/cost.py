"""Measures time, memory and bytes of media of the safe trainers relative to stock TRL, and how they grow.

    python benchmarks/cost.py             # measures everything and writes benchmarks/results/cost.json
    python benchmarks/cost.py --check     # measures again, and fails if a figure is outside the committed range
    python benchmarks/cost.py --only sync,import

Times are CPU times of one thread, so that other processes have little influence. Figures are ratios of safe over
stock. For steps, two trainers take turns in one process, and the figure is the median over pairs of windows of steps.
Bytes are exact: the peak of tensor memory, counted for each operation, and the bytes that a trainer moves to its
device.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  (sets the environment)


RESULT = Path(os.environ.get("COST_OUT", Path(__file__).parent / "results" / "cost.json"))
PACKAGES = ("safe-trainers", "torch", "trl", "transformers", "peft", "accelerate")
MARGIN = 0.02
"""Tolerance for medians of times, which differ between runs of the same code beyond the range of one run."""
EXACT = ("peak", "media", "moved", "drift")
"""Quantities that are counted and not timed, so that one measurement is exact."""

from cost_runs import Point, construct, counted, counted_images, profiled, timed
from provenance import measured_with, peak_resident


# ---- What is measured ----

CELLS = [
    {"family": family, "task": task, "kind": kind}
    for family in ("text", "llava")
    for task in ("sft", "grpo")
    for kind in ("full", "lora")
]
IMAGES = {"family": "llava", "task": "grpo", "kind": "lora"}
TEXT = {"family": "text", "task": "sft", "kind": "lora"}
SERIES: dict[str, tuple[str, Point, tuple[int, ...]]] = {
    "completions per step": ("batch", IMAGES, (4, 16, 64)),
    "images per prompt": ("images", IMAGES, (1, 4, 8)),
    "steps per generation": ("steps_per_generation", IMAGES, (1, 4, 8)),
    "tokens per sequence": ("tokens", TEXT, (64, 256, 1024)),
    "hidden size": ("hidden", TEXT, (64, 256, 1024)),
    "hidden size, GRPO": ("hidden", TEXT | {"task": "grpo"}, (64, 256, 1024)),
}


def compare_times(point: Point, repetitions: int) -> dict[str, Any]:
    """Measures the times of a point: the ratios of safe over stock, and the median of stock."""
    timed(point | {"steps": 3 * point.get("steps_per_generation", 1)}, False)  # warms up caches and imports
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


def name_of(point: Point) -> str:
    """The name of a point in the results: its values, and the settings that differ from the defaults."""
    switched = [f"{setting}={value!r}" for setting, value in point.get("switched", {}).items()]
    values = " ".join(str(value) for name, value in point.items() if name != "switched")
    return ", ".join([f"{values} tokens", *switched])


def compare(point: Point, repetitions: int) -> dict[str, Any]:
    """Measures every quantity of a point: the ratios of safe over stock, and the median or bytes of stock."""
    found = compare_times(point, repetitions)
    exact = {safe: counted(point, safe) for safe in (False, True)}
    for name, stock in exact[False].items():
        found[name] = {"stock": stock, "ratios": [exact[True][name] / stock]}
    return found


def alternate(run: Callable[[bool], Mapping[str, float]], repetitions: int) -> dict[str, Any]:
    """Runs stock and safe in turns; the first one alternates.

    Args:
        run: Runs the safe or the stock version, and returns its quantities.
        repetitions: Number of repetitions.

    Returns:
        For each quantity the median of stock, and the ratios of safe over stock.
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
    """Measures text and images, SFT and GRPO, full fine-tuning and LoRA."""
    found = {}
    for point in CELLS:
        found[" ".join(point.values())] = compare(point | {"steps": 26}, repetitions)
        progress("cells", *point.values())
    return found


def measure_growth(repetitions: int) -> dict[str, Any]:
    """Measures how the ratios change with the size of the run."""
    found: dict[str, Any] = {}
    for name, (axis, point, values) in SERIES.items():
        found[name] = {}
        for value in values:
            asked = point | {axis: value}
            windows = 10 if value == values[-1] else 18  # two of them are not counted
            steps = windows * asked.get("steps_per_generation", 1)
            found[name][str(value)] = compare(asked | {"steps": steps}, repetitions)
            progress(name, value)
    return found


SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "`precision_metrics=False`": {"precision_metrics": False},
    "`rollout_compute='stock'`": {"rollout_compute": "stock"},
    "both": {"precision_metrics": False, "rollout_compute": "stock"},
}
"""Settings that reduce the cost of a step: the metrics, and rollouts in the compute context of training."""


def measure_switches(repetitions: int) -> dict[str, Any]:
    """Measures steps with each of `SWITCHES`, with and without images."""
    found = {}
    for point in (TEXT | {"task": "grpo"}, IMAGES):
        for name, switched in SWITCHES.items():
            asked = point | {"steps": 26, "switched": switched}
            times = compare_times(asked, repetitions)
            found[f"{' '.join(point.values())}, {name}"] = {"step": times["step"]}
            progress("switches", *point.values(), name)
    return found


ROLLOUTS: list[Point] = [
    {"family": family, "task": "grpo", "kind": kind, "weights": weights, "hidden": hidden, "new_tokens": tokens}
    for family, hidden, tokens in (("text", 768, 64), ("llava", 512, 32))
    for kind, weights in (("full", "fp32"), ("lora", "fp32"), ("lora", "bf16"), ("lora", "4-bit bf16"))
] + [
    {"family": "text", "task": "grpo", "kind": "lora", "weights": "fp32", "hidden": 256, "new_tokens": 512},
    {"family": "text", "task": "grpo", "kind": "lora", "weights": "fp32", "hidden": 1024, "new_tokens": 64},
]
"""Steps of GRPO with eight completions of each prompt, where rollouts and towers have a real share of the time."""
SHARING: list[Point] = [
    point | {"switched": {"share_media_features": "always"}}
    for point in ROLLOUTS
    if point["family"] != "text" and point["kind"] == "lora"
]
"""Steps in which a tower runs once for equal images, whether or not its features are bit-identical then."""


def measure_rollouts(repetitions: int) -> dict[str, Any]:
    """Measures steps of GRPO on models of real proportions, by the dtype of the base."""
    found = {}
    for point in ROLLOUTS + SHARING:
        name = name_of(point)
        found[name] = compare(point | {"batch": 8, "steps": 6}, min(repetitions, 3))
        progress("rollouts", name, found[name]["step"]["ratios"], found[name]["peak"]["ratios"])
    return found


def measure_images(repetitions: int) -> dict[str, Any]:
    """Counts the images on which towers run in the steps of `measure_rollouts`, in one run each."""
    points = [point for point in ROLLOUTS + SHARING if point["family"] != "text"]
    return {name_of(point): counted_images(point | {"batch": 8, "steps": 6}) for point in points}


def measure_phases(repetitions: int) -> dict[str, Any]:
    """Measures with `profile=True` how the time of a step divides: seconds by phase, the median over the steps."""
    found = {}
    for point in ROLLOUTS:
        name = name_of(point)
        runs = [profiled(point | {"batch": 8, "steps": 6}) for _ in range(min(repetitions, 3))]
        steps = [step for run in runs for step in run]
        phases = dict.fromkeys(phase for step in steps for phase in step)
        found[name] = {
            "seconds": {phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in phases}
        }
        progress("phases", name, found[name])
    return found


def measure_sync(repetitions: int) -> dict[str, Any]:
    """Measures the merging of a weight sync without sending, and the drift of the base weights after 100 syncs."""
    import torch
    from adapted_models import adapted_llama, merge_for_sync

    from safe_trainers.rollout.weight_sync import AdapterSync

    found = {}
    for hidden in (64, 128, 256, 512, 1024):
        torch.manual_seed(0)
        model = adapted_llama(hidden=hidden)
        sync = AdapterSync(model, torch.bfloat16)

        def run(safe: bool, model: Any = model, sync: Any = sync) -> dict[str, float]:
            started = time.process_time()
            for _ in range(3):
                merge_for_sync(model, sync if safe else None)
            return {"time": (time.process_time() - started) / 3}

        run(True), run(False)
        found[f"hidden size {hidden}"] = alternate(run, 3 * repetitions)
        drifts = []
        for mine in (None, sync):
            model = adapted_llama(hidden=hidden)
            sync = AdapterSync(model, torch.bfloat16)
            before = {n: p.detach().double() for n, p in model.named_parameters() if "base_layer" in n}
            for _ in range(100):
                merge_for_sync(model, None if mine is None else sync)
            after = dict(model.named_parameters())
            drifts.append(max((after[n].double() - old).abs().max().item() for n, old in before.items()))
        found[f"hidden size {hidden}"]["drift"] = {"stock": drifts[0], "ratios": [drifts[1] / drifts[0]]}
        progress("sync", hidden)
    return found


IMPORTS = {
    False: "from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer",
    True: "from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeSFTConfig, SafeSFTTrainer",
}
"""The imports of a training script, stock and safe."""
_CLOCK = "import time; begun = time.process_time(); {}; print(time.process_time() - begun)"


def measure_import(repetitions: int) -> dict[str, Any]:
    """Measures the import of the trainers in new processes."""

    def run(safe: bool) -> dict[str, float]:
        return {"time": float(fresh("-c", _CLOCK.format(IMPORTS[safe])))}

    run(True), run(False)
    return {"two trainers": alternate(run, repetitions)}


def measure_process(repetitions: int) -> dict[str, Any]:
    """Measures whole processes (import, construction, steps): CPU time and peak resident memory."""
    found = {}
    for point in (CELLS[0], CELLS[-1]):
        asked = point | {"steps": 50}

        def run(safe: bool, asked: Point = asked) -> dict[str, float]:
            given = json.dumps({"point": asked, "safe": safe})
            return dict(json.loads(fresh(__file__, "--process", given)))

        found[" ".join(point.values())] = alternate(run, repetitions)
        progress("process", *point.values())
    return found


def fresh(*argv: str) -> str:
    """Runs a new Python process, and returns the last line that it prints."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def whole_process(given: str) -> None:
    """The process of `measure_process`: imports only one package, trains, and prints its CPU time and memory."""
    asked = json.loads(given)
    __import__(IMPORTS[asked["safe"]].split()[1])
    trainer = construct(asked["point"], asked["safe"])
    trainer.train()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"time": used.ru_utime + used.ru_stime, "resident": peak_resident()}))


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "cells": measure_cells,
    "switches": measure_switches,
    "growth": measure_growth,
    "rollouts": measure_rollouts,
    "images": measure_images,
    "phases": measure_phases,
    "sync": measure_sync,
    "import": measure_import,
    "process": measure_process,
}


# ---- Results ----


def progress(*what: Any) -> None:
    """Prints the progress."""
    print(*what, file=sys.stderr)


def leaves(content: Mapping[str, Any], *path: str) -> Iterable[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yields every figure of the results with its path.

    Args:
        content: The sections of a results file, or a part of them.
        *path: The path of `content`.

    Yields:
        The path, and the value of stock with the ratios.
    """
    for name, value in content.items():
        if "ratios" in value:
            yield (*path, name), value
        elif not {"seconds", "seen"} & value.keys():  # phases and images of the safe trainers, without stock
            yield from leaves(value, *path, name)


def outside(committed: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describes the medians that are outside the range of the committed repetitions.

    Medians of times may be outside by `MARGIN`; exact quantities must be equal.

    Args:
        committed: The sections of the committed file.
        now: The sections that were measured again.
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
    """Measures the requested sections, and writes or compares the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"sections to measure, separated by commas, of {', '.join(SECTIONS)}")
    parser.add_argument("--check", action="store_true", help="compare with the committed results, write nothing")
    parser.add_argument("--repetitions", type=int, default=7, help="repetitions of each comparison")
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
        print(*problems, f"{len(list(leaves(now)))} figures, {len(problems)} outside their range", sep="\n")
        return bool(problems)
    content = {
        **measured_with("python benchmarks/cost.py", *PACKAGES, before=committed if options.only else None),
        "minutes": {**committed.get("minutes", {}), **minutes},
        "sections": {name: now.get(name) or committed["sections"].get(name) for name in SECTIONS},
    }
    RESULT.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")
    for path, value in leaves(now):
        print(f"{', '.join(path)}: {statistics.median(value['ratios']):.3f}")
    return 0


def rounded(value: Any) -> Any:
    """Rounds all numbers to five significant digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())

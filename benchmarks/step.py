"""Stock and safe side by side in one run: time of a step, time of construction, bytes of the buffered media.

Every figure is a ratio of safe over stock, of runs that alternate on the same machine; the median of the repetitions,
with their quartiles. `make bench` prints the table and writes `benchmarks/results/step.json`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

import cells
import datasets
import torch
import transformers
import trl
from cells import Cell
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback


CELLS = [
    Cell("text", "sft", "fp32", "bf16"),
    Cell("text", "grpo", "fp32", "bf16", lora=True),
    Cell("llava", "sft", "bf16", "bf16"),
    Cell("llava", "grpo", "bf16", "bf16", lora=True),
    Cell("qwen2_5_vl", "grpo", "fp32", "bf16"),
]
RESULT = Path(__file__).parent / "results" / "step.json"


def measure(cell: Cell, safe: bool, steps: int) -> dict[str, float]:
    """One run: seconds of construction, seconds of a step after the first, bytes of the buffered pixels."""
    arguments = cells.arguments(cell, cells.PLAIN[cell.task], steps=steps, logging_steps=steps)
    started = time.perf_counter()
    trainer = (cells.SAFE if safe else cells.STOCK)[cell.task](**arguments)
    built = time.perf_counter() - started
    trainer.remove_callback(PrinterCallback)
    marks: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            marks.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.train()
    media = sum(batch["pixel_values"].nbytes for batch in getattr(trainer, "_buffered_inputs", None) or []
                if "pixel_values" in batch)  # fmt: skip
    return {"construction": built, "step": (marks[-1] - marks[0]) / (len(marks) - 1), "media_bytes": float(media)}


def ratios(cell: Cell, repetitions: int, steps: int) -> dict[str, list[float]]:
    """Ratios of safe over stock, one of each quantity for each repetition; who goes first alternates."""
    for safe in (False, True):
        measure(cell, safe, 2)  # caches, imports
    found: dict[str, list[float]] = {}
    for repetition in range(repetitions):
        order = (False, True) if repetition % 2 else (True, False)
        run = {safe: measure(cell, safe, steps) for safe in order}
        for name, stock in run[False].items():
            if stock:
                found.setdefault(name, []).append(run[True][name] / stock)
    return found


def main() -> None:
    """Measures every cell, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    table = Table("cell", "quantity", "safe / stock, median", "quartiles")
    results = {}
    for cell in CELLS:
        results[str(cell)] = {}
        for name, values in ratios(cell, options.repetitions, options.steps).items():
            low, middle, high = statistics.quantiles(values, n=4)
            results[str(cell)][name] = {"median": middle, "quartiles": [low, high]}
            table.add_row(str(cell), name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    RESULT.parent.mkdir(exist_ok=True)
    content = {
        "command": f"python benchmarks/step.py --repetitions {options.repetitions} --steps {options.steps}",
        "versions": {"torch": torch.__version__, "trl": trl.__version__, "transformers": transformers.__version__},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "ratios": results,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Measures the CPU time of the precision report, relative to the construction of a 4-bit LoRA vision-language model.

Prints medians over the repetitions: the share of the report in the CPU time of construction, and the CPU time of the
confirmed report after the first optimizer step. `--layers` sets the depth of the text model, to have as many tensors
as a large model.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

import cells
import torch
from cells import Cell
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from safe_trainers import SafeSFTConfig, SafeSFTTrainer
from safe_trainers.report.reporter import Reporter


class TimedReporter(Reporter):
    """Records the CPU seconds of the planned and of the confirmed report."""

    def __init__(self, run):
        super().__init__(run)
        self.spent: dict[str, float] = {}

    def ready(self):
        started = time.process_time()
        super().ready()
        self.spent["planned"] = time.process_time() - started

    def after_step(self, skipped):
        if self.confirmed is None:
            started = time.process_time()
            super().after_step(skipped)
            self.spent["confirmed and shown"] = time.process_time() - started


class Timed(SafeSFTTrainer):
    features = tuple(TimedReporter if kind is Reporter else kind for kind in SafeSFTTrainer.features)


def deeper(folder: Path, layers: int) -> Path:
    """Saves the tiny LLaVA with more layers in its text model."""
    source = cells.folder("llava")
    config = AutoConfig.from_pretrained(source)
    config.text_config.num_hidden_layers = layers
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    AutoProcessor.from_pretrained(source).save_pretrained(folder)
    return folder


def measure(folder: Path, out: str) -> dict[str, float]:
    """Builds a trainer and trains one step; returns CPU seconds and the number of parameters."""
    cell = Cell("llava", "sft", "bf16", "bf16", lora=True)
    arguments = cells.arguments(cell, SafeSFTConfig, steps=1, output_dir=out)
    arguments |= {
        "model": str(folder),
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
        ),
    }
    started = time.process_time()
    trainer = Timed(**arguments)
    construction = time.process_time() - started
    trainer.train()
    parameters = sum(1 for _ in trainer.model.parameters())
    return {"construction": construction, "parameters": parameters, **trainer.precision[TimedReporter].spent}


def main() -> None:
    """Measures, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 32])
    options = parser.parse_args()
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as scratch:
            folder = deeper(Path(scratch, "model"), layers)
            runs = [measure(folder, scratch) for _ in range(options.repetitions + 1)][1:]
        found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        share = statistics.median(run["planned"] / run["construction"] for run in runs)
        print(json.dumps({"layers": layers, "share of construction": round(share, 5), **found}))


if __name__ == "__main__":
    main()

"""Plants faults into runs, and records whether `safe-trainers diff` names the module and the cause.

    python benchmarks/diff_faults.py             # every fault, 20 pairs without a fault, and the time; 5 minutes
    python benchmarks/diff_faults.py NAME ...    # these faults only, and nothing is written

Each fault is planted into one of two runs of two steps that are otherwise equal. The module and the cause that it must
be given are written next to it. The comparison was developed on the faults of `FAULTS`: some were changed when they
had no effect, and two expectations when the first answer was right. Those of `HELD_OUT` were written afterwards.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

import cells
import torch
from cells import Cell
from peft import LoraConfig
from planted_faults import CLEAN, FAULTS, HELD_OUT, Fault, collated
from policing import reset_accelerate
from provenance import measured_with
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from safe_trainers.diff.compare import Comparison, compare_recordings, compare_rollout
from safe_trainers.diff.storage import FOLDER, MOST_BYTES
from safe_trainers.testing import fp16_on_cpu


RESULT = Path(__file__).parent / "results" / "diff_faults.json"
STEPS = 2


TIMED = (("sft", 64, 4), ("sft", 512, 4), ("sft", 512, 120), ("grpo", 64, 4), ("grpo", 512, 120))
"""Trainer, width and words of a sequence of the runs whose steps are timed."""


def of_length(row: dict[str, Any], words: int) -> dict[str, Any]:
    """Makes the completion, or the prompt of GRPO, of a number of words."""
    if "completion" in row:
        return row | {"completion": [{"role": "assistant", "content": " ".join(["three"] * words)}]}
    return row | {"prompt": [{"role": "user", "content": " ".join(["three"] * words)}]}


def longer(row: dict[str, Any], index: int) -> dict[str, Any]:
    """Makes the sequences of a batch of different lengths, so that there is padding."""
    text = " ".join([row["completion"][0]["content"]] * (1 + index % 3))
    return row | {"completion": [{"role": "assistant", "content": text}]}


def run(cell: tuple[str, ...], folder: Path, plant: Any = None, **changes: Any) -> None:
    """Trains for two steps with recordings, quietly."""
    reset_accelerate()
    family, task, precision, *lora = cell
    uneven = changes.pop("uneven", False)
    dropout, collate = changes.pop("lora_dropout", 0.0), changes.pop("collate", None)
    flag = None if precision == "fp32" else precision
    described = Cell(family, task, "fp32", flag, lora=bool(lora))
    settings = {"record_steps": [1, 2], "precision_report": "off", "output_dir": str(folder), **changes}
    made = cells.arguments(described, cells.SAFE_CONFIG[task], STEPS, **settings)
    if uneven:
        made["train_dataset"] = made["train_dataset"].map(longer, with_indices=True)
    if lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)  # the adapters' first weights
        trainer = fp16_on_cpu(cells.SAFE[task])(**made)
        if collate is not None and plant is None:
            collated(collate)(trainer)
        if plant is not None:
            plant(trainer)
        trainer.train()
    cells.reset_autocast()


class Runs:
    """Runs without a fault, each made once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, Path]()

    def clean(self, cell: tuple[str, ...], **both: Any) -> Path:
        key = f"{cell} {sorted(both.items(), key=str)}"
        if key not in self._made:
            self._made[key] = self._root / f"clean-{len(self._made)}"
            run(cell, self._made[key], **both)
        return self._made[key]


def judged(fault: Fault, runs: Runs, root: Path) -> dict[str, Any]:
    """Plants a fault, and returns what is said of it."""
    folder = root / "faulty"
    shutil.rmtree(folder, ignore_errors=True)
    run(fault.cell, folder, fault.plant, **fault.both | fault.changes)
    if fault.rollout:
        found = compare_rollout(str(folder))
    else:
        found = compare_recordings(str(runs.clean(fault.cell, **fault.both)), str(folder))
    return {"fault": fault.name, "run": " ".join(fault.cell), **described(found, fault)}


def described(found: Comparison, fault: Fault) -> dict[str, Any]:
    cause = found.cause
    if cause is None:
        return {"module": None, "cause": None, "right": False, "text": "no difference beyond noise"}
    first = found.differences[0]
    right = re.search(fault.module, cause.module) is not None and cause.kind == fault.cause
    ulp = first.ulp if first.ulp < float("inf") else None
    return {"module": cause.module or "the model", "cause": cause.kind, "right": right, "text": cause.text,
            "phase": first.phase, "ulp": ulp and round(ulp, 1), "expected": [fault.module, fault.cause]}  # fmt: skip


def time_of_steps(task: str, width: int, words: int, root: Path, steps: int = 20) -> dict[str, Any]:
    """Compares the CPU time of a recorded step with that of one that is not recorded, in alternation in one run."""
    times: dict[bool, list[float]] = {True: [], False: []}
    recorded = list(range(4, steps + 1, 2))

    class Timed(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.process_time()

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > 2:
                times[state.global_step in recorded].append(time.process_time() - timed.began)

    timed = Timed()
    reset_accelerate()
    folder = root / f"time-{task}-{width}-{words}"
    made = cells.arguments(Cell("text", task, "fp32", None), cells.SAFE_CONFIG[task], steps,
                           record_steps=recorded, output_dir=str(folder), precision_report="off")  # fmt: skip
    if width > 64:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(made["model"])
        changed = LlamaConfig(vocab_size=config.vocab_size, hidden_size=width, intermediate_size=2 * width,
                              num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
                              pad_token_id=config.pad_token_id, bos_token_id=config.bos_token_id,
                              eos_token_id=config.eos_token_id)  # fmt: skip
        made["processing_class"] = AutoTokenizer.from_pretrained(made["model"])
        made["model"] = LlamaForCausalLM(changed)
        made["args"].model_init_kwargs = None
    made["train_dataset"] = made["train_dataset"].map(partial(of_length, words=words))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = cells.SAFE[task](**made)
        trainer.callback_handler.callbacks.insert(0, timed)
        trainer.add_callback(Ends())
        events = next(c for c in trainer.callback_handler.callbacks if c is timed)
        trainer.train()
    assert events is timed
    sizes = [path.stat().st_size for path in (folder / FOLDER).glob("step-*.safetensors")]
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    return {"trainer": task, "width": width, "words": words, "layers": 4 if width > 64 else 1,
            "step_ms": round(1e3 * medians[False], 1), "recorded_ms": round(1e3 * medians[True], 1),
            "ratio": round(medians[True] / medians[False], 2), "largest_bytes": max(sizes)}  # fmt: skip


def planted(faults: Sequence[Fault], runs: Runs, root: Path) -> list[dict[str, Any]]:
    """Plants faults one after the other, and prints what is said of each."""
    rows = []
    for fault in faults:
        rows.append(judged(fault, runs, root))
        mark = "right" if rows[-1]["right"] else "WRONG"
        print(f"{mark}  {fault.name}: {rows[-1]['module']}: {rows[-1]['cause']}: {rows[-1]['text']}", flush=True)
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} faults: module and cause are right")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults; by default all")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        runs = Runs(root)
        rows = planted(
            [fault for fault in FAULTS if not names or any(name in fault.name for name in names)], runs, root
        )
        if names:
            return
        held_out = planted(HELD_OUT, runs, root)
        clean = []
        for cell in CLEAN:
            shutil.rmtree(root / "again", ignore_errors=True)
            run(cell, root / "again")
            found = compare_recordings(str(runs.clean(cell)), str(root / "again"))
            clean.append({"run": " ".join(cell), "compared": found.compared, "equal": found.cause is None})
            print(clean[-1], flush=True)
        times = [time_of_steps(*case, root) for case in TIMED]
        for row in times:
            print(row)
            assert row["largest_bytes"] <= MOST_BYTES
    content = {
        **measured_with("python benchmarks/diff_faults.py", "torch", "trl", "transformers", records=True),
        "faults": rows,
        "held_out": held_out,
        "clean": clean,
        "time": times,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

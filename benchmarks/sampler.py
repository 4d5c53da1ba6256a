"""Measures the mismatch between the real vLLM and the trainer: family, kind of training and precision, stock and safe.

    .venv/vllm/bin/python benchmarks/sampler.py                     # writes benchmarks/results/sampler.json
    .venv/vllm/bin/python benchmarks/sampler.py --only text,llava   # measures these families, and keeps the others

Each cell trains four steps of GRPO with vLLM in the same process, on the CPU. The mismatch is TRL's own metric
`sampling/sampling_logp_difference`: abs(log p_trainer - log p_sampler) over all sampled tokens, in nats. Each family
runs in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First, because it sets the environment.
from vllm_runs import FLAGS, METRIC, result_path, write_results


# isort: split
import engines
import image_families
from cells import Cell
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import SafeGRPOConfig


FAMILIES = ("text", *image_families.FAMILIES)
PRECISIONS = tuple(FLAGS)
HALVES = ("bf16", "fp16")
STEPS, TOKENS = 4, 128


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        name: Its name in the results.
        lora: Whether adapters are trained.
        weights: The dtype of the loaded weights; `None` for that of the precision.
        packed: Whether the base is quantised to 4 bits.
        only: The precisions it is measured in.
        families: The families it is measured with.
        fp32_modules: Modules that the trainer computes in float32 and vLLM does not; stock has no such setting.
    """

    name: str
    lora: bool = True
    weights: str | None = None
    packed: bool = False
    only: tuple[str, ...] = PRECISIONS
    families: tuple[str, ...] = FAMILIES
    fp32_modules: tuple[str, ...] = ()


KINDS = (
    Kind("full", lora=False, weights="fp32"),
    Kind("LoRA"),
    Kind("4-bit LoRA", packed=True),
    Kind("LoRA, fp32 base", weights="fp32", only=("bf16", "fp16"), families=("text",)),
    Kind("LoRA, bf16 base", weights="bf16", only=("fp16",), families=("text",)),
    *(
        Kind(f"full, {name} in float32", False, "fp32", only=HALVES, families=("text",), fp32_modules=(pattern,))
        for name, pattern in (("MLP", "*.mlp"), ("attention", "*.self_attn"), ("layers", "*.layers.*"))
    ),
)


def measure(folders: engines.Folders, family: str, kind: Kind, precision: str, safe: bool) -> dict[str, Any]:
    """Trains one cell.

    Args:
        folders: The models.
        family: The family.
        kind: The kind of training.
        precision: `"bf16"`, `"fp16"` or `"fp32"`.
        safe: Whether to train with the safe trainer.

    Returns:
        The dtype of the engine and the mismatch in nats, or the error that ended the run.
    """
    row: dict[str, Any] = {"family": family, "kind": kind.name, "precision": precision, "safe": safe}
    cell = Cell(family, "grpo", kind.weights or precision, FLAGS[precision], lora=kind.lora)
    changes: dict[str, Any] = {"max_completion_length": TOKENS, "steps": STEPS}
    if kind.packed:
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]
        changes["model_init_kwargs"] = {"quantization_config": packed, "dtype": dtype}
    if kind.fp32_modules:
        changes |= {"config": SafeGRPOConfig, "fp32_modules": list(kind.fp32_modules)}
    try:
        trainer = engines.build(folders, cell, safe=safe, **changes)
        trainer.train()
    except Exception as error:  # what ends a run is the result
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return row | {
        "engine": str(trainer.vllm_generation.llm.llm_engine.model_config.dtype).removeprefix("torch."),
        "mean": sum(entry[f"{METRIC}/mean"] for entry in log) / len(log),
        "max": max(entry[f"{METRIC}/max"] for entry in log),
    }


def sharpen(folder: Path) -> None:
    """Gives a saved text model the weights that saved image models have, so that their mismatches can be compared."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    image_families.sharpen_head(model)
    model.save_pretrained(folder)


def measure_family(family: str) -> None:
    """Trains every cell of a family, and prints each as a line of JSON."""
    os.environ["MASTER_PORT"] = str(engines.free_port())
    with tempfile.TemporaryDirectory() as root:
        folders = engines.Folders(Path(root))
        if family not in image_families.FAMILIES:
            sharpen(folders[family])
        for kind in KINDS:
            for precision in kind.only if family in kind.families else ():
                for safe in (True,) if kind.fp32_modules else (False, True):
                    row = measure(folders, family, kind, precision, safe)
                    print("\n" + json.dumps(row), flush=True)
        engines.end_engines()


def main() -> int:
    """Measures the requested families and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families to measure, separated by commas")
    parser.add_argument("--family", choices=FAMILIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.family:
        measure_family(options.family)
        return 0
    names = options.only.split(",") if options.only else list(FAMILIES)
    path = result_path("sampler")
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    rows, started = [row for row in known if row["family"] not in names], time.perf_counter()
    for name in names:
        command = [sys.executable, __file__, "--family", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            return 1
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
        print(name, file=sys.stderr)
    rows.sort(key=lambda row: FAMILIES.index(row["family"]))  # stable: the order within a family is kept
    write_results("sampler", rows, minutes=round((time.perf_counter() - started) / 60, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

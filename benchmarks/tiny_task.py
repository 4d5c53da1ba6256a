"""Measures what the embedded recipes learn, with controls that show that they learn it from the images.

Runs each recipe with three seeds, and the GRPO recipe also in fp32, in fp16, with learning rate 0 and with shuffled
images. `make bench-tiny` writes `benchmarks/results/tiny_task.json` and
`docs/tiny_task.md`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from provenance import measured_with


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "tiny_task.json"
PAGE = ROOT / "docs" / "tiny_task.md"
GRPO = "recipes/grpo/tiny_vlm_bf16.yaml"
SEEDS = (0, 1, 2)
FP32 = {"bf16": "false", "dtype": "float32"}
FP16 = {"bf16": "false", "fp16": "true", "dtype": "float16"}

# name: command, recipe, overrides, seeds
RUNS = {
    "GRPO, Aria-like": ("grpo", GRPO, {}, SEEDS),
    "GRPO, Aria-like, fp32": ("grpo", GRPO, FP32, SEEDS),
    "GRPO, Aria-like, fp16 (real autocast and scaler)": ("grpo", GRPO, FP16, SEEDS),
    "GRPO, LLaVA-like": ("grpo", GRPO, {"model_name_or_path": "tiny:llava"}, SEEDS),
    "GRPO, Aria-like, learning rate 0": ("grpo", GRPO, {"learning_rate": "0", "max_steps": "40"}, SEEDS),
    "GRPO, Aria-like, shuffled images": ("grpo", GRPO, {"shuffle_images": "true"}, SEEDS),
    "RLOO, Aria-like": ("rloo", "recipes/rloo/tiny_vlm_bf16.yaml", {}, SEEDS),
    "SFT, LLaVA-like": ("sft", "recipes/sft/tiny_vlm_bf16.yaml", {}, SEEDS),
    "DPO, LLaVA-like": ("dpo", "recipes/dpo/tiny_vlm_bf16.yaml", {}, SEEDS),
    "KTO, LLaVA-like": ("kto", "recipes/kto/tiny_vlm_bf16.yaml", {}, SEEDS),
    "Distillation, LLaVA-like": ("distillation", "recipes/distillation/tiny_vlm_bf16.yaml", {}, SEEDS),
    "Reward, text": ("reward", "recipes/reward/tiny_text_bf16.yaml", {}, SEEDS),
}

# The run for each precision.
PRECISIONS = {
    "bf16": "GRPO, Aria-like",
    "fp32": "GRPO, Aria-like, fp32",
    "fp16": "GRPO, Aria-like, fp16 (real autocast and scaler)",
}


def run_with_fp16_on_cpu(argv: list[str]) -> None:
    """Runs the GRPO recipe with autocast and a loss scaler, which accelerate does not create on a CPU."""
    from rich.console import Console

    from safe_trainers import SafeGRPOTrainer
    from safe_trainers.cli.run_recipe import run_recipe
    from safe_trainers.recipes.load import read_recipe
    from safe_trainers.testing import fp16_on_cpu

    run_recipe(read_recipe("grpo", argv), Console(quiet=True), fp16_on_cpu(SafeGRPOTrainer))


def _cpu_seconds() -> float:
    """The CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: str, recipe: str, overrides: dict[str, str], seed: int) -> dict[str, float]:
    """Runs a recipe in a new process; returns its scores and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{key}={value}" for key, value in {**overrides, "seed": seed, "progress": "false"}.items()]
        in_fp16 = overrides.get("fp16") == "true"
        program = [str(Path(__file__)), "--with-fp16-on-cpu"] if in_fp16 else ["-m", "safe_trainers.cli", command]
        started = _cpu_seconds()
        subprocess.run(
            [sys.executable, *program, "--config", recipe, "--output_dir", folder, *options],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        score = json.loads((Path(folder) / "log.json").read_text())["score"]
    return {key: score[key] for key in ("before", "after", "best_constant")} | {
        "seconds": round(_cpu_seconds() - started, 1)
    }


def page(content: dict) -> str:
    """Returns the page for the measurements."""
    rows = []
    for name, runs in content["runs"].items():
        scores = "; ".join(f"{r['before']:.3f} → {r['after']:.3f}" for r in runs)
        constant = max(r["best_constant"] for r in runs)
        rows.append(f"| {name} | {scores} | {constant:.3f} | {max(r['seconds'] for r in runs):.0f} |")
    means = ", ".join(
        f"{precision} {fmean(r['after'] for r in content['runs'][name]):.3f}" for precision, name in PRECISIONS.items()
    )
    versions = ", ".join(f"{package} {number}" for package, number in content["versions"].items())
    return "\n".join(
        [
            "# Does it still learn? The embedded task",
            "",
            "The task: a 32 x 32 image of one to three equal shapes in one of four colours. Answers have the form",
            '"two red squares". The score is exact match with greedy decoding on images that are not in the training',
            "set; for the reward model it is the share of held-out pairs in the correct order. The table has the",
            f"score before and after the run, for the seeds {', '.join(map(str, SEEDS))}. Except for SFT and the",
            "reward model, the score before the run is taken after a warm-up on answers of which 60 % name the same",
            "colour for every image.",
            "",
            "| run | score, before → after, per seed | best constant answer | CPU seconds, slowest |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Runs without a precision in their name compute in bf16. Mean score after the run by precision: {means}.",
            "",
            "With learning rate 0 the score does not change. With shuffled images it falls to chance. The models",
            "therefore learn from the images, through the reward.",
            "",
            "Rejected answers of DPO, and wrong answers of KTO, name another colour than the image has. The teacher",
            "of distillation has the architecture of the student, and is warmed up on right answers.",
            "",
            f"*Made from `benchmarks/results/tiny_task.json`, which `make bench-tiny` writes; {versions}; "
            f"{content['machine']}.*",
            "",
        ]
    )


def main() -> None:
    """Runs everything, and writes the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-only", action="store_true", help="only write the page from the committed results")
    parser.add_argument(
        "--only", nargs="+", choices=RUNS, metavar="RUN", help="measure only these runs, and keep the others"
    )
    options = parser.parse_args()
    if not options.page_only:
        before = json.loads(RESULT.read_text()) if options.only else {}
        runs: dict[str, list[dict[str, float]]] = {}
        for name, (command, recipe, overrides, seeds) in RUNS.items():
            if options.only and name not in options.only:
                runs[name] = before["runs"][name]
                continue
            runs[name] = [run(command, recipe, overrides, seed) for seed in seeds]
            print(name, runs[name], flush=True)
        packages = ("torch", "trl", "transformers", "peft")
        heading = measured_with("python benchmarks/tiny_task.py", *packages, before=before if options.only else None)
        content = {**heading, "runs": runs}
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--with-fp16-on-cpu"]:
        run_with_fp16_on_cpu(sys.argv[2:])
    else:
        main()

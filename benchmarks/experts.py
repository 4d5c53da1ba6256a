"""Measures how often routers choose other experts in scoring than in generation, and what replaying the choices does.

Each family is built from its config, trained for a few steps in float32, and evaluated by a `SafeGRPOTrainer`, which
samples with `generate` and scores the samples: in bfloat16 and in float16, with and without `router_replay`, and in
float16 also with a float32 head. A byte model with experts is also trained with GRPO, and the time of a step is
measured. `make bench-experts` writes
`benchmarks/results/experts.json` and the page.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
warnings.simplefilter("ignore")

import datasets
import torch
from accelerate.state import AcceleratorState
from expert_models import FAMILIES, IMAGES, build, learn, processor
from mismatch import source
from provenance import measured_with
from torch import nn
from transformers import PrinterCallback, TrainerCallback, set_seed

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, tiny
from safe_trainers.experts.routes import ExpertRoutes
from safe_trainers.testing import fp16_on_cpu


PARTS = ("families", "curves", "cost")
RESULT = Path(__file__).parent / "results" / "experts.json"
TRAINING = 600
"""Steps after which the experts of a layer differ; after 120 they are alike, and a flip changes little."""
ROWS, MOST_ROWS, FLIPPED = 128, 1024, 128
"""Sequences: the least and the most, and the number of tokens with a flip for which there are more than the least. The
largest mismatch of a few such tokens is not that of many: with 32, one family had a ratio of 9.9, and once of 13."""
TOKENS, PROMPT = 64, 16
GAPS = ("off", "rollout")
HEAD = "lm_head"
"""The module that makes the logits, whose rounding in float16 hides what replay does to the largest mismatch."""
KEYS = (
    "logp_mismatch_mean", "logp_mismatch_max", "logp_mismatch_flip", "logp_mismatch_no_flip", "router_flip_frac",
    "router_flip_any_frac", "router_replayed_frac",
)  # fmt: skip
SEEDS = (0, 1, 2)
STEPS = 30
BYTE_MODEL = {"hidden_size": 96, "head_dim": 24, "num_hidden_layers": 3, "moe_intermediate_size": 32}
LETTERS = frozenset(range(ord("a") + 3, ord("z") + 4))
"""Token ids of small letters, which the reward of the byte model counts."""


def trainer_of(model: nn.Module, family: str, folder: str, rows: int, **changes: Any) -> SafeGRPOTrainer:
    """Makes a trainer for a copy of a model.

    Args:
        model: The model, with float32 weights.
        family: Its family, which decides the processor and the prompts.
        folder: Where to write.
        rows: Number of prompts.
        **changes: Arguments of the config that replace others.
    """
    AcceleratorState._reset_state(True)  # one mixed precision per process
    made = processor(family)
    if family in IMAGES:
        prompts = tiny.prompt_dataset(rows, seed=0)
    else:
        text = source()
        places = torch.linspace(0, len(text) - PROMPT - 1, rows).long().tolist()
        # Prompts of several lengths, so that they are padded.
        ids = [text[place : place + PROMPT - i % 5] - 3 for i, place in enumerate(places)]
        prompts = datasets.Dataset.from_dict({"prompt": [bytes(row.tolist()).decode("latin-1") for row in ids]})
    generation = {"generation_kwargs": tiny.generation_kwargs(made)} if family in IMAGES else {}
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "num_generations": 2,
        "num_generations_eval": 1, "max_completion_length": TOKENS, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "precision_report": "off", "use_cpu": True, **generation,
    } | changes  # fmt: skip
    trainer = fp16_on_cpu(SafeGRPOTrainer)(
        copy.deepcopy(model),
        args=SafeGRPOConfig(folder, **arguments),
        reward_funcs=reward,
        processing_class=made,
        train_dataset=prompts,
        eval_dataset=prompts,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of small letters in each completion."""
    return [sum(token in LETTERS for token in ids) / max(len(ids), 1) for ids in completion_ids]


def evaluated(
    model: nn.Module, family: str, precision: str, replay: str, rows: int = ROWS, **changes: Any
) -> dict[str, float]:
    """Samples and scores sequences, and returns the metrics and the number of tokens with a flip."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, family, folder, rows, precision=precision, router_replay=replay, **changes)
        set_seed(1)
        found = trainer.evaluate()
    key = "eval_precision/"
    tokens = rows * found["eval_completions/mean_length"]
    flipped = round(found.get(key + "router_flip_any_frac", 0.0) * tokens)
    return {name: found[key + name] for name in KEYS if key + name in found} | {"flipped": flipped}


def with_flips(model: nn.Module, family: str, precision: str) -> tuple[int, dict[str, float]]:
    """Evaluates `ROWS` sequences, and more if these have less than `FLIPPED` tokens with a flip.

    Returns:
        The number of sequences, a power of two times `ROWS`, and their metrics.
    """
    found = evaluated(model, family, precision, "off")
    rows = ROWS
    while rows * found["flipped"] < ROWS * FLIPPED and rows < MOST_ROWS:
        rows *= 2
    return rows, found if rows == ROWS else evaluated(model, family, precision, "off", rows)


def families(names: tuple[str, ...], training: int) -> Iterator[list[dict[str, Any]]]:
    """Measures families, and yields the two rows of each, in bfloat16 and float16."""
    for family in names:
        started, model = time.perf_counter(), build(family)
        loss = learn(model, family, training)
        exact = evaluated(model, family, "fp32", "off")["logp_mismatch_mean"]
        rows = []
        for precision in ("bf16", "fp16"):
            count, off = with_flips(model, family, precision)
            on = evaluated(model, family, precision, "rollout", count)
            found: dict[str, Any] = {"sequences": count, "off": off, "rollout": on}
            if precision == "fp16":
                found["fp32_head"] = {
                    replay: evaluated(model, family, precision, replay, count, fp32_modules=[HEAD]) for replay in GAPS
                }
            rows.append({"family": family, "precision": precision, "loss": round(loss, 3), "fp32": exact, **found})
            print(
                f"{family:16} {precision} {count} sequences: flips "
                f"{off['router_flip_frac']:.2%} {on['router_flip_frac']:.2%}, tokens "
                f"{off['router_flip_any_frac']:.2%}, mean {off['logp_mismatch_mean']:.1e} -> "
                f"{on['logp_mismatch_mean']:.1e} (without a flip {off['logp_mismatch_no_flip']:.1e}), largest "
                f"{off['logp_mismatch_max']:.1e} -> {on['logp_mismatch_max']:.1e}, "
                f"{time.perf_counter() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        yield rows


class _Curve(TrainerCallback):
    """Keeps what a run logs."""

    def __init__(self) -> None:
        self.kept: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        wanted = ("logp_mismatch_mean", "logp_mismatch_max", "router_flip_any_frac", "seq_ess")
        entry = {name: logs[f"precision/{name}"] for name in wanted if logs and f"precision/{name}" in logs}
        if logs and "reward" in logs:
            self.kept.append({"reward": logs["reward"], "grad_norm": logs["grad_norm"], **entry})


def curves(steps: int, training: int) -> list[dict[str, Any]]:
    """Trains a byte model with experts with GRPO, and returns a row for each precision, replay and seed."""
    model = build("qwen3_moe", **BYTE_MODEL)
    learn(model, "qwen3_moe", training)
    rows = []
    for precision in ("bf16", "fp16"):
        for replay in GAPS:
            for seed in SEEDS:
                started, curve = time.perf_counter(), _Curve()
                with tempfile.TemporaryDirectory() as folder:
                    trainer = trainer_of(
                        model, "qwen3_moe", folder, 16, precision=precision, router_replay=replay, seed=seed,
                        max_steps=steps, learning_rate=1e-4, num_generations=8, logging_steps=1,
                        max_completion_length=24, steps_per_generation=2, num_iterations=2,
                    )  # fmt: skip
                    trainer.add_callback(curve)
                    trainer.train()
                rows.append({"precision": precision, "replay": replay, "seed": seed, "steps": curve.kept})
                last = statistics.fmean(step["reward"] for step in curve.kept[-10:])
                seconds = time.perf_counter() - started
                print(f"{precision} {replay} {seed}: {last:.3f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def cost(steps: int, pairs: int) -> dict[str, Any]:
    """Measures the time of a step with and without replay, in alternating runs."""
    model = build("qwen3_moe", **BYTE_MODEL)
    seconds: dict[str, list[float]] = {name: [] for name in ("no metrics", *GAPS)}
    nbytes = 0
    for turn in range(pairs):
        names = [*seconds]
        for name in names[turn % 3 :] + names[: turn % 3]:  # no place in the order is always the same run's
            kept = seconds[name]
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_of(
                    model, "qwen3_moe", folder, 8, precision="fp32", max_steps=steps, max_completion_length=TOKENS,
                    router_replay=name if name in GAPS else "off", precision_metrics=name in GAPS, seed=0,
                )  # fmt: skip
                set_seed(0)
                started = time.process_time()
                trainer.train()
                kept.append((time.process_time() - started) / steps)
                nbytes = trainer.precision[ExpertRoutes].routers.bytes_per_token or nbytes
        print({name: round(statistics.median(kept), 3) for name, kept in seconds.items()}, file=sys.stderr, flush=True)
    middle = {name: statistics.median(kept) for name, kept in seconds.items()}
    ratios = [on / off for on, off in zip(seconds["rollout"], seconds["off"], strict=True)]
    seen = [off / plain for off, plain in zip(seconds["off"], seconds["no metrics"], strict=True)]
    return {
        "seconds": middle, "ratio": statistics.median(ratios), "ratios": sorted(ratios),
        "seen": statistics.median(seen), "all_seen": sorted(seen),
        "bytes_per_token": nbytes, "steps": steps, "pairs": pairs,
    }  # fmt: skip


def main() -> None:
    """Measures, and writes the results of the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--family", nargs="*", default=FAMILIES)
    parser.add_argument("--training", type=int, default=TRAINING)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    started = time.perf_counter()
    if set(options.parts) == set(PARTS) and set(options.family) == set(FAMILIES):
        RESULT.unlink(missing_ok=True)
    for part in options.parts:
        if part == "families":
            for rows in families(tuple(options.family), options.training):
                old = [row for row in read().get(part, []) if row["family"] != rows[0]["family"]]
                measured = sorted([*old, *rows], key=lambda row: (FAMILIES.index(row["family"]), row["precision"]))
                write(part, measured)
        else:
            write(part, curves(options.steps, options.training) if part == "curves" else cost(5, 6))
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)


def read() -> dict[str, Any]:
    """Returns the results of all parts."""
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}


def write(part: str, measured: Any) -> None:
    """Replaces the results of a part."""
    before = read()
    content = before | {
        **measured_with("make bench-experts", "torch", "trl", "transformers", before=before or None),
        "parts": list(PARTS),
        "training": TRAINING,
        "least": ROWS,
        "most": MOST_ROWS,
        "flipped": FLIPPED,
        "tokens": TOKENS,
        part: measured,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

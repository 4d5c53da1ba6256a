"""Trains a small model healthily and with planted faults, and records every `precision/` metric.

    python benchmarks/metric_runs.py     # 10 minutes on 2 cores

`safe_trainers/explain/metrics.toml` states what is normal for each metric, and `tests/explain/test_metric_limits.py`
compares it with these runs: no healthy run passes a limit, and the run with the fault that a limit is for does. The
model is that of `benchmarks/mismatch.py`, with two layers: byte-level, trained on the source of Python's standard
library. Rollouts with a fault of the sampler come from a `rollout_func`, which samples with a copy of the model and
returns what the fault makes of its log-probabilities.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import datasets
import torch
from accelerate.state import AcceleratorState
from mismatch import PROMPT, build, learn, prompts
from peft import LoraConfig
from provenance import measured_with
from transformers import ByT5Tokenizer, LlamaForCausalLM, PrinterCallback, TrainerCallback

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer
from safe_trainers.rollout.weight_sync import METRIC, AdapterSync
from safe_trainers.testing import fp16_on_cpu


RESULT = Path(__file__).parent / "results" / "metric_runs.json"
STEPS, TOKENS, GROUP = 24, 48, 4
BEGIN, FAULT_AT = 8, 8
"""Number of different prompts; the step at which faults of gradients begin."""


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of spaces, which every group of completions has in another number."""
    return [text.count(" ") / max(len(text), 1) for text in completions]


def half_of_them(completions: list[str], **_: Any) -> list[float | None]:
    """A reward that is missing for every second completion."""
    return [None if row % 2 else value for row, value in enumerate(reward(completions))]


@torch.no_grad()
def continuations(
    model: LlamaForCausalLM, begin: torch.Tensor, temperature: float, returned: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples TOKENS tokens, and returns them with log-probabilities of a temperature, (B, TOKENS) each."""
    ids, logps, past = begin, [], None
    for _ in range(TOKENS):
        out = model(input_ids=ids if past is None else ids[:, -1:], past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits = out.logits[:, -1].float()  # (B, V)
        token = torch.multinomial((logits / temperature).softmax(-1), 1)  # (B, 1)
        logps.append((logits / returned).log_softmax(-1).gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids[:, begin.shape[1] :], torch.cat(logps, dim=1)


def sampler(
    dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    every: int = 1,
    unknown: int = 0,
    returned: float | None = None,
) -> Callable[..., Any]:
    """Returns a `rollout_func`.

    Args:
        dtype: The dtype of the sampler's copy of the weights; `None` for that of the model.
        temperature: The temperature that the sampler divides by.
        every: Rollouts between two copies of the weights.
        unknown: Number of tokens at the end of each completion whose log-probability is not returned (NaN).
        returned: The temperature of the returned log-probabilities; by default that of the sampler.
    """
    kept: dict[str, Any] = {"age": 0}

    def rollout(asked: list[str], trainer: Any) -> dict[str, Any]:
        if kept["age"] % every == 0:
            kept["copy"] = build(trainer.model.config.num_hidden_layers).eval()
            kept["copy"].load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
            for parameter in kept["copy"].parameters():  # as an engine: rotary frequencies stay in float32
                parameter.data = parameter.data.to(dtype or parameter.dtype)
        kept["age"] += 1
        begin = prompts(BEGIN)[[int(prompt) for prompt in asked]]
        tokens, logps = continuations(kept["copy"], begin, temperature, returned or temperature)
        logps[:, TOKENS - unknown :] = math.nan
        return {"prompt_ids": begin.tolist(), "completion_ids": tokens.tolist(), "logprobs": logps.tolist()}

    return rollout


class Poison(TrainerCallback):
    """Makes the gradients of every step from FAULT_AT on infinite, as an activation that overflows float16 does."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.step = 0
        next(model.parameters()).register_hook(self._gradient)

    def _gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, math.inf) if self.step >= FAULT_AT else gradient

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


Run = dict[str, Any]
RUNS: dict[str, Run] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "bf16, LoRA": {"precision": "bf16", "lora": True, "learning_rate": 1e-3},
    "fp16, LoRA": {"precision": "fp16", "lora": True, "learning_rate": 1e-3},
    "bf16, engine": {"precision": "bf16", "rollout": sampler(torch.bfloat16)},
    "fp16, engine": {"precision": "fp16", "rollout": sampler(torch.float16)},
    "sampler in the other half format": {
        "precision": "fp16",
        "rollout": sampler(torch.bfloat16),
        "fault": "the sampler has bfloat16 weights and the trainer computes in float16",
    },
    "old weights": {
        "precision": "bf16",
        "rollout": sampler(torch.bfloat16, every=STEPS),
        "learning_rate": 1e-3,
        "fault": "the sampler keeps the weights of the first step",
    },
    "another temperature": {
        "precision": "bf16",
        "rollout": sampler(torch.bfloat16, temperature=0.7),
        "fault": "the sampler divides by another temperature than the trainer",
    },
    "log-probabilities of another temperature": {
        "precision": "bf16",
        "rollout": sampler(torch.bfloat16, returned=1.5),
        "fault": "the sampler returns log-probabilities of another temperature than the one that it samples with",
    },
    "unknown log-probabilities": {
        "precision": "bf16",
        "rollout": sampler(torch.bfloat16, unknown=8),
        "fault": "the sampler returns no log-probability for some tokens",
    },
    "activations overflow": {
        "precision": "fp16",
        "poison": True,
        "fault": "the gradients of every step are infinite, as an activation that overflows float16 makes them",
    },
    "underflow": {
        "precision": "fp16",
        "weights": torch.float16,
        "loss_scale_init": 1e-5,
        "fault": "the loss scale is so small that gradients are below the smallest float16",
    },
    "bf16 adapters": {
        "precision": "bf16",
        "lora": True,
        "adapter_dtype": "bfloat16",
        "learning_rate": 1e-6,
        "fault": "bfloat16 adapters at a learning rate of 1e-6",
    },
    "bf16 weights": {
        "precision": "bf16",
        "weights": torch.bfloat16,
        "learning_rate": 1e-6,
        "fault": "bfloat16 weights, fully fine-tuned at a learning rate of 1e-6",
    },
    "rewards missing": {
        "precision": "bf16",
        "reward": half_of_them,
        "fault": "the reward function returns None for half of the completions",
    },
    "sync at a small rate": {
        "precision": "bf16",
        "lora": True,
        "learning_rate": 1e-6,
        "fault": "adapters at a learning rate of 1e-6 are merged into bfloat16 weights for the sampler",
    },
}
"""The runs, each with what differs from a run in bf16; those with a `fault` are not healthy."""


def train(model: LlamaForCausalLM, changes: Run) -> dict[str, list[float]]:
    """Trains a copy of the model, and returns the values of each metric, one for each step."""
    AcceleratorState._reset_state(True)  # one mixed precision per process
    copy = build(model.config.num_hidden_layers)
    copy.load_state_dict(model.state_dict())
    copy.to(changes.get("weights", torch.float32))
    config = {name: changes[name] for name in ("loss_scale_init", "adapter_dtype") if name in changes}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if "lora" in changes else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = fp16_on_cpu(SafeGRPOTrainer)(
            copy,
            args=SafeGRPOConfig(
                folder,
                precision=changes["precision"],
                learning_rate=changes.get("learning_rate", 1e-4),
                lr_scheduler_type="constant",
                use_cpu=True,
                max_steps=STEPS,
                logging_steps=1,
                num_iterations=2,
                max_consecutive_skips=1000,
                per_device_train_batch_size=2 * GROUP,
                num_generations=GROUP,
                max_completion_length=TOKENS,
                precision_report="off",
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=0,
                **config,
            ),
            reward_funcs=changes.get("reward", reward),
            processing_class=ByT5Tokenizer(extra_ids=0),
            train_dataset=datasets.Dataset.from_dict({"prompt": [str(row) for row in range(BEGIN)]}),
            peft_config=lora,
            **({"rollout_func": changes["rollout"]} if "rollout" in changes else {}),
        )
        trainer.remove_callback(PrinterCallback)
        lost: list[float] = []
        if "poison" in changes:
            trainer.add_callback(Poison(trainer.model))
        if lora is not None and "adapter_dtype" not in changes:
            trainer.add_callback(_Syncs(trainer.model, lost))
        trainer.train()
    names = {key for entry in trainer.state.log_history for key in entry if key.startswith("precision/")}
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {name: [entry[name] for entry in history if name in entry] for name in sorted(names)}
    return {**found, METRIC: lost} if lost else found


class _Syncs(TrainerCallback):
    """Merges the adapters after each step as for a weight sync to a bfloat16 engine, and keeps the lost share."""

    def __init__(self, model: Any, lost: list[float]) -> None:
        self.sync, self.lost = AdapterSync(model, torch.bfloat16), lost

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for _ in self.sync.named_weights():
            pass
        if self.sync.lost is not None:
            self.lost.append(self.sync.lost)


def main() -> None:
    """Runs everything, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the runs whose name contains this text; nothing is written")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learn", type=int, default=150, help="steps of the model's own training")
    options = parser.parse_args()
    began = time.monotonic()
    model = build(options.layers)
    loss = learn(model, options.learn, PROMPT + 4 * TOKENS)
    rows = []
    for name, changes in RUNS.items():
        if options.only and options.only not in name:
            continue
        torch.manual_seed(0)
        metrics = train(model, changes)
        rows.append({"name": name, "fault": changes.get("fault"), "metrics": metrics})
        last = {key.removeprefix("precision/"): f"{values[-1]:.3g}" for key, values in metrics.items()}
        print(name, last, flush=True)
    if options.only:
        return
    written = {
        **measured_with("python benchmarks/metric_runs.py", "torch", "trl", "transformers", "peft"),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "model": f"{sum(p.numel() for p in model.parameters()):,} parameters, {loss:.2f} nats per byte",
        "steps": STEPS,
        "tokens": TOKENS,
        "runs": [
            {**row, "metrics": {k: [float(f"{v:.5g}") for v in vs] for k, vs in row["metrics"].items()}}
            for row in rows
        ],
    }
    RESULT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

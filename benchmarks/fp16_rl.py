"""Trains with GRPO and the real vLLM in bf16, in fp16 and in fp32, at several degrees of mismatch: docs/fp16_rl.md.

    .venv/vllm/bin/python benchmarks/fp16_rl.py             # what benchmarks/results/fp16_rl.jsonl lacks
    .venv/vllm/bin/python benchmarks/fp16_rl.py --again     # finished runs too

Trainer and vLLM compute in the same precision: autocast on float32 weights in the trainer, weights in that dtype in
vLLM. An untrained Llama is rewarded for the share of eight words in answers of 512 tokens. A number that is added to
all its logits raises the mismatch. Each seed runs in a process of its own.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# First, because it sets the environment.
import vllm_runs  # noqa: F401


# isort: split
import torch
from curves import rounded, versions
from datasets import Dataset
from policing import reset_accelerate
from provenance import machine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer
from safe_trainers.testing import fp16_on_cpu
from safe_trainers.tiny.models import text_options
from safe_trainers.tiny.saving import write


RESULT = Path(__file__).parent / "results" / "fp16_rl.jsonl"
SEEDS = (0, 1, 2, 3, 4)
PRECISIONS = ("fp32", "bf16", "fp16")
WORDS, REWARDED = 94, 8
LENGTH, GROUP, GROUPS, STEPS = 512, 4, 4, 14
HIDDEN, LAYERS, HEAD, SHARP, CONSTANT = 64, 2, 32, 4.0, 4.0
RATE = 5e-4
"""The learning rate, chosen in float32 with a seed that is not in `SEEDS`."""
HELD_OUT = 32
"""Held-out prompts: each is answered once for the score."""
CORRECTIONS = ("sequence_mask", "token_mask", "none")
"""TRL's default, whose weight of a sequence is exp(S) and 0 above 3; the same for tokens; no importance sampling."""
OFFSETS = (0, 32, 128)


def cells() -> list[tuple[int, str, str]]:
    """Returns offset, correction and precision of every run of a seed; in fp32 the others make no difference."""
    return [
        (offset, correction, precision)
        for offset in OFFSETS
        for correction in CORRECTIONS
        for precision in PRECISIONS
        if correction == CORRECTIONS[0] or (offset == OFFSETS[-1] and precision != "fp32")
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are words; the rewarded ones have the ids 2 to 9."""
    words = ["<pad>", "</s>", *(f"w{number}" for number in range(WORDS))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")


@torch.no_grad()
def make_model(offset: int, seed: int, root: Path) -> Path:
    """Returns the folder of an untrained float32 model, which is made on first use.

    Args:
        offset: A number that is added to all logits, which changes no probability in exact arithmetic: the first
            element of all embeddings is a constant, and the head multiplies it.
        seed: Seed of the weights.
        root: Where the models are.
    """
    folder = root / f"offset-{offset}-{seed}"
    if folder.is_dir():
        return folder
    tokenizer = make_tokenizer()
    heads = {"num_attention_heads": HIDDEN // HEAD, "num_key_value_heads": HIDDEN // HEAD}
    options = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**text_options(tokenizer, **options, **heads)))
        inputs = torch.randint(len(tokenizer), (8, 64))
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = CONSTANT * embeddings.std()
    model.model.norm.weight.mul_(SHARP)
    model.lm_head.weight[:, 0] = offset / model.model(inputs).last_hidden_state[..., 0].mean()
    write(model, tokenizer, folder)
    return folder


def prompts(count: int, seed: str) -> list[str]:
    """Returns prompts of eight random words."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(8)) for _ in range(count)]


def share(ids: Iterable[int]) -> float:
    """Returns the share of rewarded words in an answer."""
    return statistics.fmean(2 <= token < 2 + REWARDED for token in ids)


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Rewards the share of rewarded words."""
    return [share(ids) for ids in completion_ids]


@torch.no_grad()
def score(model: Any, folder: Path) -> float:
    """Returns the mean reward of answers to held-out prompts, sampled in float32 without vLLM."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompts(HELD_OUT, "held out"), return_tensors="pt", return_token_type_ids=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = model.generate(**inputs, do_sample=True, top_k=0, min_new_tokens=0, max_new_tokens=LENGTH,
                             eos_token_id=None)  # fmt: skip
    return statistics.fmean(share(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist())


class Variance:
    """Records the variance of the gradient in each step.

    A step accumulates the gradients of n micro-batches, each of which has all answers to one prompt. With g_k n times
    the gradient that micro-batch k adds, unscaled and before clipping, and g their mean, which is the gradient of the
    step, the variance is the sum of abs(g_k - g)^2 over k and over all weights, divided by n - 1.

    Attributes:
        variance: The variance of each step.
        square: abs(g)^2 of each step.
    """

    def __init__(self, trainer: Any) -> None:
        self.variance: list[float] = []
        self.square: list[float] = []
        self._trainer, self._original = trainer, trainer.training_step
        self._weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        self._sums: list[torch.Tensor] = []
        trainer.training_step = self._step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._original(*args, **kwargs)
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        n = self._trainer.args.gradient_accumulation_steps
        self._sums.append(torch.cat([weight.grad.flatten() for weight in self._weights]).double() / scale)
        if len(self._sums) == n:
            total = torch.stack(self._sums)  # (n, elements)
            parts = n * total.diff(dim=0, prepend=torch.zeros_like(total[:1]))
            mean = parts.mean(0)
            self.variance.append(float((parts - mean).square().sum() / (n - 1)))
            self.square.append(float(mean.square().sum()))
            self._sums = []
        return loss


def build(offset: int, correction: str, precision: str, seed: int, folder: Path, **changes: Any) -> Any:
    """Builds the trainer of a run.

    Args:
        offset: The number that is added to all logits.
        correction: `"none"`, or TRL's `vllm_importance_sampling_mode`.
        precision: That of trainer and sampler.
        seed: The seed of data and sampling.
        folder: The model.
        **changes: Changed settings of the config.
    """
    mode = {} if correction == "none" else {"vllm_importance_sampling_mode": correction}
    settings: dict[str, Any] = {
        "output_dir": str(folder.parent / "out"), "precision": precision, "use_cpu": True, "seed": seed,
        "max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant", "adam_beta2": 0.95,
        "per_device_train_batch_size": GROUP, "num_generations": GROUP, "gradient_accumulation_steps": GROUPS,
        "max_completion_length": LENGTH, "temperature": 1.0, "beta": 0.0, "generation_kwargs": {"ignore_eos": True},
        "vllm_importance_sampling_correction": correction != "none", "logging_steps": 1, "report_to": [],
        "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True, "precision_report": "off",
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    if changes.get("use_vllm", True):
        import engines  # it sets vLLM's environment

        settings |= engines.VLLM | {"max_completion_length": LENGTH, "vllm_max_model_length": LENGTH + 64}
        engines.end_engines()
    reset_accelerate()
    torch.manual_seed(seed)
    return fp16_on_cpu(SafeGRPOTrainer)(
        model=str(folder), args=SafeGRPOConfig(**{**settings, **mode, **changes}), reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts(1000, f"train {seed}")}),
    )  # fmt: skip


LOGGED = {
    "reward": "reward", "grad_norm": "grad_norm", "entropy": "entropy", "mismatch": "precision/logp_mismatch_mean",
    "mismatch_max": "precision/logp_mismatch_max", "k3": "precision/logp_mismatch_k3",
    "log_ratio": "precision/seq_logratio_abs_mean", "log_ratio_std": "precision/seq_logratio_std",
    "ess": "precision/seq_ess", "masked": "precision/is_masked_frac", "skipped": "precision/skipped_steps",
    "weight": "sampling/importance_sampling_ratio/mean",
}  # fmt: skip


def run(offset: int, correction: str, precision: str, seed: int, root: Path, **changes: Any) -> dict[str, Any]:
    """Trains once, and returns the row of the results."""
    folder = make_model(offset, seed, root)
    started, used = time.perf_counter(), time.process_time()
    trainer = build(offset, correction, precision, seed, folder, **changes)
    recorded = Variance(trainer)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    row = {"offset": offset, "correction": correction, "precision": precision, "seed": seed}
    if trainer.args.use_vllm:
        row["sampler"] = str(trainer.vllm_generation.llm.llm_engine.model_config.dtype).removeprefix("torch.")
    row |= {name: [entry[key] for entry in log] for name, key in LOGGED.items() if key in log[0]}
    row |= {"variance": recorded.variance, "square": recorded.square, "score": score(trainer.model, folder)}
    row |= {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}
    return {key: rounded(value) for key, value in row.items()}


def heading() -> dict[str, Any]:
    """Returns what is the same for all runs."""
    return {
        "command": "benchmarks/fp16_rl.py",
        "machine": f"one thread of {machine()}",
        "seeds": SEEDS, "length": LENGTH, "steps": STEPS, "group": GROUP, "groups": GROUPS, "hidden": HIDDEN,
        "layers": LAYERS, "words": WORDS, "rewarded": REWARDED, "held_out": HELD_OUT,
        "offsets": OFFSETS, "corrections": CORRECTIONS, "sharp": SHARP, "rate": RATE,
    }  # fmt: skip


Key = tuple[int, str, str, int]


def key_of(row: dict[str, Any]) -> Key:
    """Returns what identifies a run."""
    return row["offset"], row["correction"], row["precision"], row["seed"]


def read() -> dict[Key, dict[str, Any]]:
    """Returns the committed runs."""
    lines = RESULT.read_text(encoding="utf-8").splitlines()[1:] if RESULT.is_file() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def save(row: dict[str, Any]) -> None:
    """Adds a run to the results, or replaces it."""
    rows = read() | {key_of(row): row}
    order = cells()
    kept = sorted(rows.values(), key=lambda row: (order.index(key_of(row)[:3]), row["seed"]))
    scratch = RESULT.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(line) + "\n" for line in [heading(), *kept]), encoding="utf-8")
    scratch.replace(RESULT)


def run_seed(seed: int, again: bool, root: Path) -> None:
    """Runs what is missing of a seed."""
    torch.set_num_threads(1)
    import engines

    os.environ["MASTER_PORT"] = str(engines.free_port())
    for offset, correction, precision in cells():
        if not again and (offset, correction, precision, seed) in read():
            continue
        row = run(offset, correction, precision, seed, root) | {"versions": versions()}
        save(row)
        print(f"{offset} {correction} {precision} {seed}: {row['score']} ({row['seconds']:.0f} s)",
              file=sys.stderr, flush=True)  # fmt: skip
    engines.end_engines()


def main() -> int:
    """Runs all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="seeds, separated by commas")
    parser.add_argument("--again", action="store_true", help="run finished runs again")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is not None:
        run_seed(options.seed, options.again, options.models)
        return 0
    failed = 0
    # With vLLM's ahead-of-time compilation each sampled token takes twice as long here.
    environment = {"VLLM_USE_AOT_COMPILE": "0", **os.environ}
    with tempfile.TemporaryDirectory() as root:
        for seed in map(int, options.seeds.split(",")):
            command = [sys.executable, __file__, "--seed", str(seed), "--models", root] + ["--again"] * options.again
            failed += subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

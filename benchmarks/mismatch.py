"""Measures the mismatch of sampler and trainer in bfloat16, in float16, and with float16 only in the trainer.

A small byte-level model is trained on the source of Python's standard library. Samplers have weights in their own
dtype, like an inference engine, or generate under the trainer's autocast, like the safe trainers without an engine. A
`SafeGRPOTrainer` with float32 weights scores the samples, cut to several lengths, and the results are the metrics of
its evaluation. `make bench-mismatch` writes `benchmarks/results/mismatch.json` and the page with its plot.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import sysconfig
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
import yaml
from accelerate.state import AcceleratorState
from peft import LoraConfig
from provenance import measured_with
from rich.console import Console
from rich.table import Table
from transformers import (
    ByT5Tokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
)

import safe_trainers
from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, tiny
from safe_trainers.rollout.logprob_recorder import Turn
from safe_trainers.testing import fp16_on_cpu


RESULT = Path(__file__).parent / "results" / "mismatch.json"
RECIPE = Path(__file__).parent.parent / "recipes" / "grpo" / "tiny_vlm_bf16.yaml"
LENGTHS = (64, 128, 256, 512, 1024)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPT = 16

# (sampler, trainer); "autocast": generates with the trainer's float32 weights under its autocast
PAIRS = [
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("bf16", "fp16"),
    ("autocast bf16", "bf16"),
    ("autocast fp16", "fp16"),
    ("fp32", "fp32"),
]


def build(layers: int = 8, seed: int = 0) -> LlamaForCausalLM:
    """Builds a byte-level Llama with random float32 weights; 8 layers have 6.5 million parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=259,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def source() -> torch.Tensor:
    """Returns the bytes of the standard library's modules, as token ids of `ByT5Tokenizer`."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + 3  # its first ids are special


def learn(model: LlamaForCausalLM, steps: int, width: int = PROMPT + max(LENGTHS)) -> float:
    """Trains on random parts of the source, and returns the last loss in nats per byte."""
    text, generator = source(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=max(steps, 2))
    last = float("nan")
    for _ in range(steps):
        starts = torch.randint(len(text) - width, (2,), generator=generator).tolist()
        ids = torch.stack([text[start : start + width] for start in starts])  # (2, width)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last = loss.item()
    return last


def prompts(rows: int) -> torch.Tensor:
    """Returns prompts that are all different, (rows, PROMPT) token ids."""
    text = source()
    places = torch.linspace(0, len(text) - PROMPT - 1, rows).long().tolist()
    return torch.stack([text[place : place + PROMPT] for place in places])


def sample(model: LlamaForCausalLM, sampler: str, begin: torch.Tensor, length: int) -> dict[str, Any]:
    """Samples with weights in the sampler's dtype, and returns the tokens with their log-probabilities."""
    autocast, dtype = sampler.startswith("autocast"), DTYPES[sampler.rsplit(maxsplit=1)[-1]]
    other = build(model.config.num_hidden_layers)
    other.load_state_dict(model.state_dict())
    other.eval()
    if not autocast:
        for parameter in other.parameters():  # without rotary frequencies, which engines keep in float32
            parameter.data = parameter.data.to(dtype)
    turn = Turn(temperature=1.0)
    settings = GenerationConfig(max_new_tokens=length, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        other.generate(begin, attention_mask=torch.ones_like(begin), generation_config=settings,
                       custom_generate=turn.recording())  # fmt: skip
    return {"begin": begin.tolist(), "tokens": turn.tokens.tolist(), "logps": turn.logps.tolist()}


@contextlib.contextmanager
def scorer(model: LlamaForCausalLM, trainer: str, rows: int, longest: int) -> Iterator[Any]:
    """Yields a function that scores samples, cut to a length, with a trainer, and returns the logged metrics."""
    AcceleratorState._reset_state(True)  # one mixed precision per process
    given: dict[str, Any] = {}

    def rollout(asked: list[str], _: Any) -> dict[str, Any]:
        index = [int(prompt) for prompt in asked]
        return {
            "prompt_ids": [given["begin"][row] for row in index],
            "completion_ids": [given["tokens"][row][: given["length"]] for row in index],
            "logprobs": [given["logps"][row][: given["length"]] for row in index],
        }

    copy = build(model.config.num_hidden_layers)
    copy.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        made = fp16_on_cpu(SafeGRPOTrainer)(
            copy,
            args=SafeGRPOConfig(
                folder,
                precision=trainer,
                use_cpu=True,
                per_device_eval_batch_size=min(rows, 8),
                per_device_train_batch_size=2,
                num_generations=2,
                num_generations_eval=1,
                max_completion_length=longest,
                report_to=[],
                disable_tqdm=True,
            ),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=ByT5Tokenizer(extra_ids=0),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["0", "1"]}),
            eval_dataset=datasets.Dataset.from_dict({"prompt": [str(row) for row in range(rows)]}),
            rollout_func=rollout,
        )
        made.remove_callback(PrinterCallback)

        def score(samples: dict[str, Any], length: int) -> dict[str, float]:
            given.update(samples, length=length)
            key = "eval_precision/"
            return {name.removeprefix(key): value for name, value in made.evaluate().items() if name.startswith(key)}

        yield score
    AcceleratorState._reset_state(True)


def measure(model: LlamaForCausalLM, pairs: list[tuple[str, str]], rows: int, lengths: tuple[int, ...]) -> list[Any]:
    """Measures every metric for every pair and length.

    Args:
        model: The model, with float32 weights.
        pairs: Pairs of sampler and trainer.
        rows: Number of sequences to sample.
        lengths: Numbers of tokens to which they are cut.

    Returns:
        A mapping for each pair and length.
    """
    begin = prompts(rows)
    samples = {sampler: sample(model, sampler, begin, max(lengths)) for sampler, _ in pairs}
    found = []
    for trainer in dict.fromkeys(trainer for _, trainer in pairs):
        with scorer(model, trainer, rows, max(lengths)) as score:
            for sampler in (sampler for sampler, scored_by in pairs if scored_by == trainer):
                for length in lengths:
                    numbers = score(samples[sampler], length)
                    found.append({"sampler": sampler, "trainer": trainer, "length": length, **numbers})
    return found


METRICS = (
    "rollout/mismatch.py", "rollout/logprob_recorder.py", "rollout/mismatch_meter.py", "numerics/step_monitor.py",
    "numerics/update_sample.py",
)  # fmt: skip
"""The modules of the package that compute the `precision/` metrics."""


class Sampler:
    """A profiler that samples every millisecond the innermost frame of this package or of a library on top of torch.

    Attributes:
        seconds: CPU time for each file of `METRICS`, and for the `"rest"`.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*METRICS, "rest"), 0.0)
        self._package, self._last = f"{Path(safe_trainers.__file__).parent}/", 0.0

    def __enter__(self) -> "Sampler":
        self._old = signal.signal(signal.SIGPROF, self._sample)
        self._last = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._old)

    def _sample(self, number: int, frame: Any) -> None:
        now = time.process_time()
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self._package):
                module = file.removeprefix(self._package)
                whose = module if module in METRICS else "rest"
                break
            if any(f"/{name}/" in file for name in ("trl", "transformers", "peft", "accelerate", "datasets")):
                whose = "rest"
                break
            frame = frame.f_back
        else:
            whose = "rest"
        self.seconds[whose] += now - self._last
        self._last = now


def cost(steps: int) -> dict[str, Any]:
    """Measures the CPU time of a step of the tiny recipe, and the share of the metrics."""
    AcceleratorState._reset_state(True)
    recipe = yaml.safe_load(RECIPE.read_text())
    family = recipe["model_name_or_path"].removeprefix("tiny:")
    torch.manual_seed(0)
    processor = tiny.build_processor(family)
    asked = ("bf16", "use_cpu", "learning_rate", "lr_scheduler_type", "adam_beta2", "per_device_train_batch_size",
             "num_generations", "max_completion_length", "temperature", "beta", "logging_steps")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = SafeGRPOTrainer(
            tiny.build_model(family, dtype=recipe["dtype"]),
            args=SafeGRPOConfig(
                folder, max_steps=steps, report_to=[], save_strategy="no", disable_tqdm=True, precision_report="off",
                generation_kwargs=tiny.generation_kwargs(processor), **{key: recipe[key] for key in asked},
            ),
            reward_funcs=[tiny.exact_match, tiny.attribute_match],
            processing_class=processor,
            train_dataset=tiny.prompt_dataset(recipe["dataset_size"]),
            peft_config=LoraConfig(
                r=recipe["lora_r"], lora_dropout=recipe["lora_dropout"], target_modules=recipe["lora_target_modules"]
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        with Sampler() as sampler:
            trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry if key.startswith("precision/")}
    if "precision/logp_mismatch_mean" not in logged:
        raise RuntimeError(f"the trainer logged no mismatch metrics: {sorted(logged)}")
    total = sum(sampler.seconds.values())
    parts = {file: sampler.seconds[file] / total for file in METRICS}
    return {"milliseconds": 1e3 * total / steps, "share": sum(parts.values()), **parts}


def costs(repetitions: int, steps: int) -> dict[str, Any]:
    """Repeats `cost`: the median of each value, and the smallest and largest share."""
    runs = [cost(steps) for _ in range(repetitions)]
    shares = [run["share"] for run in runs]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    parts = {file: middle.pop(file) for file in METRICS}
    return {"steps": steps, "repetitions": repetitions, **middle, "range": [min(shares), max(shares)], "parts": parts}


def main() -> None:
    """Trains the model, measures, prints the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cost-only", action="store_true", help="measure only the cost, and keep the other results")
    parser.add_argument("--cost-steps", type=int, default=100)
    parser.add_argument("--cost-repetitions", type=int, default=7)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    if options.cost_only:
        content = json.loads(RESULT.read_text())
        content |= measured_with(content["command"], *content["versions"], before=content)
        content["cost"] = costs(options.cost_repetitions, options.cost_steps)
        RESULT.write_text(json.dumps(content, indent=1) + "\n")
        print(content["cost"])
        return
    started, model = time.perf_counter(), build()
    loss = learn(model, options.steps)
    print(f"loss {loss:.2f} after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    found = measure(model, PAIRS, options.rows, LENGTHS)
    table = Table("sampler", "trainer", "tokens", "mean |D|", "max |D|", "k3", "mean |S|", "ESS")
    for row in found:
        table.add_row(row["sampler"], row["trainer"], str(row["length"]), f"{row['logp_mismatch_mean']:.2e}",
                      f"{row['logp_mismatch_max']:.2e}", f"{row['logp_mismatch_k3']:.1e}",
                      f"{row['seq_logratio_abs_mean']:.3f}", f"{row['seq_ess']:.3f}")  # fmt: skip
    command = f"python benchmarks/mismatch.py --rows {options.rows} --steps {options.steps}"
    content = {
        **measured_with(command, "torch", "trl", "transformers"),
        "sequences": options.rows,
        "training": {"steps": options.steps, "loss": round(loss, 2), "text": f"Python {platform.python_version()}"},
        "seconds": round(time.perf_counter() - started),
        "cost": costs(options.cost_repetitions, options.cost_steps),
        "rows": found,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

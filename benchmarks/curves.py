"""Trains with stock TRL and with the safe trainers under precision faults, and records the learning curves.

    .venv/vllm/bin/python benchmarks/curves.py                        # what benchmarks/results/curves.jsonl lacks
    .venv/vllm/bin/python benchmarks/curves.py --only image,top-p     # these curves only
    .venv/vllm/bin/python benchmarks/curves.py --only image --again   # finished runs too

Every run of a curve has the same settings, model, data and seed for both trainers; TRL's plain config is passed to
both. Learning rates and numbers of steps were chosen on the reference runs: stock TRL in float32, sampling with
`generate`. The score is the share of held-out prompts that the trained model answers exactly right, decoding greedily
in the trainer's process. Each curve runs in a process of its own.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# First, because it sets the environment.
from vllm_runs import FLAGS, METRIC, PACKAGES


# isort: split
import curve_tasks
import torch
import trl
from peft import LoraConfig, PeftModel
from policing import reset_accelerate
from provenance import machine
from transformers import AutoTokenizer, BitsAndBytesConfig, TrainerCallback

import safe_trainers
from safe_trainers.testing import fp16_on_cpu
from safe_trainers.tiny.tokenizer import marker_ids


RESULT = Path(__file__).parent / "results" / "curves.jsonl"
SEEDS = (0, 1, 2)
SIDES = ("stock", "safe")
POINTS = 10
"""How often a run is scored, without the score before it."""
NAN_AT = 0.4
"""The share of the steps after which a NaN is planted."""
OVERFLOWS_ABOVE = 64.0
"""The loss scale above which the gradients of the fp16 curve overflow."""


def plant_nan(trainer: Any) -> None:
    """Makes one element of the embeddings' output NaN, in the loss of one batch."""
    step = int(NAN_AT * trainer.args.max_steps)

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if trainer.state.global_step != step or not torch.is_grad_enabled():
            return output
        output = output.clone()
        output[0, -1, 0] = math.nan
        return output

    trainer.model.get_input_embeddings().register_forward_hook(hook)


def plant_overflow(trainer: Any) -> None:
    """Makes gradients overflow while the loss scale is above `OVERFLOWS_ABOVE`."""
    first = next(parameter for parameter in trainer.model.parameters() if parameter.requires_grad)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        overflows = trainer.accelerator.scaler.get_scale() > OVERFLOWS_ABOVE
        return torch.full_like(gradient, math.inf) if overflows else gradient

    first.register_hook(hook)


@dataclass(frozen=True)
class Curve:
    """A comparison of stock and safe.

    Attributes:
        name: Its name in the results.
        title: What is trained, for the page.
        task: `"text"`, `"image"` or `"long"`.
        method: `"grpo"` or `"sft"`.
        precision: `"bf16"`, `"fp16"` or `"fp32"`, the flag of the config.
        weights: The dtype of the loaded weights.
        lora: The rank of adapters and their `lora_alpha`; `None` for full fine-tuning.
        packed: Whether the base is quantised to 4 bits.
        vllm: Whether completions are sampled by vLLM.
        rate: The learning rate.
        steps: The optimizer steps.
        changes: Other settings of TRL's config.
        plant: Plants a fault into a trainer.
        forbid_markers: Whether the sampler is told never to sample a marker token, such as that of an image.
        syncs: How often the weights are sent to vLLM in each step.
        sides: Who trains.
    """

    name: str
    title: str
    task: str = "text"
    method: str = "grpo"
    precision: str = "bf16"
    weights: str = "float32"
    lora: tuple[int, int] | None = None
    packed: bool = False
    vllm: bool = False
    rate: float = 2e-5
    steps: int = 60
    changes: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[Any], None] | None = None
    forbid_markers: bool = False
    syncs: int = 1
    sides: tuple[str, ...] = SIDES


def _reference(name: str, title: str, **changes: Any) -> Curve:
    return Curve(name, title, precision="fp32", sides=("stock",), **changes)


FULL_SFT = {"method": "sft", "rate": 1e-5, "steps": 100}
ADAPTERS = {"method": "sft", "rate": 1e-5, "steps": 600, "lora": (16, 32)}
IMAGES = {"task": "image", "rate": 5e-5}
LONG = {"task": "long", "rate": 1e-3, "steps": 40}
FP16 = {"precision": "fp16", "changes": {"optim": "adamw_torch_fused"}}
CURVES = {
    curve.name: curve
    for curve in (
        _reference("reference-text", "reference: GRPO, text"),
        _reference("reference-image", "reference: GRPO, images", **IMAGES),
        _reference("reference-long", "reference: GRPO, long answers", **LONG),
        _reference("reference-sft", "reference: SFT, text", **FULL_SFT),
        _reference("reference-lora", "reference: SFT, text, LoRA", **ADAPTERS),
        Curve("image", "image prompts through vLLM", vllm=True, **IMAGES),
        Curve("image-markers", "image prompts, marker tokens forbidden", vllm=True, forbid_markers=True, **IMAGES),
        Curve("top-p", "`top_p=0.9` through vLLM", vllm=True, changes={"top_p": 0.9}),
        Curve("top-k", "`top_k=20` through vLLM", vllm=True, changes={"top_k": 20}),
        Curve("top-k-long", "`top_k=20`, answers of 48 tokens", vllm=True, changes={"top_k": 20}, **LONG),
        Curve("fp16-vllm", "`fp16=True` with vLLM", precision="fp16", vllm=True),
        Curve("4-bit", "4-bit LoRA, learning rate 1e-5", packed=True, weights="bfloat16", **ADAPTERS),
        Curve("syncs", "LoRA on a bf16 base, 2,000 syncs", weights="bfloat16", vllm=True, lora=(16, 32), rate=1e-4,
              steps=200, syncs=10),
        Curve("nan-grpo", "a NaN in one batch, GRPO", plant=plant_nan),
        Curve("nan-sft", "a NaN in one batch, SFT", plant=plant_nan, **FULL_SFT),
        Curve("overflow", "fp16, fused AdamW, early overflows", plant=plant_overflow, **FP16),
        Curve("pure-bf16", "full fine-tuning, bf16 weights", weights="bfloat16", **FULL_SFT),
        Curve("fp32-masters", "full fine-tuning, fp32 weights", **FULL_SFT),
    )
}  # fmt: skip


def versions() -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def build(curve: Curve, side: str, seed: int, folder: Path, **changes: Any) -> Any:
    """Builds the trainer of a run.

    Args:
        curve: What is trained.
        side: `"stock"` or `"safe"`.
        seed: The seed.
        folder: The warmed-up model.
        **changes: Changed settings of the config.
    """
    loading: dict[str, Any] = {"dtype": curve.weights}
    if curve.packed:
        loading["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    common: dict[str, Any] = {
        "output_dir": str(folder.parent / "out"), "use_cpu": True, "seed": seed, "max_steps": curve.steps,
        "bf16": FLAGS[curve.precision] == "bf16", "fp16": FLAGS[curve.precision] == "fp16", "logging_steps": 1,
        "learning_rate": curve.rate, "lr_scheduler_type": "linear", "adam_beta2": 0.95, "report_to": [],
        "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True, "model_init_kwargs": loading,
    }  # fmt: skip
    if curve.method == "grpo":
        common |= {
            "per_device_train_batch_size": 32, "num_generations": 8, "beta": 0.0, "temperature": 1.0,
            "max_completion_length": curve_tasks.LENGTH[curve.task],
        }  # fmt: skip
        rewards = {"reward_funcs": curve_tasks.rewards(curve.task)}
        names = ("GRPOTrainer", "GRPOConfig")
    else:
        common |= {"per_device_train_batch_size": 16, "completion_only_loss": True, "max_length": None}
        rewards, names = {}, ("SFTTrainer", "SFTConfig")
    if curve.forbid_markers:
        markers = marker_ids(AutoTokenizer.from_pretrained(folder))
        common["generation_kwargs"] = {"logit_bias": dict.fromkeys(markers, -100.0)}
    if curve.vllm:
        import engines  # it sets vLLM's environment

        common |= {key: value for key, value in engines.VLLM.items() if key != "max_completion_length"}
        engines.end_engines()
    reset_accelerate()
    torch.manual_seed(seed)
    trainer_class = getattr(trl, names[0]) if side == "stock" else getattr(safe_trainers, f"Safe{names[0]}")
    trainer_class = fp16_on_cpu(trainer_class) if curve.precision == "fp16" else trainer_class
    adapter = {}
    if curve.lora is not None:
        rank, alpha = curve.lora
        adapter["peft_config"] = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    trainer = trainer_class(
        model=str(folder), args=getattr(trl, names[1])(**{**common, **curve.changes, **changes}),
        train_dataset=curve_tasks.data(curve.task, curve.method, seed), **rewards, **adapter,
    )  # fmt: skip
    if curve.vllm and side == "stock":
        engines.reload_in_sync(trainer.vllm_generation)
    if curve.plant is not None:
        curve.plant(trainer)
    if curve.syncs > 1:
        trainer.add_callback(SyncsAgain(trainer, curve.syncs - 1))
    return trainer


class SyncsAgain(TrainerCallback):
    """Sends the weights to vLLM a few times more after each step, because steps take longer than syncs."""

    def __init__(self, trainer: Any, times: int) -> None:
        self._trainer, self._times = trainer, times

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for _ in range(self._times):
            self._trainer.vllm_generation.sync_weights()


class Recorder(TrainerCallback):
    """Scores the model before the run and at regular steps, and records the loss scale after each step."""

    def __init__(self, trainer: Any, task: str) -> None:
        self._trainer, self._task = trainer, task
        self._every = max(1, trainer.args.max_steps // POINTS)
        self.scores: list[tuple[int, float]] = []
        self.scales: list[float] = []

    def _score(self, step: int) -> None:
        processor = self._trainer.processing_class
        with torch.random.fork_rng(devices=[]):
            self.scores.append((step, curve_tasks.score(self._trainer.model, processor, self._task)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._score(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None:
            self.scales.append(scaler.get_scale())
        if state.global_step % self._every == 0 or state.global_step == args.max_steps:
            self._score(state.global_step)


LOGGED = {
    "loss": "loss", "reward": "reward", "grad_norm": "grad_norm", "rate": "learning_rate",
    "mismatch": f"{METRIC}/mean", "ratio": "sampling/importance_sampling_ratio/mean",
}  # fmt: skip


def run(curve: Curve, side: str, seed: int, root: Path, **changes: Any) -> dict[str, Any]:
    """Trains once.

    Args:
        curve: What is trained.
        side: `"stock"` or `"safe"`.
        seed: The seed.
        root: Where the warmed-up models are.
        **changes: Changed settings of the config.

    Returns:
        The row of the results: the scores by step, what was logged, and the error that ended the run, if any.
    """
    folder = curve_tasks.make_model(curve.task, seed, root)
    row: dict[str, Any] = {"curve": curve.name, "side": side, "seed": seed, "steps": curve.steps}
    started, used = time.perf_counter(), time.process_time()
    trainer = recorder = None
    try:
        trainer = build(curve, side, seed, folder, **changes)
        row["steps"] = trainer.args.max_steps
        recorder = Recorder(trainer, curve.task)
        trainer.add_callback(recorder)
        trainer.train()
    except Exception as error:  # what ends a run is the result
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        row["ended_at"] = trainer.state.global_step if trainer is not None else 0
    row |= {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}
    if trainer is not None and recorder is not None:
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        row |= {name: [e[key] for e in log] for name, key in LOGGED.items() if log and key in log[0]}
        row |= {"scores": recorder.scores} | ({"scales": recorder.scales} if recorder.scales else {})
        weights = [parameter for parameter in trainer.model.parameters() if parameter.is_floating_point()]
        row["finite"] = all(bool(parameter.isfinite().all()) for parameter in weights)
        if curve.vllm:
            row["engine"] = str(trainer.vllm_generation.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        if curve.lora is not None and not curve.packed and "error" not in row:
            row |= saved_adapters(curve, trainer, folder)
    return {key: rounded(value) for key, value in row.items()}


def saved_adapters(curve: Curve, trainer: Any, folder: Path) -> dict[str, Any]:
    """Compares the base with the loaded one, and scores the saved adapters on the base that was loaded."""
    base, _ = curve_tasks.load(curve.task, folder, getattr(torch, curve.weights))
    original = dict(base.named_parameters())
    changed = count = 0
    for name, parameter in trainer.model.get_base_model().named_parameters():
        if "lora_" not in name:
            changed += int((parameter != original[name.replace(".base_layer.", ".")]).sum())
            count += parameter.numel()
    with tempfile.TemporaryDirectory() as saved:
        trainer.save_model(saved)
        model = PeftModel.from_pretrained(base, saved)
        return {
            "base_changed": changed / count,
            "saved_score": curve_tasks.score(model, trainer.processing_class, curve.task),
        }


def rounded(value: Any) -> Any:
    """Rounds the floats in a result to four digits; what is not finite becomes its name."""
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def heading() -> dict[str, Any]:
    """Returns what is the same for all runs of this machine."""
    return {
        "command": "benchmarks/curves.py",
        "machine": f"one thread of {machine()}",
        "seeds": SEEDS,
        "curves": {
            curve.name: {
                "title": curve.title, "task": curve.task, "method": curve.method, "precision": curve.precision,
                "weights": curve.weights, "lora": curve.lora, "packed": curve.packed, "vllm": curve.vllm,
                "rate": curve.rate, "steps": curve.steps, "syncs": curve.syncs, "changes": curve.changes,
                "sides": curve.sides,
                "forbid_markers": curve.forbid_markers,
                "plant": curve.plant.__doc__ if curve.plant else None,
            }
            for curve in CURVES.values()
        },
    }  # fmt: skip


def read() -> list[dict[str, Any]]:
    """Returns the committed runs."""
    lines = RESULT.read_text(encoding="utf-8").splitlines()[1:] if RESULT.is_file() else []
    return [json.loads(line) for line in lines]


def write(rows: list[dict[str, Any]]) -> None:
    """Writes heading and runs, in the order of the curves."""
    order = list(CURVES)
    rows = sorted(rows, key=lambda row: (order.index(row["curve"]), row["seed"], SIDES.index(row["side"])))
    text = "".join(json.dumps(line) + "\n" for line in [heading(), *rows])
    scratch = RESULT.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(RESULT)


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """Returns what identifies a run."""
    return row["curve"], row["side"], row["seed"]


def run_curve(name: str, seeds: list[int], again: bool, root: Path) -> None:
    """Runs what is missing of a curve, and adds each run to the results."""
    torch.set_num_threads(1)
    curve = CURVES[name]
    if curve.vllm:
        import engines

        os.environ["MASTER_PORT"] = str(engines.free_port())
    for seed in seeds:
        for side in curve.sides:
            if not again and (name, side, seed) in map(key_of, read()):
                continue
            row = run(curve, side, seed, root) | {"versions": versions()}
            write([*(other for other in read() if key_of(other) != key_of(row)), row])
            final = row.get("error") or row["scores"][-1][1]
            print(f"{name} {side} {seed}: {final} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
    if curve.vllm:
        engines.end_engines()


def main() -> int:
    """Runs the requested curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"curves, separated by commas: {', '.join(CURVES)}")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="seeds, separated by commas")
    parser.add_argument("--again", action="store_true", help="run finished runs again")
    parser.add_argument("--models", type=Path, help="keep the warmed-up models here, and use those that are here")
    parser.add_argument("--curve", choices=CURVES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.curve:
        run_curve(options.curve, seeds, options.again, options.models)
        return 0
    names = options.only.split(",") if options.only else list(CURVES)
    unknown = [name for name in names if name not in CURVES]
    if unknown:
        parser.error(f"unknown curves {', '.join(unknown)}; known: {', '.join(CURVES)}")
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        models = options.models or Path(root)
        for name in names:
            command = [sys.executable, __file__, "--curve", name, "--seeds", options.seeds, "--models", str(models)]
            command += ["--again"] * options.again
            failed += subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

"""The measurements of benchmarks/gpu_evidence.py. Each runs in a process of its own, and yields rows of results."""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cost_runs
import quiet  # noqa: F401  (sets the environment)


ROOT = Path(__file__).parent.parent
PRECISIONS = ("bf16", "fp16")
SIDES = ("stock", "safe")


@dataclass(frozen=True)
class Size:
    """The size of a model and of its completions.

    Attributes:
        hidden: Hidden size.
        layers: Number of text layers.
        tokens: Tokens of a completion.
    """

    hidden: int
    layers: int
    tokens: int


@dataclass(frozen=True)
class Form:
    """The size of the measurements.

    Attributes:
        name: `"gpu"`, or `"small"`, which runs on a CPU.
        sizes: Sizes of the models, by section.
        batch: Completions of a step whose time is measured, eight for each prompt.
        steps: Steps of each trainer; the first two are not counted.
        lengths: Lengths of the completions whose mismatch is measured, in tokens.
        cells: The combinations: family, task, weights, precision, kind.
        points: What is timed, by section: family, weights, kind, precision.
        profiled: The points whose phases are measured, too.
    """

    name: str
    sizes: Mapping[str, Size]
    batch: int
    steps: int
    lengths: tuple[int, ...]
    cells: tuple[tuple[str, str, str, str, str], ...]
    points: Mapping[str, tuple[tuple[str, str, str, str], ...]]
    profiled: tuple[tuple[str, str, str, str], ...]

    @property
    def use_cpu(self) -> bool:
        """Whether the measurements run on the CPU."""
        return self.name == "small"


_CELLS = tuple(
    (family, task, weights, flag, kind)
    for family in ("text", "aria")
    for task in ("sft", "grpo")
    for weights, flag, kind in (
        ("fp32", "bf16", "full"),
        ("bf16", "bf16", "lora"),
        ("bf16", "none", "full"),
        ("fp32", "fp16", "full"),
        ("fp16", "fp16", "lora"),
        ("fp16", "fp16", "full"),
        ("bf16", "fp16", "lora"),
        ("fp16", "fp16", "4bit"),
    )
)
_FULL, _FLOAT, _HALF, _FOUR = ("fp32", "full"), ("fp32", "lora"), ("half", "lora"), ("4-bit half", "lora")
FORMS = {
    "gpu": Form(
        name="gpu",
        sizes={
            "cost": Size(2048, 4, 64),
            "images": Size(2048, 4, 64),
            "decode": Size(1024, 12, 64),
            "mismatch": Size(2048, 4, 64),
        },
        batch=32,
        steps=6,
        lengths=(64, 256, 1024),
        cells=_CELLS,
        points={
            "cost": (
                *(("text", *kind, "bf16") for kind in (_FULL, _FLOAT, _HALF, _FOUR)),
                ("text", *_FULL, "fp16"),
                ("text", *_FOUR, "fp16"),
            ),
            "images": tuple(("llava", *kind, "bf16") for kind in (_HALF, _FLOAT, _FOUR, _FULL)),
            "decode": (("text", *_HALF, "bf16"), ("llava", *_HALF, "bf16")),
        },
        profiled=(("text", *_FULL, "bf16"), ("text", *_HALF, "bf16"), ("llava", *_HALF, "bf16")),
    ),
    "small": Form(
        name="small",
        sizes=dict.fromkeys(("cost", "images", "decode", "mismatch"), Size(64, 2, 8)),
        batch=8,
        steps=4,
        lengths=(16, 64),
        cells=(
            ("text", "sft", "fp32", "bf16", "full"),
            ("text", "sft", "fp16", "fp16", "full"),
            ("aria", "grpo", "bf16", "none", "full"),
        ),
        points={
            "cost": (("text", *_FOUR, "fp16"),),
            "images": (("llava", *_HALF, "bf16"),),
            "decode": (("text", *_HALF, "bf16"),),
        },
        profiled=(("llava", *_HALF, "bf16"),),
    ),
}


def measure_tests(form: Form) -> Iterator[dict[str, Any]]:
    """Runs the tests that need a GPU, and counts their results; in the small form only collects them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        more = ["--collect-only"] if form.use_cpu else ["-n", "8", f"--junitxml={report}"]
        run = subprocess.run(
            [*command, *more, "tests/gpu"], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
        )
        if form.use_cpu:
            collected = sum("::" in line for line in run.stdout.splitlines())
            yield {"collected": collected, "status": run.returncode}
            return
        suite = ElementTree.parse(report).getroot().find("testsuite")
        if suite is None:
            raise ValueError(f"pytest wrote no results: {run.stdout[-500:]}")
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        failed = [
            f"{case.attrib['classname']}::{case.attrib['name']}: {found.attrib['message'].strip()[:300]}"
            for case in suite.iter("testcase")
            for found in (*case.findall("failure"), *case.findall("error"))
        ]
        yield {**counts, "failed": failed}


def measure_matrix(form: Form) -> Iterator[dict[str, Any]]:
    """Trains each combination for two steps, stock and safe."""
    for cell in form.cells:
        yield {"cell": list(cell), **{side: _outcome(form, cell, side == "safe") for side in SIDES}}


def _outcome(form: Form, cell: tuple[str, str, str, str, str], safe: bool) -> str:
    """Trains a combination; returns `"trained"`, `"not finite"`, or the first line of the error."""
    import torch
    from cells import reset_autocast
    from policing import reset_accelerate

    family, task, weights, flag, kind = cell
    reset_accelerate()
    gc.collect()
    torch.manual_seed(0)
    point = {
        "family": family,
        "task": task,
        "kind": "lora" if kind == "4bit" else kind,
        "weights": f"4-bit {weights}" if kind == "4bit" else weights,
        "flag": None if flag == "none" else flag,
        "steps": 2,
    }
    try:
        trainer = _construct(form, point, safe)
        trainer.train()
    except Exception as error:  # every error is a result
        reset_autocast()
        return _line(error)
    finite = all(bool(parameter.detach().isfinite().all()) for parameter in trainer.model.parameters())
    return "trained" if finite else "not finite"


def _construct(form: Form, point: Mapping[str, Any], safe: bool, **changes: Any) -> Any:
    """Builds the trainer of a point on the form's device; float16 on a CPU has a stand-in for CUDA's loss scaler."""
    import cells

    from safe_trainers.testing import fp16_on_cpu

    task, arguments = cost_runs.prepared({**point, "use_cpu": form.use_cpu})
    for name, value in changes.items():
        setattr(arguments["args"], name, value)
    chosen: Any = (cells.SAFE if safe else cells.STOCK)[task]
    if form.use_cpu and point.get("flag") == "fp16":
        chosen = fp16_on_cpu(chosen)
    return chosen(**arguments)


def measure_cost(form: Form, section: str = "cost") -> Iterator[dict[str, Any]]:
    """Compares the time of a step and the peak of memory; steps of stock and safe take turns."""
    for chosen in form.points[section]:
        point = _point(form, section, *chosen)
        row = {"point": list(chosen), **_compared(form, point)}
        if chosen in form.profiled:
            steps = cost_runs.profiled({**point, "use_cpu": form.use_cpu})
            row["phases"] = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
        yield row


def measure_images(form: Form) -> Iterator[dict[str, Any]]:
    """Compares time and memory of models with images."""
    yield from measure_cost(form, "images")


def _compared(form: Form, point: Mapping[str, Any]) -> dict[str, Any]:
    """Times and memory of stock and safe; of safe alone where stock cannot train."""
    row: dict[str, Any] = {}
    for side in SIDES:
        try:
            row[side] = _peak(form, point, side == "safe")
        except Exception as error:  # every error is a result
            row[side] = {"error": _line(error)}
    able = [side == "safe" for side in SIDES if "error" not in row[side]]
    if not able:
        return row
    with cost_runs.quiet():
        taken = cost_runs.in_turns({safe: _construct(form, point, safe) for safe in able}, able[0], 1, _clock(form))
    for safe in able:
        row[SIDES[safe]]["seconds"] = statistics.median(taken[safe])
    if len(able) == 2:
        row["ratios"] = [safe / stock for stock, safe in zip(taken[False], taken[True], strict=True)]
    return row


def _line(error: Exception) -> str:
    """The beginning of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _point(form: Form, section: str, family: str, weights: str, kind: str, flag: str) -> dict[str, Any]:
    """Steps of GRPO with eight completions of each prompt."""
    size = form.sizes[section]
    return {
        "family": family,
        "task": "grpo",
        "kind": kind,
        "weights": weights.replace("half", flag),
        "flag": flag,
        "hidden": size.hidden,
        "layers": size.layers,
        "new_tokens": size.tokens,
        "batch": form.batch,
        "generations": 8,
        "steps": form.steps,
    }


def _clock(form: Form) -> Callable[[], float]:
    """Returns the clock of a step: CPU time, or on a GPU the time when its work is done."""
    if form.use_cpu:
        return time.thread_time
    import torch

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def _peak(form: Form, point: Mapping[str, Any], safe: bool) -> dict[str, float]:
    """Returns the peak of memory and the bytes of buffered media of two steps, in bytes."""
    import torch
    from live_bytes import LiveBytes

    from safe_trainers import MEDIA_KEYS

    gc.collect()
    with cost_runs.quiet():
        if form.use_cpu:
            with LiveBytes() as live:
                trainer = _construct(form, {**point, "steps": 2}, safe)
                live.watch((*trainer.model.parameters(), *trainer.model.buffers()))
                trainer.train()
            peak = float(live.peak)
        else:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            trainer = _construct(form, {**point, "steps": 2}, safe)
            trainer.train()
            peak = float(torch.cuda.max_memory_allocated())
    buffered = getattr(trainer, "_buffered_inputs", None) or []
    media = sum(value.nbytes for batch in buffered for key, value in batch.items() if key in MEDIA_KEYS)
    return {"peak": peak, "media": float(media)}


VARIANTS = ("stock", "safe", "compiled")
"""The trainers whose rollouts are compared: `"compiled"` is safe with `compile_decode=True`."""


def measure_decode(form: Form) -> Iterator[dict[str, Any]]:
    """Measures steps of GRPO without and with a compiled forward pass in rollouts, one trainer after the other."""
    for chosen in form.points["decode"]:
        point = _point(form, "decode", *chosen)
        for variant in VARIANTS:
            yield {"point": list(chosen), "variant": variant, **_decoded(form, point, variant)}


def _decoded(form: Form, point: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Trains one variant; returns seconds of the second step, the median of later ones, and the mismatch."""
    from transformers import TrainerCallback

    clock, seconds = _clock(form), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = clock()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(clock() - self.began)

    changes: dict[str, Any] = {"logging_steps": 1, "compile_decode": variant == "compiled"}
    if form.use_cpu:
        changes["generation_kwargs"] = {"min_new_tokens": point["new_tokens"], "compile_config": _compile_on_cpu()}
    gc.collect()
    try:
        trainer = _construct(form, point, variant != "stock", **changes)
        trainer.add_callback(Clock())
        with cost_runs.quiet():
            trainer.train()
    except Exception as error:  # every error is a result
        return {"error": _line(error)}
    name = f"precision/{METRICS[0]}"
    found = [entry[name] for entry in trainer.state.log_history[2:] if name in entry]
    mismatch = {"mismatch": statistics.median(found)} if found else {}
    return {"second": seconds[1], "seconds": statistics.median(seconds[2:]), **mismatch}


def _compile_on_cpu() -> Any:
    """Returns a configuration with which transformers compiles on a CPU, with the kernels of eager PyTorch."""
    from transformers.generation.configuration_utils import CompileConfig

    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


METRICS = ("logp_mismatch_mean", "logp_mismatch_max", "seq_logratio_abs_mean", "logp_mismatch_ulp")


def measure_mismatch(form: Form) -> Iterator[dict[str, Any]]:
    """Measures the mismatch of `generate` and scoring by length and precision, in a LoRA run on a frozen base."""
    for length in form.lengths:
        for flag in PRECISIONS:
            point = {**_point(form, "mismatch", "text", *_HALF, flag), "new_tokens": length, "batch": 8, "steps": 1}
            trainer = _construct(form, point, safe=True)
            trainer.train()
            yield {"precision": flag, "tokens": length, **_metrics(trainer)}
            del trainer
            gc.collect()


def _metrics(trainer: Any) -> dict[str, float]:
    """Returns the metrics of the mismatch in a trainer's first log that has them."""
    for entry in trainer.state.log_history:
        found = {name: entry[f"precision/{name}"] for name in METRICS if f"precision/{name}" in entry}
        if found:
            return found
    raise ValueError("the run logged no metric of the mismatch")


def measure_vllm(form: Form) -> Iterator[dict[str, Any]]:
    """Measures the mismatch of vLLM in the trainer's process, stock and safe, by precision."""
    if form.use_cpu or find_spec("vllm") is None:
        yield {"not_run": "vLLM on a GPU needs one" if form.use_cpu else "vLLM is not installed"}
        return
    for flag in PRECISIONS:
        for side in SIDES:
            yield {"precision": flag, "trainer": side, **_vllm_run(form, flag, side == "safe")}


def _vllm_run(form: Form, flag: str, safe: bool) -> dict[str, Any]:
    """Trains one step with vLLM, and returns TRL's mismatch in nats, or the error."""
    from vllm_runs import METRIC

    point = {**_point(form, "mismatch", "text", *_FULL, flag), "steps": 1}
    changes = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2,
               "vllm_max_model_length": 512}  # fmt: skip
    try:
        trainer = _construct(form, point, safe, **changes)
        trainer.train()
    except Exception as error:  # every error is a result
        return {"error": _line(error)}
    entry = next(entry for entry in trainer.state.log_history if f"{METRIC}/mean" in entry)
    return {"mean": entry[f"{METRIC}/mean"], "max": entry[f"{METRIC}/max"]}


def measure_skipped(form: Form) -> Iterator[dict[str, Any]]:
    """Trains in float16 with fused AdamW from a scale that overflows, and compares its steps with the schedule."""
    point = {"family": "text", "task": "sft", "kind": "full", "weights": "fp32", "flag": "fp16", "steps": 8}
    for side in SIDES:
        trainer = _construct(form, point, side == "safe", optim="adamw_torch_fused", lr_scheduler_type="linear")
        scaler = trainer.accelerator.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**24})
        trainer.train()
        state = next(iter(trainer.optimizer.state.values()), {})
        scheduler = trainer.lr_scheduler
        yield {
            "trainer": side,
            "steps": trainer.state.global_step,
            "taken": int(state["step"]) if "step" in state else 0,
            "schedule": int(getattr(scheduler, "scheduler", scheduler).last_epoch),
        }


SECTIONS: dict[str, tuple[Callable[[Form], Iterator[dict[str, Any]]], int]] = {
    "tests": (measure_tests, 110),
    "matrix": (measure_matrix, 110),
    "skipped": (measure_skipped, 30),
    "cost": (measure_cost, 140),
    "images": (measure_images, 130),
    "decode": (measure_decode, 90),
    "mismatch": (measure_mismatch, 60),
    "vllm": (measure_vllm, 90),
}
"""The measurements, with the limit of each in seconds, in the order in which they run."""

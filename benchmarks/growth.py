"""Measures how the work of the package grows with the tensors of a model (to 1e5) and the images of a batch (to 1e3).

Measures the Python code that runs once for each tensor: the inventory, the policy, preparing weights, guarding
adapters and the report. The model is a vision-language model with many layers, half of its tensors in the tower, and
LoRA in the text model. It is on the meta device, except for the report of a real trainer on the CPU with layers of
width 8. Casts of media are timed with images of 336 x 336 pixels.

Times are CPU seconds, the median of the repetitions, after one that is not counted. `exponent` is the slope of
log(time) over log(size), and `final` that over the sizes from `FINAL` of the largest on; `constant` and `fixed` are
fitted to time = fixed + constant * size by relative error. Memory is the peak of Python's allocations (tracemalloc),
or of torch's for media. `make bench-growth` prints the table and writes `benchmarks/results/growth.json`.
"""

import argparse
import gc
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

import datasets
import numpy as np
import torch
import transformers
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from provenance import measured_with
from rich.console import Console
from rich.table import Table

from safe_trainers import SafeSFTConfig, SafeSFTTrainer, plan_boundaries, resolve, take_inventory, tiny
from safe_trainers.boundaries.placement import place
from safe_trainers.core.device import Device
from safe_trainers.media.caster import MEDIA_KEYS, MediaCaster
from safe_trainers.model.inventory import CountContext, count_groups
from safe_trainers.policy.resolve import Requested
from safe_trainers.report.render import to_json
from safe_trainers.report.run_report import make_report, plan
from safe_trainers.tiny.shapes import draw_images
from safe_trainers.trainer.from_config import facts_of
from safe_trainers.trainer.trl_patches import construction
from safe_trainers.weights import fp32_modules
from safe_trainers.weights.prepare import prepare_weights
from safe_trainers.weights.trainables import TrainableContext


RESULT = Path(__file__).parent / "results" / "growth.json"
TENSORS = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
IMAGES = (100, 200, 400, 700, 1_000)
"""Batches above 32 MB, for which glibc allocates new pages; smaller ones may reuse pages."""
FINAL = 0.25
"""Share of the largest size from which on the final exponent is fitted.

A part of the work that grows faster shows at the largest sizes first. The exponent over all sizes also has the step in
between at which the objects of a model leave the CPU's caches.
"""
CONTROL = "named_parameters of torch"
"""A walk over a model without code of this package, for comparison."""
CPU = Device("cpu")
FLAGS = Requested(bf16=True)


def deep_model(tensors: int, device: str = "meta") -> Any:
    """Builds a bfloat16 LLaVA with LoRA on the text model's queries and values.

    Args:
        tensors: Approximate number of tensors: a text layer has 9 and 4 of adapters, a layer of the tower 16.
        device: The device of the tensors.
    """
    config = tiny.build_model("llava").config
    for part in (config.text_config, config.vision_config):
        part.num_hidden_layers = max(1, round(tensors / 29))
        part.hidden_size = part.intermediate_size = 8
        part.num_attention_heads = 1
    config.text_config.num_key_value_heads, config.text_config.head_dim = 1, 8
    with torch.device(device):
        model = transformers.LlavaForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=1, target_modules=r".*language_model.*\.(q_proj|v_proj)"))


def remove_boundaries(model: Any) -> None:
    """Removes the boundary hooks."""
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()


def guard_adapters(model: Any) -> None:
    """Runs the patches of a construction on a quantised model with adapters."""
    with construction(SafeSFTTrainer, model, lambda head: False) as guard:
        guard.release(model)


def plan_norms(model: Any) -> Any:
    """Plans the casts of `fp32_modules` for every norm of a model."""
    return fp32_modules.decide(model, fp32_modules.find_modules(model, ["*norm*"]))


def parts_of(model: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yields each measured part: its name, the work, and a function that undoes it."""
    inventory = take_inventory(model)
    policy = resolve(FLAGS, CPU, facts_of(inventory, live=False))
    boundaries = plan_boundaries(policy, inventory)

    def nothing() -> None:
        pass

    yield "inventory", lambda: take_inventory(model), nothing
    yield "policy", lambda: resolve(FLAGS, CPU, facts_of(inventory, live=False)), nothing
    yield "trainable weights", lambda: prepare_weights(model, inventory, policy, TrainableContext(2e-5)), nothing
    yield "fp32_modules, all norms", lambda: plan_norms(model), nothing
    yield "boundaries", lambda: place(boundaries, model), lambda: remove_boundaries(model)
    model.is_loaded_in_4bit = True
    yield "adapter guard", lambda: guard_adapters(model), nothing
    del model.is_loaded_in_4bit
    yield "module groups", lambda: count_groups(model, CountContext(lambda part, parameter, held: held)), nothing


def report_of(tensors: int, folder: str) -> tuple[int, Callable[[], Any]]:
    """Builds a trainer on the CPU; returns its number of tensors, and a function that makes its report as JSON."""
    arguments = SafeSFTConfig(folder, use_cpu=True, bf16=True, max_length=None, report_to="none", disable_tqdm=True)
    model = deep_model(tensors, "cpu")
    trainer = SafeSFTTrainer(
        model=model, args=arguments, train_dataset=tiny.sft_dataset(4), processing_class=tiny.build_processor("llava")
    )
    return sum(1 for _ in model.parameters()), lambda: to_json(make_report(trainer._run, plan(trainer._run)))


def caster(dtype: torch.dtype = torch.bfloat16) -> tuple[MediaCaster, dict[str, Any]]:
    """Builds a caster for a tiny LLaVA that has decided on a batch, and returns it with the batch."""
    model = tiny.build_model("llava", dtype=dtype)
    processor = tiny.build_processor("llava")
    images, _ = draw_images(2)
    batch = dict(processor(images=images, text=["<image>"] * 2, return_tensors="pt"))
    made = MediaCaster(MEDIA_KEYS, [model], [lambda: torch.autocast("cpu", torch.bfloat16)])
    made.decide(batch)
    if made.decisions["pixel_values"].dtype != str(dtype)[6:]:
        raise RuntimeError(made.decisions["pixel_values"].reason)
    return made, batch


def media_of(images: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields each part that is measured on a number of images: its name and the work."""
    decided, batch = caster()
    pixels = torch.rand(images, 3, 336, 336)  # (B, C, H, W)
    yield "cast of one tensor", lambda: decided.cast("pixel_values", pixels)
    rows = list(pixels)
    yield "cast of a list of tensors", lambda: decided.cast("pixel_values", rows)
    small = {name: value[:1].repeat(images, *[1] * (value.dim() - 1)) for name, value in batch.items()}

    def decide() -> MediaCaster:
        fresh = MediaCaster(MEDIA_KEYS, decided._models, decided._contexts)
        fresh.decide(small)
        return fresh

    yield "decision on the first batch, 32 x 32", decide


def cpu_seconds(work: Callable[[], Any], undo: Callable[[], Any], repetitions: int) -> list[float]:
    """Returns the CPU seconds of each repetition, after one that warms up caches."""
    spent = []
    for repetition in range(repetitions + 1):
        gc.collect()
        started = time.process_time()
        work()
        if repetition:
            spent.append(time.process_time() - started)
        undo()
    return spent


def python_peak(work: Callable[[], Any], undo: Callable[[], Any]) -> int:
    """Returns the peak of Python's allocations during the work, without those before it, in bytes."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    work()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    undo()
    return peak


def torch_peak(work: Callable[[], Any]) -> int:
    """Returns the peak memory of the tensors that the work creates, in bytes."""
    with LiveBytes() as live:
        kept = work()
    del kept
    return live.peak


def fit(sizes: list[int], values: list[float]) -> dict[str, float]:
    """Fits the exponents of growth, over all and over the largest sizes, and a line by relative error."""
    constant, fixed = np.polyfit(sizes, values, 1, w=1 / np.asarray(values))
    large = [index for index, size in enumerate(sizes) if size >= FINAL * sizes[-1]]
    if len(large) < 3:
        raise ValueError(f"fewer than three of the sizes {sizes} are at least {FINAL} times the largest")
    return {
        "exponent": round(slope(sizes, values), 3),
        "final": round(slope([sizes[index] for index in large], [values[index] for index in large]), 3),
        "constant": float(constant),
        "fixed": float(fixed),
    }


def slope(sizes: list[int], values: list[float]) -> float:
    """The slope of log(value) over log(size)."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the measurements of one part at each size, with their fits."""
    sizes = [row["size"] for row in rows]
    return {
        "sizes": sizes,
        "seconds": [statistics.median(row["seconds"]) for row in rows],
        "spread": [[min(row["seconds"]), max(row["seconds"])] for row in rows],
        "peak_bytes": [row["peak_bytes"] for row in rows],
        "time": fit(sizes, [statistics.median(row["seconds"]) for row in rows]),
        "memory": fit(sizes, [max(row["peak_bytes"], 1) for row in rows]),
    }


def measure_tensors(sizes: list[int], repetitions: int) -> dict[str, Any]:
    """Measures every part that grows with the tensors of a model."""
    found: dict[str, list[dict[str, Any]]] = {}

    def nothing() -> None:
        pass

    for wanted in sizes:
        model = deep_model(wanted)
        size = sum(1 for _ in model.parameters())
        works = itertools.chain(
            parts_of(model), [(CONTROL, lambda model=model: dict(model.named_parameters()), nothing)]
        )
        for name, work, undo in works:
            seconds = cpu_seconds(work, undo, repetitions)
            found.setdefault(name, []).append(
                {"size": size, "seconds": seconds, "peak_bytes": python_peak(work, undo)}
            )
            print(f"{size:>7} tensors  {name:<28} {statistics.median(seconds):9.4f} s", flush=True)
        del model, works
        with tempfile.TemporaryDirectory() as folder:
            size, work = report_of(wanted, folder)
            seconds = cpu_seconds(work, nothing, repetitions)
            row = {"size": size, "seconds": seconds, "peak_bytes": python_peak(work, nothing)}
            found.setdefault("report", []).append(row)
            print(f"{size:>7} tensors  {'report':<28} {statistics.median(seconds):9.4f} s", flush=True)
        del work
        gc.collect()
    return {name: summary(rows) for name, rows in found.items()}


def measure_images(sizes: list[int], repetitions: int) -> dict[str, Any]:
    """Measures every part that grows with the images of a batch."""
    found: dict[str, list[dict[str, Any]]] = {}

    def nothing() -> None:
        pass

    for size in sizes:
        for name, work in media_of(size):
            seconds = cpu_seconds(work, nothing, repetitions)
            found.setdefault(name, []).append({"size": size, "seconds": seconds, "peak_bytes": torch_peak(work)})
            print(f"{size:>7} images   {name:<40} {statistics.median(seconds):9.4f} s", flush=True)
    return {name: summary(rows) for name, rows in found.items()}


def in_a_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a new process, whose allocator has no free pages from earlier work."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    """Measures, prints the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tensors", type=int, nargs="+", default=list(TENSORS))
    parser.add_argument("--images", type=int, nargs="+", default=list(IMAGES))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    started = time.process_time()
    measured = measure_tensors(options.tensors, options.repetitions)
    content = {
        **measured_with(" ".join(["python benchmarks/growth.py", *sys.argv[1:]]), "torch", "trl", "transformers"),
        "repetitions": options.repetitions,
        "tensors": measured,
        "control": {CONTROL: measured.pop(CONTROL)},
        "images": in_a_new_process(measure_images, options.images, options.repetitions),
    }
    used = time.process_time() - started + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    content["cpu_minutes"] = round(used / 60, 1)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    table = Table(
        "part", "largest", "seconds there", "us each", "exponent", "final", "bytes each", "exponent of memory"
    )
    for unit, key in (("tensors", "tensors"), ("tensors", "control"), ("images", "images")):
        for name, part in content[key].items():
            table.add_row(
                name, f"{part['sizes'][-1]} {unit}", f"{part['seconds'][-1]:.4f}",
                f"{part['time']['constant'] * 1e6:.2f}", f"{part['time']['exponent']:.2f}",
                f"{part['time']['final']:.2f}", f"{part['memory']['constant']:.0f}",
                f"{part['memory']['exponent']:.2f}",
            )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

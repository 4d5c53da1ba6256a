"""How the package's own work grows: with the tensors of a model, to 1e5, and with the images of a batch, to 1e3.

Python that runs once for each tensor: counting dtypes, deciding, preparing, guarding adapters, reporting. A
vision-language model gets as many layers as it takes, half of them in its tower, with LoRA in the text model; on the
meta device, but for the report, which is a real trainer's on the CPU with layers that are 8 wide. Casting media is
timed on pictures of 336 x 336, as CLIP's.

CPU seconds, the median of the repetitions, after one that is not counted. `exponent` is the slope of log(time) over
log(size); `constant` and `fixed` come from time = fixed + constant * size, fitted to relative errors. Memory is the
peak of what Python allocates (tracemalloc), for media of what torch does. `make bench-growth` prints the table and
writes `benchmarks/results/growth.json`.
"""

import argparse
import gc
import json
import os
import platform
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
import trl
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table

from safe_trainers import SafeSFTConfig, SafeSFTTrainer, fp32_modules, resolve, settle, take_census, tiny
from safe_trainers.adapters import Circumstances as Prepared
from safe_trainers.captures import construction
from safe_trainers.declared import model_of
from safe_trainers.device import Device
from safe_trainers.inventory import Circumstances, take_inventory
from safe_trainers.media import MEDIA_KEYS, MediaCaster
from safe_trainers.policy import Flags
from safe_trainers.precision_report import make_report, plan
from safe_trainers.preparation import prepare
from safe_trainers.render import to_json
from safe_trainers.settlement import apply
from safe_trainers.tiny.shapes import pictures


RESULT = Path(__file__).parent / "results" / "growth.json"
TENSORS = (1_000, 3_000, 10_000, 30_000, 100_000)
IMAGES = (100, 200, 400, 700, 1_000)
"""From where on a cast takes fresh pages from the system: below 32 MB glibc's allocator may hand out used ones."""
CPU = Device("cpu")
FLAGS = Flags(bf16=True)


def deep_model(tensors: int, device: str = "meta") -> Any:
    """A LLaVA with about so many parameters, bfloat16, LoRA on the text model's queries and values.

    Args:
        tensors: How many: a text layer has 9 and 4 of its adapters, a layer of the tower 16.
        device: Where they are.
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


def unsettle(model: Any) -> None:
    """Takes the boundaries of leaves away again."""
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()


def guard_adapters(model: Any) -> None:
    """What construction does around TRL's, for a live quantised model with adapters."""
    with construction(SafeSFTTrainer, model, lambda head: False) as guard:
        guard.release(model)


def wide(model: Any) -> Any:
    """What `fp32_modules` does before anything is changed, for every norm of a model."""
    return fp32_modules.decide(model, fp32_modules.find_modules(model, ["*norm*"]))


def parts_of(model: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """What is measured on a model: its name, the work, and what undoes it."""
    census = take_census(model)
    policy = resolve(FLAGS, CPU, model_of(census, live=False))
    settlement = settle(policy, census)

    def nothing() -> None:
        pass

    yield "census", lambda: take_census(model), nothing
    yield "policy", lambda: resolve(FLAGS, CPU, model_of(census, live=False)), nothing
    yield "decisions on trainables", lambda: prepare(model, census, policy, Prepared(2e-5)), nothing
    yield "fp32_modules, all norms", lambda: wide(model), nothing
    yield "boundaries", lambda: apply(settlement, model), lambda: unsettle(model)
    model.is_loaded_in_4bit = True
    yield "adapter guard", lambda: guard_adapters(model), nothing
    del model.is_loaded_in_4bit
    yield "inventory", lambda: take_inventory(model, Circumstances(lambda part, parameter, held: held)), nothing


def report_of(tensors: int, folder: str) -> tuple[int, Callable[[], Any]]:
    """The number of tensors of a real trainer on the CPU, and its report: counted, made and written as JSON."""
    arguments = SafeSFTConfig(folder, use_cpu=True, bf16=True, max_length=None, report_to="none", disable_tqdm=True)
    model = deep_model(tensors, "cpu")
    trainer = SafeSFTTrainer(
        model=model, args=arguments, train_dataset=tiny.sft_dataset(4), processing_class=tiny.build_processor("llava")
    )
    return sum(1 for _ in model.parameters()), lambda: to_json(make_report(trainer, plan(trainer)))


def caster(dtype: torch.dtype = torch.bfloat16) -> tuple[MediaCaster, dict[str, Any]]:
    """A caster that has decided, on a tiny LLaVA with a half tower, and the batch that it decided on."""
    model = tiny.build_model("llava", dtype=dtype)
    processor = tiny.build_processor("llava")
    images, _ = pictures(2)
    batch = dict(processor(images=images, text=["<image>"] * 2, return_tensors="pt"))
    made = MediaCaster(MEDIA_KEYS, [model], [lambda: torch.autocast("cpu", torch.bfloat16)])
    made.decide(batch)
    if made.decisions["pixel_values"].dtype != str(dtype)[6:]:
        raise RuntimeError(made.decisions["pixel_values"].reason)
    return made, batch


def media_of(images: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured on so many images."""
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

    yield "decision on a first batch, of 32 x 32", decide


def cpu_seconds(work: Callable[[], Any], undo: Callable[[], Any], repetitions: int) -> list[float]:
    """CPU seconds of each repetition, after one that fills caches."""
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
    """The most bytes that Python holds during the work beyond what it held before."""
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
    """The most bytes of tensors that the work makes and are alive at one time."""
    with LiveBytes() as live:
        kept = work()
    del kept
    return live.peak


def fit(sizes: list[int], values: list[float]) -> dict[str, float]:
    """The exponent of growth, and the line through the values that is nearest in relative error."""
    exponent = np.polyfit(np.log(sizes), np.log(values), 1)[0]
    constant, fixed = np.polyfit(sizes, values, 1, w=1 / np.asarray(values))
    return {"exponent": round(float(exponent), 3), "constant": float(constant), "fixed": float(fixed)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured of one part at each size, with its fits."""
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
    """Every part that grows with the tensors of a model."""
    found: dict[str, list[dict[str, Any]]] = {}

    def nothing() -> None:
        pass

    for wanted in sizes:
        model = deep_model(wanted)
        size = sum(1 for _ in model.parameters())
        works = parts_of(model)
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
    """Every part that grows with the images of a batch."""
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
    """What a function gives in a process of its own, whose allocator holds no pages of what came before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    """Measures, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tensors", type=int, nargs="+", default=list(TENSORS))
    parser.add_argument("--images", type=int, nargs="+", default=list(IMAGES))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    started = time.process_time()
    content = {
        "command": " ".join(["python benchmarks/growth.py", *sys.argv[1:]]),
        "versions": {"torch": torch.__version__, "trl": trl.__version__, "transformers": transformers.__version__},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "repetitions": options.repetitions,
        "tensors": measure_tensors(options.tensors, options.repetitions),
        "images": in_a_new_process(measure_images, options.images, options.repetitions),
    }
    used = time.process_time() - started + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    content["cpu_minutes"] = round(used / 60, 1)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    table = Table("part", "largest", "seconds there", "us each", "exponent", "bytes each", "exponent of memory")
    for unit in ("tensors", "images"):
        for name, part in content[unit].items():
            table.add_row(
                name, f"{part['sizes'][-1]} {unit}", f"{part['seconds'][-1]:.4f}",
                f"{part['time']['constant'] * 1e6:.2f}", f"{part['time']['exponent']:.2f}",
                f"{part['memory']['constant']:.0f}", f"{part['memory']['exponent']:.2f}",
            )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

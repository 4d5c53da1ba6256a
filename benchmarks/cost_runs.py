"""Builds, times and counts single runs for benchmarks/cost.py."""

import contextlib
import functools
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


Point = dict[str, Any]
CONSTRUCTIONS = 5
"""Constructions of each trainer for one ratio. The fastest counts, since disturbances only slow them down."""


MOVING = {"_move", "_prepare_input", "send_to_device"}
"""Functions of this package, transformers and accelerate that move batches to the device."""


class Moved:
    """Counts the bytes of batches that are moved to a device in the block; each tensor counts once.

    On a CPU nothing is copied, but the calls of `Tensor.to` are counted.
    """

    def __new__(cls) -> Any:
        import torch
        from torch.overrides import TorchFunctionMode

        class Mode(TorchFunctionMode):
            def __init__(self) -> None:
                super().__init__()
                self.bytes = 0
                self._there: dict[int, Any] = {}

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                result = func(*args, **kwargs)
                named = any(isinstance(value, (str, torch.device)) for value in (*args[1:2], kwargs.get("device")))
                if func is torch.Tensor.to and named and sys._getframe(1).f_code.co_name in MOVING:
                    storage = args[0].untyped_storage()
                    if self._there.get(storage._cdata) is None:
                        self.bytes += args[0].nbytes
                    for tensor in (args[0], result):
                        self._there[tensor.untyped_storage()._cdata] = tensor  # alive, so that its key stays unique
                return result

        return Mode()


def prepared(point: Point) -> tuple[str, dict[str, Any]]:
    """Returns the task of a point, and the arguments of its trainer."""
    import cells
    from peft import LoraConfig

    point = {"steps_per_generation": 1, "images": 1, "tokens": None, "hidden": None, "batch": 4, **point}
    weights = point.get("weights", "bf16")
    cell = cells.Cell(
        point["family"],
        point["task"],
        weights.removeprefix("4-bit "),
        point.get("flag", "bf16"),
        lora="lora" in point["kind"],
    )
    changes: dict[str, Any] = {
        "steps": point["steps"],
        "logging_steps": point["steps"],
        "use_cpu": point.get("use_cpu", True),
    }
    if "new_tokens" in point:
        changes["max_completion_length"] = point["new_tokens"]
        changes["generation_kwargs"] = {"min_new_tokens": point["new_tokens"]}
        changes["num_generations"] = point.get("generations", point["batch"])
    if weights.startswith("4-bit"):
        dtype = weights.removeprefix("4-bit ")
        changes["model_init_kwargs"] = {"dtype": str(cells.SHORT[dtype])[6:], "quantization_config": four_bits(dtype)}
    changes["per_device_train_batch_size"] = point["batch"]
    if point["task"] == "grpo":
        changes["steps_per_generation"] = point["steps_per_generation"]
    arguments = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
    arguments["train_dataset"] = cells.dataset(cell.task, cell.family, rows=64)
    if point["images"] > 1:
        arguments["train_dataset"] = several_images(arguments["train_dataset"], point["images"])
    if point["tokens"]:
        import datasets

        rows = [{"input_ids": [index + 5] * point["tokens"]} for index in range(64)]
        arguments["train_dataset"] = datasets.Dataset.from_list(rows)
    if point["hidden"]:
        layers = point.get("layers", 4)
        make = wide if point["family"] == "text" else wide_with_images
        arguments["model"] = make(point["hidden"], layers)
    if cell.lora:
        modules: Any = ["q_proj", "v_proj"]
        if "new_tokens" in point and point["family"] != "text":
            modules = r".*language_model.*\.(q_proj|v_proj)"  # the tower stays frozen
        arguments["peft_config"] = LoraConfig(r=8, target_modules=modules)
    return cell.task, arguments


def several_images(dataset: Any, images: int) -> Any:
    """Returns the same rows with several images in each prompt; TRL puts them before the text."""
    return dataset.map(lambda row: {"images": [row["image"]] * images}).remove_columns("image")


@functools.cache
def wide(hidden: int, layers: int = 4) -> str:
    """Saves a Llama with a hidden size and a number of layers."""
    import cells
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = cells.folder("text")
    config = AutoConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = hidden, 3 * hidden, layers
    config.num_attention_heads = config.num_key_value_heads = hidden // 32
    config.head_dim, config.max_position_embeddings = 32, 8192
    folder = Path(cells._root().name) / f"wide-{hidden}-{layers}"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


@functools.cache
def wide_with_images(hidden: int, layers: int = 4) -> str:
    """Saves a LLaVA with a hidden size and a number of text layers, and a tower of eight layers on 196 patches."""
    import cells
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    source = cells.folder("llava")
    config = AutoConfig.from_pretrained(source)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = hidden, 3 * hidden, layers
    text.num_attention_heads = text.num_key_value_heads = hidden // 32
    text.head_dim = 32
    vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers = hidden // 2, 2 * hidden, 8
    vision.num_attention_heads, vision.image_size, vision.patch_size = hidden // 64, 112, 8
    folder = Path(cells._root().name) / f"wide-images-{hidden}-{layers}"
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(source)
    processor.patch_size = 8
    processor.image_processor.size = {"shortest_edge": 112}
    processor.image_processor.crop_size = {"height": 112, "width": 112}
    processor.save_pretrained(folder)
    return str(folder)


def four_bits(dtype: str) -> Any:
    """Returns the configuration of a 4-bit base that computes in a dtype, such as `"bf16"`."""
    import cells
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=cells.SHORT[dtype])


def construct(point: Point, safe: bool) -> Any:
    """Builds the trainer of a point."""
    return _make(*prepared(point), point, safe)


def _make(task: str, arguments: Mapping[str, Any], point: Point, safe: bool) -> Any:
    import cells

    if safe:
        vars(arguments["args"]).update(point.get("switched", {}))
    return (cells.SAFE if safe else cells.STOCK)[task](**arguments)


def profiled(point: Point) -> list[dict[str, float]]:
    """Returns the seconds of each phase in each step of a profiled run, without the first two steps."""
    import cells

    task, arguments = prepared(point)
    arguments["args"].profile, arguments["args"].logging_steps = True, 1
    trainer = cells.SAFE[task](**arguments)
    with quiet():
        trainer.train()
    prefix = "profile/"
    logs = [entry for entry in trainer.state.log_history if any(name.startswith(prefix) for name in entry)]
    return [{n.removeprefix(prefix): v for n, v in entry.items() if n.startswith(prefix)} for entry in logs[2:]]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the output of trainers."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


class Turns:
    """Lets two threads run in turns; a thread that is alone continues."""

    def __init__(self, present: Iterable[bool], first: bool) -> None:
        self._next = first
        self._present = set(present)
        self._changed = threading.Condition()

    def wait(self, mine: bool) -> None:
        """Waits for the turn of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is mine)

    def give(self, mine: bool) -> None:
        """Passes the turn to the other thread, if it still runs."""
        with self._changed:
            if (not mine) in self._present:
                self._next = not mine
            self._changed.notify_all()

    def leave(self, mine: bool) -> None:
        """Passes the turn for the last time."""
        self._present.discard(mine)
        self.give(mine)


def in_turns(
    trainers: Mapping[bool, Any], first: bool, window: int = 1, clock: Callable[[], float] = time.thread_time
) -> dict[bool, list[float]]:
    """Trains two trainers in turns, one window of steps each, so that disturbances affect both.

    Each step starts with the same random state in both trainers, so that they sample the same tokens.

    Args:
        trainers: The stock (`False`) and the safe (`True`) trainer, or one of them.
        first: The key of the trainer that starts.
        window: Number of steps in a window: the steps of one rollout.
        clock: Returns the time in seconds; by default the CPU time of the thread.

    Returns:
        The seconds of each window of both, without the first two.

    Raises:
        BaseException: The error of a trainer, after the other trainer has finished.
    """
    import torch
    from transformers import TrainerCallback

    turns, errors = Turns(trainers, first), []
    seconds: dict[bool, list[float]] = {False: [], True: []}

    class Clock(TrainerCallback):
        def __init__(self, mine: bool) -> None:
            self.mine, self.steps, self.began = mine, 0, 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = clock()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seeding = clock()
            torch.manual_seed(self.steps)
            self.began += clock() - seeding  # of the comparison, not of the step

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps % window:
                return
            seconds[self.mine].append(clock() - self.began)
            turns.give(self.mine)
            turns.wait(self.mine)
            self.began = clock()

    def run(mine: bool) -> None:
        turns.wait(mine)
        try:
            trainers[mine].train()
        except BaseException as error:
            errors.append(error)
        finally:
            turns.leave(mine)

    for mine, trainer in trainers.items():
        trainer.add_callback(Clock(mine))
    threads = [threading.Thread(target=run, args=(mine,)) for mine in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {mine: found[2:] for mine, found in seconds.items()}


@quiet()
def timed(point: Point, safe_first: bool) -> dict[str, dict[str, float]]:
    """Compares the times of constructions, and of the steps of two trainers that run in turns.

    Args:
        point: The model, the task and the number of `steps`; `switched` has fields of the safe trainer's arguments.
        safe_first: Whether the safe trainer starts.

    Returns:
        For each quantity `stock` in CPU seconds and the `ratio` of safe over stock; for a step also `more`, safe minus
        stock in seconds. The values of a step are medians over pairs of windows.
    """
    trainers: dict[bool, Any] = {}
    built: dict[bool, list[float]] = {False: [], True: []}
    for safe in (safe_first, not safe_first) * CONSTRUCTIONS:
        task, arguments = prepared(point)
        trainers.pop(safe, None)
        gc.collect()
        started = time.process_time()
        trainers[safe] = _make(task, arguments, point, safe)
        built[safe].append(time.process_time() - started)
    window = point.get("steps_per_generation", 1)
    steps = in_turns(trainers, safe_first, window)
    pairs = [(stock / window, safe / window) for stock, safe in zip(steps[False], steps[True], strict=True)]
    return {
        "construction": {"stock": min(built[False]), "ratio": min(built[True]) / min(built[False])},
        "step": {
            "stock": statistics.median(stock for stock, _ in pairs),
            "ratio": statistics.median(safe / stock for stock, safe in pairs),
            "more": statistics.median(safe - stock for stock, safe in pairs),
        },
    }


@quiet()
def counted(point: Point, safe: bool) -> dict[str, float]:
    """Counts the bytes of a run: the peak of tensor memory, the buffered media, and the bytes moved per step."""
    from live_bytes import LiveBytes

    from safe_trainers import MEDIA_KEYS

    prepared(point | {"steps": 2})  # creates files and caches before counting
    with LiveBytes() as live:
        trainer = construct(point | {"steps": 2}, safe)
        live.watch((*trainer.model.parameters(), *trainer.model.buffers()))
        trainer.train()
    found = {"peak": float(live.peak)}
    buffered = getattr(trainer, "_buffered_inputs", None) or []
    media = sum(v.nbytes for batch in buffered for k, v in batch.items() if k in MEDIA_KEYS)
    if media:
        found["media"] = float(media)
    steps = 2 * point.get("steps_per_generation", 1)
    trainer = construct(point | {"steps": steps}, safe)
    with Moved() as moved:
        trainer.train()
    found["moved"] = moved.bytes / steps
    return found


@quiet()
def counted_images(point: Point) -> dict[str, Any]:
    """Counts the images that the model of a safe trainer is called with, and those on which its tower runs.

    Images are counted in calls with equal images while no gradient flows into the tower. Comparisons of the
    features of distinct and of all images, once for each combination of shapes, are not counted.

    Returns:
        The images as `seen`, those on which the tower runs as `computed`, and in `refused` why they are as many.
    """
    from safe_trainers.media.shared_features import SharedFeatures

    trainer = construct(point, True)
    trainer.train()
    found = trainer.precision[SharedFeatures]
    return {"seen": found.seen, "computed": found.computed, "refused": sorted(set(found.refused))}

"""One run of a trainer of the cost's measurements: how it is made, counted, and timed beside its counterpart."""

import contextlib
import functools
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


Point = dict[str, Any]
CONSTRUCTIONS = 5
"""Of each side for one ratio, of which the fastest counts: whatever disturbs makes them slower."""


MOVING = {"_move", "_prepare_input", "send_to_device"}
"""Functions that bring batches to the device: this package's, transformers' and accelerate's."""


class Moved:
    """The bytes of batches that are moved to a device while it is entered; what is there already is not moved again.

    On a CPU nothing is copied. Which tensors are asked to be on the device is known all the same.
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
                        self._there[tensor.untyped_storage()._cdata] = tensor  # held, so that no key is used twice
                return result

        return Mode()


def prepared(point: Point) -> tuple[str, dict[str, Any]]:
    """The task of a point, and everything that a trainer of it is built with."""
    import cells
    from peft import LoraConfig

    point = {"steps_per_generation": 1, "images": 1, "tokens": None, "hidden": None, "batch": 4, **point}
    cell = cells.Cell(point["family"], point["task"], "bf16", "bf16", lora=point["kind"] == "lora")
    changes: dict[str, Any] = {"steps": point["steps"], "logging_steps": point["steps"]}
    changes["per_device_train_batch_size"] = point["batch"]
    if point["task"] == "grpo":
        changes["steps_per_generation"] = point["steps_per_generation"]
    arguments = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
    arguments["train_dataset"] = cells.dataset(cell.task, cell.family, rows=64)
    if point["images"] > 1:
        arguments["train_dataset"] = several_pictures(arguments["train_dataset"], point["images"])
    if point["tokens"]:
        import datasets

        rows = [{"input_ids": [index + 5] * point["tokens"]} for index in range(64)]
        arguments["train_dataset"] = datasets.Dataset.from_list(rows)
    if point["hidden"]:
        arguments["model"] = wide(point["hidden"])
    if cell.lora:
        arguments["peft_config"] = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    return cell.task, arguments


def several_pictures(dataset: Any, images: int) -> Any:
    """The same rows with several pictures in each prompt, which TRL puts before its text."""
    return dataset.map(lambda row: {"images": [row["image"]] * images}).remove_columns("image")


@functools.cache
def wide(hidden: int) -> str:
    """A saved Llama of four layers of a width."""
    import cells
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = cells.folder("text")
    config = AutoConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = hidden, 3 * hidden, 4
    config.num_attention_heads = config.num_key_value_heads = hidden // 32
    config.head_dim = 32
    folder = Path(cells._root().name) / f"wide-{hidden}"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


def construct(point: Point, safe: bool) -> Any:
    """A trainer of a point."""
    import cells

    task, arguments = prepared(point)
    return (cells.SAFE if safe else cells.STOCK)[task](**arguments)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what trainers print to themselves."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


class Turns:
    """Lets two threads take turns: one of them runs, the other waits; one alone goes on by itself."""

    def __init__(self, present: Iterable[bool], first: bool) -> None:
        self._next = first
        self._present = set(present)
        self._changed = threading.Condition()

    def wait(self, mine: bool) -> None:
        """Waits for one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is mine)

    def give(self, mine: bool) -> None:
        """Gives the turn to the other, if that one is still there."""
        with self._changed:
            if (not mine) in self._present:
                self._next = not mine
            self._changed.notify_all()

    def leave(self, mine: bool) -> None:
        """Gives the turn away for good."""
        self._present.discard(mine)
        self.give(mine)


def in_turns(trainers: Mapping[bool, Any], first: bool, window: int = 1) -> dict[bool, list[float]]:
    """Trains two trainers, a window of steps of one, then one of the other.

    What disturbs the machine, or slows it, is there for both alike. Each step begins with the same random state on
    both sides, so that they sample the same.

    Args:
        trainers: Stock's and safe, or one of them.
        first: Who begins.
        window: How many steps belong together: those of one rollout.

    Returns:
        The CPU seconds of each window of both, without the first two.

    Raises:
        BaseException: What a trainer raised; the other has then gone on to its end.
    """
    import torch
    from transformers import TrainerCallback

    turns, errors = Turns(trainers, first), []
    seconds: dict[bool, list[float]] = {False: [], True: []}

    class Clock(TrainerCallback):
        def __init__(self, mine: bool) -> None:
            self.mine, self.steps, self.began = mine, 0, 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.thread_time()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.manual_seed(self.steps)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps % window:
                return
            seconds[self.mine].append(time.thread_time() - self.began)
            turns.give(self.mine)
            turns.wait(self.mine)
            self.began = time.thread_time()

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
    """One comparison of times: of the constructions, and of the steps of two trainers that take turns.

    Args:
        point: What is trained, and how many `steps`; `switched`, fields of the safe trainer's arguments.
        safe_first: Who begins.

    Returns:
        For each quantity `stock`, in CPU seconds, the `ratio` of safe over stock, and for a step what it takes `more`,
        in seconds. Of a step these are medians over the windows, each beside the other's at the same time.
    """
    import cells

    trainers: dict[bool, Any] = {}
    built: dict[bool, list[float]] = {False: [], True: []}
    for safe in (safe_first, not safe_first) * CONSTRUCTIONS:
        task, arguments = prepared(point)
        trainers.pop(safe, None)
        gc.collect()
        if safe:
            vars(arguments["args"]).update(point.get("switched", {}))
        started = time.process_time()
        trainers[safe] = (cells.SAFE if safe else cells.STOCK)[task](**arguments)
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
    """One run: the peak of its tensors' bytes, those of the buffered media, and those moved per step."""
    from live_bytes import LiveBytes

    from safe_trainers import MEDIA_KEYS

    prepared(point | {"steps": 2})  # what is made once, files and caches, is made before anything is counted
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

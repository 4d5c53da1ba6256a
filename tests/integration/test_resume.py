"""A run that is stopped and resumed ends as the one that was never stopped: weights, optimizer and log, bit for bit.

Each guard stands beside what stock TRL does in its place.
"""

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cells
import kill_child
import pytest
import torch
import trl
from cells import Cell
from datasets import Dataset, IterableDataset
from kill_child import INSTANTS, KILLED_AT
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from two_processes import environment, run_in_two_processes

from safe_trainers.checkpoint.folder import checkpoints_in
from safe_trainers.checkpoint.trainer_state import to_plain
from safe_trainers.core.errors import CheckpointError, PrecisionWarning
from upstream import needs_streams


ENVIRONMENT = environment(__file__)
ALWAYS = ["in-the-optimizer", "before-the-marker", "in-the-rotation"]
WINDOW = {"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 2}
CLOCK = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}


@dataclass
class Run:
    fingerprint: str
    log: list[dict[str, Any]]
    optimizer: list[torch.Tensor]
    trainer: Any

    def differences(self, other: "Run") -> set[str]:
        """What differs: `"weights"`, `"optimizer"`, and the names of logged values."""
        found = {"weights"} if self.fingerprint != other.fingerprint else set()
        if not all(map(torch.equal, self.optimizer, other.optimizer)):
            found.add("optimizer")
        if [entry["step"] for entry in self.log] != [entry["step"] for entry in other.log]:
            found.add("steps")
        for one, two in zip(self.log, other.log, strict=False):
            found |= {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
        return found - CLOCK


def rows(task: str, family: str) -> Dataset:
    """Prompts that differ, so that the order of the data shows in the losses."""
    made = cells.dataset(task, family)
    if family != "text" or task == "reward":
        return made
    numbered = [[{"role": "user", "content": "what " * (i + 1)}] for i in range(len(made))]
    return made.remove_columns("prompt").add_column("prompt", numbered)


def train(task: str, out: Path, *, safe: bool = True, resume: Any = None, family: str = "text", **changes: Any) -> Run:
    """Trains a tiny model; a run from the start saves after each step, a resumed one saves nothing."""
    weights, flag, lora = changes.pop("weights", "fp32"), changes.pop("flag", None), changes.pop("lora", False)
    cell = Cell(family, task, weights, flag, lora, changes.pop("beta", 0.0))
    steps, data = changes.pop("steps", 6), changes.pop("data", None)
    saving = {"save_strategy": "steps", "save_steps": 1} if resume is None else {"save_strategy": "no"}
    made = cells.arguments(cell, cells.PLAIN[task], steps, output_dir=str(out), **{**saving, **changes})
    made["train_dataset"] = rows(task, family) if data is None else data
    torch.manual_seed(0)
    trainer = (cells.SAFE if safe else cells.STOCK)[task](**made)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    optimizer = [value for state in trainer.optimizer.state_dict()["state"].values() for value in state.values()]
    return Run(cells.fingerprint(trainer.model), trainer.state.log_history, optimizer, trainer)


@pytest.fixture(scope="module", autouse=True)
def killed(request, tmp_path_factory):
    """Runs that were killed in the middle of a save, by instant; they run beside the other tests of this module."""
    chosen = {item.callspec.params.get("instant") for item in request.session.items if hasattr(item, "callspec")}
    marked = "slow" in request.config.getoption("markexpr")
    instants = [instant for instant in INSTANTS if instant in chosen and (marked or instant in ALWAYS)]
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, kill_child.__file__, str(cells.folder("text")), str(folder), *instants]
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output) if instants else None

    def wait() -> Path:
        assert process.wait(timeout=240) == 0, (folder / "output.txt").read_text()[-2000:]
        return folder

    yield wait
    if process is not None:
        process.kill()
        process.wait()


# --- inside and between generation windows ---


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_a_run_resumed_at_any_step_is_the_uninterrupted_one(task, tmp_path):
    """8 micro-batches and 4 steps to a window; the second epoch begins at step 4."""
    whole = train(task, tmp_path, **WINDOW)
    assert whole.log[0]["grad_norm"] > 0
    for step in range(1, 6):
        resumed = train(task, tmp_path / "resumed", resume=tmp_path / f"checkpoint-{step}", **WINDOW)
        assert not resumed.differences(whole), f"resumed at step {step}"
        assert resumed.trainer._step == whole.trainer._step


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_stock_goes_on_differently_inside_a_window_and_in_the_second_epoch(task, tmp_path):
    whole = train(task, tmp_path, safe=False, **WINDOW)
    for step in (2, 4):
        resumed = train(task, tmp_path / "resumed", safe=False, resume=tmp_path / f"checkpoint-{step}", **WINDOW)
        assert {"weights", "optimizer", "loss"} <= resumed.differences(whole), f"resumed at step {step}"


def test_short_windows_that_do_not_divide_by_accumulation(tmp_path):
    odd = {"steps_per_generation": 2, "num_iterations": 3, "gradient_accumulation_steps": 3, "logging_steps": 2}
    whole = train("grpo", tmp_path, beta=0.1, **odd)
    for step in (1, 3, 4):
        resumed = train("grpo", tmp_path / "resumed", beta=0.1, resume=tmp_path / f"checkpoint-{step}", **odd)
        assert not resumed.differences(whole), f"resumed at step {step}"


@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("grpo", "llava"),
        pytest.param("rloo", "qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param("grpo", "idefics3", marks=pytest.mark.slow),
        pytest.param("grpo", "aria", marks=pytest.mark.slow),
    ],
)
def test_buffered_pictures_are_resumed_too(task, family, tmp_path):
    whole = train(task, tmp_path, family=family, steps=3, **WINDOW)
    state = torch.load(tmp_path / "checkpoint-1" / "safe_trainers_state_0.pt", weights_only=True)
    assert any(key.startswith("pixel_values") for key in state["values"]["_buffered_inputs"][0])
    resumed = train(task, tmp_path / "2", family=family, steps=3, resume=tmp_path / "checkpoint-1", **WINDOW)
    assert not resumed.differences(whole)


@pytest.mark.parametrize(
    "cell",
    [
        {"weights": "bf16", "flag": "bf16", "lora": True, "beta": 0.1},
        pytest.param({"weights": "fp32", "flag": "bf16", "lora": True, "beta": 0.1}, marks=pytest.mark.slow),
        pytest.param({"weights": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=lambda cell: "-".join(f"{key}_{value}" for key, value in cell.items()),
)
def test_half_precision_and_adapters_are_resumed_inside_a_window(cell, tmp_path):
    whole = train("grpo", tmp_path, steps=3, **WINDOW, **cell)
    resumed = train("grpo", tmp_path / "2", steps=3, resume=tmp_path / "checkpoint-2", **WINDOW, **cell)
    assert not resumed.differences(whole)


def test_at_the_end_of_a_window_no_buffer_is_stored(tmp_path):
    train("grpo", tmp_path, steps=2, steps_per_generation=2, gradient_accumulation_steps=2)
    state = torch.load(tmp_path / "checkpoint-1" / "safe_trainers_state_0.pt", weights_only=True)
    assert "_buffered_inputs" not in state["values"]
    assert state["values"]["_step"] == 2


def test_a_reference_model_that_is_trained_along_is_resumed(tmp_path):
    synced = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, **WINDOW}
    whole = train("grpo", tmp_path, steps=3, **synced)
    resumed = train("grpo", tmp_path / "2", steps=3, resume=tmp_path / "checkpoint-2", **synced)
    assert not resumed.differences(whole)
    stock = train("grpo", tmp_path / "stock", safe=False, steps=3, **synced)
    again = train("grpo", tmp_path / "3", safe=False, steps=3, resume=tmp_path / "stock" / "checkpoint-2", **synced)
    assert "kl" in again.differences(stock)


def test_the_table_of_completions_is_resumed_with_its_pictures(tmp_path, capsys):
    logged = {"family": "llava", "steps": 2, "log_completions": True, **WINDOW}
    whole = train("grpo", tmp_path, **logged)
    resumed = train("grpo", tmp_path / "2", resume=tmp_path / "checkpoint-1", **logged)
    assert not resumed.differences(whole)
    first, second = (run.trainer._logs for run in (whole, resumed))
    assert list(first["completion"]) == list(second["completion"])
    assert second["advantages"].maxlen == first["advantages"].maxlen
    assert to_plain(second["prompt"], "prompts") == to_plain(first["prompt"], "prompts")
    assert "__png__" in str(to_plain(second["prompt"], "prompts")) or isinstance(first["prompt"][0], str)  # TRL 0.29


# --- what the log averages, and the order of the data ---


@pytest.mark.parametrize(("task", "step"), [("sft", 4), ("reward", 1), ("grpo", 2)])
def test_averages_of_the_log_go_on_between_two_logs(task, step, tmp_path):
    changes = {"logging_steps": 3, **(WINDOW if task == "grpo" else {})}
    whole = train(task, tmp_path, **changes)
    resumed = train(task, tmp_path / "resumed", resume=tmp_path / f"checkpoint-{step}", **changes)
    assert not resumed.differences(whole)
    stock = train(task, tmp_path / "stock", safe=False, resume=tmp_path / f"checkpoint-{step}", **changes)
    assert "loss" in stock.differences(whole)


def test_the_training_loss_of_a_resumed_call_is_of_its_own_steps(tmp_path):
    whole = train("sft", tmp_path, logging_steps=1)
    train("sft", tmp_path / "3", logging_steps=3)
    resumed = train("sft", tmp_path / "resumed", resume=tmp_path / "3" / "checkpoint-4", logging_steps=3)
    own = [entry["loss"] for entry in whole.log if "loss" in entry][4:]
    steps = 2 if hasattr(resumed.trainer, "_initial_global_step") else 6  # transformers 4 divides by all steps
    assert resumed.log[-1]["train_loss"] == pytest.approx(sum(own) / steps, rel=1e-4)


SAMPLING = "train_sampling_strategy" if hasattr(trl.SFTConfig, "train_sampling_strategy") else "group_by_length"
GROUPED = {SAMPLING: "group_by_length" if SAMPLING != "group_by_length" else True}


def test_an_order_drawn_without_a_seed_is_resumed(tmp_path):
    grouped = {**GROUPED, "per_device_train_batch_size": 2}
    whole = train("sft", tmp_path, **grouped)
    resumed = train("sft", tmp_path / "resumed", resume=tmp_path / "checkpoint-5", **grouped)
    assert not resumed.differences(whole)
    stock = train("sft", tmp_path / "stock", safe=False, resume=tmp_path / "checkpoint-5", **grouped)
    assert "weights" in stock.differences(whole)


@pytest.mark.parametrize("order", [GROUPED, {"accelerator_config": {"use_seedable_sampler": False}}], ids=str)
@pytest.mark.parametrize("safe", [True, False])
def test_an_order_drawn_without_a_seed_is_resumed_twice(order, safe, tmp_path):
    """The first resume is at the end of an epoch: transformers sets the random state before the order is drawn."""
    changes = {**order, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1, "safe": safe}
    whole = train("sft", tmp_path, **changes)
    assert whole.trainer.state.log_history[-1]["epoch"] == 1.5
    train("sft", tmp_path / "first", resume=tmp_path / "checkpoint-4", **changes)
    second = train("sft", tmp_path / "second", resume=tmp_path / "first" / "checkpoint-5", **changes)
    assert (not second.differences(whole)) == safe


@needs_streams
def test_streams_are_resumed_in_their_first_pass(tmp_path):
    def stream() -> IterableDataset:
        return rows("grpo", "text").to_iterable_dataset()

    whole = train("grpo", tmp_path, steps=3, data=stream(), **WINDOW)
    resumed = train("grpo", tmp_path / "2", steps=3, data=stream(), resume=tmp_path / "checkpoint-2", **WINDOW)
    assert not resumed.differences(whole)


# --- what does not fit ---


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps_per_generation": 2}, "steps_per_generation was 4 and is 2"),
        ({"num_generations": 4}, "num_generations was 2 and is 4"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps was 2 and is 1"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True starts again with the first data"),
        ({"beta": 0.1}, "beta was 0 and is not 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_rollouts_that_do_not_fit_are_generated_anew_with_one_warning(changes, named, tmp_path):
    train("grpo", tmp_path, steps=1, **WINDOW)
    with pytest.warns(PrecisionWarning, match="window-not-resumed") as caught:
        resumed = train("grpo", tmp_path / "2", steps=3, resume=tmp_path / "checkpoint-1", **{**WINDOW, **changes})
    texts = [str(w.message) for w in caught if "window-not-resumed" in str(w.message)]
    assert len(texts) == 1
    assert named in texts[0]
    assert resumed.trainer.state.global_step == 3


def test_rollouts_of_an_earlier_run_of_the_same_trainer_are_not_used_in_their_place(tmp_path):
    def run(name: str, *, used: bool) -> Run:
        made = cells.arguments(Cell("text", "grpo", "fp32", None), cells.PLAIN["grpo"], 3, output_dir=str(tmp_path))
        for field, value in {**WINDOW, "save_strategy": "no"}.items():
            setattr(made["args"], field, value)
        made["train_dataset"] = rows("grpo", "text")
        torch.manual_seed(0)
        trainer = cells.SAFE["grpo"](**made)
        if used:  # as a trainer is that ended inside of a window
            trainer._step, trainer._buffered_inputs = 5, [{"prompt_ids": torch.zeros(1)}] * 4
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        return Run(cells.fingerprint(trainer.model), trainer.state.log_history, [], trainer)

    train("grpo", tmp_path / "misfit", steps=1, **{**WINDOW, "num_iterations": 1})
    train("grpo", tmp_path / "stock", safe=False, steps=1, **WINDOW)
    for name in ("misfit", "stock"):
        fresh, used = (run(name, used=used) for used in (False, True))
        assert not used.differences(fresh)
        assert used.trainer._step == fresh.trainer._step


class Buffered(TrainerCallback):
    """Counts which tensors of the window in which a resumed run begins are still in memory after each step."""

    def __init__(self):
        self.trainer, self.tensors, self.alive = None, None, {}

    def on_step_begin(self, args, state, control, **kwargs):
        if self.tensors is None:
            batches = self.trainer._buffered_inputs
            self.tensors = [weakref.ref(t) for b in batches for t in b.values() if isinstance(t, torch.Tensor)]

    def on_step_end(self, args, state, control, **kwargs):
        gc.collect()
        self.alive[state.global_step] = sum(tensor() is not None for tensor in self.tensors)


def test_rollouts_of_a_checkpoint_are_freed_after_their_window(tmp_path):
    train("grpo", tmp_path, steps=1, **WINDOW)
    made = cells.arguments(
        Cell("text", "grpo", "fp32", None), cells.PLAIN["grpo"], 6, output_dir=str(tmp_path), **WINDOW
    )
    made["train_dataset"] = rows("grpo", "text")
    buffered = Buffered()
    buffered.trainer = cells.SAFE["grpo"](**made, callbacks=[buffered])
    buffered.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert buffered.alive[2] == buffered.alive[4] > 0
    assert buffered.alive[5] == buffered.alive[6] == 0  # the fifth step generates again


class OutOfMemory:
    """Above a trainer: what CUDA says when a batch is too large. A stand-in, as there is no CUDA here."""

    failing = False

    def training_step(self, *args, **kwargs):
        if self.failing:
            self.failing = False
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(*args, **kwargs)


def test_a_smaller_batch_after_running_out_of_memory_begins_at_the_checkpoint_too(tmp_path):
    class Sft(OutOfMemory, cells.SAFE["sft"]):
        pass

    def run(out: Path, *, resume: Path | None = None, failing: bool = False, **changes: Any) -> Run:
        saving = {"save_strategy": "no"} if resume else {"save_strategy": "steps", "save_steps": 1}
        settings = {"output_dir": str(out), "logging_steps": 3, **saving, **changes}
        torch.manual_seed(0)
        trainer = Sft(**cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig, 4, **settings))
        trainer.failing = failing
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        assert not trainer.failing
        return Run(cells.fingerprint(trainer.model), trainer.state.log_history, [], trainer)

    run(tmp_path, per_device_train_batch_size=4)
    checkpoint = tmp_path / "checkpoint-1"
    twice = run(tmp_path / "2", resume=checkpoint, failing=True, auto_find_batch_size=True)
    small = twice.trainer._train_batch_size
    assert small < 4
    once = run(tmp_path / "3", resume=checkpoint, per_device_train_batch_size=small)
    if once.trainer._train_batch_size != small:
        pytest.skip(
            "this transformers resumes with the batch size of the checkpoint, which leaves no run to compare with"
        )
    assert [entry["step"] for entry in twice.log][:1] == [3]
    assert not twice.differences(once)


@pytest.mark.parametrize("resumed", [True, False])
def test_steps_of_an_attempt_that_was_given_up_are_not_counted(resumed, tmp_path):
    class Sft(cells.SAFE["sft"]):
        """Runs out of memory in its fourth pass, and has a loss that is not finite in the sixth."""

        passes = 0

        def training_step(self, *args, **kwargs):
            self.passes += 1
            if self.passes == 4:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.passes == 6 else loss

    def build(of: type, **changes: Any) -> Any:
        settings = {"output_dir": str(tmp_path), "logging_steps": 1, **changes}
        torch.manual_seed(0)
        return of(**cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig, 6, **settings))

    checkpoint = None
    if resumed:
        build(cells.SAFE["sft"], save_strategy="steps", save_steps=1).train()
        checkpoint = str(tmp_path / "checkpoint-1")
    trainer = build(Sft, save_strategy="no", auto_find_batch_size=True, per_device_train_batch_size=4)
    with pytest.warns(PrecisionWarning, match="step-skipped"):
        trainer.train(resume_from_checkpoint=checkpoint)
    counts = [entry for entry in trainer.state.log_history if "precision/skipped_steps" in entry][-1]
    assert counts["step"] == 6
    assert (counts["precision/skipped_steps"], counts["precision/effective_steps"]) == (1, 5)


def test_a_loss_that_is_no_number_does_not_take_those_before_the_checkpoint_with_it(tmp_path):
    class Sft(cells.SAFE["sft"]):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 1 else loss

    def losses(out: Path, resume: str | None = None) -> list[float]:
        settings = {"output_dir": str(out), "save_strategy": "steps", "save_steps": 1, "logging_steps": 3}
        torch.manual_seed(0)
        trainer = Sft(**cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig, 3, **settings))
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], hasattr(trainer, "_tr_loss")

    whole, attribute = losses(tmp_path)
    if not attribute:
        pytest.skip("transformers 4 keeps the sum of losses in a local variable")
    assert losses(tmp_path / "2", str(tmp_path / "checkpoint-1"))[0] == whole


def test_a_stock_checkpoint_is_resumed_as_stock_resumes_it(tmp_path, caplog):
    train("grpo", tmp_path, safe=False, steps=3, **WINDOW)
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        safe = train("grpo", tmp_path / "safe", resume=tmp_path / "checkpoint-1", steps=3, **WINDOW)
    stock = train("grpo", tmp_path / "stock", safe=False, resume=tmp_path / "checkpoint-1", steps=3, **WINDOW)
    assert not {key for key in safe.differences(stock) if not key.startswith("precision/")}
    assert "has no marker" in caplog.text
    assert "has no state of safe-trainers" in caplog.text


def test_a_safe_checkpoint_is_one_for_stock_too(tmp_path):
    whole = train("sft", tmp_path, steps=3)
    stock = train("sft", tmp_path / "stock", safe=False, resume=tmp_path / "checkpoint-2", steps=3)
    assert stock.fingerprint == whole.fingerprint


def test_what_a_checkpoint_cannot_hold_is_named_and_the_run_goes_on(tmp_path):
    class Holding(cells.SAFE["sft"]):
        exact_state = (*cells.SAFE["sft"].exact_state, "replay")
        replay = object()

    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    made = cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig, 3, **saving)
    with pytest.warns(PrecisionWarning, match=r"replay is a builtins.object") as caught:
        Holding(**made).train()
    assert len([w for w in caught if "state-not-saved" in str(w.message)]) == 1
    assert [checkpoint.complete for checkpoint in checkpoints_in(tmp_path)] == [True] * 3


def test_state_of_a_new_trainer_is_saved_by_name(tmp_path):
    class Counting(cells.SAFE["sft"]):
        exact_state = (*cells.SAFE["sft"].exact_state, "seen")
        seen: tuple[int, ...] = ()

        def training_step(self, *args, **kwargs):
            self.seen = (*self.seen, self.state.global_step)
            return super().training_step(*args, **kwargs)

    def made(steps: int) -> Any:
        saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
        return Counting(**cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig, steps, **saving))

    made(2).train()
    again = made(3)
    again.train(resume_from_checkpoint=True)
    assert again.seen == (0, 1, 2)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def put_state(folder: Path, content: Any, process: int = 0) -> Path:
    """Puts another state into a checkpoint, with a marker that knows its size."""
    state, marker = folder / f"safe_trainers_state_{process}.pt", folder / "safe_trainers_checkpoint.json"
    torch.save(content, state)
    listed = json.loads(marker.read_text())
    listed["files"][state.name] = state.stat().st_size
    marker.write_text(json.dumps(listed))
    return state


def test_a_state_file_with_something_else_in_it_is_refused(tmp_path):
    made = train("sft", tmp_path, steps=1).trainer
    state = torch.load(tmp_path / "checkpoint-1" / "safe_trainers_state_0.pt", weights_only=True)
    for content, says in [
        ({"a": 1}, "it has no 'geometry'"),
        ([1], "it contains a list"),
        ({**state, "geometry": None}, "it has no 'geometry'"),
        ({"geometry": {}}, "it has no 'values'"),
        ({**state, "order": [1]}, "it has no 'order'"),
        ({**state, "loss": "0.5"}, "it has no 'loss'"),
        (None, "it contains a NoneType"),
    ]:
        put_state(tmp_path / "checkpoint-1", content)
        with pytest.raises(CheckpointError, match=rf"safe_trainers_state_0.pt cannot be read: {says}"):
            made.train(resume_from_checkpoint=True)


def test_a_state_file_runs_no_code(tmp_path):
    train("sft", tmp_path, steps=1)
    folder, proof = tmp_path / "checkpoint-1", tmp_path / "proof"
    state = put_state(folder, {"geometry": Payload(proof)})
    with pytest.raises(CheckpointError, match=r"safe_trainers_state_0.pt cannot be read"):
        train("sft", tmp_path / "2", steps=2, resume=folder)
    assert not proof.exists()
    torch.load(state, weights_only=False)
    assert proof.exists()  # it could have


# --- killed in the middle of a save ---


@pytest.mark.parametrize(
    "instant",
    [instant if instant in ALWAYS else pytest.param(instant, marks=pytest.mark.slow) for instant in INSTANTS],
)
def test_a_run_killed_while_saving_goes_on_from_the_last_complete_checkpoint(instant, killed, tmp_path):
    folder = killed()
    signals = json.loads((folder / "signals.json").read_text())
    assert signals[instant] == -(signal.SIGXFSZ if instant == "in-the-optimizer" else signal.SIGKILL)
    out = folder / instant
    complete = [checkpoint.path.name for checkpoint in checkpoints_in(out) if checkpoint.complete]
    saved = instant in ("before-the-rotation", "in-the-rotation")
    expected = f"checkpoint-{KILLED_AT if saved else KILLED_AT - 1}"
    assert complete[0] == expected
    if instant in ("after-the-weights", "in-the-optimizer"):
        # Stock cannot tell: it takes the folder that was cut short, loads weights from it, and stops.
        assert Path(get_last_checkpoint(str(out))).name == f"checkpoint-{KILLED_AT}"
        shutil.copytree(out, tmp_path / "stock")
        made = cells.arguments(Cell("text", "grpo", "fp32", None), trl.GRPOConfig, output_dir=str(tmp_path / "stock"))
        with pytest.raises(FileNotFoundError, match=r"trainer_state.json"):
            trl.GRPOTrainer(**made).train(resume_from_checkpoint=True)

    whole = kill_child.build(cells.folder("text"), tmp_path / "whole")
    whole.train()
    resumed = kill_child.build(cells.folder("text"), out)
    resumed.train(resume_from_checkpoint=True)
    assert cells.fingerprint(resumed.model) == cells.fingerprint(whole.model)
    optimizers = [run.optimizer.state_dict()["state"] for run in (whole, resumed)]
    assert all(
        torch.equal(one[k], two[k]) for one, two in zip(*map(dict.values, optimizers), strict=True) for k in one
    )
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    assert [str(checkpoint) for checkpoint in checkpoints_in(out)] == [f"checkpoint-{kill_child.STEPS} (complete)"]


# --- several processes ---

TOGETHER = """
import json, sys
import cells, kill_child
from pathlib import Path

folder, model = Path(sys.argv[1]), sys.argv[2]
runs = {}
for step in (None, 1, 3, 5):
    settings = {"max_steps": 6, "save_total_limit": None, "per_device_train_batch_size": 2}
    trainer = kill_child.build(model, folder / ("whole" if step is None else f"from-{step}"), **settings)
    trainer.train(resume_from_checkpoint=None if step is None else str(folder / "whole" / f"checkpoint-{step}"))
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    runs[str(step)] = [cells.fingerprint(trainer.model), losses]
if trainer.accelerator.is_main_process:
    (folder / "runs.json").write_text(json.dumps(runs))
"""


@pytest.mark.slow
def test_two_processes_resume_together(tmp_path):
    run_in_two_processes(TOGETHER, tmp_path, str(cells.folder("text")), beside=__file__)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert runs["1"] == runs["3"] == runs["5"] == runs["None"]
    # One process cannot use what two have buffered.
    alone = kill_child.build(cells.folder("text"), tmp_path / "alone", max_steps=3, per_device_train_batch_size=2)
    with pytest.warns(PrecisionWarning, match="processes was 2 and is 1"):
        alone.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert alone.state.global_step == 3


FAILING = """
import json, sys
import torch, trl, cells
from cells import Cell
from pathlib import Path
from test_resume import put_state

folder = Path(sys.argv[1])
arguments = cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig, 1, output_dir=str(folder),
                            save_strategy="steps", save_steps=1)
trainer = cells.SAFE["sft"](**arguments)
trainer.train()
main, said = trainer.accelerator.is_main_process, []
if main:
    put_state(folder / "checkpoint-1", {"a": 1}, process=1)
trainer.accelerator.wait_for_everyone()
def fail():
    raise OSError("no such disk")
for what in (lambda: trainer.train(resume_from_checkpoint=True), lambda: trainer._agree(fail)):
    try:
        what()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
Path(folder, f"said-{trainer.args.process_index}.json").write_text(json.dumps(said))
"""


@pytest.mark.slow
def test_what_one_process_cannot_read_stops_all_of_them(tmp_path):
    run_in_two_processes(FAILING, tmp_path, beside=__file__)
    main, other = (json.loads((tmp_path / f"said-{process}.json").read_text()) for process in (0, 1))
    assert "CheckpointError" in main[0]
    assert "safe_trainers_state_1.pt cannot be read: it has no 'geometry'" in main[0]
    assert other[0] == main[0]
    assert main[1] == "OSError: no such disk"
    assert other[1] == "RuntimeError: the main process failed: OSError('no such disk')"

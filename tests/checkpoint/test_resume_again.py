"""A trainer that trains again from its own checkpoint, and a run that is resumed after its last step."""

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trl
from cells import Cell
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, TrainerCallback

from safe_trainers import PrecisionWarning, SafeGRPOTrainer, SafeSFTTrainer
from upstream import needs_epoch_after_skip, needs_quantization_argument


def half_adapters(out: Path, of: type, **changes: Any) -> Any:
    """A trainer of adapters in bfloat16 on a 4-bit base, which saves after two of four steps."""
    saving = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, **changes}
    arguments = cells.arguments(Cell("text", "sft", "bf16", "bf16"), trl.SFTConfig, 4, output_dir=str(out), **saving)
    arguments["quantization_config"] = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    arguments["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    if "eval_strategy" in changes:
        arguments["eval_dataset"] = arguments["train_dataset"]
    torch.manual_seed(0)
    return of(**arguments)


def adapters(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the adapter's weights, by their names in the file."""
    named = trainer.model.named_parameters()
    return {name.replace(".default", ""): p.detach().clone() for name, p in named if "lora_" in name}


def moved(trainer: Any, checkpoint: Path) -> int:
    """How many tensors of the adapter differ from those of a checkpoint."""
    saved = load_file(checkpoint / "adapter_model.safetensors")
    return sum(not torch.equal(value.float(), saved[name].float()) for name, value in adapters(trainer).items())


@needs_quantization_argument
@pytest.mark.filterwarnings("ignore")
def test_stock_trains_nothing_when_it_resumes_with_the_same_trainer(tmp_path):
    trainer = half_adapters(tmp_path, trl.SFTTrainer)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert moved(trainer, tmp_path / "checkpoint-2") == 0


def test_the_same_trainer_resumes_adapters_in_half_precision(tmp_path):
    trainer = half_adapters(tmp_path, SafeSFTTrainer)
    trainer.train()
    once = adapters(trainer)
    assert {value.dtype for value in once.values()} == {torch.bfloat16}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = adapters(trainer)
    assert all(torch.equal(value, again[name]) for name, value in once.items())
    assert moved(trainer, tmp_path / "checkpoint-2") == len(once)


def test_a_trainer_that_loaded_its_best_adapters_trains_them_on(tmp_path):
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = half_adapters(tmp_path, SafeSFTTrainer, **evaluates, learning_rate=1.0)
    trainer.train()
    best = adapters(trainer)
    trainer.args.load_best_model_at_end = False
    trainer.train()
    assert all(not torch.equal(value, best[name]) for name, value in adapters(trainer).items())


class Counter(TrainerCallback):
    """Counts the events of a run."""

    def __init__(self) -> None:
        self.begun = self.steps = self.ended = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended += 1


def finishing(out: Path, of: type, task: str = "sft", steps: int = 2, **changes: Any) -> Any:
    """A trainer whose last step is inside of an epoch, and which saves after each step."""
    saving = {"output_dir": str(out), "save_strategy": "steps", "save_steps": 1, **changes}
    if task == "sft":
        saving["per_device_train_batch_size"] = 2  # four steps in each epoch
    config = {"sft": trl.SFTConfig, "grpo": trl.GRPOConfig}[task]
    arguments = cells.arguments(Cell("text", task, "fp32", None), config, steps, **saving)
    if "eval_strategy" in changes:
        arguments["eval_dataset"] = arguments["train_dataset"]
    torch.manual_seed(0)
    return of(**arguments)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_stock_trains_a_step_after_the_last_one(tmp_path):
    finishing(tmp_path, trl.SFTTrainer).train()
    again = finishing(tmp_path, trl.SFTTrainer)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


@needs_epoch_after_skip
@pytest.mark.parametrize(("task", "of"), [("sft", SafeSFTTrainer), ("grpo", SafeGRPOTrainer)])
@pytest.mark.parametrize("steps", [2, 1])
def test_a_finished_run_trains_nothing(task, of, steps, tmp_path):
    first = finishing(tmp_path, of, task)
    first.train()
    again, counter = finishing(tmp_path, of, task, steps), Counter()
    again.add_callback(counter)
    with pytest.warns(PrecisionWarning, match="run-is-finished"):
        result = again.train(resume_from_checkpoint=True)
    assert (result.global_step, again.state.global_step) == (2, 2)
    assert result.metrics["train_loss"] == 0
    assert not again.is_in_train
    assert (counter.begun, counter.steps, counter.ended) == (1, 0, 1)
    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(first).items())
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_finished_run_ends_with_its_best_weights(tmp_path):
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 1.0}
    first = finishing(tmp_path, SafeSFTTrainer, **evaluates)
    first.train()
    assert first.state.best_global_step == 1
    again = finishing(tmp_path, SafeSFTTrainer, **evaluates)
    with pytest.warns(PrecisionWarning, match="run-is-finished"):
        again.train(resume_from_checkpoint=True)
    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(first).items())


def test_a_finished_run_can_be_trained_on(tmp_path):
    finishing(tmp_path, SafeSFTTrainer).train()
    more = finishing(tmp_path, SafeSFTTrainer, steps=3)
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 3


class Shortens(TrainerCallback):
    """Ends a run with an epoch, by its number of steps."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.max_steps = state.global_step


class Extends(TrainerCallback):
    """Lets a resumed run train more steps."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.max_steps = 4


@pytest.mark.filterwarnings("error::safe_trainers.PrecisionWarning")
@pytest.mark.parametrize(("callback", "steps", "resumes"), [(Shortens, 8, False), (Extends, 2, True)])
def test_a_callback_that_changes_the_number_of_steps_does_what_it_does_in_stock(callback, steps, resumes, tmp_path):
    ends = []
    for name, of in (("stock", trl.SFTTrainer), ("safe", SafeSFTTrainer)):
        if resumes:
            finishing(tmp_path / name, of, steps=steps).train()
        trainer = finishing(tmp_path / name, of, steps=steps)
        trainer.add_callback(callback())
        ends.append((trainer.train(resume_from_checkpoint=resumes or None).training_loss, trainer.state.global_step))
    assert ends[0] == ends[1]

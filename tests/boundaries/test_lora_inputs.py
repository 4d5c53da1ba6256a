"""Inputs of LoRA matrices are not cast to float32 and back, and every number is that of PEFT."""

import copy
import pickle
from functools import partial

import cells
import peft
import pytest
import torch
import transformers
from cells import Cell
from peft.tuners.lora import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from safe_trainers.boundaries import lora_inputs
from safe_trainers.boundaries.lora_inputs import LoraInputs
from safe_trainers.testing import fp16_on_cpu


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CAST = "_cast_input_dtype"


def build(cell, adapter=None, of=None, **changes):
    torch.manual_seed(0)
    arguments = cells.arguments(cell, cells.SAFE_CONFIG[cell.task], adapter_dtype="float32", **changes)
    arguments["peft_config"] = peft.LoraConfig(**{"r": 4, "target_modules": ALL, **(adapter or {})})
    return (of or cells.SAFE[cell.task])(**arguments)


def trained(*args, **kwargs):
    """The weights, losses and gradient norms of a run."""
    trainer = build(*args, **kwargs)
    logs = cells.train_logs(trainer)
    numbers = [(log["loss"], log["grad_norm"]) for log in logs if "grad_norm" in log]
    assert numbers
    return cells.fingerprint(trainer.model), numbers


@pytest.fixture
def left(monkeypatch):
    """Counts the inputs that are left in their dtype."""
    counts = {"left": 0}
    kept = lora_inputs._only_products

    def counting(layer):
        found = kept(layer)
        counts["left"] += found
        return found

    monkeypatch.setattr(lora_inputs, "_only_products", counting)
    return counts


@pytest.mark.parametrize(
    ("cell", "adapter", "changes"),
    [
        (Cell("text", "sft", "bf16", "bf16"), {}, {}),
        (Cell("text", "sft", "bf16", "bf16"), {}, {"gradient_checkpointing": False}),
        (Cell("text", "sft", "bf16", "bf16"), {"use_rslora": True, "lora_bias": True}, {"max_grad_norm": 0.01}),
        (Cell("text", "dpo", "bf16", "bf16"), {}, {}),
        (Cell("text", "reward", "bf16", "bf16"), {"task_type": "SEQ_CLS"}, {}),
        (Cell("text", "grpo", "bf16", "bf16", beta=0.1), {}, {"num_iterations": 2}),
        (Cell("llava", "grpo", "bf16", "bf16"), {}, {}),
        (Cell("llava", "rloo", "bf16", "bf16", beta=0.1), {}, {}),
        (Cell("aria", "sft", "bf16", "bf16"), {"target_modules": ["q_proj", "v_proj"]}, {}),
    ],
)
def test_runs_are_bit_identical_to_those_with_pefts_casts(cell, adapter, changes, left, monkeypatch):
    mine = trained(cell, adapter, **changes)
    assert left["left"] > 0
    monkeypatch.setattr(LoraInputs, "on_train_begin", lambda feature: None)
    left["left"] = 0
    assert trained(cell, adapter, **changes) == mine
    assert left["left"] == 0


def test_half_precision_with_a_loss_scale_is_bit_identical_too(left, monkeypatch):
    cell = Cell("text", "grpo", "fp16", "fp16")
    run = partial(trained, cell, of=fp16_on_cpu(cells.SAFE["grpo"]))
    mine = run()
    assert left["left"] > 0
    monkeypatch.setattr(LoraInputs, "on_train_begin", lambda feature: None)
    assert run() == mine


@pytest.mark.parametrize(
    "loading", [{"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, {"load_in_8bit": True}]
)
def test_layers_of_bitsandbytes_are_bit_identical_on_a_cpu(loading, left, monkeypatch):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**loading)
    cell = Cell("text", "sft", "bf16", "bf16")
    changes = {"model_init_kwargs": {"dtype": "bfloat16", "quantization_config": config}}
    mine = trained(cell, **changes)
    assert left["left"] > 0
    monkeypatch.setattr(LoraInputs, "on_train_begin", lambda feature: None)
    assert trained(cell, **changes) == mine


@pytest.mark.parametrize("adapter", [{"lora_dropout": 0.3}, {"use_dora": True}])
def test_dropout_and_dora_keep_pefts_casts(adapter, monkeypatch):
    """They compute with the input, in its dtype."""
    cell, changes = Cell("text", "sft", "bf16", "bf16"), {"gradient_checkpointing": False}
    mine = trained(cell, adapter, **changes)
    monkeypatch.setattr(LoraInputs, "on_train_begin", lambda feature: None)
    assert trained(cell, adapter, **changes) == mine
    monkeypatch.undo()
    monkeypatch.setattr(lora_inputs, "_only_products", lambda layer: True)
    assert trained(cell, adapter, **changes) != mine


def test_dropout_does_not_act_in_evaluations(left):
    class Evaluating(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert left["left"] == 0
            trainer.evaluate(trainer.train_dataset)

    trainer = build(Cell("text", "sft", "bf16", "bf16"), {"lora_dropout": 0.3}, steps=1)
    trainer.add_callback(Evaluating())
    trainer.train()
    assert left["left"] > 0


class Casts(TorchDispatchMode):
    """Counts casts between half precision and float32, of at least as many numbers as a batch of hidden states has."""

    def __init__(self, least):
        super().__init__()
        self.least, self.count = least, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].ndim == 3 and made.numel() >= self.least:
            self.count += {args[0].dtype, made.dtype} == {torch.bfloat16, torch.float32}
        return made


def casts(trainer):
    with Casts(least=256) as counted:
        trainer.train()
    return counted.count


def test_a_training_step_casts_less_than_one_of_stock():
    """Two casts of each input in the forward pass, and two of its gradient."""
    cell, changes = Cell("text", "sft", "bf16", "bf16"), {"steps": 1, "gradient_checkpointing": False}
    arguments = cells.arguments(cell, cells.PLAIN["sft"], **changes)
    arguments["peft_config"] = peft.LoraConfig(r=4, target_modules=ALL)
    stock, safe = casts(cells.STOCK["sft"](**arguments)), casts(build(cell, **changes))
    layers = sum(isinstance(m, Linear) for m in build(cell).model.modules())
    assert stock - safe == 4 * layers - 2 * 3  # the inputs of the first q, k and v need no gradient


def outside_of_autocast(model):
    """The logits of a model below the forward pass that accelerate has put into autocast."""
    with torch.no_grad():
        return model.base_model(input_ids=torch.arange(5, 13)[None]).logits


class Calling(TrainerCallback):
    """Calls the model outside of autocast during training, as callbacks that evaluate or sample do."""

    def __init__(self):
        self.made = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.made.append((outside_of_autocast(model), outside_of_autocast(copy.deepcopy(model))))
        pickle.loads(pickle.dumps(next(m for m in model.modules() if isinstance(m, Linear))))


def test_forward_passes_outside_of_autocast_work_during_training():
    trainer = build(Cell("text", "sft", "bf16", "bf16"))
    calling = Calling()
    trainer.add_callback(calling)
    trainer.train()
    assert len(calling.made) == 2
    assert all(torch.equal(one, other) for one, other in calling.made)
    assert torch.equal(calling.made[-1][0], outside_of_autocast(trainer.model))


def replaced(trainer):
    return sum(CAST in vars(m) for m in trainer.model.modules())


def test_nothing_is_left_on_the_model_after_training_or_an_error():
    class Watching(TrainerCallback):
        def __init__(self, error):
            self.error, self.seen = error, 0

        def on_step_end(self, args, state, control, **kwargs):
            self.seen = replaced(trainer)
            if self.error:
                raise ZeroDivisionError

    for error in (False, True):
        trainer = build(Cell("text", "sft", "bf16", "bf16"))
        before = [set(vars(m)) for m in trainer.model.modules()]
        watching = Watching(error)
        trainer.add_callback(watching)
        for _ in range(2):
            if error:
                with pytest.raises(ZeroDivisionError):
                    trainer.train()
            else:
                trainer.train()
            assert watching.seen == sum(isinstance(m, Linear) for m in trainer.model.modules()) > 0
            assert replaced(trainer) == 0
        after = [set(vars(m)) for m in trainer.model.modules()]
        assert all(not any("replace" in n for n in new - old) for old, new in zip(before, after, strict=True))


def test_runs_without_autocast_are_left_alone():
    trainer = build(Cell("text", "sft", "fp32", None))
    seen = []

    class Watching(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(replaced(trainer))

    trainer.add_callback(Watching())
    trainer.train()
    assert seen == [0, 0]


def test_a_compiled_model_computes_the_same(left, monkeypatch):
    cell = Cell("text", "sft", "bf16", "bf16")
    changes = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": False}
    mine = trained(cell, **changes)
    assert left["left"] > 0
    monkeypatch.setattr(LoraInputs, "on_train_begin", lambda feature: None)
    assert trained(cell, **changes) == mine

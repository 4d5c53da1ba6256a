"""4-bit layers keep their packing in evaluation, so that the next training step has gradients.

On a CPU with bfloat16 units, bitsandbytes packs a layer in another order in evaluation mode, and no gradient passes
through it from then on. These tests let bitsandbytes find such a CPU on every machine.
"""

import cells
import pytest
import torch
from cells import Cell
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from safe_trainers import merge_and_save
from safe_trainers.core.errors import PrecisionError
from safe_trainers.model.inventory import bits
from safe_trainers.weights.prepare import prepare_reference


bnb = pytest.importorskip("bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
TASKS = ("sft", "grpo", "reward")

pytestmark = pytest.mark.skipif(
    not hasattr(bnb.nn.modules, "has_avx512bf16"), reason="this bitsandbytes never packs a layer in another order"
)


@pytest.fixture(autouse=True)
def cpu_with_bfloat16_units(monkeypatch):
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)


class Gradients(TrainerCallback):
    """Records all gradients, and seeds each step, because evaluation may draw random numbers."""

    def __init__(self):
        self.steps = []

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def built(task, safe, evaluate, model=None, **packing):
    cell = Cell("text", task, "bf16", "bf16", lora=True)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4} if evaluate else {}
    made = cells.arguments(cell, cells.PLAIN[task], steps=3, **settings)
    if evaluate:
        made["eval_dataset"] = cells.dataset(task, "text", rows=4)
    if model is None:
        loading = made["args"].model_init_kwargs
        made["args"].model_init_kwargs = loading | {"quantization_config": BitsAndBytesConfig(**NF4, **packing)}
    else:
        made["model"], made["args"].model_init_kwargs = model, None
    torch.manual_seed(0)
    return (cells.SAFE if safe else cells.STOCK)[task](**made)


def gradients(trainer):
    """The gradients of each step; those until the error if the run fails."""
    recorded = Gradients()
    trainer.add_callback(recorded)
    try:
        trainer.train()
    except Exception:  # without such a CPU, a layer in another order may fail
        cells.reset_autocast()
    return recorded.steps


def layers_of(model):
    return [module for module in model.modules() if bits(module) == 4]


def packed(model):
    """The packed bytes and the scales of each 4-bit layer."""
    return [
        tensor.clone() for layer in layers_of(model) for tensor in (layer.weight.data, layer.weight.quant_state.absmax)
    ]


def equal(ours, others):
    """Whether two runs have the same gradients, bit for bit."""
    return len(ours) == len(others) and all(
        step.keys() == other.keys() and all(torch.equal(step[name], other[name]) for name in step)
        for step, other in zip(ours, others, strict=True)
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_the_same_with_and_without_evaluation(task, nested):
    plain, evaluated = (gradients(built(task, True, e, bnb_4bit_use_double_quant=nested)) for e in (False, True))
    assert len(plain) == 3
    assert all(any(bool(gradient.any()) for gradient in step.values()) for step in plain)
    assert equal(plain, evaluated)


@pytest.mark.parametrize("task", TASKS)
def test_stock_loses_gradients_after_the_first_evaluation(task):
    plain, evaluated = (gradients(built(task, False, evaluate)) for evaluate in (False, True))
    assert len(plain) == 3
    assert equal(plain[:1], evaluated[:1])
    assert not equal(plain, evaluated)


def test_an_evaluation_changes_no_packed_bit_and_the_adapter_can_be_merged(tmp_path):
    trainer = built("sft", True, True, bnb_4bit_use_double_quant=True)
    before = packed(trainer.model)
    assert len(gradients(trainer)) == 3
    loss = trainer.evaluate()["eval_loss"]
    trainer.model.eval().generate(input_ids=torch.arange(5, 13)[None], max_new_tokens=2)
    assert all(map(torch.equal, before, packed(trainer.model)))
    assert trainer.evaluate()["eval_loss"] == loss
    assert merge_and_save(trainer.model, tmp_path / "merged", dtype="fp32").kl < 1e-3


def loaded():
    return AutoModelForCausalLM.from_pretrained(
        cells.folder("text"), dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**NF4)
    )


def test_a_model_that_was_repacked_before_is_refused_and_one_that_is_loaded_again_trains():
    model = loaded()
    for layer in layers_of(model):
        layer.weight.data, _ = bnb.functional._convert_weight_packed_for_cpu(
            layer.weight.data, layer.weight.quant_state
        )
    with pytest.raises(PrecisionError, match="repacked-in-evaluation") as error:
        built("sft", True, False, model)
    assert "`model = LlamaForCausalLM.from_pretrained(...)`" in str(error.value)
    trainer = built("sft", True, False, loaded())
    trainer.model.eval()(input_ids=torch.arange(5, 13)[None])
    trainer.model.train()
    assert all(any(bool(gradient.any()) for gradient in step.values()) for step in gradients(trainer))


def test_a_reference_model_keeps_its_packing():
    reference, policy = loaded().eval(), built("sft", True, False).precision.policy
    prepare_reference(reference, policy, ())
    before = packed(reference)
    with torch.no_grad():
        reference(input_ids=torch.arange(5, 13)[None])
    assert all(map(torch.equal, before, packed(reference)))

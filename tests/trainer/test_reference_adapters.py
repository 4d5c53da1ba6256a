"""Which adapter is TRL's copy of the policy's, and what the report says of it."""

import warnings

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from safe_trainers import PrecisionWarning
from safe_trainers.model.inventory import CountContext, count_groups
from safe_trainers.model.parts import is_reference
from safe_trainers.report.run_report import GROUPS, contradictions


def adapted(dtype=torch.float32, name="default", **changes):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype)
    return get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | changes), adapter_name=name)


def build(task, model, flag="bf16", safe=True, **settings):
    cell = Cell("text", task, "fp32", flag, lora=True)
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    made = cells.arguments(cell, config, steps=2, **settings) | {"model": model}
    made.pop("peft_config", None)
    made["args"].model_init_kwargs = None
    return (cells.SAFE if safe else cells.STOCK)[task](**made)


def losses(trainer):
    return [entry["loss"] for entry in cells.train_logs(trainer) if "loss" in entry]


PAIRS = [pytest.param(task, marks=cells.NEEDS_STABLE[task]) for task in ("dpo", "kto")]


@pytest.mark.parametrize("task", PAIRS)
def test_tokens_of_the_reference_are_planned_frozen(task):
    """PEFT leaves the rows of TRL's copy trainable until it is scored for the first time."""
    stock = build(task, adapted(torch.bfloat16, trainable_token_indices=[1, 2, 3]), safe=False)
    rows = [p for name, p in stock.model.named_parameters() if name.endswith("trainable_tokens_delta.ref")]
    if not any(p.requires_grad for p in rows):
        pytest.skip("this TRL or PEFT freezes these rows at once")
    expected = losses(stock)
    assert [p.requires_grad for p in rows] == [False]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        warnings.filterwarnings("ignore", r"(?s).*half-trainables", PrecisionWarning)
        trainer = build(task, adapted(torch.bfloat16, trainable_token_indices=[1, 2, 3]))
        planned = {row[0]: row[2] for row in trainer.precision.report.table(GROUPS).rows}
        assert losses(trainer) == expected
    assert planned["adapter (default)"] is True
    assert planned["reference adapter (ref)"] is False


def test_a_reference_adapter_that_gets_gradients_contradicts_the_plan():
    trainer = build("dpo", adapted(trainable_token_indices=[1, 2, 3]))
    rows = next(p for name, p in trainer.model.named_parameters() if name.endswith("tokens_delta.ref"))
    rows.requires_grad_(True)
    planned, found = (
        count_groups(trainer.model, CountContext(lambda *_: "bfloat16", gradients, {}))
        for gradients in ({}, {id(rows): "float32"})
    )
    assert contradictions(planned, planned) == []
    said = [problem.what for problem in contradictions(planned, found)]
    assert "trainable of the reference adapter (ref): planned frozen, found frozen and trained" in said


def test_the_only_adapter_of_a_policy_is_not_the_reference():
    own, other = adapted(name="ref"), adapted()
    assert not is_reference(own, own)
    other.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"]))
    assert not is_reference(other, other)
    other.set_adapter("ref")
    assert is_reference(other, other)
    with own.disable_adapter():
        assert is_reference(own, own)


@pytest.mark.parametrize("name", ["ref", "default"])
def test_a_policy_whose_adapter_is_called_ref_is_corrected_and_measured(name):
    trainer = build(
        "grpo", adapted(name=name), rollout_correction=True, beta=0.0, num_iterations=2, gradient_accumulation_steps=2
    )
    assert any(value != 0.0 for value in losses(trainer))
    assert any("precision/logp_batch_noise" in entry for entry in trainer.state.log_history)
    assert any("precision/logp_mismatch_mean" in entry for entry in trainer.state.log_history)
    part = {row[0] for row in trainer.precision.report.table(GROUPS).rows}
    assert f"adapter ({name})" in part

"""The drop-in classes of DPO, KTO and distillation: what stock does in their place, references, and resuming."""

import cells
import pytest
import torch
import trainer_table
from cells import Cell
from transformers import BitsAndBytesConfig

from safe_trainers.testing import assert_safe, fp16_on_cpu


TASKS = [pytest.param(task, marks=cells.NEEDS_STABLE[task]) for task in ("dpo", "kto", "distillation")]
PAIRS = TASKS[:2]


@pytest.mark.parametrize("task", TASKS)
def test_images_reach_a_half_tower_in_its_dtype(task):
    cell = Cell("aria", task, "bf16", None, lora=True)
    assert "should be the same" in str(cells.run(cell, safe=False).error)
    contract = assert_safe(cells.SAFE[task], **cells.arguments(cell, cells.PLAIN[task]))
    assert contract.fired["inputs"] > 0


@pytest.mark.parametrize("task", TASKS)
def test_a_recent_trainer_keeps_its_contract(task):
    made = cells.arguments(Cell("llava", task, "fp32", "bf16", lora=True), cells.PLAIN[task])
    contract = assert_safe(cells.SAFE[task], **made)
    assert contract.broken() == []
    assert contract["rollout"].state == ("covered" if task == "distillation" else "not applicable")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_with_bf16_computes_in_bfloat16(task, lora):
    """Stock distillation computes in float32: TRL calls its loss in place of the forward pass under autocast."""
    seen = {}
    for name, trainer_class in (("stock", cells.STOCK[task]), ("safe", cells.SAFE[task])):
        cells.reset_autocast()
        trainer = trainer_class(**cells.arguments(Cell("text", task, "fp32", "bf16", lora), cells.PLAIN[task]))
        seen[name] = trainer_table.dtypes_while_training(trainer)
    assert seen["safe"] == {"bfloat16"}
    assert seen["stock"] == ({"float32"} if task == "distillation" else {"bfloat16"})
    assert [p for p in trainer.precision.report.verdicts if p.id == "plan-not-kept"] == []


@pytest.mark.parametrize("task", TASKS)
def test_bfloat16_adapters_of_a_4_bit_model_train_under_fp16(task):
    pytest.importorskip("bitsandbytes")
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def made(config, **changes):
        loading = {"dtype": "float32", "quantization_config": quantized}
        cell = Cell("text", task, "fp32", "fp16", lora=True)
        return cells.arguments(cell, config, model_init_kwargs=loading, **changes)

    cells.reset_autocast()
    stock = cells.STOCK[task](**made(cells.PLAIN[task]))
    assert {p.dtype for p in stock.model.parameters() if p.requires_grad} == {
        torch.bfloat16
    }  # no scaler unscales them
    cells.reset_autocast()
    safe = fp16_on_cpu(cells.SAFE[task])(**made(cells.SAFE_CONFIG[task], loss_scale_init=256.0))
    assert {p.dtype for p in safe.model.parameters() if p.requires_grad} == {torch.float32}
    before = {name: p.detach().clone() for name, p in safe.model.named_parameters() if p.requires_grad}
    safe.train()
    assert any(not torch.equal(p, before[name]) for name, p in safe.model.named_parameters() if name in before)


@pytest.mark.parametrize("task", PAIRS)
def test_the_reference_is_held_and_computes_as_the_policy_does(task):
    trainer = cells.SAFE[task](**cells.arguments(Cell("aria", task, "bf16", "bf16"), cells.PLAIN[task]))
    assert {p.dtype for p in trainer.ref_model.parameters()} == {torch.bfloat16}
    trainer.train()
    assert all(row["loss"] > 0 for row in trainer.state.log_history if "loss" in row)
    adapted = cells.SAFE[task](**cells.arguments(Cell("aria", task, "bf16", "bf16", lora=True), cells.PLAIN[task]))
    assert adapted.ref_model is None
    adapted.train()
    first = next(row["loss"] for row in adapted.state.log_history if "loss" in row)
    assert first == pytest.approx(0.6931 if task == "dpo" else 0.5, abs=1e-3)  # policy and reference agree


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(task, lora, tmp_path):
    def made(steps, out, **changes):
        cells.reset_autocast()
        torch.manual_seed(0)
        cell = Cell("llava", task, "fp32", "bf16", lora)
        return cells.SAFE[task](**cells.arguments(cell, cells.PLAIN[task], steps, output_dir=str(out), **changes))

    whole = made(4, tmp_path / "a", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = made(4, tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert cells.fingerprint(resumed.model) == cells.fingerprint(whole.model)
    assert trainer_table.losses(resumed)[-2:] == trainer_table.losses(whole)[-2:]

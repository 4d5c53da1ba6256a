"""What a module really computes in, in rollout, scoring and training: seen inside its forward, not read off flags."""

import cells
import pytest
import torch
from cells import Cell

from safe_trainers.testing import ComputeProbe, fp16_on_cpu
from upstream import generate_asks_the_tower_first


def probed(cell, safe, **changes):
    made = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
    return trained((cells.SAFE if safe else cells.STOCK)[cell.task](**made))


def trained(trainer):
    probe = ComputeProbe()
    with probe.attached(trainer):
        trainer.train()
    return probe


COMPUTE = {
    ("fp32", "bf16"): "bfloat16",
    ("bf16", "bf16"): "bfloat16",
    ("bf16", None): "bfloat16",
    ("fp16", "fp16"): "float16",
    ("fp32", None): "float32",
}


TABLE = [
    Cell(family, task, weights, flag, lora, beta=0.1)
    for task in ("grpo", "rloo")
    for family in ("aria", "llava")
    for weights, flag in COMPUTE
    for lora in (False, True)
]


@pytest.mark.parametrize("cell", cells.sliced(TABLE, "task", "family", "weights", "flag"))
def test_rollout_scoring_and_training_compute_alike(cell):
    # Scoring of old log-probabilities happens where generation and optimizer steps are out of step.
    out_of_step = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
    probe = probed(cell, safe=True, **out_of_step)
    assert probe.phases() == {"rollout", "scoring", "training"}
    assert set(probe.seen) == {"text", "vision_tower", "multi_modal_projector"}
    for seen in probe.seen.values():
        assert set().union(*seen.values()) == {COMPUTE[cell.weights, cell.flag]}
    assert probe.disagreements == []


def test_what_a_diagnosis_computes_in_float32_is_not_of_the_run():
    """Gradients of this run underflow float16, and a loss is computed again in float32 to count them."""
    cell = Cell("text", "sft", "fp32", "fp16")
    made = cells.arguments(cell, cells.SAFE_CONFIG["sft"], loss_scale_init=2.0**-16)
    trainer, dtypes = fp16_on_cpu(cells.SAFE["sft"])(**made), set()
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith("q_proj"))
    layer.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    probe = trained(trainer)
    assert dtypes == {torch.float16, torch.float32}
    assert probe.seen["text"]["training"] == {"float16"}
    assert probe.disagreements == []


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_stock_generates_in_another_dtype_than_it_trains_in(lora):
    """The probe can see a mismatch: with float32 weights and bf16=True stock has one, silently."""
    probe = probed(Cell("llava", "grpo", "fp32", "bf16", lora, beta=0.1), safe=False)
    if not lora and not generate_asks_the_tower_first():
        assert probe.disagreements == []
        pytest.skip("this transformers generates inside the forward that accelerate wraps in autocast")
    assert any(line.startswith("vision_tower computes in float32 in rollout") or
               line.startswith("vision_tower computes in bfloat16 in scoring, float32 in rollout")
               for line in probe.disagreements)  # fmt: skip
    if lora:  # PEFT's generate goes past accelerate's autocast altogether
        assert any(line.startswith("text computes in") for line in probe.disagreements)

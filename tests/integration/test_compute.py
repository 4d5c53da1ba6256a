"""What a module really computes in, in rollout, scoring and training: seen inside its forward, not read off flags."""

import cells
import pytest
from cells import Cell

from safe_trainers.testing import ComputeProbe
from upstream import generate_asks_the_tower_first


def probed(cell, safe, **changes):
    made = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
    trainer = (cells.SAFE if safe else cells.STOCK)[cell.task](**made)
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

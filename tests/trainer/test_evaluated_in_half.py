"""An evaluation with weights that are cast for its duration leaves no trace in a later training."""

import cells
import pytest
import torch
from cells import Cell

from safe_trainers.rollout.kept_casts import KeptCasts
from safe_trainers.rollout.scoring_inputs import ScoringInputs


def trained(task, family, evaluated, flag="bf16_full_eval", **changes):
    """A trainer after two steps with float32 weights, and its losses."""
    cell = Cell(family, task, "fp32", changes.pop("precision_flag", None), lora=changes.pop("lora", False))
    made = cells.arguments(cell, cells.SAFE_CONFIG[task], per_device_eval_batch_size=4, **{flag: True}, **changes)
    trainer = cells.SAFE[task](**made, eval_dataset=made["train_dataset"])
    if evaluated:
        assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    torch.manual_seed(5)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_media_are_not_cast_to_the_dtype_of_an_evaluation(task):
    alone, losses = trained(task, "llava", evaluated=False)
    later, found = trained(task, "llava", evaluated=True)
    assert found == losses
    assert [d.dtype for d in later.precision.media] == [d.dtype for d in alone.precision.media] == [None]
    assert cells.fingerprint(later.model) == cells.fingerprint(alone.model)


def test_a_rotary_model_does_not_get_positions_after_an_evaluation():
    for evaluated in (False, True):
        trainer, _ = trained("grpo", "text", evaluated)
        assert trainer.precision[ScoringInputs].positions is False


def test_casts_are_kept_in_training_after_an_evaluation_that_has_none():
    sizes = [trained("grpo", "text", e, precision_flag="bf16", lora=True)[0] for e in (False, True)]
    assert sizes[0].precision[KeptCasts].nbytes == sizes[1].precision[KeptCasts].nbytes > 0


@pytest.mark.parametrize("task", ["sft", "grpo"])
@pytest.mark.parametrize("flag", ["bf16_full_eval", "fp16_full_eval"])
def test_modules_in_float32_stay_so_in_an_evaluation(task, flag):
    trainer, _ = trained(task, "text", True, flag, precision_flag="bf16", fp32_modules=["*.layers.0"])
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}

"""A resume with another optimizer, without its state, or with adapters that keep scores of their own."""

from importlib.metadata import version

import cells
import pytest
import torch
from cells import Cell
from packaging.version import Version
from peft import AdaLoraConfig
from policing import reset_accelerate
from transformers import TrainerCallback

from safe_trainers import CheckpointError, PrecisionWarning


STEPS = 6


def build(folder, steps=STEPS, safe=True, adapter=None, callbacks=(), **changes):
    reset_accelerate()
    torch.manual_seed(0)
    settings = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 3, **changes}
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)["sft"]
    made = cells.arguments(Cell("text", "sft", "fp32", None), config, steps, **settings)
    if adapter is not None:
        made["peft_config"] = adapter
    return (cells.SAFE if safe else cells.STOCK)["sft"](**made, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("optim", "name"), [("adamw_bnb_8bit", "bitsandbytes.AdamW"), ("sgd", "torch.SGD"), ("adafactor", "Adafactor")]
)
def test_another_optimizer_is_refused(tmp_path, optim, name):
    build(tmp_path).train()
    trainer = build(tmp_path, optim=optim)
    with pytest.raises(CheckpointError, match="another-optimizer") as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "the state of torch.AdamW" in str(caught.value)
    assert name in str(caught.value)


def test_stock_ends_in_an_error_of_the_optimizer(tmp_path):
    build(tmp_path, safe=False).train()
    with pytest.raises(KeyError):
        build(tmp_path, safe=False, optim="adamw_bnb_8bit").train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-3")
        )


def test_the_fused_optimizer_resumes_the_plain_one(tmp_path):
    build(tmp_path, optim="adamw_torch").train()
    trainer = build(tmp_path, optim="adamw_torch_fused")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == STEPS


def test_a_checkpoint_without_the_optimizer_is_reported(tmp_path):
    build(tmp_path, save_only_model=True).train()
    trainer = build(tmp_path)
    with pytest.warns(PrecisionWarning, match="no-optimizer-state") as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert any("save_only_model=False" in str(warning.message) for warning in caught)
    assert trainer.state.global_step == STEPS


class Allocate(TrainerCallback):
    """Lets AdaLoRA choose ranks after each step, as its documentation says."""

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        model.base_model.update_and_allocate(state.global_step + 1)


def adalora():
    return AdaLoraConfig(
        init_r=6, target_r=2, tinit=3, tfinal=1, deltaT=1, total_step=STEPS, target_modules=["q_proj", "v_proj"]
    )


@pytest.mark.skipif(
    Version(version("peft")) < Version("0.21"), reason="AdaLoRA of this PEFT does not resume exactly for other reasons"
)
@pytest.mark.parametrize("safe", [True, False])
def test_the_scores_of_adalora_are_resumed(tmp_path, safe):
    """The checkpoint is from before the first ranks are removed: PEFT saves only the rest, in smaller tensors."""
    whole = build(tmp_path, safe=safe, adapter=adalora(), callbacks=[Allocate()])
    whole.train()
    resumed = build(tmp_path, safe=safe, adapter=adalora(), callbacks=[Allocate()])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (cells.fingerprint(whole.model) == cells.fingerprint(resumed.model)) == safe

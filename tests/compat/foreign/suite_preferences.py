"""How users test and use `DPOTrainer`, and `KTOTrainer` and `CPOTrainer`, which moved between releases."""

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig

from safe_trainers import tiny


ROWS = 12
PAIRS = Dataset.from_dict({"prompt": ["what is it ?"] * ROWS, "chosen": ["two red circles"] * ROWS,
                           "rejected": ["one blue circle"] * ROWS})  # fmt: skip
CONVERSATIONS = tiny.preference_dataset(ROWS)


@pytest.mark.parametrize("data", [PAIRS, CONVERSATIONS], ids=["plain", "conversational"])
def test_it_trains(saved, common, weights, data):
    trainer = trl.DPOTrainer(model=saved("text"), args=DPOConfig(**common), train_dataset=data)
    assert isinstance(trainer, trl.DPOTrainer)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert {"rewards/margins", "rewards/accuracies"} <= set(trainer.state.log_history[0])


def test_the_reference_of_an_adapter_is_the_model_without_it(saved, common, weights):
    trainer = trl.DPOTrainer(
        model=saved("text"), args=DPOConfig(**common), train_dataset=PAIRS, peft_config=LoraConfig(r=4)
    )
    assert trainer.ref_model is None
    before = weights(trainer.model)
    trainer.train()
    assert len(before.changed(trainer.model)) > 0
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # ln 2: no difference yet


def test_a_reference_model_stays_as_it_is(saved, common):
    reference = AutoModelForCausalLM.from_pretrained(saved("text"))
    given = {name: value.clone() for name, value in reference.state_dict().items()}
    trainer = trl.DPOTrainer(
        model=saved("text"), ref_model=reference, args=DPOConfig(**common), train_dataset=PAIRS, eval_dataset=PAIRS
    )
    trainer.train()
    assert all(torch.equal(value, given[name]) for name, value in reference.state_dict().items())
    assert "eval_rewards/margins" in trainer.evaluate()


def test_an_experimental_trainer_trains(saved, common, weights):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model = AutoModelForCausalLM.from_pretrained(saved("text"))
    before = weights(model)
    trainer = CPOTrainer(
        model=model, args=CPOConfig(**common), train_dataset=PAIRS, processing_class=tiny.build_processor("text")
    )
    trainer.train()
    assert before.all_changed(model)

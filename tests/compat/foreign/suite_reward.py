"""How users test and use `RewardTrainer`."""

from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig

from safe_trainers import tiny


CONVERSATIONS = tiny.preference_dataset(12)
PLAIN = CONVERSATIONS.map(lambda row: {name: row[name][-1]["content"] for name in ("chosen", "rejected")})
PROMPTED = CONVERSATIONS.map(
    lambda row: {"prompt": row["chosen"][:1], "chosen": row["chosen"][1:], "rejected": row["rejected"][1:]}
)
FORMATS = {"conversational": CONVERSATIONS, "plain": PLAIN, "with a prompt": PROMPTED}


@pytest.mark.parametrize("data", FORMATS)
def test_it_trains(saved, common, weights, data):
    trainer = trl.RewardTrainer(model=saved("reward"), args=RewardConfig(**common), train_dataset=FORMATS[data])
    assert isinstance(trainer, trl.RewardTrainer)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert {"accuracy", "margin"} <= set(trainer.state.log_history[0])


def test_a_language_model_gets_a_head(saved, common, weights):
    from trl import RewardTrainer

    trainer = RewardTrainer(model=saved("text"), args=RewardConfig(**common), train_dataset=PLAIN)
    assert trainer.model.config.num_labels == 1
    before = weights(trainer.model)
    trainer.train()
    assert any("score" in name for name in before.changed(trainer.model))


@pytest.mark.parametrize("options", [
    {"center_rewards_coefficient": 0.01}, {"max_length": 16}, {"pad_to_multiple_of": 8}, {"bf16": True},
    {"gradient_checkpointing": True}, {"disable_dropout": False}, {"gradient_accumulation_steps": 2},
], ids=str)  # fmt: skip
def test_options(saved, common, weights, options):
    args = RewardConfig(**{**common, **options})
    trainer = trl.RewardTrainer(model=saved("reward"), args=args, train_dataset=CONVERSATIONS)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_margins_and_a_live_model(saved, common, weights):
    model = AutoModelForSequenceClassification.from_pretrained(saved("reward"))
    trainer = trl.RewardTrainer(
        model=model, args=RewardConfig(**common), train_dataset=PLAIN.add_column("margin", [0.5] * len(PLAIN)),
        processing_class=AutoTokenizer.from_pretrained(saved("reward")),
    )  # fmt: skip
    before = weights(model)
    trainer.train()
    assert before.all_changed(model)


@pytest.mark.parametrize("given", ["config", "model"])
def test_with_peft(saved, common, weights, given):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    if given == "model":
        base = AutoModelForSequenceClassification.from_pretrained(saved("reward"))
        arguments = {"model": get_peft_model(base, lora)}
    else:
        arguments = {"model": saved("reward"), "peft_config": lora}
    trainer = trl.RewardTrainer(**arguments, args=RewardConfig(**common), train_dataset=PLAIN)
    assert isinstance(trainer.model, PeftModel)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert any("score" in name for name in before.before)


def test_evaluation_metrics_and_prediction(saved, common):
    def mean(prediction):
        return {"mean": float(prediction.predictions.mean())}

    args = RewardConfig(**common, eval_strategy="steps", eval_steps=1)
    trainer = trl.RewardTrainer(
        model=saved("reward"), args=args, train_dataset=PLAIN, eval_dataset={"a": PLAIN.select(range(4))},
        compute_metrics=mean,
    )  # fmt: skip
    trainer.train()
    assert any("eval_a_mean" in entry for entry in trainer.state.log_history)
    assert any("eval_a_loss" in entry for entry in trainer.state.log_history)
    output = trainer.predict(trainer.eval_dataset["a"])
    assert len(output.predictions) == 4


def test_save_load_and_resume(saved, common, tmp_path):
    args = RewardConfig(**{**common, "save_strategy": "steps", "save_steps": 1})
    trainer = trl.RewardTrainer(model=saved("reward"), args=args, train_dataset=PLAIN)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    again = trl.RewardTrainer(model=saved("reward"), args=args, train_dataset=PLAIN)
    again.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-1"))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
        assert torch.equal(again.model.get_parameter(name), parameter)


def test_a_model_card_and_tags(saved, common):
    trainer = trl.RewardTrainer(model=saved("reward"), args=RewardConfig(**common), train_dataset=PLAIN)
    trainer.create_model_card(model_name="mine")
    assert "Reward" in Path(trainer.args.output_dir, "README.md").read_text()
    assert {"reward-trainer", "trl"} <= set(trainer.model.model_tags)


def test_a_stream(saved, common, weights):
    rows = Dataset.from_list(PLAIN.to_list()).to_iterable_dataset()
    trainer = trl.RewardTrainer(model=saved("reward"), args=RewardConfig(**common), train_dataset=rows)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_what_is_wrong_is_refused_as_before(saved, common):
    two = AutoModelForSequenceClassification.from_pretrained(
        saved("reward"), num_labels=2, ignore_mismatched_sizes=True
    )
    with pytest.raises(ValueError, match="num_labels"):
        trl.RewardTrainer(model=two, args=RewardConfig(**common), train_dataset=PLAIN)

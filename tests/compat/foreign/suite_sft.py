"""How users test and use `SFTTrainer`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

from safe_trainers import tiny


SENTENCES = ["one red square", "two blue circles and one green square", "three yellow squares", "one circle"] * 3
TEXT = Dataset.from_dict({"text": SENTENCES})
MESSAGES = Dataset.from_dict(
    {"messages": [[{"role": "user", "content": "what is in the picture?"}, {"role": "assistant", "content": sentence}]
                  for sentence in SENTENCES]}
)  # fmt: skip
ANSWERS = Dataset.from_dict({"prompt": ["what is in the picture?"] * len(SENTENCES), "completion": SENTENCES})
FORMATS = {"text": TEXT, "messages": MESSAGES, "prompt and completion": ANSWERS}


@pytest.mark.parametrize("data", FORMATS)
def test_it_trains(saved, common, weights, data):
    trainer = SFTTrainer(model=saved("text"), args=SFTConfig(**common), train_dataset=FORMATS[data])
    assert isinstance(trainer, SFTTrainer)
    before = weights(trainer.model)
    result = trainer.train()
    assert before.all_changed(trainer.model)
    assert result.metrics["train_loss"] > 0
    assert "mean_token_accuracy" in trainer.state.log_history[0]


def test_with_a_string_and_nothing_else(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = SFTConfig("out", use_cpu=True, bf16=False, report_to="none")
    trainer = SFTTrainer(saved("text"), config, train_dataset=TEXT)
    assert trainer.processing_class.eos_token is not None
    assert "input_ids" in trainer.train_dataset.column_names


@pytest.mark.parametrize("options", [
    {"packing": True, "max_length": 16}, {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    {"padding_free": False}, {"pad_to_multiple_of": 8}, {"max_length": 4}, {"loss_type": "dft"}, {"bf16": True},
    {"gradient_checkpointing": True}, {"gradient_checkpointing": False}, {"gradient_accumulation_steps": 2},
    {"optim": "sgd", "learning_rate": 1.0},
    {"model_init_kwargs": {"dtype": "float32"}}, {"neftune_noise_alpha": 5.0}, {"dataset_num_proc": None},
], ids=str)  # fmt: skip
def test_options(saved, common, weights, options):
    trainer = SFTTrainer(model=saved("text"), args=SFTConfig(**{**common, **options}), train_dataset=TEXT)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_the_loss_of_completions(saved, common, completion_only_loss):
    args = SFTConfig(**common, completion_only_loss=completion_only_loss)
    trainer = SFTTrainer(model=saved("text"), args=args, train_dataset=ANSWERS)
    batch = next(iter(trainer.get_train_dataloader()))
    ignored = (batch["labels"] == -100) & (batch["input_ids"] != trainer.processing_class.pad_token_id)
    assert bool(ignored.any()) == completion_only_loss
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def test_the_loss_of_what_the_assistant_says(saved, common, weights):
    tokenizer = AutoTokenizer.from_pretrained(saved("text"))
    for marker in ("generation", "endgeneration"):  # some releases look for it in this spelling
        tokenizer.chat_template = tokenizer.chat_template.replace(f"{{%- {marker} -%}}", f"{{% {marker} %}}")
    args = SFTConfig(**common, assistant_only_loss=True)
    trainer = SFTTrainer(model=saved("text"), args=args, train_dataset=MESSAGES, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["labels"] == -100).any()
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_rows_that_are_formatted_or_tokenized(saved, common):
    def formatted(row):
        return f"answer: {row['sentence']}"

    data = TEXT.rename_column("text", "sentence")
    trainer = SFTTrainer(model=saved("text"), args=SFTConfig(**common), train_dataset=data, formatting_func=formatted)
    trainer.train()
    tokenizer = AutoTokenizer.from_pretrained(saved("text"))
    rows = TEXT.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns="text")
    other = SFTTrainer(model=saved("text"), args=SFTConfig(**common), train_dataset=rows)
    other.train()
    assert trainer.state.global_step == other.state.global_step == 2


def test_a_stream(saved, common, weights):
    trainer = SFTTrainer(model=saved("text"), args=SFTConfig(**common), train_dataset=TEXT.to_iterable_dataset())
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


@pytest.mark.parametrize("options", [{"r": 4}, {"r": 4, "use_dora": True}, {"r": 4, "modules_to_save": ["lm_head"]}])
def test_with_a_peft_config(saved, common, weights, options):
    trainer = SFTTrainer(
        model=saved("text"), args=SFTConfig(**common), train_dataset=TEXT,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], **options),
    )  # fmt: skip
    assert isinstance(trainer.model, PeftModel)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_with_prompt_tuning(saved, common, weights):
    trainer = SFTTrainer(
        model=saved("text"), args=SFTConfig(**common), train_dataset=TEXT,
        peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_with_a_peft_model(saved, common, weights):
    base = AutoModelForCausalLM.from_pretrained(saved("text"))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = SFTTrainer(model=model, args=SFTConfig(**common), train_dataset=TEXT)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_half_weights_stay_what_was_asked_for(saved, common):
    args = SFTConfig(**{**common, "model_init_kwargs": {"dtype": torch.bfloat16}})
    trainer = SFTTrainer(model=saved("text"), args=args, train_dataset=TEXT)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def test_evaluation_metrics_and_the_best_model(saved, common):
    def accuracy(prediction):
        return {"right": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}

    class Seen(TrainerCallback):
        metrics = None

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            self.metrics = metrics

    seen, held = Seen(), DatasetDict({"held": TEXT.select(range(4)), "other": TEXT.select(range(4, 8))})
    args = SFTConfig(**{
        **common, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_held_loss",
    })  # fmt: skip
    trainer = SFTTrainer(
        model=saved("text"), args=args, train_dataset=TEXT, eval_dataset=dict(held), compute_metrics=accuracy,
        callbacks=[seen, EarlyStoppingCallback(3)],
    )  # fmt: skip
    trainer.train()
    assert "eval_other_right" in seen.metrics
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert trainer.evaluate(trainer.eval_dataset["held"])["eval_loss"] == pytest.approx(
        trainer.state.best_metric, rel=1e-5
    )


def test_prediction(saved, common):
    trainer = SFTTrainer(model=saved("text"), args=SFTConfig(**common), train_dataset=TEXT)
    output = trainer.predict(trainer.train_dataset.select(range(3)))
    assert output.metrics["test_loss"] > 0


def test_save_load_and_resume(saved, common, tmp_path):
    args = SFTConfig(**{**common, "save_strategy": "steps", "save_steps": 1})
    trainer = SFTTrainer(model=saved("text"), args=args, train_dataset=TEXT)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    again = SFTTrainer(model=saved("text"), args=args, train_dataset=TEXT)
    again.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-1"))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
        assert torch.equal(again.model.get_parameter(name), parameter)


def test_an_optimizer_class_and_a_model_card(saved, common):
    trainer = SFTTrainer(
        model=saved("text"), args=SFTConfig(**common), train_dataset=TEXT,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
    )  # fmt: skip
    trainer.train()
    trainer.create_model_card(model_name="mine")
    assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)) is torch.optim.SGD
    assert "SFT" in Path(trainer.args.output_dir, "README.md").read_text()
    assert "sft" in trainer.model.model_tags


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_pictures(saved, common, weights, family):
    args = SFTConfig(**common, max_length=None)
    trainer = SFTTrainer(model=saved(family), args=args, train_dataset=tiny.sft_dataset(8))
    before = weights(trainer.model)
    trainer.train()
    assert any("vision" in name for name in before.changed(trainer.model))


def test_pictures_with_a_live_model_and_lora(saved, common, weights):
    trainer = SFTTrainer(
        model=AutoModelForImageTextToText.from_pretrained(saved("llava")), args=SFTConfig(**common, max_length=None),
        train_dataset=tiny.sft_dataset(8), eval_dataset=tiny.sft_dataset(4, split="heldout"),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert trainer.evaluate()["eval_loss"] > 0


def test_what_is_wrong_is_refused_as_before(saved, common):
    with pytest.raises(ValueError, match="train_dataset"):
        SFTTrainer(model=saved("text"), args=SFTConfig(**common))

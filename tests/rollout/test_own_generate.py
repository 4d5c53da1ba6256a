"""A model may have a `generate` of its own; if it takes no function that records, the rollout is not recorded."""

import logging

import cells
import pytest
import torch
import trl
from cells import Cell
from transformers import LlamaForCausalLM

from safe_trainers import PrecisionError, SafeGRPOConfig, SafeGRPOTrainer, tiny


class NamedOnly(LlamaForCausalLM):
    def generate(self, *, input_ids, attention_mask, generation_config, disable_compile=False):
        return super().generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            disable_compile=disable_compile,
        )


class WithKeywords(LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def train(trainer_class, config, kind, lora=False, **changes):
    cells.reset_autocast()
    torch.manual_seed(0)
    made = cells.arguments(Cell("text", "grpo", "fp32", None, lora=lora), config, **changes)
    plain = tiny.build_model("text")
    model = kind(plain.config)
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    made["args"].model_init_kwargs = None
    trainer = trainer_class(**{**made, "model": model, "processing_class": tiny.build_processor("text")})
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_named_arguments_only(lora, caplog):
    stock = train(trl.GRPOTrainer, trl.GRPOConfig, NamedOnly, lora)
    with caplog.at_level(logging.WARNING, "safe_trainers"):
        rows = train(SafeGRPOTrainer, SafeGRPOConfig, NamedOnly, lora)
    assert [row["loss"] for row in rows] == [row["loss"] for row in stock]
    assert not any("precision/logp_mismatch_mean" in row for row in rows)
    said = [record.message for record in caplog.records if "custom_generate" in record.message]
    assert said == [
        "precision/logp_mismatch_* are not logged: the `generate` of NamedOnly does not accept `custom_generate`"
    ]


def test_other_keywords_are_recorded():
    rows = train(SafeGRPOTrainer, SafeGRPOConfig, WithKeywords)
    assert all("precision/logp_mismatch_mean" in row for row in rows)


def test_a_correction_needs_the_recording():
    with pytest.raises(PrecisionError, match="were not recorded"):
        train(SafeGRPOTrainer, SafeGRPOConfig, NamedOnly, rollout_correction=True)

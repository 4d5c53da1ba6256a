"""An output head that computes in float32 in the trainer does so in vLLM too."""

import warnings

import pytest
import torch
from cells import Cell
from transformers import AutoModelForCausalLM, AutoTokenizer

from safe_trainers import PrecisionWarning, SafeGRPOConfig
from safe_trainers.rollout.vllm import has_float32_head


MISMATCH = "precision/logp_mismatch_mean"
CELL = Cell("text", "grpo", "bf16", "bf16", lora=True)


@pytest.fixture(scope="module")
def sharp(folders, tmp_path_factory):
    """A model whose layers leave the embeddings as they are, so only the head rounds. Logits are about 30."""
    folder = tmp_path_factory.mktemp("sharp")
    model = AutoModelForCausalLM.from_pretrained(folders["text"])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folders["text"]).save_pretrained(folder)
    return str(folder)


def mismatch(trainer):
    trainer.train()
    return trainer.state.log_history[0][MISMATCH]


FLOAT32 = [{"fp32_modules": ["lm_head"]}, {"cast_lm_head_to_fp32": True}]


@pytest.mark.parametrize("changes", FLOAT32, ids=str)
def test_both_heads_compute_in_float32(build, sharp, changes):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build(CELL, config=SafeGRPOConfig, model=sharp, max_completion_length=64, steps=1, **changes)
    assert not [w for w in caught if "sampler-without" in str(w.message)]
    assert has_float32_head(trainer.vllm_generation)
    assert mismatch(trainer) < 1e-5


def test_a_float32_head_on_one_side_is_reported(build, sharp, monkeypatch):
    monkeypatch.setattr("safe_trainers.rollout.vllm.HALVES", ())  # the engine gets no `head_dtype`
    with pytest.warns(PrecisionWarning, match="sampler-without-float32-head"):
        trainer = build(CELL, config=SafeGRPOConfig, model=sharp, max_completion_length=64, steps=1, **FLOAT32[0])
    assert mismatch(trainer) > 1e-3


def test_without_a_float32_head_vllms_computes_in_the_dtype_of_the_run(build, sharp):
    trainer = build(CELL, config=SafeGRPOConfig, model=sharp, max_completion_length=64, steps=1)
    assert not has_float32_head(trainer.vllm_generation)
    assert mismatch(trainer) < 1e-5


def test_stock_leaves_vllms_head_in_half_precision(build, sharp):
    trainer = build(CELL, safe=False, model=sharp, max_completion_length=64, steps=1, cast_lm_head_to_fp32=True)
    assert not has_float32_head(trainer.vllm_generation)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/mean"] > 1e-3

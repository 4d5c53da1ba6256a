"""A model with learned positions is scored at the positions at which vLLM, which has no padding, samples."""

from typing import Any

import datasets
import pytest
import torch
from cells import Cell
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from safe_trainers import tiny


CELL = Cell("text", "grpo", "fp32", None)


@pytest.fixture(scope="module")
def gpt2(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folders["text"])
    ids = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    size = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": len(tokenizer), "n_positions": 256}
    GPT2LMHeadModel(GPT2Config(**size, **ids, **no_dropout)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def trained(build: Any, model: str, safe: bool) -> Any:
    trainer = build(CELL, safe=safe, model=model, steps=1)
    question = tiny.QUESTION
    prompts = [" ".join([question] * (1 + index % 3)) for index in range(8)]
    trainer.train_dataset = datasets.Dataset.from_dict({"prompt": prompts})
    trainer.train()
    return trainer


def test_scoring_counts_no_padding(build: Any, gpt2: str) -> None:
    trainer = trained(build, gpt2, safe=True)
    assert trainer.state.log_history[0]["precision/logp_mismatch_max"] < 1e-5


def test_stock_counts_the_padding(build: Any, gpt2: str) -> None:
    trainer = trained(build, gpt2, safe=False)
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] > 1e-3

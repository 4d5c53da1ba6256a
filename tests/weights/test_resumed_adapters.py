"""Adapters that are read from a checkpoint are held in what the policy says, whatever the file or PEFT says."""

import logging

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig
from policing import reset_accelerate
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import CheckpointError, PrecisionWarning
from safe_trainers.testing import fp16_on_cpu


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")


def build(folder, safe=True, flag="bf16", rate=5e-3, steps=4, **changes):
    pytest.importorskip("bitsandbytes")
    reset_accelerate()
    dtype = cells.SHORT[flag or "fp32"]
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype, quantization_config=config)
    made = cells.arguments(
        Cell("text", "sft", "fp32", flag), cells.SAFE_CONFIG["sft"] if safe else cells.PLAIN["sft"], steps=steps,
        model_init_kwargs=None, learning_rate=rate, output_dir=str(folder),
        **{"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", **changes},
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer_class = fp16_on_cpu((cells.SAFE if safe else cells.STOCK)["sft"])
    return trainer_class(**{**made, "model": model, "peft_config": lora})


def adapters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def dtypes_in(file):
    with safe_open(file, "pt") as opened:
        return {opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.bfloat16),  # the cast was taken over: nothing is lost at this rate
        ({"rate": 1e-6}, torch.float32),
        ({"adapter_dtype": "float32"}, torch.float32),
        ({"flag": "fp16"}, torch.float32),
        ({"flag": None}, torch.float32),
    ],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(settings, dtype, tmp_path):
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    assert dtypes_in(tmp_path / "whole/checkpoint-2/adapter_model.safetensors") == {dtype}
    resumed = build(tmp_path / "whole", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    ended, expected = adapters(resumed), adapters(whole)
    assert {p.dtype for p in ended.values()} == {dtype}
    assert all(torch.equal(ended[name], expected[name]) for name in expected)
    assert {p.dtype for group in resumed.optimizer.param_groups for p in group["params"]} == {dtype}


def test_a_bfloat16_adapter_of_a_stock_run_resumes_as_the_policy_says(tmp_path, caplog):
    stock = build(tmp_path, safe=False)
    stock.train()
    file = tmp_path / "checkpoint-2/adapter_model.safetensors"
    assert dtypes_in(file) == {torch.bfloat16}
    safe = build(tmp_path, rate=1e-6, steps=3)
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        safe.train(resume_from_checkpoint=str(file.parent))
    assert {p.dtype for p in adapters(safe).values()} == {torch.float32}
    assert "cast the adapters of adapter_model.safetensors from bfloat16 to float32" in caplog.text


def plain(folder, rank=4, targets=("q_proj", "v_proj"), family="text"):
    reset_accelerate()
    made = cells.arguments(Cell(family, "sft", "fp32", None), cells.PLAIN["sft"], output_dir=str(folder),
                           save_strategy="steps", save_steps=1)  # fmt: skip
    made["peft_config"] = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    return cells.SAFE["sft"](**made)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"rank": 8}, "q_proj.lora_A.weight is [4, 64] in the file and [8, 64] in this run"),
        ({"targets": ["q_proj", "k_proj"]}, "k_proj.lora_A.weight is absent in the file and [4, 64] in this run"),
        ({"family": "gpt_oss"}, " in this run"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_it_is_loaded(changes, detail, tmp_path):
    """PEFT would fail in the middle, or load a part of it, keep the rest, and train on."""
    plain(tmp_path / "run").train()
    trainer = plain(tmp_path / "other", **changes)
    before = adapters(trainer)
    with pytest.raises(CheckpointError, match="adapter-does-not-fit") as error:
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert detail in str(error.value)
    assert all(torch.equal(p, before[name]) for name, p in adapters(trainer).items())
    assert not list((tmp_path / "other").glob("checkpoint-*"))


def test_a_checkpoint_of_another_base_is_warned_about(tmp_path):
    plain(tmp_path).train()
    config = tmp_path / "checkpoint-1/adapter_config.json"
    base = str(cells.folder("text"))
    other = base.removesuffix("text") + "else"  # of the same length: the marker knows the sizes of files
    config.write_text(config.read_text().replace(f'"{base}"', f'"{other}"'))
    with pytest.warns(PrecisionWarning, match="names the base '.*else', but it is loaded on"):
        plain(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

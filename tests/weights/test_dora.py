"""A DoRA adapter that was not trained computes what the base model computes; one that was trained is not changed."""

import math

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers.model.parts import adapter_state
from upstream import needs_whole_losses


pytestmark = needs_whole_losses


pytest.importorskip("bitsandbytes")

TARGETS = "all-linear"


def dora(**changes):
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, "use_dora": True} | changes)


def nf4(**changes):
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **changes)


def adapted(weights, quantized):
    torch.manual_seed(1)
    config = nf4(bnb_4bit_compute_dtype=torch.bfloat16) if quantized else None
    dtype = cells.SHORT[weights]
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype, quantization_config=config)
    return get_peft_model(base, dora())


def built(task, safe, weights, flag, quantized=True, model=None, **settings):
    """Builds a trainer with a DoRA adapter; `weights=None` leaves the dtype to `precision`."""
    cell = Cell("text", task, weights or "fp32", flag, lora=True)
    made = cells.arguments(cell, (cells.SAFE_CONFIG if safe else cells.PLAIN)[task], steps=1, **settings)
    made.pop("peft_config", None)
    if model is not None:
        made["model"], made["args"].model_init_kwargs = model, None
    else:
        loading = {name: value for name, value in (made["args"].model_init_kwargs or {}).items() if weights}
        compute = {} if weights is None else {"bnb_4bit_compute_dtype": torch.bfloat16}
        if quantized:
            loading["quantization_config"] = nf4(**compute)
        made["args"].model_init_kwargs, made["peft_config"] = loading, dora()
    torch.manual_seed(0)
    return (cells.SAFE if safe else cells.STOCK)[task](**made)


def first_log(trainer):
    return cells.train_logs(trainer)[0]


LN_2 = torch.tensor(2.0).log().item()
"""The first loss of DPO in float32 if policy and reference are equal."""
CASES = {
    "bf16-4bit-small-rate": ("bf16", "bf16", True, {"learning_rate": 1e-5}),
    "bf16-4bit-large-rate": ("bf16", "bf16", True, {"learning_rate": 1e-3}),
    "bf16-4bit-no-autocast": ("bf16", None, True, {"learning_rate": 1e-5}),
    "fp32-4bit-bf16-matrices": ("fp32", "bf16", True, {"learning_rate": 1e-3}),
    "fp32-4bit-fp32-matrices": ("fp32", "bf16", True, {"learning_rate": 1e-5}),
    "precision-bf16-matrices": (None, None, True, {"precision": "bf16", "bf16": None, "learning_rate": 1e-3}),
    "precision-fp32-matrices": (None, None, True, {"precision": "bf16", "bf16": None, "adapter_dtype": "float32"}),
    "bf16-not-quantised": ("bf16", "bf16", False, {}),
}
"""Weights as loaded, flag, whether they are in 4 bits, and settings."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_loss_of_a_new_dora_adapter_is_that_of_the_base(case):
    weights, flag, quantized, settings = case
    entry = first_log(built("dpo", True, weights, flag, quantized, **settings))
    assert entry["loss"] == LN_2
    assert entry["rewards/chosen"] == entry["rewards/rejected"] == 0.0


def test_stock_does_not_start_at_the_base_where_the_dtype_of_the_norm_differs():
    assert first_log(built("dpo", False, "fp32", "bf16"))["loss"] != LN_2
    assert first_log(built("dpo", False, "bf16", "bf16"))["loss"] == LN_2


def test_the_first_divergence_of_grpo_is_zero():
    entry = first_log(built("grpo", True, "bf16", "bf16", learning_rate=1e-5, beta=0.1))
    assert entry["kl"] == 0.0


def test_an_adapter_that_is_passed_untrained_starts_at_the_base_with_its_reference():
    given = built("dpo", True, "bf16", "bf16", model=adapted("bf16", quantized=True))
    assert "ref" in given.model.peft_config
    assert adapter_state(given.model) == (False, ("default",))
    assert first_log(given)["loss"] == LN_2
    plain = built("sft", True, "bf16", "bf16", model=adapted("bf16", quantized=True))
    batch = next(iter(plain.get_train_dataloader()))
    with torch.no_grad(), plain.compute_context():
        logits = plain.model(**batch).logits
        with plain.model.disable_adapter():
            assert torch.equal(plain.model(**batch).logits, logits)


def magnitudes(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_magnitude_vector" in name}


def test_magnitudes_of_a_trained_adapter_are_not_changed():
    model = adapted("bf16", quantized=True)
    first_log(built("sft", False, "bf16", "bf16", model=model, learning_rate=1e-3))
    assert any(p.any() for name, p in model.named_parameters() if "lora_B" in name)
    before = magnitudes(model)
    trainer = built("sft", True, "bf16", "bf16", model=model)
    assert trainer.precision.weights.renewed == ()
    assert before.keys() == magnitudes(model).keys()
    assert all(torch.equal(value, before[name]) for name, value in magnitudes(model).items())


def test_magnitudes_that_were_trained_alone_are_not_changed():
    model = adapted("bf16", quantized=True)
    name, magnitude = next((n, p) for n, p in model.named_parameters() if "lora_magnitude_vector" in n)
    with torch.no_grad():
        magnitude[0] *= 1 + 1e-5
    before = magnitudes(model)
    trainer = built("sft", True, "bf16", "bf16", model=model)
    assert trainer.precision.weights.renewed == ()
    assert torch.equal(magnitudes(model)[name], before[name])


def test_the_report_names_the_magnitudes_that_were_set():
    trainer = built("sft", True, "bf16", "bf16", learning_rate=1e-5)
    names = trainer.precision.weights.renewed
    assert names
    assert set(names) <= set(dict(trainer.model.named_parameters()))
    assert trainer.precision.weights.to_dict()["renewed"] == list(names)
    assert "set to the norms of the forward pass" in str(trainer.precision.report)
    same = built("sft", True, "fp32", None, quantized=False)
    assert same.precision.weights.renewed == ()
    assert math.isfinite(first_log(trainer)["loss"])

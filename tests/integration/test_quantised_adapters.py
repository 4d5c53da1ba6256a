"""Adapters that cannot train on a quantised base are refused with a line that trains."""

import re

import cells
import peft
import pytest
import torch
from cells import Cell
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers.core.errors import PrecisionError
from safe_trainers.weights.bitsandbytes import dora_loses_scales


bnb = pytest.importorskip("bitsandbytes")

INT8, NF4 = {"load_in_8bit": True}, {"load_in_4bit": True}
TARGETS = ["q_proj", "v_proj"]
DORA = {"use_dora": True}


def train(task, safe, adapter, weights="bf16", flag=None, quantised=NF4, **settings):
    """Trains two steps and returns their gradient norms."""
    cell = Cell("text", task, weights, flag, lora=True)
    settings = {"bf16": None} | settings if "precision" in settings else settings  # which sets the flag
    made = cells.arguments(cell, (cells.SAFE_CONFIG if safe else cells.PLAIN)[task], steps=2, **settings)
    loading = made["args"].model_init_kwargs
    made["args"].model_init_kwargs = loading | {"quantization_config": BitsAndBytesConfig(**quantised)}
    made["peft_config"] = adapter
    torch.manual_seed(0)
    try:
        trainer = (cells.SAFE if safe else cells.STOCK)[task](**made)
        trainer.train()
    finally:
        cells.reset_autocast()
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def lora(**changes):
    return LoraConfig(**{"r": 4, "target_modules": TARGETS} | changes)


def advice(error):
    """The lines that the fix of a refusal prints."""
    (problem,) = error.value.problems
    return re.findall(r"`([^`]+)`", problem.fix.text)


@pytest.mark.parametrize("task", ["sft", "grpo", "reward"])
def test_stock_crashes_with_dora_on_8_bit_layers_and_the_advice_trains(task):
    with pytest.raises(AttributeError, match="unsqueeze"):
        train(task, False, lora(**DORA), quantised=INT8)
    with pytest.raises(PrecisionError, match=r"(?s)8-bit layers on a CPU: .*q_proj.*dora-on-int8-on-cpu") as error:
        train(task, True, lora(**DORA), quantised=INT8)
    without = {
        "use_dora=False": {"adapter": lora(use_dora=False), "quantised": INT8},
        "BitsAndBytesConfig(load_in_4bit=True)": {"adapter": lora(**DORA), "quantised": NF4},
    }
    assert advice(error) == list(without)
    for changes in without.values():
        assert all(norm > 0 for norm in train(task, True, **changes))


def loaded(**quantised):
    return AutoModelForCausalLM.from_pretrained(
        cells.folder("text"), dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**quantised)
    )


def test_only_dora_on_8_bit_layers_on_a_cpu_loses_scales():
    assert dora_loses_scales(get_peft_model(loaded(**INT8), lora())) is None
    assert dora_loses_scales(get_peft_model(loaded(**NF4), lora(**DORA))) is None
    model = get_peft_model(loaded(**INT8), lora(**DORA))
    assert dora_loses_scales(model) is not None
    model.add_adapter("plain", lora())
    model.set_adapter("plain")
    assert dora_loses_scales(model) is None
    model.set_adapter("default")
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear8bitLt):  # a device of which no machine needs to have one
            layer.weight = nn.Parameter(layer.weight.data.to("meta"), requires_grad=False)
    assert dora_loses_scales(model) is None


@pytest.mark.gpu
def test_dora_on_8_bit_layers_trains_on_cuda():
    assert all(norm > 0 for norm in train("sft", True, lora(**DORA), flag="bf16", quantised=INT8, use_cpu=False))


ROAD = {"target_modules": TARGETS}
"""RoAd layers return the dtype of their adapter, so that queries and values are float32, and keys are not."""


LOADED = "load all weights in one dtype: `from_pretrained(..., dtype='float32')`"
FLOAT32 = LOADED + ", or `model_init_kwargs={'dtype': 'float32'}`"
ROWS = {
    "bf16": {"weights": "bf16"},
    "bf16, fp16=True": {"weights": "bf16", "flag": "fp16"},  # fp16 has no autocast on a CPU
    "bf16, precision='fp16'": {"weights": "bf16", "precision": "fp16"},
    "fp16": {"weights": "fp16"},
    "fp32, adapter_dtype='bfloat16'": {"weights": "fp32", "adapter_dtype": "bfloat16"},
    "fp16, fp16=True": {"weights": "fp16", "flag": "fp16"},
}
"""Settings in which attention gets two dtypes."""


needs_road = pytest.mark.skipif(not hasattr(peft, "RoadConfig"), reason="this PEFT has no RoAd")


@needs_road
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("task", ["sft", "grpo", "reward"])
def test_road_on_4_bit_layers_trains_without_autocast(task, row):
    assert all(norm > 0 for norm in train(task, True, peft.RoadConfig(**ROAD), **ROWS[row]))


@needs_road
def test_road_with_both_half_formats_is_refused_and_the_advice_trains():
    refused = {"weights": "fp16", "adapter_dtype": "bfloat16"}
    with pytest.raises(PrecisionError, match=r"weights and \w+ adapters without autocast") as error:
        train("sft", True, peft.RoadConfig(**ROAD), **refused)
    (problem,) = error.value.problems
    assert (problem.id, problem.fix.text) == ("mixed-weights-cannot-meet", FLOAT32.replace("float32", "bfloat16"))
    mended = {"weights": "bf16", "adapter_dtype": "bfloat16"}
    assert all(norm > 0 for norm in train("sft", True, peft.RoadConfig(**ROAD), **mended))


@needs_road
def test_stock_cannot_train_road_on_4_bit_layers_in_float16():
    with pytest.raises(RuntimeError, match="same dtype"):
        train("sft", False, peft.RoadConfig(**ROAD), "fp16", "fp16")


@needs_road
def test_road_on_4_bit_layers_trains_without_autocast_if_its_adapters_have_the_dtype_of_the_weights():
    assert all(norm > 0 for norm in train("sft", True, peft.RoadConfig(**ROAD), adapter_dtype="bfloat16"))

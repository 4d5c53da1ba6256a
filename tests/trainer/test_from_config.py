"""`precision` alone decides everything that has to agree."""

import copy

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import PrecisionError
from safe_trainers.testing import fp16_on_cpu


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def build(precision, peft_config=None, task="grpo", declared=None, **more):
    reset_accelerate()
    made = cells.arguments(
        Cell("text", task, "fp32", None, beta=0.1), cells.SAFE_CONFIG[task], bf16=None, precision=precision,
        model_init_kwargs=declared, learning_rate=1e-6,
    )  # fmt: skip
    return fp16_on_cpu(cells.SAFE[task])(**{**made, "peft_config": peft_config, **more})


def held(trainer):
    census = trainer.precision.model
    return set(census.weights), set(census.trainable)


@pytest.mark.parametrize(("precision", "half"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_a_frozen_base_is_loaded_in_what_it_computes_in(precision, half):
    trainer = build(precision, LORA)
    assert held(trainer) == ({half}, {"float32"})
    assert trainer.precision.policy.compute.text == half
    trainer.train()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_full_fine_tuning_loads_its_master_weights(precision):
    trainer = build(precision)
    assert held(trainer) == ({"float32"}, {"float32"})
    assert {p.dtype for p in trainer.ref_model.parameters()} == {torch.float32}
    trainer.train()


def test_what_was_written_stays():
    assert held(build("bf16", LORA, declared={"dtype": "float32"})) == ({"float32"}, {"float32"})


@pytest.mark.parametrize("declared", [None, {}, {"dtype": "bf16"}, {"torch_dtype": torch.bfloat16}], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch-dtype-renamed")
def test_the_users_arguments_are_as_before_and_a_second_trainer_reads_them_again(declared):
    reset_accelerate()
    made = cells.arguments(
        Cell("text", "grpo", "fp32", None, beta=0.1), cells.SAFE_CONFIG["grpo"], bf16=None, precision="bf16",
        model_init_kwargs=declared, learning_rate=1e-6,
    )  # fmt: skip
    args, written = made["args"], copy.deepcopy(declared)
    trainer = cells.SAFE["grpo"](**{**made, "peft_config": LORA})
    assert trainer.args is args
    assert args.model_init_kwargs is declared
    assert declared == written
    assert held(trainer) == ({"bfloat16"}, {"float32"})
    # Without adapters, the weights that are loaded are trained.
    trained = "bfloat16" if declared else "float32"
    assert held(cells.SAFE["grpo"](**made)) == ({trained}, {trained})
    assert held(cells.SAFE["grpo"](**{**made, "peft_config": LORA})) == ({"bfloat16"}, {"float32"})


def test_the_users_arguments_are_as_before_if_construction_fails():
    reset_accelerate()
    made = cells.arguments(
        Cell("text", "sft", "fp32", None), cells.SAFE_CONFIG["sft"], bf16=None, precision="bf16", model_init_kwargs={}
    )
    with pytest.raises(PrecisionError, match="not-a-peft-config"):
        cells.SAFE["sft"](**{**made, "peft_config": {"r": 4}})
    assert made["args"].model_init_kwargs == {}


@pytest.mark.parametrize(("precision", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_quantised_base_follows(precision, half):
    pytest.importorskip("bitsandbytes")
    trainer = build(precision, LORA, "sft", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    layer = trainer.model.get_base_model().model.layers[0].mlp.up_proj
    assert layer.compute_dtype == layer.weight.quant_state.dtype == half
    assert {p.dtype for name, p in trainer.model.named_parameters() if "lora_" in name} == {torch.float32}
    trainer.train()


def test_without_precision_nothing_is_chosen():
    reset_accelerate()
    made = cells.arguments(Cell("text", "sft", "fp32", "bf16"), cells.SAFE_CONFIG["sft"], model_init_kwargs=None)
    assert held(cells.SAFE["sft"](**made, peft_config=LORA)) == ({"float32"}, {"float32"})


def test_weights_that_contradict_it_are_refused_and_both_lines_work():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    with pytest.raises(PrecisionError, match="half-weights-under-other-precision") as caught:
        build("fp32", LORA, model=model)
    assert "`model.to(torch.float32)`, or write `precision='bf16'`" in str(caught.value)
    assert build("bf16", LORA, model=model).precision.policy.compute.text == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    assert build("fp32", LORA, model=model.to(torch.float32)).precision.policy.compute.text == "float32"


def test_both_flags_are_refused_before_one_of_them_is_overruled():
    with pytest.raises(PrecisionError, match="two-half-formats"):
        cells.SAFE_CONFIG["grpo"](**cells.settings(Cell("text", "grpo", "fp32", "bf16"), fp16=True))

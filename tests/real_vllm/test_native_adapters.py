"""With `adapter_sync="native"` vLLM gets the factors of LoRA adapters, and samples from the same policy as merged."""

import warnings

import image_families
import pytest
import torch
from cells import Cell
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from safe_trainers import PrecisionError, SafeGRPOConfig


SAMPLED = "sampling/sampling_logp_difference/mean"
ATTENTION = ["q_proj", "v_proj"]
SYNCS = 200
ALWAYS = ("qwen2_5_vl", "idefics3")


@pytest.fixture
def native(build):
    """Builds a trainer with native adapters that change the model much, and returns it with its warnings."""

    def make(family="text", weights="fp32", flag=None, adapter_sync="native", lora=None, **changes):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peft_config = LoraConfig(**{"r": 4, "target_modules": ATTENTION, **(lora or {})})
            cell = Cell(family, "grpo", weights, flag)
            trainer = build(cell, config=SafeGRPOConfig, adapter_sync=adapter_sync, peft_config=peft_config, **changes)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
        return trainer, " ".join(str(warning.message) for warning in caught)

    return make


def differences(trainer):
    """The mean difference in nats between the trainer's and the sampler's log-probabilities, by step."""
    trainer.train()
    return [entry[SAMPLED] for entry in trainer.state.log_history if "loss" in entry]


def engine_of(trainer):
    return trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model


@pytest.mark.parametrize("rank_scaled", [False, True])
def test_the_sampler_applies_the_factors(native, rank_scaled):
    lora = {"use_rslora": rank_scaled, "rank_pattern": {"v_proj": 12}, "alpha_pattern": {"q_proj": 3}}
    trainer, warned = native(lora=lora)
    assert max(differences(trainer)) < 1e-5
    assert "adapters-are-merged" not in warned
    assert trainer.vllm_generation.llm.llm_engine.list_loras() == {1}


def test_without_the_factors_the_sampler_would_differ(native, monkeypatch):
    trainer, _ = native()
    generate = type(trainer.vllm_generation.llm).generate.__get__(trainer.vllm_generation.llm)
    monkeypatch.setitem(vars(trainer.vllm_generation.llm), "generate", generate)
    assert min(differences(trainer)) > 1e-2


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in ALWAYS else pytest.mark.slow) for f in image_families.FAMILIES],
)
def test_image_families_get_factors(native, family):
    trainer, warned = native(family, lora={"target_modules": r".*(language|text)_model.*\.(q_proj|v_proj)"})
    assert max(differences(trainer)) < 1e-5
    assert "adapters-are-merged" not in warned


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"use_dora": True}, "a variant of LoRA, DoraLinearVariant, on model.layers.0"),
        ({"modules_to_save": ["lm_head"]}, "lm_head is trained beside the factors"),
        (
            {"target_modules": [*ATTENTION, "embed_tokens"]},
            "an adapter of type Embedding, for Embedding, on model.embed_tokens",
        ),
    ],
)
def test_an_adapter_that_vllm_does_not_apply_is_merged(native, lora, reason):
    trainer, warned = native(lora=lora)
    assert "adapters-are-merged" in warned
    assert reason in warned
    assert max(differences(trainer)) < 1e-5


def test_an_adapter_in_a_tower_is_merged(native):
    trainer, warned = native("qwen2_5_vl", lora={"target_modules": r".*(visual.*attn.qkv|language_model.*q_proj)"})
    assert "a part of a tower" in warned
    assert max(differences(trainer)) < 1e-5


@pytest.mark.parametrize("sync", ["merged", "native"])
def test_a_quantised_base_is_sent_once(native, sync):
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    loading = {"dtype": "bfloat16", "quantization_config": packing}
    trainer, _ = native(weights="bf16", flag="bf16", adapter_sync=sync, model_init_kwargs=loading)
    assert max(differences(trainer)) < 2e-2


def test_after_many_syncs_the_engine_has_the_factors_and_the_base_its_own_weights(native):
    trainer, _ = native(weights="bf16", flag="bf16")
    model, generation = trainer.model, trainer.vllm_generation
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
    generator = torch.Generator().manual_seed(0)
    generation.sync_weights()
    held = {name: p.detach().clone() for name, p in engine_of(trainer).named_parameters()}
    for sync in range(SYNCS):
        with torch.no_grad():
            for parameter in factors.values():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=generator)
        generation.sync_weights()
        if sync % 50 == 49:
            assert differing_factors(engine_of(trainer), factors) == 0
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
    assert all(torch.equal(p, held[name]) for name, p in engine_of(trainer).named_parameters())


def differing_factors(engine, factors):
    """How many elements of the engine's factors differ from the trainer's in bfloat16; the scaling is 8 / 4."""
    wrong = compared = 0
    wrapper = engine.lora_manager.modules["model.layers.0.self_attn.qkv_proj"]  # the model has one layer
    for part, name in ((0, "q_proj"), (2, "v_proj")):
        prefix = f"base_model.model.model.layers.0.self_attn.{name}"
        first, second = (factors[f"{prefix}.lora_{letter}.default.weight"] for letter in "AB")
        held = wrapper.lora_a_stacked[part][0, 0], wrapper.lora_b_stacked[part][0, 0]
        for own, expected in zip(held, (first, 2.0 * second), strict=True):
            rows, columns = expected.shape
            wrong += int((own[:rows, :columns] != expected.to(own.dtype)).sum())
            wrong += int(torch.count_nonzero(own)) - int(torch.count_nonzero(own[:rows, :columns]))
            compared += rows * columns
    assert compared == sum(p.numel() for p in factors.values())
    return wrong


def test_an_engine_that_ignores_factors_is_refused(native):
    trainer, _ = native()
    engine = engine_of(trainer)
    engine.lora_manager.modules.pop("model.layers.0.self_attn.qkv_proj")
    engine.lora_manager.packed_modules.pop("model.layers.0.self_attn.qkv_proj")
    with pytest.raises(PrecisionError, match="vllm-ignores-the-adapter") as caught:
        trainer.train()
    assert "model.layers.0.self_attn.q_proj" in str(caught.value)
    assert "fix: adapter_sync='merged'" in str(caught.value)


def test_factors_that_overflow_float16_are_refused(native):
    trainer, _ = native(weights="fp16", flag="fp16")
    with torch.no_grad():
        next(p for name, p in trainer.model.named_parameters() if "lora_B" in name).fill_(1e5)
    with pytest.raises(PrecisionError, match="merged-weights-overflow") as caught:
        trainer.vllm_generation.sync_weights()
    assert "self_attn.q_proj.lora_B.weight contains 200,000" in str(caught.value)

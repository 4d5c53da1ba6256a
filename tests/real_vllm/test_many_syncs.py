"""After many weight syncs the engine has the weights of the merge in float32, and the base has its own."""

import pytest
import torch
from cells import Cell

from safe_trainers import SafeGRPOConfig


SYNCS = 200


@pytest.fixture
def plain_linear(monkeypatch):
    """Keeps linear weights as they are: the CPU's kernels pack them in another order of elements."""

    import vllm.model_executor.layers.utils as layer_utils

    def dispatch(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", dispatch)
    for module in ("linear", "vocab_parallel_embedding"):
        target = f"vllm.model_executor.layers.{module}.dispatch_cpu_unquantized_gemm"
        monkeypatch.setattr(target, dispatch, raising=False)


def merged_by_hand(model):
    """The weights of a PEFT model merged in float32, by their names without PEFT."""
    merged = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            delta = module.lora_B["default"].weight.float() @ module.lora_A["default"].weight.float()
            merged[f"{name}.weight"] = module.base_layer.weight.float() + module.scaling["default"] * delta
    for name, parameter in model.base_model.model.named_parameters():
        if "lora_" not in name and ".base_layer." not in name:
            merged[name] = parameter.detach().float()
    return merged


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def differing(engine, merged, dtype):
    """How many elements of an engine differ from merged weights, and how many were compared."""
    wrong = compared = 0
    for name, held in engine.named_parameters():
        fused = next((part for part in FUSED if f".{part}." in name), None)
        parts = [merged[name.replace(fused, part)] for part in FUSED[fused]] if fused else [merged[name]]
        expected = torch.cat(parts).to(dtype)
        wrong += int((held[: len(expected)] != expected).sum())  # the vocabulary is padded
        compared += expected.numel()
    return wrong, compared


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("rank_scaled", [False, True])
def test_every_element_is_that_of_the_merge(build, plain_linear, weights, rank_scaled):
    flag = None if weights == "fp32" else "bf16"
    trainer = build(Cell("text", "grpo", weights, flag, lora=True), config=SafeGRPOConfig)
    model, generation = trainer.model, trainer.vllm_generation
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    if rank_scaled:
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] = 2.0 / 4**0.5  # rsLoRA
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    engine = generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    generator = torch.Generator().manual_seed(0)
    for sync in range(SYNCS):
        with torch.no_grad():
            for parameter in adapters:
                parameter += 1e-3 * torch.randn(parameter.shape, generator=generator)
        generation.sync_weights()
        if sync % 50 == 49:
            wrong, compared = differing(
                engine, merged_by_hand(model), torch.float32 if flag is None else torch.bfloat16
            )
            assert wrong == 0
            assert compared > 60_000
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)


def test_stock_changes_the_base(build, plain_linear):
    trainer = build(Cell("text", "grpo", "bf16", "bf16", lora=True), safe=False)
    adapters = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "base_layer" in n}
    for _ in range(20):
        with torch.no_grad():
            for parameter in adapters:
                parameter += 1e-2 * torch.randn(parameter.shape)
        trainer.vllm_generation.sync_weights()
    assert not all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base)

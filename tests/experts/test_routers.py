"""Routers are found by what they choose, in models of any family, and nothing else is."""

from dataclasses import replace

import moe_models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from safe_trainers.core.errors import PrecisionError
from safe_trainers.model.routers import Routers, expert_stacks, find_routers, unknown
from safe_trainers.weights.fp32_modules import ROUTERS, find_modules


needs_fused = pytest.mark.skipif(not moe_models.FUSED, reason="families have other routers in transformers 4")


@needs_fused
@pytest.mark.parametrize("family", [*moe_models.BY_HAND, "jetmoe"])
def test_every_layer_has_its_router_and_no_stack_is_left_out(family):
    model = moe_models.moe(family)
    routers = find_routers(model)
    layers = 1 if family in ("aria", "llama4") else 2
    assert len(routers.found) == layers * (2 if family == "jetmoe" else 1)  # its attention has experts too
    assert not routers.unreached
    for router in routers.found:
        assert router.chosen == moe_models.CHOSEN
        assert router.experts == moe_models.EXPERTS
        assert any(p.shape[0] == moe_models.EXPERTS for p in model.get_submodule(router.scorer).parameters())
    assert {router.counts for router in routers.found} == {(1, 2) if family in ("deepseek_v3", "glm4_moe") else (2,)}


def test_a_dense_model_is_not_run():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    model.forward = None
    assert find_routers(model) == Routers()


class Attention(nn.Module):
    """Attends to the two keys with the largest scores, as sparse attention does, beside experts without a router."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x):
        scores = x @ x.transpose(1, 2)  # (B, T, T)
        places = scores.topk(min(2, x.shape[1]), dim=-1).indices
        return x + scores.gather(-1, places).mean(-1, keepdim=True) * (x @ self.experts[0])


@needs_fused
def test_attention_that_chooses_keys_is_no_router():
    model = moe_models.moe()
    layers = model.model.layers
    layers[0].mlp = Attention()
    routers = find_routers(model)
    assert [router.name for router in routers.found] == ["model.layers.1.mlp.gate"]
    assert routers.unreached == ("model.layers.0.mlp",)


@needs_fused
def test_a_router_that_draws_its_experts_is_not_reached():
    routers = find_routers(moe_models.moe("phimoe"))
    assert not routers.found
    assert routers.unreached == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


class Block(nn.Module):
    """Experts as a list of layers, and a gate whose scores the block itself chooses from, as in transformers 4."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 6, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), 3, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out[token] += weights[token, place, None] * expert(flat[token])
        return out.view_as(x)


def test_a_block_that_chooses_itself_is_a_router_and_its_gate_has_the_weights():
    model = moe_models.moe()
    for layer in model.model.layers:
        layer.mlp = Block()
    assert list(expert_stacks(model)) == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    first, _ = find_routers(model).found
    assert (first.name, first.scorer, first.counts) == ("model.layers.0.mlp", "model.layers.0.mlp.gate", (3,))
    assert list(find_modules(model, [ROUTERS])) == [f"model.layers.{n}.mlp.gate" for n in (0, 1)]


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, torch.uint8), (255, torch.uint8), (256, torch.int16), (40_000, torch.int32)]
)
def test_the_smallest_dtype_holds_every_index_and_one_more(experts, dtype):
    router = find_routers(moe_models.moe()).found[0]
    routers = Routers((replace(router, experts=experts),))
    assert routers.dtype == dtype
    assert unknown(dtype) >= experts
    assert routers.bytes_per_token == 2 * dtype.itemsize


def test_the_compute_dtype_is_that_of_the_scores():
    model = moe_models.moe()
    assert {router.compute for router in find_routers(model, torch.bfloat16).found} == {"bfloat16"}
    assert {router.compute for router in find_routers(model).found} == {"float32"}
    half = moe_models.moe().to(torch.float16)
    assert {router.compute for router in find_routers(half).found} == {"float16"}


def test_names_are_those_of_the_base_model_under_adapters():
    plain = find_routers(moe_models.moe())
    attention = get_peft_model(moe_models.moe(), LoraConfig(target_modules=["q_proj"]))
    assert find_routers(attention).found == plain.found


@needs_fused
def test_experts_under_adapters_are_reached():
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(moe_models.moe(), LoraConfig(target_modules=[], target_parameters=targets))
    routers = find_routers(adapted)
    assert [router.name for router in routers.found] == [f"model.layers.{n}.mlp.gate" for n in (0, 1)]
    assert not routers.unreached


def test_a_model_without_experts_has_no_routers_to_compute_in_float32():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    with pytest.raises(PrecisionError, match="none was found") as refused:
        find_modules(model, [ROUTERS])
    assert [problem.id for problem in refused.value.problems] == ["no-routers"]

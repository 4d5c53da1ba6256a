"""Which adapters are sent to vLLM as factors, and why others are merged."""

import cells
import pytest
from adapted_models import adapted_llama, lora
from cells import Cell
from peft import get_peft_model
from policing import reset_accelerate
from transformers import LlamaConfig, LlamaForCausalLM

from safe_trainers import PrecisionError, SafeGRPOConfig
from safe_trainers.rollout.native_adapters import RANKS, engine_kwargs, reason_against


def adapted(**changes):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    return get_peft_model(LlamaForCausalLM(config), lora(**changes))


def reason(model, colocated=True, sharded=False):
    return reason_against(model, colocated, sharded)


def test_lora_in_linear_layers_is_sent_as_factors():
    assert reason(adapted()) is None
    assert reason(adapted(use_rslora=True, rank_pattern={"q_proj": 16}, alpha_pattern={"v_proj": 1})) is None
    assert reason(adapted_llama()) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_dora": True}, "a variant of LoRA, DoraLinearVariant, on model.layers.0.self_attn.q_proj"),
        ({"modules_to_save": ["lm_head"]}, "lm_head is trained beside the factors"),
        ({"trainable_token_indices": [1, 2]}, "an adapter of type TrainableTokensLayer"),
        ({"target_modules": ["embed_tokens"]}, "an adapter of type Embedding, for Embedding, on model.embed_tokens"),
        ({"bias": "lora_only", "target_modules": ["q_proj"], "lora_bias": True}, "an adapter with a bias on"),
        ({"r": RANKS[-1] + 1}, "rank 513, above 512, on model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_vllm_does_not_apply_is_named(changes, expected):
    assert expected in reason(adapted(**changes))


def test_a_server_or_sharded_weights_are_named():
    assert reason(adapted(), colocated=False) == "a server gets merged weights from TRL"
    assert reason(adapted(), sharded=True) == "each process holds a part of the factors"


def test_several_active_adapters_are_named():
    model = adapted()
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    assert reason(model) == "2 adapters are active"


def test_a_trained_norm_is_named():
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    assert reason(model) == "model.norm.weight is trained beside the factors"


def test_a_disabled_adapter_is_named():
    model = adapted()
    model.base_model.disable_adapter_layers()
    assert "disabled" in reason(model)


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (300, 320)])
def test_the_engine_has_room_for_the_largest_rank(rank, room):
    made = engine_kwargs({"model": "m"}, adapted(rank_pattern={"o_proj": rank}, r=1))
    assert made == {"model": "m", "enable_lora": True, "max_lora_rank": room, "max_loras": 1}


def test_settings_of_the_user_are_kept():
    assert engine_kwargs({"max_lora_rank": 64, "max_loras": 2}, adapted())["max_lora_rank"] == 64


def test_an_unknown_way_is_refused():
    reset_accelerate()
    changes = {"adapter_sync": "natve"}
    with pytest.raises(PrecisionError, match="unknown-choice") as caught:
        cells.SAFE["grpo"](**cells.arguments(Cell("text", "grpo", "fp32", None, lora=True), SafeGRPOConfig, **changes))
    assert "adapter_sync='native'" in str(caught.value)

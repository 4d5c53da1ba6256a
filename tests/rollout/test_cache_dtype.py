"""The key-value cache of rollouts under autocast: its dtype and bytes, the tokens sampled, and static caches."""

import gc
import weakref
from types import SimpleNamespace

import cells
import pytest
import torch
import trl
from cells import Cell
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, Qwen2Model, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeRLOOConfig, SafeRLOOTrainer
from safe_trainers.core.patches import replace
from safe_trainers.model.parts import find_parts
from safe_trainers.rollout import cache_dtype
from safe_trainers.rollout.cache_dtype import asks_for_cache
from safe_trainers.tiny import build_model
from upstream import TRANSFORMERS_4, needs_static_cache_of_one_dtype, static_cache_has_two_dtypes, takes


STOCK = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}
SAFE = {"grpo": (SafeGRPOTrainer, SafeGRPOConfig), "rloo": (SafeRLOOTrainer, SafeRLOOConfig)}
STATIC = {"cache_implementation": "static", "max_completion_length": 6}


def rollouts(cell, **changes):
    """The tokens that a safe trainer samples, and its weights after two steps."""
    trainer_class, config = SAFE[cell.task]
    return cells.sampled(trainer_class, cells.arguments(cell, config, **{"max_completion_length": 6, **changes}))


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize("family", ["text", "llava"])
def test_a_static_cache_samples_the_tokens_of_a_dynamic_one(family, task):
    cell = Cell(family, task, "fp32", "bf16", lora=True)
    assert rollouts(cell, **STATIC) == rollouts(cell)


@needs_static_cache_of_one_dtype
def test_stock_crashes_where_its_generate_runs_under_autocast():
    cell = Cell("text", "grpo", "fp32", "bf16")
    with pytest.raises(RuntimeError, match="index_copy_"):
        STOCK["grpo"](**cells.arguments(cell, trl.GRPOConfig, **STATIC)).train()
    assert rollouts(cell, **STATIC) == rollouts(cell)


def test_the_implementation_in_generation_kwargs_counts_too():
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    given = {"generation_kwargs": {"cache_implementation": "static"}}
    assert rollouts(cell, **given) == rollouts(cell)


@pytest.mark.parametrize(("flag", "replaces"), [("none", False), ("bf16", True)])
def test_a_static_cache_is_changed_only_under_autocast(flag, replaces, monkeypatch):
    replaced = []

    def noting(patch, owner, name, value):
        replaced.append(name)
        replace(patch, owner, name, value)

    monkeypatch.setattr("safe_trainers.rollout.cache_dtype.replace", noting)
    rollouts(Cell("text", "grpo", "fp32", flag), **STATIC)
    assert (set(replaced) == {"update"}) is replaces


def test_no_hook_stays_on_the_model():
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    trainer = SafeGRPOTrainer(**cells.arguments(cell, SafeGRPOConfig, **STATIC))
    hooks = sum(len(module._forward_pre_hooks) for module in trainer.model.modules())
    trainer.train()
    assert sum(len(module._forward_pre_hooks) for module in trainer.model.modules()) == hooks
    assert asks_for_cache(trainer)


GENERATED = "past_key_values" if takes(Qwen2Model.forward, "past_key_values") else "cache"
"""The argument of models and of `generate` that is the key-value cache: `cache` since transformers 5.24."""


def watch_caches(monkeypatch):
    """The caches of all later calls of `generate`."""
    caches = []
    generate = GenerationMixin.generate

    def keeping(model, *args, **kwargs):
        caches.append(DynamicCache(config=model.config.get_text_config()))
        return generate(model, *args, **{**kwargs, GENERATED: caches[-1]})

    monkeypatch.setattr(GenerationMixin, "generate", keeping)
    return caches


def stored(caches):
    """The dtypes of stored keys and values, and the number of bytes of all caches."""
    tensors = [tensor for cache in caches for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return {tensor.dtype for tensor in tensors}, sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize(("family", "lora"), [("text", True), ("text", False), ("llava", True), ("gemma3", True)])
def test_a_half_cache_takes_fewer_bytes_and_samples_the_same_tokens(family, lora, task, monkeypatch):
    cell = Cell(family, task, "fp32", "bf16", lora=lora)
    caches = watch_caches(monkeypatch)
    half = rollouts(cell)
    dtypes, nbytes = stored(caches)
    caches.clear()
    monkeypatch.setattr(cache_dtype, "KERNELS", frozenset())
    assert rollouts(cell) == half
    assert dtypes == {torch.bfloat16}
    wide, wide_nbytes = stored(caches)
    assert torch.float32 in wide
    assert wide_nbytes == nbytes * (1.5 if static_cache_has_two_dtypes() else 2)  # keys alone, or values too


def test_no_cache_outlives_its_turn(monkeypatch):
    """Without the help of Python's collector of reference cycles, as in stock."""
    alive, died = [], []
    generate = GenerationMixin.generate

    def keeping(model, *args, **kwargs):
        cache = DynamicCache(config=model.config.get_text_config())
        alive.append(weakref.ref(cache, died.append))
        return generate(model, *args, **{**kwargs, GENERATED: cache})

    monkeypatch.setattr(GenerationMixin, "generate", keeping)
    gc.disable()
    try:
        rollouts(Cell("text", "grpo", "fp32", "bf16", lora=True))
    finally:
        gc.enable()
    assert len(died) == len(alive) > 0


def test_stock_stores_float32(monkeypatch):
    caches = watch_caches(monkeypatch)
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    STOCK["grpo"](**cells.arguments(cell, trl.GRPOConfig)).train()
    assert stored(caches)[0] == {torch.float32}


def test_attention_in_the_code_of_the_model_keeps_float32(monkeypatch):
    caches = watch_caches(monkeypatch)
    loading = {"dtype": "float32", "attn_implementation": "eager"}
    rollouts(Cell("text", "grpo", "fp32", "bf16", lora=True), model_init_kwargs=loading)
    assert {layer.keys.dtype for cache in caches for layer in cache.layers} == {torch.float32}


class Text(torch.nn.Module):
    """A text model of which some layers disable autocast, as modules that are held in float32 do."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, past_key_values):
        one = torch.ones(1, 1, 2, 4)
        kept = past_key_values.update(one, one.bfloat16(), 0)
        with torch.autocast("cpu", enabled=False):
            return *kept, *past_key_values.update(one, one, 1)


def test_attention_that_is_held_in_float32_gets_float32():
    text, cache = Text(), DynamicCache()
    with cache_dtype.cache_prepared(text, autocast=True), torch.autocast("cpu", torch.bfloat16):
        made = text(past_key_values=cache)
    assert [tensor.dtype for tensor in made] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert "update" not in vars(cache)


def test_a_static_cache_that_is_used_again_takes_another_dtype():
    """Transformers before 5.23 keeps it on the model from one call of `generate` to the next."""
    model = build_model("text").eval()
    cache = StaticCache(config=model.config, max_cache_len=16)
    prompt = torch.tensor([[5, 6, 7]])

    def tokens():
        cache.reset()
        given = {GENERATED: cache, "max_new_tokens": 4, "do_sample": False}
        made = model.generate(prompt, **given).tolist()
        return made, {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)}

    fresh = model.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
    with cache_dtype.cache_prepared(find_parts(model).text, autocast=True), torch.autocast("cpu", torch.bfloat16):
        assert tokens()[1] == {torch.bfloat16}
    assert tokens() == (fresh, {torch.float32})


SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128, "sliding_window": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    ["deepseek_v2", "gemma3_text", "glm4", "gpt_neox", "granite", "mixtral", "phi3", "qwen3", "qwen3_moe", "stablelm"],
)
def test_families_compute_the_same_logits(family, monkeypatch):
    """Each has an attention of its own: latent keys, sliding windows, partial rotary embeddings, normalised keys."""
    if family == "deepseek_v2" and TRANSFORMERS_4:
        pytest.skip("its keys are in half precision before they are stored")
    default = CONFIG_MAPPING[family]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**{name: value for name, value in SMALL.items() if hasattr(default, name)}),
        attn_implementation="sdpa",
    ).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1)

    def sample():
        caches.clear()
        torch.manual_seed(1)
        prompt = torch.randint(3, 100, (2, 10))
        text = find_parts(model).text
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), cache_dtype.cache_prepared(text, autocast=True):
            made = model.generate(
                prompt, max_new_tokens=12, min_new_tokens=12, do_sample=True, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        return made.sequences.tolist(), torch.stack(made.logits), *stored(caches)

    caches = watch_caches(monkeypatch)
    tokens, logits, dtypes, nbytes = sample()
    monkeypatch.setattr(cache_dtype, "KERNELS", frozenset())
    wide_tokens, wide_logits, wide_dtypes, wide_nbytes = sample()
    assert dtypes == {torch.bfloat16}
    assert torch.float32 in wide_dtypes
    assert nbytes < wide_nbytes
    assert tokens == wide_tokens
    assert torch.equal(logits, wide_logits)

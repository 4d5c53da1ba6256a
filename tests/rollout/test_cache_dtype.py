"""The key-value cache of rollouts under autocast: its dtype and bytes, the tokens sampled, and static caches."""

from types import SimpleNamespace

import cells
import pytest
import torch
import trl
from cells import Cell
from transformers import DynamicCache, GenerationMixin

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeRLOOConfig, SafeRLOOTrainer
from safe_trainers.core.patches import replace
from safe_trainers.rollout import cache_dtype
from safe_trainers.rollout.cache_dtype import asks_for_cache
from upstream import needs_static_cache_of_one_dtype


STOCK = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}
SAFE = {"grpo": (SafeGRPOTrainer, SafeGRPOConfig), "rloo": (SafeRLOOTrainer, SafeRLOOConfig)}
STATIC = {"cache_implementation": "static", "max_completion_length": 6}


def rollouts(cell, **changes):
    """The tokens that a safe trainer samples, and its weights after two steps."""
    trainer_class, config = SAFE[cell.task]

    class Keeping(trainer_class):
        def _generate_single_turn(self, *args, **kwargs):
            made = super()._generate_single_turn(*args, **kwargs)
            self.sampled = [*getattr(self, "sampled", []), made[0] if isinstance(made, tuple) else made]
            return made

    torch.manual_seed(0)
    trainer = Keeping(**cells.arguments(cell, config, **{"max_completion_length": 6, **changes}))
    trainer.train()
    return trainer.sampled, cells.fingerprint(trainer.model)


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
def test_the_cache_is_changed_only_under_autocast(flag, replaces, monkeypatch):
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


def watch_caches(monkeypatch):
    """The caches of all later calls of `generate`."""
    caches = []
    generate = GenerationMixin.generate

    def keeping(model, *args, **kwargs):
        caches.append(DynamicCache(config=model.config.get_text_config()))
        return generate(model, *args, **{**kwargs, "past_key_values": caches[-1]})

    monkeypatch.setattr(GenerationMixin, "generate", keeping)
    return caches


def stored(caches):
    """The dtypes of stored keys and values, and the number of bytes of all caches."""
    tensors = [tensor for cache in caches for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return {tensor.dtype for tensor in tensors}, sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize(("family", "lora"), [("text", True), ("text", False), ("llava", True), ("gemma3", True)])
def test_a_half_cache_takes_half_of_the_bytes_and_samples_the_same_tokens(family, lora, task, monkeypatch):
    cell = Cell(family, task, "fp32", "bf16", lora=lora)
    caches = watch_caches(monkeypatch)
    half = rollouts(cell)
    dtypes, nbytes = stored(caches)
    caches.clear()
    monkeypatch.setattr(cache_dtype, "KERNELS", frozenset())
    assert rollouts(cell) == half
    assert dtypes == {torch.bfloat16}
    assert stored(caches) == ({torch.float32}, 2 * nbytes)


def test_stock_stores_float32(monkeypatch):
    caches = watch_caches(monkeypatch)
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    STOCK["grpo"](**cells.arguments(cell, trl.GRPOConfig)).train()
    assert stored(caches)[0] == {torch.float32}


def test_attention_in_the_code_of_the_model_keeps_float32(monkeypatch):
    caches = watch_caches(monkeypatch)
    loading = {"dtype": "float32", "attn_implementation": "eager"}
    rollouts(Cell("text", "grpo", "fp32", "bf16", lora=True), model_init_kwargs=loading)
    assert stored(caches)[0] == {torch.float32}


@pytest.mark.parametrize("autocast", [True, False])
def test_attention_that_is_held_in_float32_gets_a_float32_cache(autocast):
    cache = DynamicCache()
    text = torch.nn.Module()
    text.config = SimpleNamespace(_attn_implementation="sdpa")
    text.forward = lambda past_key_values: past_key_values.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    with cache_dtype.cache_in_one_dtype(text), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        keys, values = text(past_key_values=cache)
    assert {keys.dtype, values.dtype} == {torch.bfloat16 if autocast else torch.float32}

"""A static key-value cache works in rollouts under autocast, and samples the same tokens as a dynamic one."""

import cells
import pytest
import torch
import trl
from cells import Cell

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeRLOOConfig, SafeRLOOTrainer
from safe_trainers.core.patches import replace
from safe_trainers.rollout.static_cache import asks_for_cache
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


@pytest.mark.parametrize(
    ("flag", "replaces"), [("none", False), pytest.param("bf16", True, marks=needs_static_cache_of_one_dtype)]
)
def test_the_cache_is_changed_only_under_autocast(flag, replaces, monkeypatch):
    replaced = []

    def noting(patch, owner, name, value):
        replaced.append(name)
        replace(patch, owner, name, value)

    monkeypatch.setattr("safe_trainers.rollout.static_cache.replace", noting)
    rollouts(Cell("text", "grpo", "fp32", flag), **STATIC)
    assert (set(replaced) == {"update"}) is replaces


def test_no_hook_stays_on_the_model():
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    trainer = SafeGRPOTrainer(**cells.arguments(cell, SafeGRPOConfig, **STATIC))
    hooks = sum(len(module._forward_pre_hooks) for module in trainer.model.modules())
    trainer.train()
    assert sum(len(module._forward_pre_hooks) for module in trainer.model.modules()) == hooks
    assert asks_for_cache(trainer)

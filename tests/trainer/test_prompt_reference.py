"""The reference of a policy with virtual tokens, which is its base, computes in the dtype that the report states."""

import copy
import warnings

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from torch import nn

from safe_trainers import PrecisionWarning
from safe_trainers.core.patches import replaced_by
from upstream import needs_disabled_flag


pytestmark = needs_disabled_flag


TUNING = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
METHODS = {
    "prompt": lambda: PromptTuningConfig(**TUNING),
    "encoder": lambda: PromptEncoderConfig(**TUNING, encoder_hidden_size=16),
}
TASKS = [pytest.param(task, marks=cells.NEEDS_STABLE[task]) for task in ("dpo", "kto", "grpo", "rloo")]


def build(task, safe, flag="bf16", method="prompt", weights="fp32", adapter=None, **settings):
    cell = Cell("text", task, weights, flag, lora=True, beta=0.1)
    made = cells.arguments(cell, cells.PLAIN[task], steps=1, **settings)
    made["peft_config"] = adapter or METHODS[method]()
    torch.manual_seed(0)
    return (cells.SAFE if safe else cells.STOCK)[task](**made)


def build_from(model, flag):
    """Builds a trainer for a model that has virtual tokens."""
    made = cells.arguments(Cell("text", "sft", "fp32", flag), cells.PLAIN["sft"], steps=1) | {"model": model}
    made["args"].model_init_kwargs = None
    return cells.SAFE["sft"](**made)


def train(trainer):
    """Trains, and returns the logs of the first step and the dtypes that layers computed without virtual tokens."""
    model, seen = trainer.model, set()

    def look(layer, args, output):
        if model._adapters_disabled:
            seen.add(output.dtype)

    hooks = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        return cells.train_logs(trainer)[0], seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("task", TASKS)
def test_the_reference_computes_under_the_autocast_of_the_run(task):
    _, stock = train(build(task, safe=False))
    assert (torch.float32 in stock) == (task in ("dpo", "kto"))  # TRL scores completions under autocast
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        trainer = build(task, safe=True)
        _, seen = train(trainer)
    assert seen == {torch.bfloat16}
    assert trainer.precision.policy.reference.value == {"bfloat16"}


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_is_that_of_log_probabilities_that_stock_computes_before_training(method):
    before, _ = train(build("dpo", safe=False, method=method, precompute_ref_log_probs=True))
    for settings in ({}, {"precompute_ref_log_probs": True}):
        log, _ = train(build("dpo", safe=True, method=method, **settings))
        assert {key: log[key] for key in ("loss", "rewards/margins")} == {
            key: before[key] for key in ("loss", "rewards/margins")
        }
    stock, _ = train(build("dpo", safe=False, method=method))
    assert stock["loss"] != before["loss"]


def test_a_prefix_has_the_reference_of_the_run_too():
    seen = {}
    for safe in (False, True):
        trainer = build("dpo", safe, adapter=PrefixTuningConfig(**TUNING), gradient_checkpointing=False)
        _, seen[safe] = train(trainer)
    assert torch.float32 in seen[False]
    assert seen[True] == {torch.bfloat16}


@pytest.mark.parametrize("task", TASKS)
def test_without_autocast_the_run_is_that_of_stock(task):
    trainer = build(task, safe=True, flag=None)
    assert not replaced_by(trainer.model, "disable_adapter")
    log, _ = train(trainer)
    stock, _ = train(build(task, safe=False, flag=None))
    assert log["loss"] == stock["loss"]


@pytest.mark.parametrize("task", TASKS[2:])
def test_where_stock_scores_under_autocast_the_run_is_that_of_stock(task):
    logs = [train(build(task, safe, weights="bf16"))[0] for safe in (False, True)]
    for key in ("loss", "kl", "entropy"):
        assert logs[0][key] == logs[1][key]


def test_adapters_without_virtual_tokens_are_disabled_by_peft_alone():
    trainer = build("dpo", safe=True, adapter=LoraConfig(target_modules=["q_proj"]))
    assert not replaced_by(trainer.model, "disable_adapter")


def test_a_second_trainer_and_a_copy_have_their_own_reference():
    model = build("dpo", safe=True).model
    assert replaced_by(model, "disable_adapter") == ["prompt-reference"]
    copied = copy.deepcopy(model)
    assert vars(copied)["disable_adapter"].args[0] is copied
    with copied.disable_adapter():
        assert copied._adapters_disabled
        assert not model._adapters_disabled
    build_from(model, None)
    assert not replaced_by(model, "disable_adapter")
    assert not replaced_by(model, "forward")
    build_from(model, "bf16")
    assert replaced_by(model, "disable_adapter") == ["prompt-reference"]


def test_an_error_leaves_the_forward_pass_of_the_model():
    model = build("dpo", safe=True).model
    before = model.forward
    with pytest.raises(RuntimeError, match="inside"), model.disable_adapter():
        raise RuntimeError("inside")
    assert model.forward == before
    assert not model._adapters_disabled


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_virtual_tokens_is_not_taken_for_one_of_another_trainer(method, weights):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        trainer = build("sft", safe=True, method=method, weights=weights)
        for _ in range(2):
            cells.train_logs(trainer)
    said = [str(one.message) for one in caught if issubclass(one.category, PrecisionWarning)]
    assert [text for text in said if "half-trainables" not in text] == []

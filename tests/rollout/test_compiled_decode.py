"""With `compile_decode`, rollouts have a static cache, and one graph for all tokens after the first."""

import gc
import weakref
from functools import partial

import cells
import pytest
import torch
import trl
from cells import Cell
from datasets import Dataset
from peft import PromptTuningConfig
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.generation.configuration_utils import CompileConfig

from safe_trainers import (
    PrecisionBase,
    PrecisionError,
    PrecisionMixin,
    PrecisionWarning,
    SafeGRPOConfig,
    SafeRLOOConfig,
    SafeSFTConfig,
)
from safe_trainers.model.parts import unwrap
from safe_trainers.rollout.compiled_decode import CACHE_STEP
from upstream import TRL_0


CONFIGS = {"grpo": SafeGRPOConfig, "rloo": SafeRLOOConfig, "sft": SafeSFTConfig}
TOKENS = 6


class Watched(TrainerCallback):
    """Counts the graphs after each step."""

    def __init__(self):
        self.graphs = []

    def on_step_end(self, *args, **kwargs):
        self.graphs.append(counters["stats"]["unique_graphs"])


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "0")  # transformers sets it when it compiles
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def on_cpu():
    """Compiles on a CPU too, with the kernels of eager PyTorch: the graph is that of CUDA, the values are exact."""
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


def settings(**changes):
    generation = {"min_new_tokens": TOKENS, "compile_config": on_cpu()}
    return {"max_completion_length": TOKENS, "generation_kwargs": generation, "logging_steps": 1, **changes}


def recording(stock, safe=True):
    """A trainer that keeps the completions of its rollouts, and its generation config and hooks in them."""

    class Recording(*((PrecisionMixin, stock, PrecisionBase) if safe else (stock,))):
        def _generate_single_turn(self, *args, **kwargs):
            made = super()._generate_single_turn(*args, **kwargs)
            self.completions = [*getattr(self, "completions", []), made[0] if isinstance(made, tuple) else made]
            self.after = vars(self.generation_config).copy()
            return made

    return Recording


def trained(cell, steps=4, safe=True, dataset=None, **changes):
    stock = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[cell.task]
    config = CONFIGS[cell.task] if safe else cells.PLAIN[cell.task]
    arguments = cells.arguments(cell, config, steps=steps, **settings(**changes))
    if dataset is not None:
        arguments["train_dataset"] = dataset
    trainer, watched = recording(stock, safe)(**arguments), Watched()
    trainer.add_callback(watched)
    torch.manual_seed(0)
    trainer.train()
    return trainer, watched.graphs


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "cell",
    [
        Cell("text", "grpo", "fp32", "bf16", lora=True),
        Cell("text", "rloo", "bf16", "bf16", lora=True),
        Cell("text", "grpo", "fp32", None),
        Cell("llava", "grpo", "bf16", "bf16", lora=True),
        Cell("qwen2_5_vl", "grpo", "fp32", "bf16", lora=True),
        Cell("gemma3", "rloo", "fp32", "bf16"),
    ],
    ids=str,
)
def test_rollouts_are_compiled_once_and_have_the_same_bits(cell):
    trainer, graphs = trained(cell, compile_decode=True)
    assert graphs[0] == 0  # the model has hooks in the first rollout
    assert graphs[1] >= 1
    assert graphs[1:] == graphs[1:2] * 3
    assert trainer.after["disable_compile"] is not TRL_0  # which passes it to each call
    assert trainer.after["cache_implementation"] is None
    eager, none = trained(cell, cache_implementation="static")
    assert set(none) == {graphs[3]}  # nothing more
    assert trainer.completions == eager.completions
    assert losses(trainer) == losses(eager)


def test_stock_compiles_nothing():
    cell = Cell("text", "grpo", "fp32", None)
    _, graphs = trained(cell, safe=False, cache_implementation="static")
    assert graphs == [0] * 4


def test_a_release_of_trl_that_turns_compilation_off_in_each_call(monkeypatch):
    """As TRL 0.29 does; newer releases write it into the generation config."""
    original = LlamaForCausalLM.generate

    def generate(self, *args, **kwargs):
        given.append(kwargs.get("disable_compile"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    given = []

    class Older(trl.GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            model = self.model
            called = model.generate
            model.generate = partial(called, disable_compile=True)
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                model.generate = called

    class Safe(PrecisionMixin, Older, PrecisionBase):
        pass

    cell, watched = Cell("text", "grpo", "fp32", None, lora=True), Watched()
    trainer = Safe(**cells.arguments(cell, SafeGRPOConfig, steps=3, **settings(compile_decode=True)))
    trainer.add_callback(watched)
    trainer.train()
    assert given == [True, None, None]
    assert watched.graphs == [0, 1, 1]


def test_longer_prompts_do_not_compile_again():
    prompts = [" ".join(["word"] * count) for count in (2, 9, 20, 13, 5, 27, 32, 3)]
    cell = Cell("text", "grpo", "fp32", None)
    trainer, graphs = trained(cell, steps=8, dataset=Dataset.from_dict({"prompt": prompts}), compile_decode=True)
    if "max_cache_len" not in vars(trainer.generation_config):
        pytest.skip("this release of transformers has no `max_cache_len`")
    assert len({len(ids) for ids in trainer.completions[-1]}) == 1
    assert graphs[1:] == [1] * 7
    assert trainer.model._previous_max_cache_length == CACHE_STEP


def test_the_hooks_of_gradient_checkpointing_are_back_after_a_compiled_rollout(monkeypatch):
    original, during = LlamaForCausalLM.generate, []

    def generate(self, *args, **kwargs):
        during.append(len(self.get_input_embeddings()._forward_hooks))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    cell = Cell("text", "grpo", "fp32", None, lora=True)
    trainer, _ = trained(cell, compile_decode=True, gradient_checkpointing=True)
    assert during[0] > 0
    assert during[1:] == [0] * 3
    assert len(trainer.model.get_input_embeddings()._forward_hooks) == 1
    plain, _ = trained(cell, cache_implementation="static", gradient_checkpointing=True)
    assert losses(trainer) == losses(plain)


def test_input_gradients_that_the_user_has_enabled_stay_enabled():
    """Without gradient checkpointing, TRL does not enable them again after a rollout."""
    cell = Cell("text", "grpo", "fp32", None, lora=True)
    changes = settings(compile_decode=True, gradient_checkpointing=False)
    arguments = cells.arguments(cell, SafeGRPOConfig, steps=3, **changes)
    trainer = recording(trl.GRPOTrainer)(**{**arguments, "callbacks": [watched := Watched()]})
    trainer.model.enable_input_require_grads()
    trainer.train()
    assert watched.graphs[1] >= 1
    assert len(trainer.model.get_input_embeddings()._forward_hooks) == 1


def test_a_device_that_transformers_does_not_compile_for_is_named():
    cell = Cell("text", "grpo", "fp32", None)
    changes = settings(generation_kwargs={"min_new_tokens": TOKENS}, compile_decode=True)
    trainer = recording(trl.GRPOTrainer)(**cells.arguments(cell, SafeGRPOConfig, steps=3, **changes))
    with pytest.warns(PrecisionWarning, match=r"does not compile `generate` for .* the device \(cpu\)") as given:
        trainer.train()
    assert sum("decode-not-compiled" in str(warning.message) for warning in given) == 1


def test_an_error_in_a_rollout_restores_the_generation_config():
    cell = Cell("text", "grpo", "fp32", None)
    arguments = cells.arguments(cell, SafeGRPOConfig, steps=3, **settings(compile_decode=True))
    trainer = recording(trl.GRPOTrainer)(**arguments)
    before = vars(trainer.generation_config).copy()
    original, calls = trainer.model.generate, []

    def fails(*args, **kwargs):
        calls.append(vars(kwargs["generation_config"])["cache_implementation"])
        if len(calls) == 2:
            raise RuntimeError("in a rollout")
        return original(*args, **kwargs)

    trainer.model.generate = fails
    with pytest.raises(RuntimeError, match="in a rollout"):
        trainer.train()
    assert calls == [None, "static"]
    assert vars(trainer.generation_config) == before


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ("sft", {}, "has no rollouts"),
        ("grpo", {"torch_compile": True}, "`torch_compile=True` has compiled the whole model"),
        (
            "grpo",
            {"cache_implementation": "dynamic"},
            "`cache_implementation='dynamic'` is not of fixed size",
        ),
        ("grpo", {"generation_kwargs": {"num_beams": 2}}, "beam search moves the entries of the cache"),
        ("grpo", {"generation_kwargs": {"use_cache": False}}, "`use_cache=False` uses no cache"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_the_line_works(task, changes, reason):
    cell = Cell("text", task, "fp32", None)
    arguments = cells.arguments(cell, CONFIGS[task], compile_decode=True, **changes)
    with pytest.raises(PrecisionError, match="decode-cannot-be-compiled") as refused:
        cells.SAFE[task](**arguments)
    assert reason in str(refused.value)
    assert "drop `compile_decode=True`" in str(refused.value)
    if "torch_compile" not in changes:
        cells.SAFE[task](**cells.arguments(cell, CONFIGS[task], **changes)).train()


def test_prompt_learning_is_refused():
    arguments = cells.arguments(Cell("text", "grpo", "fp32", None), SafeGRPOConfig, compile_decode=True)
    arguments["peft_config"] = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(PrecisionError, match="prompt learning puts tokens into the cache"):
        cells.SAFE["grpo"](**arguments)


def test_a_resumed_run_compiles_its_first_rollout(tmp_path):
    cell = Cell("text", "grpo", "fp32", None)
    given = {"compile_decode": True, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    whole, _ = trained(cell, **given, output_dir=str(tmp_path / "whole"))
    trained(cell, 2, **given, output_dir=str(tmp_path / "parts"))
    arguments = cells.arguments(cell, SafeGRPOConfig, 4, **settings(**given, output_dir=str(tmp_path / "parts")))
    resumed, watched = recording(trl.GRPOTrainer)(**arguments), Watched()
    resumed.add_callback(watched)
    counters.clear()
    torch._dynamo.reset()
    resumed.train(resume_from_checkpoint=True)
    assert watched.graphs[0] > 0
    assert resumed.completions == whole.completions[2:]
    assert cells.fingerprint(resumed.model) == cells.fingerprint(whole.model)


def test_the_model_is_freed_with_its_trainer():
    trainer, _ = trained(Cell("text", "grpo", "fp32", None), 3, compile_decode=True)
    model = weakref.ref(unwrap(trainer.model))
    del trainer
    torch._dynamo.reset()
    gc.collect()
    assert model() is None


def test_replayed_experts_and_compiled_rollouts_exclude_each_other():
    cell = Cell("gpt_oss", "grpo", "fp32", None)
    changes = {"compile_decode": True, "router_replay": "rollout"}
    with pytest.raises(PrecisionError, match="compiles the choice into the rollout"):
        cells.SAFE["grpo"](**cells.arguments(cell, SafeGRPOConfig, **changes))

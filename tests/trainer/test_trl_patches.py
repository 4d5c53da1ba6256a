"""The captures that construction needs: what they hold, and that each is undone."""

import copy
import pickle
import sys

import cells
import pytest
import torch
import trl
from cells import Cell
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import safe_trainers.trainer.trl_patches as captures
from safe_trainers import PrecisionBase, PrecisionError, PrecisionMixin, SafeGRPOTrainer, SafeSFTTrainer
from safe_trainers.trainer.trl_patches import AdapterGuard, construction
from upstream import needs_trl_1


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
MODULES = ("sft_trainer", "grpo_trainer", "rloo_trainer", "reward_trainer")


def quantized():
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True)
    return AutoModelForCausalLM.from_pretrained(cells.folder("text"), quantization_config=config, dtype=torch.float32)


def makers():
    return {name: vars(sys.modules[f"trl.trainer.{name}"])["get_peft_model"] for name in MODULES}


def arguments(task="sft", **changes):
    made = cells.arguments(Cell("text", task, "fp32", None), cells.PLAIN[task], model_init_kwargs=None)
    return {**made, **changes}


@pytest.mark.parametrize("module", MODULES)
def test_every_trainer_makes_its_adapters_by_the_name_that_is_captured(module):
    assert makers()[module] is get_peft_model


def test_the_capture_is_undone_after_construction_and_after_a_failure():
    SafeSFTTrainer(**arguments(peft_config=LORA))
    assert set(makers().values()) == {get_peft_model}
    wrong = LoraConfig(target_modules=["no_such_module"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="no_such_module"):
        SafeSFTTrainer(**arguments(peft_config=wrong))
    assert set(makers().values()) == {get_peft_model}


def test_a_given_model_is_as_it_was_after_a_failure():
    model = get_peft_model(quantized(), LORA)
    before = {name: (p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="peft_config"):
        SafeSFTTrainer(**arguments(model=model, peft_config=LORA))
    assert {name: (p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()} == before


def test_no_adapter_is_copied():
    """The memory that PEFT wrote to is the memory that is trained."""
    model = get_peft_model(quantized(), LORA)
    before = {name: p.data_ptr() for name, p in model.named_parameters() if p.requires_grad}
    trainer = SafeSFTTrainer(**arguments(model=model))
    assert {name: p.data_ptr() for name, p in trainer.model.named_parameters() if p.requires_grad} == before
    assert trainer._adapter_guard._originals == {}


def test_nothing_is_cast_while_the_guard_is_on(monkeypatch):
    """Not one more tensor is alive at any time of construction than in stock, whose cast finds nothing to do."""
    cast = []
    original = torch.Tensor.to

    def counting(self, *args, **kwargs):
        if torch.bfloat16 in args and self.dtype == torch.float32:
            cast.append(self.shape)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    SafeGRPOTrainer(**arguments("grpo", model=quantized(), peft_config=LORA))
    assert cast == []
    with_reference = cells.PLAIN["grpo"](**cells.settings(Cell("text", "grpo", "fp32", None, beta=0.1)))
    given = get_peft_model(quantized(), LORA)
    SafeGRPOTrainer(**arguments("grpo", model=given, args=with_reference))
    assert cast == []
    assert {"default", "ref"} == set(given.peft_config)
    trl.GRPOTrainer(**arguments("grpo", model=quantized(), peft_config=LORA))
    assert len(cast) == 4


def test_adapters_that_were_made_behind_the_guard_are_refused():
    class Elsewhere(trl.SFTTrainer):
        def __init__(self, model, **kwargs):
            super().__init__(model=PeftModel(model, LORA), **kwargs)

    class SafeElsewhere(PrecisionMixin, Elsewhere, PrecisionBase):
        pass

    with pytest.raises(PrecisionError, match=r"4 bfloat16 trainables of a quantised model, such as .*lora_A") as error:
        SafeElsewhere(**arguments(model=quantized()))
    assert f"TRL {trl.__version__} casts the trainable parameters" in str(error.value)


def test_a_guard_holds_only_what_trl_casts():
    guard = AdapterGuard()
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(cells.folder("text")), LORA)
    guard.protect(model)
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)
    assert guard.release(model) == []


@pytest.mark.parametrize(("installed", "kept"), [(None, True), ("0.19.2", True), ("0.19.3", False), ("1.0", False)])
def test_zero3_keeps_adapters_in_float32_where_deepspeed_can(installed, kept, monkeypatch):
    """TRL asks PEFT for adapters in the base's dtype under ZeRO-3. DeepSpeed's version is a stand-in."""

    def version(name):
        if installed is None:
            raise captures.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(captures.metadata, "version", version)
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    with construction(trl.SFTTrainer, model, lambda model: False) as guard:
        made = makers()["sft_trainer"](model, LORA, autocast_adapter_dtype=False)
    assert guard.fresh
    dtypes = {p.dtype for name, p in made.named_parameters() if "lora_" in name}
    assert dtypes == {torch.bfloat16 if kept else torch.float32}


KINDS = {
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_adapter_that_peft_leaves_trainable_is_held_too(kind):
    """For the reference TRL adds a copy of a given adapter, and then casts what of it can be trained."""

    def given():
        torch.manual_seed(0)
        return get_peft_model(quantized(), LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS[kind]))

    args = cells.PLAIN["grpo"](**cells.settings(Cell("text", "grpo", "fp32", None, beta=0.1)))
    stock = trl.GRPOTrainer(**arguments("grpo", model=given(), args=args))
    model = given()
    safe = SafeGRPOTrainer(**arguments("grpo", model=model, args=args))
    assert "add_adapter" not in vars(model)
    held = {name: (p.requires_grad, p.dtype) for name, p in safe.model.named_parameters() if "lora_" in name}
    assert {dtype for _, dtype in held.values()} == {torch.float32}
    trained = {name: p.requires_grad for name, p in stock.model.named_parameters()}
    assert {name: p.requires_grad for name, p in safe.model.named_parameters()} == trained
    safe.train()


def test_adapters_that_a_helper_of_trl_makes_are_held():
    """Online DPO and others make them in a function of another module."""
    trainer = pytest.importorskip("trl.experimental.online_dpo").OnlineDPOTrainer
    utils = sys.modules["trl.experimental.utils"]
    with construction(trainer, None, lambda model: False) as guard:
        made = utils.get_peft_model(quantized(), LORA)
        assert guard.fresh
        assert not any(p.requires_grad for p in made.parameters())
    assert utils.get_peft_model is get_peft_model
    assert all(p.requires_grad for name, p in made.named_parameters() if "lora_" in name)


def test_a_class_of_a_module_that_was_not_registered_is_built():
    namespace = {"__name__": "a_script_that_was_run"}
    scripted = type("Mine", (SafeSFTTrainer,), {"__module__": namespace["__name__"]})
    assert scripted(**arguments(peft_config=LORA)).model is not None


def embedding_hooks(trainer):
    return len(trainer.model.get_input_embeddings()._forward_hooks)


@needs_trl_1("adds no hooks in rollouts")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_rollouts_add_no_hooks_and_in_stock_they_do(task, lora):
    cell, found, losses = Cell("text", task, "fp32", None, lora=lora), {}, {}
    for safe in (False, True):
        for steps in (1, 4):
            settings = {"gradient_checkpointing": True, "logging_steps": 1}
            trainer = (cells.SAFE if safe else cells.STOCK)[task](
                **cells.arguments(cell, cells.PLAIN[task], steps=steps, **settings)
            )
            torch.manual_seed(0)
            trainer.train()
            found[safe, steps] = embedding_hooks(trainer)
            losses[safe, steps] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            assert len(losses[safe, steps]) == steps
    assert found[False, 4] >= found[False, 1] + 3
    assert found[True, 4] == found[True, 1] > 0
    assert losses[True, 4] == losses[False, 4]  # and the gradients are the same


def test_the_hooks_are_still_removed_by_the_model():
    trainer = SafeSFTTrainer(**arguments(peft_config=LORA))
    base = trainer.model.get_base_model()
    base.enable_input_require_grads()
    base.enable_input_require_grads()
    before = embedding_hooks(trainer)
    base.disable_input_require_grads()
    assert embedding_hooks(trainer) == before - 1


def test_a_model_can_still_be_copied_and_pickled():
    cell, settings = Cell("text", "sft", "fp32", None), {"gradient_checkpointing": False}
    trainer = SafeSFTTrainer(**cells.arguments(cell, cells.PLAIN["sft"], **settings))
    trainer.train()
    for made in (copy.deepcopy(trainer.model), pickle.loads(pickle.dumps(trainer.model))):
        made.enable_input_require_grads()
        made.enable_input_require_grads()
        assert len(made.get_input_embeddings()._forward_hooks) == 1
        assert len(trainer.model.get_input_embeddings()._forward_hooks) == 0

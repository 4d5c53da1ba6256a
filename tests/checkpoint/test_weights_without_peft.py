"""A resume of trained weights that PEFT does not write to its files, or writes in another shape."""

import shutil
import warnings
from types import SimpleNamespace

import cells
import pytest
import torch
from cells import Cell
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from safe_trainers import CheckpointError, PrecisionWarning, merge_and_save
from safe_trainers.checkpoint.adapters import TRAINED, misfit, not_written_by_peft
from safe_trainers.checkpoint.folder import MARKER, common_files
from upstream import needs_epoch_after_skip


STEPS = 6


class Allocate(TrainerCallback):
    """Lets AdaLoRA choose ranks after each step, as its documentation says."""

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        model.base_model.update_and_allocate(state.global_step + 1)


def lora():
    return LoraConfig(r=4, target_modules=["q_proj"])


def p_tuning(size=16):
    return PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=size)


def prompt_tuning():
    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def adalora():
    return AdaLoraConfig(
        init_r=6, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=STEPS, target_modules=["q_proj", "v_proj"]
    )


CASES = {"p-tuning": (p_tuning, ()), "unfrozen": (lora, ("layers.0.mlp.up_proj.weight", "model.norm.weight"))}


def build(folder, adapter, unfrozen=(), safe=True, **changes):
    reset_accelerate()
    torch.manual_seed(0)
    settings = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 1, **changes}
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)["sft"]
    made = cells.arguments(Cell("text", "sft", "fp32", None), config, STEPS, **settings, model_init_kwargs=None)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(made["model"]), adapter)
    for name, parameter in model.named_parameters():
        if name.endswith(unfrozen or ("nothing",)):
            parameter.requires_grad_(True)
    made["model"] = model
    if "eval_strategy" in changes:
        made["eval_dataset"] = cells.dataset("sft", "text", rows=2)
    callbacks = [Allocate()] if isinstance(adapter, AdaLoraConfig) else []
    return (cells.SAFE if safe else cells.STOCK)["sft"](**made, callbacks=callbacks)


@needs_epoch_after_skip
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_weights_that_peft_does_not_write_are_resumed(case, safe, tmp_path):
    adapter, unfrozen = CASES[case]
    whole = build(tmp_path, adapter(), unfrozen, safe)
    whole.train()
    resumed = build(tmp_path, adapter(), unfrozen, safe)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (cells.fingerprint(whole.model) == cells.fingerprint(resumed.model)) == safe
    assert (tmp_path / "checkpoint-3" / TRAINED).is_file() == safe
    assert (TRAINED in common_files(tmp_path / "checkpoint-3")) == safe


@needs_epoch_after_skip
@pytest.mark.parametrize("step", [2, 3, 5])
def test_adalora_is_resumed_after_it_has_removed_ranks(step, tmp_path):
    whole = build(tmp_path, adalora())
    whole.train()
    resumed = build(tmp_path, adalora())
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert cells.fingerprint(whole.model) == cells.fingerprint(resumed.model)
    assert whole.model.peft_config["default"].rank_pattern == resumed.model.peft_config["default"].rank_pattern


def test_stock_cannot_load_the_ranks_that_adalora_has_kept(tmp_path):
    build(tmp_path, adalora(), safe=False).train()
    with pytest.raises(RuntimeError, match="size mismatch"):
        build(tmp_path, adalora(), safe=False).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_kept_ranks_of_a_stock_checkpoint_are_refused_with_what_helps(tmp_path):
    build(tmp_path, adalora(), safe=False).train()
    with pytest.raises(CheckpointError, match="adapter-does-not-fit") as refused:
        build(tmp_path, adalora()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "resume from one before the first removal" in str(refused.value)
    build(tmp_path / "2", adalora()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("case", [*CASES, "adalora"])
def test_the_best_weights_are_loaded_at_the_end(case, tmp_path):
    adapter, unfrozen = {**CASES, "adalora": (adalora, ())}[case]
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    ended = build(tmp_path, adapter(), unfrozen, metric_for_best_model="eval_loss", learning_rate=1e-3, **best)
    ended.train()
    step = int(ended.state.best_model_checkpoint.rpartition("-")[2])
    assert step < STEPS
    short = build(tmp_path / "short", adapter(), unfrozen, save_strategy="no", learning_rate=1e-3)
    short.add_callback(StopAt(step))
    short.train()
    assert cells.fingerprint(short.model) == cells.fingerprint(ended.model)


class StopAt(TrainerCallback):
    """Ends a run early; the learning rate falls as in a whole one."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_without_these_weights_is_reported(case, tmp_path):
    adapter, unfrozen = CASES[case]
    build(tmp_path, adapter(), unfrozen, safe=False).train()
    trainer = build(tmp_path, adapter(), unfrozen)
    with pytest.warns(PrecisionWarning, match="trained-weights-not-in-checkpoint") as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    lacking = not_written_by_peft(trainer.model)
    text = next(str(w.message) for w in caught if "trained-weights-not-in-checkpoint" in str(w.message))
    assert f"lacks {len(lacking)} trained tensors, such as {next(iter(lacking))}" in text


@needs_epoch_after_skip
@pytest.mark.parametrize("adapter", [lora, prompt_tuning])
def test_what_peft_writes_is_not_written_twice(adapter, tmp_path):
    whole = build(tmp_path, adapter())
    assert not not_written_by_peft(whole.model)
    whole.train()
    assert not (tmp_path / "checkpoint-3" / TRAINED).exists()
    resumed = build(tmp_path, adapter())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert cells.fingerprint(whole.model) == cells.fingerprint(resumed.model)


def test_weights_of_another_shape_are_refused(tmp_path):
    build(tmp_path, p_tuning()).train()
    trainer = build(tmp_path, p_tuning(size=8))
    before = cells.fingerprint(trainer.model)
    with pytest.raises(CheckpointError, match=r"is \[16.*\] in the file and \[8.*\] in this run"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert cells.fingerprint(trainer.model) == before


def test_a_checkpoint_whose_file_was_removed_is_damaged(tmp_path):
    build(tmp_path, p_tuning()).train()
    (tmp_path / "checkpoint-6" / TRAINED).unlink()
    trainer = build(tmp_path, p_tuning())
    with pytest.raises(CheckpointError, match=f"{TRAINED} is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "copy")
    (tmp_path / "copy" / MARKER).unlink()
    with pytest.raises(CheckpointError, match="parts of the checkpoint were removed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "copy"))


def test_under_fsdp1_a_warning_names_what_no_checkpoint_has(tmp_path, monkeypatch):
    """A stand-in for FSDP1, which needs a GPU."""
    trainer = build(tmp_path, p_tuning())
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "fsdp_plugin", SimpleNamespace(fsdp_version=1))
    with pytest.warns(PrecisionWarning, match="trained-weights-not-saved"):
        trainer._choose_checkpoint(None)


def warned(finding, trainer_of):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of()
    return trainer, [str(w.message) for w in caught if finding in str(w.message)]


def test_a_saved_adapter_without_trained_weights_is_announced_and_the_advice_works(tmp_path):
    unfrozen = ("layers.0.mlp.up_proj.weight", "model.norm.weight")
    finding = "trained-weights-not-in-adapter"
    trainer, messages = warned(finding, lambda: build(tmp_path / "run", lora(), unfrozen))
    assert len(messages) == 1
    assert "`modules_to_save=['model.layers.0.mlp.up_proj', 'model.norm']`" in messages[0]
    trainer.train()
    learned = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if n.endswith(unfrozen)}

    def weights_of(model):
        return {n: p for n, p in model.named_parameters() if n.endswith(unfrozen)}

    # The saved adapter lacks them, as the warning says.
    trainer.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert not any(torch.equal(weight, learned[name]) for name, weight in weights_of(loaded).items())
    # Both pieces of advice.
    merge_and_save(trainer.model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in learned.items():
        assert torch.equal(merged[name.removeprefix("base_model.model.")], weight)
    config = lora()
    config.modules_to_save = ["model.layers.0.mlp.up_proj", "model.norm"]
    trainer, messages = warned(finding, lambda: build(tmp_path / "advised", config))
    assert not messages
    trainer.train()
    trainer.save_model(str(tmp_path / "whole"))
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "whole"))
    inputs = torch.arange(8)[None]  # (B, T)
    with torch.no_grad():
        assert torch.equal(loaded(inputs).logits, trainer.model.eval()(inputs).logits)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], bias="all"),
        LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True),
        LoraConfig(target_modules=["embed_tokens"]),
        LNTuningConfig(target_modules=["norm"]),
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        VeraConfig(target_modules=["q_proj"]),
        p_tuning(),
        prompt_tuning(),
        adalora(),
    ],
    ids=lambda config: str(config.peft_type).split(".")[-1],
)
def test_adapters_that_peft_writes_are_not_announced(config, tmp_path):
    _, messages = warned("trained-weights-not-in-adapter", lambda: build(tmp_path, config))
    assert not messages


def test_partitioned_adapters_fit_by_the_shape_that_the_engine_recorded(tmp_path):
    """Stands for ZeRO-3, which partitions adapters when training begins, before a second resume."""
    trainer = build(tmp_path, lora())
    trainer.train()
    model, folder = trainer.model, tmp_path / "checkpoint-3"
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert misfit(folder, model) is None
    first = next(p for p in model.parameters() if p.requires_grad)
    first.ds_shape = torch.Size([1, 1])
    assert "adapter-does-not-fit" in str(misfit(folder, model))


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_a_resume_with_a_reference_adapter_loads_the_trained_one(task, tmp_path, monkeypatch):
    """Older releases of transformers load only the adapters that are in folders of their own: a stand-in for them."""
    cell, out = Cell("text", task, "fp32", None, beta=0.1), tmp_path

    def trainer():
        torch.manual_seed(1)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(cells.folder("text")), lora())
        settings = {"steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(out), "beta": 0.1}
        reset_accelerate()
        made = cells.arguments(cell, cells.SAFE_CONFIG[task], model_init_kwargs=None, **settings)
        return cells.SAFE[task](**{**made, "model": model})

    whole = trainer()
    torch.manual_seed(5)
    whole.train()
    assert (out / "checkpoint-2" / "ref" / "adapter_model.safetensors").is_file()
    shutil.rmtree(out / "checkpoint-4")

    def load_folders(self, checkpoint, model=None):
        self.model.load_adapter(f"{checkpoint}/ref", "ref", is_trainable=False)
        self.model.set_adapter("default")

    monkeypatch.setattr(Trainer, "_load_from_checkpoint", load_folders)
    resumed = trainer()
    torch.manual_seed(5)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad == ("lora" in name and ".default." in name)

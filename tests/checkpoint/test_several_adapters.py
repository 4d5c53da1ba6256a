"""A resume and the best model keep which adapters are active, which weights are trained, and what adapters hold."""

import cells
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from safe_trainers import SafeSFTConfig, SafeSFTTrainer


TARGETS = ["q_proj", "v_proj"]


def adapted(*names, frozen=()):
    """A model with an adapter for each name, all active; weights with a part of a name in `frozen` are not trained."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(list(names))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def build(folder, model, trainer=SafeSFTTrainer, config=SafeSFTConfig, **changes):
    given = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False, **changes,
    }  # fmt: skip
    made = {"args": config(**given), "train_dataset": cells.dataset("sft", "text")}
    made["eval_dataset"] = cells.dataset("sft", "text", 4)
    return trainer(model, processing_class=AutoTokenizer.from_pretrained(cells.folder("text")), **made)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("names", "frozen"),
    [(("default", "aux"), (".aux.",)), (("policy",), ("lora_A",)), (("default",), ("lora_A",))],
    ids=["an active adapter that is not trained", "half of a named adapter", "half of an adapter"],
)
def test_a_resumed_run_is_the_uninterrupted_one(names, frozen, tmp_path):
    whole = build(tmp_path / "whole", adapted(*names, frozen=frozen))
    whole.train()
    build(tmp_path / "parts", adapted(*names, frozen=frozen), max_steps=1).train()
    resumed = build(tmp_path / "parts", adapted(*names, frozen=frozen))
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    assert resumed.model.active_adapters == list(names)
    assert cells.fingerprint(resumed.model) == cells.fingerprint(whole.model)


@pytest.mark.parametrize("name", ["default", "policy"])
def test_the_best_model_is_loaded_whatever_its_adapter_is_called(name, tmp_path):
    trainer = build(
        tmp_path, adapted(name), learning_rate=0.5, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == max(seen) != seen[-1]  # the last step was not the best one
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(seen), abs=1e-6)

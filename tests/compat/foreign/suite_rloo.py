"""How users test and use `RLOOTrainer`."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer
from trl.trainer import RLOOConfig, RLOOTrainer

from safe_trainers import tiny


PLAIN = Dataset.from_dict({"prompt": ["what is in the picture?", "how many shapes?", "which colour?"] * 4})
CONVERSATIONS = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PLAIN["prompt"]]})


def by_tokens(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def by_length(completions, **kwargs):
    return [float(len(str(completion)) % 5) for completion in completions]


@pytest.mark.parametrize("data", [PLAIN, CONVERSATIONS], ids=["plain", "conversational"])
def test_it_trains(saved, short, weights, data):
    trainer = RLOOTrainer(model=saved("text"), reward_funcs=by_tokens, args=RLOOConfig(**short), train_dataset=data)
    assert isinstance(trainer, RLOOTrainer)
    assert trainer.ref_model is not None  # beta is 0.05 unless it is set
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("options", [
    {"beta": 0.0}, {"num_iterations": 2}, {"normalize_advantages": True}, {"reward_clip_range": (-0.5, 0.5)},
    {"mask_truncated_completions": True}, {"top_p": 0.9, "top_k": 5, "temperature": 0.8},
    {"bf16": True}, {"gradient_checkpointing": True}, {"disable_dropout": True},
], ids=str)  # fmt: skip
def test_options(saved, short, options):
    args = RLOOConfig(**{**short, **options})
    trainer = RLOOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 2
    assert all(norm == norm for norm in norms)


def test_with_a_peft_config(saved, short, weights):
    trainer = RLOOTrainer(
        model=saved("text"), reward_funcs=by_tokens, args=RLOOConfig(**short), train_dataset=PLAIN,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    assert isinstance(trainer.model, PeftModel)
    assert trainer.ref_model is None
    before = weights(trainer.model)
    trainer.train()
    assert any("lora_B" in name for name in before.changed(trainer.model))


def test_with_a_peft_model(saved, short, weights):
    base = AutoModelForCausalLM.from_pretrained(saved("text"))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = RLOOTrainer(
        model=model, reward_funcs=by_tokens, args=RLOOConfig(**short, beta=0.1), train_dataset=PLAIN,
        processing_class=AutoTokenizer.from_pretrained(saved("text")),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert any("lora_B" in name for name in before.changed(trainer.model))


def test_rewards_of_every_kind(saved, short):
    async def waiting(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def unsure(completions, **kwargs):
        return [None] * len(completions)

    trainer = RLOOTrainer(
        model=saved("text"), reward_funcs=[by_length, waiting, unsure, saved("reward")],
        args=RLOOConfig(**short, reward_weights=[1.0, 0.5, 2.0, 0.1]), train_dataset=CONVERSATIONS,
    )  # fmt: skip
    trainer.train()
    first = trainer.state.log_history[0]
    parts = [first[f"rewards/{name}/mean"] for name in ("by_length", "waiting")]
    assert parts[1] > 0
    model = next(value for key, value in first.items() if key.startswith("rewards/") and "reward/mean" in key)
    # Older releases log the sum without the weights.
    sums = (parts[0] + 0.5 * parts[1] + 0.1 * model, parts[0] + parts[1] + model)
    assert any(first["reward"] == pytest.approx(total, abs=1e-5) for total in sums)


def test_evaluation(saved, short):
    args = RLOOConfig(**short, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    trainer = RLOOTrainer(
        model=saved("text"),
        reward_funcs=by_tokens,
        args=args,
        train_dataset=PLAIN,
        eval_dataset=PLAIN.select(range(4)),
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == metrics["eval_loss"]
    assert any("eval_reward" in entry for entry in trainer.state.log_history)


def test_save_load_and_resume(saved, short, tmp_path):
    args = RLOOConfig(**{**short, "save_strategy": "steps", "save_steps": 1})
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = RLOOTrainer(
        model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN, peft_config=lora
    )
    trainer.train()
    trainer.save_model(tmp_path / "final")
    base = AutoModelForCausalLM.from_pretrained(saved("text"))
    loaded = PeftModel.from_pretrained(base, tmp_path / "final")
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name and ".ref." not in name:
            assert torch.equal(loaded.get_parameter(name), parameter)
    again = RLOOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN, peft_config=lora)
    again.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-1"))
    assert again.state.global_step == 2


def test_a_model_card(saved, short):
    trainer = RLOOTrainer(model=saved("text"), reward_funcs=by_tokens, args=RLOOConfig(**short), train_dataset=PLAIN)
    trainer.create_model_card(model_name="mine", dataset_name="shapes")
    assert "RLOO" in Path(trainer.args.output_dir, "README.md").read_text()


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_pictures(saved, short, weights, family):
    trainer = RLOOTrainer(
        model=saved(family), reward_funcs=[tiny.attribute_match, by_tokens], args=RLOOConfig(**short),
        train_dataset=tiny.prompt_dataset(8), processing_class=AutoProcessor.from_pretrained(saved(family)),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert any("vision" in name for name in before.changed(trainer.model))


def test_what_is_wrong_is_refused_as_before(saved, short):
    with pytest.raises(ValueError, match="train_dataset"):
        RLOOTrainer(model=saved("text"), reward_funcs=by_tokens, args=RLOOConfig(**short))

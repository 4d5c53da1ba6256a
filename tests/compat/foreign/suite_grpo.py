"""How users test and use `GRPOTrainer`."""

import asyncio
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer as GRPOTrainerOfItsModule

from safe_trainers import tiny


PLAIN = Dataset.from_dict({"prompt": ["what is in the picture?", "how many shapes?", "which colour?"] * 4})
CONVERSATIONS = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PLAIN["prompt"]]})


def by_tokens(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def by_length(completions, **kwargs):
    return [float(len(str(completion)) % 5) for completion in completions]


class Mine(GRPOTrainer):
    """A user's own trainer."""

    def compute_loss(self, *args, **kwargs):
        self.asked = getattr(self, "asked", 0) + 1
        return super().compute_loss(*args, **kwargs)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_names_of_the_trainer_are_one_class():
    assert GRPOTrainer is GRPOTrainerOfItsModule is trl.GRPOTrainer is trl.trainer.grpo_trainer.GRPOTrainer
    assert issubclass(Mine, GRPOTrainer)


def test_the_least_that_can_be_given(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = GRPOConfig("out", use_cpu=True, bf16=False, report_to="none")
    trainer = GRPOTrainer(saved("text"), by_tokens, config, PLAIN)
    assert isinstance(trainer, GRPOTrainer)
    assert type(trainer) is GRPOTrainer
    assert trainer.args.beta == 0.0
    assert trainer.ref_model is None
    assert trainer.processing_class.pad_token is not None


@pytest.mark.parametrize("data", [PLAIN, CONVERSATIONS], ids=["plain", "conversational"])
def test_it_trains(saved, short, weights, data):
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=data)
    before = weights(trainer.model)
    result = trainer.train()
    assert trainer.state.global_step == 2
    assert result.training_loss == pytest.approx(sum(losses(trainer)) / 2)
    assert before.all_changed(trainer.model)


def test_it_trains_in_bfloat16(saved, short, weights):
    args = GRPOConfig(**{**short, "bf16": True})
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_loss_types(saved, short, loss_type):
    args = GRPOConfig(**short, loss_type=loss_type, num_iterations=2)
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    trainer.train()
    assert len(losses(trainer)) == 2
    assert any(entry.get("grad_norm", 0) > 0 for entry in trainer.state.log_history)


@pytest.mark.parametrize("importance_sampling_level", ["token", "sequence"])
def test_a_reference_and_importance_sampling(saved, short, weights, importance_sampling_level):
    args = GRPOConfig(**short, beta=0.1, num_iterations=2, importance_sampling_level=importance_sampling_level)
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    before, reference = weights(trainer.model), weights(trainer.ref_model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert not reference.changed(trainer.ref_model)
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 0


def test_a_reference_that_follows(saved, short, weights):
    args = GRPOConfig(**short, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    before = {name: p.detach().clone() for name, p in trainer.ref_model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(p, before[name]) for name, p in trainer.ref_model.named_parameters())


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_with_a_peft_config(saved, short, weights, beta):
    trainer = GRPOTrainer(
        model=saved("text"), reward_funcs=by_tokens, args=GRPOConfig(**short, beta=beta), train_dataset=PLAIN,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    assert isinstance(trainer.model, PeftModel)
    assert trainer.ref_model is None
    before = weights(trainer.model)
    trainer.train()
    assert {name.rpartition("lora_")[2][0] for name in before.changed(trainer.model)} == {"A", "B"}


def test_with_a_peft_model(saved, short, weights):
    base = AutoModelForCausalLM.from_pretrained(saved("text"))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = GRPOTrainer(
        model=model, reward_funcs=by_tokens, args=GRPOConfig(**short, gradient_checkpointing=True),
        train_dataset=PLAIN, processing_class=AutoTokenizer.from_pretrained(saved("text")),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)


def test_a_live_model_and_no_processing_class(saved, short, weights):
    model = AutoModelForCausalLM.from_pretrained(saved("text"))
    trainer = GRPOTrainer(model=model, reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=PLAIN)
    before = weights(model)
    trainer.train()
    assert before.all_changed(model)
    assert trainer.processing_class.padding_side == "left"


def test_several_rewards_with_weights(saved, short):
    args = GRPOConfig(**short, reward_weights=[0.7, 0.3])

    def one(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = GRPOTrainer(model=saved("text"), reward_funcs=[one, by_length], args=args, train_dataset=PLAIN)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        one, length = entry["rewards/one/mean"], entry["rewards/by_length/mean"]
        # Older releases log the sum without the weights.
        assert entry["reward"] in (pytest.approx(0.7 * one + 0.3 * length), pytest.approx(one + length))


def test_rewards_that_wait_that_know_nothing_and_that_are_models(saved, short, weights):
    async def waiting(completion_ids, **kwargs):
        await asyncio.sleep(0)
        return [float(len(ids)) for ids in completion_ids]

    def unsure(completions, **kwargs):
        return [None] * len(completions)

    trainer = GRPOTrainer(
        model=saved("text"), reward_funcs=[by_tokens, waiting, unsure, saved("reward")], args=GRPOConfig(**short),
        train_dataset=CONVERSATIONS,
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert before.all_changed(trainer.model)
    assert trainer.state.log_history[0]["rewards/waiting/mean"] > 0


def test_rewards_get_columns_and_the_state(saved, short):
    seen = []

    def remembering(prompts, completions, number, trainer_state, **kwargs):
        seen.append((trainer_state.global_step, list(number)))
        return [float(n) for n in number]

    data = PLAIN.add_column("number", list(range(len(PLAIN))))
    trainer = GRPOTrainer(
        model=saved("text"), reward_funcs=remembering, args=GRPOConfig(**short, shuffle_dataset=False),
        train_dataset=data,
    )  # fmt: skip
    trainer.train()
    assert seen == [(0, [0, 0, 1, 1]), (1, [2, 2, 3, 3])]


def test_evaluation(saved, short):
    args = GRPOConfig(
        **short, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=2
    )
    trainer = GRPOTrainer(
        model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN,
        eval_dataset={"a": PLAIN.select(range(4)), "b": CONVERSATIONS.select(range(4))},
    )  # fmt: skip
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry}
    assert {"eval_a_loss", "eval_b_loss", "eval_reward"} <= logged


def test_generation_kwargs(saved, short):
    args = GRPOConfig(**short, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, repetition_penalty=1.1,
                      generation_kwargs={"length_penalty": 1.0})  # fmt: skip
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    trainer.train()
    assert trainer.generation_config.top_k == 5
    assert trainer.generation_config.length_penalty == 1.0


@pytest.mark.parametrize("options", [
    {"scale_rewards": "none"}, {"mask_truncated_completions": True}, {"top_entropy_quantile": 0.5},
    {"delta": 2.0, "epsilon_high": 0.3}, {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"cast_lm_head_to_fp32": True}, {"log_completions": True},
], ids=str)  # fmt: skip
def test_options(saved, short, options):
    trainer = GRPOTrainer(
        model=saved("text"), reward_funcs=by_tokens, args=GRPOConfig(**short, **options), train_dataset=PLAIN
    )
    trainer.train()
    assert all(loss == loss for loss in losses(trainer))
    assert len(losses(trainer)) == 2


def test_without_tools(saved, short):
    trainer = GRPOTrainer(
        model=saved("text"), reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=CONVERSATIONS, tools=None
    )
    assert not trainer.tools
    trainer.train()
    assert "tools/call_frequency" not in trainer.state.log_history[0]


def test_callbacks_and_a_subclass(saved, short):
    class Counting(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.steps += 1
            control.should_training_stop = True

    counting = Counting()
    trainer = Mine(
        model=saved("text"), reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=PLAIN,
        callbacks=[counting],
    )  # fmt: skip
    trainer.train()
    assert (counting.steps, trainer.state.global_step, trainer.asked) == (1, 1, 1)


def test_an_optimizer_of_ones_own(saved, short, weights):
    model = AutoModelForCausalLM.from_pretrained(saved("text"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = GRPOTrainer(
        model=model, reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=PLAIN,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )  # fmt: skip
    before = weights(model)
    trainer.train()
    assert before.all_changed(model)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1 / 3)


def test_save_load_and_resume(saved, short, tmp_path):
    args = GRPOConfig(**{**short, "save_strategy": "steps", "save_steps": 1})
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    AutoTokenizer.from_pretrained(tmp_path / "final")

    again = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=args, train_dataset=PLAIN)
    again.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-1"))
    assert again.state.global_step == 2
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [1, 2]


def test_a_model_card(saved, short):
    trainer = GRPOTrainer(model=saved("text"), reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=PLAIN)
    trainer.create_model_card(model_name="mine", tags=["some-tag"])
    card = Path(trainer.args.output_dir, "README.md").read_text()
    assert "GRPO" in card
    assert "some-tag" in card
    assert "trl" in trainer.model.model_tags


@pytest.mark.parametrize(("family", "beta"), [("llava", 0.1), ("gemma3", 0.0)])
def test_pictures(saved, short, weights, family, beta):
    trainer = GRPOTrainer(
        model=saved(family), reward_funcs=[tiny.attribute_match, by_tokens], args=GRPOConfig(**short, beta=beta),
        train_dataset=tiny.prompt_dataset(8),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert any("vision" in name for name in before.changed(trainer.model))


def test_pictures_with_lora(saved, short, weights):
    trainer = GRPOTrainer(
        model=saved("llava"), reward_funcs=by_tokens, args=GRPOConfig(**short), train_dataset=tiny.prompt_dataset(8),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    assert any("lora_B" in name for name in before.changed(trainer.model))


def test_what_is_wrong_is_refused_as_before(saved, short):
    with pytest.raises(ValueError, match="reward"):
        GRPOTrainer(
            model=saved("text"), reward_funcs=[by_tokens, by_length], args=GRPOConfig(**short, reward_weights=[1.0]),
            train_dataset=PLAIN,
        )  # fmt: skip

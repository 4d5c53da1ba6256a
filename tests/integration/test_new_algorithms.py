"""A safe trainer of another TRL algorithm is two lines, and a helper that checks its contract on a real run."""

import warnings

import cells
import pytest
import torch
import transformers
import trl
from cells import Cell
from datasets import Dataset

from safe_trainers import PrecisionBase, PrecisionMixin, SafeGRPOTrainer, SafeSFTTrainer, tiny
from safe_trainers.testing import assert_safe


def preferences(rows=8):
    made = tiny.sft_dataset(rows, seed=0)
    answers = [made[i]["completion"] for i in range(rows)]
    return Dataset.from_dict(
        {
            "prompt": [made[i]["prompt"] for i in range(rows)],
            "images": [[made[i]["image"]] for i in range(rows)],
            "chosen": answers,
            "rejected": answers[1:] + answers[:1],
        }
    )


def common(task_config, **changes):
    settings = cells.settings(Cell("aria", "sft", "bf16", "bf16"))
    settings.pop("max_length")
    return task_config(**{**settings, "model_init_kwargs": {"dtype": "bfloat16"}, **changes})


def test_the_four_trainers_keep_their_contract():
    for task in ("grpo", "rloo", "sft"):
        contract = assert_safe(
            cells.SAFE[task], **cells.arguments(Cell("aria", task, "bf16", "bf16"), cells.PLAIN[task])
        )
        assert contract.missing() == []
    reward = cells.arguments(Cell("text", "reward", "fp32", "bf16"), cells.PLAIN["reward"])
    contract = assert_safe(cells.SAFE["reward"], **reward)
    assert contract["rollout"].state == contract["media"].state == "not applicable"


def test_dpo_on_a_vision_model():
    class SafeDPOTrainer(PrecisionMixin, trl.DPOTrainer, PrecisionBase):
        pass

    def arguments():
        return {
            "model": str(cells.folder("aria")),
            "args": common(trl.DPOConfig, bf16=False, max_length=None),
            "train_dataset": preferences(),
        }

    with pytest.raises(RuntimeError, match="should be the same"):
        trl.DPOTrainer(**arguments()).train()
    cells.reset_autocast()
    contract = assert_safe(SafeDPOTrainer, **arguments())
    assert contract["rollout"].state == "not applicable"
    assert contract.fired["inputs"] > 0


def test_gmpo_a_descendant_of_grpo():
    gmpo = pytest.importorskip("trl.experimental.gmpo")

    class SafeGMPOTrainer(PrecisionMixin, gmpo.GMPOTrainer, PrecisionBase):
        pass

    made = cells.arguments(Cell("aria", "grpo", "bf16", None), gmpo.GMPOConfig)
    with pytest.raises(RuntimeError, match="should be the same"):
        gmpo.GMPOTrainer(**made).train()
    cells.reset_autocast()
    made = cells.arguments(Cell("aria", "grpo", "bf16", None), gmpo.GMPOConfig)
    contract = assert_safe(SafeGMPOTrainer, **made)
    assert contract["rollout"].state == contract["buffer"].state == "covered"


def test_one_that_generates_elsewhere_says_that_its_rollout_is_not_covered():
    online = pytest.importorskip("trl.experimental.online_dpo")

    class SafeOnlineDPOTrainer(PrecisionMixin, online.OnlineDPOTrainer, PrecisionBase):
        pass

    settings = cells.settings(Cell("text", "sft", "fp32", "bf16"))
    settings.pop("max_length")
    prompts = cells.dataset("grpo", "text").select_columns(["prompt"])
    tokenizer = tiny.build_processor("text")
    contract = assert_safe(
        SafeOnlineDPOTrainer,
        model=tiny.build_model("text"),
        ref_model=tiny.build_model("text"),
        reward_funcs=lambda prompts, completions, completion_ids, **kwargs: [float(len(c)) for c in completion_ids],
        args=online.OnlineDPOConfig(**settings, max_new_tokens=4, max_length=64),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    assert contract["rollout"].state == "not covered"
    assert contract["adapters"].state == "covered"


class Deaf(SafeGRPOTrainer):
    """Bypasses the hook of rollouts."""

    def _generate_single_turn(self, *args, **kwargs):
        return trl.GRPOTrainer._generate_single_turn(self, *args, **kwargs)


class Blind(SafeSFTTrainer):
    """Bypasses the hook of media."""

    def _prepare_input(self, data):
        return transformers.Trainer._prepare_input(self, data)


def test_media_of_a_class_with_its_own_training_step_are_not_covered():
    online = pytest.importorskip("trl.experimental.online_dpo")

    class SafeOnlineDPOTrainer(PrecisionMixin, online.OnlineDPOTrainer, PrecisionBase):
        pass

    settings = cells.settings(Cell("llava", "sft", "fp32", None))
    settings.pop("max_length")
    contract = assert_safe(
        SafeOnlineDPOTrainer,
        model=tiny.build_model("llava"),
        ref_model=tiny.build_model("llava"),
        reward_funcs=lambda prompts, completions, completion_ids, **kwargs: [float(len(c)) for c in completion_ids],
        args=online.OnlineDPOConfig(**settings, max_new_tokens=4),
        train_dataset=tiny.prompt_dataset(8, seed=0).select_columns(["prompt", "image"]),
        processing_class=tiny.build_processor("llava"),
    )
    assert contract.due["inputs"] > 0
    assert contract.fired["inputs"] == 0
    assert contract["media"].state == "not covered"


def test_media_that_bypass_their_hook_are_an_error():
    with pytest.raises(AssertionError, match="media: covered, but its hook 'inputs' never fired"):
        assert_safe(Blind, **cells.arguments(Cell("llava", "sft", "fp32", "bf16"), trl.SFTConfig))


@pytest.mark.parametrize(
    ("trainer", "task", "area"),
    [(Deaf, "grpo", "rollout: the hook 'rollout'"), (Blind, "sft", "media: the hook 'inputs'")],
)
def test_a_run_warns_once_of_a_guarantee_that_it_does_not_keep(trainer, task, area):
    cells.reset_autocast()
    run = trainer(**cells.arguments(Cell("llava", task, "fp32", "bf16"), cells.PLAIN[task], steps=3))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run.train()
    found = [str(warning.message) for warning in given if "never fired" in str(warning.message)]
    assert len(found) == 1
    assert found[0].startswith(f"{area} never fired")
    verdicts = [str(problem) for problem in run.precision.report.verdicts if "never fired" in str(problem)]
    assert len(verdicts) == 1


def test_a_vision_model_that_trains_on_text_keeps_its_contract():
    text = cells.dataset("sft", "llava").remove_columns("image")
    arguments = cells.arguments(Cell("llava", "sft", "fp32", "bf16"), trl.SFTConfig)
    contract = assert_safe(SafeSFTTrainer, **{**arguments, "train_dataset": text})
    assert contract["media"].state == "covered"
    assert (contract.fired["inputs"], contract.due["inputs"]) == (0, 0)


def test_the_helper_finds_a_hook_that_never_fires():
    with pytest.raises(AssertionError, match="rollout: covered, but its hook 'rollout' never fired"):
        assert_safe(Deaf, **cells.arguments(Cell("llava", "grpo", "bf16", None), trl.GRPOConfig))


def test_the_helper_finds_a_rollout_in_another_dtype():
    class Stray(SafeGRPOTrainer):
        def compute_context(self):
            return torch.autocast("cpu", enabled=False)

    with pytest.raises(AssertionError, match="vision_tower computes in float32 in rollout, bfloat16 in training"):
        # PEFT's `generate` goes past the forward that accelerate wraps in autocast, in each release.
        assert_safe(Stray, **cells.arguments(Cell("llava", "grpo", "fp32", "bf16", lora=True), trl.GRPOConfig))


def test_the_helper_finds_weights_that_changed_their_dtype():
    class Lossy(SafeGRPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.model.model.vision_tower.to(torch.bfloat16)
            return loss

    with pytest.raises(AssertionError, match="weights changed dtype during training"):
        assert_safe(Lossy, **cells.arguments(Cell("llava", "grpo", "fp32", "bf16"), trl.GRPOConfig, steps=1))

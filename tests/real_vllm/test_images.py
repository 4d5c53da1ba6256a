"""vLLM samples from the prompts that the trainer scores, with the features of the weights that are trained."""

import image_families
import pytest
from cells import Cell

from safe_trainers import PrecisionError
from safe_trainers.rollout import vllm_images


SAMPLED = "sampling/sampling_logp_difference/mean"


def differences(trainer):
    """The mean difference in nats between the trainer's and the sampler's log-probabilities, by step."""
    trainer.train()
    return [entry[SAMPLED] for entry in trainer.state.log_history if "loss" in entry]


def test_text_prompts_are_computed_as_they_were_sent(build):
    first, second = differences(build(Cell("text", "grpo", "fp32", None)))
    assert max(first, second) < 1e-5


@pytest.mark.parametrize("family", image_families.FAMILIES)
def test_the_sampler_agrees_with_the_trainer_in_two_steps(build, family):
    """The tower trains, and the second step has the image of the first: old features would differ by 1e-4."""
    first, second = differences(build(Cell(family, "grpo", "fp32", None), one_row=True))
    assert max(first, second) < 1e-5


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_stock_trains_on_with_another_prompt(build, family):
    first, _ = differences(build(Cell(family, "grpo", "fp32", None), safe=False))
    assert first > 0.1


def test_rloo_samples_from_the_prompt_that_it_scores(build):
    trainer = build(Cell("idefics3", "rloo", "fp32", None))
    trainer.train()  # each batch is checked
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_a_prompt_that_differs_ends_the_run(build, task, monkeypatch):
    monkeypatch.setattr(vllm_images, "keep_image_tokens", lambda llm: None)
    trainer = build(Cell("idefics3", task, "fp32", None))
    with pytest.raises(PrecisionError, match="vllm-computed-another-prompt") as caught:
        trainer.train()
    message = str(caught.value)
    assert "prompt 0 with 1 image\n" in message
    assert "27 token ids were sent" in message
    assert "45 were computed" in message
    assert "`use_vllm=False`" in message
    assert trainer.state.global_step == 0


def test_a_vllm_with_another_signature_is_refused_at_the_first_image(build, monkeypatch):
    monkeypatch.setattr(vllm_images, "METHOD", "_apply_prompt_updates")  # its arguments are others
    trainer = build(Cell("idefics3", "grpo", "fp32", None))
    with pytest.raises(PrecisionError, match="vllm-prepares-prompts-otherwise"):
        trainer.train()


def test_features_of_older_weights_differ_without_the_reset(build, monkeypatch):
    monkeypatch.setattr(vllm_images, "forget_features", lambda generation: None)
    first, second = differences(build(Cell("idefics3", "grpo", "fp32", None), one_row=True))
    assert first < 1e-5
    assert second > 1e-4


def test_names_of_tower_weights_are_needed(build, monkeypatch):
    monkeypatch.setattr(vllm_images, "drops_inner_name", lambda model: False)
    with pytest.raises(ValueError, match="vision_tower"):
        build(Cell("gemma3", "grpo", "fp32", None))


def test_image_tokens_are_not_sampled(build):
    trainer = build(Cell("idefics3", "grpo", "fp32", None))
    biases = trainer.vllm_generation.generation_kwargs["logit_bias"]
    assert biases == {trainer.model.config.image_token_id: vllm_images.SMALLEST_BIAS}

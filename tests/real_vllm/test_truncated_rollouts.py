"""Truncated sampling with TRL's importance sampling correction."""

import pytest
import torch
from cells import Cell

from safe_trainers import PrecisionError
from safe_trainers.rollout.truncation import SamplingRule


TEXT = Cell("text", "grpo", "fp32", None)
LENGTH = {"steps": 1, "max_completion_length": 64}
TRUNCATED = [
    {"top_k": 10},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.1},
    {"generation_kwargs": {"presence_penalty": 0.5, "frequency_penalty": 0.2}},
    {"generation_kwargs": {"logit_bias": {40: 3.0}, "allowed_token_ids": list(range(20, 200))}},
    {"top_k": 10, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7, "repetition_penalty": 1.1},
]
NOT_CORRECTED = [{"vllm_structured_outputs_regex": "[a-z ]{5,40}"}, {"generation_kwargs": {"bad_words": ["a"]}}]
RATIO, MISMATCH = "sampling/importance_sampling_ratio/mean", "precision/logp_mismatch_mean"


def first_log(trainer):
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize("changes", TRUNCATED, ids=str)
def test_importance_weights_are_one_and_the_gradient_is_that_of_the_plain_loss(build, changes):
    corrected = first_log(build(TEXT, **LENGTH, **changes))
    assert corrected[RATIO] == pytest.approx(1, abs=1e-3)
    assert corrected[MISMATCH] < 1e-5
    # With the same seed the same completions are sampled, and without the correction all weights are exactly 1.
    plain = first_log(build(TEXT, **LENGTH, vllm_importance_sampling_correction=False, **changes))
    assert corrected["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.05)
    assert plain[MISMATCH] < 1e-5


@pytest.mark.parametrize("changes", [{"top_k": 10}, {"top_p": 0.8}], ids=str)
def test_stock_loses_the_gradient(build, changes):
    plain = first_log(build(TEXT, safe=False, **LENGTH))
    truncated = first_log(build(TEXT, safe=False, **LENGTH, **changes))
    assert plain["grad_norm"] > 0.1
    assert truncated["grad_norm"] < 1e-4 * plain["grad_norm"]


@pytest.mark.parametrize("changes", NOT_CORRECTED, ids=str)
def test_what_cannot_be_corrected_is_refused_with_a_line_that_trains(build, changes):
    with pytest.raises(PrecisionError, match="truncated-sampling-with-correction") as caught:
        build(TEXT, **LENGTH, **changes)
    assert "vllm_importance_sampling_correction=False" in str(caught.value)
    trainer = build(TEXT, **LENGTH, vllm_importance_sampling_correction=False, **changes)
    log = first_log(trainer)
    assert log["grad_norm"] > 0.1
    assert MISMATCH in log  # a warning names the setting, see test_mismatch_causes.py


@pytest.mark.parametrize("corrects", [True, False])
def test_unknown_logits_end_a_run_only_where_its_weights_need_them(build, corrects, caplog):
    trainer = build(TEXT, **LENGTH, top_k=10, vllm_importance_sampling_correction=corrects)
    # TRL multiplies with the head's weight, so that its log-probabilities are not those of the head itself.
    trainer.model.get_output_embeddings().register_forward_hook(lambda head, args, logits: 1.5 * logits)
    if corrects:
        with pytest.raises(PrecisionError, match="truncation-cannot-be-corrected"):
            trainer.train()
        return
    log = first_log(trainer)
    assert log["grad_norm"] > 0.1
    assert MISMATCH not in log
    assert "its logits differ from those of its head" in caplog.text


def test_the_loss_compares_log_probabilities_of_the_whole_vocabulary(build):
    """The clipped ratio of the loss is 1 in the first step: the batch keeps TRL's own old log-probabilities."""
    log = first_log(build(TEXT, **LENGTH, top_k=10))
    assert log["clip_ratio/region_mean"] == 0
    assert abs(log["loss"]) < 1e-4


@pytest.mark.parametrize("rule", [
    {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.5},
], ids=str)  # fmt: skip
def test_the_rule_is_that_of_vllms_sampler(rule):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 100)
    scores = logits / rule.get("temperature", 1.0)
    if "min_p" in rule:
        likelihood = scores.softmax(1)
        scores = scores.masked_fill(likelihood < rule["min_p"] * likelihood.amax(1, keepdim=True), -torch.inf)
    k = torch.full((64,), rule["top_k"]) if "top_k" in rule else None
    p = torch.full((64,), rule["top_p"]) if "top_p" in rule else None
    expected = apply_top_k_top_p_pytorch(scores.clone(), k, p).log_softmax(1)
    tokens = expected.exp().multinomial(1).squeeze(1)
    own = SamplingRule(**rule).logps(logits, tokens, None)
    torch.testing.assert_close(own, expected.gather(1, tokens.unsqueeze(1)).squeeze(1))

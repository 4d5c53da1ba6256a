"""Predicted importance weights of sequences against simulated ones."""

import math
from types import SimpleNamespace

import pytest
import torch

from safe_trainers.rollout.mismatch import Limits, Moments, metrics, sequence_moments, tally
from safe_trainers.rollout.sequence_weights import Prediction, vanishing


MASK = Limits(None, 3.0, True)


def simulated(length, mean, std, rows=20_000):
    """Log-ratios of sequences whose tokens are independent, (rows,)."""
    generator = torch.Generator().manual_seed(0)
    return mean * length + std * math.sqrt(length) * torch.randn(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("mean", "std", "length"), [(-1e-4, 5e-3, 2048), (-2e-3, 2e-2, 1024), (1e-3, 3e-2, 512)])
def test_the_prediction_is_that_of_independent_tokens(mean, std, length):
    measured = Moments(10_000, 64.0, 64 * mean, 8 * std)
    found, logs = Prediction.at(length, measured), simulated(length, mean, std)
    weights = logs.exp()
    assert found.ess == pytest.approx((weights.sum() ** 2 / (len(logs) * (weights**2).sum())).item(), rel=0.1)
    for limits in (MASK, Limits(0.5, 2.0, True), Limits(0.5, None, True)):
        outside = limits.outside(logs).double().mean().item()
        assert found.share_outside(limits) == pytest.approx(outside, abs=0.01)


def test_a_mean_that_is_not_certain_counts_as_zero():
    assert Prediction.at(1024, Moments(8, 16.0, 0.01, 0.02)).mean == 0
    assert Prediction.at(1024, Moments(800, 16.0, 0.01, 0.02)).mean == pytest.approx(0.64)


def test_moments_of_a_tally():
    sampler = torch.zeros(2, 3)
    trainer = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.0, 0.0]])
    total = tally(trainer, sampler, torch.tensor([[1, 1, 1], [1, 0, 0]]))
    found = sequence_moments(total)
    assert (found.sequences, found.tokens) == (2, 2.0)
    assert found.mean == pytest.approx(0.35, rel=1e-6)
    assert found.std == metrics(total)["precision/seq_logratio_std"] == pytest.approx(0.25, rel=1e-6)
    assert sequence_moments(torch.zeros_like(total)) == Moments(0, 0.0, 0.0, 0.0)


def args(mode="sequence_mask", length=4096):
    return SimpleNamespace(vllm_importance_sampling_mode=mode, max_completion_length=length)


@pytest.mark.parametrize(
    ("measured", "limits", "warned"),
    [
        (Moments(64, 64.0, 0.0, 0.05), MASK, False),  # bfloat16: 6e-3 for each token
        (Moments(64, 64.0, 0.0, 0.2), MASK, True),
        (Moments(64, 64.0, -0.1, 0.01), MASK, True),  # the mean alone: a weight of exp(-6.4)
        (Moments(64, 64.0, 0.1, 0.01), MASK, True),  # all above the limit
        (Moments(64, 64.0, 0.0, 0.2), Limits(None, 3.0, False), False),
        (Moments(1, 64.0, 0.0, 0.2), MASK, False),
        (Moments(64, 64.0, 0.0, 0.2), None, False),
    ],
)
def test_only_weights_that_do_not_work_are_reported(measured, limits, warned):
    assert (vanishing(args(), limits, measured) is not None) == warned


def test_the_message_has_the_prediction_and_the_mode_for_tokens():
    message = str(vanishing(args("sequence_truncate"), MASK, Moments(64, 64.0, 0.0, 0.2)))
    assert "vllm_importance_sampling_mode='sequence_truncate' with max_completion_length=4096" in message
    assert "with 64 tokens each" in message
    assert "the mean 0 and the standard deviation 1.6: an effective sample size of 8%" in message
    assert "`vllm_importance_sampling_mode='token_truncate'`" in message

"""The estimators against a slow reference in float64, and against what is known of them."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mismatch_reference import LARGEST, LIMITS, as_rows, batch, loss_reference, reference

from safe_trainers.rollout.mismatch import LIMIT, SIZE, Limits, combine, joint_tally, loss_tally, metrics, tally


def close(expected, rounding=1e-15):
    return {name: pytest.approx(value, rel=1e-9, abs=rounding) for name, value in expected.items()}


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "scale", "unscored"),
    [(7, 5, 0.1, 0.0), (3, 300, 1e-3, 0.1), (4, 1100, 1e-6, 0.0), (2, 4200, 0.5, 0.3), (5, 17, 3.0, 0.5)],
)
def test_against_the_slow_reference(rows, width, scale, unscored, limits):
    made = batch(rows, width, scale, seed=width, unscored=unscored)
    expected = reference(as_rows(*made), "bfloat16", limits)
    assert len(expected) > 9
    assert metrics(tally(*made, limits), "bfloat16", limits) == close(expected)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_batches_of_any_size_add_up(limits):
    made = [
        batch(rows, width, seed=rows, unscored=0.1) for rows, width in [(1, 1), (5, 70), (2, 16), (4, 2), (3, 1030)]
    ]
    expected = close(reference([row for one in made for row in as_rows(*one)], "float16", limits))
    for together in (combine(torch.stack([tally(*one, limits) for one in made])), joint_tally(made, limits)):
        assert metrics(together, "float16", limits) == expected


@settings(deadline=None, max_examples=60)
@example([(0.0, math.inf, True), (math.inf, 0.0, True)])
@example([(0.0, 33.0, True), (0.0, 6.358046142525275e-13, True), (33.0, 0.0, True)])
@example(
    [
        *[(0.0, 0.0, False)] * 6,
        (0.0, 3.4028234663852886e38, True),
        (0.0, -3.4028234663852886e38, True),
        (2.0, 0.0, True),
    ]
)
@given(st.lists(st.tuples(*[st.floats(width=32) for _ in range(2)], st.booleans()), min_size=1, max_size=40))
def test_whatever_the_log_probabilities_are_no_metric_is_nan_or_infinite(tokens):
    trainer, sampler, mask = (torch.tensor(column).unsqueeze(0) for column in zip(*tokens, strict=True))
    sides = trainer.float(), sampler.float(), mask.long()
    found = metrics(tally(*sides, LIMITS[1]), "bfloat16", LIMITS[1])
    assert all(math.isfinite(value) for value in found.values())
    # Log-ratios of two signs cancel in sums, whose rounding depends on their sizes and on their order.
    sizes = [min(abs(p - q), LIMIT) for p, q, counted in tokens if counted and math.isfinite(p - q)]
    rounding = max(1e-15, len(sizes) * sum(sizes) * torch.finfo(torch.float64).eps)
    expected = close(reference(as_rows(*sides), "bfloat16", LIMITS[1]), rounding)
    if expected and "precision/seq_logratio_std" in expected:  # from sums of squares: exact beside the mean alone
        std = "precision/seq_logratio_std"
        assert found.pop(std) == pytest.approx(expected.pop(std).expected, abs=1e-4)
    weighed = [max(min(p - q, LARGEST), -LARGEST) for p, q, counted in tokens if counted and not math.isnan(p - q)]
    uncertain = len(weighed) * sum(map(abs, weighed)) * torch.finfo(torch.float64).eps
    if expected and not abs(sum(weighed) - math.log(LIMITS[1].high)) > uncertain:
        # On which side of the limit the sum lies depends on the order of its terms.
        for metrics_of in (found, expected):
            metrics_of.pop("precision/is_masked_frac")
    assert found == expected


def test_by_hand():
    trainer, sampler = torch.tensor([[-1.0, -2.5], [-3.0, -9.0]]), torch.tensor([[-1.5, -2.0], [-4.0, -1.0]])
    found = metrics(tally(trainer, sampler, torch.tensor([[1, 1], [1, 0]])), "float16")
    assert found == close(
        {
            "precision/unscored_frac": 0.0,
            "precision/logp_mismatch_mean": (0.5 + 0.5 + 1) / 3,
            "precision/logp_mismatch_max": 1.0,
            "precision/logp_mismatch_k1": -(0.5 - 0.5 + 1) / 3,
            "precision/logp_mismatch_k3": (math.exp(0.5) + math.exp(-0.5) + math.exp(1) - 3 - 1) / 3,
            "precision/logp_mismatch_ulp": (0.5 / 1.5 + 0.5 / 2 + 1 / 4) / 3 * 1024,
            "precision/seq_logratio_abs_mean": 0.5,
            "precision/seq_logratio_std": 0.5,
            "precision/seq_ess": (1 + math.e) ** 2 / (2 * (1 + math.e**2)),
            "precision/mismatch_pos_0_15": (0.5 + 0.5 + 1) / 3,
        }
    )


def test_equal_sides_are_at_zero_and_weigh_alike():
    _, sampler, mask = batch(6, 20)
    found = metrics(tally(sampler, sampler, mask, LIMITS[1]), "float32", LIMITS[1])
    assert found.pop("precision/seq_ess") == 1.0
    assert set(found.values()) == {0.0}


def test_k1_and_k3_estimate_the_divergence_and_k3_with_less_noise():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator, dtype=torch.float64)
    sampler = logits.log_softmax(0)
    trainer = (logits + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0)
    divergence = (sampler.exp() * (sampler - trainer)).sum().item()
    tokens = torch.multinomial(sampler.exp(), 200_000, replacement=True, generator=generator).unsqueeze(0)
    found = metrics(tally(trainer[tokens], sampler[tokens], torch.ones_like(tokens)))
    assert divergence > 0.03
    assert found["precision/logp_mismatch_k1"] == pytest.approx(divergence, rel=0.05)
    assert found["precision/logp_mismatch_k3"] == pytest.approx(divergence, rel=0.02)


def test_what_is_not_finite_is_counted_and_in_nothing_else():
    trainer, sampler, mask = batch(6, 30)
    mask[:, :3] = 1
    whole = metrics(tally(trainer, sampler, mask))
    tokens = int(mask.sum())
    for broken in (math.nan, math.inf, -math.inf):
        for side in (0, 1):
            sides = [trainer.clone(), sampler.clone()]
            sides[side][0, :3] = broken
            found = metrics(tally(*sides, mask))
            without = mask.clone()
            without[0, :3] = 0
            assert found.pop("precision/unscored_frac") == pytest.approx(3 / tokens)
            assert found == {k: v for k, v in metrics(tally(trainer, sampler, without)).items() if k in found}
    assert whole["precision/unscored_frac"] == 0


def test_nothing_scored_and_nothing_there():
    nothing = torch.full((2, 3), math.nan)
    assert metrics(tally(nothing, nothing, torch.ones(2, 3))) == {"precision/unscored_frac": 1.0}
    assert metrics(tally(nothing, nothing, torch.zeros(2, 3))) == {}
    assert metrics(tally(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0))) == {}
    assert metrics(torch.zeros(SIZE, dtype=torch.float64)) == {}


def test_differences_beyond_all_sense_stay_finite():
    trainer, sampler = torch.tensor([[0.0, -1e30], [-1e4, 0.0]]), torch.tensor([[-1e4, 0.0], [0.0, 0.0]])
    found = metrics(tally(trainer, sampler, torch.ones(2, 2)))
    assert found["precision/logp_mismatch_max"] == LIMIT
    assert all(math.isfinite(value) for value in found.values())


def test_one_heavy_sequence_is_all_that_is_effective():
    trainer, sampler = torch.zeros(10, 1), torch.zeros(10, 1)
    sampler[0] = -50.0
    assert metrics(tally(trainer, sampler, torch.ones(10, 1)))["precision/seq_ess"] == pytest.approx(0.1)


def trl_masks(difference, mask, mode, low, high):
    """Which tokens TRL 1.16 clips or masks, by the code of its `_generate_and_score_completions`."""
    difference = torch.nan_to_num(difference * mask, nan=0.0)
    difference = difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference
    ratio = torch.exp(difference)
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    return (((ratio < low) | (ratio > high)) & mask.bool()).sum().item() / mask.sum().item()


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"])
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.5, 2.0), (0.5, None)])
@pytest.mark.parametrize("broken", [None, math.nan, -math.inf, math.inf])
def test_the_masked_share_is_that_of_trl(mode, low, high, broken):
    """Tokens without a log-probability too: one that is infinite takes its whole sequence with it."""
    trainer, sampler, mask = batch(40, 6, scale=0.6)
    if broken is not None:
        sampler[:10, 2] = broken
    limits = Limits(low, high, mode.startswith("sequence"))
    found = metrics(tally(trainer, sampler, mask, limits), limits=limits)["precision/is_masked_frac"]
    assert 0 < found < 1
    assert found == pytest.approx(trl_masks(trainer.double() - sampler.double(), mask, mode, low, high))


def test_half_precision_log_probabilities_are_compared_as_they_are():
    trainer, sampler, mask = batch(4, 8)
    found = metrics(tally(trainer.bfloat16(), sampler.half(), mask))
    assert found == close(reference(as_rows(trainer.bfloat16(), sampler.half(), mask)))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("unscored", [0.0, 0.3])
def test_metrics_of_a_loss_against_the_slow_reference(moved, unscored):
    trainer, sampler, mask = batch(5, 70, scale=0.05, unscored=unscored)
    now = (trainer.double() + 0.02 * torch.randn(trainer.shape, generator=torch.Generator().manual_seed(1))).float()
    rows = zip(now.double().tolist(), *zip(*as_rows(trainer, sampler, mask), strict=True), strict=True)
    expected = loss_reference(rows, moved)
    assert len(expected) == (2 if moved else 1)
    assert metrics(loss_tally(now, trainer, sampler, mask, moved)) == pytest.approx(expected, rel=1e-12)


def test_metrics_of_losses_and_rollouts_add_up():
    trainer, sampler, mask = batch(4, 30)
    rollout, loss = tally(trainer, sampler, mask), loss_tally(trainer + 0.5, trainer, sampler, mask, True)
    both = metrics(combine(torch.stack([rollout, loss])))
    assert both == {**metrics(rollout), **metrics(loss)}
    assert both["precision/logratio_policy"] == pytest.approx(0.5, rel=1e-6)
    assert both["precision/logratio_gap"] == pytest.approx(both["precision/logp_mismatch_mean"])


def test_a_loss_without_a_sampler_has_no_gap():
    trainer, _, mask = batch(4, 30)
    assert set(metrics(loss_tally(trainer, trainer, None, mask, True))) == {"precision/logratio_policy"}

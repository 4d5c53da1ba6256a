"""The share of updates that a half-precision weight does not notice."""

import pytest
import torch

from safe_trainers.weights.lost_updates import lost_share


def lora_a(width=4096, rank=16):
    """What PEFT draws: uniform within 1 / sqrt(width)."""
    torch.manual_seed(0)
    return torch.empty(rank, width).uniform_(-1, 1) / width**0.5


# Shares of a plain optimizer step in float64, element by element; the rates are those that people train LoRA at.
@pytest.mark.parametrize("rate", [1e-4, 2e-5, 1e-5, 1e-6])
def test_the_share_is_that_of_a_real_adam_step(rate):
    weight = torch.nn.Parameter(lora_a().bfloat16())
    weight.grad = torch.randn_like(weight)
    before = weight.detach().clone()
    torch.optim.AdamW([weight], lr=rate, weight_decay=0.0).step()
    unmoved = (weight == before).double().mean().item()
    assert lost_share([before.float()], rate, torch.bfloat16) == pytest.approx(unmoved, abs=0.01)


def test_the_rates_at_which_adapters_can_be_bfloat16():
    shares = {rate: lost_share([lora_a()], rate, torch.bfloat16) for rate in (2e-4, 1e-4, 2e-5, 1e-5, 1e-6)}
    assert shares[2e-4] == shares[1e-4] == 0
    assert 0.4 < shares[2e-5] < shares[1e-5] < shares[1e-6]
    assert shares[1e-6] > 0.95


def test_zeros_are_left_out_and_nothing_is_lost_of_nothing():
    assert lost_share([torch.zeros(8)], 1e-6, torch.bfloat16) == 0.0
    assert lost_share([], 1e-6, torch.bfloat16) == 0.0
    assert lost_share([torch.cat([torch.zeros(8), torch.ones(8)])], 1e-6, torch.bfloat16) == 1.0


def test_a_step_down_from_a_power_of_two_is_half_as_long():
    # The neighbours of 1 in bfloat16 are 1 + 1/128 and 1 - 1/256.
    assert lost_share([torch.ones(8)], 1 / 300, torch.bfloat16) == 0.5
    assert lost_share([torch.ones(8)], 1 / 600, torch.bfloat16) == 1.0


def test_float16_loses_less_than_bfloat16():
    assert lost_share([lora_a()], 1e-5, torch.float16) < 0.1 < lost_share([lora_a()], 1e-5, torch.bfloat16)


def test_a_large_tensor_is_sampled_evenly():
    large = torch.cat([torch.full((1 << 18,), 1e-9), torch.ones(1 << 18)])
    assert lost_share([large], 1e-6, torch.bfloat16) == pytest.approx(0.5, abs=1e-3)


def test_all_columns_of_a_large_matrix_are_met():
    columns = torch.ones(1 << 10, 1 << 10)
    columns[:, ::2] = 1e-9
    assert lost_share([columns], 1e-6, torch.bfloat16) == pytest.approx(0.5, abs=1e-2)
    assert lost_share([columns.t()], 1e-6, torch.bfloat16) == pytest.approx(0.5, abs=1e-2)

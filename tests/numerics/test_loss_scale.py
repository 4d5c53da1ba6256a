"""What the loss scaler is told, and what it refuses."""

import cells
import pytest
import torch
from torch import nn

from safe_trainers import PrecisionError
from safe_trainers.core.device import can_unscale, unscalable_dtypes
from safe_trainers.numerics.loss_scale import configure
from safe_trainers.policy.settings import LARGEST_SCALE, SMALLEST_SCALE, PrecisionSettings
from safe_trainers.testing import StrictGradScaler, fp16_on_cpu


def step(scaler, dtype):
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * 2).sum().float()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight


def test_the_cpus_own_scaler_accepts_what_cudas_refuses():
    """Why tests on a CPU need the strict one."""
    assert unscalable_dtypes("cpu") == {"float16"}
    assert torch.equal(step(torch.amp.GradScaler("cpu"), torch.bfloat16), torch.full((4,), -1.0).bfloat16())
    assert not can_unscale(StrictGradScaler("cpu"), "bfloat16")
    assert not can_unscale(StrictGradScaler("cpu"), "float16")
    assert can_unscale(StrictGradScaler("cpu"), "float32")


def test_the_strict_scaler_says_what_cuda_says_and_scales_float32():
    with pytest.raises(NotImplementedError, match=r"_amp_foreach_non_finite_check_and_unscale_cuda.*'BFloat16'"):
        step(StrictGradScaler("cpu"), torch.bfloat16)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        step(StrictGradScaler("cpu"), torch.float16)
    assert torch.equal(step(StrictGradScaler("cpu"), torch.float32), torch.full((4,), -1.0))


def test_a_future_scaler_is_believed():
    """A stand-in for a torch whose CUDA kernel unscales bfloat16: the capability decides, not the device's name."""

    class Future(StrictGradScaler):
        SUPPORTED = (*StrictGradScaler.SUPPORTED, torch.bfloat16)

    assert can_unscale(Future("cpu"), "bfloat16")


class Args:
    def __init__(self, **settings):
        self.__dict__.update(settings)


def test_a_scaler_is_given_what_is_asked_and_nothing_else():
    scaler = torch.amp.GradScaler("cpu")
    before = scaler.state_dict()
    configure(scaler, Args())
    assert scaler.state_dict() == before
    configure(scaler, Args(loss_scale_init=8.0, loss_scale_growth_interval=3))
    assert scaler.state_dict() == {**before, "scale": 8.0, "growth_interval": 3}
    assert scaler.scale(torch.ones(())).item() == 8.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss_scale_init", 0), ("loss_scale_init", -1.0), ("loss_scale_init", 2.0**200),
     ("loss_scale_init", 1e-46), ("loss_scale_init", float("nan")), ("loss_scale_init", "big"),
     ("loss_scale_init", True),
     ("loss_scale_growth_interval", 0), ("loss_scale_growth_interval", 1.5), ("loss_scale_growth_factor", 1.0),
     ("loss_scale_growth_factor", float("inf")), ("loss_scale_backoff_factor", 0.0),
     ("loss_scale_backoff_factor", 1.0)],
)  # fmt: skip
def test_what_no_scaler_can_work_with_is_refused(name, value, tmp_path):
    (problem,) = PrecisionSettings.of(Args(**{name: value})).invalid_settings()
    assert problem.what == f"{name}={value!r}"
    assert str(problem.fix).startswith(f"{name}=")
    with pytest.raises(PrecisionError, match="loss-scale-out-of-range"):
        cells.SAFE_CONFIG["sft"](str(tmp_path), **{name: value})


@pytest.mark.parametrize("scale", [LARGEST_SCALE, SMALLEST_SCALE])
def test_the_largest_and_the_smallest_scale_still_unscale(scale):
    """Below the smallest a gradient of 0 is NaN once it is unscaled, and torch's scaler takes the step."""
    assert list(PrecisionSettings.of(Args(loss_scale_init=scale)).invalid_settings()) == []
    assert list(PrecisionSettings.of(Args(loss_scale_init=scale * (2 if scale > 1 else 0.5))).invalid_settings()) != []
    for beyond in (1, 4) if scale < 1 else (1,):
        weight = torch.nn.Parameter(torch.ones(2))
        scaler, optimizer = StrictGradScaler("cpu", init_scale=scale / beyond), torch.optim.SGD([weight], lr=1.0)
        scaler.scale(torch.ones(()))
        weight.grad = torch.zeros(2)
        scaler.step(optimizer)
        assert weight.isfinite().all() == (beyond == 1)


def test_settings_in_their_range_are_no_problem():
    assert (
        list(PrecisionSettings.of(Args(loss_scale_init=2.0**16, loss_scale_growth_interval=400)).invalid_settings())
        == []
    )


def test_without_fp16_the_fixture_changes_nothing():
    made = cells.arguments(cells.Cell("text", "sft", "fp32", "bf16"), cells.PLAIN["sft"])
    for trainer_class in (cells.SAFE["sft"], cells.STOCK["sft"]):
        trainer = fp16_on_cpu(trainer_class)(**made)
        assert trainer.accelerator.scaler is None
        assert type(trainer).__name__ == trainer_class.__name__


def test_stocks_fp16_on_a_cpu_is_float32():
    """What the fixture is for."""
    made = cells.arguments(cells.Cell("text", "sft", "fp32", "fp16"), cells.PLAIN["sft"])
    stock = cells.STOCK["sft"](**made)
    assert stock.accelerator.scaler is None
    assert not stock.accelerator.native_amp

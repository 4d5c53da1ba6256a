"""The capabilities of a device, as far as a machine without a GPU can show them."""

import warnings

import pytest
import torch

from safe_trainers.core import device as devices
from safe_trainers.core.device import detect_device, float32_spacing


def test_a_build_for_gpus_without_a_gpu_is_a_cpu(monkeypatch):
    """A stand-in for a CUDA build, which names CUDA as its accelerator on every machine."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda"))
    assert detect_device().kind == "cpu"


@pytest.mark.parametrize(
    ("rank", "expected"), [("3", "cuda:3"), ("9", "cuda:1"), ("0", "cuda:0"), ("-1", "cuda"), (None, "cuda")]
)
def test_a_launched_process_reads_and_tries_its_own_gpu(rank, expected, monkeypatch):
    """A stand-in for a machine with eight GPUs; a tensor on another GPU would open a context there."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    touched = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: touched.append(str(device)) or "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: touched.append(str(device)) or (8, 0))
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **kwargs: touched.append(str(device)) or torch.ones(1))
    devices.unscalable_dtypes.cache_clear()
    with warnings.catch_warnings(action="ignore"):  # torch's own: without CUDA, the scaler is disabled
        assert detect_device().capability == (8, 0)
    devices.unscalable_dtypes.cache_clear()
    assert set(touched) == {expected}
    assert len(touched) == 4


def rounded_to(spacing):
    """A matrix product whose inputs are rounded, as tensor cores do in TF32 and bfloat16."""
    product = torch.Tensor.__matmul__

    def rounding(self, other):
        return product((self / spacing).round() * spacing, other)  # halves are rounded to even numbers

    return rounding


@pytest.mark.parametrize("spacing", [2.0**-7, 2.0**-10, 2.0**-23])
def test_the_spacing_of_products_is_measured(spacing, monkeypatch):
    """A stand-in for TF32, which needs a GPU."""
    if spacing > 2.0**-23:
        monkeypatch.setattr(torch.Tensor, "__matmul__", rounded_to(spacing))
    with torch.autocast("cpu", torch.bfloat16):
        assert float32_spacing("cpu") == spacing

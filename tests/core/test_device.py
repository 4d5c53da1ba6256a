"""The capabilities of a device, as far as a machine without a GPU can show them."""

import torch

from safe_trainers.core.device import detect_device


def test_a_build_for_gpus_without_a_gpu_is_a_cpu(monkeypatch):
    """A stand-in for a CUDA build, which names CUDA as its accelerator on every machine."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda"))
    assert detect_device().kind == "cpu"

"""The cells that stock crashes in, with CUDA's kernels, autocast and loss scaler. Skipped where there is no GPU."""

import cells
import pytest
import torch
from cells import Cell
from torch._dynamo.utils import counters

from safe_trainers import SafeGRPOConfig
from safe_trainers.core.device import detect_device


pytestmark = pytest.mark.gpu
TABLE = [
    Cell(family, task, weights, flag, lora)
    for family in ("aria", "nocast")
    for task in ("grpo", "sft")
    for weights, flag, lora in (
        ("fp32", "bf16", False),
        ("bf16", "bf16", True),
        ("bf16", None, False),
        ("fp16", "fp16", True),
        ("fp32", "fp16", False),
    )
]


@pytest.mark.parametrize("cell", TABLE, ids=str)
def test_every_cell_trains(cell):
    outcome = cells.run(cell, safe=True, use_cpu=False)
    assert outcome.error is None
    assert len(outcome.losses) == 2


def test_stock_crashes_in_one_of_them():
    outcome = cells.run(Cell("aria", "grpo", "bf16", None), safe=False, use_cpu=False)
    assert "should be the same" in (outcome.error or "it trained")


def test_half_trainables_under_the_real_scaler_are_upcast():
    stock = cells.run(Cell("text", "sft", "fp16", "fp16"), safe=False, use_cpu=False)
    assert "Attempting to unscale FP16 gradients" in (stock.error or "it trained")
    safe = cells.run(Cell("text", "sft", "fp16", "fp16"), safe=True, use_cpu=False)
    assert safe.error is None


def test_rollouts_are_recorded_as_cuda_graphs(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "0")  # transformers sets it when it compiles
    torch._dynamo.reset()
    counters.clear()
    cell = Cell("text", "grpo", "bf16", "bf16", lora=True)
    outcome = cells.run(cell, safe=True, use_cpu=False, config=SafeGRPOConfig, steps=4, compile_decode=True)
    assert outcome.error is None
    assert counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()


def test_the_device_says_what_it_is():
    device = detect_device()
    assert device.kind == "cuda"
    assert device.capability is not None or device.rocm

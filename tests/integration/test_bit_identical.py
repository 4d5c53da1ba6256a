"""Where stock trains and the policy changes nothing, a safe run is the stock run, bit for bit.

The committed table: rows are what is trained, columns what it is loaded in and which flag is set. In the one column
that is left out, float32 weights under bf16 in GRPO and RLOO, the policy does change something, on purpose: stock
generates outside the autocast that it trains in.
"""

import cells
import pytest
from cells import Cell


FAMILIES = ["llava", "qwen2_5_vl", "idefics3", "text"]
TASKS = ["sft", "grpo", "rloo"]
COLUMNS = [("bf16", "bf16"), ("bf16", None), ("fp32", None)]
TABLE = [
    Cell(family, task, weights, flag, lora, 0.1 if lora and task != "sft" else 0.0)
    for family in FAMILIES
    for task in TASKS
    for weights, flag in COLUMNS
    for lora in (False, True)
] + [Cell(family, "sft", "fp32", "bf16", lora) for family in FAMILIES for lora in (False, True)]
PAIRS = [
    pytest.param(Cell(family, task, weights, flag, lora), marks=cells.NEEDS_STABLE[task])
    for family in ("llava", "text")
    for task in ("dpo", "kto")
    for weights, flag in (*COLUMNS, ("fp32", "bf16"))
    for lora in (False, True)
]
DISTILLED = [
    pytest.param(Cell(family, "distillation", weights, None, lora), marks=cells.NEEDS_STABLE["distillation"])
    for family in ("llava", "text")
    for weights in ("bf16", "fp32")
    for lora in (False, True)
]
"""Without autocast, under which stock does not train."""


@pytest.mark.parametrize("cell", [*TABLE, *PAIRS, *DISTILLED], ids=str)
def test_losses_gradients_and_weights_are_bit_identical_to_stock(cell):
    safe = cells.run(cell, safe=True, steps=3)
    stock = cells.run(cell, safe=False, steps=3)
    assert (stock.error, safe.error) == (None, None)
    assert safe.losses == stock.losses
    assert safe.grad_norms == stock.grad_norms
    assert safe.rewards == stock.rewards
    assert safe.fingerprint == stock.fingerprint
    assert any(norm > 0 for norm in stock.grad_norms)  # something was trained, so equality means something


def test_the_comparison_can_fail():
    one = cells.run(Cell("text", "grpo", "fp32", None), safe=False, steps=3)
    other = cells.run(Cell("text", "grpo", "fp32", None), safe=False, steps=3, learning_rate=1.001e-3)
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_stock_rollouts_give_back_stock_training(task):
    """`rollout_compute="stock"` restores upstream in the column that is left out above."""
    cell = Cell("llava", task, "fp32", "bf16")
    stock = cells.run(cell, safe=False, steps=3)
    safe = cells.run(cell, safe=True, steps=3, config=cells.SAFE_CONFIG[task], rollout_compute="stock")
    assert (safe.losses, safe.grad_norms, safe.fingerprint) == (stock.losses, stock.grad_norms, stock.fingerprint)

"""Every combination of weights, flags, trainer, adapters and reference that stock TRL crashes in, trained.

Each safe cell runs beside its stock twin, so that the table of crashes is known to be real.
"""

import cells
import pytest
from cells import Cell

from upstream import generate_asks_the_tower_first


MODES = [("fp32", "bf16"), ("bf16", "bf16"), ("bf16", None), ("fp16", "fp16")]
TASKS = ["grpo", "rloo", "sft"]
TABLE = [
    Cell(family, task, weights, flag, lora, beta)
    for family in ("aria", "nocast")
    for task in TASKS
    for weights, flag in MODES
    for lora, beta in (
        [(False, 0.0), (True, 0.1), (False, 0.1), (True, 0.0)] if task != "sft" else [(False, 0.0), (True, 0.0)]
    )
]


def stock_crashes(cell: Cell) -> str | None:
    """What stock TRL says in a cell, as it was measured; `None` where it trains."""
    if cell.weights == "fp32":
        # Aria casts the features that it merges, the tower made for the tests does not.
        return "Index put requires" if cell.family == "nocast" else None
    if cell.flag == "bf16" and (cell.task == "sft" or (cell.family == "nocast" and not cell.lora)):
        # There the tower runs inside the forward that accelerate wraps in autocast. `generate` asks Aria's tower
        # before that forward in the newest transformers, and PEFT's `generate` goes past the wrapped forward.
        return None
    if cell.flag == "bf16" and not cell.lora and not generate_asks_the_tower_first():
        return None
    return "should be the same"


@pytest.mark.parametrize("cell", TABLE, ids=str)
def test_every_cell_trains_two_steps_and_stock_crashes_where_measured(cell):
    safe = cells.run(cell, safe=True)
    assert safe.error is None
    assert len(safe.losses) == 2
    assert all(norm == norm and norm < float("inf") for norm in safe.grad_norms)
    stock = cells.run(cell, safe=False)
    expected = stock_crashes(cell)
    if expected is None:
        assert stock.error is None
    else:
        assert expected in (stock.error or "it trained")


@pytest.mark.parametrize("task", TASKS)
def test_llama4_where_trl_can_run_it(task):
    """Llama4's tower does not cast either. TRL 1.16 cannot run the model at all: that is no question of dtypes."""
    stock = cells.run(Cell("llama4", task, "fp32", None), safe=False)
    if stock.error is not None:
        # The last is early transformers 5, which cannot build it.
        missing = stock.error.partition("has no attribute ")[2]
        assert missing in ("'last_hidden_state'", "'aux_loss'", "'pad_token_id'")
        return
    for weights, flag in MODES:
        assert cells.run(Cell("llama4", task, weights, flag), safe=True).error is None
    assert "same dtype" in cells.run(Cell("llama4", task, "bf16", None), safe=False).error


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm", "idefics3", "gemma3", "text"])
def test_nothing_newly_crashes_with_float32_weights_under_bf16(family, task):
    cell = Cell(family, task, "fp32", "bf16")
    stock = cells.run(cell, safe=False).error
    # transformers 4 merges SmolVLM's bf16 features into fp32 embeddings by index.
    assert stock is None or (family == "smolvlm" and "Index put requires" in stock)
    assert cells.run(cell, safe=True).error is None


@pytest.mark.skipif(
    not generate_asks_the_tower_first(),
    reason="this transformers runs the tower only inside accelerate's autocast",
)
def test_the_literal_patch_would_newly_crash():
    """Casting pixels to bf16 because `bf16=True` breaks Aria with float32 weights: why media follow the tower."""
    import torch

    class Literal(cells.STOCK["grpo"]):
        def _prepare_input(self, data):
            prepared = super()._prepare_input(data)
            if isinstance(prepared, dict) and "pixel_values" in prepared:
                return {**prepared, "pixel_values": prepared["pixel_values"].to(torch.bfloat16)}
            return prepared

    trainer = Literal(**cells.arguments(Cell("aria", "grpo", "fp32", "bf16"), cells.PLAIN["grpo"]))
    with pytest.raises(RuntimeError, match=r"should be the same|expected scalar type"):
        trainer.train()
    cells.reset_autocast()

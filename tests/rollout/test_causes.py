"""Which cause of a large mismatch is named, and which are excluded. tests/real_vllm has the cases with vLLM."""

import cells
import pytest
from cells import Cell

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer
from safe_trainers.core.feature import Feature
from safe_trainers.rollout.causes import LARGEST_ROUNDING, SMALLEST_MISMATCH, not_rounding


def run_of(family="text", **changes):
    runs = []

    class Keep(Feature):
        def __init__(self, run):
            super().__init__(run)
            runs.append(run)

    class Kept(SafeGRPOTrainer):
        features = (*SafeGRPOTrainer.features, Keep)

    Kept(**cells.arguments(Cell(family, "grpo", "bf16", "bf16"), SafeGRPOConfig, **changes))
    return runs[0]


@pytest.mark.parametrize(
    ("ulp", "mean", "reported"),
    [
        (LARGEST_ROUNDING, 1.0, False),
        (LARGEST_ROUNDING + 0.1, 1.0, True),
        (1000.0, SMALLEST_MISMATCH, False),
        (0.0, 0.0, False),
    ],
)
def test_only_what_is_larger_than_rounding_is_reported(ulp, mean, reported):
    assert (not_rounding(run_of(), ulp, mean, synced=True) is not None) == reported


def test_without_a_known_cause_the_message_lists_what_was_excluded():
    message = str(not_rounding(run_of(), 7.0, 0.4, synced=True))
    assert "precision/logp_mismatch_ulp=7, a mean of 0.4 nats" in message
    assert "Likely cause: none of the known ones. Excluded: another dtype, other experts." in message
    assert "fix: `precision='fp32'`" in message


def test_a_rollout_in_another_dtype_is_named():
    message = str(not_rounding(run_of(rollout_compute="stock"), 7.0, 0.4, synced=True))
    assert "Likely cause: `rollout_compute='stock'` samples in another dtype" in message
    assert "fix: drop `rollout_compute='stock'`" in message


def test_experts_are_named():
    message = str(not_rounding(run_of("gpt_oss"), 7.0, 0.4, synced=True))
    assert "Likely cause: routers near a tie choose other experts" in message
    assert "Excluded: another dtype." in message

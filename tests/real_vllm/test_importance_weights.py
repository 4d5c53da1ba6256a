"""The weights for samples of `generate` are computed as TRL computes them for samples of vLLM."""

import pytest
import torch
from cells import Cell

from safe_trainers import SafeGRPOConfig
from safe_trainers.rollout.correction import importance_weights, sampled_mask
from safe_trainers.rollout.mismatch import limits_of


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LIMITS = {"vllm_importance_sampling_clip_min": 0.999, "vllm_importance_sampling_clip_max": 1.001}


def test_they_are_those_of_trl(build):
    trainer = build(Cell("text", "grpo", "fp32", "bf16"), config=SafeGRPOConfig, max_completion_length=64, **LIMITS)
    rows = [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    changed = 0
    for mode in MODES:
        trainer.vllm_importance_sampling_mode = trainer.args.vllm_importance_sampling_mode = mode
        batch = trainer._generate_and_score_completions(rows)
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * sampled_mask(batch)
        weights = importance_weights(difference, limits_of(trainer.args))
        assert torch.equal(weights, batch["importance_sampling_ratio"])
        assert weights.shape == (4, 1 if mode.startswith("sequence") else 64)
        changed += int((weights != 1).sum())
    assert changed == pytest.approx(300, abs=250)

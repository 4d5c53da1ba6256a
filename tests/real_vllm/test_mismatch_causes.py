"""A mismatch that is larger than rounding is reported with its cause."""

import warnings

import pytest
from cells import Cell
from transformers import TrainerCallback

from safe_trainers import PrecisionWarning, SafeGRPOConfig


TEXT = {precision: Cell("text", "grpo", precision, None) for precision in ("fp32", "bf16", "fp16")}
ID = "mismatch-is-not-rounding"


def warned(trainer):
    """The warnings of a mismatch that training gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning) and ID in str(w.message)]


@pytest.mark.parametrize("precision", TEXT)
def test_rounding_is_not_reported(build, precision):
    assert warned(build(TEXT[precision])) == []


def test_another_dtype_is_named(build):
    (message,) = warned(build(TEXT["fp32"], config=SafeGRPOConfig, rollout_compute="stock"))
    assert "Likely cause: vLLM computes in bfloat16, and the trainer in float32" in message
    assert "Excluded: other prompt ids, truncated sampling, old weights, quantised weights" in message
    assert "fix: drop `rollout_compute='stock'`" in message


def test_old_weights_are_named(build):
    class SyncsOnce(TrainerCallback):
        """Makes TRL believe that vLLM has the weights of each step."""

        def on_step_end(self, args, state, control, **kwargs):
            trainer._last_loaded_step = state.global_step

    trainer = build(TEXT["fp32"], learning_rate=1e-2)
    trainer.add_callback(SyncsOnce())
    (message,) = warned(trainer)
    assert "Likely cause: vLLM sampled with the weights of an earlier step" in message


def test_settings_without_a_correction_are_named(build):
    changes = {"vllm_structured_outputs_regex": "[a-z ]{5,40}", "vllm_importance_sampling_correction": False}
    (message,) = warned(build(TEXT["fp32"], **changes))
    assert "Likely cause: vLLM's log-probabilities depend on `vllm_structured_outputs_regex`" in message
    assert "fix: drop `vllm_structured_outputs_regex`" in message


@pytest.mark.parametrize(("mode", "reported"), [("sequence_mask", True), ("token_mask", False)])
def test_sequence_weights_that_vanish_at_the_longest_length_are_reported(build, mode, reported):
    """32 tokens are sampled in bfloat16 and scored in float32, and 100,000 tokens are allowed."""
    changes = {"max_completion_length": 100_000, "generation_kwargs": {"max_tokens": 32}, "rollout_compute": "stock"}
    trainer = build(TEXT["fp32"], config=SafeGRPOConfig, vllm_importance_sampling_mode=mode, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    found = [str(w.message) for w in caught if "sequence-weights-vanish" in str(w.message)]
    assert len(found) == reported
    assert all("`vllm_importance_sampling_mode='token_mask'`" in message for message in found)

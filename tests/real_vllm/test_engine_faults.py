"""An engine that fails or returns what cannot be used: one error or a counted token, and checkpoints stay complete."""

import math

import pytest
from cells import Cell
from transformers import AutoTokenizer

from safe_trainers import PrecisionError, SafeGRPOConfig


TEXT = Cell("text", "grpo", "fp32", None)
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "steps": 3}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.timeout(120)
def test_an_engine_that_dies_ends_the_run_and_the_last_checkpoint_resumes(build, tmp_path, monkeypatch):
    from vllm.v1.engine.exceptions import EngineDeadError

    trainer = build(TEXT, output_dir=str(tmp_path), **EVERY_STEP)
    engine = trainer.vllm_generation.llm.llm_engine
    step = engine.step

    def dies():
        if trainer.state.global_step == 2:
            raise EngineDeadError
        return step()

    monkeypatch.setattr(engine, "step", dies)
    with pytest.raises(EngineDeadError):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    again = build(TEXT, output_dir=str(tmp_path), **EVERY_STEP)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    assert all(map(math.isfinite, losses(again)))


def test_completions_without_a_token_before_the_end_train(build, folders):
    """With this bias every completion is the end token alone."""
    end = AutoTokenizer.from_pretrained(folders["text"]).eos_token_id
    trainer = build(TEXT, generation_kwargs={"logit_bias": {end: 100.0}})
    trainer.train()
    assert all(map(math.isfinite, losses(trainer)))
    assert all(entry["completions/max_length"] == 1 for entry in trainer.state.log_history if "loss" in entry)
    assert all(entry["precision/unscored_frac"] == 0 for entry in trainer.state.log_history if "loss" in entry)


def with_first_logprob(generation, value, monkeypatch):
    """Makes the real engine's first log-probability of each completion a given value."""
    generate = generation.llm.generate

    def changed(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        for output in outputs:
            for completion in output.outputs:
                for entry in completion.logprobs[0].values():
                    entry.logprob = value
        return outputs

    monkeypatch.setattr(generation.llm, "generate", changed)


def test_log_probabilities_that_are_nan_are_counted(build, monkeypatch):
    trainer = build(TEXT, config=SafeGRPOConfig)
    with_first_logprob(trainer.vllm_generation, math.nan, monkeypatch)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert 0 < entry["precision/unscored_frac"] < 0.5
        assert entry["precision/logp_mismatch_mean"] < 1e-5
        assert math.isfinite(entry["loss"])


def test_importance_weights_that_are_infinite_end_the_run_before_a_weight_changes(build, monkeypatch):
    changes = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None,
               "vllm_importance_sampling_clip_min": 0.1}  # fmt: skip
    trainer = build(TEXT, config=SafeGRPOConfig, **changes)
    with_first_logprob(trainer.vllm_generation, -math.inf, monkeypatch)
    with pytest.raises(PrecisionError, match="importance-weights-not-finite"):
        trainer.train()
    assert trainer.state.global_step == 0

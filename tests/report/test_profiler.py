"""A profiled run measures the time of each phase of a step, and is the same run."""

import json
import math
import time

import cells
import pytest
import torch
from cells import Cell

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeSFTConfig, SafeSFTTrainer
from safe_trainers.core import phase_clock
from safe_trainers.core.feature import Feature
from safe_trainers.core.phase_clock import PhaseClock
from safe_trainers.report.profiler import FILE, PHASES, Profiler


GRPO = Cell("text", "grpo", "fp32", "bf16", lora=True)
SFT = Cell("text", "sft", "fp32", "bf16")
TOKENS, STEPS = 3, 4


class Ticks:
    """A clock of a test: it advances by the costs of what happens, and not by itself."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def take(self, cost):
        self.now += cost


class Slow(Feature):
    """A feature that takes 100 ticks before, and 100 after each loss."""

    ticks: Ticks

    def around_loss(self, call):
        self.ticks.take(100)
        result = call()
        self.ticks.take(100)
        return result


def ticking(cell=GRPO, **changes):
    """A trainer whose parts take a known number of ticks, and its clock."""
    ticks = Ticks()

    def reward(completion_ids, **kwargs):
        ticks.take(7)
        return [float(sum(ids)) for ids in completion_ids]

    class Ticking(SafeGRPOTrainer):
        features = (*SafeGRPOTrainer.features, type("Slow", (Slow,), {"ticks": ticks}))

    changes = {"max_completion_length": TOKENS, "generation_kwargs": {"min_new_tokens": TOKENS}, **changes}
    data = {"eval_dataset": changes.pop("eval_dataset", None)}
    given = cells.arguments(cell, SafeGRPOConfig, steps=STEPS, profile=True, logging_steps=1, **changes)
    trainer = Ticking(**given | data | {"reward_funcs": reward})
    trainer.precision[Profiler].run.clock = PhaseClock(now=ticks)
    embeddings = trainer.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda *_: ticks.take(1))
    next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(lambda *_: ticks.take(20))
    if trainer.ref_model is not None:
        trainer.ref_model.get_input_embeddings().register_forward_hook(lambda *_: ticks.take(3))
    return trainer, ticks


def seconds(trainer):
    return {row[0]: row[1] for row in trainer.precision[Profiler].report.table(PHASES).rows}


@pytest.mark.parametrize("lora", [True, False])
def test_each_phase_gets_the_time_that_was_spent_in_it(lora):
    cell = Cell("text", "grpo", "fp32", "bf16", lora=lora)
    trainer, ticks = ticking(cell, beta=0.1, gradient_checkpointing=False)
    optimizer = trainer.create_optimizer()
    optimizer.register_step_pre_hook(lambda *_: ticks.take(11))
    trainer.train()
    found = seconds(trainer)
    assert found["rollout"] == STEPS * TOKENS
    assert found["rewards"] == STEPS * 7
    assert found["loss"] == STEPS
    assert found["backward"] == STEPS * 20
    assert found["optimizer"] == STEPS * 11
    assert found["safe_trainers"] == STEPS * 200
    # An adapter's reference is the model without the adapter: the same layer is counted there.
    assert found["reference"] == STEPS * (1 if lora else 3)
    assert sum(found.values()) == pytest.approx(ticks.now)


def test_scoring_of_the_policy_is_not_the_reference():
    trainer, _ = ticking(steps_per_generation=2, num_iterations=2)  # old log-probabilities are scored
    trainer.train()
    found = seconds(trainer)
    assert found["scoring"] > 0
    assert "reference" not in found


def test_an_evaluation_is_one_phase():
    trainer, _ = ticking(eval_strategy="steps", eval_steps=2, eval_dataset=cells.dataset("grpo", "text"))
    before = trainer.precision[Profiler]
    trainer.train()
    found = seconds(trainer)
    assert found["evaluation"] > 0
    assert found["rollout"] == STEPS * TOKENS  # those of the evaluation are in its phase
    assert before.seconds == {**dict.fromkeys(phase_clock.PHASES, 0.0), **found}


def test_logs_have_the_seconds_per_step_and_the_file_has_the_table(tmp_path, capfd):
    trainer, _ = ticking(output_dir=str(tmp_path), log_level="warning")
    trainer.train()
    logged = [entry["profile/rewards"] for entry in trainer.state.log_history if "profile/rewards" in entry]
    assert logged == [7.0] * STEPS
    rows = json.loads((tmp_path / FILE).read_text())["tables"][PHASES]
    assert {row["phase"]: row["seconds per step"] for row in rows}["rewards"] == 7.0
    printed = capfd.readouterr().err
    assert f"optimizer steps: {STEPS}" in printed
    assert "backward" in printed


@pytest.mark.parametrize(("trainer", "config", "cell"), [
    (SafeGRPOTrainer, SafeGRPOConfig, GRPO), (SafeSFTTrainer, SafeSFTConfig, SFT),
])  # fmt: skip
def test_a_profiled_run_is_bit_identical(trainer, config, cell):
    runs = {}
    for profile in (False, True):
        torch.manual_seed(0)
        made = trainer(**cells.arguments(cell, config, steps=STEPS, profile=profile, logging_steps=1))
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        runs[profile] = cells.fingerprint(made.model), losses
        assert (made.precision[Profiler].run.clock is not None) is profile
    assert runs[True] == runs[False]


def test_the_phases_add_up_to_the_time_of_the_run():
    trainer = SafeSFTTrainer(**cells.arguments(SFT, SafeSFTConfig, steps=STEPS, profile=True))
    began = time.perf_counter()
    result = trainer.train()
    whole = time.perf_counter() - began
    measured = sum(seconds(trainer).values())
    assert 0.9 * result.metrics["train_runtime"] < measured <= whole


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    trainer, _ = ticking(output_dir=str(tmp_path))
    (tmp_path / FILE).mkdir()
    trainer.train()
    assert "the profile cannot be written" in caplog.text
    assert trainer.state.global_step == STEPS


def test_phases_inside_a_loss_belong_to_it_but_the_package_does_not():
    ticks = Ticks()
    clock = PhaseClock(now=ticks)
    assert not clock.running
    clock.start()
    with clock.phase("loss"):
        ticks.take(1)
        with clock.phase("scoring"):
            ticks.take(2)
            with clock.phase("safe_trainers"):
                ticks.take(4)
        ticks.take(8)
    ticks.take(16)
    clock.stop()
    ticks.take(32)
    assert {name: value for name, value in clock.snapshot().items() if value} == {
        "loss": 11.0, "safe_trainers": 4.0, "other": 16.0,
    }  # fmt: skip


def test_an_error_ends_the_phases_that_it_leaves():
    ticks = Ticks()
    clock = PhaseClock(now=ticks)
    clock.start()

    def fails():
        with clock.phase("backward"):
            clock.begin("optimizer")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    ticks.take(5)
    assert clock.snapshot()["other"] == 5.0


def test_the_device_is_awaited_at_each_change_of_phase():
    waits = []
    clock = PhaseClock(wait=lambda: waits.append(1))
    with clock.phase("loss"):
        pass
    assert waits == []  # a clock that does not run does not wait
    clock.start()
    with clock.phase("loss"):
        pass
    assert len(waits) == 2
    assert math.isfinite(clock.snapshot()["loss"])

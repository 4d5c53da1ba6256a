"""Features: hooks that do nothing by default, one tuple that is the order, and a capability in one class."""

import warnings

import cells
import pytest
import torch
from cells import Cell

from safe_trainers import PrecisionMixin, PrecisionWarning, SafeGRPOTrainer, SafeSFTTrainer
from safe_trainers.core.errors import refuse, warn
from safe_trainers.core.feature import Feature, Run


class NaNRewards(Feature):
    """Logs the share of rewards that are NaN."""

    name = "nan_rewards"

    def __init__(self, run):
        super().__init__(run)
        self.seen = 0

    def around_rewards(self, call):
        rewards = call()
        self.seen += int(rewards.isnan().sum())
        self.run.log_metric("rewards/nan_frac", rewards.isnan().double().flatten().tolist())
        return rewards

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Counting(SafeGRPOTrainer):
    features = (*SafeGRPOTrainer.features, NaNRewards)


def sometimes_nan(completion_ids, **kwargs):
    return [float("nan") if index % 2 else float(sum(ids) % 7) for index, ids in enumerate(completion_ids)]


def build(trainer_class=Counting, **changes):
    made = cells.arguments(Cell("text", "grpo", "fp32", None), cells.PLAIN["grpo"], **changes)
    return trainer_class(**{**made, "reward_funcs": sometimes_nan})


def test_a_new_capability_is_one_class_and_one_entry_of_the_tuple():
    trainer = build()
    trainer.train()
    logged = [entry["rewards/nan_frac"] for entry in trainer.state.log_history if "rewards/nan_frac" in entry]
    assert logged == [0.5, 0.5]
    assert trainer.precision[NaNRewards].seen == 4
    assert not any("nan" in name.lower() for name in vars(trainer))
    assert not any("rewards/nan_frac" in entry for entry in _log_of(build(SafeGRPOTrainer)))


def _log_of(trainer):
    trainer.train()
    return trainer.state.log_history


def test_the_state_of_a_feature_is_in_the_checkpoint(tmp_path):
    kept = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    build(**kept).train()
    trainer = build(**kept, steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.precision[NaNRewards].seen == 6


def test_the_tuple_is_the_order():
    seen = []

    def named(label):
        class Named(Feature):
            def around_loss(self, call):
                seen.append(f"{label} begins")
                loss = call()
                seen.append(f"{label} ends")
                return loss

        return Named

    class Ordered(SafeSFTTrainer):
        features = (named("outer"), *SafeSFTTrainer.features, named("inner"))

    Ordered(**cells.arguments(Cell("text", "sft", "fp32", None), cells.PLAIN["sft"], steps=1)).train()
    assert seen == ["outer begins", "inner begins", "inner ends", "outer ends"]


def test_problems_of_features_are_raised_together_and_their_warnings_given():
    def having(*problems):
        class Having(Feature):
            def check(self, model):
                assert isinstance(model, torch.nn.Module)
                return problems

        return Having

    class Two(SafeSFTTrainer):
        features = (
            *SafeSFTTrainer.features,
            having(refuse("nothing-to-merge", "first")),
            having(refuse("output-not-empty", "second"), warn("plan-not-kept", "third")),
        )

    arguments = cells.arguments(Cell("text", "sft", "fp32", None), cells.PLAIN["sft"])
    with pytest.raises(ValueError, match="2 problems with the precision of this run") as caught:
        Two(**arguments)
    assert [problem.what for problem in caught.value.problems] == ["first", "second"]
    Two.features = (*SafeSFTTrainer.features, having(warn("plan-not-kept", "third")))
    with pytest.warns(PrecisionWarning, match="third"):
        Two(**arguments)


def test_no_feature_is_called_for_a_hook_that_it_does_not_have():
    run = Run(trainer=None)
    run.features = (Feature(run), NaNRewards(run))
    assert run.having("around_rewards") == (run.features[1],)
    assert run.having("around_loss") == ()
    assert run.around("around_loss", lambda: "as it is") == "as it is"


def test_a_missing_feature_is_named():
    run = Run(trainer=None)
    with pytest.raises(KeyError, match="features has no NaNRewards"):
        run.feature(NaNRewards)


def test_a_problem_is_warned_of_once_at_the_line_of_the_user():
    trainer = build(SafeGRPOTrainer)
    problem = warn("plan-not-kept", "something")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer._run.warn_once(problem)
        trainer._run.warn_once(problem)
        trainer._run.warn_once(problem, key="another")
    assert [warning.filename for warning in caught] == [__file__, __file__]


def test_at_most_four_classes_of_ours_and_one_override_of_train():
    own = [cls for cls in SafeGRPOTrainer.__mro__ if cls.__module__.startswith("safe_trainers")]
    assert [cls.__name__ for cls in own] == ["SafeGRPOTrainer", "PrecisionMixin", "ExactCheckpoints", "PrecisionBase"]
    assert [cls for cls in own if "train" in vars(cls)] == [PrecisionMixin]


def test_a_feature_rests_in_a_hook_until_train_is_called_again():
    calls = []

    class Resting(Feature):
        def on_train_begin(self):
            calls.append("begin")

        def around_loss(self, call):
            calls.append("loss")
            self.rest("around_loss")
            return call()

        def after_step(self, skipped):
            calls.append("step")

    class WithResting(SafeSFTTrainer):
        features = (*SafeSFTTrainer.features, Resting)

    trainer = WithResting(**cells.arguments(Cell("text", "sft", "fp32", None), cells.PLAIN["sft"], steps=2))
    trainer.train()
    assert calls == ["begin", "loss", "step", "step"]
    trainer.args.max_steps = 3
    trainer.train()
    assert calls[4:6] == ["begin", "loss"]
    assert calls.count("loss") == 2

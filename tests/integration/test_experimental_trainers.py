"""Every experimental trainer of TRL that trains on a CPU trains between the two classes, to the same losses.

Stock cannot build the asynchronous trainers without CUDA, and `ServerDistillationTrainer` not without a server.
"""

import importlib
import json
import logging
import pkgutil
from pathlib import Path

import cells
import pytest
import trainer_table as table
import trl
from cells import Cell
from packaging.version import Version
from trainer_table import MADE, NAMES, ROWS, STABLE, alternating, arguments, losses, settings, train
from trl import experimental

from safe_trainers import PrecisionBase, PrecisionError, PrecisionMixin, tiny


ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="older releases have other experimental trainers"
)


def classes(name):
    """TRL's module and class, and ours; skips a test whose trainer this TRL does not have."""
    pytest.importorskip(f"trl.experimental.{name.partition('.')[0]}")
    return table.classes(name)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL, about trainers that became stable
@pytest.mark.parametrize("name", MADE)
def test_what_stock_trains_the_safe_one_trains(name):
    stock = classes(name)[1]
    expected = losses(train(stock, arguments(name)))
    assert len(expected) == 2
    calls, trainer = table.generates(name)
    assert losses(trainer) == expected
    contract = trainer.precision.coverage
    assert contract.broken() == []
    assert contract["media"].state == "not applicable"  # a model of text
    if calls:
        assert contract["rollout"].state == ("covered" if contract.fired["rollout"] else "not covered")
    elif name not in ("cpo.CPO", "orpo.ORPO"):  # these generate in evaluations, if they are asked to
        assert contract["rollout"].state == "not applicable"


QUICK = [*STABLE, "cpo.CPO", "gmpo.GMPO", "gold.GOLD"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in NAMES]
)
def test_the_table_of_trainers_is_what_is_measured(name):
    committed = json.loads((ROOT / "benchmarks" / "results" / "trainers.json").read_text())["rows"]
    assert table.measure(name) == next(row for row in committed if row["name"] == name), "run: make bench-trainers"


def test_the_table_has_every_trainer_of_trl():
    found = set()
    for folder in pkgutil.iter_modules(experimental.__path__):
        if folder.ispkg:
            module = importlib.import_module(f"trl.experimental.{folder.name}")
            names = [name for name in dir(module) if name.endswith("Trainer") and name[0] != "_"]
            found |= {f"{folder.name}.{name.removesuffix('Trainer')}" for name in names}
    assert set(NAMES) - set(STABLE) == found
    stable = {name.removesuffix("Trainer") for name in dir(trl) if name.endswith("Trainer")}
    assert {name.removeprefix("trainer.") for name in STABLE} == stable


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["off policy", "on policy"])
def test_images_that_a_trainer_prepares_itself_are_not_covered(share):
    module, stock, safe = classes("gold.GOLD")

    def made():
        return {
            "model": tiny.build_model("llava"),
            "processing_class": tiny.build_processor("llava"),
            "teacher_model": tiny.build_model("llava", seed=1),
            "args": module.GOLDConfig(**settings(max_completion_length=4, lmbda=share, max_length=128)),
            "train_dataset": tiny.sft_dataset(ROWS, seed=0),
        }

    expected = losses(train(stock, made()))
    trainer = train(safe, made())
    contract = trainer.precision.coverage
    assert losses(trainer) == expected
    assert (contract["media"].state, contract.fired["inputs"]) == ("not covered", 0)
    assert contract.due["inputs"] > 0


def test_the_total_of_all_rewards_is_counted_where_trl_keeps_no_names(caplog):
    _, _, safe = classes("a2po.A2PO")

    def none_of_the_first(completions, **kwargs):
        return [float("nan"), *alternating(completions)[1:]]

    made = arguments("a2po.A2PO")
    with caplog.at_level(logging.WARNING, "safe_trainers"):
        cells.reset_autocast()
        trainer = safe(**{**made, "reward_funcs": [none_of_the_first, alternating]})
        with pytest.raises(PrecisionError, match="no-step-taken"):  # the loss is NaN
            trainer.train()
    first = trainer.state.log_history[0]["precision/unrewarded_frac"]
    assert 0 < first < 1
    assert not any("unrewarded_frac/" in key for row in trainer.state.log_history for key in row)
    assert len([r for r in caplog.records if "precision/unrewarded_frac/<function>" in r.message]) == 1


def test_an_infinite_reward_is_refused_where_trl_keeps_no_names():
    _, _, safe = classes("a2po.A2PO")

    def endless(completions, **kwargs):
        return [float("inf")] * len(completions)

    with pytest.raises(PrecisionError, match="rewards of the reward functions are infinite"):
        train(safe, {**arguments("a2po.A2PO"), "reward_funcs": endless})


def test_one_reward_model_that_is_no_list():
    """A stand-in for trainers that keep their reward model itself, as NashMD and XPO of TRL 1.9 do."""

    class OneRewardModel(trl.GRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            self.reward_funcs = [cells.token_reward]
            try:
                return super()._calculate_rewards(*args, **kwargs)
            finally:
                self.reward_funcs = self.one_model

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reward_funcs = self.one_model = tiny.build_reward_model()

    class SafeOneRewardModel(PrecisionMixin, OneRewardModel, PrecisionBase):
        pass

    def made():
        return cells.arguments(Cell("text", "grpo", "fp32", None), trl.GRPOConfig)

    expected = losses(train(OneRewardModel, made()))
    trainer = train(SafeOneRewardModel, made())
    assert losses(trainer) == expected
    assert "reward model 1" in str(trainer.precision.report)


def test_a_batch_with_other_names_is_not_measured(caplog):
    """A stand-in for trainers that descend from GRPO and name the parts of a batch differently."""

    class OtherNames(trl.GRPOTrainer):
        def _generate_and_score_completions(self, *args, **kwargs):
            batch = super()._generate_and_score_completions(*args, **kwargs)
            return {f"my_{key}" if key == "completion_mask" else key: value for key, value in batch.items()}

        def compute_loss(self, model, inputs, *args, **kwargs):
            named = {**inputs, "completion_mask": inputs["my_completion_mask"]}
            return super().compute_loss(model, named, *args, **kwargs)

    class SafeOtherNames(PrecisionMixin, OtherNames, PrecisionBase):
        pass

    def made():
        return cells.arguments(Cell("text", "grpo", "fp32", None), trl.GRPOConfig, num_iterations=2)

    expected = losses(train(OtherNames, made()))
    with caplog.at_level(logging.WARNING, "safe_trainers"):
        trainer = train(SafeOtherNames, made())
    assert losses(trainer) == expected
    assert len([r for r in caplog.records if "do not have completion_ids and completion_mask" in r.message]) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_loss_is_divided_by_the_tokens_of_the_whole_step(monkeypatch):
    """TRL 1.9 calls the function that its own test replaces on its own class, so that test fails for any subclass."""
    module, stock, safe = classes("distillation.Distillation")
    loss_module = pytest.importorskip("trl.trainer.distillation_trainer")
    original, seen = loss_module._chunked_divergence_loss, []

    def recording(*args, num_items_in_batch=None, **kwargs):
        seen.append((float(num_items_in_batch), float(args[4].sum())))
        return original(*args, num_items_in_batch=num_items_in_batch, **kwargs)

    monkeypatch.setattr(loss_module, "_chunked_divergence_loss", recording)

    def counts(trainer_class):
        seen.clear()
        made = arguments("distillation.Distillation")
        made["args"] = module.DistillationConfig(
            **settings(max_completion_length=4, gradient_accumulation_steps=2, max_steps=1)
        )
        train(trainer_class, made)
        return list(seen)

    expected = counts(stock)
    assert len(expected) == 2
    assert expected[0][0] == sum(tokens for _, tokens in expected)
    assert counts(safe) == expected

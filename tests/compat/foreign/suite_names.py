"""How users name the trainers."""

import sys

import pytest
import trl
import trl.trainer.reward_trainer
from trl import *  # noqa: F403
from trl import DPOConfig, GRPOTrainer
from trl import trainer as trainers
from trl.trainer import RLOOTrainer
from trl.trainer import sft_trainer as module
from trl.trainer.sft_trainer import SFTTrainer


NAMES = {
    "grpo": (GRPOTrainer, "GRPOTrainer"),
    "sft": (SFTTrainer, "SFTTrainer"),
    "rloo": (RLOOTrainer, "RLOOTrainer"),
    "reward, by a star": (RewardTrainer, "RewardTrainer"),  # noqa: F405
    "sft, of its module": (module.SFTTrainer, "SFTTrainer"),
    "rloo, of its package": (trainers.rloo_trainer.RLOOTrainer, "RLOOTrainer"),
    "reward, in full": (trl.trainer.reward_trainer.RewardTrainer, "RewardTrainer"),
}


@pytest.mark.parametrize(("found", "name"), NAMES.values(), ids=NAMES)
def test_all_names_of_a_trainer_are_one_class(found, name):
    from trl.trainer import grpo_trainer, reward_trainer, rloo_trainer

    inside = {"GRPOTrainer": grpo_trainer, "RewardTrainer": reward_trainer, "RLOOTrainer": rloo_trainer}
    assert found is getattr(trl, name) is getattr(inside.get(name, module), name)


def test_the_class_of_a_conftest_is_the_same(trainer_of_the_conftest):
    assert trainer_of_the_conftest is GRPOTrainer


def test_what_is_trls_own_is_as_it_was():
    true = sys.modules["trl"]
    assert true.GRPOTrainer.__module__ == "trl.trainer.grpo_trainer"
    assert true.GRPOTrainer in GRPOTrainer.__mro__
    assert (trl.__name__, trl.__version__) == ("trl", true.__version__)
    assert trl.GRPOConfig is true.GRPOConfig
    assert DPOConfig is true.DPOConfig
    assert set(dir(trl)) == set(dir(true))


def test_what_is_written_to_a_module_is_written(monkeypatch):
    monkeypatch.setattr(trl.trainer.grpo_trainer, "pad", None)
    assert sys.modules["trl.trainer.grpo_trainer"].pad is None
    monkeypatch.undo()
    assert callable(sys.modules["trl.trainer.grpo_trainer"].pad)
    with pytest.raises(ImportError, match="nothing"):
        from trl import nothing  # noqa: F401

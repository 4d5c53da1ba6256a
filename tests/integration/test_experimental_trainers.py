"""Every experimental trainer of TRL that trains on a CPU trains between the two classes, to the same losses.

Stock cannot build the asynchronous trainers without CUDA, and `ServerDistillationTrainer` not without a server.
"""

import functools
import logging

import cells
import pytest
import torch
import transformers
import trl
from cells import Cell
from datasets import Dataset
from packaging.version import Version

from safe_trainers import PrecisionBase, PrecisionError, PrecisionMixin, tiny


pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="older releases have other experimental trainers"
)
QUESTION, ANSWER, OTHER = "what is it ?", "two red circles", "one blue circle"
ROWS = 8


def settings(**changes):
    made = cells.settings(Cell("text", "sft", "fp32", None))
    made.pop("max_length")
    return {**made, **changes}


def rows(**columns):
    return Dataset.from_dict({name: [value] * ROWS for name, value in columns.items()})


def prompts():
    return cells.dataset("grpo", "text").select_columns(["prompt"])


def messages():
    return rows(messages=[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}])


def pairs():
    return rows(prompt=QUESTION, chosen=ANSWER, rejected=OTHER)


def alternating(completions, **kwargs):
    return [float(number % 2) for number, _ in enumerate(completions)]


def text(**changes):
    return {"model": tiny.build_model("text"), "processing_class": tiny.build_processor("text"), **changes}


def named(**changes):
    return text(model=str(cells.folder("text")), **changes)


def teacher():
    return tiny.build_model("text", seed=1)


MADE = {
    "a2po.A2PO": lambda m: text(
        reward_funcs=alternating,
        args=m.A2POConfig(**settings(max_completion_length=4, num_value_samples=2, filter_all_incorrect=False)),
        train_dataset=prompts(),
    ),
    "bema_for_ref_model.DPO": lambda m: text(
        ref_model=teacher(), args=trl.DPOConfig(**settings()), train_dataset=pairs()
    ),
    "cpo.CPO": lambda m: text(args=m.CPOConfig(**settings()), train_dataset=pairs()),
    "distillation.Distillation": lambda m: text(
        teacher_model=teacher(),
        args=m.DistillationConfig(**settings(max_completion_length=4)),
        train_dataset=prompts(),
    ),
    "gkd.GKD": lambda m: text(
        teacher_model=teacher(),
        args=m.GKDConfig(**settings(max_new_tokens=4, lmbda=1.0)),
        train_dataset=messages(),
    ),
    "gmpo.GMPO": lambda m: text(
        reward_funcs=cells.token_reward,
        args=m.GMPOConfig(**settings(num_generations=2, max_completion_length=4)),
        train_dataset=prompts(),
    ),
    "gold.GOLD": lambda m: text(
        teacher_model=teacher(),
        args=m.GOLDConfig(**settings(max_completion_length=4, lmbda=1.0, max_length=64)),
        train_dataset=messages(),
    ),
    "iw_opd.IWOPD": lambda m: named(
        teacher_model=str(cells.folder("text")),
        args=m.IWOPDConfig(**settings(max_completion_length=4, lmbda=1.0, max_length=64)),
        train_dataset=messages(),
    ),
    "kto.KTO": lambda m: text(
        ref_model=teacher(),
        args=m.KTOConfig(**settings()),
        train_dataset=Dataset.from_dict(
            {"prompt": [QUESTION] * ROWS, "completion": [ANSWER] * ROWS, "label": [True, False] * (ROWS // 2)}
        ),
    ),
    "online_dpo.OnlineDPO": lambda m: text(
        ref_model=teacher(),
        reward_funcs=cells.token_reward,
        args=m.OnlineDPOConfig(**settings(max_new_tokens=4, max_length=64)),
        train_dataset=prompts(),
    ),
    "orpo.ORPO": lambda m: text(args=m.ORPOConfig(**settings()), train_dataset=pairs()),
    "sdft.SDFT": lambda m: named(
        args=m.SDFTConfig(**settings(num_generations=1, max_completion_length=4)),
        train_dataset=rows(prompt=QUESTION, privileged_context=ANSWER),
    ),
    "sdpo.SDPO": lambda m: named(
        reward_funcs=alternating,
        args=m.SDPOConfig(**settings(num_generations=2, max_completion_length=4)),
        train_dataset=prompts(),
    ),
    "tpo.TPO": lambda m: text(
        args=m.TPOConfig(**settings()),
        train_dataset=rows(prompt=QUESTION, chosen=ANSWER, rejected=OTHER, reference=OTHER),
    ),
}
"""Arguments of each trainer, from its module."""


def classes(name):
    """TRL's module and class, and the class between ours; skips a test whose trainer this TRL does not have."""
    folder, _, algorithm = name.partition(".")
    module = pytest.importorskip(f"trl.experimental.{folder}")
    stock = getattr(module, f"{algorithm}Trainer")
    return module, stock, type(f"Safe{algorithm}Trainer", (PrecisionMixin, stock, PrecisionBase), {})


def train(trainer_class, arguments):
    cells.reset_autocast()
    torch.manual_seed(0)
    trainer = trainer_class(**arguments)
    trainer.train()
    return trainer


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL, about trainers that became stable
@pytest.mark.parametrize("name", MADE)
def test_what_stock_trains_the_safe_one_trains(name, monkeypatch):
    module, stock, safe = classes(name)
    expected = losses(train(stock, MADE[name](module)))
    assert len(expected) == 2
    generate, calls = transformers.GenerationMixin.generate, []

    @functools.wraps(generate)
    def counted(*args, **kwargs):
        calls.append(1)
        return generate(*args, **kwargs)

    monkeypatch.setattr(transformers.GenerationMixin, "generate", counted)
    trainer = train(safe, MADE[name](module))
    assert losses(trainer) == expected
    contract = trainer.precision.coverage
    assert contract.broken() == []
    assert contract["media"].state == "not applicable"  # a model of text
    if calls:
        assert contract["rollout"].state == ("covered" if contract.fired["rollout"] else "not covered")
    elif name not in ("cpo.CPO", "orpo.ORPO"):  # these generate in evaluations, if they are asked to
        assert contract["rollout"].state == "not applicable"


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["off policy", "on policy"])
def test_images_that_a_trainer_prepares_itself_are_not_covered(share):
    module, stock, safe = classes("gold.GOLD")

    def arguments():
        return {
            "model": tiny.build_model("llava"),
            "processing_class": tiny.build_processor("llava"),
            "teacher_model": tiny.build_model("llava", seed=1),
            "args": module.GOLDConfig(**settings(max_completion_length=4, lmbda=share, max_length=128)),
            "train_dataset": tiny.sft_dataset(ROWS, seed=0),
        }

    expected = losses(train(stock, arguments()))
    trainer = train(safe, arguments())
    contract = trainer.precision.coverage
    assert losses(trainer) == expected
    assert (contract["media"].state, contract.fired["inputs"]) == ("not covered", 0)
    assert contract.due["inputs"] > 0


def test_the_total_of_all_rewards_is_counted_where_trl_keeps_no_names(caplog):
    module, _, safe = classes("a2po.A2PO")

    def none_of_the_first(completions, **kwargs):
        return [float("nan"), *alternating(completions)[1:]]

    arguments = MADE["a2po.A2PO"](module)
    with caplog.at_level(logging.WARNING, "safe_trainers"):
        cells.reset_autocast()
        trainer = safe(**{**arguments, "reward_funcs": [none_of_the_first, alternating]})
        with pytest.raises(PrecisionError, match="no-step-taken"):  # the loss is NaN
            trainer.train()
    first = trainer.state.log_history[0]["precision/unrewarded_frac"]
    assert 0 < first < 1
    assert not any("unrewarded_frac/" in key for row in trainer.state.log_history for key in row)
    assert len([r for r in caplog.records if "precision/unrewarded_frac/<function>" in r.message]) == 1


def test_an_infinite_reward_is_refused_where_trl_keeps_no_names():
    module, _, safe = classes("a2po.A2PO")

    def endless(completions, **kwargs):
        return [float("inf")] * len(completions)

    with pytest.raises(PrecisionError, match="rewards of the reward functions are infinite"):
        train(safe, {**MADE["a2po.A2PO"](module), "reward_funcs": endless})


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

    def arguments():
        return cells.arguments(Cell("text", "grpo", "fp32", None), trl.GRPOConfig)

    expected = losses(train(OneRewardModel, arguments()))
    trainer = train(SafeOneRewardModel, arguments())
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

    def arguments():
        return cells.arguments(Cell("text", "grpo", "fp32", None), trl.GRPOConfig, num_iterations=2)

    expected = losses(train(OtherNames, arguments()))
    with caplog.at_level(logging.WARNING, "safe_trainers"):
        trainer = train(SafeOtherNames, arguments())
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
        arguments = MADE["distillation.Distillation"](module)
        arguments["args"] = module.DistillationConfig(
            **settings(max_completion_length=4, gradient_accumulation_steps=2, max_steps=1)
        )
        train(trainer_class, arguments)
        return list(seen)

    expected = counts(stock)
    assert len(expected) == 2
    assert expected[0][0] == sum(tokens for _, tokens in expected)
    assert counts(safe) == expected

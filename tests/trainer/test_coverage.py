"""The order of the bases, and what each class promises."""

import inspect
import json

import pytest
import trl
from packaging.version import Version
from trl import DPOTrainer, GRPOTrainer

from safe_trainers import (
    ContractError,
    PrecisionBase,
    PrecisionMixin,
    SafeGRPOTrainer,
    SafeRewardTrainer,
    SafeRLOOTrainer,
    SafeSFTTrainer,
    contract_of,
)
from safe_trainers.core.trl import trl_bases


WRONG_ORDERS = {
    "mixin last": (GRPOTrainer, PrecisionMixin, PrecisionBase),
    "no mixin": (GRPOTrainer, PrecisionBase),
    "no base": (PrecisionMixin, GRPOTrainer),
    "both last": (GRPOTrainer, PrecisionBase, PrecisionMixin),
}


@pytest.mark.parametrize("bases", WRONG_ORDERS.values(), ids=WRONG_ORDERS.keys())
def test_a_wrong_order_is_refused_with_the_corrected_line(bases):
    with pytest.raises(ContractError) as caught:
        type("SafeMine", bases, {})
    assert str(caught.value).endswith("Write:\n    class SafeMine(PrecisionMixin, GRPOTrainer, PrecisionBase): ...")
    assert str(caught.value).startswith(
        f"class SafeMine({', '.join(b.__name__ for b in bases)}): PrecisionMixin must come"
    )


def test_the_corrected_line_works():
    made = type("SafeMine", (PrecisionMixin, GRPOTrainer, PrecisionBase), {})
    names = [cls.__name__ for cls in made.__mro__]
    sandwich = ["SafeMine", "PrecisionMixin", "GRPOTrainer", trl_bases(made)[-1].__name__, "PrecisionBase", "Trainer"]
    assert [name for name in names if name in sandwich] == sandwich


def test_subclasses_and_mixins_of_the_user_are_fine():
    class MyMixin(PrecisionMixin):
        pass

    class Mine(MyMixin, DPOTrainer, PrecisionBase):
        pass

    class Child(SafeGRPOTrainer):
        pass

    assert trl_bases(Mine)[0] is DPOTrainer
    assert trl_bases(Child)[0] is GRPOTrainer


@pytest.mark.parametrize(
    ("trainer", "rollout", "buffer"),
    [
        (SafeGRPOTrainer, "covered", "covered"),
        (SafeRLOOTrainer, "covered", "covered"),
        (SafeSFTTrainer, "not applicable", "not applicable"),
        (SafeRewardTrainer, "not applicable", "not applicable"),
    ],
)
def test_what_the_four_trainers_promise(trainer, rollout, buffer):
    contract = contract_of(trainer)
    assert contract["rollout"].state == rollout
    assert contract["buffer"].state == buffer
    assert {contract[area].state for area in ("media", "boundaries", "adapters")} == {"covered"}
    assert {c.area for c in contract.missing()} == {
        c.area for c in contract.coverage if c.hook and c.state == "covered"
    }
    assert json.loads(json.dumps(contract.to_dict()))["fired"]["inputs"] == 0


def test_a_class_that_generates_elsewhere_says_so():
    online = pytest.importorskip("trl.experimental.online_dpo")

    class SafeOnlineDPOTrainer(PrecisionMixin, online.OnlineDPOTrainer, PrecisionBase):
        pass

    contract = contract_of(SafeOnlineDPOTrainer)
    assert contract["rollout"].state == "not covered"
    assert "not in _generate_single_turn" in str(contract)


STATES = {
    "a2po.A2PO": ("not covered", "not covered"),  # calls `generate` in `_prepare_inputs`
    "async_grpo.AsyncGRPO": ("covered", "not covered"),  # a worker generates
    "bema_for_ref_model.DPO": ("covered", "not applicable"),
    "cpo.CPO": ("covered", "not covered"),  # generates for logs of evaluations
    "distillation.Distillation": ("covered", "covered"),
    "gkd.GKD": ("covered", "not covered"),
    "gold.GOLD": ("not covered", "not covered"),
    "iw_opd.IWOPD": ("not covered", "not covered"),
    "kto.KTO": ("covered", "not applicable"),
    "online_dpo.OnlineDPO": ("not covered", "not covered"),  # a training step of its own
    "orpo.ORPO": ("covered", "not covered"),
    "sdft.SDFT": ("not covered", "not covered"),
    "sdpo.SDPO": ("not covered", "not covered"),
    "tpo.TPO": ("covered", "not applicable"),
}
"""Media and rollout of experimental trainers."""


@pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="older releases have other experimental trainers"
)
@pytest.mark.parametrize("name", STATES)
def test_what_experimental_trainers_promise(name):
    module, _, algorithm = name.partition(".")
    stock = getattr(pytest.importorskip(f"trl.experimental.{module}"), f"{algorithm}Trainer")
    contract = contract_of(type("Safe", (PrecisionMixin, stock, PrecisionBase), {}))
    assert (contract["media"].state, contract["rollout"].state) == STATES[name]


def test_what_a_class_of_the_user_calls_counts_too():
    class Sampler(DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.samples = [model.generate(**row) for row in inputs["rows"]]
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Preparer(DPOTrainer):
        def _prepare_inputs(self, inputs):
            return {key: value.to(self.args.device) for key, value in inputs.items()}

    class Extender(DPOTrainer):
        def _prepare_inputs(self, inputs):
            return {**super()._prepare_inputs(inputs), "extra": 1}

    def states(between):
        contract = contract_of(type("Safe", (PrecisionMixin, between, PrecisionBase), {}))
        return contract["media"].state, contract["rollout"].state

    assert states(DPOTrainer) == states(Extender) == ("covered", "not applicable")
    assert states(Sampler) == ("covered", "not covered")
    assert states(Preparer) == ("not covered", "not applicable")


def test_a_model_that_takes_no_media_needs_no_hook_for_them():
    contract = contract_of(SafeGRPOTrainer, takes_media=False)
    assert contract["media"].state == "not applicable"
    assert "media" not in {c.area for c in contract.missing()}


def test_a_guarantee_is_broken_if_its_hook_was_due():
    contract = contract_of(SafeGRPOTrainer)
    assert contract.broken() == []
    contract.due["inputs"] += 1
    assert [c.area for c in contract.broken()] == ["media"]
    contract.fired["inputs"] += 1
    assert contract.broken() == []


def test_the_classes_are_what_they_replace():
    for safe in (SafeGRPOTrainer, SafeRLOOTrainer, SafeSFTTrainer, SafeRewardTrainer):
        assert issubclass(safe, getattr(trl, safe.__name__.removeprefix("Safe")))


def test_help_shows_the_arguments_of_what_is_replaced():
    for safe in (SafeGRPOTrainer, SafeRLOOTrainer, SafeSFTTrainer, SafeRewardTrainer):
        plain = getattr(trl, safe.__name__.removeprefix("Safe"))
        assert list(inspect.signature(safe).parameters) == list(inspect.signature(plain).parameters)

    class Own(SafeGRPOTrainer):
        def __init__(self, model, extra=1, **kwargs):
            super().__init__(model, **kwargs)

    assert list(inspect.signature(Own).parameters)[:2] == ["model", "extra"]

"""The order of the bases, and what each class promises."""

import inspect
import json

import pytest
import trl
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

"""What is placed in a model follows from the policy and the census alone."""

import json

import pytest
import torch
from devices import A100

from safe_trainers import tiny
from safe_trainers.boundaries.placement import BoundaryPlan, plan_boundaries, rounds_in_embeddings, widen
from safe_trainers.model.inventory import ModelInventory, Tower
from safe_trainers.policy.resolve import ModelFacts, Requested, resolve


def census(embeddings="float32", tower="float32", text=None, features=("get_image_features",)):
    elements = {"weights": dict.fromkeys({embeddings, tower, *(text or ())}, 1)}
    towers = (Tower("vision_tower", tower, frozenset({tower})),) if tower else ()
    return ModelInventory(elements, {"float32": 1}, {"float32": "a"}, embeddings, frozenset(text or {embeddings}),
     towers,
                  features if tower else (), None, None)  # fmt: skip


def placed(flags, counted, late_cast=False):
    policy = resolve(flags, A100, ModelFacts(counted.weights))
    return {(b.side, b.module) for b in plan_boundaries(policy, counted, late_cast).boundaries}


BF16, FP16, NONE = Requested(bf16=True), Requested(fp16=True), Requested(bf16=False)
TABLE = [
    # flags, embeddings, tower, an engine casts later; placed
    (NONE, "float32", "float32", False, set()),
    (NONE, "bfloat16", "bfloat16", False, {("input", "vision_tower")}),
    (NONE, "float16", "float16", False, {("input", "vision_tower")}),
    (NONE, "bfloat16", "float32", False, {("input", "model"), ("output", "features")}),
    (NONE, "float32", "bfloat16", False, {("input", "model"), ("output", "features")}),
    (BF16, "float32", "float32", False, {("output", "features")}),
    (BF16, "bfloat16", "bfloat16", False, {("input", "vision_tower"), ("output", "features")}),
    (BF16, "float32", "float32", True, {("input", "vision_tower"), ("output", "features")}),
    (NONE, "float32", "float32", True, set()),
]


@pytest.mark.parametrize(("flags", "embeddings", "tower", "late_cast", "expected"), TABLE)
def test_boundaries(flags, embeddings, tower, late_cast, expected):
    assert placed(flags, census(embeddings, tower), late_cast) == expected


@pytest.mark.parametrize(
    ("flags", "embeddings", "late_cast", "rounds"),
    [
        (BF16, "float16", False, True),
        (FP16, "bfloat16", False, True),
        (FP16, "bfloat16", True, False),  # the engine casts the embeddings too
        (FP16, "float16", False, False),
        (FP16, "float32", False, False),
        (NONE, "bfloat16", False, False),
    ],
)
def test_embeddings_round_in_the_other_half_format_than_autocast(flags, embeddings, late_cast, rounds):
    counted = census(embeddings, "float32")
    assert rounds_in_embeddings(resolve(flags, A100, ModelFacts(counted.weights)), counted, late_cast) == rounds


@pytest.mark.parametrize("works", [True, False])
def test_embeddings_are_widened_only_if_the_model_works_with_it(works):
    model = tiny.build_model("text", dtype=torch.bfloat16)
    plan = widen(BoundaryPlan(()), model, lambda: works)
    assert {(b.side, b.module) for b in plan.boundaries} == ({("output", "embeddings")} if works else set())
    assert len(model.get_input_embeddings()._forward_hooks) == works


def test_a_text_model_gets_none_and_a_mixed_one_everywhere():
    text = ModelInventory(
        {"weights": {"bfloat16": 1}}, {}, {}, "bfloat16", frozenset({"bfloat16"}), (), (), None, None
    )
    assert placed(BF16, text) == placed(NONE, text) == set()
    mixed = ModelInventory(
        {"weights": {"bfloat16": 1, "float32": 1}}, {}, {}, "bfloat16", frozenset(), (), (), None, None
    )
    assert placed(NONE, mixed) == {("input", "model")}
    assert placed(BF16, mixed) == set()


def test_readable_and_serialisable():
    counted = census("bfloat16", "bfloat16")
    settlement = plan_boundaries(resolve(BF16, A100, ModelFacts(counted.weights)), counted)
    assert "input of vision_tower: bfloat16 weights" in str(settlement)
    assert json.loads(json.dumps(settlement.to_dict()))["boundaries"][0]["module"] == "vision_tower"
    empty = plan_boundaries(resolve(NONE, A100, ModelFacts()), census())
    assert str(empty) == "no boundaries: this model never combines two dtypes"

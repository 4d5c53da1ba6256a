"""What is placed in a model follows from the policy and the census alone."""

import json

import pytest
from devices import A100

from safe_trainers.boundaries.placement import plan_boundaries
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
    (BF16, "float16", "float32", False, {("output", "embeddings"), ("output", "features")}),
    (FP16, "bfloat16", "float32", False, {("output", "embeddings"), ("output", "features")}),
    (FP16, "bfloat16", "float32", True, {("input", "vision_tower"), ("output", "features")}),
    (FP16, "float16", "float32", False, {("output", "features")}),
]


@pytest.mark.parametrize(("flags", "embeddings", "tower", "late_cast", "expected"), TABLE)
def test_boundaries(flags, embeddings, tower, late_cast, expected):
    assert placed(flags, census(embeddings, tower), late_cast) == expected


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

"""Every recipe that needs a GPU trains here in small (`recipe_twins.py`).

fp16 is real (autocast and a scaler that refuses what CUDA's does).
"""

import public_schemas
import pytest
import yaml
from recipe_twins import DROPPED, RECIPES, SIZES, train, twin

from safe_trainers import tiny
from safe_trainers.model.parts import is_quantized
from upstream import why_not_built


DEFAULT = {"grpo/qwen2_5_vl_3b_lora_bf16.yaml", "grpo/qwen3_vl_4b_qlora_fp16.yaml", "reward/qwen2_0_5b_lora_bf16.yaml"}
"""Those in the default suite; the others with `make matrix`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("public")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else (pytest.mark.matrix,)) for name in RECIPES]
)
def test_the_twin_of_a_recipe_trains_two_steps(name, folder, tmp_path, monkeypatch):
    values, task = twin(RECIPES[name], folder), name.split("/")[0]
    if values.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    family = values["model_name_or_path"].removeprefix("tiny:")
    if family in tiny.VISION_FAMILIES and why_not_built(family):
        pytest.skip(why_not_built(family))
    trainer, steps = train(values, task, tmp_path, monkeypatch)
    compute = "float16" if values.get("fp16") else "bfloat16"
    assert trainer.precision.policy.compute.text == compute
    assert trainer.accelerator.scaler is not None if values.get("fp16") else trainer.accelerator.scaler is None
    parameters = list(trainer.model.parameters())
    assert any(map(is_quantized, parameters)) == values.get("load_in_4bit", False)
    assert all(p.requires_grad for p in parameters) == (not values.get("use_peft", False))
    if task in ("grpo", "rloo"):
        for reward in values["reward_funcs"]:
            assert f"rewards/{reward.rpartition('.')[2]}/mean" in steps[0]
    if "images" in values["dataset_columns"]:
        assert {image.mode for row in trainer.train_dataset for image in row["images"]} == {"RGB"}


def test_nothing_is_dropped_or_shrunk_that_no_recipe_has():
    written = {key for path in RECIPES.values() for key in yaml.safe_load(path.read_text())}
    assert set(DROPPED) | set(SIZES) | {"image_resize"} <= written
    assert set(RECIPES) >= DEFAULT
    assert set(public_schemas.PUBLIC) == {yaml.safe_load(p.read_text())["dataset_name"] for p in RECIPES.values()}

"""Every recipe with images and rollouts trains with the real vLLM, as a twin with `use_vllm: true`."""

import pytest
import yaml
from recipe_twins import RECIPES, train, twin

from safe_trainers.rollout.alignment import adapter_dropout


WITH_IMAGES = [
    name
    for name, path in RECIPES.items()
    if name.startswith(("grpo/", "rloo/")) and "images" in yaml.safe_load(path.read_text())["dataset_columns"]
]
DEFAULT = {
    "grpo/gemma3_4b_lora_bf16.yaml", "grpo/qwen2_5_vl_3b_lora_bf16.yaml", "grpo/smolvlm2_2_2b_lora_fp16.yaml",
    "rloo/qwen3_vl_4b_qlora_fp16.yaml",
}  # fmt: skip
"""Those that `make vllm` runs; the others with `make vllm-slow`."""
VLLM = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 1024,
}  # fmt: skip


def test_all_recipes_with_images_are_here():
    assert len(WITH_IMAGES) >= 10
    assert set(WITH_IMAGES) >= DEFAULT


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else (pytest.mark.slow,)) for name in WITH_IMAGES]
)
def test_the_twin_of_a_recipe_trains_with_vllm(name, folders, tmp_path, monkeypatch):
    values, task = twin(RECIPES[name], tmp_path), name.split("/")[0]
    values["model_name_or_path"] = str(folders[values["model_name_or_path"].removeprefix("tiny:")])
    trainer, steps = train(values | VLLM, task, tmp_path, monkeypatch)
    dtype = "float16" if values.get("fp16") else "bfloat16"
    assert str(trainer.vllm_generation.llm.llm_engine.model_config.dtype) == f"torch.{dtype}"
    if task == "grpo" and not adapter_dropout(trainer.model):  # RLOO does not keep vLLM's log-probabilities
        limit = 0.01 if values.get("fp16") else 0.08
        assert all(entry["precision/logp_mismatch_mean"] < limit for entry in steps)

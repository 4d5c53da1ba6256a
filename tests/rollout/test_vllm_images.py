"""Image models in vLLM: tokens that are not sampled, and names of weights. The engine itself is in tests/real_vllm."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from safe_trainers import PrecisionError, tiny
from safe_trainers.rollout import vllm_images


def module(**children):
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


class EngineModel(nn.Module):
    """Stands in for a model of vLLM, which keeps the weights that it is given."""

    def __init__(self, tower):
        super().__init__()
        self.vision_tower = tower
        self.loaded = []

    def load_weights(self, weights):
        self.loaded += [name for name, _ in weights]
        return set(self.loaded)


NAMES = ["vision_tower.embeddings.weight", "model.vision_tower.encoder.x", "vision_tower.vision_model.y", "lm_head.z"]


def test_names_without_the_inner_module_are_completed():
    model = EngineModel(module(vision_model=nn.Linear(2, 2)))
    vllm_images.accept_names(model)
    model.load_weights((name, torch.zeros(1)) for name in NAMES)
    assert model.loaded == [
        "vision_tower.vision_model.embeddings.weight", "model.vision_tower.vision_model.encoder.x",
        "vision_tower.vision_model.y", "lm_head.z",
    ]  # fmt: skip


def test_other_towers_keep_their_names():
    model = EngineModel(module(patch_conv=nn.Linear(2, 2)))
    vllm_images.accept_names(model)
    model.load_weights((name, torch.zeros(1)) for name in NAMES)
    assert model.loaded == NAMES


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "text"])
def test_towers_whose_names_differ_are_found_by_their_structure(family):
    model = tiny.build_model(family)
    towers = [name for name, _ in model.named_modules() if name.endswith("vision_tower")]
    plain = bool(towers) and not hasattr(model.get_submodule(towers[0]), vllm_images.INNER)
    assert vllm_images.drops_inner_name(model) is plain
    assert vllm_images.drops_inner_name(None) is False


def test_image_tokens_get_the_smallest_bias_and_text_models_none():
    model = tiny.build_model("qwen2_5_vl")
    generation = SimpleNamespace(model=model, generation_kwargs={"seed": 3, "logit_bias": {7: 1.0}})
    vllm_images.forbid_markers(generation)
    config = model.config
    assert generation.generation_kwargs == {
        "seed": 3, "logit_bias": {7: 1.0, config.image_token_id: -100.0, config.video_token_id: -100.0},
    }  # fmt: skip
    text = SimpleNamespace(model=tiny.build_model("text"), generation_kwargs=None)
    vllm_images.forbid_markers(text)
    assert text.generation_kwargs is None


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_clears_its_features_or_ends_the_run(status):
    sent = []
    client = SimpleNamespace(
        base_url="http://server",
        session=SimpleNamespace(post=lambda url: sent.append(url) or SimpleNamespace(status_code=status)),
    )
    generation = SimpleNamespace(vllm_client=client, accelerator=SimpleNamespace(is_main_process=True))
    if status == 200:
        vllm_images.forget_features(generation)
    else:
        with pytest.raises(PrecisionError, match="VLLM_SERVER_DEV_MODE=1"):
            vllm_images.forget_features(generation)
    assert sent == ["http://server/reset_encoder_cache"]


def test_a_tower_that_is_frozen_keeps_its_features():
    model = tiny.build_model("llava")
    assert vllm_images.trains_features(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in name or "lm_head" in name)
    assert not vllm_images.trains_features(model)

"""Media tensors: cast by name, once, only where the tower gives the same bits for both."""

import contextlib
import copy

import cells
import pytest
import torch
from cells import Cell
from media_batches import guarded, media_batch
from policing import reset_accelerate
from torch import nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from benchmarks import families
from safe_trainers import PrecisionError, SafeSFTConfig, SafeSFTTrainer, tiny
from safe_trainers.media.caster import MEDIA_KEYS, MediaCaster
from safe_trainers.tiny.shapes import draw_images
from upstream import towers_count_in_the_dtype_of_pixels


def caster_for(*models, keys=MEDIA_KEYS, contexts=(contextlib.nullcontext,), sharded=None):
    return MediaCaster(keys, models, contexts, sharded)


def decided(model, batch, key="pixel_values", **settings):
    caster = caster_for(model, **settings)
    caster.decide(batch)
    return caster.decisions[key]


@pytest.mark.parametrize("family", tiny.VISION_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_media_follow_their_tower(family, dtype):
    model, batch = guarded(tiny.build_model(family, dtype=dtype)), media_batch(family)
    caster = caster_for(model)
    caster.decide(batch)
    cast = caster.cast("pixel_values", batch["pixel_values"])
    if family == "aria" and dtype is not torch.float32 and towers_count_in_the_dtype_of_pixels():
        assert "before it casts them" in caster.decisions["pixel_values"].reason  # a cast would move the patches
        return
    assert cast.dtype == dtype
    assert batch["pixel_values"].dtype == torch.float32  # the given batch is not changed
    if dtype is torch.float32:
        assert cast is batch["pixel_values"]
        assert caster.decisions["pixel_values"].dtype is None


def test_media_follow_the_tower_under_autocast():
    # Float32 weights: the literal rule "bf16=True means bf16 pixels" is what crashes here.
    batch = media_batch("aria")
    model = guarded(tiny.build_model("aria"))
    contexts = [lambda: torch.autocast("cpu", torch.bfloat16)]
    assert decided(model, batch, contexts=contexts).dtype is None
    half = guarded(tiny.build_model("aria", dtype=torch.bfloat16))
    expected = None if towers_count_in_the_dtype_of_pixels() else "bfloat16"
    assert decided(half, batch, contexts=contexts).dtype == expected


def computing_first(model):
    """Gives a model a tower that computes with float32 pixels before it casts them, as Gemma4's does."""
    model.model.vision_tower.register_forward_pre_hook(
        lambda module, args, kwargs: (
            (args, {**kwargs, "pixel_values": 2 * (kwargs["pixel_values"] - 0.51)})
            if "pixel_values" in kwargs
            else ((2 * (args[0] - 0.51), *args[1:]), kwargs)
        ),
        with_kwargs=True,
    )
    return model


def test_a_tower_that_computes_on_pixels_first_keeps_them_float32():
    model = computing_first(guarded(tiny.build_model("llava", dtype=torch.bfloat16)))
    decision = decided(model, media_batch("llava"))
    assert decision.dtype is None
    assert "before it casts them" in decision.reason


def test_models_of_different_dtypes_get_the_uncast_tensor():
    batch = media_batch("llava")
    policy, reference = (guarded(tiny.build_model("llava", dtype=d)) for d in (torch.bfloat16, torch.float16))
    caster = caster_for(policy, reference)
    caster.decide(batch)
    assert caster.decisions["pixel_values"].dtype is None
    assert "different dtypes (bfloat16, float16)" in caster.decisions["pixel_values"].reason
    wide = caster_for(policy, guarded(tiny.build_model("llava")))
    wide.decide(batch)
    assert wide.decisions["pixel_values"].dtype is None


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (lambda: tiny.build_model("text"), {}, "has no get_image_features"),
        (lambda: tiny.build_model("llava"), {"sharded": "FSDP shards the weights"}, "FSDP shards the weights"),
    ],
)
def test_a_tower_that_cannot_be_asked_is_said_and_left_alone(make, settings, reason):
    decision = decided(make(), media_batch("llava"), **settings)
    assert decision.dtype is None
    assert reason in decision.reason


def test_an_error_of_the_comparison_is_reported_and_not_raised():
    model = tiny.build_model("aria", dtype=torch.bfloat16)  # without boundaries it cannot take float32 pixels
    decision = decided(model, media_batch("aria"))
    assert decision.dtype is None
    assert "could not be compared (RuntimeError: Input type" in decision.reason


def test_the_comparison_changes_nothing_of_the_run():
    model = guarded(tiny.build_model("llava", dtype=torch.bfloat16)).train()
    model.model.vision_tower.register_forward_pre_hook(lambda module, args: torch.rand(1) and None)  # uses randomness
    batch, before = media_batch("llava"), copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    assert decided(model, batch).dtype == "bfloat16"
    assert torch.equal(torch.rand(1), expected)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


LEFT_ALONE = {
    "second_per_grid_ts": torch.tensor([0.5]),
    "video_second_per_grid": torch.tensor([0.5]),
    "bbox": torch.rand(1, 4),
    "flattened_patches": torch.arange(300.0).reshape(1, 300, 1),
    "margin": torch.tensor([0.1]),
    "state": torch.rand(1, 4),
    "actions": torch.rand(1, 4),
    "advantages": torch.rand(2),
    "old_per_token_logps": torch.rand(2, 3),
    "ref_per_token_logps": torch.rand(2, 3),
    "sampling_per_token_logps": torch.rand(2, 3),
    "importance_sampling_ratio": torch.rand(2, 3),
    "image_grid_thw": torch.ones(1, 3, dtype=torch.long),
    "input_ids": torch.ones(2, 3, dtype=torch.long),
    "attention_mask": torch.ones(2, 3, dtype=torch.long),
}


@pytest.mark.parametrize("key", LEFT_ALONE)
def test_what_is_no_media_is_never_media(key):
    assert key not in MEDIA_KEYS
    assert caster_for(nn.Linear(1, 1)).media({key: LEFT_ALONE[key]}) == []


def test_integer_media_are_left_alone():
    assert caster_for(nn.Linear(1, 1)).media({"pixel_values": torch.ones(1, dtype=torch.uint8)}) == []


class Listener(nn.Module):
    """A model with an audio and a video tower of different dtypes, written for this test."""

    def __init__(self):
        super().__init__()
        self.audio = nn.Linear(4, 4).to(torch.float16)
        self.video = nn.Linear(4, 4).to(torch.bfloat16)
        self.text = nn.Module()
        self.text.embed, self.text.layers = nn.Embedding(3, 4), nn.ModuleList([nn.Linear(4, 4)])

    def get_input_embeddings(self):
        return self.text.embed

    def get_audio_features(self, input_features):
        return self.audio(input_features)

    def get_video_features(self, pixel_values_videos, my_frames=None):
        return self.video(pixel_values_videos if my_frames is None else my_frames)


def test_each_media_tensor_follows_the_tower_that_consumes_it():
    model = guarded(Listener())
    batch = {"input_features": torch.rand(1, 4), "pixel_values_videos": torch.rand(1, 4)}
    caster = caster_for(model)
    caster.decide(batch)
    assert {key: decision.dtype for key, decision in caster.decisions.items()} == {
        "input_features": "float16",
        "pixel_values_videos": "bfloat16",
    }


def test_keys_can_be_added():
    model = guarded(Listener())
    batch = {"my_frames": torch.rand(1, 4), "pixel_values_videos": torch.rand(1, 4)}
    keys = {**MEDIA_KEYS, "my_frames": "get_video_features"}
    assert decided(model, batch, key="my_frames", keys=keys).dtype == "bfloat16"


def test_several_pictures_come_as_nested_lists():
    caster = caster_for(guarded(tiny.build_model("llava", dtype=torch.bfloat16)))
    caster.decide(media_batch("llava"))
    images = [[torch.rand(3, 32, 32)], [torch.rand(3, 32, 32), torch.rand(3, 32, 32)]]
    cast = caster.cast("pixel_values", images)
    assert [[p.dtype for p in row] for row in cast] == [[torch.bfloat16], [torch.bfloat16] * 2]
    assert images[0][0].dtype == torch.float32


def test_an_output_that_shows_no_tensors_shows_no_equality():
    class Opaque:
        pass

    model = guarded(Listener())
    model.get_audio_features = lambda input_features: Opaque() if model.audio(input_features) is not None else None
    decision = decided(model, {"input_features": torch.rand(1, 4)}, key="input_features")
    assert decision.dtype is None


def test_whatever_a_model_raises_when_it_is_asked_alone_does_not_end_the_run():
    model = guarded(Listener())

    def asserts(input_features):
        raise AssertionError("companion input missing")

    model.get_audio_features = asserts
    decision = decided(model, {"input_features": torch.rand(1, 4)}, key="input_features")
    assert decision.reason.endswith("could not be compared (AssertionError: companion input missing)")


def test_pixels_cast_to_the_dtype_of_packed_weights_are_refused(tmp_path):
    """SigLIP 2 casts to `patch_embedding.weight.dtype`: uint8 in 4 bits, where pixels between -1 and 1 are 0."""
    pytest.importorskip("bitsandbytes")
    if "lfm2_vl" in families.ABSENT:
        pytest.skip(families.ABSENT["lfm2_vl"])
    folder = families.save("lfm2_vl", tmp_path / "lfm2_vl")
    processor = families.build_processor("lfm2_vl")
    content = [{"type": "image"}, {"type": "text", "text": tiny.QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    batch = dict(processor(images=[draw_images(1)[0]], text=[text], return_tensors="pt"))

    def load(**options):
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)
        loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=bits)
        embedding, seen = loaded.model.vision_tower.embeddings.patch_embedding, []
        embedding.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
        return loaded.train(), seen

    packed, seen = load()
    with torch.no_grad():
        packed(**batch)
    assert seen[0].dtype == torch.uint8
    assert set(seen[0].unique().tolist()) <= {0, 1, 255}  # stock trains on these: 0, but for 1 and -1 themselves
    assert batch["pixel_values"].unique().numel() > 100
    with pytest.raises(PrecisionError, match="media-cast-to-packed-dtype") as error:
        decided(packed, batch)
    line = "llm_int8_skip_modules=['patch_embedding', 'lm_head']"
    assert line in str(error.value)
    assert "`BitsAndBytesConfig(load_in_4bit=True" in str(error.value)

    mended, seen = load(llm_int8_skip_modules=["patch_embedding", "lm_head"])
    assert decided(mended, batch).dtype == "bfloat16"
    assert all(tensor.dtype == torch.bfloat16 and tensor.unique().numel() > 50 for tensor in seen)
    assert mended.model.vision_tower.encoder.layers[0].self_attn.q_proj.weight.dtype == torch.uint8


@pytest.mark.parametrize("value", [1.0, 0.5, 0.0])
def test_images_that_bfloat16_holds_exactly_do_not_decide(value):
    """White images are exact in bfloat16, and later photographs are not."""
    batch = media_batch("llava")
    batch["pixel_values"] = torch.full_like(batch["pixel_values"], value)
    model = computing_first(guarded(tiny.build_model("llava", dtype=torch.bfloat16)))
    assert decided(model, batch).dtype is None
    plain = guarded(tiny.build_model("llava", dtype=torch.bfloat16))
    assert decided(plain, batch).dtype == "bfloat16"


def test_the_decision_is_in_the_checkpoint(tmp_path, monkeypatch):
    def build(steps):
        reset_accelerate()
        cell = Cell("llava", "sft", "bf16", "bf16")
        saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
        return SafeSFTTrainer(**cells.arguments(cell, SafeSFTConfig, steps=steps, **saving))

    first = build(1)
    first.train()
    (decision,) = first.precision.media
    monkeypatch.setattr(MediaCaster, "decide", lambda *_: pytest.fail("the tower was asked again"))
    resumed = build(2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert list(resumed.precision.media) == [decision]

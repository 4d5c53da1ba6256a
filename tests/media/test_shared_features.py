"""A tower runs once for the equal images of a batch, and the run has the same bits."""

import gc
import weakref

import cells
import numpy as np
import pytest
import torch
from cells import Cell
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from policing import reset_accelerate
from torch.overrides import TorchFunctionMode

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeRLOOConfig, tiny
from safe_trainers.media import shared_features
from safe_trainers.media.shared_features import SAMPLED, SharedFeatures, find_repeats
from safe_trainers.model.parts import find_parts


TEXT_ONLY = r".*(language_model|text_model).*\.(q_proj|v_proj)"
"""The usual recipe: adapters in the text model, and a frozen tower."""
FAMILIES = ("llava", "aria", "qwen2_5_vl", "smolvlm", "idefics3", "gemma3", "nocast")
CONFIGS = {"grpo": SafeGRPOConfig, "rloo": SafeRLOOConfig}


def build(cell, shared, lora=TEXT_ONLY, **changes):
    torch.manual_seed(0)
    changes = {"num_generations": 4, "per_device_train_batch_size": 8, "steps": 3, **changes}
    made = cells.arguments(cell, CONFIGS[cell.task], share_media_features=shared, **changes)
    if cell.lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=lora)
    return cells.SAFE[cell.task](**made)


def sharing_of(trainer):
    return trainer._run.feature(SharedFeatures)


def train(trainer):
    """Trains, and returns the losses, the weights, and the numbers of images that towers were run on."""
    images = []
    tower = next(iter(find_parts(trainer.model).towers.values()))

    def count(module, args, kwargs):
        grid = kwargs.get("grid_thw")
        tensors = (*args, *kwargs.values())
        media = next(value for value in tensors if isinstance(value, torch.Tensor) and value.is_floating_point())
        images.append(len(media if grid is None else grid))

    tower.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, cells.fingerprint(trainer.model), images


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_has_the_same_bits_with_fewer_images(family):
    cell = Cell(family, "grpo", "fp32", "bf16", lora=True, beta=0.1)
    *off, every = train(build(cell, "off", steps=8))
    trainer = build(cell, "identical", steps=8)
    *on, few = train(trainer)
    assert on == off
    feature = sharing_of(trainer)
    assert feature.refused == []
    assert sum(few) < 0.75 * sum(every)  # shapes that are new in this short run are computed both ways
    assert feature.computed < feature.seen
    assert ("towers", "run once for equal images of a batch") in {
        row[:2] for row in trainer.precision.report.table("changed from stock").rows
    }


@pytest.mark.parametrize(("task", "weights", "flag"), [("rloo", "bf16", "bf16"), ("grpo", "fp32", None)])
def test_other_trainers_and_precisions(task, weights, flag):
    cell = Cell("qwen2_5_vl", task, weights, flag, lora=True, beta=0.1)
    *off, _ = train(build(cell, "off"))
    *on, _ = train(build(cell, "identical"))
    assert on == off


def pairs(*shape):
    """Four entries, of which two and two are equal."""
    return torch.rand(2, *shape).repeat_interleave(2, dim=0)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"pixel_values": pairs(2, 3, 8, 8)}, 1),  # two, none, two and none of the images may be padding
        ({"pixel_values": pairs(2, 3, 8, 8)}, 6),
        ({"pixel_values": pairs(3, 8, 8), "pixel_attention_mask": torch.ones(4, 8, 8)}, 6),
        ({"input_features": pairs(16, 100), "input_features_mask": torch.ones(4, 100)}, 20),
        ({"pixel_values": pairs(16, 8), "image_position_ids": torch.ones(4, 16, 2)}, 16),
    ],
    ids=["one padded image", "padded images", "masked images", "masked sounds", "positions"],
)
def test_rows_that_may_depend_on_values_are_not_divided(arguments, rows):
    """Equal shapes do not tell how many rows an image has, and their mean is that of one batch alone."""
    repeats = find_repeats(arguments, next(iter(arguments)))
    assert repeats.kinds == (0, 0, 1, 1)
    with pytest.raises(shared_features._NotShareableError):
        shared_features._plan(torch.zeros(4 * rows, 2), torch.zeros(2 * rows, 2), repeats)


def test_rows_that_shapes_or_a_grid_determine_are_divided():
    single = find_repeats({"pixel_values": pairs(3, 8, 8)}, "pixel_values")
    assert shared_features._plan(torch.zeros(24, 2), torch.zeros(12, 2), single) == (6, True)
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 2, 4]])
    patches = torch.cat([part for _ in range(2) for part in (torch.ones(4, 3), torch.zeros(8, 3))])
    sized = find_repeats({"pixel_values": patches, "image_grid_thw": grid}, "pixel_values")
    assert shared_features._plan(torch.zeros(24, 2), torch.zeros(12, 2), sized) == (1, False)
    assert shared_features._plan(torch.zeros(6, 2), torch.zeros(3, 2), sized) == (0.25, False)
    assert shared_features._plan(torch.zeros(4, 2), torch.zeros(2, 2), sized) == (1, True)


def test_a_result_that_does_not_fit_is_computed_for_all_images():
    """A method may take the number of rows from the values of an image, whatever its arguments look like."""
    trainer = build(Cell("llava", "grpo", "fp32", None, lora=True), "identical")
    feature = sharing_of(trainer)

    def get_image_features(module, pixel_values):
        rows = 1 + (pixel_values.flatten(1).amax(1) > 1)
        return pixel_values.flatten(1).repeat_interleave(rows, dim=0)

    shared = feature._sharing(get_image_features)
    first = pairs(3, 4, 4)
    second = first * torch.tensor([9.0, 9.0, 1.0, 1.0]).view(4, 1, 1, 1)
    for images in (first, first, second, first):
        assert torch.equal(shared(trainer.model, images), get_image_features(trainer.model, images))
    assert feature.computed == 4 + 2 + (2 + 4) + 4
    assert feature.refused == ["the number of rows of an image depends on its values"]


def test_tensors_in_the_other_half_precision_than_autocast_are_divided():
    """Under autocast to bfloat16, `torch.cat` rejects float16."""
    repeats = shared_features.Repeats((1, 1, 1), (0, 2), (0, 0, 1))
    images = torch.tensor([[1.0], [1.0], [2.0]], dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="ScalarType"):
            torch.cat([images, images])
        (few,) = shared_features._Call((images,), {}).selected(repeats).args
        every = shared_features._expand(few, (1.0, True), repeats)
    assert few.tolist() == [[1.0], [2.0]]
    assert torch.equal(every, images)
    assert every.dtype == torch.float16


def test_a_known_shape_is_computed_for_distinct_images_only():
    """With one prompt for each rollout, all eight completions have the same image."""
    trainer = build(Cell("llava", "grpo", "bf16", "bf16", lora=True), "identical", num_generations=8, steps=3)
    *_, images = train(trainer)
    first = [8, 1, 8, 1]  # rollout and loss of the first step: all images, and the comparison
    assert images[-len(first) - 4 :] == [*first, 1, 1, 1, 1]


def test_nothing_is_shared_while_gradients_flow_into_the_tower():
    cell = Cell("llava", "grpo", "fp32", "bf16", lora=True)
    trainer = build(cell, "identical", lora=["q_proj", "v_proj"], num_generations=8)  # also in the tower
    *_, images = train(trainer)
    losses = images[-1]
    assert losses == 8
    full = build(Cell("llava", "grpo", "fp32", "bf16"), "identical", num_generations=8)
    *on, images = train(full)
    assert images[-2:] == [1, 8]  # the rollout is shared, and the loss is not
    *off, _ = train(build(Cell("llava", "grpo", "fp32", "bf16"), "off", num_generations=8))
    assert on == off


def test_features_that_are_not_bit_identical_are_not_shared():
    """A tower whose result depends on the number of images."""
    cell = Cell("llava", "grpo", "bf16", "bf16", lora=True)
    for shared, computed in (("identical", 8), ("always", 1)):
        trainer = build(cell, shared, num_generations=8)
        find_parts(trainer.model).towers["multi_modal_projector"].register_forward_hook(
            lambda module, args, output: output * (1 + 0.01 * len(output))
        )
        *_, images = train(trainer)
        feature = sharing_of(trainer)
        assert images[-1] == computed
        assert bool(feature.refused) is (shared == "identical")
        assert all("not bit-identical" in reason for reason in feature.refused)


@pytest.mark.parametrize(("least", "computed"), [(2, 2), (3, 4), (5, 8)])
def test_images_whose_kernels_compute_few_otherwise_are_computed_several_times(least, computed):
    cell = Cell("llava", "grpo", "bf16", "bf16", lora=True)
    found = {}
    for shared in ("identical", "off"):
        trainer = build(cell, shared, num_generations=8, steps=3)
        find_parts(trainer.model).towers["multi_modal_projector"].register_forward_hook(
            lambda module, args, output: output * (1.5 if len(output) < least else 1)
        )
        *found[shared], images = train(trainer)
        assert images[-4:] == [computed if shared == "identical" else 8] * 4
        assert bool(sharing_of(trainer).refused) is (shared == "identical" and computed == 8)
    assert found["identical"] == found["off"]


def test_dropout_in_the_tower_is_not_shared():
    trainer = build(Cell("llava", "grpo", "fp32", "bf16", lora=True), "identical", num_generations=8)
    trainer.model.train()
    projector = find_parts(trainer.model).towers["multi_modal_projector"]
    projector.register_forward_hook(lambda m, args, output: torch.nn.functional.dropout(output, 0.5, m.training))
    *_, images = train(trainer)
    assert images[-1] == 8


def pixels(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 12).clone()


def test_equal_images_are_found():
    repeats = find_repeats({"pixel_values": pixels(1, 2, 1, 1)}, "pixel_values")
    assert (repeats.sizes, repeats.distinct, repeats.kinds) == ((1, 1, 1, 1), (0, 1), (0, 1, 0, 0))


@pytest.mark.parametrize(
    "arguments",
    [
        {"pixel_values": pixels(1, 2, 3)},
        {"pixel_values": pixels(1)},
        {"pixel_values": pixels(1, 1), "sizes": torch.tensor([[4, 4], [8, 8]])},  # equal pixels, another size
        {"pixel_values": pixels(1, 1), "mask": torch.ones(3)},  # rows that belong to no image
        {"pixel_values": [pixels(1), pixels(1)]},
        {"pixel_values": pixels(1, 1), "sizes": [torch.ones(1)]},
        {"pixel_values": pixels(float("nan"), float("nan"))},
    ],
)
def test_nothing_is_shared(arguments):
    assert find_repeats(arguments, "pixel_values") is None


def test_one_pixel_that_is_not_sampled_makes_another_image():
    images = torch.zeros(2, 1000)
    images[1, 7] = 1.0
    assert find_repeats({"pixel_values": images}, "pixel_values") is None


def test_patches_belong_to_the_images_of_their_grids():
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
    patches = torch.cat([pixels(1, 2, 3, 4), pixels(*range(8)), pixels(1, 2, 3, 4)])
    repeats = find_repeats({"pixel_values": patches, "image_grid_thw": grid}, "pixel_values")
    assert (repeats.sizes, repeats.distinct, repeats.kinds) == ((4, 8, 4), (0, 1), (0, 1, 0))
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 1]])  # the same patches in another arrangement
    assert find_repeats({"pixel_values": patches, "image_grid_thw": grid}, "pixel_values") is None


def test_another_argument_of_the_method_is_decided_on_its_own():
    """`vision_feature_layer` of LLaVA selects what is computed."""
    trainer = build(Cell("llava", "grpo", "bf16", "bf16", lora=True), "identical")
    feature = sharing_of(trainer)
    model = trainer.model.get_base_model().model
    side = model.config.vision_config.image_size
    images = torch.rand(1, 3, side, side).bfloat16().expand(3, -1, -1, -1)
    with torch.no_grad():
        for layer in (-1, -2, -1, -2):
            model.get_image_features(images, vision_feature_layer=layer)
    assert (feature.seen, feature.computed) == (12, 3 + 3 + 1 + 1)


class Reads(TorchFunctionMode):
    """Counts the values that are converted to Python numbers."""

    values = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            self.values += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_of_patches_only_those_at_the_start_of_an_image_are_read():
    grids = torch.tensor([[1, 16, 16]] * 8)
    patches = torch.rand(2, 256, 1176).repeat_interleave(4, dim=0).flatten(0, 1)  # (P, D)
    with Reads() as reads:
        repeats = find_repeats({"pixel_values": patches, "image_grid_thw": grids}, "pixel_values")
    assert repeats.distinct == (0, 4)
    assert reads.values <= 8 * 2 * SAMPLED


def test_a_model_does_not_keep_its_trainer():
    trainer = build(Cell("llava", "grpo", "fp32", None), "identical", steps=1)
    trainer.train()
    model, optimizer = trainer.model, weakref.ref(trainer.optimizer.optimizer)
    del trainer
    reset_accelerate()
    gc.collect()
    assert optimizer() is None
    parts = find_parts(model)
    images = torch.rand(1, 3, 32, 32).expand(2, -1, -1, -1)
    assert parts.containers[-1].get_image_features(images) is not None


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_prompts_with_one_and_with_two_images_in_batches_of_one_shape(family, tmp_path):
    """The first batch has two images in each prompt; the third has one in one prompt, beside a padded image."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt": [{"role": "user", "content": "what is it ?"}],
            "images": [Image.fromarray(rng.integers(1, 255, (32, 32, 3), dtype=np.uint8)) for _ in range(number)],
        }
        for number in (2, 2, 2, 1, 1, 2)
    ]

    def trained(shared):
        reset_accelerate()
        torch.manual_seed(0)
        processor = tiny.build_processor(family)
        trainer = SafeGRPOTrainer(
            tiny.build_model(family),
            args=SafeGRPOConfig(
                str(tmp_path), use_cpu=True, max_steps=3, per_device_train_batch_size=4, num_generations=2,
                max_completion_length=4, shuffle_dataset=False, report_to=[], save_strategy="no", disable_tqdm=True,
                learning_rate=1e-3, generation_kwargs=tiny.generation_kwargs(processor), share_media_features=shared,
            ),
            reward_funcs=cells.token_reward, train_dataset=Dataset.from_list(rows), processing_class=processor,
        )  # fmt: skip
        trainer.train()
        return cells.fingerprint(trainer.model)

    assert trained("identical") == trained("off")

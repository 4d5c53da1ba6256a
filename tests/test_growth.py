"""What the package does once for each tensor of a model, or each image of a batch, it does not do twice as often for
each of twice as many: operations are counted, nothing is timed."""

import functools
import json
import sys
from pathlib import Path

import benchmark_modules
import pytest
import torch
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlavaForConditionalGeneration

from safe_trainers import SafeSFTConfig, SafeSFTTrainer, plan_boundaries, resolve, tiny
from safe_trainers.boundaries.placement import place
from safe_trainers.core.device import Device
from safe_trainers.media.caster import MEDIA_KEYS, MediaCaster
from safe_trainers.model.inventory import CountContext, count_groups, take_inventory
from safe_trainers.policy.resolve import Requested
from safe_trainers.report.render import to_json
from safe_trainers.report.run_report import make_report, plan
from safe_trainers.tiny.shapes import draw_images
from safe_trainers.trainer.from_config import facts_of
from safe_trainers.trainer.trl_patches import construction
from safe_trainers.weights import bitsandbytes as quantization
from safe_trainers.weights import fp32_modules
from safe_trainers.weights import unify_dtypes as layout
from safe_trainers.weights.prepare import prepare_weights
from safe_trainers.weights.trainables import TrainableContext as Prepared


LAYERS = (4, 8, 16)
LIMIT = 1.1
"""The exponent below which growth counts as linear."""


def operations(work):
    """How many instructions of Python the work takes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def counts_of(work):
    """The operations on models whose number of tensors doubles."""
    work(model(LAYERS[0]))  # what is kept for the next time, such as compiled patterns
    return [operations(functools.partial(work, model(layers))) for layers in LAYERS]


def is_linear(counts):
    """Whether twice as many more take twice as many operations more, for sizes that double.

    A little more is due to names, which get longer.
    """
    first, second, third = counts
    return third - second <= 2.05 * (second - first)


def model(layers, device="meta", dtype=torch.bfloat16):
    config = tiny.build_model("llava").config
    for part in (config.text_config, config.vision_config):
        part.num_hidden_layers = layers
    with torch.device(device):
        made = LlavaForConditionalGeneration(config)
        for parameter in made.parameters():
            parameter.data = parameter.data.to(dtype)
        return get_peft_model(made, LoraConfig(r=1, target_modules=r".*language_model.*\.(q_proj|v_proj)"))


def guard_adapters(made):
    made.is_loaded_in_4bit = True  # what TRL, and the guard with it, goes by
    with construction(SafeSFTTrainer, made, lambda head: False) as guard:
        guard.release(made)


def decided(made):
    counted = take_inventory(made)
    return counted, resolve(Requested(bf16=True), Device("cpu"), facts_of(counted))


def settled(made):
    counted, policy = decided(made)
    place(plan_boundaries(policy, counted), made)


def named(made):
    fp32_modules.decide(made, fp32_modules.find_modules(made, ["*norm*"]))


def laid_out(made):
    kept = [name for name, _ in made.base_model.model.named_modules() if "norm" in name]
    layout.plan_layout(made, "float32", keep=kept)


def quantized(layers):
    """The model on the CPU, with the linear layers of its text model packed to 4 bits."""
    import bitsandbytes

    made = model(layers, "cpu")
    text = made.base_model.model.model.language_model
    for name, layer in [*text.named_modules()]:
        if isinstance(layer, nn.Linear) and "lora" not in name and "base_layer" not in name:
            packed = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            packed.load_state_dict(layer.state_dict())
            text.set_submodule(name, packed.to("cpu"))
    return made


WORK = {
    "census": take_inventory,
    "preparation": lambda made: prepare_weights(made, *decided(made), Prepared(2e-5)),
    "settlement": settled,
    "fp32_modules": named,
    "layout with what it keeps": laid_out,
    "adapter guard": guard_adapters,
    "inventory": lambda made: count_groups(made, CountContext(lambda part, parameter, held: held)),
}


@pytest.mark.parametrize("work", WORK)
def test_what_is_done_for_each_tensor_is_linear_in_them(work):
    counts = counts_of(WORK[work])
    assert counts[0] > 1000
    assert is_linear(counts), counts


def test_what_is_done_for_each_packed_tensor_is_linear_in_them():
    def work(made):
        planned = quantization.plan(made, "float16")
        quantization.reconcile(made, planned)
        return planned, count_groups(made, CountContext(lambda part, parameter, held: held))

    planned, groups = work(quantized(LAYERS[0]))
    assert len([change for change in planned.changes if change.kind == "quant_state"]) == 5 * LAYERS[0]
    assert any("nf4" in group.held for group in groups)
    counts = [operations(functools.partial(work, quantized(layers))) for layers in LAYERS]
    assert is_linear(counts), counts


def test_the_report_of_a_trainer_is_linear_in_its_tensors(tmp_path):
    counts = []
    for layers in LAYERS:
        trainer = SafeSFTTrainer(
            model=model(layers, "cpu"), args=SafeSFTConfig(str(tmp_path), use_cpu=True, bf16=True, max_length=None),
            train_dataset=tiny.sft_dataset(2), processing_class=tiny.build_processor("llava"),
        )  # fmt: skip
        to_json(make_report(trainer._run, plan(trainer._run)))
        counts.append(operations(lambda trainer=trainer: to_json(make_report(trainer._run, plan(trainer._run)))))
    assert is_linear(counts), counts


def test_what_is_not_linear_would_be_found():
    def compared(made):
        names = [name for name, _ in made.named_modules() if "norm" in name]
        return [name for name in names if any(name.startswith(f"{other}.") for other in names)]

    assert not is_linear(counts_of(compared))


def caster():
    made = tiny.build_model("llava", dtype=torch.bfloat16)
    return MediaCaster(MEDIA_KEYS, [made], [lambda: torch.autocast("cpu", torch.bfloat16)]), made


def batch(images):
    shown, _ = draw_images(images)
    return dict(tiny.build_processor("llava")(images=shown, text=["<image>"] * images, return_tensors="pt"))


def test_media_are_cast_in_steps_and_bytes_that_are_linear_in_the_images():
    made, _ = caster()
    made.decide(batch(2))
    counts = []
    for images in (8, 16, 32):
        pixels = torch.rand(images, 3, 32, 32)  # (B, C, H, W)
        with LiveBytes() as live:
            held = made.cast("pixel_values", pixels)
        assert held.dtype == torch.bfloat16
        assert live.peak == pixels.nbytes / 2
        counts.append(operations(lambda rows=list(pixels): made.cast("pixel_values", rows)))
    assert is_linear(counts), counts


def test_the_decision_on_media_runs_the_tower_twice_however_many_images_there_are():
    for images in (1, 9):
        made, owner = caster()
        runs = []
        handle = owner.model.vision_tower.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        made.decide(batch(images))
        handle.remove()
        assert made.decisions["pixel_values"].dtype == "bfloat16"
        assert len(runs) == 2


def test_a_part_that_is_not_linear_is_found_at_the_largest_sizes(monkeypatch):
    growth = benchmark_modules.load(monkeypatch, "growth")
    sizes = list(growth.TENSORS)
    out_of_caches = [size * (1 + 0.5 * min(1, max(0, (size - 3_000) / 27_000))) for size in sizes]
    assert growth.fit(sizes, out_of_caches)["final"] < LIMIT < growth.fit(sizes, out_of_caches)["exponent"]
    quadratic = [size + 0.25 * size**2 / sizes[-1] for size in sizes]  # a fifth of the time at the largest size
    assert growth.fit(sizes, quadratic)["final"] > LIMIT > growth.fit(sizes, quadratic)["exponent"]
    assert growth.fit(sizes, [size**1.15 for size in sizes])["final"] == pytest.approx(1.15)


def test_the_committed_measurement_reaches_the_sizes_and_is_linear():
    measured = json.loads((Path(__file__).parent.parent / "benchmarks/results/growth.json").read_text())
    for unit, largest in (("tensors", 100_000), ("images", 1000)):
        for part in measured[unit].values():
            assert len(part["sizes"]) >= 4
            assert part["sizes"][-1] >= 0.99 * largest
            assert part["time"]["final"] < LIMIT
            assert part["time"]["exponent"] < 1.2
            assert sum(size >= part["sizes"][-1] / 4 for size in part["sizes"]) >= 3
            assert part["memory"]["exponent"] < LIMIT

"""A tower of which nothing is trained has no backward pass, and the run has the same bits."""

import gc
import weakref
from collections import Counter
from types import MethodType, SimpleNamespace

import cells
import pytest
import torch
from cells import Cell
from live_bytes import LiveBytes
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText

from safe_trainers.core.feature import Run
from safe_trainers.core.patches import replaced_by
from safe_trainers.media import frozen_towers
from safe_trainers.media.frozen_towers import FrozenTowers, leaves_of
from safe_trainers.model.parts import find_parts
from safe_trainers.testing import fp16_on_cpu
from upstream import needs_transformers_5


TEXT_ONLY = r".*(language_model|text_model).*\.(q_proj|v_proj)"
EVERYWHERE = r".*\.(q_proj|v_proj)"
needs_gradients_of_towers = needs_transformers_5("requires no gradients of the embeddings of images")


def parts_of(features):
    """The features of each image; transformers 4 returns them alone."""
    return getattr(features, "pooler_output", features)


def build(cell, lora=TEXT_ONLY, of=None, **changes):
    torch.manual_seed(0)
    made = cells.arguments(cell, cells.SAFE_CONFIG[cell.task], **{"steps": 3, **changes})
    if cell.lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=lora)
    return (of or cells.SAFE[cell.task])(**made)


def results(trainer):
    logs = cells.train_logs(trainer)
    numbers = [(log["loss"], log["grad_norm"]) for log in logs if "grad_norm" in log]
    assert numbers
    return cells.fingerprint(trainer.model), numbers


def refusing(feature, *args):
    return False


@pytest.mark.parametrize(
    ("cell", "changes"),
    [
        *(
            (Cell(family, "sft", "bf16", "bf16", lora=True), {})
            for family in ("aria", "gemma3", "idefics3", "llava", "nocast", "qwen2_5_vl", "smolvlm")
        ),
        (Cell("llava", "sft", "fp32", "bf16", lora=True), {}),
        (Cell("llava", "sft", "fp32", None, lora=True), {"gradient_checkpointing": False}),
        (Cell("llava", "dpo", "bf16", "bf16", lora=True), {}),
        (Cell("qwen2_5_vl", "grpo", "bf16", "bf16", lora=True, beta=0.1), {"num_iterations": 2}),
        (Cell("llava", "grpo", "bf16", "bf16", lora=True), {"share_media_features": "off"}),
        (Cell("llava", "rloo", "fp32", "bf16", lora=True, beta=0.1), {}),
    ],
    ids=str,
)
def test_a_run_has_the_same_bits(cell, changes, monkeypatch):
    trainer = build(cell, **changes)
    mine = results(trainer)
    assert trainer.precision[FrozenTowers].passes > 0
    assert trainer.precision[FrozenTowers].refused == []
    monkeypatch.setattr(FrozenTowers, "_compare", refusing)
    other = build(cell, **changes)
    assert results(other) == mine
    assert other.precision[FrozenTowers].passes == 0


def test_a_run_in_float16_has_the_same_bits(monkeypatch):
    cell, of = Cell("llava", "sft", "fp16", "fp16", lora=True), fp16_on_cpu(cells.SAFE["sft"])
    trainer = build(cell, of=of)
    mine = results(trainer)
    assert trainer.precision[FrozenTowers].passes > 0
    monkeypatch.setattr(FrozenTowers, "_compare", refusing)
    assert results(build(cell, of=of)) == mine


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def last_step(trainer):
    """The operations of the last step: of this model, only the tower has GELU."""
    counts = []

    class Counting:
        def training_step(self, *args, **kwargs):
            with Operations() as found:
                loss = type(trainer).training_step(trainer, *args, **kwargs)
            counts.append(found.counts)
            return loss

    trainer.training_step = MethodType(Counting.training_step, trainer)
    trainer.train()
    return counts[-1]


@needs_gradients_of_towers
def test_stock_computes_the_backward_pass_of_a_frozen_tower():
    cell = Cell("llava", "sft", "bf16", "bf16", lora=True)
    made = cells.arguments(cell, cells.PLAIN["sft"])
    made["peft_config"] = LoraConfig(r=4, target_modules=TEXT_ONLY)
    stock, safe = last_step(cells.STOCK["sft"](**made)), last_step(build(cell))
    assert stock["gelu_backward"] > 0
    assert safe["gelu_backward"] == 0
    assert stock["gelu"] > safe["gelu"] > 0  # checkpointing computes the forward pass again


@pytest.mark.parametrize(
    ("trained", "lora"), [("everything", False), ("adapters in the tower", True), ("the projector", True)]
)
def test_a_tower_that_is_trained_keeps_its_graph(trained, lora):
    cell = Cell("llava", "sft", "bf16", "bf16", lora=lora)
    trainer = build(cell, lora=EVERYWHERE if trained == "adapters in the tower" else TEXT_ONLY)
    if trained == "the projector":
        for parameter in trainer.model.get_base_model().model.multi_modal_projector.parameters():
            parameter.requires_grad = True
    trainer.train()
    assert trainer.precision[FrozenTowers].passes == 0
    assert trainer.precision[FrozenTowers].refused == []


def frozen_outside_of_text():
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("llava"))
    model.requires_grad_(False)
    find_parts(model).text.requires_grad_(True)
    return model


def with_features(change):
    """A trainer of the text model of a LLaVA whose features are changed."""
    cell = Cell("llava", "sft", "fp32", "bf16")
    made = cells.arguments(cell, cells.SAFE_CONFIG["sft"], steps=3, model_init_kwargs=None)
    made["model"] = model = frozen_outside_of_text()
    container = model.model
    own = container.get_image_features

    def get_image_features(module, *args, **kwargs):
        found = own(*args, **kwargs)
        changed = [change(module, part) for part in parts_of(found)]
        if isinstance(found, (list, tuple)):
            return changed
        found.pooler_output = changed
        return found

    container.get_image_features = MethodType(get_image_features, container)
    return cells.SAFE["sft"](**made)


def adds_embeddings(module, features):
    return features + module.language_model.embed_tokens.weight[:1]


def asks_for_gradients(module, features):
    return features * (1.0 + 0.01 * torch.is_grad_enabled())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adds_embeddings, "a weight of the text model is trained that makes features"),
        (asks_for_gradients, "features without a graph are not bit-identical"),
        (lambda module, features: features, None),
    ],
)
def test_other_features_keep_their_graph(change, reason, monkeypatch):
    trainer = with_features(change)
    mine = results(trainer)
    feature = trainer.precision[FrozenTowers]
    assert feature.refused == ([] if reason is None else [reason])
    assert (feature.passes == 0) is (reason is not None)
    monkeypatch.setattr(FrozenTowers, "_compare", refusing)
    assert results(with_features(change)) == mine


def test_a_tower_with_dropout_draws_the_same_numbers(monkeypatch):
    def run():
        trainer = build(Cell("llava", "sft", "bf16", "bf16", lora=True))
        tower = trainer.model.get_base_model().model.vision_tower
        for layer in tower.modules():
            if hasattr(layer, "activation_fn"):
                layer.activation_fn = nn.Sequential(layer.activation_fn, nn.Dropout(0.1))
        return results(trainer), trainer.precision[FrozenTowers].passes

    mine, passes = run()
    assert passes > 0
    monkeypatch.setattr(FrozenTowers, "_compare", refusing)
    assert run() == (mine, 0)


def test_an_error_of_the_comparison_keeps_the_graph(monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("safe_trainers.media.frozen_towers.OrderProbe", fail)
    trainer = build(Cell("llava", "sft", "bf16", "bf16", lora=True))
    trainer.train()
    feature = trainer.precision[FrozenTowers]
    assert feature.passes == 0
    assert feature.refused == ["OutOfMemoryError('CUDA out of memory')"]


def test_a_comparison_keeps_nothing_for_a_backward_pass(monkeypatch):
    """Of a whole tower, what is kept is the largest part of a run's memory."""
    trainer = build(Cell("llava", "sft", "bf16", "bf16", lora=True), gradient_checkpointing=False)
    model = trainer.model.get_base_model()
    model.enable_input_require_grads()
    layers = [layer for layer in model.model.vision_tower.modules() if hasattr(layer, "activation_fn")]
    made, alive = [], []

    def note(layer, args):
        made.append(weakref.ref(args[0]))  # its backward pass needs the input

    def counting(left, right):
        alive.append([kept() is not None for kept in made])
        return True

    for layer in layers:
        layer.activation_fn.register_forward_pre_hook(note)
    monkeypatch.setattr(frozen_towers, "same_bits", counting)
    trainer.train()
    (found,) = alive
    assert len(found) > len(layers)
    assert not any(found)


def test_gradients_of_images_are_computed_if_they_are_asked_for():
    trainer = build(Cell("llava", "sft", "fp32", None, lora=True))
    trainer.train()
    passes = trainer.precision[FrozenTowers].passes
    container = trainer.model.get_base_model().model
    pixels = torch.randn(1, 3, 32, 32, requires_grad=True)
    parts_of(container.get_image_features(pixels))[0].sum().backward()
    assert pixels.grad.any()
    assert trainer.precision[FrozenTowers].passes == passes


@needs_gradients_of_towers
def test_the_peak_of_memory_is_lower(monkeypatch):
    """Of a run that has not compared anything: the operands of the comparison take memory of their own."""
    peaks = {}
    for without in (True, False):
        monkeypatch.setattr(FrozenTowers, "_compare", lambda *args, without=without: without)
        trainer = build(Cell("llava", "sft", "fp32", None, lora=True))
        with LiveBytes() as live:
            trainer.train()
        peaks[without] = live.peak
    assert peaks[True] < peaks[False]


@pytest.mark.parametrize("why", ["compiled", "sharded"])
def test_nothing_is_replaced_where_a_further_pass_does_harm(why, monkeypatch):
    """FSDP is only said to be used: the passes of a comparison on one rank would wait for the others."""
    if why == "sharded":
        monkeypatch.setattr(Run, "sharded", "FSDP")
    trainer = build(Cell("llava", "grpo", "bf16", "bf16", lora=True), torch_compile=why == "compiled")
    container = trainer.model.get_base_model().model
    assert {"frozen-towers", "shared-features"}.isdisjoint(replaced_by(container, "get_image_features"))


def test_the_model_may_outlive_its_trainer():
    trainer = build(Cell("llava", "sft", "bf16", "bf16", lora=True), steps=1)
    trainer.train()
    model, alive = trainer.model, weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None
    assert len(parts_of(model.get_base_model().model.get_image_features(torch.randn(1, 3, 32, 32).bfloat16()))) == 1


def test_the_leaves_of_a_graph_are_those_that_need_gradients():
    weight, other, value = nn.Parameter(torch.ones(2)), torch.ones(2), torch.ones(2, requires_grad=True)
    made = SimpleNamespace(one=(weight * other).exp(), two=value + 1)
    assert {id(leaf) for leaf in leaves_of([made.one, {"two": made.two}])} == {id(weight), id(value)}
    assert list(leaves_of([other])) == []
    assert list(leaves_of(value)) == [value]


def test_the_report_says_so():
    trainer = build(Cell("llava", "sft", "bf16", "bf16", lora=True))
    trainer.train()
    rows = trainer.precision.report.table("changed from stock").rows
    assert [row for row in rows if "without a graph" in str(row[1])]

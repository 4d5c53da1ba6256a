"""What a live model is asked at construction, and how its answer is read."""

import contextlib
import random
from pathlib import Path

import cells
import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from torch import nn
from transformers import AutoModelForCausalLM

from safe_trainers import tiny
from safe_trainers.model.trial_forward import (
    is_loaded,
    restored,
    sample_inputs,
    trial_error,
    try_sample,
    undisturbed,
)
from safe_trainers.numerics.activations import extremes


ROOT = Path(__file__).parents[2]


class Joining(torch.nn.Module):
    """A norm that puts two parts together, as towers do with patches; autocast refuses the other half format there."""

    def forward(self, hidden):
        width = hidden.shape[-1] // 2
        return torch.cat([hidden[..., :width].to(torch.bfloat16), hidden[..., width:].to(torch.bfloat16)], dim=-1)


def test_an_error_of_autocast_about_dtypes_is_one():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    model.model.norm = Joining()
    assert trial_error(model, None, None) is None
    assert trial_error(model, None, "bfloat16") is None
    assert "ScalarType" in trial_error(model, None, "float16")


def test_a_weight_without_elements_does_not_prevent_the_trial():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    model.model.norm = Joining()
    model.model.adapter = nn.Linear(0, 4)
    assert is_loaded(model)
    assert "ScalarType" in trial_error(model, None, "float16")
    # ZeRO-3 replaces a weight by an empty tensor, which records its size; FSDP may load weights later.
    model.lm_head.weight.ds_numel = model.lm_head.weight.numel()
    assert is_loaded(model)
    model.lm_head.weight.data = torch.empty(0)
    assert not is_loaded(model)
    assert trial_error(model, None, "float16") is None
    with torch.device("meta"):
        assert not is_loaded(nn.Linear(2, 2))


def test_extremes_are_found_under_any_autocast():
    values = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(RuntimeError, match="ScalarType"):
            torch.stack([values, values])
        assert extremes(values).tolist() == [-2.0, 1.0]


def test_linear_layers_compute_one_row_of_a_sample():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    shapes = []
    handles = [model.lm_head.register_forward_pre_hook(lambda layer, args: shapes.append(args[0].shape[:-1]))]
    handles.append(model.lm_head.register_forward_hook(lambda layer, args, output: shapes.append(output.shape[:-1])))
    trial = try_sample(model, None, torch.bfloat16, contextlib.nullcontext())
    assert (trial.error, trial.skipped) == (None, None)
    model(input_ids=torch.ones(1, 2, dtype=torch.long))
    assert shapes == [(1, 2), (1,), (1, 2), (1, 2)]  # the hooks of the trial run after these
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("family", "media"), [("text", []), ("llava", ["pixel_values"]), ("qwen2_audio", ["input_features"])]
)
def test_a_question_has_what_the_processor_takes(family, media, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import families

    if family in families.ABSENT:
        pytest.skip(families.ABSENT[family])
    build = tiny.build_processor if family in tiny.FAMILIES else families.build_processor
    inputs = sample_inputs(build(family))
    assert [name for name, value in inputs.items() if value.is_floating_point()] == media
    assert {value.shape[0] for value in inputs.values()} == {1}


class Draws(nn.Module):
    """Counts its calls in a buffer and in attributes, and draws from every kind of random generator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.zeros(1), persistent=False)
        self.number, self.name, self.made = 0, "a", None
        self.own, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.legacy = np.random.default_rng(1), np.random.RandomState(1)

    def forward(self):
        self.calls += 1
        self.replaced = self.replaced + 1
        self.number, self.name, self.made = self.number + 1, self.name + "b", "c"
        drawn = [random.random(), np.random.rand(), torch.rand(()).item(), torch.rand((), generator=self.own).item()]
        drawn += [self.python.random(), self.numpy.random(), self.legacy.rand()]
        state = [self.calls.item(), self.replaced.item(), self.number, self.name, self.training]
        return [*drawn, *state]


def test_a_block_changes_nothing_that_a_forward_pass_may_change():
    def seeded():
        random.seed(2)
        np.random.seed(2)
        torch.manual_seed(2)
        return Draws().train()

    expected, model = seeded()(), seeded()
    calls = model.calls
    with undisturbed(model):
        model()
        model()
    assert model.made is None
    assert model() == expected
    assert model.calls is calls


class _Packed(nn.Module):
    """A layer of GPTQ's form: packed weights and scales are buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(256, 256, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(16))


def test_packed_weights_in_buffers_are_not_copied():
    model = nn.Sequential(_Packed(), nn.BatchNorm1d(16))
    with LiveBytes() as count, restored(model):
        model[0].scales.add_(1)
        model[1](torch.rand(4, 16))
    assert count.peak < model[0].qweight.nbytes / 10
    assert torch.equal(model[0].scales, torch.ones(16))
    assert torch.equal(model[1].running_mean, torch.zeros(16))

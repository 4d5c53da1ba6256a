"""What is not finite in a skipped step is named, and gradients that overflow or underflow float16 with the line."""

import ast
import copy
import json
import math
import random
import re
import warnings
from functools import partial
from pathlib import Path

import cells
import numpy as np
import pytest
import torch
from cells import Cell
from policing import reset_accelerate
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from two_processes import run_in_two_processes

from safe_trainers import PrecisionError, PrecisionWarning
from safe_trainers.numerics.gradient_norm import GradientNorm
from safe_trainers.numerics.gradients import GradientWatch, names_of_adapters
from safe_trainers.numerics.not_finite import NotFinite
from safe_trainers.numerics.replay import LossCall, Replay
from safe_trainers.numerics.step_monitor import StepMonitor
from safe_trainers.numerics.trace import (
    GRADIENT,
    INPUT,
    LOSS,
    LOSS_GRADIENT,
    LOSS_INPUT,
    OUTPUT,
    WEIGHT,
    Trace,
    values_of,
)
from safe_trainers.testing import fp16_on_cpu
from upstream import TRANSFORMERS_4


STEPS = 4


def build(task="sft", flag=None, *, model=None, family="text", safe=True, lora=False, **changes):
    """A trainer; under fp16 with a real loss scaler."""
    reset_accelerate()
    torch.manual_seed(0)
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    if model is not None:
        changes["model_init_kwargs"] = None
    made = cells.arguments(Cell(family, task, "fp32", flag, lora=lora), config, **{"steps": STEPS, **changes})
    if model is not None:
        tokenizer = AutoTokenizer.from_pretrained(cells.folder("text"))
        made |= {"model": model, "processing_class": tokenizer}
    return fp16_on_cpu((cells.SAFE if safe else cells.STOCK)[task])(**made)


def warned(trainer):
    """Trains, and returns the precision warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]


def norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def suggested(text):
    return ast.literal_eval(re.search(r"fp32_modules=(\[.*?\])", text).group(1))


# ---- Gradients that overflow float16 ----

TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}  # fmt: skip
MOE = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4},
    "glm4_moe": {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip
FUSED = pytest.mark.skipif("gemma4" not in CONFIG_MAPPING, reason="this transformers has no fused experts")


def mixture(family):
    """A mixture of experts. In its second layer the gradients between two products overflow float16, though the loss
    is finite: the first product is small, and the weights of the second are large."""
    config = AutoConfig.for_model(family, vocab_size=420, **TINY, **MOE[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "o_proj.weight")):
                parameter.mul_(1e-3)
            elif name.endswith("experts.down_proj"):
                parameter.mul_(1e6 if "layers.1." in name else 1e-3).clamp_(-6e4, 6e4)
            elif "layers.1.post_attention_layernorm" in name:
                parameter.mul_(1e-2)
    return model


@FUSED
@pytest.mark.parametrize("family", MOE)
def test_experts_whose_gradients_overflow_are_named_and_the_line_makes_the_run_finite(family):
    stock = build(flag="fp16", model=mixture(family), safe=False)
    assert not warned(stock)  # stock skips every step and names nothing
    assert not any(map(math.isfinite, norms(stock)))
    trainer = build(flag="fp16", model=mixture(family))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        with pytest.raises(PrecisionError) as stopped:
            trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(0 < loss < 10 for loss in losses)
    (message,) = (str(w.message) for w in caught if "[gradients-overflow-fp16]" in str(w.message))
    assert message.startswith("step 1 is skipped: `model.layers.1.mlp.experts` is the first module that computes a ")
    assert "with the loss scale 1; the loss is finite" in message
    assert suggested(message) == suggested(str(stopped.value)) == ["layers.1.mlp.experts"]
    assert trainer.precision.not_finite.module == "model.layers.1.mlp.experts"
    fixed = build(flag="fp16", model=mixture(family), steps=12, fp32_modules=suggested(message))
    assert not any("gradients-overflow-fp16" in text for text in warned(fixed))
    assert fixed.precision[StepMonitor].taken >= 6  # the scaler finds its scale in the first steps
    assert all(map(math.isfinite, norms(fixed)[-6:]))


def test_a_scale_that_is_only_too_large_is_left_to_the_scaler():
    trainer = build(flag="fp16", loss_scale_init=2.0**40, steps=3)
    with pytest.raises(PrecisionError, match="no-step-taken") as stopped:
        trainer.train()
    assert "`loss_scale_init=1.37439e+11`, or more steps" in str(stopped.value)
    assert trainer.precision.not_finite.kind in (GRADIENT, LOSS_GRADIENT)


# ---- Gradients that underflow ----


def test_gradients_that_underflow_are_counted_and_a_larger_scale_is_suggested():
    stock = build(flag="fp16", safe=False)
    stock.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-16)
    assert not warned(stock)
    trainer = build(flag="fp16", loss_scale_init=2.0**-16)
    (message,) = warned(trainer)
    first = "lm_head`" if TRANSFORMERS_4 else r"model\.layers\."
    assert re.match(rf"\d+\.\d% of the gradient of the output of `{first}", message)
    assert "in step 1 with the loss scale 1.52588e-05" in message
    report = trainer.precision.gradients
    logged = [e for e in trainer.state.log_history if "precision/grad_underflow_max" in e]
    assert [entry["precision/grad_underflow_max"] for entry in logged] == [report.underflow]
    assert 0.5 < report.underflow <= 1
    scale = float(re.search(r"fix: loss_scale_init=(\S+)  \[gradients-underflow-fp16\]", message).group(1))
    assert scale >= 1.0
    fixed = build(flag="fp16", loss_scale_init=scale)
    assert not warned(fixed)
    assert fixed.precision[StepMonitor].skipped == 0
    assert fixed.precision.gradients.underflow is None  # too few zeros to compare with float32


def test_the_share_of_underflow_is_that_of_an_independent_count():
    """Of each module's gradient: what is 0 in float16 and not in float32, with hooks of this test alone."""
    trainer = build(flag="fp16", loss_scale_init=2.0**-14, steps=1)
    seen = {}

    def counts(module, args, output, name):
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.requires_grad:
            kind = "full" if name in seen else "half"
            output.register_hook(lambda g: seen.setdefault(name, {}).update({kind: g == 0}))

    for name, module in trainer.model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(partial(counts, name=name))
    warned(trainer)
    measured = {g.module: g.underflow for g in trainer.precision.gradients.gradients}
    assert len(seen) == 7
    for name, zeros in seen.items():
        lost = (zeros["half"] & ~zeros["full"]).sum() / (~zeros["full"]).sum()
        assert measured[name] == pytest.approx(lost.item(), abs=1e-3)
    assert max(measured[name] for name in seen) > 0.1


@pytest.mark.parametrize("block", [1, 100, 2**24])
def test_gradients_are_counted_in_blocks_of_any_size(block, monkeypatch):
    monkeypatch.setattr("safe_trainers.numerics.gradients.BLOCK", block)
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    gradient = torch.randn(7, 3, 5)  # (B, T, H)
    gradient[gradient.abs() < 0.5] = 0
    gradient[2] = 0
    watch = GradientWatch(model)
    with watch.attached():
        model(torch.ones(7, 3, 5)).backward(gradient)
    found = watch.finish(0, 1.0).gradients[0]
    rows = [row for row in gradient.reshape(-1, 5) if row.any()]
    assert found.zeros == int((gradient == 0).sum())
    assert found.scattered_zeros == sum(int((row == 0).sum()) for row in rows)
    assert found.largest == gradient.abs().max()


@pytest.mark.parametrize("lora", [False, True])
def test_a_healthy_fp16_run_is_measured_without_a_second_pass(lora, monkeypatch):
    monkeypatch.setattr(Replay, "again", lambda *_: pytest.fail("a loss was computed again"))
    trainer = build(flag="fp16", family="llava", lora=lora, loss_scale_init=1024.0)
    assert not warned(trainer)
    report = trainer.precision.gradients
    assert report.finite
    assert report.scale == 1024.0
    assert 0 < report.largest < 65504
    assert not report.suspects(names_of_adapters(trainer.model))
    assert json.loads(json.dumps(report.to_dict()))["step"] == 0
    assert "float16 overflows at 65504" in str(report)


# ---- NaN, in any precision ----


def spoil(tensor):
    spoiled = tensor.clone()
    spoiled.view(-1)[0] = math.nan
    return spoiled


def in_weight(trainer):
    class Spoils(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                with torch.no_grad():
                    model.get_parameter("model.layers.0.mlp.up_proj.weight").view(-1)[7] = math.nan

    trainer.add_callback(Spoils())


def in_activation(trainer):
    def hook(module, args, output):
        return spoil(output) if trainer.state.global_step == 1 and torch.is_grad_enabled() else output

    named = trainer.model.named_modules()
    next(module for name, module in named if name.endswith("act_fn")).register_forward_hook(hook)


def in_inputs(trainer):
    """Into the pixels of one batch, after the trainer has prepared them."""
    prepare = trainer._prepare_inputs

    def prepared(inputs):
        made = prepare(inputs)
        return {**made, "pixel_values": spoil(made["pixel_values"])} if trainer.state.global_step == 1 else made

    trainer._prepare_inputs = prepared


class Reverses(torch.autograd.Function):
    """Returns its input, and in the backward pass NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return spoil(gradient)


def in_backward(trainer):
    """The input of a module, in the backward pass only."""
    projection = trainer.model.model.layers[0].self_attn.o_proj
    forward = projection.forward

    def own(x):
        broken = trainer.state.global_step == 1 and torch.is_grad_enabled()
        return forward(Reverses.apply(x) if broken else x)

    projection.forward = own


def in_advantages(trainer):
    """Rewards whose variance overflows in TRL's advantages; a smaller check of ours is switched off."""
    prepare = trainer._prepare_inputs

    def prepared(inputs):
        made = prepare(inputs)
        return {**made, "advantages": spoil(made["advantages"])} if trainer.state.global_step == 1 else made

    trainer._prepare_inputs = prepared


def in_loss(trainer):
    compute = trainer.compute_loss

    def spoiled(*args, **kwargs):
        loss = compute(*args, **kwargs)
        return loss * math.nan if trainer.state.global_step == 1 else loss

    trainer.compute_loss = spoiled


PLACES = {
    "weight": (in_weight, "sft", "text", WEIGHT, "model.layers.0.mlp.up_proj"),
    "activation": (in_activation, "sft", "text", OUTPUT, "model.layers.0.mlp.act_fn"),
    "pixel": (in_inputs, "sft", "llava", INPUT, ""),
    "reward": (in_advantages, "grpo", "text", LOSS_INPUT, ""),
    "backward": (in_backward, "grpo", "text", GRADIENT, "model.layers.0.self_attn.o_proj"),
    "loss": (in_loss, "sft", "text", LOSS, ""),
}


@pytest.mark.parametrize("flag", [None, "bf16", "fp16"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_first_is_named(place, flag, tmp_path):
    put, task, family, kind, module = PLACES[place]
    scale = {"loss_scale_init": 256.0} if flag == "fp16" else {}
    trainer = build(task, flag, family=family, output_dir=str(tmp_path), **scale)
    put(trainer)
    said = [text for text in warned(trainer) if "[step-skipped]" in text]
    cause = trainer.precision.not_finite
    assert (cause.kind, cause.module) == (kind, module)
    (message,) = said
    assert "step 2 is" in message
    assert cause.sentence in message
    assert str(cause).splitlines()[0] == cause.text
    assert cause.what.wrong
    if kind in (WEIGHT, OUTPUT, GRADIENT):
        inputs = [values for values in cause.ranges if not values.name.startswith("gradient")]
        assert inputs
        assert all(values.wrong == 0 and values.low < values.high for values in inputs)
    name = {WEIGHT: "model.layers.0.mlp.up_proj.weight", INPUT: "pixel_values", LOSS_INPUT: "advantages"}.get(kind)
    assert name is None or (cause.what.name == name and f"`{name}`" in message)
    written = json.loads((tmp_path / "precision_report.json").read_text())
    assert any(cause.sentence in json.dumps(verdict, ensure_ascii=False) for verdict in written["verdicts"])
    json.dumps(cause.to_dict())


@pytest.mark.parametrize("place", ["weight", "activation", "backward"])
def test_stock_names_nothing(place):
    put, task, family, *_ = PLACES[place]
    stock = build(task, family=family, safe=False)
    put(stock)
    try:
        said = warned(stock)
    except RuntimeError as error:  # the next rollout samples from NaN
        said = [str(error)]
    assert not any("layers" in text for text in said)
    assert not all(p.isfinite().all() for p in stock.model.parameters())


def test_a_weight_is_named_if_a_rollout_fails_first():
    for safe in (False, True):
        trainer = build("grpo", safe=safe)
        in_weight(trainer)
        with pytest.raises(PrecisionError if safe else RuntimeError) as stopped:
            trainer.train()
        assert ("`model.layers.0.mlp.up_proj`" in str(stopped.value)) == safe
    assert "[weights-not-finite]" in str(stopped.value)


def test_the_second_batch_of_a_step_is_found_and_gradients_of_the_first_are_left_alone():
    trainer = build(gradient_accumulation_steps=2, per_device_train_batch_size=2, flag="bf16")
    calls, held = [0], []

    def hook(module, args, output):
        calls[0] += torch.is_grad_enabled() and trainer.state.global_step == 1
        return spoil(output) if trainer.state.global_step == 1 and calls[0] in (2, 4) else output

    class Holds(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            held.append([p.grad for p in model.parameters()])

    trainer.add_callback(Holds())
    trainer.model.model.norm.register_forward_hook(hook)
    (message,) = warned(trainer)
    assert "`model.norm` is the first module" in message
    assert calls == [4]  # each batch once more, and nothing else
    assert trainer.precision[StepMonitor].skipped == 1


def test_a_fault_that_does_not_return_is_said_to_be_one():
    trainer, seen = build(), [0]

    def once(gradient):
        seen[0] += 1
        return spoil(gradient) if seen[0] == 2 else gradient

    trainer.model.model.norm.weight.register_hook(once)
    (message,) = warned(trainer)
    assert "1 of its losses, computed again, and their gradients are finite" in message
    assert "a kernel that is not deterministic, or the hardware" in message


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()).item()])
def test_a_second_pass_draws_the_same_random_numbers(draw):
    trainer, drawn = build(flag="bf16"), []

    def hook(module, args, output):
        drawn.append((trainer.state.global_step, draw()))
        return spoil(output) if trainer.state.global_step == 1 else output

    trainer.model.model.norm.register_forward_hook(hook)
    (message,) = warned(trainer)
    assert "`model.norm` is the first module" in message
    first, again = (value for step, value in drawn if step == 1)
    assert first == again
    assert len({value for _, value in drawn}) == STEPS


def test_an_optimizer_that_skips_on_the_device_is_explained_before_the_next_step(monkeypatch):
    monkeypatch.setattr("safe_trainers.trainer.base.GradientNorm", partial(GradientNorm, deferred=True))
    trainer = build(optim="adamw_torch_fused")
    batches = []  # the fault is in step 2; when its flag is read, step 3 has been computed with the same weights

    def hook(module, args, output):
        batches.append(args[0].shape)
        return spoil(output) if torch.equal(args[0], marked[0]) else output

    marked = [torch.zeros(1)]

    def mark(module, args):
        if trainer.state.global_step == 1 and torch.is_grad_enabled() and marked[0].numel() == 1:
            marked[0] = args[0].detach().clone()

    act = trainer.model.model.layers[0].mlp.act_fn
    act.register_forward_pre_hook(mark)
    act.register_forward_hook(hook)
    (message,) = warned(trainer)
    assert "the gradient norm of step 2 is not finite; `model.layers.0.mlp.act_fn` is the first module" in message
    assert len(batches) == 2 * (STEPS + 1)  # checkpointing computes each twice


# ---- The run is the same ----


class Noisy(nn.Module):
    """Counts its calls, and keeps a running mean, as BatchNorm does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.nan_to_num().mean())
        return nn.functional.dropout(self.inner(x), 0.1, self.training)


@pytest.mark.parametrize(("task", "flag"), [("sft", None), ("sft", "fp16"), ("grpo", "bf16"), ("dpo", None)])
def test_a_run_with_the_diagnosis_is_the_one_without(task, flag, monkeypatch):
    """Weights, logs, buffers, counters and random numbers, with dropout and a fault in the second step."""
    if task not in cells.SAFE:
        pytest.skip("this TRL has no such trainer")
    runs, explained = {}, []
    for diagnosed in (False, True):
        changes = {"loss_scale_init": 2.0**9} if flag == "fp16" else {}
        trainer = build(task, flag, gradient_accumulation_steps=2, per_device_train_batch_size=2, **changes)
        if not diagnosed:
            monkeypatch.setattr(Replay, "possible", False)
        else:
            monkeypatch.undo()
        layer = trainer.model.model.layers[0]
        layer.mlp = Noisy(layer.mlp)
        in_activation(trainer)
        warned(trainer)
        explained.append(trainer.precision.not_finite is not None)
        log = [{k: v for k, v in entry.items() if not re.search("time|per_second|grad_underflow", k)}
               for entry in trainer.state.log_history]  # fmt: skip
        state = (layer.mlp.calls, layer.mlp.mean.item(), torch.get_rng_state().tolist())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trainer.model.modules()]
        runs[diagnosed] = (cells.fingerprint(trainer.model), repr(log), state, hooks)
    assert explained == [False, True]
    assert runs[False] == runs[True]


CALLS = 1 + TRANSFORMERS_4
"""How often a step calls the hooks of a layer: gradient checkpointing of transformers 4 calls them again."""


@pytest.mark.parametrize("flag", [None, "bf16", "fp16"])
def test_nothing_runs_while_all_is_well(flag):
    scale = {"loss_scale_init": 256.0} if flag == "fp16" else {}
    trainer = build(flag=flag, **scale)
    hooked, calls = [], []

    def called(module, args):
        calls.append(trainer.state.global_step)
        hooks = [
            h for m in trainer.model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        ]
        hooked.append([hook for hook in hooks if getattr(hook, "__module__", "").startswith("safe_trainers")])

    trainer.model.model.layers[0].register_forward_pre_hook(called)
    assert not warned(trainer)
    assert calls == [step for step in range(STEPS) for _ in range(CALLS)]
    assert hooked[CALLS:] == [[]] * (CALLS * (STEPS - 1))


def test_batches_that_are_too_large_are_not_kept(monkeypatch):
    monkeypatch.setattr("safe_trainers.numerics.replay.KEPT_BYTES", 100)
    trainer = build(gradient_accumulation_steps=4, per_device_train_batch_size=1, steps=1)
    kept = []
    monkeypatch.setattr(NotFinite, "before_step", lambda self: kept.append(len(self._replay.calls)))
    trainer.train()
    assert kept == [1]


def test_tensors_in_lists_and_mappings_count_to_the_size_of_a_batch():
    tensor = torch.zeros(4, 5)
    inputs = {"input_ids": tensor, "images": [tensor, {"pixel_values": tensor}], "num_items": 3}
    assert LossCall(None, inputs, {}).nbytes == 3 * tensor.nbytes


def test_a_diagnosis_that_fails_leaves_the_run_as_it_is(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("the diagnosis is broken")

    monkeypatch.setattr(Trace, "cause", broken)
    trainer = build("sft", "bf16")
    in_activation(trainer)
    (message,) = warned(trainer)
    assert "fix: look for inf or NaN in the batch of this step  [step-skipped]" in message
    assert trainer.precision[StepMonitor].taken == STEPS - 1


# ---- The parts ----


def test_ranges_leave_out_what_is_not_finite():
    values = values_of("x", torch.tensor([1.0, -3.0, math.nan, math.inf]))
    assert (values.low, values.high, values.largest, values.wrong) == (-3.0, 1.0, 3.0, 2)
    assert values.finite_share == 0.5
    assert str(values) == "x: float32 [4], min -3, max 1, absmax 3, 2 of 4 not finite"
    assert str(values_of("y", torch.full((2,), math.nan))) == "y: float32 [2], no finite element, 2 of 2 not finite"
    mask = torch.tensor([0.0, -math.inf])
    assert values_of("mask", mask).wrong == 0
    assert values_of("mask", mask, masks=False).wrong == 1
    assert values_of("mask", torch.tensor([1.0, -math.inf])).wrong == 1
    assert values.to_dict()["shape"] == [4]


class Shares(nn.Module):
    """Two layers with the same input, one of which makes a gradient that is not finite."""

    def __init__(self):
        super().__init__()
        self.first, self.good, self.bad = nn.Linear(4, 4), nn.Linear(4, 4), Bad()

    def forward(self, x):
        x = self.first(x)
        return self.good(x) + self.bad(x)


class Bad(nn.Module):
    def forward(self, x):
        return Reverses.apply(x)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_of_modules_with_one_input_the_one_that_spoils_its_gradient_is_named(checkpointing):
    from torch.utils.checkpoint import checkpoint

    model, trace = Shares(), Trace(Shares())
    trace = Trace(model)
    x = torch.randn(2, 4, requires_grad=True)
    with trace.attached():
        output = model(x) if checkpointing is None else checkpoint(model, x, use_reentrant=checkpointing)
        loss = output.square().mean()
        loss.backward()
    cause = trace.cause(loss.detach(), {})
    assert (cause.kind, cause.module, cause.type) == (GRADIENT, "bad", "Bad")
    assert [values.name for values in cause.ranges] == ["gradient of the output", "argument 0"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x) / x.new_zeros(()))


def test_what_the_code_between_two_modules_computes_is_placed_there():
    model = nn.Sequential(Divides())
    trace = Trace(model)
    with trace.attached():
        loss = model(torch.ones(1, 4)).sum()
    cause = trace.cause(loss.detach(), {})
    assert (cause.kind, cause.module, cause.outer) == (INPUT, "0.second", "`0`")
    assert "the code of `0` computes it between two modules" in str(cause)


def test_gradients_of_all_calls_of_a_module_are_added_up():
    layer = nn.Linear(2, 2, bias=False, dtype=torch.float16)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    model = nn.Sequential(layer)
    watch = GradientWatch(model)
    with watch.attached():
        loss = (
            model(torch.ones(1, 2, dtype=torch.float16)) * torch.tensor([3.0, 0.0], dtype=torch.float16)
        ).sum() + model(torch.ones(1, 2, dtype=torch.float16)).sum() * 0
    loss.backward()
    report = watch.finish(7, 2.0)
    (found,) = [g for g in report.gradients if g.module == "0"]
    assert (found.largest, found.elements, found.zeros, found.scattered_zeros) == (3.0, 4, 3, 1)
    assert report.suspects(frozenset())
    other = copy.deepcopy(report)
    assert report.compared(other).underflow == 0.0
    assert watch.finish(8, 1.0).gradients == ()


# ---- Several processes ----

TOGETHER = """
import sys, warnings
import torch
import test_not_finite as here

trainer = here.build("sft", "bf16", per_device_train_batch_size=2)
rank = trainer.args.process_index
if rank == 1:  # one process alone sees NaN; DDP sends its gradients to all
    here.in_activation(trainer)
said = here.warned(trainer)
cause = trainer.precision.not_finite
fingerprint = here.cells.fingerprint(trainer.model)
open(f"{sys.argv[1]}/{rank}.txt", "w").write("\\n".join([cause.module, fingerprint, str(len(said)), *said]))
"""


@pytest.mark.slow
def test_two_processes_name_what_one_of_them_sees(tmp_path):
    run_in_two_processes(TOGETHER, tmp_path, beside=__file__)
    first, second = ((Path(tmp_path) / f"{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert first[0] == second[0] == "model.layers.0.mlp.act_fn"
    assert first[1] == second[1]
    assert any("`model.layers.0.mlp.act_fn` is the first module" in line for line in first)


ALONE = """
import os, sys
import test_not_finite as here
from safe_trainers.numerics.replay import LossCall, Replay

rank, again, passes = int(os.environ["RANK"]), Replay.again, []
Replay.again = lambda *args: passes.append(1) or again(*args)
# Of process 1, all rewards of a group are equal, so that the gradients of its first loss are 0.
here.cells.token_reward = lambda completion_ids, **_: [float(sum(ids) % 7) * (rank == 0) for ids in completion_ids]
trainer = here.build("grpo", "fp16", loss_scale_init=1024.0, per_device_train_batch_size=4, **CHANGES)
trainer.train()
open(f"{sys.argv[1]}/{rank}.txt", "w").write(f"{len(passes)} {here.cells.fingerprint(trainer.model)}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"top_entropy_quantile": 0.5}], ids=str)
def test_one_process_alone_computes_a_loss_again(changes, tmp_path):
    """With `top_entropy_quantile`, TRL's loss pads and gathers entropies of all ranks."""
    run_in_two_processes(f"CHANGES = {changes!r}\n{ALONE}", tmp_path, beside=__file__)
    first, second = ((tmp_path / f"{rank}.txt").read_text().split() for rank in (0, 1))
    assert int(first[0]) == 0 < int(second[0])
    assert first[1] == second[1]


def test_an_optimizer_that_updates_weights_in_the_backward_pass_gets_no_second_pass():
    trainer = build("sft", max_steps=2)
    passes = []
    parameter = next(trainer.model.parameters())

    class Spoils(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):  # as LOMO's optimizer, which is made in `train`
            parameter.register_post_accumulate_grad_hook(lambda p: passes.append(p.grad.fill_(math.nan)))

    trainer.add_callback(Spoils())
    with pytest.raises(PrecisionError, match=r"\[no-step-taken\]"):
        warned(trainer)
    assert len(passes) == 2

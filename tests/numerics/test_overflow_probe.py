"""The overflow probe names the module that overflows float16, and the line that it suggests makes the run finite."""

import ast
import contextlib
import functools
import json
import math
import re
import warnings

import accelerate
import cells
import pytest
import torch
from cells import Cell
from overflowing import overflowing
from peft import LoraConfig, get_peft_model
from policing import reset_accelerate
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from two_processes import run_in_two_processes

from safe_trainers import PrecisionError, PrecisionWarning
from safe_trainers.numerics.activations import OverflowReport, Watch
from safe_trainers.numerics.overflow_fix import (
    called_again,
    candidate,
    computing_in_float32,
    explain,
    find_fp32_modules,
    shortest,
    weight_not_finite,
)
from safe_trainers.numerics.overflow_probe import OverflowProbe
from safe_trainers.numerics.step_monitor import StepMonitor
from safe_trainers.numerics.trace import OUTPUT, Trace
from safe_trainers.testing import fp16_on_cpu
from upstream import CALLS_THE_HEAD


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

TORCHS_MESSAGE = "probability tensor contains either `inf`, `nan`"


@contextlib.contextmanager
def raises(finding):
    """A `PrecisionError`; accelerate's autocast leaks where a run is stopped."""
    with pytest.raises(PrecisionError, match=rf"\[{finding}\]") as caught:
        yield caught
    cells.reset_autocast()


def text(layers=3, dtype=torch.float32, **scaled):
    """A small language model, some of whose weights are multiplied: `{"layers.1.mlp.down_proj": 1e6}`."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(cells.folder("text"))
    config.num_hidden_layers, config.layer_types = layers, None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    scale(model, **scaled)
    return model.to(dtype)


@torch.no_grad()
def scale(model, **scaled):
    for name, factor in scaled.items():
        (weight,) = [p for n, p in model.named_parameters() if n.endswith(f"{name}.weight")]
        weight.mul_(factor)


def build(task, model, modules=None, *, safe=True, family="text", flag="fp16", lora=False, callbacks=(), **changes):
    reset_accelerate()
    cell = Cell(family, task, "fp32", flag, lora=lora)
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    if safe:
        changes["fp32_modules"] = modules
    made = cells.arguments(cell, config, model_init_kwargs=None, **changes) | {"model": model}
    return fp16_on_cpu((cells.SAFE if safe else cells.STOCK)[task])(**made, callbacks=list(callbacks))


def norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def fc2(model):
    """The layer of a Gemma 3 tower whose output overflows; releases of transformers differ in what is around it."""
    return next(name for name, _ in model.named_modules() if name.endswith("layers.0.mlp.fc2"))


def suggested(error):
    """The modules of the line that a message says."""
    return ast.literal_eval(re.search(r"`fp32_modules=(\[.*?\])`", str(error.value)).group(1))


# ---- what overflows by construction ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("task", "phase"), [("sft", "loss"), ("grpo", "rollout")])
def test_a_vision_tower_that_overflows_is_named_and_the_line_mends_it(task, phase, dtype):
    stock = build(task, overflowing(dtype), safe=False, family="gemma3", lora=True)
    if (task, dtype) == ("grpo", torch.float16):  # float32 weights generate in float32 there
        with pytest.raises(RuntimeError, match=TORCHS_MESSAGE):
            stock.train()
        cells.reset_autocast()
    else:
        stock.train()
        assert len(norms(stock)) == 2
        assert not any(map(math.isfinite, norms(stock)))  # nothing but skipped steps, and nothing is said
    model = overflowing(dtype)
    trainer = build(task, model, family="gemma3", lora=True)
    with raises("activations-overflow-fp16") as error:
        trainer.train()
    assert str(error.value) == (
        "1 problem with the precision of this run:\n"
        f"- `{fc2(model)}` returns inf for finite inputs, in the {phase} after step 0\n"
        "  why: the largest float16 is 65,504; this overflows to inf and the loss becomes NaN. The overflow happens "
        "in the forward pass, so a smaller loss scale does not prevent it.\n"
        "  fix: `fp32_modules=['vision_tower']` or `bf16=True` on a device that computes it  "
        "[activations-overflow-fp16]"
    )
    trainer = build(task, overflowing(dtype), suggested(error), family="gemma3", lora=True)
    trainer.train()
    assert len(norms(trainer)) == 2
    assert all(map(math.isfinite, norms(trainer)))
    assert trainer.precision.overflow.result_finite


BY_CONSTRUCTION = {
    "a layer": ({"layers.1.mlp.up_proj": 100, "layers.1.mlp.down_proj": 1e5}, ["layers.1.mlp.down_proj"]),
    "two layers": (
        {
            "layers.0.self_attn.v_proj": 100,
            "layers.0.self_attn.o_proj": 1e5,
            "layers.2.mlp.up_proj": 100,
            "layers.2.mlp.down_proj": 1e5,
        },
        ["layers.0.self_attn.o_proj", "layers.2.mlp.down_proj"],
    ),
    "a product in a block's own code": (
        {"layers.1.mlp.gate_proj": 3e3, "layers.1.mlp.up_proj": 3e3, "layers.1.mlp.down_proj": 1e-4},
        ["layers.1.mlp"],
    ),
    "scores of attention": (
        {"layers.2.self_attn.q_proj": 1e4, "layers.2.self_attn.k_proj": 1e4},
        ["layers.2.self_attn"],
    ),
    "the head": ({"model.norm": 100, "lm_head": 1e5}, ["lm_head"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("what", BY_CONSTRUCTION)
def test_what_overflows_in_a_text_model_is_mended_by_the_smallest_modules(what, lora, dtype):
    scaled, modules = BY_CONSTRUCTION[what]
    changes = CALLS_THE_HEAD if "lm_head" in modules else {}
    with raises("activations-overflow-fp16") as error:
        build("sft", text(dtype=dtype, **scaled), lora=lora, **changes).train()
    assert suggested(error) == modules
    # Gradients of such weights are large: that is what a loss scale is for.
    changes = {"loss_scale_init": 2.0**-16, **changes}
    trainer = build("sft", text(dtype=dtype, **scaled), modules, lora=lora, **changes)
    trainer.train()
    assert trainer.precision.overflow.result_finite
    assert len(norms(trainer)) == 2
    assert all(map(math.isfinite, norms(trainer)))


def test_a_suggestion_keeps_the_modules_that_are_there():
    scaled = {"layers.0.mlp.up_proj": 100, "layers.0.mlp.down_proj": 1e5,
              "layers.2.mlp.up_proj": 100, "layers.2.mlp.down_proj": 1e5}  # fmt: skip
    with raises("activations-overflow-fp16") as error:
        build("sft", text(**scaled), ["layers.0.mlp"]).train()
    assert suggested(error) == ["layers.0.mlp", "layers.2.mlp.down_proj"]
    trainer = build("sft", text(**scaled), suggested(error))
    trainer.train()
    assert trainer.precision.overflow.result_finite


def test_packed_layers_are_tried_in_float32_left_as_they_were_and_mended_by_the_line(tmp_path):
    pytest.importorskip("bitsandbytes")
    text(**{"layers.1.mlp.up_proj": 100, "layers.1.mlp.down_proj": 1e5}).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(cells.folder("text")).save_pretrained(tmp_path)
    for settings in ({"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float16}, {"load_in_8bit": True}):
        config = BitsAndBytesConfig(**settings)
        load = functools.partial(
            AutoModelForCausalLM.from_pretrained, tmp_path, dtype=torch.float16, quantization_config=config
        )
        model = load()
        trainer = build("sft", model, lora=True)
        packed = [m for m in model.modules() if type(m).__name__ in ("Linear4bit", "Linear8bitLt")]
        before = [(m.weight.data_ptr(), m.weight.dtype, getattr(m, "compute_dtype", None)) for m in packed]
        with raises("activations-overflow-fp16") as error:
            trainer.train()
        assert before == [(m.weight.data_ptr(), m.weight.dtype, getattr(m, "compute_dtype", None)) for m in packed]
        if "load_in_4bit" in settings:
            assert suggested(error) == ["layers.1.mlp.down_proj"]
            trainer = build("sft", load(), suggested(error), lora=True, loss_scale_init=2.0**-4)
            trainer.train()
            assert trainer.precision.overflow.result_finite
            assert len(norms(trainer)) == 2
            assert all(0 < norm < math.inf for norm in norms(trainer))
            assert trainer.precision[StepMonitor].skipped == 0
        else:
            assert "llm_int8_skip_modules=['down_proj', 'lm_head']" in str(error.value)


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_weights_that_are_not_finite_are_another_matter(task):
    model = text()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = math.inf
    with raises("weights-not-finite") as error:
        build(task, model).train()
    assert "its weight contains inf or NaN" in str(error.value)


def test_weights_that_are_not_finite_behind_an_overflow_are_named_in_place_of_a_line_that_does_not_help():
    model = text(**BY_CONSTRUCTION["a layer"][0])
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 3] = math.inf
    with raises("weights-not-finite") as error:
        build("sft", model).train()
    assert "- `model.layers.2.mlp.up_proj`, in the loss after step 0" in str(error.value)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
def test_packed_bytes_are_not_taken_for_numbers_that_are_not_finite(storage, tmp_path):
    """FSDP needs packed weights in the dtype of the others: read as numbers, some of them are NaN."""
    pytest.importorskip("bitsandbytes")
    text(**BY_CONSTRUCTION["a layer"][0]).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(cells.folder("text")).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16, bnb_4bit_quant_storage=storage
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16, quantization_config=config)
    packed = model.model.layers[1].mlp.down_proj.weight
    assert packed.dtype == storage
    assert not packed.isfinite().all()
    with raises("activations-overflow-fp16") as error:
        build("sft", model, lora=True).train()
    assert suggested(error) == ["layers.1.mlp.down_proj"]


def test_weights_that_are_offloaded_are_not_read():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerate.cpu_offload(model[0], execution_device=torch.device("cpu"))
    assert model[0].weight.is_meta
    assert weight_not_finite(model) is None
    model[0].register_forward_hook(lambda module, args, output: output * math.inf)
    with Trace(model).attached() as trace:
        loss = model(torch.ones(1, 2)).sum()
    cause = trace.cause(loss, {})
    assert (cause.kind, cause.module) == (OUTPUT, "0")
    with torch.no_grad():
        model[1].bias[0] = math.nan
    assert weight_not_finite(model) == "1.bias"


# ---- what the probe leaves alone ----


def without_probe(trainer):
    trainer.precision[OverflowProbe]._computes_in_float16 = lambda: False
    return trainer


@pytest.mark.parametrize(("task", "every"), [("sft", None), ("grpo", None), ("grpo", 1), ("reward", 1)])
def test_a_run_with_the_probe_is_the_one_without(task, every):
    """Weights, losses and every random number: LoRA's dropout draws in each forward pass."""
    runs = {}
    for probed in (False, True):
        torch.manual_seed(0)
        reset_accelerate()
        settings = {"overflow_probe_steps": every} if probed else {}
        made = cells.arguments(Cell("text", task, "fp32", "fp16"), cells.SAFE_CONFIG[task], steps=3, **settings)
        made["peft_config"] = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"],
                                         task_type="SEQ_CLS" if task == "reward" else "CAUSAL_LM")  # fmt: skip
        trainer = fp16_on_cpu(cells.SAFE[task])(**made)
        if not probed:
            without_probe(trainer)
        trainer.train()
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trainer.model.modules()]
        assert (trainer.precision.overflow is not None) == probed
        log = [(e["loss"], e["grad_norm"], e.get("reward")) for e in trainer.state.log_history if "loss" in e]
        runs[probed] = (cells.fingerprint(trainer.model), log, torch.get_rng_state().tolist(), hooks)
    assert runs[True] == runs[False]
    assert runs[True][1][0][1] > 0


def test_trying_leaves_nothing_behind():
    model = get_peft_model(text(dtype=torch.float16, **BY_CONSTRUCTION["two layers"][0]),
                           LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"]))  # fmt: skip
    inputs = {"input_ids": torch.arange(12)[None]}
    watch = Watch(model)
    model.train()
    model.base_model.model.model.norm.eval()
    with watch.attached(), torch.autocast("cpu", torch.float16):
        output = model(**inputs)
    before = cells.fingerprint(model)
    pointers = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    own = [sorted(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    report = watch.finish("loss", 0, output.logits)
    problem = explain(report, model, ["a.b"], called_again(watch.calls))
    assert "`fp32_modules=['a.b', 'layers.0.self_attn.o_proj', 'layers.2.mlp.down_proj']`" in str(problem.fix)
    assert cells.fingerprint(model) == before
    assert pointers == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert modes == [module.training for module in model.modules()]
    assert own == [sorted(vars(module)) for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    with computing_in_float32(model, ["model.layers.0"]):
        inside = {p.dtype for p in model.base_model.model.model.layers[0].parameters()}
    assert inside == {torch.float32}
    assert pointers == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}


@pytest.mark.parametrize("flag", ["bf16", None])
def test_only_float16_is_looked_at(flag):
    trainer = build("sft", text(**BY_CONSTRUCTION["a layer"][0]), flag=flag)
    trainer.train()
    assert trainer.precision.overflow is None
    assert all(map(math.isfinite, norms(trainer)))


# ---- later in a run ----


class Grows(TrainerCallback):
    """Multiplies weights after a step, so that the model overflows from then on."""

    def __init__(self, step):
        self.step, self.reports = step, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            scale(model, **BY_CONSTRUCTION["a layer"][0])


@pytest.mark.parametrize(("every", "stopped_at"), [(2, 4), (3, 3), (4, 4)])
def test_it_looks_again_every_so_many_steps(every, stopped_at):
    trainer = build("sft", text(), overflow_probe_steps=every, steps=8, callbacks=[Grows(3)])
    with raises("activations-overflow-fp16") as error:
        trainer.train()
    assert f"in the loss after step {stopped_at}" in str(error.value)
    assert suggested(error) == ["layers.1.mlp.down_proj"]


def test_every_rollout_is_stopped_before_it_samples_from_what_is_no_number():
    with raises("activations-overflow-fp16") as error:
        build("grpo", text(), steps=8, callbacks=[Grows(3)]).train()
    assert "in the rollout after step 3" in str(error.value)
    assert suggested(error) == ["layers.1.mlp.down_proj"]


def test_which_steps_are_looked_at(monkeypatch):
    seen = []
    judge = OverflowProbe._judge
    monkeypatch.setattr(OverflowProbe, "_judge", lambda self, report, *rest: (
        seen.append((report.phase, report.step)), judge(self, report, *rest))[1])  # fmt: skip
    window = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 1}
    build("grpo", text(), overflow_probe_steps=3, steps=8, **window).train()
    assert seen == [("rollout", 0), ("loss", 0), ("loss", 3), ("rollout", 4), ("loss", 6)]
    seen.clear()
    trainer = build("grpo", text(), steps=4, **window)
    trainer.train()
    assert seen == [("rollout", 0), ("loss", 0)]
    trainer.train()  # another run of the same trainer
    assert seen == [("rollout", 0), ("loss", 0)] * 2


def test_an_overflow_in_a_later_token_is_told_in_our_words():
    """The first forward pass of a rollout is finite, the one of its second token is not."""
    model = text()
    down = model.model.layers[1].mlp.down_proj
    down.register_forward_hook(lambda module, args, output: output * math.inf if output.shape[1] == 1 else output)
    with raises("rollout-not-finite") as error:
        build("grpo", model, steps=4).train()
    assert str(error.value) == (
        "1 problem with the precision of this run:\n"
        "- the rollout after step 0\n"
        "  why: the logits that tokens are sampled from contain inf or NaN: an activation of the model overflows "
        "float16.\n"
        "  fix: `bf16=True` on a device with bfloat16 arithmetic, or list in `fp32_modules=[...]` the modules that "
        "`print(trainer.precision.overflow)` shows near 65,504  [rollout-not-finite]"
    )
    assert TORCHS_MESSAGE in str(error.value.__cause__)


def test_the_last_step_before_too_many_skips_says_what_overflows():
    """An overflow that came after the first batch: steps are skipped, and the run ends with the module's name."""
    trainer = build("sft", text(), steps=9, max_consecutive_skips=3, callbacks=[Grows(2)])
    with raises("activations-overflow-fp16") as error:
        trainer.train()
    assert trainer.precision[StepMonitor].skipped == 2
    assert suggested(error) == ["layers.1.mlp.down_proj"]


# ---- warnings ----


def warned(trainer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        trainer.train()
    return [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]


def test_what_is_near_the_limit_is_warned_of_once():
    scaled = {"layers.1.mlp.up_proj": 100, "layers.1.mlp.down_proj": 1}
    model = text(**scaled)
    watch = Watch(model)
    with watch.attached(), torch.autocast("cpu", torch.float16), torch.no_grad():
        output = model(torch.arange(16)[None])
    largest = {a.module: a.largest for a in watch.finish("loss", 0, output.logits).activations}
    factor = 2e4 / largest["model.layers.1.mlp.down_proj"]
    trainer = build("sft", text(**scaled | {"layers.1.mlp.down_proj": factor}), steps=3, overflow_probe_steps=1,
                    learning_rate=1e-9)  # fmt: skip
    assert not warned(trainer)
    trainer = build("sft", text(**scaled | {"layers.1.mlp.down_proj": 2.2 * factor}), steps=3, learning_rate=1e-9)
    (message,) = warned(trainer)
    assert "`model.layers.1.mlp.down_proj` returns " in message
    assert "fix: fp32_modules=['layers.1.mlp.down_proj']  [activations-near-overflow]" in message
    trainer = build("sft", text(**scaled | {"layers.1.mlp.down_proj": 2.2 * factor}), suggested_in(message),
                    learning_rate=1e-9)  # fmt: skip
    assert not warned(trainer)


def suggested_in(message):
    return ast.literal_eval(re.search(r"fp32_modules=(\[.*?\])", message).group(1))


def test_an_overflow_that_is_clamped_is_warned_of_and_the_run_goes_on():
    model = text(**BY_CONSTRUCTION["a layer"][0])
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output.detach().nan_to_num(0, 1, -1))
    trainer = build("sft", model)
    (message, *_) = warned(trainer)  # a layer in front has an underflow: its gradients are as small as its outputs
    assert "`model.layers.1.mlp.down_proj` returns inf, in the loss after step 0" in message
    assert "fix: fp32_modules=['layers.1.mlp.down_proj']  [overflow-without-effect]" in message


# ---- the parts ----


class Masks(nn.Module):
    """Gives a mask, whose elements are 0 or minus infinity, and passes one on."""

    def __init__(self):
        super().__init__()
        self.mask, self.next = Mask(), Passes()

    def forward(self, x):
        return self.next(x, self.mask(x))


class Mask(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x).masked_fill(x > 0, -math.inf)


class Passes(nn.Module):
    def forward(self, x, mask):
        return (x + mask).softmax(-1)


def test_masks_are_no_overflow():
    watch = Watch(Masks())
    with watch.attached():
        output = watch.model(torch.tensor([[1.0, -1.0, 2.0]]))
    report = watch.finish("loss", 0, output)
    assert report.first is None
    assert [a.module for a in report.activations] == ["next", ""]


def seen(model, *inputs, dtype=torch.float16):
    watch = Watch(model)
    with watch.attached(), torch.no_grad(), torch.autocast("cpu", dtype):
        outputs = [model(x) for x in inputs]
    return watch.finish("loss", 7, torch.cat([output.reshape(-1) for output in outputs]))


def test_a_report_says_the_largest_of_all_calls_and_the_first_overflow():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for layer, factor in ((model[0], 100.0), (model[2], 400.0)):
            layer.weight.copy_(factor * torch.eye(2))
    report = seen(model, torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 1.0]]))
    assert [(a.module, a.largest) for a in report.activations] == [
        ("0", 300.0),
        ("1", 300.0),
        ("2", math.inf),
        ("", math.inf),
    ]
    assert not report.result_finite
    assert report.first.module == "2"
    assert report.to_dict()["activations"][2] == {
        "module": "2", "dtypes": ["float16"], "largest": "inf", "entered_finite": True,
    }  # fmt: skip
    assert json.loads(json.dumps(report.to_dict()))["step"] == 7
    assert re.search(r"^2 +inf  float16$", str(report), re.MULTILINE)
    report = seen(model, torch.tensor([[1.0, 1.0]]))
    assert report.first is None
    assert [a.module for a in report.near] == ["2", ""]
    assert seen(model, torch.tensor([[1.0, -3.0]]), dtype=torch.bfloat16).near == ()


def test_names_are_as_short_as_they_can_be():
    model = text()
    assert shortest(model, ["model.layers.1"]) == ["layers.1"]
    assert shortest(model, ["lm_head", "model.layers.0.mlp.act_fn"]) == ["lm_head", "layers.0.mlp.act_fn"]
    assert shortest(model, ["model.norm"]) == ["norm"]


def test_candidates_are_the_smallest_modules_with_weights_and_towers_as_a_whole():
    model = text()
    assert candidate(model, "model.layers.1.mlp.act_fn", []) == "model.layers.1.mlp"
    assert candidate(model, "model.layers.1.mlp.up_proj", ["model.layers.1.mlp.up_proj"]) == "model.layers.1.mlp"
    assert candidate(model, "model.layers.1.mlp", ["model.layers.1"]) is None  # the text model is left
    assert candidate(model, "model", []) is None
    assert candidate(model, "", []) == "lm_head"
    assert candidate(model, "", ["lm_head"]) is None
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    inside = "model.layers.1.self_attn.q_proj.lora_B.default"
    assert candidate(adapted, inside, []) == "model.layers.1.self_attn.q_proj"
    assert candidate(adapted, "lm_head.modules_to_save.default", []) == "lm_head"
    vision = overflowing()
    assert candidate(vision, fc2(vision), []) == "model.vision_tower"
    assert candidate(vision, fc2(vision), ["model.vision_tower"]) is None
    assert candidate(vision, "model.multi_modal_projector", []) == "model.multi_modal_projector"


def test_what_cannot_be_tried_is_said_to_be_a_beginning(caplog):
    model = text(**BY_CONSTRUCTION["two layers"][0])
    watch = Watch(model)
    with watch.attached(), torch.autocast("cpu", torch.float16), torch.no_grad():
        output = model(torch.arange(12)[None])
    report = watch.finish("loss", 0, output.logits)
    assert find_fp32_modules(report, model, None) == (["model.layers.0.self_attn.o_proj"], None)

    def fails(watch):
        raise torch.OutOfMemoryError("no memory for this")

    problem = explain(report, model, [], fails)
    assert str(problem.fix) == (
        "`fp32_modules=['layers.0.self_attn.o_proj']`, and the modules that the next run names, or "
        "`bf16=True` on a device that computes it"
    )
    # Where float32 does not help either, no module is named.
    watch.calls[0].kwargs["attention_mask"] = torch.full((1, 1, 12, 12), math.nan)
    problem = explain(report, model, [], called_again(watch.calls))
    assert str(problem.fix) == "`bf16=True` on a device that computes it"
    with pytest.raises(ValueError, match="no overflow"):
        explain(OverflowReport("loss", 0, True, ()), model, [], None)


# ---- several processes ----

TOGETHER = """
import sys
import test_overflow_probe as here
from safe_trainers import PrecisionError

texts = []
for task, phase in (("sft", "loss"), ("grpo", "rollout")):
    trainer = here.build(task, here.text(), per_device_train_batch_size=4)
    rank = trainer.args.process_index
    layers = trainer.model.model.layers
    for module in (layers[0].self_attn.o_proj, layers[2].mlp.down_proj):
        if rank == 1:  # one process alone sees an overflow; weights are sent to all by DDP
            module.register_forward_hook(lambda module, args, output: output * 1e8)
    try:
        trainer.train()
    except PrecisionError as error:
        texts.append(str(error))
    here.cells.reset_autocast()
open(f"{sys.argv[1]}/{rank}.txt", "w").write("\\n----\\n".join(texts))
"""


@pytest.mark.slow
def test_two_processes_stop_together(tmp_path):
    run_in_two_processes(TOGETHER, tmp_path, beside=__file__)
    first, second = ((tmp_path / f"{rank}.txt").read_text().split("\n----\n") for rank in (0, 1))
    assert first == second
    assert len(first) == 2
    for message, phase in zip(first, ("loss", "rollout"), strict=True):
        assert f"in the {phase} after step 0" in message
        assert "`fp32_modules=['layers.0.self_attn.o_proj', 'layers.2.mlp.down_proj']`" in message


TURNS = """
import sys
import test_overflow_probe as here

trainer = here.build("grpo", here.text(), per_device_train_batch_size=4, max_steps=2)
rank = trainer.args.process_index
generate = trainer._generate_single_turn


def with_later_turns(prompt_ids, *args):
    made = generate(prompt_ids, *args)
    for _ in range(2 * rank):  # one process alone calls tools
        generate(prompt_ids[:1], *args)
    return made


trainer._generate_single_turn = with_later_turns
trainer.train()
open(f"{sys.argv[1]}/{rank}.txt", "w").write(str(trainer.precision.overflow.phase))
"""


@pytest.mark.slow
def test_processes_may_generate_different_numbers_of_turns(tmp_path):
    run_in_two_processes(TURNS, tmp_path, beside=__file__)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["loss", "loss"]

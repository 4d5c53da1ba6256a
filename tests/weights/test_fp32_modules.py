"""Modules that compute in float32 under a half policy."""

import copy

import cells
import pytest
import torch
from accelerate import dispatch_model
from cells import Cell
from overflowing import overflowing
from peft import LoraConfig
from policing import reset_accelerate
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import PrecisionError
from safe_trainers.core.patches import replaced_by
from safe_trainers.testing import fp16_on_cpu
from safe_trainers.weights import fp32_modules
from safe_trainers.weights.cast import apply_casts
from upstream import CALLS_THE_HEAD, CHUNKS_THE_HEAD


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")


def text(dtype=torch.bfloat16, **kwargs):
    return AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype, **kwargs)


def found(*patterns, model=None):
    return list(fp32_modules.find_modules(model or text(), list(patterns)))


def test_patterns_are_names_ends_of_names_and_wildcards():
    assert found("lm_head") == ["lm_head"]
    assert found("model.norm") == ["model.norm"]
    assert found("layers.0.mlp", "norm") == ["model.layers.0.mlp", "model.norm"]
    assert found("*.q_proj") == ["model.layers.0.self_attn.q_proj"]
    assert found("layers") == ["model.layers.0"]  # a list computes nothing; what is in it does
    assert found("self_attn", "q_proj") == ["model.layers.0.self_attn"]  # the outermost
    assert found() == []


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(PrecisionError) as error:
        found("lm_heads", "vision_tower")
    assert str(error.value) == (
        "2 problems with the precision of this run:\n"
        "- fp32_modules=['lm_heads', 'vision_tower']: 'lm_heads'\n"
        "  why: no module of LlamaForCausalLM has a name that matches; did you mean 'lm_head'?.\n"
        "  fix: fp32_modules=['lm_head']  [no-such-module]\n"
        "- fp32_modules=['lm_heads', 'vision_tower']: 'vision_tower'\n"
        "  why: no module of LlamaForCausalLM has a name that matches.\n"
        "  fix: take a name from `model.named_modules()`  [no-such-module]"
    )


def build(family, task, modules, flag="fp16", model=None, lora=False, **changes):
    reset_accelerate()
    cell = Cell(family, task, "fp32", flag, lora=lora)
    made = cells.arguments(cell, cells.SAFE_CONFIG[task], model_init_kwargs=None, fp32_modules=modules, **changes)
    return fp16_on_cpu(cells.SAFE[task])(**{**made, **({} if model is None else {"model": model})})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_vision_tower_that_overflows_float16_trains(task, dtype):
    """With float32 weights autocast would compute it in half; with half ones the tower is brought to float32."""

    def norms():
        return torch.tensor([e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e])

    trainer = build("gemma3", task, None, model=overflowing(dtype), lora=True)
    with pytest.raises(PrecisionError, match="activations-overflow-fp16"):
        trainer.train()
    cells.reset_autocast()
    trainer = build("gemma3", task, ["vision_tower"], model=overflowing(dtype), lora=True)
    trainer.train()
    assert torch.isfinite(norms()).all()
    tower = next(t for t in trainer.precision.model.towers if t.name == "vision_tower")
    assert tower.dtype == "float32"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("flag", ["bf16", None])
def test_both_boundaries_are_cast(flag, lora):
    """A module in the middle of a half model, with autocast and without, trained and frozen."""
    trainer = build("text", "sft", ["layers.0.mlp"], flag=flag, model=text(), lora=lora)
    seen = {}
    mlp = next(m for n, m in trainer.model.named_modules() if n.endswith("layers.0.mlp"))
    mlp.down_proj.register_forward_hook(lambda m, args, out: seen.update(inside=(args[0].dtype, out.dtype)))
    mlp.register_forward_hook(lambda m, args, out: seen.update(entering=args[0].dtype, leaving=out.dtype))
    trainer.train()
    assert seen["inside"] == (torch.float32, torch.float32)
    assert seen["entering"] == torch.bfloat16
    assert seen["leaving"] == (torch.float32 if flag else torch.bfloat16)
    weights = {n: p.dtype for n, p in trainer.model.named_parameters() if ".mlp." in n}
    assert set(weights.values()) == {torch.float32}
    assert len([e for e in trainer.state.log_history if "loss" in e]) == 2


def test_a_head_keeps_what_it_computed():
    model = text()
    inputs = {"input_ids": torch.arange(6)[None]}
    rounded = model(**inputs).logits
    modules = fp32_modules.find_modules(model, ["lm_head"])
    decisions = fp32_modules.decide(model, modules)
    fp32_modules.guard(model, modules)
    apply_casts(model, decisions)
    logits = model(**inputs).logits
    assert (rounded.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(logits.bfloat16(), rounded, rtol=0.02, atol=0.02)


def test_a_copy_of_the_model_computes_alike_and_guarding_twice_changes_nothing():
    model = text()
    modules = fp32_modules.find_modules(model, ["mlp"])
    decisions = fp32_modules.decide(model, modules)
    fp32_modules.guard(model, modules)
    fp32_modules.guard(model, modules)
    apply_casts(model, decisions)
    assert {d.source for d in fp32_modules.decide(model, modules)} == {"float32"}
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].mlp.down_proj.weight.zero_()
    inputs = {"input_ids": torch.arange(6)[None]}
    assert not torch.equal(copied(**inputs).logits, model(**inputs).logits)
    assert copied.model.layers[0].mlp.forward.__self__ is copied.model.layers[0].mlp


def test_adapters_inside_are_float32_too():
    trainer = build("text", "sft", ["q_proj"], flag="bf16", model=text(), lora=True, adapter_dtype="bfloat16")
    dtypes = {n.split(".self_attn.")[1]: p.dtype for n, p in trainer.model.named_parameters() if "self_attn" in n}
    assert {d for n, d in dtypes.items() if n.startswith("q_proj")} == {torch.float32}
    assert {d for n, d in dtypes.items() if n.startswith("v_proj")} == {torch.bfloat16}
    trainer.train()


def test_packed_weights_stay_packed_and_compute_in_float32():
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = text(quantization_config=config)
    trainer = build("text", "sft", ["mlp"], flag="bf16", model=model, lora=True)
    layer = trainer.model.get_base_model().model.layers[0]
    assert layer.mlp.up_proj.weight.dtype == torch.uint8
    assert layer.mlp.up_proj.compute_dtype == layer.mlp.up_proj.weight.quant_state.dtype == torch.float32
    assert layer.self_attn.k_proj.compute_dtype == torch.bfloat16
    trainer.train()


def test_eight_bit_weights_cannot():
    pytest.importorskip("bitsandbytes")
    model = text(torch.float16, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(PrecisionError, match="int8-cannot-compute-in-float32") as error:
        build("text", "sft", ["mlp"], flag="bf16", model=model, lora=True)
    assert "llm_int8_skip_modules=['mlp', 'lm_head']" in str(error.value)


def test_the_reference_model_computes_where_the_policy_does():
    trainer = build("text", "grpo", ["layers.0.mlp"], flag="bf16", beta=0.1)
    for model in (trainer.model, trainer.ref_model):
        assert replaced_by(model.model.layers[0].mlp, "forward") == ["float32-module"]


def test_nothing_refused_is_half_done():
    model = text(torch.float16)
    with pytest.raises(PrecisionError, match="no-such-module"):
        build("text", "sft", ["mlp", "nothing"], flag="fp16", model=model, lora=True)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" not in name} == {torch.float16}


def test_peft_wrappers_are_looked_through():
    from peft import get_peft_model

    model = get_peft_model(text(), LoraConfig(target_modules=["q_proj"]))
    assert found("q_proj", model=model) == ["model.layers.0.self_attn.q_proj"]


class Products(TorchDispatchMode):
    """The dtypes of matrix products whose result is as wide as the vocabulary."""

    def __init__(self, width):
        super().__init__()
        self.width, self.seen = width, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and result.shape[-1] == self.width:
            self.seen.add(result.dtype)
        return result


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("flag", ["bf16", "fp16", None])
@pytest.mark.parametrize("task", ["sft", "grpo", "rloo"])
def test_a_float32_head_is_one_in_rollout_and_training(task, flag, lora):
    """TRL's fused head reads the head's weight and never calls it."""
    dtype = torch.float16 if flag == "fp16" else torch.bfloat16
    model = text(dtype)
    width = model.config.vocab_size
    changes = (CALLS_THE_HEAD if task == "sft" else {}) | {"steps": 4}  # the first may be skipped in float16
    trainer = build("text", task, ["lm_head"], flag=flag, model=model, lora=lora, **changes)
    with Products(width) as products:
        trainer.train()
    assert products.seen == {torch.float32}


@pytest.mark.skipif(not CHUNKS_THE_HEAD, reason="the fused head of this TRL has an argument for float32")
def test_a_head_that_is_multiplied_in_chunks_cannot_be_float32():
    with pytest.raises(PrecisionError, match="fused-head-is-not-float32") as error:
        build("text", "sft", ["lm_head"], flag="bf16", model=text(), loss_type="chunked_nll")
    assert "`loss_type='nll'`" in str(error.value)


@pytest.mark.parametrize("lora", [False, True])
def test_trls_own_float32_head_is_one_in_the_rollout_too(lora):
    """Its cast is inside the module, where the autocast of an aligned rollout would round the product again."""
    trainer = build("text", "grpo", None, flag="bf16", lora=lora, cast_lm_head_to_fp32=True)
    with Products(trainer.model.config.vocab_size) as products:
        trainer.train()
    assert products.seen == {torch.float32}


def test_a_module_with_accelerates_hooks_computes_in_float32():
    model = text(torch.float16)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
              "lm_head": "cpu"}  # fmt: skip
    dispatched = dispatch_model(model, device_map=places, force_hooks=True)
    modules = fp32_modules.find_modules(dispatched, ["layers.0"])
    decisions = fp32_modules.decide(dispatched, modules)
    fp32_modules.guard(dispatched, modules)
    apply_casts(dispatched, decisions)
    seen = set()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    with torch.autocast("cpu", torch.float16):
        dispatched(input_ids=torch.arange(6)[None])
    assert seen == {torch.float32}


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_both_ends_of_tied_weights_compute_in_float32(name):
    model = text()
    model.lm_head.weight = model.model.embed_tokens.weight
    assert set(found(name, model=model)) == {"model.embed_tokens", "lm_head"}
    trainer = build("text", "sft", [name], flag=None, model=model, lora=True)
    trainer.train()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_compiling_does_not_break_the_graph():
    model = text()
    modules = fp32_modules.find_modules(model, ["layers.0.mlp"])
    decisions = fp32_modules.decide(model, modules)
    fp32_modules.guard(model, modules)
    apply_casts(model, decisions)
    inputs = {"input_ids": torch.arange(6)[None], "use_cache": False}
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(whole(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("given", "fix"),
    [("vision_tower", "fp32_modules=['vision_tower']"), ([3], "fp32_modules=['vision_tower']"),
     ("", "fp32_modules=['vision_tower']"), (["mlp", ""], "fp32_modules=['vision_tower']")],
)  # fmt: skip
def test_what_is_no_list_of_names_is_refused(given, fix, tmp_path):
    with pytest.raises(PrecisionError, match="not-a-list-of-patterns") as error:
        cells.SAFE_CONFIG["sft"](str(tmp_path), fp32_modules=given)
    assert str(error.value.problems[0].fix) == fix


def test_names_of_a_wrapped_model_are_understood():
    assert found("base_model.model.model.layers.0.mlp") == ["model.layers.0.mlp"]

"""Quantised bases in the compute dtype of the run: what upstream leaves, what is set, what is refused."""

import copy
import logging
import warnings
from dataclasses import replace
from types import SimpleNamespace

import cells
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    Mxfp4Config,
)

from safe_trainers import tiny
from safe_trainers.core.errors import PrecisionError
from safe_trainers.model.inventory import bits, quantization_method, take_inventory
from safe_trainers.model.parts import find_parts, floating_parameters, is_quantized
from safe_trainers.model.trial_forward import sample_inputs
from safe_trainers.weights import fp32_modules
from safe_trainers.weights.bitsandbytes import compute_of, int8_rounds_inputs, plan, reconcile
from safe_trainers.weights.quantized_layers import measure
from upstream import leaves_quantised


bnb = pytest.importorskip("bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
METHODS = {
    "nf4": NF4,
    "double": NF4 | {"bnb_4bit_use_double_quant": True},
    "storage": NF4 | {"bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": NF4 | {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
FOUR_BIT = [name for name in METHODS if name != "int8"]
AS_SAVED = torch.float16 if leaves_quantised() else torch.bfloat16
"""What to ask for so that a checkpoint in bfloat16 stays so: some releases bring it to what is asked for."""
IDS = torch.arange(5, 21).reshape(2, 8)  # (B, T)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny text models that were quantised from bfloat16 and saved so, by method."""
    root = tmp_path_factory.mktemp("quantised")
    for method, config in METHODS.items():
        quantise(cells.folder("text"), torch.bfloat16, **config).save_pretrained(root / method)
    return root


def quantise(folder, dtype, auto=AutoModelForCausalLM, **config):
    return auto.from_pretrained(folder, dtype=dtype, quantization_config=BitsAndBytesConfig(**config))


def lora(model, **config):
    """The model with a LoRA adapter that does something, ready to train."""
    torch.manual_seed(0)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | config
    return get_peft_model(model, LoraConfig(**config)).train()


def quantised_layers(model):
    return {name: module for name, module in model.named_modules() if bits(module) is not None}


def states(model):
    return [layer.weight.quant_state for layer in quantised_layers(model).values()]


def packed(model):
    """Where the packed weights of a model are, and their bytes."""
    weights = {name: layer.weight for name, layer in quantised_layers(model).items()}
    return {name: (w.data_ptr(), w.detach().view(torch.uint8).clone()) for name, w in weights.items()}


def assert_packed_as_before(model, before):
    after = packed(model)
    assert after.keys() == before.keys()
    assert all(after[name][0] == before[name][0] and torch.equal(after[name][1], before[name][1]) for name in before)


def train_step(model, autocast):
    """Loss and gradients of one forward and backward pass on a CPU."""
    try:
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(input_ids=IDS, labels=IDS).loss
    except RuntimeError:
        cells.reset_autocast()
        raise
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.skipif(
    not leaves_quantised(), reason="this transformers loads a pre-quantised checkpoint in the requested dtype"
)
@pytest.mark.parametrize("method", METHODS)
def test_upstream_leaves_a_pre_quantised_checkpoint_in_its_dtype(checkpoints, method):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=torch.float16)
    assert len(quantised_layers(model)) == 7
    assert model.config.dtype == torch.float16
    assert {p.dtype for p in floating_parameters(model)} == {torch.bfloat16}
    if method != "int8":
        assert {layer.compute_dtype for layer in quantised_layers(model).values()} == {torch.bfloat16}
        assert {state.dtype for state in states(model)} == {torch.bfloat16}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("compute", [torch.float16, torch.float32])
def test_all_of_a_quantised_model_follows_the_run_in_place(checkpoints, method, compute):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=AS_SAVED))
    objects, before = {name: id(p) for name, p in model.named_parameters()}, packed(model)
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    statistics = [state.absmax.clone() for state in states(model)] if method != "int8" else []

    reconcile(model, plan(model, str(compute).removeprefix("torch.")))

    assert {p.dtype for p in floating_parameters(model)} == {compute}
    assert model.config.dtype == compute
    if method != "int8":
        layers = quantised_layers(model).values()
        assert {(layer.compute_dtype, layer.compute_type_is_set) for layer in layers} == {(compute, True)}
        assert {state.dtype for state in states(model)} == {compute}
        assert all(layer.quant_state is layer.weight.quant_state for layer in layers)
        assert all(map(torch.equal, statistics, (state.absmax for state in states(model))))
    if method == "double":  # the statistics are packed themselves, and are read as what they were
        assert {state.state2.dtype for state in states(model)} == {torch.float32}
    assert_packed_as_before(model, before)
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert all(torch.equal(p, adapters[n]) for n, p in model.named_parameters() if n in adapters)
    assert plan(model, str(compute).removeprefix("torch.")).changes == ()


@pytest.mark.parametrize("method", FOUR_BIT)
def test_weights_are_dequantised_to_what_they_are(checkpoints, method):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=AS_SAVED)
    weights = [layer.weight for layer in quantised_layers(model).values()]
    reconcile(model, plan(model, "float32"))
    exact = [bnb.functional.dequantize_4bit(w.data, w.quant_state) for w in weights]
    reconcile(model, plan(model, "float16"))
    half = [bnb.functional.dequantize_4bit(w.data, w.quant_state) for w in weights]
    assert all(torch.equal(h, e.half()) for h, e in zip(half, exact, strict=True))


@pytest.mark.parametrize("method", FOUR_BIT)
def test_stock_cannot_train_a_bfloat16_base_under_float16_autocast(checkpoints, method):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=AS_SAVED))
    with pytest.raises(RuntimeError, match="ScalarType"):
        train_step(model, torch.float16)


@pytest.mark.parametrize("method", METHODS)
def test_a_reconciled_base_trains_under_float16_autocast(checkpoints, method):
    reference = lora(AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=torch.bfloat16))
    reconcile(reference, plan(reference, "float32"))
    exact, _ = train_step(reference, None)
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=AS_SAVED))
    reconcile(model, plan(model, "float16"))
    loss, gradients = train_step(model, torch.float16)
    assert abs(loss - exact) < 2**-8 * exact  # a few roundings to float16, whose steps are 2**-11
    assert len(gradients) == 4
    assert all(g is not None and torch.isfinite(g).all() and g.any() for g in gradients)


def test_a_base_in_one_dtype_is_left_alone_and_trains_without_autocast(checkpoints):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / "double", dtype=torch.bfloat16))
    compute = compute_of(None, take_inventory(model).weights)
    assert compute == "bfloat16"
    assert plan(model, compute).changes == ()
    _, gradients = train_step(model, None)
    assert all(g.isfinite().all() and g.any() for g in gradients)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast_the_result_is_that_of_upstreams_default(weights):
    # float32 stands in a `BitsAndBytesConfig` where nothing was written; autocast rounds the product all the same.
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    stock = lora(quantise(cells.folder("text"), weights, **config))
    model = lora(quantise(cells.folder("text"), weights, **config))
    reconcile(model, plan(model, "bfloat16"))
    assert {layer.compute_dtype for layer in quantised_layers(stock).values()} == {torch.float32}
    assert {layer.compute_dtype for layer in quantised_layers(model).values()} == {torch.bfloat16}
    (loss, gradients), (expected, stock_gradients) = (train_step(m, torch.bfloat16) for m in (model, stock))
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, gradients, stock_gradients))


def test_float32_weights_and_what_is_trained_stay_as_they_are(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.input_layernorm.float()
    model = lora(model, modules_to_save=["lm_head"])
    trained = model.base_model.model.lm_head.modules_to_save["default"].weight.requires_grad_(True)
    planned = plan(model, "float16")
    weights = {change.name for change in planned.changes if change.kind == "weight"}
    assert weights == {
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.layers.0.post_attention_layernorm.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.original_module.weight",
    }
    reconcile(model, planned)
    assert model.base_model.model.model.layers[0].input_layernorm.weight.dtype == torch.float32
    assert trained.dtype == torch.bfloat16
    assert model.config.dtype == torch.float16


def test_a_frozen_adapter_keeps_its_bits(checkpoints):
    # TRL keeps the reference of a PEFT model as a frozen adapter named "ref" beside the trained one.
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16))
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    frozen = {name: p for name, p in model.named_parameters() if ".ref." in name}
    for parameter in frozen.values():
        parameter.data = parameter.data.bfloat16()
    assert len(frozen) == 4
    assert not any(p.requires_grad for p in frozen.values())
    reconcile(model, plan(model, "float16"))
    assert {p.dtype for p in frozen.values()} == {torch.bfloat16}


def test_a_model_in_float32_keeps_its_config():
    model = quantise(cells.folder("text"), torch.float32, load_in_4bit=True)
    planned = plan(model, "bfloat16", trained=False)
    assert {change.kind for change in planned.changes} == {"compute_dtype", "quant_state"}
    reconcile(model, planned)
    assert model.config.dtype == torch.float32


def test_all_of_a_reference_model_follows(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=AS_SAVED)
    assert model.model.norm.weight.requires_grad
    assert {change.kind for change in plan(model, "float16").changes} == {"compute_dtype", "quant_state"}
    reconcile(model, plan(model, "float16", trained=False))
    assert {p.dtype for p in floating_parameters(model)} == {torch.float16}


def test_exempt_modules_are_left_alone(checkpoints):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16))
    exempt = ["model.layers.0.mlp", "model.norm", "model.layers.0.self_attn.q_proj"]
    planned = plan(model, "float16", exempt=exempt)
    touched = {change.name.removeprefix("base_model.model.") for change in planned.changes}
    assert not {name for name in touched if name.startswith(tuple(exempt))}
    assert "model.layers.0.self_attn.v_proj.base_layer" in touched


def test_tied_weights_stay_tied(tmp_path):
    config = AutoConfig.from_pretrained(cells.folder("text"), tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    model = quantise(tmp_path / "tied", torch.bfloat16, **NF4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reconcile(model, plan(model, "float16", trained=False))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.float16


def test_half_buffers_follow_and_masks_stay(checkpoints):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16))
    layer = model.base_model.model.model.layers[0]
    layer.register_buffer("running_mean", torch.full((4,), 0.5, dtype=torch.bfloat16))
    layer.register_buffer("mask", torch.full((4,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16))
    reconcile(model, plan(model, "float16"))
    assert layer.running_mean.dtype == torch.float16
    assert layer.mask.dtype == torch.bfloat16
    assert model.base_model.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_layer_that_would_follow_its_first_input_is_set():
    model = nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type="nf4")).to("cpu")
    planned = plan(model, "bfloat16")
    assert [change.source for change in planned.changes if change.kind == "compute_dtype"] == ["unset"]
    reconcile(model, planned)
    model.train()(torch.ones(1, 2, 64, requires_grad=True))  # a float32 input decides nothing any more
    assert model[0].compute_dtype == torch.bfloat16


def test_parameters_that_bitsandbytes_dequantises_as_they_are_read_follow():
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model = nn.Module()
    model.experts = nn.Module()
    model.experts.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
    replace_parameter_4bit(model.experts, "weight", quant_type="nf4")
    assert model.experts.weight.dtype == torch.bfloat16
    reconcile(model, plan(model, "float16"))
    assert model.experts.weight.dtype == torch.float16


def test_a_state_that_is_repacked_for_a_cpu_gets_the_dtype_that_it_returns_to(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "double", dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    functional = bnb.functional
    layer.weight.data, state = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    reconcile(model, plan(model, "float16"))
    assert (state.dtype, state.original_dtype) == (torch.bfloat16, torch.float16)
    _, state = functional._convert_weight_packed_for_cpu_inverse(layer.weight.data, state)
    assert state.dtype == torch.float16


@pytest.mark.parametrize("method", ["nf4", "storage"])
def test_no_dtype_is_taken_from_a_packed_weight(checkpoints, method):
    # `bnb_4bit_quant_storage=bfloat16` makes a packed weight a floating tensor; it still is no bfloat16 weight.
    model = AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=torch.bfloat16)
    weights = [layer.weight for layer in quantised_layers(model).values()]
    storage = torch.bfloat16 if method == "storage" else torch.uint8
    assert {w.dtype for w in weights} == {storage}
    assert all(map(is_quantized, weights))
    changed = {change.name for change in plan(model, "float16", trained=False).changes if change.kind == "weight"}
    assert not changed & {name for name, p in model.named_parameters() if is_quantized(p)}
    assert take_inventory(model).weights == {"bfloat16"}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with a model of which one weight, in the middle of a layer, is beyond float16."""
    folder = tmp_path_factory.mktemp("large")
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = 70144.0  # the same in bfloat16
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", FOUR_BIT)
def test_packed_weights_beyond_float16_are_refused_before_anything_is_changed(large, method):
    model = quantise(large, torch.bfloat16, **METHODS[method])
    layer = model.model.layers[0].mlp.down_proj
    planned = plan(model, "float16", trained=False)
    (problem,) = planned.problems
    assert problem.id == "quantised-weights-overflow-fp16"
    assert "model.layers.0.mlp.down_proj" in problem.what
    assert "70144" in problem.what
    assert "fp32_modules=['model.layers.0.mlp.down_proj']" in str(problem.fix)
    with pytest.raises(PrecisionError):
        reconcile(model, planned)
    assert layer.compute_dtype == layer.weight.quant_state.dtype == model.model.norm.weight.dtype == torch.bfloat16
    assert not plan(model, "bfloat16").problems
    assert not plan(model, "float32").problems
    assert not plan(model, "float16", exempt=["model.layers.0.mlp.down_proj"]).problems
    # What upstream makes of it.
    layer.weight.quant_state.dtype = torch.float16
    assert bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).isinf().any()


@pytest.mark.parametrize("method", ["nf4", "double"])
def test_the_line_that_the_refusal_says_mends_it(large, method):
    def step(patterns):
        model = lora(quantise(large, torch.bfloat16, **METHODS[method]))
        modules = fp32_modules.find_modules(model, patterns)
        planned = plan(model, "float16", exempt=modules)
        fp32_modules.guard(model, modules)
        reconcile(model, replace(planned, problems=()))
        return planned.problems, train_step(model, torch.float16)

    (problem,), (loss, _) = step([])
    assert loss.isnan()
    problems, (loss, gradients) = step(["model.layers.0.mlp.down_proj"])
    assert "fp32_modules=['model.layers.0.mlp.down_proj']" in str(problem.fix)
    assert not problems
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("size", "refused"), [(65504.0, False), (65519.0, False), (65520.0, True)])
def test_the_limit_is_what_rounds_to_infinity(size, refused):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    weight = torch.zeros(64, 64)
    weight[7, 7] = -size
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=False)
    model[0] = layer.to("cpu")
    state = layer.weight.quant_state
    assert bool(plan(model, "float16").problems) == refused
    state.dtype = torch.float16
    assert bnb.functional.dequantize_4bit(layer.weight.data, state).isinf().any() == refused


def test_half_weights_beyond_float16_are_refused(checkpoints):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16))
    with torch.no_grad():
        model.base_model.model.model.embed_tokens.weight[7, 3] = -1e5
    (problem,) = plan(model, "float16").problems
    assert "model.embed_tokens.weight" in problem.what
    assert "fp32_modules=['model.embed_tokens']" in str(problem.fix)
    assert not plan(model, "float32").problems
    assert not plan(model, "float16", exempt=["model.embed_tokens"]).problems


@pytest.mark.parametrize("forwards", [0, 1])
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float32"])
def test_8_bit_weights_that_became_infinite_are_refused_in_any_dtype(large, forwards, compute):
    model = lora(quantise(large, torch.bfloat16, load_in_8bit=True))
    for _ in range(forwards):  # bitsandbytes moves the scales in the first one
        assert model(input_ids=IDS, labels=IDS).loss.isnan()
    (problem,) = plan(model, compute).problems
    assert problem.what == "8-bit weights that overflow float16: model.layers.0.mlp.down_proj"
    assert "llm_int8_skip_modules=['down_proj', 'lm_head']" in str(problem.fix)
    sound = quantise(large, torch.bfloat16, load_in_8bit=True, llm_int8_skip_modules=["down_proj", "lm_head"])
    assert not plan(sound, "bfloat16").problems


@pytest.mark.parametrize("method", ["nf4", "int8"])
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float32"])
def test_what_8_bit_layers_compute_in_is_said(checkpoints, method, compute):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=torch.bfloat16)
    problem = int8_rounds_inputs(model, compute)
    assert (problem is not None) == (method == "int8" and compute != "float16")
    if problem is not None:
        assert problem.id == "int8-computes-in-fp16"
        assert problem.what.startswith("7 8-bit layers, such as model.layers.0.self_attn.q_proj")
        assert "except in training mode" in problem.why  # on this CPU


def test_bitsandbytes_itself_says_it_at_each_forward_pass(checkpoints, caplog):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "int8", dtype=torch.bfloat16)
    with (
        caplog.at_level(logging.WARNING, logger="bitsandbytes"),
        warnings.catch_warnings(record=True) as warned,  # what it used before it logged
        torch.no_grad(),
    ):
        warnings.filterwarnings("always", "MatMul8bitLt")
        model.train()(input_ids=IDS)
        assert not caplog.records  # it multiplies dequantised weights on a CPU while it trains
        assert not [warning for warning in warned if "MatMul8bitLt" in str(warning.message)]
        model.eval()(input_ids=IDS)
        model(input_ids=IDS)
    said = [record.getMessage() for record in caplog.records]
    said += [str(warning.message) for warning in warned if "MatMul8bitLt" in str(warning.message)]
    assert len(said) == 14
    assert all("to float16" in text for text in said)


def test_inputs_of_8_bit_layers_pass_through_float16():
    # What the warning is about, on a CPU: the same layer, while it trains and while it does not. A threshold keeps
    # large inputs out of the 8-bit product; without one they become infinite.
    model = quantise(cells.folder("text"), torch.float32, load_in_8bit=True, llm_int8_threshold=0.0)
    layer = model.model.layers[0].mlp.up_proj
    inputs = torch.full((1, 2, 64), 1e5)  # (B, T, D)
    with torch.no_grad():
        assert layer.train()(inputs).isfinite().all()
        assert not layer.eval()(inputs).isfinite().any()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_towers_of_a_quantised_model_follow(tmp_path, family):
    quantise(cells.folder(family), torch.bfloat16, AutoModelForImageTextToText, **METHODS["double"]).save_pretrained(
        tmp_path / family
    )
    inputs = dict(sample_inputs(AutoProcessor.from_pretrained(cells.folder(family))))
    model = lora(AutoModelForImageTextToText.from_pretrained(tmp_path / family, dtype=torch.bfloat16))
    tower = next(iter(find_parts(model).towers.values()))
    assert quantised_layers(tower)
    tower.config = copy.deepcopy(tower.config)  # some releases of transformers build towers from copies
    assert {model.config.dtype, model.config.text_config.dtype, model.config.vision_config.dtype} == {torch.bfloat16}
    before = packed(model)
    planned = plan(model, "float16")
    reconcile(model, planned)
    assert {p.dtype for p in floating_parameters(model)} == {torch.float16}
    assert {model.config.dtype, model.config.text_config.dtype, model.config.vision_config.dtype} == {torch.float16}
    assert tower.config.dtype == torch.float16
    assert {layer.compute_dtype for layer in quantised_layers(model).values()} == {torch.float16}
    assert_packed_as_before(model, before)
    with torch.autocast("cpu", torch.float16):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_stock_cannot_compute_with_bfloat16_towers_under_float16_autocast(tmp_path, family):
    quantise(cells.folder(family), torch.bfloat16, AutoModelForImageTextToText, **METHODS["double"]).save_pretrained(
        tmp_path / family
    )
    inputs = dict(sample_inputs(AutoProcessor.from_pretrained(cells.folder(family))))
    model = lora(AutoModelForImageTextToText.from_pretrained(tmp_path / family, dtype=AS_SAVED))
    with pytest.raises(RuntimeError, match=r"ScalarType|mixed dtype"), torch.autocast("cpu", torch.float16):
        model(**inputs, labels=inputs["input_ids"])
    cells.reset_autocast()


def test_a_plan_is_plain_values_and_reads_well(checkpoints):
    model = lora(AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16))
    planned = plan(model, "float16")
    lines = str(planned).splitlines()
    assert lines[0].startswith(
        "compute_dtype bfloat16 -> float16: 7 (base_model.model.model.layers.0.self_attn.q_proj"
    )
    assert "weight bfloat16 -> float16: 5 (base_model.model.model.embed_tokens.weight, ...)" in str(planned)
    assert planned.to_dict()["changes"][0]["kind"] == "compute_dtype"
    cast = sum(change.elements for change in planned.changes)
    assert cast == sum(p.numel() for p in floating_parameters(model))
    reconcile(model, planned)
    assert str(plan(model, "float16")) == "no dtype in the quantised model is changed for a run in float16"


def test_nothing_is_planned_for_a_model_that_is_not_quantised():
    assert plan(tiny.build_model("text", dtype="bfloat16"), "float16").changes == ()


def test_only_a_dtype_can_be_computed_in():
    with pytest.raises(PrecisionError, match="float12"):
        plan(nn.Linear(2, 2), "float12")


@pytest.mark.parametrize(
    ("autocast", "weights", "compute"),
    [
        ("float16", {"bfloat16", "float32"}, "float16"),
        ("bfloat16", {"float32"}, "bfloat16"),
        (None, {"float32"}, "float32"),
        (None, {"bfloat16"}, "bfloat16"),
        (None, {"bfloat16", "float32"}, "bfloat16"),
        (None, {"bfloat16", "float16"}, "float32"),
        (None, set(), "float32"),
    ],
)
def test_without_autocast_operations_follow_the_weights(autocast, weights, compute):
    assert compute_of(autocast, weights) == compute


def test_what_was_dequantised_is_an_ordinary_model(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "nf4", dtype=torch.bfloat16)
    assert quantization_method(model) == take_inventory(model).quantization == "4bit"
    model.dequantize()
    assert model.is_loaded_in_4bit  # upstream's flag outlives it
    assert quantization_method(model) is take_inventory(model).quantization is None
    # A stand-in for releases of transformers that leave the quantiser on a model that they dequantised.
    model.hf_quantizer = SimpleNamespace(quantization_config=Mxfp4Config(dequantize=True))
    assert quantization_method(model) is None


@pytest.mark.parametrize("method", METHODS)
def test_what_bitsandbytes_quantised_is_supported(checkpoints, method):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / method, dtype=torch.bfloat16)
    assert quantization_method(lora(model)) == ("8bit" if method == "int8" else "4bit")
    assert measure(model, "bfloat16", "bfloat16") == ()

"""One stated dtype for frozen weights that disagree: what is cast, what never is, and what it costs."""

import copy
import json
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from live_bytes import LiveBytes
from packaging.version import Version
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from safe_trainers import PrecisionError, tiny
from safe_trainers.boundaries.cast_hooks import guard_fused, guard_leaves
from safe_trainers.core.dtypes import from_torch
from safe_trainers.weights.cast import table
from safe_trainers.weights.keep_fp32 import declared_float32
from safe_trainers.weights.unify_dtypes import apply_layout, dominant, make_computable, plan_layout
from upstream import needs_packed_without_kernels, static_cache_has_two_dtypes


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
# transformers 5 fuses the experts of a checkpoint that holds each by itself.
REMAPS = Version(transformers.__version__) >= Version("5")


def frozen(model):
    return model.requires_grad_(False)


def mixed(family="gpt_oss", dtype=BF16, wide=("norm", "embed_tokens")):
    """A frozen model in a half dtype whose parameters with certain names are float32, no number of them a half one."""
    model = frozen(tiny.build_model(family, dtype=dtype))
    for name, parameter in model.named_parameters():
        if any(part in name for part in wide):
            parameter.data = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    return model


def bits(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def dtypes(model):
    return {name: from_torch(parameter.dtype) for name, parameter in model.named_parameters()}


# What is cast.


def test_matrices_get_the_stated_dtype_and_norms_stay_wide():
    model = mixed()
    before = bits(model)
    casts = plan_layout(model, "bfloat16")
    assert [(cast.name, cast.source, cast.target) for cast in casts] == [
        ("model.embed_tokens.weight", "float32", "bfloat16")
    ]
    assert casts[0].elements == before["model.embed_tokens.weight"].numel()
    assert all(same_bits(p, before[n]) for n, p in model.named_parameters())  # planning reads only
    apply_layout(model, casts)
    for name, parameter in model.named_parameters():
        expected = before[name].to(BF16) if "embed" in name else before[name]
        assert same_bits(parameter, expected), name
    assert plan_layout(model, "bfloat16") == ()


def test_vectors_follow_where_they_have_to():
    model = mixed()
    apply_layout(model, plan_layout(model, "bfloat16"))
    casts = plan_layout(model, "bfloat16", vectors=True)
    assert {cast.name for cast in casts} == {name for name, _ in model.named_parameters() if "norm" in name}
    apply_layout(model, casts)
    assert set(dtypes(model).values()) == {"bfloat16"}


def test_what_hangs_beside_a_matrix_follows_it():
    """A bias in another dtype than its matrix fails in every kernel; the sinks of gpt-oss hang beside none."""
    model = mixed(wide=("bias", "sinks"))
    apply_layout(model, plan_layout(model, "bfloat16"))
    assert {name for name, dtype in dtypes(model).items() if dtype == "float32"} == {
        f"model.layers.{layer}.self_attn.sinks" for layer in (0, 1)
    }


def test_a_bias_follows_its_matrix_also_where_that_is_kept():
    model = mixed(wide=("router.weight", "router.bias"))
    casts = plan_layout(model, "bfloat16", keep=lambda name: name.endswith("router.weight"), vectors=True)
    assert casts == ()


def test_a_narrow_minority_is_widened_without_loss():
    model = frozen(tiny.build_model("text"))
    model.model.layers[0].self_attn.q_proj.to(BF16)
    model.model.norm.to(FP16)
    before = bits(model)
    assert dominant(model, frozenset({"bfloat16", "float32"})) == "float32"
    apply_layout(model, plan_layout(model, "float32"))
    assert set(dtypes(model).values()) == {"float32"}
    assert all(torch.equal(p, before[n].float()) for n, p in model.named_parameters())


def test_a_vector_of_the_other_half_format_is_widened():
    model = frozen(tiny.build_model("text", dtype=BF16))
    model.model.norm.to(FP16)
    (cast,) = plan_layout(model, "bfloat16")
    assert (cast.name, cast.source, cast.target) == ("model.norm.weight", "float16", "float32")
    assert cast.reason == "a vector without a matrix; the cast to float32 is exact"


@pytest.mark.parametrize(
    ("wide", "compute", "expected"),
    [
        (("norm",), {"bfloat16", "float32"}, "bfloat16"),  # most elements
        (("mlp", "embed", "lm_head", "self_attn"), {"bfloat16", "float32"}, "float32"),
        (("mlp", "embed", "lm_head", "self_attn"), {"bfloat16"}, "bfloat16"),  # the compute dtype, where it is half
        ((), {"float32"}, "bfloat16"),  # no autocast: operations follow the weights
    ],
)
def test_the_dominant_dtype(wide, compute, expected):
    assert dominant(mixed("text", wide=wide), frozenset(compute)) == expected


def test_without_frozen_matrices_nothing_is_dominant_and_nothing_cast():
    model = tiny.build_model("text", dtype=BF16)
    model.model.embed_tokens.float()
    assert dominant(model, frozenset({"bfloat16", "float32"})) == "float32"
    assert plan_layout(model, "bfloat16", vectors=True) == ()


# What is never cast.


def test_declared_norms_of_gpt_oss_stay_float32_in_float16_alone():
    model = mixed(dtype=FP16)
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert {name for name, _ in model.named_parameters() if declared_float32(model, "float16")(name)} == norms
    assert not any(map(declared_float32(model, "bfloat16"), norms))
    apply_layout(model, plan_layout(model, "float16", vectors=True))
    assert {name for name, dtype in dtypes(model).items() if dtype == "float32"} == norms


def ernie():
    return Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            **SMALL, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0, use_bias=False
        )
    )


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_strictly_declared_weights_stay_float32_in_both_half_dtypes(target, tmp_path):
    """Ernie 4.5 routes in float32: it is loaded mixed, and only what it did not declare is cast."""
    ernie().save_pretrained(tmp_path)
    model = frozen(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=target))
    declared = {name for name, dtype in dtypes(model).items() if dtype == "float32"}
    assert {name.split("mlp.")[1] for name in declared} >= {"gate.weight"}
    model.model.embed_tokens.float()
    before = bits(model)
    assert [cast.name for cast in plan_layout(model, target, vectors=True)] == ["model.embed_tokens.weight"]
    apply_layout(model, plan_layout(model, target, vectors=True))
    assert all(same_bits(p, before[n]) for n, p in model.named_parameters() if n in declared)


def test_trainables_adapters_and_buffers_are_not_touched():
    model = get_peft_model(
        mixed(wide=("embed_tokens", "lm_head", "q_proj", "gate_up_proj", "router")),
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj"],
            modules_to_save=["lm_head"],
        ),
    )
    model.base_model.model.model.layers[1].mlp.router.weight.requires_grad_(True)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    before = bits(model)
    buffers = {name: from_torch(buffer.dtype) for name, buffer in model.named_buffers()}
    casts = plan_layout(model, "bfloat16")
    assert {cast.name for cast in casts} == {
        "model.embed_tokens.weight",
        "lm_head.weight",  # the frozen original beside the trained copy
        "model.layers.0.mlp.router.weight",
        "model.layers.0.mlp.router.bias",
        *(f"model.layers.{i}.self_attn.q_proj.{kind}" for i in (0, 1) for kind in ("weight", "bias")),
        *(f"model.layers.{i}.mlp.experts.gate_up_proj{kind}" for i in (0, 1) for kind in ("", "_bias")),
    }
    apply_layout(model, casts)
    assert trainable
    assert all(same_bits(p, before[n]) for n, p in model.named_parameters() if n in trainable)
    left = {name for name, dtype in dtypes(model).items() if dtype == "float32"} - trainable
    assert left == {"base_model.model.model.layers.1.mlp.router.bias"}  # as the matrix beside it, which is trained
    assert {name: from_torch(buffer.dtype) for name, buffer in model.named_buffers()} == buffers
    assert "float32" in buffers.values()  # rotary tables


@pytest.mark.parametrize(
    "keep", [("model.embed_tokens",), ("model.embed_tokens.weight",), lambda name: "embed" in name]
)
def test_what_is_to_be_kept_is_kept(keep):
    assert plan_layout(mixed(), "bfloat16", keep=keep) == ()
    assert plan_layout(mixed(), "bfloat16", keep=["model.embed"]) != ()  # a name, not the beginning of one


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_packed_weights_keep_every_byte(storage, tmp_path):
    """Packed weights may be stored as bfloat16; k-bit preparation widens what is not packed, and a part is not."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage)
    folder = tiny.save("text", tmp_path / "text")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=BF16)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model.model.embed_tokens.to(BF16)
    before = bits(model)
    packed = {name for name, p in model.named_parameters() if type(p).__name__ == "Params4bit"}
    states = {name: from_torch(m.weight.quant_state.dtype) for name, m in model.named_modules() if hasattr(
        getattr(m, "weight", None), "quant_state")}  # fmt: skip
    assert packed
    assert dominant(model, frozenset({"float32"})) == "float32"
    assert {cast.name for cast in plan_layout(model, "bfloat16", vectors=True)} == {
        name for name, p in model.named_parameters() if p.dtype == FP32
    }
    apply_layout(model, plan_layout(model, "bfloat16", vectors=True))
    assert all(same_bits(p, before[n]) for n, p in model.named_parameters() if n in packed)
    assert states == {name: from_torch(model.get_submodule(name).weight.quant_state.dtype) for name in states}


@needs_packed_without_kernels
def test_the_scales_of_packed_weights_are_not_touched():
    from transformers.integrations.finegrained_fp8 import FP8Linear

    model = frozen(nn.Sequential(FP8Linear(128, 128, block_size=(128, 128)), nn.Linear(4, 4)))
    assert model[0].weight_scale_inv.dtype == FP32
    assert {cast.name for cast in plan_layout(model, "bfloat16")} == {"1.weight", "1.bias"}


def test_tied_weights_are_cast_once_and_stay_tied():
    model = frozen(LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))).to(BF16)
    model.model.embed_tokens.float()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    casts = plan_layout(model, "bfloat16")
    assert [cast.name for cast in casts] == ["model.embed_tokens.weight"]
    assert plan_layout(model, "bfloat16", keep=["lm_head"]) == ()  # any of its names
    apply_layout(model, casts)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == BF16


def test_weights_that_share_their_storage_still_share_it():
    model = frozen(nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8), "three": nn.Linear(8, 8)}))
    model["two"].weight.data = model["one"].weight.data
    apply_layout(model, plan_layout(model, "bfloat16"))
    assert model["one"].weight.data_ptr() == model["two"].weight.data_ptr() != model["three"].weight.data_ptr()
    assert set(dtypes(model).values()) == {"bfloat16"}


def test_numbers_that_float16_does_not_have_are_refused_before_anything_is_changed():
    model = mixed(dtype=FP16, wide=("embed_tokens", "lm_head", "norm"))
    model.lm_head.weight[3, 5] = -70_000.0
    model.model.norm.weight[2] = 1e6  # stays float32
    before = bits(model)
    with pytest.raises(PrecisionError) as caught:
        plan_layout(model, "float16")
    (problem,) = caught.value.problems
    assert problem.id == "weights-overflow"
    assert problem.what == "a cast to float16 of float32 weights with numbers up to 7e+04: lm_head.weight"
    assert "65504" in problem.why
    assert all(same_bits(p, before[n]) for n, p in model.named_parameters())
    model.lm_head.weight[3, 5] = 65_504.0
    apply_layout(model, plan_layout(model, "float16"))
    assert model.lm_head.weight[3, 5] == 65_504.0
    frozen(model)
    assert plan_layout(model, "bfloat16")  # bfloat16 has them all


def test_a_model_without_data_is_planned_too():
    with torch.device("meta"):
        model = frozen(LlamaForCausalLM(LlamaConfig(**SMALL)))
    model.lm_head.to(BF16)
    apply_layout(model, plan_layout(model, "bfloat16"))
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {BF16}


# What it costs.

MEMORY = """
    import re, sys
    from pathlib import Path
    import torch
    from safe_trainers.weights.unify_dtypes import apply_layout, plan_layout

    tensors, elements = 16, 4 * 2**20  # 16 MiB each in float32
    model = torch.nn.ParameterDict(
        {f"p{i}": torch.nn.Parameter(torch.ones(1, elements), requires_grad=False) for i in range(tensors)}
    )
    warm = torch.nn.ParameterDict({"p": torch.nn.Parameter(torch.ones(1, 8), requires_grad=False)})
    apply_layout(warm, plan_layout(warm, "float16"))


    def peak():  # of this process; ru_maxrss begins with that of the process which started it
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    before = peak()
    if sys.argv[1] == "layout":
        apply_layout(model, plan_layout(model, "float16"))
    else:
        held = {name: parameter.half() for name, parameter in model.items()}  # the whole model beside itself
    print((peak() - before) / 1024)
"""


def extra_mebibytes(how):
    code = textwrap.dedent(MEMORY)
    done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)


def test_no_more_than_the_largest_tensor_is_held_twice():
    """Counted in bytes of tensors, the check for numbers that are too large included."""
    model = frozen(tiny.build_model("gpt_oss"))
    sizes = sorted(parameter.numel() * 2 for parameter in model.parameters())
    with LiveBytes(model.parameters()) as live:
        apply_layout(model, plan_layout(model, "float16"))
    assert sizes[-1] < sum(sizes) / 4
    assert live.peak <= sizes[-1] + 64  # and the two numbers that the largest magnitude is found from
    assert live.now < 0  # half of the matrices' bytes were given back
    with LiveBytes(model.parameters()) as live:
        held = {name: parameter.float() for name, parameter in model.named_parameters()}
    assert live.peak > sum(sizes)  # what the count says of a copy of the model
    assert held


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_does_not_grow_either():
    """Peak of the process above a model of 256 MiB: one tensor of 8 MiB at a time, where a copy takes 128 MiB."""
    assert extra_mebibytes("copy") > 100
    assert extra_mebibytes("layout") < 16


# Checkpoints whose names are remapped while they load.


def old_names(model, folder, change):
    """Saves a model, then writes its file again with every tensor as `change(name, tensor)` says."""
    model.save_pretrained(folder)
    source = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(source, folder / "model.safetensors", metadata={"format": "pt"})
    return source


def qwen3_moe():
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )


def mixed_file(name, tensor):
    """Float32 norms, embeddings and one expert; bfloat16 for the rest."""
    tensor = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))) - 0.5
    return tensor if any(part in name for part in ("norm", "embed", "experts.1.")) else tensor.to(BF16)


def source_of(name, source):
    """A parameter of the model in the tensors of the file, in float64."""
    if name in source:
        return source[name].double()
    layer = name.rsplit(".", 1)[0]
    stacked = []
    for expert in range(4):
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        stacked.append(torch.cat([source[f"{layer}.{expert}.{part}.weight"].double() for part in parts]))
    return torch.stack(stacked)


@pytest.mark.parametrize("loaded", ["float32", "bfloat16", "float16", "auto"])
def test_a_mixed_checkpoint_of_single_experts_is_loaded_in_one_dtype(loaded, tmp_path):
    """The loader fuses experts of different dtypes, and gives every weight the dtype that was asked for."""
    source = old_names(qwen3_moe(), tmp_path, mixed_file)
    assert {from_torch(tensor.dtype) for tensor in source.values()} == {"float32", "bfloat16"}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=loaded)
    dtype = BF16 if loaded == "auto" else getattr(torch, loaded)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert hasattr(model.model.layers[0].mlp.experts, "gate_up_proj") == REMAPS
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.double(), source_of(name, source).to(dtype).double()), name


def test_a_mixed_checkpoint_has_one_stated_layout_with_the_bits_of_the_file(tmp_path):
    """Loaded wide, then laid out: norms keep the bits of the file, which a load in bfloat16 rounds."""
    source = old_names(qwen3_moe(), tmp_path, mixed_file)
    model = frozen(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32))
    apply_layout(model, plan_layout(model, "bfloat16"))
    exact = rounded = 0
    for name, parameter in model.named_parameters():
        wide = source_of(name, source)
        assert parameter.dtype == (FP32 if "norm" in name else BF16), name
        assert torch.equal(parameter.double(), wide.to(parameter.dtype).double()), name
        exact += torch.equal(parameter.double(), wide)
        rounded += not torch.equal(parameter.double(), wide)
    assert exact > rounded > 0  # bfloat16 tensors of the file and norms against embeddings and fused experts
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    assert not torch.equal(plain.model.norm.weight.double(), source["model.norm.weight"].double())


def test_a_vision_checkpoint_with_old_names_and_a_wide_tower(tmp_path):
    """LLaVA checkpoints name the text model `language_model.model`; the tower of this one is float32."""
    model = tiny.build_model("llava")
    source = old_names(model, tmp_path, lambda name, tensor: tensor if "vision_tower" in name else tensor.to(BF16))
    if REMAPS:  # 4.57 renames while it loads, and saves what it loaded
        assert {name.split(".model.")[0] for name in source if "embed_tokens" in name} == {"language_model"}
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=FP32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded.model.language_model.to(BF16)
    loaded.lm_head.to(BF16)
    tower = {name for name, parameter in loaded.named_parameters() if "vision_tower" in name}
    apply_layout(frozen(loaded), plan_layout(loaded, "bfloat16"))
    for (name, parameter), wide in zip(loaded.named_parameters(), model.parameters(), strict=True):
        alone = parameter.ndim < 2 and "norm" in name
        assert parameter.dtype == (FP32 if alone and name in tower else BF16), name
        held = wide.detach() if name in tower else wide.detach().to(BF16)  # what the file holds
        assert torch.equal(parameter, held.to(parameter.dtype)), name
    assert tower


# Boundaries of fused experts.


@pytest.mark.skipif(not REMAPS, reason="experts of transformers 4 take their routing in another format")
def test_a_fused_module_casts_what_it_multiplies_and_nothing_else():
    model = tiny.build_model("gpt_oss", dtype=BF16)
    layers = model.model.layers
    assert guard_fused(model) == 4  # experts and router of two layers
    assert guard_fused(model) == 0
    experts, router = layers[0].mlp.experts, layers[0].mlp.router
    x = torch.randn(3, 64)
    indices, weights = torch.tensor([[0, 1], [1, 2], [0, 3]]), torch.rand(3, 2)
    assert torch.equal(router(x)[0], router(x.to(BF16))[0])
    seen = []
    handle = experts.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append([t.dtype for t in (*args, *kwargs.values())]), with_kwargs=True
    )
    model.set_experts_implementation("eager")
    by_name = {"router_indices": indices, "routing_weights": weights}
    assert torch.equal(experts(x, indices, weights), experts(hidden_states=x, **by_name))
    assert seen == [[BF16, torch.int64, FP32]] * 2
    with torch.autocast("cpu", BF16):
        experts(x, indices, weights)
    assert seen[-1] == [FP32, torch.int64, FP32]  # autocast casts by itself
    handle.remove()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(router)))
    assert copied(x)[0].dtype == BF16
    assert torch.equal(torch.compile(router, backend="eager")(x)[0], router(x)[0])


FUSED = {
    "aria": {"mlp.experts", "mlp.router"},
    "gemma3": {"multi_modal_projector"},  # a matrix of its own, and a norm
    "gpt_oss": {"mlp.experts", "mlp.router"},
    "llama4": {"feed_forward.experts"},
}


@pytest.mark.skipif(not REMAPS, reason="transformers 4 implements some experts differently")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_which_modules_are_fused(family):
    """No leaves, and no tower or model with a matrix beside its modules: position embeddings, query tokens."""
    model = tiny.build_model(family, dtype=BF16)
    if family == "aria" and any(name.endswith("experts.fc1") for name, _ in model.named_modules()):
        pytest.skip("this transformers keeps the matrices of Aria's experts in modules")
    guard_fused(model)
    guarded = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    expected = FUSED.get(family, set())
    assert all(any(name.endswith(end) for end in expected) for name in guarded), guarded
    assert all(any(name.endswith(end) for name in guarded) for end in expected), guarded


# How far it goes.


def asked(model):
    """What torch says when a model runs, `None` where it does.

    With a cache, as `generate` runs it, and without, as training does: a cache holds keys and values in one dtype.
    """

    def failure():
        try:
            with torch.no_grad():
                for use_cache in (True, False):
                    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=use_cache)
        except RuntimeError as error:
            return str(error)
        return None

    return failure


@pytest.mark.parametrize(
    ("wide", "casts"),
    [
        (("norm",), None),  # gpt-oss computes with wide norms as it is
        (("lm_head",), 0),  # boundaries are enough
        (("router",), 0),
        (("router.bias",), 2),  # one kernel adds it to a product
    ],
)
def test_as_little_as_it_takes(wide, casts):
    model = mixed(wide=wide)
    before = bits(model)
    done = make_computable(model, frozenset({"bfloat16", "float32"}), asked(model))
    assert done.error is None
    assert asked(model)() is None
    assert json.loads(json.dumps(done.to_dict()))["casts"] == [vars(cast) for cast in done.casts]
    if casts is None:
        assert (done.guarded, done.casts) == (0, ())
        assert str(done) == "no changes: the model computes without them"
        assert not any(module._forward_pre_hooks for module in model.modules())
    else:
        assert done.guarded > 0
        assert len(done.casts) == casts
        assert str(done).startswith("inputs of ")
    if not casts:
        assert all(same_bits(p, before[n]) for n, p in model.named_parameters())
    else:
        assert "float32 -> bfloat16: 2 tensors (model.layers.0.mlp.router.bias, ...): the dtype of" in str(done)


class Attention(nn.Module):
    """Query norms in float32 make the query float32, and attention takes one dtype."""

    def __init__(self, by_itself=False):
        super().__init__()
        self.q, self.v, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.RMSNorm(8)
        self.by_itself = by_itself

    def forward(self, input_ids, use_cache):
        x = torch.ones(1, 1, 3, 8, dtype=self.q.weight.dtype)
        q = self.norm.weight * self.q(x)
        if self.by_itself:
            q = q.float()
        return nn.functional.scaled_dot_product_attention(q, q, self.v(x))


def test_boundaries_are_not_enough_where_attention_takes_one_dtype():
    """Float32 embeddings make rotary tables float32, and these query and key; a cache hides it from who asks."""
    model = mixed("text", wide=("embed_tokens",))
    guard_leaves([model])
    ids = torch.tensor([[5, 6, 7]])
    if not static_cache_has_two_dtypes():  # no cache of transformers 5.24 hides it
        model(input_ids=ids, use_cache=True)
    with pytest.raises(RuntimeError, match="query, key, and value to have the same dtype"):
        model(input_ids=ids, use_cache=False)
    done = make_computable(model, frozenset({"bfloat16", "float32"}), asked(model))
    assert (done.error, [cast.name for cast in done.casts]) == (None, ["model.embed_tokens.weight"])


def test_vectors_are_narrowed_where_nothing_else_helps():
    model = frozen(Attention().to(BF16))
    model.norm.float()
    done = make_computable(model, frozenset({"bfloat16"}), asked(model))
    assert (done.error, [cast.name for cast in done.casts]) == (None, ["norm.weight"])


def test_what_no_layout_reaches_is_said_and_left_as_it_was_given():
    model = frozen(Attention(by_itself=True).to(BF16))
    model.q.float()
    before = {name: (p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    done = make_computable(model, frozenset({"bfloat16"}), asked(model))
    assert done.error is not None
    assert done.casts == ()
    assert {name: (p.dtype, p.data_ptr()) for name, p in model.named_parameters()} == before


def test_a_report_has_one_line_for_each_reason():
    lines = table(plan_layout(mixed(wide=("norm", "embed_tokens", "bias")), "bfloat16", vectors=True)).splitlines()
    assert lines == [
        "float32 -> bfloat16: 5 tensors (model.embed_tokens.weight, ...): matrices are bfloat16",
        "float32 -> bfloat16: 10 tensors (model.layers.0.self_attn.q_proj.bias, ...): the dtype of its module's "
        "matrix",
        "float32 -> bfloat16: 5 tensors (model.layers.0.input_layernorm.weight, ...): the model can compute only if "
        "vectors have the dtype of its matrices",
    ]

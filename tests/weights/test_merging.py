"""Adapters merged without touching the base, and what the merged files compute."""

import contextlib
import gc
import json
import warnings

import cells
import peft
import pytest
import torch
from cells import Cell
from live_bytes import LiveBytes
from packaging.version import Version
from peft import (
    HRAConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    XLoraConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from safe_trainers import PrecisionError, PrecisionWarning, tiny
from safe_trainers.core.errors import CheckpointError
from safe_trainers.model.inventory import bits
from safe_trainers.model.parts import unwrap
from safe_trainers.model.trial_forward import sample_inputs
from safe_trainers.weights.merge_and_save import CHECK_FILE, MergeCheck, merge_and_save, merged_weights
from safe_trainers.weights.merged import is_packed, weights_of


bnb = pytest.importorskip("bitsandbytes")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BASES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "nf4": (torch.bfloat16, NF4),
    "nested": (torch.float32, NF4 | {"bnb_4bit_use_double_quant": True}),
    "stored": (torch.float32, NF4 | {"bnb_4bit_quant_storage": torch.bfloat16}),
    "int8": (torch.float32, {"load_in_8bit": True}),
}
LINEAR = ["q_proj", "v_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": LINEAR}
METHODS = {
    "lora": LORA,
    "rslora": LORA | {"use_rslora": True},
    "dora": LORA | {"use_dora": True},
    "embedding": LORA | {"target_modules": ["embed_tokens", "q_proj"]},
    "head": LORA | {"target_modules": ["lm_head", "q_proj"]},
    "copy": LORA | {"modules_to_save": ["lm_head"]},
    "rows": LORA | {"trainable_token_indices": [5, 7]},
}
WO = "decoder.block.0.layer.2.DenseReluDense"
MERGES_SEVERAL_DORA = hasattr(LoraLayer, "_unmerged_base_weight")  # from PEFT 0.21 on
SECOND = METHODS["dora" if MERGES_SEVERAL_DORA else "rslora"]
IDS = torch.arange(5, 21).reshape(2, 8)  # (B, T)


def base_of(name, family="text"):
    dtype, packing = BASES[name]
    config = {} if packing is None else {"quantization_config": BitsAndBytesConfig(**packing)}
    return AutoModelForCausalLM.from_pretrained(cells.folder(family), dtype=dtype, **config)


def adapted(base, config, scale=1.0, second=None):
    """The base with an adapter that does something everywhere, also where PEFT starts from nothing."""
    torch.manual_seed(0)
    model = get_peft_model(base, config if not isinstance(config, dict) else LoraConfig(**config))
    if second is not None:
        model.add_adapter("second", LoraConfig(**second))
        model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".second." in name:
                parameter.data = parameter.data.float()  # PEFT 0.18 makes a second one as packed weights are stored
            if "lora_B" in name or "embedding_B" in name:
                parameter.mul_(scale)
            elif parameter.requires_grad and "lora_" not in name.replace("lora_magnitude", ""):
                parameter.add_(torch.randn_like(parameter) * 0.05 * scale)
    return model.train()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.double()


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def snapshot(model):
    """Every tensor that a model holds, statistics of packed ones included: which object, where, and its bytes."""
    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        found[name] = tensor
        state = getattr(tensor, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            found |= {
                f"{name}.{k}.{id(part)}": v for k, v in vars(part or nn.Identity()).items() if torch.is_tensor(v)
            }
        if getattr(tensor, "SCB", None) is not None:
            found[f"{name}.SCB"] = tensor.SCB
    return {name: (id(tensor), tensor.data_ptr(), bytes_of(tensor)) for name, tensor in found.items()}


def bookkeeping(model):
    """What PEFT keeps beside tensors, and the mode of each module."""
    kept = {}
    for name, module in model.named_modules():
        layer = isinstance(module, BaseTunerLayer)
        merged = (list(module.merged_adapters), dict(getattr(module, "_caches", {}))) if layer else None
        kept[name] = (id(module), type(module), module.training, merged)
    return kept


def assert_same(before, after):
    assert before.keys() == after.keys()
    moved = [name for name in before if before[name][:2] != after[name][:2]]
    changed = [name for name in before if not torch.equal(before[name][2], after[name][2])]
    assert (moved, changed) == ([], [])


# --- the base is not touched


@pytest.mark.parametrize("base", BASES)
def test_fifty_rounds_leave_every_byte_and_every_object_in_its_place(base):
    model = adapted(base_of(base), LORA | {"bias": "lora_only"}, second=SECOND | {"r": 2})
    before, kept = snapshot(model), bookkeeping(model)
    first = dict(merged_weights(model))
    for _ in range(50):
        last = dict(merged_weights(model))
    assert_same(before, snapshot(model))
    assert kept == bookkeeping(model)
    assert all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("base", ["bf16", "nf4", "int8"])
def test_stock_peft_leaves_another_base(base):
    model = adapted(base_of(base), LORA)
    before = {n: (bytes_of(p), p.data_ptr()) for n, p in model.named_parameters() if "base_layer.weight" in n}
    with warnings.catch_warnings(action="ignore"):
        for _ in range(50):
            model.merge_adapter()
            model.unmerge_adapter()
    after = {n: bytes_of(p) for n, p in model.named_parameters() if "base_layer.weight" in n}
    assert all((before[name][0] != after[name]).float().mean() > 0.05 for name in before)


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_consumer_that_stops_or_fails_leaves_nothing_behind(base):
    model = adapted(base_of(base), METHODS["dora"])
    before, kept = snapshot(model), bookkeeping(model)
    for steps in range(12):
        weights = merged_weights(model)
        for _ in range(steps):
            next(weights)
        weights.close()
    with contextlib.suppress(KeyError):
        for name, _ in merged_weights(model):
            if "v_proj" in name:
                raise KeyError(name)
    assert_same(before, snapshot(model))
    assert kept == bookkeeping(model)


def peak(layers):
    """The most bytes that were alive while a model was merged, and those of its largest layer in float32."""
    config = AutoConfig.from_pretrained(cells.folder("text"), num_hidden_layers=layers)
    model = adapted(LlamaForCausalLM(config).to(torch.bfloat16), LORA | {"target_modules": "all-linear"})
    gc.collect()
    with LiveBytes(model.parameters()) as live:
        for _ in merged_weights(model):
            pass
    return live.peak, max(p.numel() * 4 for n, p in model.named_parameters() if "base_layer" in n)


def test_beside_the_model_there_is_one_layer_however_many_it_has():
    (two, layer), (eight, _) = peak(2), peak(8)
    assert two == eight
    assert layer < two < 5 * layer  # the layer, its delta before and after scaling, its factors, what is handed out


# --- the merged weights


def exact(layer):
    """The weight that a layer computes with, in float64."""
    weight = layer.weight
    if not is_packed(layer):
        return weight.detach().double()
    if bits(layer) == 8:
        return weight.data.double() * weight.SCB.double()[:, None] / 127
    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()


def reference(layer, name="default"):
    """The merged weight of a LoRA layer in float64, by the formulas of the papers."""
    base = layer.get_base_layer()
    if name in layer.lora_embedding_A:
        a, b = layer.lora_embedding_A[name].double(), layer.lora_embedding_B[name].double()
        return exact(base) + layer.scaling[name] * (b @ a).T
    a, b = layer.lora_A[name].weight.double(), layer.lora_B[name].weight.double()
    merged = exact(base) + layer.scaling[name] * b @ a
    if name in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[name].weight.double()[:, None]
        merged = magnitude * merged / merged.norm(dim=1, keepdim=True)
    return merged.detach()


def assert_rounded_once(got, wanted):
    """The nearest number of the dtype, but for ties that float32's own rounding decides."""
    spacing = torch.finfo(got.dtype).eps * 2.0 ** wanted.abs().clamp(min=1e-30).log2().floor()
    float32 = 8 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert ((got.double() - wanted).abs() <= spacing / 2 + float32).all()
    if got.dtype != torch.float32:
        assert (got != wanted.to(got.dtype)).float().mean() < 2e-3


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4", "int8"])
def test_each_method_on_each_base_is_summed_exactly_and_rounded_once(base, method, dtype):
    model = adapted(base_of(base), METHODS[method])
    wanted = dict(base_of("fp32").state_dict())
    got = dict(merged_weights(model, dtype))
    assert list(got) == list(wanted)
    assert {n: w.shape for n, w in got.items()} == {n: w.shape for n, w in wanted.items()}
    target = {None: BASES[base][0], "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {w.dtype for w in got.values()} == {target}
    layers = {n.removeprefix("base_model.model."): m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert layers
    for name, layer in layers.items():
        assert_rounded_once(got[f"{name}.weight"], reference(layer))
    for name, module in unwrap(model).named_modules():
        if f"{name}.weight" in got and not isinstance(module, BaseTunerLayer) and not hasattr(module, "_adapters"):
            assert_rounded_once(got[f"{name}.weight"], exact(module))
    if method == "copy":
        copy = unwrap(model).lm_head.modules_to_save["default"].weight
        assert torch.equal(got["lm_head.weight"], copy.to(target))
        assert not torch.equal(copy, unwrap(model).lm_head.original_module.weight)
    if method == "rows":
        rows = unwrap(model).model.embed_tokens.token_adapter.trainable_tokens_delta["default"]
        embedding = unwrap(model).model.embed_tokens.original_module.weight.detach().clone().to(target)
        embedding[[5, 7]] = rows.detach().to(target)
        assert torch.equal(got["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4", "int8"])
def test_several_active_adapters_are_summed(base):
    model = adapted(base_of(base), LORA, second=LORA | {"r": 2, "target_modules": ["q_proj"]})
    layer = unwrap(model).model.layers[0].self_attn.q_proj
    got = dict(merged_weights(model, "fp32"))["model.layers.0.self_attn.q_proj.weight"]
    wanted = reference(layer) + reference(layer, "second") - exact(layer.get_base_layer())
    assert_rounded_once(got, wanted)
    model.base_model.set_adapter("second")
    assert_rounded_once(
        dict(merged_weights(model, "fp32"))["model.layers.0.self_attn.q_proj.weight"], reference(layer, "second")
    )


@pytest.mark.parametrize("base", ["bf16", "nf4", "int8"])
def test_biases_are_merged_with_their_scale(base):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(cells.folder("text"), attention_bias=True)
    source = LlamaForCausalLM(config)
    dtype, packing = BASES[base]
    quantised = {} if packing is None else {"quantization_config": BitsAndBytesConfig(**packing)}
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=source.state_dict(), dtype=dtype, **quantised
    )
    model = adapted(model, LORA | {"target_modules": ["q_proj"], "lora_bias": True})
    layer = unwrap(model).model.layers[0].self_attn.q_proj
    wanted = layer.base_layer.bias.double() + 2 * layer.lora_B["default"].bias.double()
    assert_rounded_once(dict(merged_weights(model))["model.layers.0.self_attn.q_proj.bias"], wanted.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_experts_and_a_router_beside_them(dtype):
    base = AutoModelForCausalLM.from_pretrained(cells.folder("gpt_oss"), dtype=dtype)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"]
    model = adapted(base, LORA | {"target_modules": ["q_proj"], "target_parameters": experts})
    got = dict(merged_weights(model))
    assert got.keys() == AutoModelForCausalLM.from_pretrained(cells.folder("gpt_oss")).state_dict().keys()
    outer = unwrap(model).model.layers[0].mlp.experts
    for layer in (outer, outer.base_layer):
        a, b = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
        count = layer.num_experts
        delta = torch.einsum("ore,eri->eio", b.reshape(b.shape[0], -1, count), a.reshape(count, -1, a.shape[-1]))
        wanted = layer.get_param().detach().double() + 2 * delta
        assert_rounded_once(got[f"model.layers.0.mlp.experts.{layer.parameter_name}"], wanted)


def test_convolutions_and_attention_with_packed_projections_of_a_tower():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.attention = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2)
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    names = list(net.state_dict())
    model = adapted(net, LORA | {"target_modules": ["conv", "attention"]})
    layer = unwrap(model).conv
    a, b = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
    inner = unwrap(model).attention
    fused = inner.base_layer.in_proj_weight.detach().double() + 2 * (
        inner.lora_B["default"].weight.double() @ inner.lora_A["default"].weight.double()
    )
    got = dict(merged_weights(model, "fp32"))
    assert sorted(got) == sorted(names)
    wanted = layer.base_layer.weight.detach().double() + 2 * torch.einsum("or,rikl->oikl", b[..., 0, 0], a)
    assert_rounded_once(got["conv.weight"], wanted)
    assert_rounded_once(got["attention.in_proj_weight"], fused.detach())
    buffers = {name: tensor.dtype for name, tensor in got.items() if name.startswith("norm.")}
    assert buffers["norm.running_mean"] == torch.bfloat16  # a buffer is handed out as it is held
    assert buffers["norm.num_batches_tracked"] == torch.int64
    merged = model.merge_and_unload().state_dict()
    assert (got["attention.out_proj.weight"] - merged["attention.out_proj.weight"].float()).abs().max() < 0.02


@pytest.mark.parametrize("family", ["llava", "aria", "qwen2_5_vl", "gemma3"])
def test_names_of_vision_language_models_are_the_base_models_own(family):
    base = tiny.build_model(family).to(torch.bfloat16)
    names = list(base.state_dict())
    assert list(dict(merged_weights(adapted(base, LORA | {"target_modules": "all-linear"})))) == names


def test_half_precision_adapters_are_multiplied_in_float32_where_stock_rounds_their_product():
    torch.manual_seed(0)
    model = get_peft_model(base_of("bf16"), LoraConfig(**LORA), autocast_adapter_dtype=False)
    layer = unwrap(model).model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.dtype == torch.bfloat16
    wanted = reference(layer)
    assert_rounded_once(dict(merged_weights(model))["model.layers.0.self_attn.q_proj.weight"], wanted)
    model.merge_adapter()
    assert (layer.get_base_layer().weight != wanted.to(torch.bfloat16)).float().mean() > 0.05


def test_weights_that_the_class_keeps_in_float32_are_kept(tmp_path):
    torch.manual_seed(0)
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    made = T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0, pad_token_id=0))
    made.save_pretrained(tmp_path / "t5")
    base = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", dtype=torch.float16)
    kept = {name for name, weight in base.state_dict().items() if weight.dtype == torch.float32}
    assert kept == {f"{side}.wo.weight" for side in ("encoder.block.0.layer.1.DenseReluDense", WO)}
    model = adapted(base, LORA | {"target_modules": ["q", "wo"], "task_type": "SEQ_2_SEQ_LM"})
    for dtype in (None, "fp16"):
        dtypes = {name: weight.dtype for name, weight in merged_weights(model, dtype)}
        assert {name for name, held in dtypes.items() if held == torch.float32} == kept
    check = merge_and_save(model, tmp_path / "merged", dtype="fp16")
    assert check.dtype == "float16"
    assert check.kl < 1e-3  # also of an encoder and a decoder, whose embeddings are all tied


def test_weights_that_nothing_changes_are_the_live_ones():
    model = adapted(base_of("bf16"), LORA)
    norm = unwrap(model).model.norm.weight
    got = dict(merged_weights(model))
    assert got["model.norm.weight"].data_ptr() == norm.data_ptr()
    assert not any(tensor.requires_grad for tensor in got.values())


def test_adapters_that_peft_merged_already_are_not_merged_twice():
    model = adapted(base_of("fp32"), LORA)
    wanted = dict(merged_weights(model))
    model.merge_adapter()
    got = dict(merged_weights(model))
    assert all(torch.allclose(got[name], wanted[name], rtol=0, atol=1e-7) for name in wanted)


def test_a_layer_that_was_evaluated_on_this_cpu_is_read_in_its_order():
    model = adapted(base_of("nested"), LORA)
    before = dict(merged_weights(model, "fp32"))
    logits(model.eval())
    layer = next(module for module in model.modules() if bits(module) == 4)
    repacked = getattr(layer.weight.quant_state, "packing_format_for_cpu", False)  # where the CPU has AVX512-BF16
    kept = snapshot(model)
    after = dict(merged_weights(model, "fp32"))
    assert_same(kept, snapshot(model))
    for name, weight in before.items():
        # bitsandbytes rounds its scales to bfloat16 when it packs for the CPU.
        bound = 2**-8 * weight.abs().max() if repacked else 0.0
        assert (after[name] - weight).abs().max() <= bound


# --- the files


@pytest.mark.parametrize("method", [*METHODS, "two", "ia3", "vera"])
@pytest.mark.parametrize("base", ["fp32", "nested", "stored", "int8"])
def test_in_float32_the_files_compute_what_the_live_model_does(base, method, tmp_path):
    if method == "ia3":
        config = IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"], init_ia3_weights=False)
    elif method == "vera":
        config = VeraConfig(target_modules=["q_proj", "v_proj"], r=4, d_initial=0.5)
    else:
        config = METHODS.get(method, SECOND)
    model = adapted(base_of(base), config, second=SECOND if method == "two" else None)
    # The rounding of float32 in a model of this size; ln 2 would be a factor of two.
    check = merge_and_save(model, tmp_path / "merged", dtype="fp32")
    assert check.max_difference < 1e-5
    assert check.mean_difference < 1e-6
    assert 0 <= check.kl < 1e-10
    assert check.top1_agreement == 1
    assert check.unchanged_share == 0

    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is LlamaForCausalLM
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert not hasattr(loaded.config, "quantization_config")
    assert (logits(base_of(base)) - logits(loaded)).abs().max() > 1e-2  # the base alone would be noticed


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_in_bfloat16_the_files_are_as_near_to_the_exact_model_as_the_live_one_is(base, tmp_path):
    model = adapted(base_of(base), LORA)
    check = merge_and_save(model, tmp_path / "merged")
    assert check.dtype == "bfloat16"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    exactly = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    exactly.load_state_dict(dict(merged_weights(model, "fp32")))
    truth = logits(exactly)
    for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        dropout.eval()
    assert (logits(merged) - truth).abs().mean() < 2 * (logits(model) - truth).abs().mean()


@pytest.mark.parametrize(
    ("base", "name"), [("bf16", "{}"), ("nf4", "dequantised nf4 of {}"), ("int8", "dequantised int8 of {}")]
)
def test_the_check_says_what_was_merged_into_what(base, name, tmp_path):
    model = adapted(base_of(base), LORA, second=METHODS["rslora"])
    model.peft_config["second"].base_model_name_or_path = "hub/another"
    check = merge_and_save(model, tmp_path / "merged", inputs={"input_ids": IDS})
    written = json.loads((tmp_path / "merged" / CHECK_FILE).read_text())
    assert written == check.to_dict()
    assert MergeCheck(**written) == check
    assert check.base == name.format(cells.folder("text"))
    assert check.adapters["default"]["base"] == str(cells.folder("text"))
    assert check.adapters["second"]["base"] == "hub/another"
    assert (check.adapters["second"]["r"], check.adapters["second"]["lora_alpha"]) == (4, 8)
    assert check.adapters["second"]["use_rslora"] is True
    assert check.inputs == "the inputs passed"
    text = str(check)
    assert text.startswith(f"default, second merged into {check.base}, in {check.dtype}\n")
    assert f"{check.unchanged_share:.1%} of the adapters' changes round to zero" in text


def test_the_numbers_of_the_check_are_those_of_the_two_models(tmp_path):
    model = adapted(base_of("bf16"), LORA)
    mask = torch.ones_like(IDS)
    mask[1, -3:] = 0
    check = merge_and_save(model, tmp_path / "merged", inputs={"input_ids": IDS, "attention_mask": mask})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    model.eval()
    with torch.no_grad():
        live, after = (m(input_ids=IDS, attention_mask=mask).logits.double().log_softmax(-1) for m in (model, merged))
    difference, divergence, same = [], [], []
    for row, last in ((0, 8), (1, 5)):
        for position in range(last - 1):
            p, q = live[row, position], after[row, position]
            token = IDS[row, position + 1]
            difference.append(abs(float(p[token] - q[token])))
            divergence.append(float((p.exp() * (p - q)).sum()))
            same.append(int(p.argmax() == q.argmax()))
    assert check.max_difference == pytest.approx(max(difference), rel=1e-6)
    assert check.mean_difference == pytest.approx(sum(difference) / 11, rel=1e-6)
    assert check.kl == pytest.approx(sum(divergence) / 11, rel=1e-6)
    assert check.top1_agreement == pytest.approx(sum(same) / 11)
    assert check.max_difference > 1e-4


@pytest.mark.parametrize(
    ("method", "tied"),
    [("lora", True), ("embedding", False), ("head", False), ("copy", False), ("rows", True)],
)
def test_tied_weights_stay_tied_only_where_the_adapter_keeps_them_equal(method, tied, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(cells.folder("text"), tie_word_embeddings=True)
    with warnings.catch_warnings(action="ignore"):  # PEFT's own, on tied layers
        model = adapted(LlamaForCausalLM(config), METHODS[method])
        check = merge_and_save(model, tmp_path / "merged")
    assert check.max_difference < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert loaded.config.tie_word_embeddings is tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert unwrap(model).config.tie_word_embeddings is True


@pytest.mark.skipif(
    Version(peft.__version__) < Version("0.19"), reason="this PEFT trains no token rows of a layer with LoRA"
)
def test_trained_token_rows_of_a_tied_head_get_its_lora_too_and_peft_loses_it(tmp_path):
    config = AutoConfig.from_pretrained(cells.folder("text"), tie_word_embeddings=True)
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # PEFT's own, on tied layers
        model = adapted(LlamaForCausalLM(config), METHODS["head"] | METHODS["rows"] | {"target_modules": ["lm_head"]})
        before, kept = snapshot(model), bookkeeping(model)
        check = merge_and_save(model, tmp_path / "merged")
        assert_same(before, snapshot(model))
        assert kept == bookkeeping(model)
        expected = logits(model)
        stock = logits(model.merge_and_unload(progressbar=False))
    assert (stock - expected).abs().max() > 0.1
    assert check.max_difference < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    assert loaded.config.tie_word_embeddings is False


@pytest.mark.parametrize("base", ["nf4", "int8", "bf16"])
def test_the_live_model_goes_on_training(base, tmp_path):
    model = adapted(base_of(base), LORA | {"lora_dropout": 0.5})
    before, kept, config = snapshot(model), bookkeeping(model), unwrap(model).config.to_dict()
    random = torch.get_rng_state()
    merge_and_save(model, tmp_path / "merged", dtype="fp32")
    assert torch.equal(random, torch.get_rng_state())
    assert kept == bookkeeping(model)
    after = snapshot(model)
    if base == "int8":  # its first forward pass moves its scales from the weight to the layer
        before, after = ({n: v for n, v in s.items() if not n.endswith("SCB")} for s in (before, after))
    assert_same(before, after)
    assert unwrap(model).config.to_dict() == config
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1.0)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trainable)
    optimizer.step()
    assert not torch.equal(
        bytes_of(trainable[0]), before[next(n for n, p in model.named_parameters() if p is trainable[0])][2]
    )


@pytest.mark.parametrize(("base", "flag"), [("fp32", "bf16"), ("nested", None)])
def test_a_trainers_model_is_merged_between_two_runs(base, flag, tmp_path):
    cell = Cell("text", "sft", "fp32", flag)
    given = cells.arguments(cell, cells.SAFE_CONFIG["sft"], steps=1, model_init_kwargs=None)
    given |= {"model": base_of(base), "peft_config": LoraConfig(r=4, target_modules=LINEAR)}
    trainer = cells.SAFE["sft"](**given)
    trainer.train()
    check = merge_and_save(trainer.model, tmp_path / "merged", dtype="fp32", processing_class=trainer.processing_class)
    assert check.max_difference < 1e-5  # the autocast of the run rounds a thousand times as much, in both models
    trained = {name: bytes_of(p) for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert not any(torch.equal(bytes_of(trainer.model.get_parameter(name)), held) for name, held in trained.items())


def test_a_model_that_needs_the_autocast_of_its_run_is_asked_in_it(tmp_path):
    from accelerate import Accelerator

    base = base_of("bf16")
    base.lm_head.float()  # as a score head that is trained in float32
    with pytest.raises(RuntimeError, match="dtype"):
        logits(base)
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(adapted(base, LORA))
    assert merge_and_save(model, tmp_path / "merged").kl < 1e-3


def test_a_pre_quantised_checkpoint_is_merged_under_the_names_of_the_hub(tmp_path):
    quantised = AutoModelForImageTextToText.from_pretrained(
        cells.folder("llava"), dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**NF4)
    )
    quantised.save_pretrained(tmp_path / "quantised")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "quantised")
    merge_and_save(adapted(base, LORA), tmp_path / "merged")
    from safetensors.torch import load_file

    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == (
        load_file(cells.folder("llava") / "model.safetensors").keys()
    )


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_adapters_of_a_vision_tower_are_compared_on_pictures(family, tmp_path):
    base = AutoModelForImageTextToText.from_pretrained(cells.folder(family))
    processor = AutoProcessor.from_pretrained(cells.folder(family))
    model = adapted(base, LORA | {"target_modules": "all-linear"})
    inputs = sample_inputs(processor)
    assert "pixel_values" in inputs
    check = merge_and_save(model, tmp_path / "merged", processing_class=processor, inputs=inputs)
    assert check.max_difference < 1e-5
    assert type(AutoProcessor.from_pretrained(tmp_path / "merged")) is type(processor)
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")) is type(base)


def test_scores_of_a_reward_model_are_compared_as_they_are(tmp_path):
    model = adapted(tiny.build_reward_model(), LORA | {"task_type": "SEQ_CLS"})
    check = merge_and_save(model, tmp_path / "merged")
    assert (check.compared, check.kl, check.top1_agreement) == ("scores", None, None)
    assert check.max_difference < 1e-5
    assert "scores differ by" in str(check)


def test_files_are_sharded_and_the_processor_is_beside_them(tmp_path):
    class Sharded(LlamaForCausalLM):
        def save_pretrained(self, folder, **kwargs):
            super().save_pretrained(folder, max_shard_size="100KB", **kwargs)

    tokenizer = AutoTokenizer.from_pretrained(cells.folder("text"))
    base = Sharded.from_pretrained(cells.folder("text"))
    base.generation_config.max_length = 77
    (tmp_path / "merged").mkdir()
    merge_and_save(adapted(base, LORA), tmp_path / "merged", processing_class=tokenizer)
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == base_of("fp32").num_parameters()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert loaded.generation_config.max_length == 77
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == tokenizer.get_vocab()


# --- what is lost


@pytest.mark.parametrize(("scale", "warned"), [(1.0, False), (0.001, True)])
def test_an_adapter_that_rounds_to_nothing_is_warned_of(scale, warned, tmp_path):
    model = adapted(base_of("bf16"), LORA, scale=scale)
    with warnings.catch_warnings(record=True, action="always") as caught:
        check = merge_and_save(model, tmp_path / "merged")
    found = [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]
    assert len(found) == warned
    assert check.unchanged_share == pytest.approx(lost_share(model), abs=0.002)
    if warned:
        assert check.unchanged_share > 0.7
        assert f"{check.unchanged_share:.0%} of the adapters' changes round to zero in bfloat16" in found[0]
        assert "dtype='float32'" in found[0]
        wide = merge_and_save(model, tmp_path / "wide", dtype="float32")
        assert wide.unchanged_share == 0


def lost_share(model):
    """The share, in float64."""
    lost = total = 0
    for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
        held, merged = exact(layer.get_base_layer()), reference(layer)
        lost += int((merged.to(torch.bfloat16) == held.to(torch.bfloat16)).sum())
        total += held.numel()
    return lost / total


def test_an_adapter_that_changes_nothing_loses_nothing(tmp_path):
    torch.manual_seed(0)
    # Reflections that undo each other: each weight is computed anew, and is what it was but for float32's rounding.
    model = get_peft_model(base_of("bf16"), HRAConfig(target_modules=LINEAR, r=4))
    weights = {weight.name: weight for weight in weights_of(model) if weight.before is not None}
    assert any(not torch.equal(weight.load(), weight.before().float()) for weight in weights.values())
    with warnings.catch_warnings(action="error", category=PrecisionWarning):
        assert merge_and_save(model, tmp_path / "merged").unchanged_share == 0


# --- what is refused


def refused(error, *ids):
    assert [problem.id for problem in error.value.problems] == list(ids)
    return str(error.value)


def prompted():
    return get_peft_model(base_of("fp32"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def prefixed():
    return get_peft_model(base_of("fp32"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def routed(tmp_path):
    adapted(base_of("fp32"), LORA).save_pretrained(tmp_path / "expert")
    base = base_of("fp32")
    base.config.use_cache = False  # X-LoRA asks for it
    config = XLoraConfig(hidden_size=base.config.hidden_size, adapters={"one": str(tmp_path / "expert")})
    return get_peft_model(base, config)


def offloaded():
    model = adapted(base_of("fp32"), LORA)
    unwrap(model).lm_head.to("meta")
    return model


@contextlib.contextmanager
def sharded():
    """A model over a process group of one process."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        yield fully_shard(adapted(base_of("fp32"), LORA), mesh=mesh)
    finally:
        torch.distributed.destroy_process_group()


def disabled():
    model = adapted(base_of("fp32"), LORA)
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize(
    ("make", "finding", "says"),
    [
        (lambda tmp_path: base_of("fp32"), "nothing-to-merge", "a LlamaForCausalLM\n"),
        (lambda tmp_path: disabled(), "nothing-to-merge", "whose adapters are disabled"),
        (lambda tmp_path: prompted(), "adapter-cannot-be-merged", "a PROMPT_TUNING adapter"),
        (lambda tmp_path: prefixed(), "adapter-cannot-be-merged", "a PREFIX_TUNING adapter"),
        (routed, "adapter-cannot-be-merged", "a XLORA adapter"),
        (
            lambda tmp_path: offloaded(),
            "adapter-cannot-be-merged",
            "lm_head.weight is sharded over processes or offloaded",
        ),
    ],
    ids=["no-adapter", "disabled", "prompt", "prefix", "xlora", "offloaded"],
)
def test_what_cannot_be_merged_is_refused_by_name(make, finding, says, tmp_path):
    model = make(tmp_path)
    with pytest.raises(PrecisionError) as error:
        next(merged_weights(model))
    assert says in refused(error, finding)
    with pytest.raises(PrecisionError):
        merge_and_save(model, tmp_path / "some" / "merged")
    assert not (tmp_path / "some").exists()
    assert not list(tmp_path.glob(".*"))


def test_several_dora_adapters_are_refused_where_peft_merges_them_into_another_model(monkeypatch):
    if MERGES_SEVERAL_DORA:
        monkeypatch.delattr(LoraLayer, "_unmerged_base_weight")  # a stand-in for PEFT 0.20
    one, two = (adapted(base_of("fp32"), METHODS["dora"], second=second) for second in (None, LORA))
    assert next(merged_weights(one))
    with pytest.raises(PrecisionError, match="several active adapters, 'default' among them with DoRA") as error:
        next(merged_weights(two))
    refused(error, "adapter-cannot-be-merged")


def test_sharded_weights_are_refused():
    with (
        sharded() as model,
        pytest.raises(PrecisionError, match=r"model\.embed_tokens\.weight is sharded over processes") as error,
    ):
        next(merged_weights(model))
    refused(error, "adapter-cannot-be-merged")


def test_what_peft_cannot_merge_is_refused_with_what_it_says(tmp_path):
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    model = get_peft_model(net, LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    with pytest.raises(PrecisionError, match=r"on 0\n.*PEFT reports: Merging is not supported for _ConvNd") as error:
        list(merged_weights(model))
    refused(error, "adapter-cannot-be-merged")


def test_an_unknown_dtype_is_refused_before_anything_is_done(tmp_path):
    model = adapted(base_of("fp32"), LORA)
    for wrong in ("fp8", "auto", torch.float64):
        with pytest.raises(PrecisionError) as error:
            merge_and_save(model, tmp_path / "merged", dtype=wrong)
        refused(error, "unknown-dtype")
        with pytest.raises(PrecisionError):
            next(merged_weights(model, wrong))
    assert not list(tmp_path.iterdir())


class Failing:
    """A processor that fails when it is saved, as on a full disk."""

    def save_pretrained(self, folder):
        raise OSError(28, "No space left on device")


class Damaging:
    """Something that writes into the folder after the weights."""

    def save_pretrained(self, folder):
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] += 1e-3
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_nothing_behind(existing, tmp_path):
    model = adapted(base_of("fp32"), LORA)
    before, kept = snapshot(model), bookkeeping(model)
    output = tmp_path / "runs" / "merged"
    if existing:
        output.mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        merge_and_save(model, output, processing_class=Failing())
    with pytest.raises(CheckpointError, match=r"model.norm.weight has other values") as error:
        merge_and_save(model, output, processing_class=Damaging())
    refused(error, "merge-not-kept")
    unwrap(model).model.layers[0].mlp.down_proj.base_layer.weight.data[0, 0] = 1e5
    with pytest.raises(PrecisionError, match=r"model.layers.0.mlp.down_proj.weight contains 100,000") as error:
        merge_and_save(model, output, dtype="fp16")
    refused(error, "merged-weights-overflow")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == (["runs", "runs/merged"] if existing else [])
    unwrap(model).model.layers[0].mlp.down_proj.base_layer.weight.data.copy_(
        base_of("fp32").model.layers[0].mlp.down_proj.weight
    )
    assert_same(before, snapshot(model))
    assert kept == bookkeeping(model)
    assert merge_and_save(model, output, dtype="fp16").dtype == "float16"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_folder_that_holds_something_is_not_written_into(kind, tmp_path):
    model = adapted(base_of("fp32"), LORA)
    output = tmp_path / "merged"
    if kind == "folder":
        output.mkdir()
    kept = output / "kept.txt" if kind == "folder" else output
    kept.write_text("mine")
    with pytest.raises(CheckpointError) as error:
        merge_and_save(model, output)
    assert f"output_dir={str(output)!r}" in refused(error, "output-not-empty")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [kept.name]
    assert kept.read_text() == "mine"


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        merge_and_save(adapted(base_of("fp32"), LORA), ".")
    assert "output_dir='.'" in refused(error, "output-is-working-folder")
    assert not list(tmp_path.iterdir())
    merge_and_save(adapted(base_of("fp32"), LORA), "merged")
    assert (tmp_path / "merged" / CHECK_FILE).is_file()


@pytest.mark.parametrize("tokens", ["one", "padded", "alternating"])
def test_inputs_without_a_next_token_are_refused_before_anything_is_written(tokens, tmp_path):
    mask = torch.zeros_like(IDS)
    mask[:, :: 2 if tokens == "alternating" else 8] = 1  # one real token a row, or none beside another
    inputs = {"input_ids": IDS[:, :1]} if tokens == "one" else {"input_ids": IDS, "attention_mask": mask}
    with pytest.raises(CheckpointError) as error:
        merge_and_save(adapted(base_of("fp32"), LORA), tmp_path / "merged", inputs=inputs)
    refused(error, "nothing-to-compare")
    assert not list(tmp_path.iterdir())


def test_what_is_predicted_from_padding_is_not_counted(tmp_path):
    model = adapted(base_of("bf16"), LORA)
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0  # of 8 tokens, padded on the left
    inputs = {"input_ids": IDS, "attention_mask": mask}
    check = merge_and_save(model, tmp_path / "merged", inputs=inputs)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    model.eval()
    with torch.no_grad():
        live, after = (m(**inputs).logits.double().log_softmax(-1)[:, 5:7] for m in (model, merged))  # (2, 2, V)
    next_tokens = IDS[:, 6:, None]
    difference = (live - after).gather(-1, next_tokens).abs()
    assert check.mean_difference == pytest.approx(difference.mean().item(), rel=1e-6)
    assert check.kl == pytest.approx((live.exp() * (live - after)).sum(-1).mean().item(), rel=1e-6)


def test_a_model_that_is_not_its_class_any_more_is_refused(tmp_path):
    base = base_of("fp32")
    base.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"does not have the same weights as this model, such as extra.bias"):
        merge_and_save(adapted(base, LORA), tmp_path / "merged")
    assert not list(tmp_path.iterdir())

"""Layers of other quantisers than bitsandbytes: what they compute is measured, and they train as with stock TRL."""

import random
from types import SimpleNamespace

import cells
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, TrainerCallback

import safe_trainers
from safe_trainers import PrecisionError, tiny
from safe_trainers.model.inventory import quantization_method, take_inventory
from safe_trainers.model.packed_layers import packed_layers, rewritten_layers, try_layer, unpack
from safe_trainers.model.parts import find_parts, floating_parameters, holds_packed, is_quantized, wraps_tensors
from safe_trainers.rollout import vllm
from safe_trainers.weights.bitsandbytes import plan
from safe_trainers.weights.merged import unmergeable
from safe_trainers.weights.quantized_layers import AS_LOADED, CAST_INPUTS, IN_FLOAT32, apply, measure, refusals
from upstream import why_not_built


IDS = torch.arange(5, 21).reshape(2, 8)  # (B, T)


class PackedLinear(nn.Linear):
    """A linear layer with int8 weights and one scale for each output. Subclasses differ in what they compute."""

    @classmethod
    def of(cls, layer):
        packed = cls(1, 1, bias=False)
        packed.in_features, packed.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        packed.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        packed.register_buffer("scale", scale)
        return packed

    def dequantised(self, dtype):
        return self.weight.to(dtype) * self.scale.to(dtype)

    def forward(self, x):
        return functional.linear(x, self.dequantised(x.dtype))


class RoundsInputs(PackedLinear):
    def forward(self, x):
        step = x.detach().abs().amax(-1, keepdim=True) / 127
        return super().forward((x / step).round() * step)


class HalfGradient(PackedLinear):
    def forward(self, x):
        return super().forward(x / 2 + x.detach() / 2)


class Nan(PackedLinear):
    def forward(self, x):
        return super().forward(x) / 0 * 0


class OnlyInItsDtype(PackedLinear):
    """As quanto's: the scale decides the dtype."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return functional.linear(x, self.dequantised(self.scale.dtype))


class OnlyBfloat16(PackedLinear):
    def forward(self, x):
        if x.dtype != torch.bfloat16:
            raise RuntimeError(f"this kernel multiplies bfloat16, got {x.dtype}")
        return super().forward(x)


class InBuffers(nn.Module):
    """As GPTQ's layers: no parameter, and no subclass of `nn.Linear`."""

    def __init__(self, layer):
        super().__init__()
        packed = PackedLinear.of(layer)
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.register_buffer("qweight", packed.weight.data)
        self.register_buffer("scales", packed.scale)

    def forward(self, x):
        return functional.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


class Wrapped(torch.Tensor):
    """A packed tensor as those of torchao: a wrapper with the dtype of its scale."""

    @staticmethod
    def __new__(cls, packed, scale):
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype)

    def __init__(self, packed, scale):
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self):
        return ["packed", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(function)


def quantise(model, kind, names="proj"):
    """Replaces linear layers as a quantiser of transformers does, and declares it."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and names in name:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, kind.of(layer) if hasattr(kind, "of") else kind(layer))
    config = SimpleNamespace(quant_method="rounding", to_dict=dict)
    model.hf_quantizer = SimpleNamespace(quantization_config=config, is_trainable=True, is_qat_trainable=False)
    return model


def loaded(dtype="fp32", kind=PackedLinear):
    return quantise(AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=cells.SHORT[dtype]), kind)


class FirstGradient(TrainerCallback):
    def __init__(self):
        self.gradient = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.gradient is None:
            grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            self.gradient = torch.cat(grads) if grads else torch.zeros(1)


def train(model, flag, task="sft", safe=False, steps=3, **changes):
    """Trains LoRA on a quantised model; the trainer and its first gradient."""
    torch.manual_seed(0)
    cell = cells.Cell("text", task, "fp32", flag, lora=True)
    made = {"reward_funcs": cells.token_reward} if task == "grpo" else {}
    first = FirstGradient()
    trainer = (cells.SAFE if safe else cells.STOCK)[task](
        model=model,
        args=(cells.SAFE_CONFIG if safe else cells.PLAIN)[task](**cells.settings(cell, steps, **changes)),
        train_dataset=cells.dataset(task, "text"),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[first],
        **made,
    )
    try:
        trainer.train()
    except RuntimeError:
        cells.reset_autocast()
        raise
    return trainer, first.gradient


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def trained(trainer):
    """Whether the second factors, which start at 0, have changed."""
    return all(bool(p.any()) for name, p in adapters(trainer).items() if "lora_B" in name)


def assert_equal_runs(stock, safe):
    assert losses(stock) == losses(safe)
    for name, p in adapters(stock).items():
        assert torch.equal(p, adapters(safe)[name]), name


def cosine(left, right):
    return functional.cosine_similarity(left, right, dim=0).item()


# ---- What a layer computes ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", [PackedLinear, InBuffers, nn.Linear])
def test_the_gradient_of_an_affine_layer_is_found_to_be_right(kind, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(48, 64, dtype=torch.float32 if kind is not nn.Linear else getattr(torch, dtype))
    layer = layer if kind is nn.Linear else kind.of(layer) if hasattr(kind, "of") else kind(layer)
    trial = try_layer(layer, dtype, None)
    assert trial.trains
    assert trial.output == dtype
    assert trial.slope == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "slope", "says"),
    [
        (RoundsInputs, 0.0, "exactly 0"),
        (HalfGradient, pytest.approx(0.5, abs=1e-3), "0.50 times"),
        (Nan, None, "NaN or infinity"),
        (OnlyBfloat16, None, "RuntimeError: this kernel multiplies bfloat16"),
    ],
)
def test_what_a_layer_computes_wrongly_is_measured(kind, slope, says):
    torch.manual_seed(0)
    trial = try_layer(kind.of(nn.Linear(48, 64)), "float32", None)
    assert not trial.trains
    assert trial.slope == slope
    assert says in str(trial)


def test_a_packed_weight_without_its_scales_is_not_taken_for_a_weight():
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, 16)).isfinite().all()  # stock PyTorch multiplies with it
    assert "without its scales" in try_layer(layer, "bfloat16", "bfloat16").error


def test_a_layer_is_asked_without_changing_the_run():
    model = get_peft_model(loaded(), LoraConfig(r=4, target_modules=["q_proj"])).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    (group,) = measure(model, "bfloat16", "bfloat16")
    assert len(group.names) == 7
    assert "base_layer" not in "".join(group.names)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()
    assert all(p.grad is None for p in model.parameters())
    assert not torch.is_autocast_enabled("cpu")


def test_a_layer_on_the_meta_device_is_not_asked():
    with torch.device("meta"):
        layer = PackedLinear(4, 4)
    assert try_layer(layer, "float32", None) is None


# ---- What counts as packed ----


def test_wrapped_tensors_are_packed_and_those_of_torch_are_not():
    packed = Wrapped(torch.zeros(4, 4, dtype=torch.int8), torch.ones(4, 1))
    assert packed.dtype == torch.float32
    assert is_quantized(packed)
    assert is_quantized(nn.Parameter(packed, requires_grad=False))
    assert not wraps_tensors(DTensor)
    assert not is_quantized(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    assert not is_quantized(nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)))


def test_packed_buffers_count_in_models_of_a_quantiser_only():
    layer = InBuffers(nn.Linear(8, 8))
    assert holds_packed(layer, in_buffers=True)
    assert not holds_packed(layer, in_buffers=False)
    positions = nn.Embedding(4, 4)
    positions.register_buffer("position_ids", torch.arange(4)[None])
    assert not holds_packed(positions, in_buffers=True)
    masked = nn.Module()
    masked.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
    assert not holds_packed(masked, in_buffers=True)


@pytest.mark.parametrize("kind", [PackedLinear, InBuffers])
def test_the_inventory_names_the_quantiser(kind):
    model = loaded("bf16", kind)
    assert quantization_method(model) == take_inventory(model).quantization == "rounding"
    assert {p.dtype for p in floating_parameters(model)} == {torch.bfloat16}
    model.hf_quantizer.quantization_config.dequantize = True
    assert quantization_method(model) is None or kind is InBuffers
    plain = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    plain.hf_quantizer = model.hf_quantizer
    assert quantization_method(plain) is None
    assert measure(plain, "float32", None) == ()


def test_the_scales_of_a_packed_layer_keep_their_dtype():
    model = loaded("bf16")
    changes = plan(model, "float16", trained=False).changes
    assert {change.source for change in changes} == {"bfloat16"}
    assert not [change.name for change in changes if "scale" in change.name]
    assert [change.name for change in changes if "norm" in change.name]


# ---- How such layers take part in a run ----


@pytest.mark.parametrize(
    ("kind", "dtype", "compute", "autocast", "treatment"),
    [
        (PackedLinear, "bf16", "float16", "float16", AS_LOADED),
        (PackedLinear, "fp32", "float32", None, AS_LOADED),
        (InBuffers, "fp32", "bfloat16", "bfloat16", AS_LOADED),
        (OnlyInItsDtype, "bf16", "bfloat16", None, AS_LOADED),
        (OnlyInItsDtype, "fp32", "bfloat16", "bfloat16", IN_FLOAT32),
        (OnlyInItsDtype, "fp32", "bfloat16", None, IN_FLOAT32),
        (OnlyInItsDtype, "bf16", "float16", "float16", None),
        (OnlyBfloat16, "fp32", "bfloat16", "bfloat16", CAST_INPUTS),
        (RoundsInputs, "fp32", "bfloat16", "bfloat16", None),
        (Nan, "fp32", "float32", None, None),
    ],
)
def test_the_treatment_follows_from_what_is_measured(kind, dtype, compute, autocast, treatment):
    model = loaded(dtype, kind)
    (group,) = measure(model, compute, autocast)
    assert group.treatment == treatment
    problems = list(refusals(model, [group], compute, autocast))
    assert [problem.id for problem in problems] == ["quantised-layers-do-not-train"] * (treatment is None)


def test_the_fix_names_the_dtype_in_which_the_layers_compute():
    model = loaded("bf16", OnlyInItsDtype)
    (problem,) = refusals(model, measure(model, "float16", "float16"), "float16", "float16")
    assert "7 layers of OnlyInItsDtype, such as model.layers.0.self_attn.q_proj" in problem.what
    assert "for float16 inputs under float16 autocast, RuntimeError" in problem.why
    assert "loaded with `dtype='float16'`, or train in bfloat16 with `bf16=True`" in str(problem.fix)


def test_layers_without_adapters_before_them_need_no_gradient():
    if why_not_built("llava"):
        pytest.skip(str(why_not_built("llava")))
    model = quantise(tiny.build_model("llava"), RoundsInputs, names="vision_tower")
    model.requires_grad_(False)
    (group,) = measure(model, "float32", None)
    assert group.treatment == AS_LOADED
    tower = next(module for name, module in find_parts(model).towers.items() if "vision" in name)
    next(floating_parameters(tower)).requires_grad_(True)
    (group,) = measure(model, "float32", None)
    assert group.treatment is None
    assert [group.treatment for group in measure(model, "float32", None, trained=False)] == [AS_LOADED]


def test_weights_that_the_first_forward_pass_unpacks_are_unpacked_before_they_are_measured():
    """As with compressed-tensors."""
    model = loaded()
    model.hf_quantizer.quantization_config.quant_method = "compressed"

    def decompress(base, args, kwargs):
        for layer in base.modules():
            if isinstance(layer, PackedLinear):
                layer.weight = nn.Parameter(layer.dequantised(torch.float32), requires_grad=False)
                layer.forward = lambda x, layer=layer: functional.linear(x.round() if rounds else x, layer.weight)

    for rounds in (False, True):
        model = loaded()
        model.register_forward_pre_hook(decompress, with_kwargs=True)
        unpack(model)
        assert not list(packed_layers(model))
        assert len(list(rewritten_layers(model))) == 7
        assert quantization_method(model) is None
        assert {group.treatment for group in measure(model, "float32", None)} == {None if rounds else AS_LOADED}


def test_what_vllm_and_merging_refuse():
    model = loaded()
    (problem,) = vllm.refusals(model, None, colocated=True)
    assert problem.id == "vllm-holds-packed-weights"
    (problem,) = vllm.refusals(model, None, colocated=True, fsdp=True)
    assert problem.id == "fsdp-sends-packed-weights"
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    assert not list(vllm.refusals(adapted, None, colocated=True))
    problem = unmergeable(adapted)
    assert problem.id == "adapter-cannot-be-merged"
    assert "quantised by rounding" in problem.what


# ---- Runs ----


@pytest.mark.parametrize("task", ["sft", "grpo"])
@pytest.mark.parametrize(("dtype", "flag"), [("fp32", None), ("fp32", "bf16"), ("bf16", None), ("bf16", "bf16")])
def test_what_stock_trains_rightly_trains_with_the_same_numbers(dtype, flag, task):
    stock, first = train(loaded(dtype), flag, task)
    safe, ours = train(loaded(dtype), flag, task, safe=True)
    assert trained(safe)
    assert torch.equal(first, ours)
    assert_equal_runs(stock, safe)


def test_a_gradient_of_zero_is_refused_where_stock_trains_nothing():
    stock, _ = train(loaded(kind=RoundsInputs), "bf16")
    assert not trained(stock)
    assert all(entry["grad_norm"] == 0 for entry in stock.state.log_history if "grad_norm" in entry)
    with pytest.raises(PrecisionError, match="quantised-layers-do-not-train") as caught:
        train(loaded(kind=RoundsInputs), "bf16", safe=True)
    assert "exactly 0" in str(caught.value)


def test_layers_that_compute_nan_are_refused():
    with pytest.raises(PrecisionError, match="NaN or infinity"):
        train(loaded(kind=Nan), "bf16", safe=True)


@pytest.mark.parametrize("kind", [OnlyInItsDtype, OnlyBfloat16])
def test_layers_that_fail_in_the_dtype_of_the_run_compute_in_another(kind):
    with pytest.raises(RuntimeError):
        train(loaded(kind=kind), "bf16")
    safe, gradient = train(loaded(kind=kind), "bf16", safe=True)
    assert trained(safe)
    _, exact = train(AutoModelForCausalLM.from_pretrained(cells.folder("text")), None)
    assert cosine(gradient, exact) > 0.99
    (group,) = safe.precision.weights.layers
    assert group.treatment == (IN_FLOAT32 if kind is OnlyInItsDtype else CAST_INPUTS)
    assert group.treatment in str(safe.precision.weights)
    assert group.treatment in str(safe.precision.report)


def test_fp32_modules_that_contain_packed_layers_are_measured_in_float32():
    safe, _ = train(loaded(), "bf16", safe=True, fp32_modules=["*.mlp"])
    assert trained(safe)
    found = {(len(group.names), group.trial.dtype): group.treatment for group in safe.precision.weights.layers}
    assert set(found.values()) == {AS_LOADED}
    assert {dtype for _, dtype in found} == {"float32", "bfloat16"}


def test_a_reference_model_of_the_same_quantiser_is_prepared_too():
    model = loaded(kind=OnlyInItsDtype)
    apply(model, measure(model, "bfloat16", "bfloat16", trained=False), "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(input_ids=IDS).logits.isfinite().all()


# ---- Real quantisers, where they are installed ----


def torchao_config(name):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


def quanto_config(name):
    pytest.importorskip("optimum.quanto")
    from transformers import QuantoConfig

    return QuantoConfig(weights=name)


REAL = {
    "torchao-int8": (torchao_config, "Int8WeightOnlyConfig"),
    "torchao-float8": (torchao_config, "Float8WeightOnlyConfig"),
    "quanto-int8": (quanto_config, "int8"),
    "quanto-float8": (quanto_config, "float8"),
    "quanto-int4": (quanto_config, "int4"),
}


def real(name, dtype):
    make, argument = REAL.get(name, (torchao_config, name))
    return AutoModelForCausalLM.from_pretrained(
        cells.folder("text"), dtype=cells.SHORT[dtype], quantization_config=make(argument), device_map="cpu"
    )


def real_cells():
    """One flag for each quantiser and dtype always, all with `make matrix`."""
    flags, always = [None, "bf16", "fp16"], 0
    for name in REAL:
        for dtype in cells.SHORT:
            for number, flag in enumerate(flags):
                marks = () if number == always % len(flags) else (pytest.mark.matrix,)
                yield pytest.param(name, dtype, flag, id=f"{name}-{dtype}-{flag}", marks=marks)
            always += 1


@pytest.mark.parametrize(("name", "dtype", "flag"), real_cells())
def test_real_quantisers_train_as_with_stock_or_are_refused(name, dtype, flag):
    _, exact = train(AutoModelForCausalLM.from_pretrained(cells.folder("text")), None)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    other = flag is not None and dtype != "fp32" and dtype != flag
    stock = refused = None
    try:
        stock, first = train(real(name, dtype), flag)
    except RuntimeError:
        cells.reset_autocast()
    try:
        safe, gradient = train(real(name, dtype), flag, safe=True)
    except PrecisionError as error:
        refused = str(error)
    if stock is None and refused is not None:
        assert "quantised-layers-do-not-train" in refused
        assert half.keys() >= {dtype, flag}  # scales in one half dtype, a run in the other
        return
    assert refused is None
    assert trained(safe)
    assert cosine(gradient, exact) > (0.98 if name == "quanto-int4" else 0.998)
    if stock is not None and not other:
        assert torch.equal(first, gradient)
        assert_equal_runs(stock, safe)


@pytest.mark.parametrize("name", ["torchao-int8", "quanto-int8"])
def test_real_quantisers_train_with_grpo(name):
    stock, first = train(real(name, "bf16"), "bf16", "grpo")
    safe, ours = train(real(name, "bf16"), "bf16", "grpo", safe=True)
    assert torch.equal(first, ours)
    assert_equal_runs(stock, safe)


def test_torchao_with_rounded_inputs_is_refused():
    name = "Int8DynamicActivationInt8WeightConfig"
    stock, _ = train(real(name, "bf16"), "bf16")
    assert not trained(stock)
    with pytest.raises(PrecisionError, match="exactly 0"):
        train(real(name, "bf16"), "bf16", safe=True)


def compressed(folder, kind, activations):
    """A checkpoint of compressed-tensors with int8 or float8 weights, and inputs that are rounded or not."""
    ct = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    layout = "int-quantized" if kind == "int" else "float-quantized"
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
    scheme = ct.QuantizationScheme(
        targets=["Linear"],
        weights=ct.QuantizationArgs(num_bits=8, type=kind, strategy="channel"),
        input_activations=ct.QuantizationArgs(**inputs) if activations else None,
    )
    config = ct.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format=layout, quantization_status="frozen"
    )
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    ct.apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            largest = layer.weight.detach().float().abs().amax(1, keepdim=True)
            layer.weight_scale.data = (largest / (127 if kind == "int" else 448)).to(layer.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=layout)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    AutoTokenizer.from_pretrained(cells.folder("text")).save_pretrained(folder)
    return folder


def test_compressed_tensors_with_whole_inputs_train_as_with_stock(tmp_path):
    folder = compressed(tmp_path, "int", activations=False)
    stock, first = train(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), "bf16")
    safe, ours = train(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), "bf16", safe=True)
    assert trained(safe)
    assert torch.equal(first, ours)
    assert_equal_runs(stock, safe)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors_with_rounded_inputs_are_refused_with_the_line_that_dequantises(tmp_path, kind):
    folder = compressed(tmp_path, kind, activations=True)
    stock, _ = train(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), "bf16")
    assert not trained(stock)
    with pytest.raises(PrecisionError, match="exactly 0") as caught:
        train(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), "bf16", safe=True)
    assert "CompressedTensorsConfig(dequantize=True)" in str(caught.value)
    config = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    assert trained(train(model, "bf16", safe=True)[0])


def test_a_torchao_model_by_name_is_trained_saved_and_resumed(tmp_path):
    config = torchao_config("Int8WeightOnlyConfig")

    def run(steps, **resume):
        torch.manual_seed(0)
        cell = cells.Cell("text", "sft", "bf16", "bf16", lora=True)
        changes = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "max_steps": steps}
        loading = {"dtype": "bfloat16", "quantization_config": config, "device_map": "cpu"}
        trainer = safe_trainers.SafeSFTTrainer(
            model=str(cells.folder("text")),
            args=safe_trainers.SafeSFTConfig(**cells.settings(cell, **changes, model_init_kwargs=loading)),
            train_dataset=cells.dataset("sft", "text"),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        )
        trainer.train(**resume)
        return trainer

    whole = run(4)
    resumed = run(4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, p in adapters(whole).items():
        assert torch.equal(p, adapters(resumed)[name]), name
    assert "Int8Tensor in bfloat16" in str(whole.precision.report)
    base = real("torchao-int8", "bf16")
    restored = PeftModel.from_pretrained(base, tmp_path / "checkpoint-4").eval()
    whole.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(restored(input_ids=IDS).logits, whole.model(input_ids=IDS).logits)

"""What an engine is told, and what it cannot do: by plain values and real models, in one process.

Two real processes under each engine: tests/distributed.
"""

from types import SimpleNamespace

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp._flat_param import FlatParamHandle
from transformers import AutoModelForCausalLM
from transformers.training_args import ParallelMode

from safe_trainers import PrecisionError
from safe_trainers.policy import distributed as engines
from safe_trainers.policy.distributed import (
    engine_conflicts,
    engine_copies,
    flat_units,
    fsdp_version,
    mixed_dtype_units,
)


LAYERS = {"LlamaDecoderLayer"}


def build(safe=True, **changes):
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)["sft"]
    trainer = (cells.SAFE if safe else cells.STOCK)["sft"]
    return trainer(**cells.arguments(Cell("text", "sft", "fp32", "bf16"), config, 1, **changes))


# ---- The launcher's precision ----


@pytest.mark.skipif(
    not hasattr(cells.PLAIN["sft"]("out", use_cpu=True, bf16=False), "mixed_precision"),
    reason="transformers 4 overwrites the launcher's variable",
)
def test_a_launch_config_with_another_precision_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(PrecisionError) as refused:
        build()
    assert str(refused.value) == (
        "1 problem with the precision of this run:\n"
        "- mixed_precision='fp16' in the accelerate config (ACCELERATE_MIXED_PRECISION)\n"
        "  why: the run computes in bfloat16 (bf16=True) and ignores the launcher's setting, which contradicts it.\n"
        "  fix: drop `mixed_precision` from the accelerate config, or unset ACCELERATE_MIXED_PRECISION; the run's own "
        "settings choose its precision  [launched-with-another-precision]"
    )


@pytest.mark.skipif(
    not hasattr(cells.PLAIN["sft"]("out", use_cpu=True, bf16=False), "mixed_precision"),
    reason="transformers 4 overwrites the launcher's variable",
)
@pytest.mark.parametrize("said", ["fp8", "bogus"])
def test_a_precision_that_no_run_can_have_is_not_recommended(said, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", said)
    with pytest.raises(PrecisionError) as refused:
        build()
    (problem,) = refused.value.problems
    assert said in problem.what
    assert said not in str(problem.fix)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")  # as the fix says
    assert build().precision.engine.summary is None


def test_stock_computes_in_the_other_one_and_says_nothing(monkeypatch, recwarn):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert build(safe=False).accelerator.mixed_precision == "bf16"
    assert not [warning for warning in recwarn if "precision" in str(warning.message)]


@pytest.mark.parametrize("said", ["no", "bf16"])
def test_a_launch_config_that_agrees_or_says_nothing_is_fine(said, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", said)
    assert build().precision.engine.summary is None


# ---- DeepSpeed ----


def arguments(**settings):
    return cells.SAFE_CONFIG["sft"]("out", use_cpu=True, report_to=[], **settings)


def problems(args):
    """What is refused of arguments under DeepSpeed, which is not installed where these tests run."""
    policy = SimpleNamespace(autocast=SimpleNamespace(value=None, reason=""), compute=SimpleNamespace(value="fp16"))
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    return [problem.id for problem in engine_conflicts(args, policy)]


def test_deepspeeds_own_loss_scaling_against_ours():
    assert problems(arguments(fp16=True)) == []
    assert problems(arguments(fp16=True, loss_scale_init=1024.0)) == ["deepspeed-scales-the-loss"]
    assert problems(arguments(bf16=True, loss_scale_init=1024.0)) == []


def test_deepspeed_has_no_float32_modules_in_half_precision():
    assert problems(arguments(bf16=True, fp32_modules=["lm_head"])) == ["deepspeed-casts-every-weight"]
    assert problems(arguments(precision="fp32", fp32_modules=["lm_head"])) == []


def test_what_deepspeed_copies():
    args = arguments(bf16=True)
    assert engine_copies(args) is None
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    assert engine_copies(args) == "bfloat16"


# ---- FSDP ----


def test_which_fsdp_is_asked_for(monkeypatch):
    args = SimpleNamespace(parallel_mode=ParallelMode.DISTRIBUTED, fsdp_plugin_args=None)
    assert fsdp_version(args) is None
    args.fsdp_plugin_args = {"fsdp_version": 2}  # `fsdp=True` of the arguments
    assert fsdp_version(args) == 2
    args.fsdp_plugin_args = None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # accelerate's launcher
    assert fsdp_version(args) == 1
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert fsdp_version(args) == 2
    args.parallel_mode = ParallelMode.NOT_PARALLEL
    assert fsdp_version(args) is None


def plugin(**changes):
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", **changes)


def accelerator_with(plugin):
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), num_processes=2, autocast_handler=None)


def test_fsdp2_is_told_to_gather_what_is_held(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    made = plugin(fsdp_version=2)
    made.set_mixed_precision("bf16")
    stock = made.mixed_precision_policy
    assert {stock.param_dtype, stock.reduce_dtype, stock.output_dtype} == {torch.bfloat16}
    accelerator = accelerator_with(made)
    engine = engines.configure(accelerator)
    policy = made.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, torch.float32, None)
    assert not policy.cast_forward_inputs
    assert accelerator.autocast_handler.cache_enabled is False
    assert [name for name, _ in engine.choices()] == [
        "gathered weights", "gradient sums", "engine's inputs", "engine's outputs",
    ]  # fmt: skip
    assert str(engine).startswith("FSDP2, 2 processes\ngathered weights: as stored: ")
    assert engine.to_dict()["gradient sums"]["value"] == "float32"


def model_in(dtype, *, float32=()):
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype)
    for name, parameter in model.named_parameters():
        if any(part in name for part in float32):
            parameter.data = parameter.data.float()
    return model


def torchs_verdict(members):
    """Whether torch mixed_dtype_units these parameters into one; FSDP1 itself runs on accelerators only."""
    handle = SimpleNamespace(_use_orig_params=True)
    try:
        FlatParamHandle._validate_tensors_to_flatten(handle, list(members))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("float32", "adapted", "refused"),
    [
        ((), False, None),
        ((), True, None),  # PEFT's wrap policy makes units of its matrices
        (("layers.0.input_layernorm",), False, "model.layers.0"),
        (("layers.0.mlp",), True, "base_model.model.model.layers.0"),
        (("lm_head",), False, "the model"),
    ],
)
def test_fsdp1_refuses_units_that_torch_cannot_flatten(float32, adapted, refused):
    model = model_in(torch.bfloat16, float32=float32)
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    found = list(mixed_dtype_units(model, accelerator_with(plugin(fsdp_version=1))))
    units = flat_units(
        model, lambda m: type(m).__name__ in LAYERS or (adapted and engines._is_trained_leaf(m))
    )  # what accelerate wraps
    assert sum(len(members) for members in units.values()) == len(list(model.parameters()))
    verdicts = {name: torchs_verdict(members.values()) for name, members in units.items()}
    assert all(verdicts.values()) == (refused is None) == (not found)
    if refused is not None:
        assert found[0].id == "fsdp1-flattens-one-dtype"
        assert found[0].what == f"FSDP1 with {refused}, whose weights are bfloat16 and float32"
        assert "`fsdp_version: 2`" in str(found[0].fix)
    assert list(mixed_dtype_units(model, accelerator_with(plugin(fsdp_version=2)))) == []

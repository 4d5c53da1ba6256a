"""What is said before a quantised model is loaded, and the heads that are made while it is."""

import importlib.metadata
import json
import shutil
import sys
from types import SimpleNamespace

import cells
import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from safe_trainers import tiny
from safe_trainers.core.errors import PrecisionError
from safe_trainers.model.inventory import bits, quantization_method
from safe_trainers.model.parts import HEADS, is_quantized
from safe_trainers.rollout import vllm
from safe_trainers.weights.bitsandbytes import plan
from safe_trainers.weights.bitsandbytes_loading import (
    asked_quantization,
    contradiction,
    fresh_heads,
    missing_backend,
    skip_heads,
    unloadable_head,
    unusable_head,
)
from safe_trainers.weights.quantized_layers import measure, refusals
from upstream import LOADER_OF_5, TAKES_QUANTIZATION, needs_packed_without_kernels


pytest.importorskip("bitsandbytes")

SPARED = {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}  # what many published checkpoints say
SPARED_8 = {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
IDS = torch.arange(5, 13).reshape(1, 8)  # (B, T)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny text models saved in 4 and 8 bits, with and without a list of modules that were not quantised."""
    root = tmp_path_factory.mktemp("quantised")
    for name, config in {
        "4bit": {"load_in_4bit": True},
        "8bit": {"load_in_8bit": True},
        "4bit-spared": SPARED,
    }.items():
        model = AutoModelForCausalLM.from_pretrained(
            cells.folder("text"), quantization_config=BitsAndBytesConfig(**config), dtype=torch.bfloat16
        )
        model.save_pretrained(root / name)
        for file in cells.folder("text").glob("tokenizer*"):
            shutil.copy(file, root / name)
    return root


@pytest.fixture
def no_bitsandbytes(monkeypatch):
    """A stand-in for a machine without bitsandbytes: `import bitsandbytes` fails, and nothing finds it."""
    from transformers.quantizers import quantizer_bnb_4bit, quantizer_bnb_8bit

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for module in (quantizer_bnb_4bit, quantizer_bnb_8bit):  # they keep what was found when they were imported
        monkeypatch.setattr(module, "is_bitsandbytes_available", lambda **kwargs: False)


def asked_by_argument(checkpoints):
    return str(cells.folder("text")), None, BitsAndBytesConfig(load_in_4bit=True)


def asked_by_init_kwargs(checkpoints):
    kwargs = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return str(cells.folder("text")), kwargs, None


def asked_by_mapping(checkpoints):
    return str(cells.folder("text")), {"quantization_config": {"load_in_4bit": True}}, None


def asked_by_4bit_checkpoint(checkpoints):
    return str(checkpoints / "4bit"), None, None


def asked_by_8bit_checkpoint(checkpoints):
    return str(checkpoints / "8bit"), None, None


ASKED = [asked_by_argument, asked_by_init_kwargs, asked_by_mapping, asked_by_4bit_checkpoint, asked_by_8bit_checkpoint]


@pytest.mark.parametrize("asked", ASKED)
def test_a_missing_bitsandbytes_is_said_before_anything_is_loaded(no_bitsandbytes, checkpoints, asked):
    model, kwargs, config = asked(checkpoints)
    problem = missing_backend(model, SimpleNamespace(model_init_kwargs=kwargs), config)
    assert problem.id == "bitsandbytes-missing"
    assert str(problem.fix) == "pip install 'bitsandbytes>=0.46.1'"
    assert "not installed" in problem.why
    # Upstream says so once the trainer loads, with a line that a shell takes for a redirection.
    with pytest.raises(ImportError, match="pip install -U bitsandbytes"):
        AutoModelForCausalLM.from_pretrained(
            model, **(kwargs or {}), **({} if config is None else {"quantization_config": config})
        )


@pytest.mark.parametrize("asked", ASKED)
def test_nothing_is_said_where_it_is_installed(checkpoints, asked):
    model, kwargs, config = asked(checkpoints)
    args = SimpleNamespace(model_init_kwargs=kwargs)
    assert missing_backend(model, args, config) is None
    eight = asked in (asked_by_init_kwargs, asked_by_8bit_checkpoint)
    assert asked_quantization(model, args, config) == ("8bit" if eight else "4bit")


def test_nothing_is_said_where_nothing_asks_for_it(no_bitsandbytes, checkpoints):
    assert missing_backend(str(cells.folder("text")), SimpleNamespace(model_init_kwargs={"dtype": "float32"})) is None
    for name in ("a-name/that-was-never-downloaded", "./no-such-folder", "no name: at all"):
        assert missing_backend(name, None) is None
    assert missing_backend(tiny.build_model("text"), None, BitsAndBytesConfig(load_in_4bit=True)) is None
    assert asked_quantization(str(cells.folder("text")), None) is None
    fp8 = SimpleNamespace(model_init_kwargs={"quantization_config": FineGrainedFP8Config()})
    assert missing_backend(str(cells.folder("text")), fp8) is None


def test_a_bitsandbytes_that_is_too_old_is_said(monkeypatch, checkpoints):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.43.1")
    assert "0.43.1" in missing_backend(str(checkpoints / "4bit"), None).why


def test_a_downloaded_checkpoint_is_read_where_the_cache_has_it(no_bitsandbytes, checkpoints, monkeypatch, tmp_path):
    # The layout of the Hub's cache, written here.
    snapshot = tmp_path / "models--someone--quantised" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    shutil.copy(checkpoints / "4bit" / "config.json", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert missing_backend("someone/quantised", None).id == "bitsandbytes-missing"


@pytest.mark.parametrize(
    ("asked", "compute", "agrees"),
    [(None, "float16", True), ("fp16", "float16", True), ("bfloat16", "float16", False), ("fp32", "bfloat16", False)],
)
def test_a_compute_dtype_of_its_own_is_refused(asked, compute, agrees):
    problem = contradiction(asked, compute)
    assert (problem is None) == agrees
    if not agrees:
        assert problem.what == f"bnb_4bit_compute_dtype={asked!r} in a run that computes in {compute}"
        assert "drop `bnb_4bit_compute_dtype`" in str(problem.fix)


def test_a_compute_dtype_that_is_none_is_refused():
    with pytest.raises(PrecisionError, match="bnb_4bit_compute_dtype='float12'"):
        contradiction("float12", "float16")


def reward_trainer(folder, **settings):
    arguments = cells.settings(cells.Cell("text", "reward", "fp32", None), steps=1)
    loading = {"dtype": "bfloat16"}
    if not TAKES_QUANTIZATION and "quantization_config" in settings:
        loading["quantization_config"] = settings.pop("quantization_config")
    return trl.RewardTrainer(
        args=trl.RewardConfig(**arguments, model_init_kwargs=loading),
        train_dataset=tiny.preference_dataset(4, seed=0),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"),
        **{"model": str(folder)} | settings,
    )


def score_of(trainer):
    return trainer.model.base_model.model.score.modules_to_save["default"]


def test_stock_trains_a_score_head_where_no_list_is_given():
    trainer = reward_trainer(cells.folder("text"), quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert bits(score_of(trainer)) is None
    assert unusable_head(trainer.model) is None
    before = score_of(trainer).weight.detach().clone()
    trainer.train()
    assert not torch.equal(score_of(trainer).weight, before)


@pytest.mark.parametrize(("config", "error"), [(SPARED, AssertionError), (SPARED_8, AttributeError)])
def test_stock_fails_on_a_score_head_that_a_list_forgets(config, error):
    if not LOADER_OF_5:  # transformers 4 does not get as far
        with pytest.raises(AttributeError, match=r"is not an nn.Module|score.SCB"):
            reward_trainer(cells.folder("text"), quantization_config=BitsAndBytesConfig(**config))
        return
    trainer = reward_trainer(cells.folder("text"), quantization_config=BitsAndBytesConfig(**config))
    assert bits(score_of(trainer)) is not None
    assert not is_quantized(score_of(trainer).weight)  # a quantised layer around a weight that was never packed
    problem = unusable_head(trainer.model)
    assert problem.id == "quantised-head"
    assert "score" in problem.what
    assert str(problem.fix) == "BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head', 'score'])"
    with pytest.raises(error):
        trainer.train()


@pytest.mark.skipif(not LOADER_OF_5, reason="this transformers fails to load such a head")
def test_a_frozen_head_that_was_never_packed_is_found_too():
    model = AutoModelForSequenceClassification.from_pretrained(
        cells.folder("text"), num_labels=1, quantization_config=BitsAndBytesConfig(**SPARED)
    )
    assert "score" in unusable_head(model.requires_grad_(False)).what


@pytest.mark.parametrize("config", [{"load_in_4bit": True}, {"load_in_8bit": True}, SPARED], ids=str)
def test_a_completed_config_keeps_the_score_head_whole(config):
    given = BitsAndBytesConfig(**config)
    completed = skip_heads(given)
    assert given.llm_int8_skip_modules == config.get("llm_int8_skip_modules")  # the user's object is the user's
    assert completed.llm_int8_skip_modules == ["lm_head", *HEADS]
    trainer = reward_trainer(cells.folder("text"), quantization_config=completed)
    assert unusable_head(trainer.model) is None
    assert sum(bits(module) is not None for module in trainer.model.modules()) == 7
    assert score_of(trainer).weight.is_floating_point()
    trainer.train()


def test_a_completed_config_quantises_what_upstream_does():
    names = []
    for config in (BitsAndBytesConfig(load_in_4bit=True), skip_heads(BitsAndBytesConfig(load_in_4bit=True))):
        model = AutoModelForSequenceClassification.from_pretrained(
            cells.folder("text"), num_labels=1, quantization_config=config
        )
        names.append([name for name, module in model.named_modules() if bits(module) is not None])
    assert names[0] == names[1]
    assert len(names[0]) == 7


@pytest.mark.skipif(not LOADER_OF_5, reason="this transformers does not quantise a head with a bias")
def test_a_head_with_a_bias_is_quantised_upstream(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=1, **shape)).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True)
    stock, completed = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, quantization_config=c)
        for c in (config, skip_heads(config))
    )
    assert bits(stock.classifier) == 4
    assert bits(completed.classifier) is None
    assert fresh_heads(stock) == ["classifier.bias"]
    assert fresh_heads(completed) == ["classifier.weight", "classifier.bias"]


def test_a_config_is_completed_in_any_form():
    assert skip_heads({"load_in_4bit": True, "llm_int8_skip_modules": ["visual"]}) == {
        "load_in_4bit": True,
        "llm_int8_skip_modules": ["visual", *HEADS],
    }
    assert skip_heads(None) is None
    fp8 = FineGrainedFP8Config()
    assert skip_heads(fp8) is fp8


def test_a_checkpoint_that_spares_no_head_cannot_be_loaded_with_one(checkpoints):
    folder = str(checkpoints / "4bit-spared")
    with pytest.raises(NotImplementedError, match=r"Byte|meta tensor"):
        reward_trainer(folder)
    # What is passed along does not change what the checkpoint says.
    with pytest.raises(NotImplementedError, match=r"Byte|meta tensor"), pytest.warns(UserWarning, match="already has"):
        reward_trainer(folder, quantization_config=skip_heads(BitsAndBytesConfig(**SPARED)))
    problem = unloadable_head(folder, None)
    assert problem.id == "quantised-head"
    # The lines that it says.
    assert f"AutoConfig.from_pretrained({folder!r}, num_labels=1)" in str(problem.fix)
    assert "config.quantization_config['llm_int8_skip_modules'].append('score')" in str(problem.fix)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    config.quantization_config["llm_int8_skip_modules"].append("score")
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    assert sum(bits(module) is not None for module in model.modules()) == 7
    assert model.score.weight.is_floating_point()
    assert unusable_head(model) is None


@pytest.mark.parametrize("name", ["4bit", "8bit"])
def test_a_checkpoint_without_a_list_takes_a_head(checkpoints, name):
    assert unloadable_head(str(checkpoints / name), None) is None
    model = AutoModelForSequenceClassification.from_pretrained(checkpoints / name, num_labels=1)
    assert unusable_head(model) is None
    assert unloadable_head(model, None) is None


def test_a_checkpoint_with_a_head_loads_it_as_it_is(tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(
        cells.folder("text"), num_labels=1, quantization_config=skip_heads(BitsAndBytesConfig(load_in_4bit=True))
    )
    model.config.quantization_config.llm_int8_skip_modules = ["lm_head"]
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForSequenceClassification"]
    assert unloadable_head(str(tmp_path), None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_heads_are_found_with_the_copies_that_peft_trains(dtype):
    model = AutoModelForSequenceClassification.from_pretrained(
        cells.folder("text"), num_labels=1, dtype=dtype, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    assert fresh_heads(model) == ["score.weight"]
    assert model.score.weight.dtype == dtype  # upstream makes it in the dtype of the checkpoint's weights
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"))
    assert fresh_heads(wrapped) == [
        "base_model.model.score.original_module.weight",
        "base_model.model.score.modules_to_save.default.weight",
    ]
    parameters = dict(wrapped.named_parameters())
    for name in fresh_heads(wrapped):
        parameters[name].data = parameters[name].data.float()
    changed = {change.name for change in plan(wrapped, "float16").changes}
    assert not changed & set(fresh_heads(wrapped))


def test_a_language_models_head_is_no_fresh_head():
    assert fresh_heads(tiny.build_model("text")) == []


def head_to_train(**config):
    model = AutoModelForCausalLM.from_pretrained(
        cells.folder("text"), dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**config)
    )
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])).train()


@pytest.mark.parametrize("config", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_copies_of_a_language_models_head_are_whole(config):
    model = head_to_train(**config)
    copy = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert not is_quantized(copy)
    assert copy.requires_grad
    assert unusable_head(model) is None
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert copy.grad.isfinite().all()


def test_stock_silently_trains_no_packed_copy():
    # PEFT refuses to train packed integers; packed into a floating dtype, the copy looks like any other weight.
    quantised_head = {"load_in_4bit": True, "llm_int8_skip_modules": ["v_proj"]}
    with pytest.raises(RuntimeError, match="floating point"):
        head_to_train(**quantised_head)
    model = head_to_train(**quantised_head, bnb_4bit_quant_storage=torch.bfloat16)
    model(input_ids=IDS, labels=IDS).loss.backward()
    copy = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert copy.requires_grad
    assert copy.grad is None
    problem = unusable_head(model)
    assert "lm_head" in problem.what
    assert str(problem.fix) == "BitsAndBytesConfig(..., llm_int8_skip_modules=['lm_head'])"


def rewritten(folder, source, quantization, weights):
    """A copy of a checkpoint, its weights replaced by packed ones, as another quantiser would have saved it."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    packed = {}
    for name, tensor in tensors.items():
        packed |= weights(name, tensor) or {name: tensor}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def as_fp8(name, tensor):
    if not name.endswith("proj.weight"):
        return None
    scale = tensor.float().abs().max() / 448  # float8_e4m3fn ends there
    blocks = [-(-size // 64) for size in tensor.shape]
    return {
        name: (tensor.float() / scale).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": scale.expand(blocks).contiguous(),
    }


def as_mxfp4(name, tensor):
    if "experts" not in name or not name.endswith("proj"):
        return None
    experts, inner, outer = tensor.shape
    blocks = torch.randint(0, 255, (experts, outer, inner // 32, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:-1], 122, dtype=torch.uint8)}


def as_bitnet(name, tensor):
    if not name.endswith("proj.weight"):
        return None
    return {
        name: torch.randint(0, 255, (tensor.shape[0] // 4, tensor.shape[1]), dtype=torch.uint8),
        f"{name}_scale": torch.ones(1),
    }


@needs_packed_without_kernels
def test_what_was_dequantised_while_it_was_loaded_is_not_refused(tmp_path):
    torch.manual_seed(0)
    fp8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
    folder = rewritten(tmp_path / "fp8", tiny.save("text", tmp_path / "text", dtype="bfloat16"), fp8, as_fp8)
    for settings in (
        {},
        {"quantization_config": FineGrainedFP8Config(dequantize=True)},
    ):  # the first for want of a GPU
        model = AutoModelForCausalLM.from_pretrained(folder, **settings)
        assert quantization_method(model) is None
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    folder = rewritten(tmp_path / "mxfp4", tiny.save("gpt_oss", tmp_path / "oss"), {"quant_method": "mxfp4"}, as_mxfp4)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))
    assert quantization_method(model) is None


@needs_packed_without_kernels
def test_vllm_is_refused_for_a_model_dequantised_from_a_packed_checkpoint(tmp_path):
    """vLLM would load the packed weights of the checkpoint."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
    folder = rewritten(tmp_path / "fp8", tiny.save("text", tmp_path / "text", dtype="bfloat16"), fp8, as_fp8)
    asked = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)
    (problem,) = vllm.refusals(model, None, colocated=True)
    assert problem.id == "vllm-holds-packed-weights"
    assert "a checkpoint of fp8" in problem.what
    assert "`model.save_pretrained(folder)`" in str(problem.fix)
    assert not list(vllm.refusals(model, None, colocated=False))  # a server's own model is compared when it is asked
    model.save_pretrained(tmp_path / "dense")  # the advice
    assert not list(vllm.refusals(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), None, colocated=True))


def test_a_quantiser_whose_layers_round_their_inputs_is_refused_by_name(tmp_path):
    folder = rewritten(tmp_path / "bitnet", cells.folder("text"), {"quant_method": "bitnet"}, as_bitnet)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert quantization_method(model) == "bitnet"
    with torch._dynamo.config.patch(disable=True):  # transformers compiles how the layer rounds its input
        measured = measure(model, "float32", None)
    assert [(group.kind, len(group.names), group.treatment) for group in measured] == [("BitLinear", 7, None)]
    assert not measured[0].trial.trains
    with torch._dynamo.config.patch(disable=True):
        (problem,) = refusals(model, measured, "float32", None)
    assert problem.id == "quantised-layers-do-not-train"
    assert problem.what.startswith("a model quantised by bitnet: 7 layers of BitLinear, such as model.layers.0")
    assert "BitsAndBytesConfig(load_in_4bit=True)" in str(problem.fix)
    # A stand-in for a quantiser that can also dequantise while it loads.
    model.hf_quantizer = SimpleNamespace(quantization_config=Mxfp4Config())
    with torch._dynamo.config.patch(disable=True):
        (problem,) = refusals(model, measured, "float32", None)
    assert "`quantization_config=Mxfp4Config(dequantize=True)`, or the unquantised" in str(problem.fix)

"""What TRL's weight sync sends of a model with adapters, and that the base keeps its bits. vLLM is a stand-in."""

import warnings

import cells
import pytest
import torch
import vllm_stand_in
from adapted_models import adapted_llama, lora, merge_for_sync
from cells import Cell
from live_bytes import LiveBytes
from peft import get_peft_model
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import PrecisionError, PrecisionWarning, SafeGRPOConfig
from safe_trainers.rollout.weight_sync import METRIC, PATIENCE, SAMPLE, AdapterSync


CELL = Cell("text", "grpo", "bf16", "bf16")


@pytest.fixture
def vllm(monkeypatch):
    return vllm_stand_in.install(monkeypatch)


def base(dtype=torch.bfloat16, **changes):
    return AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype, **changes)


def build(monkeypatch, model, safe=True, config=None, **changes):
    """A GRPO trainer with a vLLM engine of its own, on a model that is given."""
    vllm_stand_in.forget_process(monkeypatch)
    reset_accelerate()
    changes = {"use_vllm": True, "vllm_mode": "colocate", "model_init_kwargs": None, **changes}
    made = cells.arguments(CELL, config or cells.PLAIN["grpo"], **changes)
    return (cells.SAFE if safe else cells.STOCK)["grpo"](**{**made, "model": model})


def bits(model):
    """The bytes of the base, by name."""
    return {
        name: p.detach().clone().view(torch.uint8)
        for name, p in model.named_parameters()
        if "lora_" not in name and "modules_to_save" not in name
    }


def drift(before, after):
    return sum(int((before[name] != after[name]).sum()) for name in before)


def two_adapters():
    model = get_peft_model(base(), lora(r=2))
    model.add_adapter("second", lora(r=3, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def quantised(**config):
    pytest.importorskip("bitsandbytes")
    return get_peft_model(base(quantization_config=BitsAndBytesConfig(**config)), lora())


MODELS = {
    "lora": lambda: get_peft_model(base(), lora()),
    "lora on float32": lambda: get_peft_model(base(torch.float32), lora()),
    "dora": lambda: get_peft_model(base(), lora(use_dora=True)),
    "two adapters": two_adapters,
    "embeddings": lambda: get_peft_model(base(), lora(target_modules=["embed_tokens", "q_proj"])),
    "trained head": lambda: get_peft_model(base(), lora(modules_to_save=["lm_head"])),
    "4-bit": lambda: quantised(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "4-bit, twice quantised": lambda: quantised(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "4-bit, stored as bfloat16": lambda: quantised(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_base_keeps_its_bits(kind, vllm, monkeypatch):
    trainer = build(monkeypatch, MODELS[kind]())
    before = bits(trainer.model)
    objects = {name: id(p) for name, p in trainer.model.named_parameters()}
    for _ in range(5):
        trainer.vllm_generation.sync_weights()
    assert drift(before, bits(trainer.model)) == 0
    assert {name: id(p) for name, p in trainer.model.named_parameters()} == objects
    (engine,) = vllm.ENGINES
    assert set(engine.loaded) == {n for n, _ in engine.model.named_parameters() if n != "lm_head.weight"} | (
        {"lm_head.weight"} if not engine.model.config.tie_word_embeddings else set()
    )
    assert {tensor.dtype for tensor in engine.loaded.values()} == {torch.bfloat16}
    assert "merge_adapter" not in vars(trainer.model)
    assert trainer.model.named_parameters.__func__ is torch.nn.Module.named_parameters


def test_a_thousand_syncs_on_a_bfloat16_base(vllm, monkeypatch):
    worst = {}
    for safe in (False, True):
        torch.manual_seed(0)
        trainer = build(monkeypatch, get_peft_model(base(), lora(target_modules=["q_proj", "up_proj"])), safe)
        before = {n: p.detach().double() for n, p in trainer.model.named_parameters() if "base_layer" in n}
        for _ in range(1000):
            trainer.vllm_generation.sync_weights()
        after = dict(trainer.model.named_parameters())
        worst[safe] = max((after[n].double() - old).abs().max().item() for n, old in before.items())
    assert worst[True] == 0
    assert worst[False] > 1e-3


def test_stock_changes_a_packed_base_and_sends_packed_bytes(vllm, monkeypatch):
    trainer = build(monkeypatch, MODELS["4-bit"](), safe=False)
    assert vllm.ENGINES[0].arguments["quantization"] == "bitsandbytes"
    before = bits(trainer.model)
    trainer.vllm_generation.sync_weights()
    packed = {n for n, p in trainer.model.named_parameters() if p.dtype == torch.uint8}
    changed = sum(int((before[n] != bits(trainer.model)[n]).sum()) for n in packed)
    assert changed > 0.1 * sum(before[n].numel() for n in packed)
    assert torch.uint8 in {tensor.dtype for tensor in vllm.ENGINES[0].loaded.values()}


@pytest.mark.parametrize("kind", ["4-bit", "4-bit, stored as bfloat16"])
def test_a_packed_base_is_sent_dense_to_an_engine_that_is_dense(kind, vllm, monkeypatch):
    from bitsandbytes.functional import dequantize_4bit

    trainer = build(monkeypatch, MODELS[kind]())
    trainer.vllm_generation.sync_weights()
    (engine,) = vllm.ENGINES
    assert engine.arguments["quantization"] is None
    layer = trainer.model.base_model.model.model.layers[0].self_attn.q_proj
    dense = dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state).double()
    delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    expected = dense + delta * layer.scaling["default"]
    sent = engine.loaded["model.layers.0.self_attn.q_proj.weight"]
    assert (sent.double() - expected).abs().max() <= expected.abs().max() * 2**-8


def test_8_bit_weights_reach_a_server_dense(vllm, monkeypatch):
    """In its own process TRL refuses 8-bit weights."""
    model = quantised(load_in_8bit=True)
    monkeypatch.setattr(vllm_stand_in.StandInClient, "model", str(cells.folder("text")))
    monkeypatch.setattr(vllm_stand_in.StandInClient, "dtype", "bfloat16")
    trainer = build(monkeypatch, model, vllm_mode="server")
    before = bits(trainer.model)
    trainer.vllm_generation.sync_weights()
    assert {dtype for _, dtype in trainer.vllm_generation.vllm_client.received} == {"torch.bfloat16"}
    assert drift(before, bits(trainer.model)) == 0


# --- what is sent ----------------------------------------------------------------------------------------------------


def references(model):
    """Base and merged weights of the adapted layers in float64."""
    for name, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            old = layer.base_layer.weight.detach().double()
            delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            yield f"{name}.weight", old, old + delta * layer.scaling["default"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_weight_is_rounded_once(dtype):
    model = adapted_llama(scale=0.1)
    sent = dict(AdapterSync(model, dtype).named_weights())
    for name, _, merged in references(model):
        # Half a step of the dtype, and the rounding of a sum in float32.
        allowed = torch.finfo(dtype).eps / 2 * (1 + 2**-10) + 2**-23
        assert sent[name].dtype == dtype
        assert ((sent[name].double() - merged).abs() <= allowed * merged.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1e-2, 0.1])
def test_the_lost_share_is_that_of_float64(dtype, scale):
    model = adapted_llama(scale=scale)
    sync = AdapterSync(model, dtype)
    for _ in sync.named_weights():
        pass
    lost = changed = 0
    for _, old, merged in references(model):
        changes = merged != old
        lost += (changes & (merged.to(dtype) == old.to(dtype))).sum().item()
        changed += changes.sum().item()
    assert changed > 0
    # 8,192 elements or more of each of 14 weights: a standard error of at most 0.0015.
    assert sync.lost == pytest.approx(lost / changed, abs=5e-3)
    if dtype == torch.bfloat16 and scale == 1e-3:
        assert sync.lost > 0.7


def test_a_merged_weight_that_overflows_ends_the_run_after_all_weights_are_sent():
    """TRL streams them to a server, which waits for all of them."""
    model = adapted_llama(scale=0.1)
    whole = [name for name, _ in AdapterSync(model, torch.float16).named_weights()]
    model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight.data[0, 0] = 1e5
    sent = []
    with pytest.raises(PrecisionError, match=r"down_proj\.weight contains"):
        sent.extend(name for name, _ in AdapterSync(model, torch.float16).named_weights())
    assert sent == whole


def test_the_sample_of_a_large_weight_is_spread_over_it():
    model = adapted_llama(hidden=512, layers=1, scale=0.03)
    sync = AdapterSync(model, torch.bfloat16)
    assert max(p.numel() for p in model.parameters()) > 32 * SAMPLE
    for _ in sync.named_weights():
        pass
    lost = changed = 0
    for _, old, merged in references(model):
        lost += ((merged != old) & (merged.to(torch.bfloat16) == old.to(torch.bfloat16))).sum().item()
        changed += (merged != old).sum().item()
    assert sync.lost == pytest.approx(lost / changed, abs=8e-3)  # of 7 weights


def test_tied_weights_are_sent_once_and_buffers_never():
    """As in stock, whose `named_parameters` has neither."""
    model = base()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.model.norm.register_buffer("moved", torch.ones(2))
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    sent = [name for name, _ in AdapterSync(get_peft_model(model, lora()), torch.bfloat16).named_weights()]
    assert sent == names


def test_what_gathers_sharded_weights_sees_the_live_ones():
    model = get_peft_model(base(), lora())
    live = [id(parameter) for parameter in model.parameters()]
    with AdapterSync(model, torch.bfloat16).merged():
        assert [id(parameter) for parameter in model.parameters()] == live


def test_a_layer_whose_adapter_is_off_is_sent_as_it_computes():
    model = get_peft_model(base(), lora(target_modules=["q_proj", "k_proj"]))
    attention = model.base_model.model.model.layers[0].self_attn
    attention.q_proj.enable_adapters(False)
    sent = dict(AdapterSync(model, torch.bfloat16).named_weights())
    for name in ("q_proj", "k_proj"):
        plain = getattr(attention, name).base_layer.weight
        assert torch.equal(sent[f"model.layers.0.self_attn.{name}.weight"], plain) == (name == "q_proj")


def test_an_adapter_that_changes_nothing_loses_nothing():
    sync = AdapterSync(get_peft_model(base(), lora(init_lora_weights=True)), torch.bfloat16)
    sent = dict(sync.named_weights())
    assert sync.lost is None
    assert len(sent) == len(list(base().named_parameters()))


def test_what_nothing_changes_is_the_live_tensor():
    model = get_peft_model(base(), lora(target_modules=["q_proj"]))
    live = {p.data_ptr() for p in model.parameters()}
    sent = dict(AdapterSync(model, torch.bfloat16).named_weights())
    copied = {name for name, tensor in sent.items() if tensor.data_ptr() not in live}
    assert copied == {name for name in sent if "q_proj" in name}


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_the_extra_memory_is_one_layer():
    def peak(layers, safe):
        model = adapted_llama(layers=layers)
        with LiveBytes(model.parameters()) as live:
            merge_for_sync(model, AdapterSync(model, torch.bfloat16) if safe else None)
        return live.peak

    layer = 256 * 512 * 4  # the largest one in float32
    counts, weights = 16, 7  # two numbers for each weight of each layer
    assert peak(8, safe=True) - peak(2, safe=True) <= 6 * weights * counts
    # Itself, and the tensor in bfloat16 that was sent last and that TRL still holds.
    assert peak(2, safe=True) - peak(2, safe=False) <= 1.5 * layer + 2 * weights * counts


# --- what is said ----------------------------------------------------------------------------------------------------


def losing(monkeypatch, limit, syncs, config=SafeGRPOConfig):
    changes = {} if limit is None else {"sync_lost_limit": limit}
    trainer = build(monkeypatch, get_peft_model(base(), lora(init_lora_weights=True)), config=config, **changes)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(syncs):
            trainer.vllm_generation.sync_weights()
    said = [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]
    return trainer, [text for text in said if "sync-loses-the-adapter" in text]


def test_an_adapter_that_stays_lost_is_warned_of_once_with_the_way_out(vllm, monkeypatch):
    trainer, said = losing(monkeypatch, None, 3 * PATIENCE)
    assert len(said) == 1
    assert "`precision='fp16'`" in said[0]
    assert "in bfloat16" in said[0]
    shares = trainer._metrics["train"][METRIC]
    assert len(shares) == 3 * PATIENCE
    assert all(share > 0.9 for share in shares)


def test_what_vllm_refuses_is_no_way_out(vllm, monkeypatch):
    monkeypatch.setattr("safe_trainers.rollout.vllm.FLOAT16_REFUSED", frozenset({"llama"}))
    (text,) = losing(monkeypatch, None, PATIENCE)[1]
    assert "fp16" not in text
    assert "a larger learning rate" in text


def test_the_first_updates_are_always_small(vllm, monkeypatch):
    assert losing(monkeypatch, None, PATIENCE - 1)[1] == []
    assert losing(monkeypatch, 1.0, 2 * PATIENCE)[1] == []


def test_a_plain_config_has_the_same_limit(vllm, monkeypatch):
    assert len(losing(monkeypatch, None, PATIENCE, cells.PLAIN["grpo"])[1]) == 1


@pytest.mark.parametrize("limit", [-0.1, 1.5, float("nan")])
def test_a_limit_that_is_no_share_is_refused(limit):
    with pytest.raises(PrecisionError, match="share-out-of-range"):
        SafeGRPOConfig(**cells.settings(CELL, sync_lost_limit=limit))


def test_the_share_is_logged_the_way_trl_logs(vllm, monkeypatch):
    trainer = build(monkeypatch, get_peft_model(base(), lora(init_lora_weights=True)), config=SafeGRPOConfig, steps=3)
    trainer.train()
    logged = [entry[METRIC] for entry in trainer.state.log_history if METRIC in entry]
    assert logged
    assert all(0 <= share <= 1 for share in logged)
    silent = build(
        monkeypatch, get_peft_model(base(), lora()), config=SafeGRPOConfig, steps=1, precision_metrics=False
    )
    silent.train()
    assert not any(METRIC in entry for entry in silent.state.log_history)


def test_adapters_on_one_of_two_tied_weights_are_said_once(vllm, monkeypatch):
    model = base()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns too, of merging it
        adapted = get_peft_model(model, lora(target_modules=["embed_tokens", "q_proj"]))
    trainer = build(monkeypatch, adapted)
    with pytest.warns(PrecisionWarning, match=r"embed_tokens.*\n?.*sampler-ties-weights"):
        trainer.vllm_generation.sync_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        trainer.vllm_generation.sync_weights()


def test_adapters_that_cannot_be_merged_are_refused_before_an_engine_is_built(vllm, monkeypatch):
    from peft import PromptTuningConfig

    model = get_peft_model(base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(PrecisionError, match="adapter-cannot-be-merged") as caught:
        build(monkeypatch, model)
    assert "`use_vllm=False`" in str(caught.value)
    assert vllm.ENGINES == []


def test_a_sync_that_fails_leaves_the_model_as_it_was(vllm, monkeypatch):
    trainer = build(monkeypatch, MODELS["lora"]())
    monkeypatch.setattr(vllm.ENGINES[0].llm_engine.model_executor.driver_worker.model_runner.model, "load_weights", 0)
    before = bits(trainer.model)
    with pytest.raises(TypeError):
        trainer.vllm_generation.sync_weights()
    assert drift(before, bits(trainer.model)) == 0
    assert not {"merge_adapter", "unmerge_adapter", "named_parameters", "parameters"} & set(vars(trainer.model))
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())

"""Rollouts with the real vLLM, in the trainer's process. Skipped where there is no GPU, or no vLLM.

What the default suite shows on a stand-in: an engine in the trainer's dtype, a base that keeps its bits, weights that
arrive as they were sent, and a packed base that is sent dense.
"""

import gc
import shutil

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from vllm_stand_in import forget_process

from safe_trainers import PrecisionError
from safe_trainers.rollout.alignment import RolloutAlignment


pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")]
METRIC = "sampling/sampling_logp_difference/mean"


@pytest.fixture(autouse=True)
def _needs_vllm():
    pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of a shape that vLLM's kernels take, with the tokenizer of the tiny one."""
    path = tmp_path_factory.mktemp("llama")
    shutil.copytree(cells.folder("text"), path, dirs_exist_ok=True)
    tiny = AutoModelForCausalLM.from_pretrained(cells.folder("text")).config
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.vocab_size, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048,
        pad_token_id=tiny.pad_token_id, bos_token_id=tiny.bos_token_id, eos_token_id=tiny.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def build(monkeypatch, model, flag, safe=True, lora=False, **changes):
    forget_process(monkeypatch)
    reset_accelerate()
    gc.collect()
    torch.cuda.empty_cache()
    settings = {
        "use_cpu": False, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.15,
        "max_completion_length": 64, "vllm_max_model_length": 512, **changes,
    }  # fmt: skip
    made = cells.arguments(Cell("text", "grpo", "fp32", flag), cells.PLAIN["grpo"], **settings)
    if not isinstance(model, str):
        made["args"].model_init_kwargs = None
    adapter = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False) if lora else None
    return (cells.SAFE if safe else cells.STOCK)["grpo"](**{**made, "model": model, "peft_config": adapter})


def engine_dtype(trainer):
    return trainer.vllm_generation.llm.llm_engine.model_config.dtype


def mismatch(trainer):
    trainer.train()
    logged = [entry[METRIC] for entry in trainer.state.log_history if METRIC in entry]
    return sum(logged) / len(logged)


def test_an_fp16_run_samples_in_float16_and_stocks_does_not(folder, monkeypatch):
    stock = build(monkeypatch, folder, "fp16", safe=False)
    assert engine_dtype(stock) == torch.bfloat16
    alone = mismatch(stock)
    del stock
    safe = build(monkeypatch, folder, "fp16")
    assert engine_dtype(safe) == torch.float16
    assert mismatch(safe) * 3 < alone


def test_the_base_keeps_its_bits_and_the_engine_gets_what_is_sent(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    trainer = build(monkeypatch, model, "bf16", lora=True)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "base_layer" in n}
    for _ in range(100):
        trainer.vllm_generation.sync_weights()
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    sent = dict(trainer.precision[RolloutAlignment].sync.named_weights())
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
    held = dict(runner.model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(held, sent["model.layers.0.mlp.down_proj.weight"])


def test_a_4_bit_base_trains(folder, monkeypatch):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": 0})
    trainer = build(monkeypatch, model, "fp16", lora=True)
    packed = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.dtype == torch.uint8}
    assert packed
    assert mismatch(trainer) < 0.05
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in packed.items())


def test_what_vllm_refuses_in_float16_is_on_our_list():
    from vllm.config import model as config

    from safe_trainers.rollout.vllm import FLOAT16_REFUSED

    assert set(config._FLOAT16_NOT_SUPPORTED_MODELS) <= FLOAT16_REFUSED


def test_a_refused_model_builds_no_engine(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    model.config.model_type = "gemma2"
    with pytest.raises(PrecisionError, match="vllm-refuses-fp16"):
        build(monkeypatch, model, "fp16")

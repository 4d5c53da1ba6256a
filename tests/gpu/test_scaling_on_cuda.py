"""Adapters, quantised bases and the loss scaler with CUDA's real kernels. Skipped where there is no GPU.

The same as on a CPU with the strict scaler; here the scaler is the one that a run has.
"""

import gc

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from safe_trainers.core.device import unscalable_dtypes


pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")]
TASKS = ["sft", "grpo", "rloo", "reward"]
QUANTIZED = {"4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "8bit": {"load_in_8bit": True}}
CUDA_BF16 = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"


def build(task, quantized, safe=True, flag="fp16", steps=15, **changes):
    reset_accelerate()
    dtype = cells.SHORT[flag]
    auto = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    config = dict(QUANTIZED[quantized])
    if quantized == "4bit":
        config["bnb_4bit_compute_dtype"] = dtype
    extra = {"num_labels": 1} if task == "reward" else {}
    torch.manual_seed(0)
    model = auto.from_pretrained(
        cells.folder("text"),
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(**config),
        device_map={"": 0},
        **extra,
    )
    made = cells.arguments(
        Cell("text", task, flag, flag),
        cells.PLAIN[task],
        steps=steps,
        use_cpu=False,
        model_init_kwargs=None,
        **changes,
    )
    kind = "SEQ_CLS" if task == "reward" else "CAUSAL_LM"
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=kind)
    return (cells.SAFE if safe else cells.STOCK)[task](**{**made, "model": model, "peft_config": lora})


def test_what_the_real_scaler_refuses():
    assert unscalable_dtypes("cuda") >= {"float16"}
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    try:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.0))
        refused = False
    except NotImplementedError as error:
        refused = CUDA_BF16 in str(error)
    assert refused == ("bfloat16" in unscalable_dtypes("cuda"))


@pytest.mark.skipif(
    torch.cuda.is_available() and "bfloat16" not in unscalable_dtypes("cuda"), reason="this torch unscales bfloat16"
)
@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("task", TASKS)
def test_stock_stops_with_cudas_own_message(task, quantized):
    with pytest.raises(NotImplementedError) as stopped:
        build(task, quantized, safe=False).train()
    assert str(stopped.value) == CUDA_BF16
    cells.reset_autocast()


@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("task", TASKS)
def test_safe_trains(task, quantized):
    trainer = build(task, quantized)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    held = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in held.values()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in held.values())
    assert any(not torch.equal(p, before[name]) for name, p in held.items())


def test_fp16_and_bf16_reach_the_same_loss():
    last = {}
    for flag in ("fp16", "bf16"):
        trainer = build("sft", "4bit", flag=flag, learning_rate=1e-2)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0] - 0.3
        last[flag] = losses[-1]
    assert last["fp16"] == pytest.approx(last["bf16"], rel=0.02)


@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("task", TASKS)
def test_construction_peaks_where_stocks_does(task, quantized):
    peaks = {}
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # allocates the workspace of cuBLAS
    for safe in (False, True):
        gc.collect()  # a model may be in a cycle of references
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer = build(task, quantized, safe=safe)
        peaks[safe] = torch.cuda.max_memory_allocated()
        del trainer
    assert peaks[True] <= 1.01 * peaks[False]

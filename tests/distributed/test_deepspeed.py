"""Two real processes under DeepSpeed ZeRO-2 and ZeRO-3, every parameter in parts; `make distributed` installs it."""

import importlib.util

import processes
import pytest
import torch
from processes import DISTRIBUTED_TYPES
from test_parity_two_processes import ADAPTER, ALIKE, QLORA, distance


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed here"),
]

PARTS = {
    **ALIKE,
    "sft bf16": {"flag": "bf16", "steps": 2},
    "fp16": {"flag": "fp16", "steps": 3, "infinite": 1},
    "half": {"flag": "bf16", "weights": "bf16", "steps": 2},
    "vision": {"family": "qwen2_5_vl", "task": "grpo", "steps": 2, "ragged": True, "max_completion_length": 4,
               **ADAPTER, "watch_inputs": True},
    "stock inputs": {"family": "qwen2_5_vl", "task": "grpo", "steps": 1, "max_completion_length": 4, "safe": False,
                     **ADAPTER, "watch_inputs": True},
}  # fmt: skip
REFUSED = {
    "fp32_modules": {"flag": "bf16", "fp32_modules": ["lm_head"]},
    "loss scale": {"flag": "fp16", "loss_scale_init": 1024.0},
}


def saving(folder):
    """A run, and one that goes on from the middle of its generation window."""
    run = {"task": "grpo", "steps": 4, "steps_per_generation": 4, **ADAPTER}
    return {
        "whole": {**run, "folder": str(folder), "save_strategy": "steps", "save_steps": 1},
        "resumed": {**run, "resume": str(folder / "checkpoint-2")},
    }


if importlib.util.find_spec("bitsandbytes") is not None:
    PARTS["qlora"] = QLORA
# DeepSpeed asks the same, and refuses fp16 on other CPUs.
HAS_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
if not HAS_FP16:
    del PARTS["fp16"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return processes.run(
        "alone", {name: PARTS[name] for name in ({*ALIKE, "qlora"} & PARTS.keys())}, tmp_path_factory.mktemp("alone")
    )


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    refused = {name: {**settings, "refused": True} for name, settings in REFUSED.items()}
    parts = {**refused, **PARTS, **saving(folder / "saved")}
    # The first use of an operation compiles it.
    return request.param, processes.run(request.param, parts, folder, timeout=400)


def test_what_runs_is_what_was_launched(engine):
    name, run = engine
    for part in PARTS:
        for found in run.found(part):
            assert found["world"] == found["processes"] == 2
            assert found["type"] == DISTRIBUTED_TYPES[name]
            share = found["local"] / found["elements"]
            assert share == (1.0 if name == "zero2" else pytest.approx(0.5, abs=0.02))


@pytest.mark.parametrize("part", ["sft fp32", "grpo fp32"])
def test_fp32_is_a_single_processs_on_the_same_rows(part, engine, alone):
    (wanted,), both = alone.found(part), engine[1].found(part)
    for found in both:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6, abs=1e-7)
        assert found["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-6)
        assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-6)


def test_bf16_log_probabilities_are_float32_and_a_single_processs(engine, alone):
    (wanted,), both = alone.found("grpo bf16"), engine[1].found("grpo bf16")
    assert {dtype for found in both for dtype in found["logps_dtype"]} == {"torch.float32"}
    first = {"logps": wanted["logps"][:1]}  # later ones are of weights whose updates were rounded otherwise
    assert distance(both, first) < 1e-3


@pytest.mark.skipif(not HAS_FP16, reason="this CPU has no fp16 operations, and DeepSpeed refuses fp16 on it")
def test_a_loss_that_is_infinite_in_one_process_skips_the_step_in_all(engine):
    """The engine has a scaler of its own; that accelerate builds none on CPUs does not matter."""
    for found in engine[1].found("fp16"):
        logs = [entry for entry in found["logs"] if "loss" in entry]
        assert [entry["precision/skipped_steps"] for entry in logs] == [1, 1, 1]
        assert logs[0]["learning_rate"] == logs[1]["learning_rate"] > logs[2]["learning_rate"]
        assert found["dtypes"] == ["torch.float16"]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed here")
def test_qlora_is_a_single_processs(engine, alone):
    (wanted,), both = alone.found("qlora"), engine[1].found("qlora")
    for found in both:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)


def test_what_the_engine_will_hold_is_planned(engine):
    name, run = engine
    for part in ("sft bf16", "half", "grpo bf16", "sft fp32"):
        report = run.found(part)[0]["report"]
        assert report["facts"]["engine"] == f"DeepSpeed ZeRO-{name[-1]}, 2 processes"
        assert [verdict["level"] for verdict in report["verdicts"]] == ["ok"], part
    held = {row["part"]: row["parameters"] for row in run.found("grpo bf16")[0]["report"]["tables"]["module groups"]}
    assert held["adapter (default)"] == {"zero2": "bfloat16", "zero3": "float32"}[name]


def test_only_media_are_cast_on_their_way_in(engine):
    """Stock casts every floating tensor that it prepares, whatever it means."""
    safe, stock = (engine[1].found(part)[0] for part in ("vision", "stock inputs"))
    assert set(stock["prepared"].values()) == {"torch.bfloat16"}
    assert set(safe["prepared"].values()) == {"torch.float32"}
    assert len(safe["prepared"]) == 3
    assert safe["inputs"]["advantages"] == ["torch.float32"]
    assert safe["inputs"]["pixel_values"] == ["torch.bfloat16"]


@pytest.mark.parametrize(("part", "finding"), [("fp32_modules", "deepspeed-casts-every-weight"),
                                               ("loss scale", "deepspeed-scales-the-loss")])  # fmt: skip
def test_what_the_engine_cannot_do_is_refused(part, finding, engine):
    for found in engine[1].found(part):
        assert finding in found["refused"]


def test_a_resumed_run_is_the_uninterrupted_one(engine):
    for whole, resumed in zip(*(engine[1].found(part) for part in ("whole", "resumed")), strict=True):
        assert len(whole["losses"]) == 4
        assert resumed["losses"] == whole["losses"]
        assert resumed["sums"] == whole["sums"]

"""Two real processes under DDP and FSDP2 compute what a single one does; stock FSDP2 does not."""

import importlib.util
import itertools
import re
import signal
import time

import processes
import pytest
import trl
from packaging.version import Version
from processes import DISTRIBUTED_TYPES, SHARDED


pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.15"),
    reason="older stacks neither generate nor resume under FSDP2 on a CPU; docs/distributed.md",
)

ADAPTER = {"flag": "bf16", "weights": "bf16", "lora": True}
ALIKE = {
    "sft fp32": {"steps": 3},
    "grpo fp32": {"task": "grpo", "pinned": True, "steps": 2, "beta": 0.1},
    "grpo bf16": {"task": "grpo", "pinned": True, "steps": 2, "beta": 0.1, **ADAPTER},
}
"""What a single process does too, on the same rows."""
QWEN = {"family": "qwen2_5_vl", "wrap": "Qwen2_5_VLVisionBlock,Qwen2_5_VLDecoderLayer", "ragged": True}
ENDS_AT_ONCE = {"generation_kwargs": {"eos_token_id": list(range(421))}}
QLORA = {**ADAPTER, "packed": "bfloat16", "steps": 2}
TOGETHER = {
    "sft bf16": {"flag": "bf16", "steps": 2, "after": True},
    "float32 modules": {"flag": "bf16", "steps": 2, "fp32_modules": ["mlp"]},
    "fp16": {"flag": "fp16", "steps": 3, "infinite": 1},
    "qlora": QLORA,
    "rollout": {"task": "grpo", "steps": 2, **ADAPTER, **QWEN, "by_rank": [ENDS_AT_ONCE, {}],
                "max_completion_length": 8, "precision_report": "file"},
    # In the fourth step, the pictures of one process alone have sizes that it has not had before.
    "new sizes": {"task": "grpo", "steps": 5, "batch": 8, "max_completion_length": 4, **ADAPTER, **QWEN},
    "ranks differ": {"refused": True, "by_rank": [{}, {"learning_rate": 5e-5, "seed": 1}]},
}  # fmt: skip
"""What only several processes do, or what they are compared with each other in."""
STOCK = {
    "stock": {**ALIKE["grpo bf16"], "beta": 0.0, "safe": False},
    "half": {"flag": "bf16", "weights": "bf16", "steps": 1},
    # Stock's engine casts weights that are packed into float32 numbers: none of their bytes is left.
    "qlora float32": {**QLORA, "packed": "float32"},
    "qlora uint8": {**QLORA, "packed": "uint8"},
    # Last: what they leave is not clean.
    "stock reference": {**ALIKE["grpo bf16"], "safe": False, "fails": True},
    "stock qlora": {**QLORA, "packed": "float32", "safe": False, "fails": True},
}


FAILING = {"stock reference", "stock qlora", "ranks differ"}


def saving(folder):
    run = {"task": "grpo", "steps": 4, "steps_per_generation": 4, **ADAPTER}
    return {
        "whole": {**run, "folder": str(folder), "save_strategy": "steps", "save_steps": 1},
        # In the middle of a generation window.
        "resumed": {**run, "resume": str(folder / "checkpoint-2")},
    }


if importlib.util.find_spec("bitsandbytes") is None:
    TOGETHER.pop("qlora")
    STOCK = {name: settings for name, settings in STOCK.items() if "packed" not in settings}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return processes.run("alone", ALIKE, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes do under an engine; each is launched once."""
    runs = {}

    def run(engine):
        if engine not in runs:
            folder = tmp_path_factory.mktemp(engine)
            parts = {**ALIKE, **TOGETHER, **saving(folder / "saved"), **(STOCK if engine == "fsdp2" else {})}
            runs[engine] = processes.run(engine, parts, folder)
        return runs[engine]

    return run


ENGINES = pytest.mark.parametrize("engine", ["ddp", "fsdp2"])


def distance(found, wanted):
    """The largest difference of two runs' log-probabilities, token by token; `found` is of all processes."""
    largest = 0.0
    for step, rows in enumerate(wanted["logps"]):
        merged = {key: value for one in found for key, value in one["logps"][step].items()}
        assert merged.keys() == rows.keys()
        pairs = [pair for key, row in rows.items() for pair in zip(merged[key], row, strict=True)]
        assert len(pairs) >= 20
        largest = max(largest, *(abs(one - other) for one, other in pairs))
    return largest


@ENGINES
def test_what_runs_is_what_was_launched(engine, together):
    """Launch lines that are nearly right run one process, or DDP, and say nothing."""
    for part in together(engine).results[0].keys() - FAILING:
        for found in together(engine).found(part):
            assert found["world"] == found["processes"] == 2
            assert found["type"] == DISTRIBUTED_TYPES[engine]
            if part == "qlora uint8":  # integers cannot be sharded: accelerate leaves the packed weights whole
                assert 0 < found["dtensors"] < found["parameters"]
                continue
            assert found["dtensors"] == (found["parameters"] if engine in SHARDED else 0)
            share = found["local"] / found["elements"]
            assert share == pytest.approx(0.5, abs=0.02) if engine in SHARDED else share == 1.0


@ENGINES
@pytest.mark.parametrize("part", ["sft fp32", "grpo fp32"])
def test_fp32_is_a_single_processs_on_the_same_rows(part, engine, alone, together):
    (wanted,), both = alone.found(part), together(engine).found(part)
    assert len(wanted["losses"]) == ALIKE[part]["steps"]
    for found in both:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6, abs=1e-7)
        assert found["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-6)
        assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-6)
    assert both[0]["sums"] == both[1]["sums"]
    if "grpo" in part:
        assert distance(both, wanted) < 1e-5


@ENGINES
@pytest.mark.parametrize("part", ["grpo fp32", "grpo bf16"])
def test_the_reference_begins_as_the_policy(part, engine, together):
    """A model of its own in full fine-tuning, sharded too; the base without its adapter else."""
    for found in together(engine).found(part):
        divergences = [entry["kl"] for entry in found["logs"] if "kl" in entry]
        assert divergences[0] == 0.0 < divergences[1]


def test_evaluation_and_what_is_saved_are_ddps(together):
    ddp, fsdp2 = (together(engine).found("sft bf16")[0] for engine in ("ddp", "fsdp2"))
    assert fsdp2["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=1e-6)
    assert fsdp2["saved"] == ddp["saved"]
    assert set(ddp["saved"].values()) == {"bfloat16"}
    assert len(ddp["saved"]) == ddp["parameters"]


@ENGINES
def test_bf16_log_probabilities_are_float32_and_a_single_processs(engine, alone, together):
    (wanted,), both = alone.found("grpo bf16"), together(engine).found("grpo bf16")
    assert {dtype for found in both for dtype in found["logps_dtype"]} == {"torch.float32"}
    assert distance(both, wanted) < 1e-3
    assert both[0]["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert both[0]["trained_dtypes"] == ["torch.float32"]
    assert both[0]["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-3)


def test_stock_fsdp2_rounds_log_probabilities_to_bf16(alone, together):
    (wanted,), both = alone.found("grpo bf16"), together("fsdp2").found("stock")
    assert {dtype for found in both for dtype in found["logps_dtype"]} == {"torch.bfloat16"}
    # The reference, which is scored first, is the policy at the first step.
    assert distance(both, {"logps": wanted["logps"][:1]}) > 1e-2


@ENGINES
def test_processes_with_other_arguments_are_refused_in_all_of_them(engine, together):
    first, second = (found["refused"] for found in together(engine).found("ranks differ"))
    assert first == second
    assert re.search(r"differences from rank 0 \(.+\): rank 1 \(.+\): learning_rate 5e-05, not [^;]+\n", first)
    assert "[ranks-differ]" in first


@pytest.mark.slow
@pytest.mark.parametrize("part", ["sft bf16", "grpo bf16"])
def test_weights_that_one_process_loads_are_the_same_run(part, together, tmp_path):
    """As configs/fsdp2.yaml has it; the other processes build the model around empty weights."""
    once = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    run = processes.run("fsdp2", {part: {**ALIKE, **TOGETHER}[part]}, tmp_path / "once", environment=once)
    for found, wanted in zip(run.found(part), together("fsdp2").found(part), strict=True):
        assert found["losses"] == wanted["losses"]
        assert found["sums"] == wanted["sums"]
        assert found["dtensors"] == found["parameters"]


@pytest.mark.parametrize("part", ["sft bf16", "fp16"])
def test_fsdp2_computes_bit_for_bit_what_ddp_does(part, together):
    ddp, fsdp2 = (together(engine).found(part)[0] for engine in ("ddp", "fsdp2"))
    assert fsdp2["losses"] == ddp["losses"]
    assert fsdp2["sums"] == pytest.approx(ddp["sums"], rel=1e-6)
    for found in (ddp, fsdp2):  # the layers were seen to compute in half precision, though their weights are float32
        groups = {row["part"]: row for row in found["report"]["tables"]["module groups"]}
        assert groups["language model"]["compute"] == {"fp16": "float16", "sft bf16": "bfloat16"}[part]
        assert groups["language model"]["parameters"] == "float32"


def test_float32_modules_are_ddps(together):
    (ddp, _), (fsdp2, _) = (together(engine).found("float32 modules") for engine in ("ddp", "fsdp2"))
    assert fsdp2["losses"] == ddp["losses"]
    assert fsdp2["losses"][0] != together("fsdp2").found("sft bf16")[0]["losses"][0]


@ENGINES
def test_a_loss_that_is_infinite_in_one_process_skips_the_step_in_all(engine, together):
    for found in together(engine).found("fp16"):
        logs = [entry for entry in found["logs"] if "loss" in entry]
        assert [entry["precision/skipped_steps"] for entry in logs] == [1, 1, 1]
        assert [entry["precision/loss_scale"] for entry in logs] == [2.0**15] * 3
        # The schedule waits.
        assert logs[0]["learning_rate"] == logs[1]["learning_rate"] > logs[2]["learning_rate"]


@ENGINES
def test_pictures_of_sizes_that_are_new_to_one_process_do_not_lock(engine, together):
    one, other = together(engine).found("new sizes")
    assert len(one["losses"]) == 5
    assert one["losses"] == other["losses"]


@ENGINES
def test_pictures_and_completions_of_unequal_sizes_do_not_lock(engine, together):
    one, other = together(engine).found("rollout")
    assert len(one["losses"]) == 2
    lengths = [entry["completions/mean_length"] for entry in one["logs"] if "loss" in entry]
    # One process ends its completions with their first token.
    assert all(1 < length < 8 for length in lengths)
    assert one["sums"] == other["sums"]
    assert {dtype for found in (one, other) for dtype in found["logps_dtype"]} == {"torch.float32"}


@ENGINES
def test_metrics_are_of_all_processes(engine, alone, together):
    for part in together(engine).results[0].keys() - FAILING:
        one, other = together(engine).found(part)
        for mine, theirs in itertools.zip_longest(one["logs"], other["logs"]):
            ours = [{key: log[key] for key in log if key.startswith("precision/")} for log in (mine, theirs)]
            assert ours[0] == pytest.approx(ours[1], nan_ok=True)
    (wanted,), (found, _) = alone.found("grpo bf16"), together(engine).found("grpo bf16")
    whole, parts = ([log for log in run["logs"] if "precision/grad_zero_frac" in log] for run in (wanted, found))
    assert len(whole) == len(parts) == 1
    for name in ("grad_zero_frac", "update_lost_frac", "stalled_params"):
        assert parts[0][f"precision/{name}"] == pytest.approx(whole[0][f"precision/{name}"])
    # In the first step the gradients of one of LoRA's two matrices are 0.
    assert 0.4 < whole[0]["precision/grad_zero_frac"] < 0.6


@ENGINES
def test_one_report_per_run_which_names_the_engine(engine, together):
    runs = together(engine)
    shown = [text.count("precision report: Safe") for text in runs.stderr]
    stock = {"stock", *FAILING}
    assert shown == [len(runs.results[0].keys() - stock - {"rollout"}), 0]
    name = {"ddp": "DDP", "fsdp2": "FSDP2"}[engine]
    for part in runs.results[0].keys() - stock:
        report = runs.found(part)[0]["report"]
        assert report["facts"]["engine"] == f"{name}, 2 processes"
        assert [verdict["level"] for verdict in report["verdicts"]].count("ok") == 1, report["verdicts"]
        choices = {row["decision"]: row["value"] for row in report["tables"]["policy"]}
        assert choices.get("gathered weights") == ("as stored" if engine == "fsdp2" else None)


def test_trainables_that_accelerate_widens_are_planned_wide(together):
    for found in together("fsdp2").found("half"):
        assert found["trained_dtypes"] == ["torch.float32"]
        changed = found["report"]["tables"]["changed from stock"]
        assert any("with FSDP2 under autocast" in row["why"] for row in changed)


@pytest.mark.skipif("qlora" not in TOGETHER, reason="bitsandbytes is not installed here")
@pytest.mark.parametrize("part", ["qlora", "qlora float32", "qlora uint8"])
def test_qlora_under_fsdp2_is_ddps(part, together):
    (ddp, _), (fsdp2, _) = together("ddp").found("qlora"), together("fsdp2").found(part)
    assert fsdp2["losses"] == ddp["losses"]
    assert fsdp2["sums"] == pytest.approx(ddp["sums"], rel=1e-5)
    held = {row["parameters"] for row in fsdp2["report"]["tables"]["module groups"]}
    assert f"nf4 in {QLORA['packed'] if part == 'qlora' else part.split()[1]}" in held


def test_stock_fsdp2_cannot_train_an_adapter_against_its_base(together):
    """`beta` above 0 with LoRA: its first backward pass gives float32 adapters bfloat16 gradients."""
    for found in together("fsdp2").found("stock reference"):
        assert "assign a gradient with dtype 'c10::BFloat16'" in found["error"]


@pytest.mark.skipif("qlora" not in TOGETHER, reason="bitsandbytes is not installed here")
def test_stock_fsdp2_casts_packed_numbers(together):
    for found in together("fsdp2").found("stock qlora"):
        assert "is invalid for input of size" in found["error"]


@pytest.mark.parametrize(
    ("engine", "task"),
    [("ddp", "sft"), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("fsdp2", "sft"), ("fsdp2", "grpo")))],
)
def test_a_process_that_is_killed_in_a_step_ends_the_run_which_resumes(task, engine, tmp_path):
    run = {"task": task, "steps": 4, "save_strategy": "steps", "save_steps": 1, "folder": str(tmp_path / "saved")}
    (tmp_path / "killed").mkdir()
    with processes.started(engine, {"run": {**run, "killed_in": 2}}, tmp_path / "killed") as running:
        running.processes[1].wait(timeout=120)
        killed = time.monotonic()
        ended = running.wait(timeout=60)  # no launcher helps
    assert ended.statuses[1] == -signal.SIGKILL
    assert ended.statuses[0] not in (0, -signal.SIGKILL)
    assert time.monotonic() - killed < 60
    assert ended.results == [None, None]
    assert sorted(path.name for path in (tmp_path / "saved").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    parts = {"resumed": {**run, "resume": True}, "whole": {**run, "folder": None, "save_strategy": "no"}}
    both = processes.run(engine, parts, tmp_path / "again")
    for resumed, whole in zip(both.found("resumed"), both.found("whole"), strict=True):
        assert resumed["losses"] == whole["losses"]
        assert len(whole["losses"]) == 4
        assert resumed["sums"] == whole["sums"]


@ENGINES
def test_a_resumed_run_is_the_uninterrupted_one(engine, together):
    for whole, resumed in zip(*(together(engine).found(part) for part in ("whole", "resumed")), strict=True):
        assert len(whole["losses"]) == 4
        assert resumed["losses"] == whole["losses"]
        assert resumed["sums"] == whole["sums"]

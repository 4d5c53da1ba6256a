"""Recordings of runs change nothing, are small, and `safe-trainers diff` finds where two of them part."""

import json
import math

import cells
import numpy as np
import pytest
import torch
import trl
from benchmark_modules import load
from cells import Cell
from peft import LoraConfig, get_peft_model
from policing import reset_accelerate
from torch import nn

from benchmarks.planted_faults import FAULTS
from safe_trainers import PrecisionError, PrecisionWarning, diff_models, record, tiny
from safe_trainers.cli.main import main
from safe_trainers.diff import digest, storage
from safe_trainers.diff.compare import compare_recordings, compare_rollout
from safe_trainers.diff.names import canonical, fused_parts, pairs, watched_modules
from safe_trainers.diff.recorder import Recorder, _hook
from safe_trainers.numerics.replay import Replay


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")
QUICK = (
    "a linear layer computes in bfloat16",
    "the model shifts position ids by one",
    "the adapter is stale",
    "checkpointing with another random state",
    "TF32-like truncation",
    "other betas of the optimizer",
    "rollout: positions are off by one",
)


def train(*args, resume=None, **changes):
    trainer = build(*args, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def build(folder, task="sft", family="text", *, safe=True, lora=False, steps=2, **changes):
    reset_accelerate()
    cell = Cell(family, task, "fp32", None, lora=lora)
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    made = cells.arguments(cell, config, steps, output_dir=str(folder), **changes)
    torch.manual_seed(0)
    return (cells.SAFE if safe else cells.STOCK)[task](**made)


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ---- digests ----


def samples():
    yield torch.randn(5, 7, 3)
    yield torch.randn(9).bfloat16()
    yield torch.randn(4, 6).half()
    yield torch.randint(-5, 5, (3, 4))
    yield torch.rand(3, 5) > 0.5
    yield torch.tensor(2.0)
    yield torch.tensor([1.0, math.nan, math.inf])
    yield torch.randn(300, 65)


def test_a_hash_is_the_same_for_any_strides_and_together_with_others(monkeypatch):
    torch.manual_seed(0)
    tensors = [digest.plain(tensor) for tensor in samples()]
    alone = [digest.measure(tensor) for tensor in tensors]
    together = digest.measure_many([(tensor, 1) for tensor in tensors])
    for one, other in zip(alone, together, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1])
        np.testing.assert_array_equal(one[2], other[2])
    monkeypatch.setattr(digest, "_CHUNK", 8)  # large tensors are hashed in parts
    assert [int(digest.hash_of(tensor)) for tensor in tensors] == [one[0] for one in alone]
    turned = torch.randn(6, 4).t()
    assert digest.hash_of(digest.plain(turned)) == digest.hash_of(turned.clone(memory_format=torch.contiguous_format))
    rows = digest.measure_many([(tensors[0].view(5, 21), 5)])
    assert [row[0] for row in rows] == [digest.hash_of(row) for row in tensors[0].view(5, 21)]


def test_a_hash_differs_for_one_bit_and_for_swapped_rows():
    tensor = torch.randn(8, 8)
    other = tensor.clone()
    other[3, 4] = torch.nextafter(other[3, 4], torch.tensor(math.inf))
    assert len({digest.hash_of(t) for t in (tensor, other, tensor.flip(0), tensor.flip(1))}) == 4


@pytest.mark.parametrize("rows", [True, False])
def test_the_hash_of_a_fused_projection_follows_from_its_parts(rows):
    one, other = (torch.randn(3, 5), torch.randn(2, 5)) if rows else (torch.randn(4, 2), torch.randn(4, 6))
    axis = 0 if rows else 1
    sizes = [one.shape[axis], other.shape[axis]]
    joined = digest.joined_hash([digest.hash_of(one), digest.hash_of(other)], sizes, rows)
    assert joined == digest.hash_of(torch.cat([one, other], axis))


def of(tensor):
    value, stats, sample = digest.measure(tensor)
    name = str(tensor.dtype)[6:]
    return digest.Digest(name, tuple(tensor.shape), value, stats[0], int(stats[1]), sample)


def test_the_distance_is_in_units_of_the_coarser_dtype():
    tensor = torch.full((8,), 1.5)
    assert digest.ulp_distance(of(tensor), of(tensor.clone())) == 0
    assert digest.ulp_distance(of(tensor), of(tensor + 3 * 2.0**-23)) == 3
    assert digest.ulp_distance(of(tensor.bfloat16()), of(tensor.bfloat16() + 2 * 2.0**-7)) == 2
    assert digest.ulp_distance(of(tensor), of(torch.full((9,), 1.5))) == math.inf
    large = torch.randn(4096)
    nudged = large.clone()
    nudged[1] += 1e-6  # not sampled
    assert digest.ulp_distance(of(large), of(nudged)) == digest.UNSEEN


@pytest.mark.parametrize("count", [3, 43, 59, 64])
def test_thinned_samples_have_values_in_common(count):
    sample = np.arange(count)
    for size in (32, 16, 8, 4):
        small = digest.thinned(sample, size)
        assert 1 <= len(small) <= size
        for other in (sample, digest.thinned(sample, 32)):
            np.testing.assert_array_equal(digest.thinned(other, len(small)), small)


# ---- names ----


def test_names_are_those_without_wrappers():
    assert canonical("base_model.model.model.layers.0._orig_mod.mlp") == "model.layers.0.mlp"
    assert canonical("_fsdp_wrapped_module.model._checkpoint_wrapped_module.norm") == "model.norm"
    assert canonical("module.lm_head") == "lm_head"
    assert pairs(["q_proj", "q_proj.weight"], ["q_proj", "q_proj.base_layer.weight"]) == {
        "q_proj": "q_proj",
        "q_proj.weight": "q_proj.base_layer.weight",
    }
    assert pairs(["head.modules_to_save.default"], ["head"]) == {"head.modules_to_save.default": "head"}
    assert fused_parts("a.qkv_proj.weight") == ("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight")
    assert fused_parts("a.o_proj") == ()


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        if fused:
            self.qkv_proj = nn.Linear(4, 12, bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(12, 4, bias=False)

    def forward(self, hidden):
        if hasattr(self, "qkv_proj"):
            return self.o_proj(self.qkv_proj(hidden))
        return self.o_proj(torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], -1))


def test_fused_projections_are_compared_with_their_parts(tmp_path):
    parts, fused = Attention(False), Attention(True)
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.copy_(torch.randint(-3, 3, parameter.shape))  # products of integers are exact
        fused.qkv_proj.weight.copy_(torch.cat([parts.q_proj.weight, parts.k_proj.weight, parts.v_proj.weight]))
        fused.o_proj.weight.copy_(parts.o_proj.weight)
    inputs = torch.randint(-3, 3, (2, 5, 4)).float()
    for name, model in (("parts", parts), ("fused", fused)):
        with record(model, tmp_path / name):
            model(inputs)
    same = compare_recordings(str(tmp_path / "parts"), str(tmp_path / "fused"))
    assert same.cause is None
    assert same.compared > 5
    with torch.no_grad():
        fused.qkv_proj.weight[5] += 1  # a row of k_proj
    with record(fused, tmp_path / "other"):
        fused(inputs)
    found = compare_recordings(str(tmp_path / "parts"), str(tmp_path / "other"))
    assert (found.cause.module, found.cause.kind) == ("qkv_proj", "weights")


def test_adapters_that_change_nothing_are_no_difference(tmp_path):
    ids = torch.arange(3, 19).reshape(2, 8)
    model = tiny.build_model("text")
    with record(model, tmp_path / "base"):
        model(input_ids=ids)
    with record(get_peft_model(model, LoraConfig(target_modules=["q_proj"])).eval(), tmp_path / "peft"):
        model(input_ids=ids)
    found = compare_recordings(str(tmp_path / "base"), str(tmp_path / "peft"))
    assert found.cause is None
    assert any("lora_A" in name for name in found.alone)
    assert found.compared > 50


def test_compiled_modules_are_recorded_from_outside(tmp_path):
    model = tiny.build_model("text")
    layer = model.model.layers[0]
    model.model.layers[0] = torch.compile(layer, backend="eager")
    names = [name for name, _ in watched_modules(model)]
    assert "model.layers.0" in names
    assert not any(name.startswith("model.layers.0.") for name in names)


# ---- runs ----


@pytest.mark.parametrize(
    ("task", "family", "lora", "changes"),
    [
        ("sft", "gpt_oss", False, {"gradient_checkpointing": True}),
        ("grpo", "text", False, {}),
        ("grpo", "llava", True, {}),
    ],
)
def test_a_recording_changes_no_bit_of_a_run(task, family, lora, changes, tmp_path):
    plain = train(tmp_path / "plain", task, family, lora=lora, **changes)
    recorded = train(tmp_path / "recorded", task, family, lora=lora, record_steps=[1, 2], **changes)
    assert cells.fingerprint(recorded.model) == cells.fingerprint(plain.model)
    assert not (tmp_path / "plain" / storage.FOLDER).exists()
    assert hooks_of(recorded.model) == hooks_of(plain.model)
    files = list((tmp_path / "recorded" / storage.FOLDER).glob("step-*"))
    assert len(files) == 2
    assert max(file.stat().st_size for file in files) < storage.MOST_BYTES


def test_stock_and_safe_compute_the_same_in_float32(tmp_path):
    reset_accelerate()
    stock = cells.STOCK["sft"](
        **cells.arguments(Cell("text", "sft", "fp32", None), cells.PLAIN["sft"], output_dir=str(tmp_path))
    )
    with record(stock, tmp_path / "stock", steps=2):
        stock.train()
    train(tmp_path / "safe", record_steps=2)
    found = compare_recordings(str(tmp_path / "stock"), str(tmp_path / "safe"))
    assert found.cause is None
    assert found.steps == (1, 2)
    assert found.compared > 200


def test_a_resumed_run_is_compared_with_the_run_that_went_on(tmp_path):
    train(tmp_path / "whole", record_steps=[2], save_strategy="steps", save_steps=1)
    resumed = str(tmp_path / "whole" / "checkpoint-1")
    train(tmp_path / "resumed", record_steps=[2], resume=resumed)
    assert compare_recordings(str(tmp_path / "whole"), str(tmp_path / "resumed")).cause is None
    train(tmp_path / "lost", record_steps=[2], resume=resumed, max_grad_norm=1e-3)
    found = compare_recordings(str(tmp_path / "whole"), str(tmp_path / "lost"))
    assert (found.cause.module, found.cause.kind) == ("(gradients)", "setting")


@pytest.mark.parametrize(
    "name", [pytest.param(f.name, marks=() if f.name in QUICK else pytest.mark.slow) for f in FAULTS]
)
def test_a_planted_fault_is_named(name, tmp_path, monkeypatch):
    faults = load(monkeypatch, "diff_faults")
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    row = faults.judged(fault, faults.Runs(tmp_path), tmp_path)
    assert row["right"], row


def test_a_reference_pair_sets_what_counts_as_noise(tmp_path):
    ids = torch.arange(3, 19).reshape(2, 8)
    for name, offset in (("a", 0.0), ("noisy", 1e-6), ("b", 2e-6), ("far", 1e-3)):
        model = tiny.build_model("text")
        model.model.layers[0].mlp.register_forward_hook(lambda m, i, output, offset=offset: output + offset)
        with record(model, tmp_path / name):
            model(input_ids=ids)
    a, noisy, b, far = (str(tmp_path / name) for name in ("a", "noisy", "b", "far"))
    assert compare_recordings(a, b).cause.module == "model.layers.0.mlp"
    assert compare_recordings(a, b, [noisy]).cause is None
    assert compare_recordings(a, far, [noisy]).cause.module == "model.layers.0.mlp"


def test_a_swap_confirms_the_cause_and_changes_neither_model():
    first, second = tiny.build_model("text"), tiny.build_model("text")
    with torch.no_grad():
        second.model.layers[0].mlp.up_proj.weight[3] *= 1.01
    inputs = {"input_ids": torch.arange(3, 19).reshape(2, 8), "labels": torch.arange(3, 19).reshape(2, 8)}
    before, state = [cells.fingerprint(model) for model in (first, second)], torch.get_rng_state()
    found = diff_models(first, second, inputs)
    assert (found.cause.module, found.cause.kind) == ("model.layers.0.mlp.up_proj", "weights")
    assert found.cause.text.endswith("with the first model's weights it is equal")
    assert [cells.fingerprint(model) for model in (first, second)] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for model in (first, second) for p in model.parameters())
    for model in (first, second):
        model.train().gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    found = diff_models(first, second, inputs)
    assert (found.cause.module, found.cause.kind) == ("model.layers.0.mlp.up_proj", "weights")
    assert all(p.grad is None for model in (first, second) for p in model.parameters())
    second = tiny.build_model("text")
    second.model.norm.variance_epsilon = 1e-3
    found = diff_models(first, second, inputs)
    assert (found.cause.module, found.cause.kind) == ("model.norm", "setting")
    assert "with the first model's settings it is equal" in found.cause.text
    assert second.model.norm.variance_epsilon == 1e-3


# ---- files ----


def test_a_recording_that_cannot_be_written_ends_without_the_run(tmp_path):
    (tmp_path / storage.FOLDER).write_text("a file")
    with pytest.warns(PrecisionWarning, match=r"\[not-recorded\]"):
        trainer = train(tmp_path, record_steps=[1, 2])
    assert trainer.state.global_step == 2
    assert hooks_of(trainer.model) == hooks_of(train(tmp_path / "plain").model)


@pytest.mark.parametrize("place", ["_enter", "_leave", "gradient", "gradients", "updated"])
def test_an_error_of_the_recorder_ends_the_recording_and_not_the_run(place, tmp_path, monkeypatch):
    def fails(self, *args):
        raise ZeroDivisionError(place)

    inside = getattr(Recorder, place)
    monkeypatch.setattr(Recorder, place, _hook(fails) if hasattr(inside, "__wrapped__") else fails)
    with pytest.warns(PrecisionWarning, match=rf"ZeroDivisionError: {place}. The run continues"):
        trainer = train(tmp_path, record_steps=[1, 2])
    assert trainer.state.global_step == 2
    plain = train(tmp_path / "plain")
    assert hooks_of(trainer.model) == hooks_of(plain.model)
    assert cells.fingerprint(trainer.model) == cells.fingerprint(plain.model)
    assert not list((tmp_path / storage.FOLDER).glob("step-*"))


def test_the_diagnosis_of_a_skipped_step_is_not_recorded(tmp_path, monkeypatch):
    """Its losses are computed again while the recorder's hooks are on the model."""
    events, passes, again = {}, [], Replay.again

    def counted(self, *args):
        passes.append(1)
        return again(self, *args)

    for diagnosed in (True, False):
        monkeypatch.setattr(Replay, "again", counted if diagnosed else lambda *args: None)
        folder = tmp_path / str(diagnosed)
        trainer = build(folder, record_steps=[1], steps=1)
        trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
        with pytest.raises(PrecisionError, match=r"\[no-step-taken\]"):
            trainer.train()
        events[diagnosed] = len(storage.read_recording(folder).step(1).events)
    assert passes
    assert events[True] == events[False] > 50


def test_an_error_while_stock_is_recorded_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "updated", lambda self: 1 / 0)
    stock = trl.SFTTrainer(**cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig))
    with pytest.warns(PrecisionWarning, match="ZeroDivisionError"), record(stock, tmp_path):
        stock.train()
    assert stock.state.global_step == 2


@pytest.mark.parametrize("steps", [[0], ["1"], [1.5]])
def test_steps_are_a_list_of_numbers_from_one(steps, tmp_path):
    with pytest.raises(PrecisionError, match="a list of integers of at least 1"):
        cells.SAFE_CONFIG["sft"](str(tmp_path), use_cpu=True, record_steps=steps)


# ---- command ----


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    train(folder / "run", "grpo", record_steps=[1])
    train(folder / "again", "grpo", record_steps=[1])
    train(folder / "other", "grpo", record_steps=[1], learning_rate=2e-3)
    train(folder / "model", "sft", "gpt_oss", record_steps=[1])
    train(folder / "later", "grpo", record_steps=[2])
    return folder


def test_the_command_prints_the_first_difference_and_its_cause(recorded, capsys):
    assert main(["diff", str(recorded / "run"), str(recorded / "again")]) == 0
    assert "no difference beyond noise" in capsys.readouterr().out
    assert main(["diff", str(recorded / "run"), str(recorded / "other"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["module"] == "(optimizer)"
    assert report["facts"]["cause"] == "setting"
    assert "`group 0.lr` is 0.001 and 0.002" in report["verdicts"][0]["text"]
    assert main(["diff", str(recorded / "run"), str(recorded / "other"), "--phase", "forward"]) == 0
    assert compare_recordings(*(str(recorded / name) for name in ("run", "again")), phase="optimizer").compared
    assert main(["diff", str(recorded / "run"), "--rollout"]) == 0
    assert compare_rollout(str(recorded / "run")).compared > 50


def test_generating_without_a_trainer_is_a_rollout(tmp_path):
    model = tiny.build_model("text").eval()
    with record(model, tmp_path):
        model.generate(torch.arange(3, 11)[None], max_new_tokens=3)
    phases = {event.phase for event in storage.read_recording(tmp_path).step(1).events}
    assert storage.ROLLOUT in phases
    assert storage.SCORING not in phases


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "model"], "are recordings of different models: LlamaForCausalLM and GptOssForCausalLM"),
        (["run", "."], "has no recordings. Record the run: write record_steps: [1] in its recipe"),
        (["run", "nowhere"], "is not a folder"),
        (["run", "later"], "none in common. Record the second run with record_steps: [1]"),
        (["run"], "write two run folders, or one and --rollout"),
        (["run", "again", "--rollout"], "write two run folders, or one and --rollout"),
        (["run", "--rollout", "--phase", "forward"], "--phase forward has no effect. Drop one of the two"),
        (["model", "--rollout"], "has no step in which tokens are sampled"),
        (["model", "model", "--phase", "rollout"], "have no value in common in the phase rollout. "),
    ],
)
def test_input_that_cannot_be_compared_is_one_error(recorded, capsys, arguments, message):
    plain = {"rollout", "forward"}
    given = [a if a.startswith("--") or a in plain else str(recorded / a) for a in arguments]
    assert main(["diff", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_damaged_recording_is_one_error(recorded, tmp_path, capsys):
    for file in (recorded / "run" / storage.FOLDER).iterdir():
        kept = 500 if file.name.startswith("step") else None
        (tmp_path / file.name).write_bytes(file.read_bytes()[:kept])
    assert main(["diff", str(recorded / "run"), str(tmp_path)]) == 2
    assert "is not a complete recording of a step" in capsys.readouterr().err
    (tmp_path / storage.MODEL).write_text(f'{{"version": {storage.VERSION}}}')
    assert main(["diff", str(recorded / "run"), str(tmp_path)]) == 2
    assert "is not complete: it has no kinds. Record the run again" in capsys.readouterr().err


def test_a_comparison_of_one_phase_has_the_cause_of_the_whole_one(tmp_path):
    def run(folder, change=None):
        trainer = build(tmp_path / folder, record_steps=[1])
        if change is not None:
            change(trainer.model.model.layers[0])
        trainer.train()
        return str(tmp_path / folder)

    def sharper(layer):
        layer.self_attn.scaling *= 2

    def heavier(layer):
        layer.mlp.up_proj.weight.data *= 1.5

    plain, sharp, heavy = run("plain"), run("sharp", sharper), run("heavy", heavier)
    for phase in ("backward", "optimizer"):
        cause = compare_recordings(plain, sharp, phase=phase).cause
        assert cause.kind == "inputs", cause
        assert "differs before, in the phase forward: compare all phases" in cause.text
    cause = compare_recordings(plain, heavy, phase="forward").cause
    assert (cause.module, cause.kind) == ("model.layers.0.mlp.up_proj", "weights")


def test_a_resumed_run_keeps_the_steps_that_it_does_not_repeat(tmp_path):
    def steps(folder):
        return sorted(path.name for path in (tmp_path / folder / storage.FOLDER).glob("step-*"))

    kept = {"record_steps": [1, 3], "save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "run", steps=3, **kept)
    both = ["step-000001.safetensors", "step-000003.safetensors"]
    assert steps("run") == both
    (tmp_path / "run" / storage.FOLDER / both[1]).unlink()
    train(tmp_path / "run", steps=3, resume=str(tmp_path / "run" / "checkpoint-2"), **kept)
    assert steps("run") == both
    train(tmp_path / "whole", steps=3, **kept)
    assert compare_recordings(str(tmp_path / "run"), str(tmp_path / "whole")).cause is None
    train(tmp_path / "run", steps=3, resume=str(tmp_path / "run" / "checkpoint-2"), **kept, max_grad_norm=1e-3)
    found = compare_recordings(str(tmp_path / "run"), str(tmp_path / "whole"))
    assert (found.differences[0].step, found.cause.kind) == (3, "setting")  # and not in step 1, which has its own
    assert "`max_grad_norm` is 0.001 and 1.0" in found.cause.text
    described = tmp_path / "run" / storage.FOLDER / storage.MODEL
    described.write_text(described.read_text().replace('"threads": ', '"threads": 9'))
    train(tmp_path / "run", steps=3, resume=str(tmp_path / "run" / "checkpoint-2"), **kept)
    assert steps("run") == both[1:]  # the other one was recorded in another environment
    train(tmp_path / "run", steps=2, record_steps=[2])
    assert steps("run") == ["step-000002.safetensors"]


def test_steps_that_a_run_does_not_reach_are_a_warning_and_leave_no_old_ones(tmp_path):
    train(tmp_path, record_steps=[1])
    with pytest.warns(PrecisionWarning, match=r"the run ends after step 2, and records no step.*\n.*\[1\]") as caught:
        train(tmp_path, record_steps=[3, 4])
    assert [str(w.message).count("[step-not-reached]") for w in caught if "step-not" in str(w.message)] == [1]
    assert not list((tmp_path / storage.FOLDER).glob("step-*"))


@pytest.mark.parametrize("steps", [0, -1, [], [0, 1]])
def test_a_recording_of_no_step_is_refused(steps, tmp_path):
    with pytest.raises(ValueError, match="of at least 1, got"), record(build(tmp_path), tmp_path / "r", steps=steps):
        pass


def test_a_large_number_of_steps_takes_no_memory(tmp_path):
    train(tmp_path, record_steps=10**12)
    assert len(list((tmp_path / storage.FOLDER).glob("step-*"))) == 2

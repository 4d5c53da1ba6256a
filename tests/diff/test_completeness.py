"""What a recording leaves out is said: calls inside the model, values of large files, and other processes."""

import copy
import json
from functools import partial

import cells
import pytest
import torch
from cells import Cell
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from policing import reset_accelerate
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from safe_trainers import SafeSFTConfig, SafeSFTTrainer, diff_models, record, tiny
from safe_trainers.cli.main import main
from safe_trainers.diff import digest, storage
from safe_trainers.diff.compare import compare_recordings, compare_rollout
from safe_trainers.diff.digest import SAMPLES
from safe_trainers.diff.record import StepWriter
from safe_trainers.diff.recorder import Recorder
from safe_trainers.diff.storage import FORWARD, MOST_CALLS, POST, REFERENCE, ROLLOUT, SCORING
from safe_trainers.diff.writing import most_bytes, write_step
from upstream import needs_transformers_5


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")
PASSES = 12


def batch(number, changed=None):
    ids = (torch.arange(8) + number)[None] % 16 + 3
    return {"input_ids": ids + (number == changed), "labels": ids}


def passes(folder, model, count=PASSES, changed=None, after=lambda model: None):
    """Records some forward and backward passes; in one of them the tokens may be changed."""
    with record(model, folder):
        for number in range(count):
            model(**batch(number, changed)).loss.backward()
        after(model)
    return str(folder)


def gradients_times(factor, model):
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def narrow(layers):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=32, **sizes))


def step_of(folder, rank=0):
    return storage.read_recording(folder).step(1, rank)


# ---- calls inside the model ----


@pytest.mark.parametrize("changed", [0, MOST_CALLS, PASSES - 1])
def test_other_tokens_in_any_micro_batch_are_the_cause(changed, tmp_path):
    plain = passes(tmp_path / "plain", tiny.build_model("text"))
    found = compare_recordings(plain, passes(tmp_path / "other", tiny.build_model("text"), changed=changed))
    assert (found.cause.module, found.cause.kind) == ("", "inputs")
    assert found.differences[0].value == "input input_ids"
    assert compare_recordings(plain, passes(tmp_path / "again", tiny.build_model("text"))).cause is None


def test_the_data_of_a_late_micro_batch_of_a_trainer_is_the_cause(tmp_path):
    def train(folder, last):
        reset_accelerate()
        args = SafeSFTConfig(
            str(tmp_path / folder), record_steps=[1], max_steps=1, precision="fp32", per_device_train_batch_size=1,
            gradient_accumulation_steps=PASSES, report_to=[], use_cpu=True, save_strategy="no",
        )  # fmt: skip
        trainer = SafeSFTTrainer(
            tiny.build_model("text"), args=args, processing_class=tiny.build_tokenizer("text"),
            train_dataset=Dataset.from_dict({"text": ["two red squares"] * (PASSES - 1) + [last]}),
        )  # fmt: skip
        trainer._get_train_sampler = lambda *args: SequentialSampler(trainer.train_dataset)
        trainer.train()
        return str(tmp_path / folder)

    found = compare_recordings(train("plain", "two red squares"), train("other", "two blue squares"))
    assert found.cause.kind == "inputs", found.cause
    assert found.cause.module in ("", "(loss)")


@pytest.mark.parametrize("first", [0, MOST_CALLS])
def test_a_call_that_is_not_recorded_is_no_kernel(first, tmp_path):
    def faulty():
        model, calls = tiny.build_model("text"), []

        def late(module, args, output):
            calls.append(1)
            return output * 1.5 if len(calls) > first else None

        model.model.layers[0].mlp.up_proj.register_forward_hook(late)
        return model

    plain = passes(tmp_path / "plain", tiny.build_model("text"))
    cause = compare_recordings(plain, passes(tmp_path / "other", faulty())).cause
    if first == 0:
        assert (cause.module, cause.kind) == ("model.layers.0.mlp.up_proj", "kernel")
    else:
        assert (cause.module, cause.kind) == ("", "not recorded")
        assert "calls inside are not recorded: of each module the first 8 are" in cause.text


def test_the_gradients_of_calls_that_are_not_recorded_are_no_kernel(tmp_path):
    plain, scaled = tiny.build_model("text"), tiny.build_model("text")
    scaled.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 1.5)
    cause = compare_recordings(passes(tmp_path / "a", plain, 2), passes(tmp_path / "b", scaled, 2)).cause
    assert (cause.module, cause.kind) == ("model.layers.0.mlp.up_proj", "kernel")
    cause = compare_recordings(passes(tmp_path / "c", plain), passes(tmp_path / "d", scaled)).cause
    assert (cause.module, cause.kind) == ("model.layers.0.mlp.up_proj", "not recorded")


# ---- large files ----


def test_a_step_of_many_micro_batches_fits(tmp_path):
    """1 MB for each of them: gradients are compared, which a limit of 1 MB for the step left out."""
    plain = passes(tmp_path / "plain", narrow(48), 8)
    found = compare_recordings(plain, passes(tmp_path / "x", narrow(48), 8, after=partial(gradients_times, 3.0)))
    assert (found.cause.module, found.missing) == ("(gradients)", 0)
    (file,) = tmp_path.glob("plain/step-*")
    assert storage.MOST_BYTES < file.stat().st_size < most_bytes(8, 1)


def test_of_a_large_step_samples_are_thinned_and_then_calls_inside_are_left_out(tmp_path, monkeypatch, capsys):
    whole = step_of(passes(tmp_path / "whole", tiny.build_model("text"), 3))
    bytes_of_whole = next(tmp_path.glob("whole/step-*")).stat().st_size
    lengths = []
    for share in (0.8, 0.3):
        monkeypatch.setattr(storage, "MOST_BYTES", int(share * bytes_of_whole / 3))
        folder = passes(tmp_path / str(share), tiny.build_model("text"), 3)
        assert next((tmp_path / str(share)).glob("step-*")).stat().st_size <= share * bytes_of_whole
        lengths.append([len(event.value.sample) for event in step_of(folder).events if event.value is not None])
    small = step_of(folder)
    assert max(lengths[0]) == SAMPLES
    assert len(lengths[0]) == len([event for event in whole.events if event.value is not None])
    assert max(lengths[1]) <= SAMPLES // 8
    assert sum(small.dropped.values()) + len(small.events) == len(whole.events)
    kept = {(e.phase, e.kind, e.name, e.call, e.slot) for e in small.events}
    for event in whole.events:
        important = not event.name or event.slot.endswith(".grad") or event.kind == storage.LEFT_OUT
        assert not important or (event.phase, event.kind, event.name, event.call, event.slot) in kept
    calls = [sum(e.name == "model.norm" and e.call == call for e in small.events) for call in range(3)]
    assert calls[0] >= calls[1] >= calls[2] == 0
    again = passes(tmp_path / "again", tiny.build_model("text"), 3)
    found = compare_recordings(folder, again)
    assert found.cause is None
    assert found.missing == 2 * sum(small.dropped.values())
    assert main(["diff", folder, again]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "no difference beyond noise in what was recorded" in printed
    assert f"{found.missing:,} values are not recorded" in printed
    spoilt = passes(tmp_path / "spoilt", tiny.build_model("text"), 3, after=partial(gradients_times, 3.0))
    cause = compare_recordings(folder, spoilt).cause
    assert (cause.module, cause.kind) == ("(gradients)", "not recorded")


def test_a_step_of_any_size_is_cut(tmp_path):
    recorder = Recorder(nn.Linear(2, 2))
    recorder.begin()
    for index in range(30_000):
        recorder.add(storage.LOSS, POST, f"(part {index % 7})", [torch.randn(100)])
    columns, tables = recorder.end()
    storage.write_model(tmp_path, recorder.description() | {"settings": {}})
    write_step(tmp_path, 1, 0, columns, tables)
    assert next(tmp_path.glob("step-*")).stat().st_size <= storage.MOST_BYTES
    step = step_of(tmp_path)
    assert step.dropped[storage.LOSS] > 0
    assert sum(step.dropped.values()) + len(step.events) == 30_002
    assert len(step.events[-1].value.sample) < SAMPLES


def test_factors_take_no_memory_after_a_step(tmp_path):
    model = tiny.build_model("text")
    recorder = Recorder(model)
    recorder.begin()
    model(input_ids=torch.arange(3, 19).reshape(2, 8))
    recorder.end()
    digest.hash_of(torch.zeros(2, 2 * digest._KEPT))
    assert digest._table.cache_info().currsize == 1
    recorder.begin()
    recorder.end()
    assert [cache.cache_info().currsize for cache in (digest._table, digest._device_table)] == [0, 0]
    for count in range(1, 400):
        digest.hash_of(torch.zeros(2, count))
    sizes = [2**i for i in range(17)]
    assert sizes[-1] == digest._KEPT
    kept = [digest._small_table(base, size).nbytes for base in (digest._ROWS, digest._COLUMNS) for size in sizes]
    assert sum(kept) < 2**21 + 2**12  # two bases, and tables of powers of 2
    assert digest._small_table.cache_info().currsize <= len(kept)
    assert digest._factors.cache_info().maxsize * 8 * digest.BATCHED <= 2**24


# ---- processes ----


def of_two_processes(folder, changed=None, factor=1.0, ranks=(0, 1)):
    """Records one step of two processes; all-reduced gradients differ in both of them."""
    for rank in ranks:
        model = tiny.build_model("text")
        writer = StepWriter(model, folder, [1], pytest.fail, rank=rank)
        writer.begin(1)
        model(**batch(rank, changed if rank else None)).loss.backward()
        gradients_times(factor, model)
        writer.attempt(lambda recorder: recorder.gradients(None))
        writer.end()
    return str(folder)


def test_the_process_that_parts_first_is_named(tmp_path, capsys):
    plain = of_two_processes(tmp_path / "plain")
    same = compare_recordings(plain, of_two_processes(tmp_path / "again"))
    assert (same.cause, same.ranks) == (None, (0, 1))
    other = of_two_processes(tmp_path / "other", changed=1, factor=1.5)
    found = compare_recordings(plain, other)
    assert (found.cause.module, found.cause.kind) == ("", "inputs")
    assert {difference.rank for difference in found.differences} == {1}
    assert main(["diff", plain, other, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["processes"] == "0, 1"
    assert facts["first difference"].startswith("step 1, process 1, forward, ")
    single = of_two_processes(tmp_path / "single", ranks=(0,))
    found = compare_recordings(plain, single)
    assert (found.cause, found.ranks, found.other_ranks) == (None, (0,), (1,))
    assert main(["diff", plain, other, "--noise", single]) == 2
    assert "has no recording of process 1 in step 1" in capsys.readouterr().err


# ---- phases ----


def test_a_reference_without_adapters_is_not_the_training(tmp_path):
    reset_accelerate()
    made = cells.arguments(
        Cell("text", "grpo", "fp32", None, lora=True), cells.SAFE_CONFIG["grpo"], 2,
        output_dir=str(tmp_path), record_steps=[2], beta=0.1, learning_rate=1e-2,
    )  # fmt: skip
    trainer = cells.SAFE["grpo"](**made)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter.data, 0.1)
    trainer.train()
    phases = {event.phase for event in storage.read_recording(tmp_path).step(2).events}
    assert {ROLLOUT, REFERENCE, FORWARD} <= phases
    found = compare_rollout(str(tmp_path))
    assert found.cause is None
    assert found.compared > 20


@pytest.mark.parametrize(
    "family", ["llava", pytest.param("aria", marks=needs_transformers_5("decodes with other kernels")), "qwen2_5_vl"]
)
def test_sampled_tokens_of_image_prompts_are_found_in_the_training(family, tmp_path):
    reset_accelerate()
    made = cells.arguments(
        Cell(family, "grpo", "fp32", None), cells.SAFE_CONFIG["grpo"], 1, output_dir=str(tmp_path), record_steps=[1]
    )
    made["train_dataset"] = tiny.prompt_dataset(16, seed=0)  # one prompt, and a different image in each row
    trainer = cells.SAFE["grpo"](**made)
    trainer.train()
    assert "generate" not in vars(trainer.model)
    found = compare_rollout(str(tmp_path))
    assert found.cause is None
    assert found.compared > 50


def test_passes_of_other_adapters_are_a_reference(tmp_path):
    model = get_peft_model(tiny.build_model("text"), LoraConfig(target_modules=["q_proj"])).eval()
    model.add_adapter("ref", LoraConfig(target_modules=["q_proj"]))
    ids = torch.arange(3, 19).reshape(2, 8)

    def phases(folder, *calls):
        with record(model, tmp_path / folder), torch.no_grad():
            for call in calls:
                call()
        return [(e.phase, e.call) for e in step_of(tmp_path / folder).events if e.kind == POST and not e.name]

    def of(adapter):
        model.set_adapter(adapter)
        model(input_ids=ids)
        model.set_adapter("default")

    def without():
        with model.disable_adapter():
            model(input_ids=ids)

    plain = partial(model, input_ids=ids)
    found = phases("some", plain, partial(of, "ref"), plain, without, partial(of, "default"))
    assert found == [(SCORING, 0), (REFERENCE, 0), (SCORING, 1), (REFERENCE, 1), (SCORING, 2)]
    # The phase is that of the outermost call, whose layers get a cache.
    base = model.get_base_model().model
    with record(model, tmp_path / "inside"), torch.no_grad():
        base(input_ids=ids, use_cache=True)
    assert {e.phase for e in step_of(tmp_path / "inside").events} == {storage.START, SCORING}


# ---- models stay as they are ----


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_buffers_of_compared_models_stay(factor):
    torch.manual_seed(0)
    first = Normed()
    second = copy.deepcopy(first)
    second.linear.weight.data *= factor
    before = [copy.deepcopy(model.state_dict()) for model in (first, second)]
    inputs = {"x": torch.randn(6, 4)}
    found = diff_models(first, second, inputs)
    assert (found.cause and found.cause.module) == (None if factor == 1 else "linear")
    for model, state in zip((first, second), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_gradients_of_compared_models_and_inputs_stay():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x):
            return type("Output", (), {"loss": self.linear(x).sum()})

    first = Loss()
    held = first.linear.weight.grad = torch.ones(1, 4)
    x = torch.randn(2, 4, requires_grad=True)
    assert diff_models(first, copy.deepcopy(first), {"x": x}).cause is None
    assert first.linear.weight.grad is held
    assert torch.equal(held, torch.ones(1, 4))
    assert first.linear.bias.grad is x.grad is None


def test_a_copy_of_the_model_in_a_recorded_step_is_not_recorded(tmp_path):
    class Copies(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.copy = copy.deepcopy(model)
            self.copy.model(input_ids=torch.arange(3, 11)[None])  # the `forward` that TRL replaces is the original's

    def train(folder, *callbacks):
        reset_accelerate()
        made = cells.arguments(Cell("text", "sft", "fp32", None), cells.SAFE_CONFIG["sft"], 2,
                               output_dir=str(tmp_path / folder), record_steps=[1, 2])  # fmt: skip
        trainer = cells.SAFE["sft"](**made, callbacks=list(callbacks))
        trainer.train()
        return str(tmp_path / folder)

    copies = Copies()
    folders = train("plain"), train("copied", copies)
    assert len(list((tmp_path / "copied" / storage.FOLDER).glob("step-*"))) == 2
    assert compare_recordings(*folders).cause is None
    counts = [len(storage.read_recording(folder).step(2).events) for folder in folders]
    assert counts[0] == counts[1]
    copies.copy.model(input_ids=torch.arange(3, 11)[None])

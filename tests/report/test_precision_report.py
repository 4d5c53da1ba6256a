"""The precision report of a run: its numbers against a second count, what was planned against what is, and where it is
shown."""

import json
import warnings
from collections import Counter

import cells
import pytest
import torch
import trl
from cells import Cell
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from safe_trainers import PrecisionBase, PrecisionError, PrecisionMixin, PrecisionWarning, SafeSFTConfig, tiny
from safe_trainers.model.inventory import CountContext, count_groups
from safe_trainers.numerics.step_monitor import StepMonitor
from safe_trainers.report.reporter import Reporter
from safe_trainers.report.run_report import COLUMNS, COVERAGE, FILE, GROUPS, PLANNED, POLICY
from safe_trainers.testing import fp16_on_cpu


VISION, PROJECTOR = "vision tower (vision_tower)", "projector (multi_modal_projector)"
BEGIN = "<!-- precision report -->"


class Eyes(TrainerCallback):
    """What a test sees of gradients by itself."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {n: p.grad.dtype for n, p in model.named_parameters() if p.grad is not None}


def built(cell, tmp_path, trainer_class=None, **changes):
    config = cells.SAFE_CONFIG[cell.task]
    settings = {key: changes.pop(key) for key in list(changes) if key in config.__dataclass_fields__}
    made = cells.arguments(cell, config, steps=1, output_dir=str(tmp_path), **settings)
    if cell.lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return (trainer_class or cells.SAFE[cell.task])(**made, **changes)


def groups(report):
    return [dict(zip(COLUMNS, row, strict=True)) for row in report.table(GROUPS).rows]


def part_of(name):
    """The parts of a LLaVA by names, and not by structure."""
    if "lora_" in name:
        return "adapter (default)"
    if "vision_tower" in name:
        return VISION
    if "multi_modal_projector" in name:
        return PROJECTOR
    return "head" if "lm_head" in name or "score" in name else "language model"


def second_count(model):
    """Bytes by part, from the storages of what a checkpoint would hold, each storage once."""
    buffers = {name for name, _ in model.named_buffers()}
    counted, seen = Counter(), set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".quant_state.bitsandbytes__" in name:
            content = json.loads(bytes(tensor.tolist()))
            counted[part_of(name)] += 4 if "nested_offset" in content else 0  # one float32, in the text
        elif name not in buffers and tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            counted[part_of(name)] += tensor.untyped_storage().nbytes()
    return counted


def assert_as_counted(trainer):
    report = trainer.precision.report
    found = Counter()
    for row in groups(report):
        if not row["part"].startswith(("buffers", "reference model")):
            found[row["part"]] += row["bytes"]
    assert found == second_count(trainer.model)
    states = {tensor for state in trainer.optimizer.optimizer.state.values() for tensor in state.values()}
    assert report.facts["optimizer bytes"] == sum(tensor.untyped_storage().nbytes() for tensor in states)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert report.facts["trained elements"] == trained == sum(r["elements"] for r in groups(report) if r["trainable"])
    held = trainer.optimizer.optimizer.state
    for row in groups(report):
        members = [(n, p) for n, p in trainer.model.named_parameters() if part_of(n) == row["part"]]
        if row["trainable"]:
            gradients = {str(trainer.eyes.gradients[n])[6:] for n, _ in members if n in trainer.eyes.gradients}
            assert row["gradient"] == " and ".join(sorted(gradients))
            states = {str(held[p]["exp_avg"].dtype)[6:] for _, p in members if p in held}
            assert row["optimizer state"] == " and ".join(sorted(states))
        else:
            assert (row["gradient"], row["optimizer state"]) == (None, None)


def trained(trainer):
    trainer.eyes = Eyes()
    trainer.add_callback(trainer.eyes)
    trainer.train()
    return trainer


def four_bit():
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(
    ("cell", "changes", "held"),
    [
        (Cell("llava", "sft", "fp32", "bf16"), {}, "float32"),
        (Cell("llava", "grpo", "bf16", "bf16", lora=True), {}, "float32"),
        (Cell("llava", "sft", "bf16", "bf16", lora=True), {"quantization_config": four_bit}, "bfloat16"),
        (Cell("reward", "reward", "fp32", None), {}, "float32"),
        (Cell("llava", "sft", "fp16", "fp16"), {"trainer_class": lambda: fp16_on_cpu(cells.SAFE["sft"])}, "float32"),
    ],
    ids=["full", "lora", "4-bit", "reward", "fp16"],
)
def test_the_numbers_are_those_of_a_second_count(cell, changes, held, tmp_path):
    trainer = trained(built(cell, tmp_path, **{key: make() for key, make in changes.items()}))
    report = trainer.precision.report
    assert_as_counted(trainer)
    assert {row["parameters"] for row in groups(report) if row["trainable"]} == {held}
    assert report.facts["phase"] == "confirmed"
    assert [verdict.level for verdict in report.verdicts if "planned" in verdict.text] == ["ok"]
    compute = {row["compute"] for row in groups(report)} - {None}
    assert compute == {{"bf16": "bfloat16", "fp16": "float16", None: "float32"}[cell.flag]}


def test_packed_layers_show_their_format_and_what_was_packed(tmp_path):
    trainer = built(Cell("llava", "sft", "bf16", "bf16", lora=True), tmp_path, quantization_config=four_bit())
    packed = [row for row in groups(trainer.precision.report) if row["parameters"] == "nf4 in uint8"]
    assert {row["part"] for row in packed} == {VISION, PROJECTOR, "language model"}
    shapes = Counter()
    for name, module in trainer.model.named_modules():
        if type(module).__name__ == "Linear4bit" and "bitsandbytes" in type(module).__module__:
            shapes[part_of(name)] += module.in_features * module.out_features
    assert {row["part"]: row["elements"] for row in packed} == shapes
    assert {row["compute"] for row in packed} == {"bfloat16"}


def test_it_is_planned_before_the_first_step(tmp_path):
    trainer = built(Cell("llava", "sft", "fp32", "bf16"), tmp_path)
    report = trainer.precision.report
    assert report.facts["phase"] == PLANNED
    assert {(r["gradient"], r["optimizer state"], r["optimizer bytes"]) for r in groups(report) if r["trainable"]} == {
        ("float32", "float32", None)
    }
    assert dict.fromkeys(row[0] for row in report.table(COVERAGE).rows) == dict.fromkeys(
        coverage.area for coverage in trainer.precision.coverage.coverage
    )
    reasons = {row[0]: row[2] for row in report.table(POLICY).rows}
    assert reasons["autocast"] == "bf16=True"
    json.dumps(report.to_dict())


def test_tied_weights_count_once(tmp_path):
    model = tiny.build_model("text", seed=0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    rows = count_groups(model, CountContext(lambda part, parameter, held: held))
    assert {row.part for row in rows} == {"language model", "buffers"}
    total = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    assert sum(row.bytes for row in rows if row.part == "language model") == total


def test_what_was_changed_late_is_a_warning(tmp_path):
    trainer = built(Cell("llava", "sft", "fp32", "bf16"), tmp_path)
    trainer.model.model.vision_tower.to(torch.bfloat16)  # as an engine that takes its precision from its own config

    projector = trainer.model.model.multi_modal_projector
    inner = projector.forward

    def outside(features):
        with torch.autocast("cpu", enabled=False):
            return inner(features.float())

    projector.forward = outside
    with pytest.warns(PrecisionWarning, match=r"parameters of the vision tower .*planned float32, found bfloat16"):
        trainer.train()
    report = trainer.precision.report
    warned = {verdict.text for verdict in report.verdicts if verdict.id == "plan-not-kept"}
    assert f"parameters of the {VISION}: planned float32, found bfloat16" in warned
    assert f"gradients of the {VISION}: planned float32, found bfloat16" in warned
    assert f"optimizer state of the {VISION}: planned float32, found bfloat16" in warned
    assert f"compute dtype of the {PROJECTOR}: planned bfloat16, found float32" in warned
    assert not any("language model" in text for text in warned)
    assert report.exit_status == 1
    assert not any(verdict.level == "ok" for verdict in report.verdicts)


def test_float64_weights_are_planned_as_autocast_computes_them(tmp_path):
    """Autocast does not cast float64."""
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.float64)
    made = cells.arguments(Cell("text", "sft", "fp32", "bf16"), SafeSFTConfig, steps=1, output_dir=str(tmp_path))
    made["args"].model_init_kwargs = None
    trainer = cells.SAFE["sft"](**(made | {"model": model}))
    planned = {group["part"]: group["compute"] for group in groups(trainer.precision.report)}
    assert planned["language model"] == planned["head"] == "float64"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        trainer.train()
    cells.reset_autocast()
    assert [verdict for verdict in trainer.precision.report.verdicts if verdict.id == "plan-not-kept"] == []


def test_it_is_shown_once_on_standard_error(tmp_path, capfd):
    trainer = built(Cell("text", "sft", "fp32", None), tmp_path)
    assert "precision report" not in capfd.readouterr().err
    trainer.train()
    trainer.train()
    captured = capfd.readouterr()
    assert captured.err.count("precision report: SafeSFTTrainer") == 1
    assert "phase confirmed" in captured.err
    assert len(captured.err[captured.err.index("precision report") :].splitlines()) <= 25
    assert captured.err.splitlines()[-1] == f"the whole report: {tmp_path / FILE}; precision_report=full prints it"
    assert "precision report" not in captured.out
    assert json.loads((tmp_path / FILE).read_text()) == trainer.precision.report.to_dict()


def test_all_of_it_is_printed_on_request(tmp_path, capfd):
    built(Cell("text", "sft", "fp32", None), tmp_path, precision_report="full").train()
    printed = capfd.readouterr().err
    for words in ("  phase: confirmed\n", "\npolicy\n", "\ncoverage\n"):
        assert words in printed


@pytest.mark.parametrize("settings", [{"precision_report": "off"}, {"log_level": "error"}])
def test_it_can_be_quiet(settings, tmp_path, capfd):
    trainer = built(Cell("text", "sft", "fp32", None), tmp_path, **settings)
    (tmp_path / FILE).write_text("{}")  # of an earlier run
    trainer.train()
    captured = capfd.readouterr()
    assert "precision report" not in captured.err + captured.out
    if "precision_report" in settings:
        assert not (tmp_path / FILE).exists()
    else:
        assert json.loads((tmp_path / FILE).read_text())["facts"]["phase"] == "confirmed"
    assert trainer.precision.report.facts["phase"] == (PLANNED if "precision_report" in settings else "confirmed")


def test_it_can_be_a_file(tmp_path, capfd):
    trainer = built(Cell("text", "sft", "fp32", None), tmp_path, precision_report="file")
    assert json.loads((tmp_path / FILE).read_text())["facts"]["phase"] == PLANNED
    trainer.train()
    assert json.loads((tmp_path / FILE).read_text()) == json.loads(json.dumps(trainer.precision.report.to_dict()))
    assert trainer.precision.report.facts["phase"] == "confirmed"
    assert "precision report" not in capfd.readouterr().err
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_another_place_is_refused(tmp_path):
    with pytest.raises(PrecisionError, match=r"precision_report='logs'[\s\S]*precision_report='log'"):
        SafeSFTConfig(str(tmp_path), use_cpu=True, precision_report="logs")


def test_a_skipped_step_confirms_nothing(tmp_path):
    trainer_class = fp16_on_cpu(cells.SAFE["sft"])
    cell = Cell("text", "sft", "fp32", "fp16")
    trainer = built(cell, tmp_path, trainer_class, max_steps=30, loss_scale_init=2.0**26)
    confirmed = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            confirmed.append(
                (trainer.precision[StepMonitor].taken > 0, trainer.precision.report.facts["phase"] == "confirmed")
            )

    trainer.add_callback(Watch())
    trainer.train()
    assert confirmed[0] == (False, False)
    assert {taken == phase for taken, phase in confirmed} == {True}
    assert confirmed[-1] == (True, True)


def test_another_algorithm_has_one_with_its_reference_model(tmp_path, capfd):
    class SafeDPOTrainer(PrecisionMixin, trl.DPOTrainer, PrecisionBase):
        pass

    settings = cells.settings(Cell("text", "sft", "fp32", None), steps=1, output_dir=str(tmp_path))
    settings.pop("max_length")
    made = tiny.preference_dataset(8, seed=0)
    trainer = SafeDPOTrainer(
        model=str(cells.folder("text")),
        args=trl.DPOConfig(**settings, model_init_kwargs={"dtype": "bfloat16"}),
        train_dataset=made,
    )
    assert trainer.ref_model is not None
    trainer.train()
    rows = [row for row in groups(trainer.precision.report) if row["part"] == "reference model"]
    assert [(row["parameters"], row["trainable"], row["gradient"]) for row in rows] == [("bfloat16", False, None)]
    assert rows[0]["bytes"] == sum(p.untyped_storage().nbytes() for p in trainer.ref_model.parameters())
    assert capfd.readouterr().err.count("precision report: SafeDPOTrainer") == 1


def test_the_model_card_has_it_once(tmp_path):
    trainer = built(Cell("text", "sft", "fp32", None), tmp_path)
    trl.SFTTrainer.create_model_card(trainer)
    stock = (tmp_path / "README.md").read_text()
    trainer.create_model_card()
    trainer.precision[Reporter].on_model_card(
        tmp_path / "README.md"
    )  # where upstream keeps the card of an earlier save
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(stock.rstrip())
    assert text.count(BEGIN) == text.count("## Precision report") == 1
    assert "| language model | float32 | yes |" in text


def test_a_card_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog):
    trainer = built(Cell("text", "sft", "fp32", None), tmp_path / "run", save_strategy="steps", save_steps=1)
    elsewhere = tmp_path / "elsewhere.md"
    elsewhere.write_text("another's")
    card = tmp_path / "run" / "README.md"
    monkeypatch.setattr(trl.SFTTrainer, "create_model_card", lambda self, **_: None)
    card.symlink_to(elsewhere)
    trainer.train()
    assert elsewhere.read_text() == "another's"
    assert "README.md is not a regular file" in caplog.text
    card.unlink()
    card.write_bytes(b"\xff\xfe")
    trainer.create_model_card()
    assert card.read_bytes() == b"\xff\xfe"
    assert "the precision report cannot be added to the model card" in caplog.text


def test_without_memory_and_without_a_trainer():
    with torch.device("meta"):
        model = tiny.build_model("text", seed=0)
    rows = count_groups(model, CountContext(lambda part, parameter, held: held))
    whole = tiny.build_model("text", seed=0)
    assert sum(r.bytes for r in rows if r.trainable) == sum(p.untyped_storage().nbytes() for p in whole.parameters())


@pytest.fixture
def two_processes():
    """A process group of two of which one is here, as torch's own tests have it: FSDP shards for real."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.device_mesh.init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def test_shards_are_what_this_process_holds(two_processes):
    from torch.distributed.fsdp import fully_shard

    model = tiny.build_model("text", seed=0)
    whole = count_groups(model, CountContext(lambda part, parameter, held: held))
    fully_shard(model, mesh=two_processes)
    rows = count_groups(model, CountContext(lambda part, parameter, held: held))
    local = Counter()
    for name, parameter in model.named_parameters():
        local[part_of(name)] += parameter.to_local().untyped_storage().nbytes()
    assert {row.part: row.bytes for row in rows if row.trainable} == local
    assert [row.elements for row in rows] == [row.elements for row in whole]
    assert sum(local.values()) < 0.6 * sum(row.bytes for row in whole if row.trainable)


def test_nothing_is_left_on_the_model(tmp_path):
    trainer = built(Cell("text", "sft", "fp32", None), tmp_path)
    trainer.train()
    hooks = [hook for module in trainer.model.modules() for hook in module._forward_hooks.values()]
    assert not [hook for hook in hooks if hook.__module__.startswith("safe_trainers")]

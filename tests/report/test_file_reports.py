"""`safe-trainers report` and `compare`: models, checkpoints, recipes and saved reports, read from their files."""

import json
import os
import pickle
import shutil
from pathlib import Path

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

from safe_trainers import RecipeError, tiny
from safe_trainers.cli.main import main
from safe_trainers.cli.report import report_on
from safe_trainers.report.compare import DIFFERENCES, compare
from safe_trainers.report.render import to_json
from safe_trainers.report.run_report import FILE, GROUPS, POLICY
from safe_trainers.report.stored_report import CHECKPOINTS, OPTIMIZER, PRECISIONS, STORED
from safe_trainers.testing import fp16_on_cpu
from upstream import TRANSFORMERS_4


VISION, PROJECTOR = "vision tower (vision_tower)", "projector (multi_modal_projector)"


def rows(report, title=STORED):
    table = report.table(title)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def read(command, *argv, capsys):
    status = main([command, *map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps under fp16 with LoRA, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run")
    cell = Cell("text", "sft", "fp32", "fp16", lora=True)
    settings = {"save_strategy": "steps", "save_steps": 1, "precision_report": "file", "loss_scale_init": 1024.0}
    made = cells.arguments(cell, cells.SAFE_CONFIG["sft"], output_dir=str(folder), **settings)
    fp16_on_cpu(cells.SAFE["sft"])(**made).train()
    return folder


@pytest.mark.parametrize(("family", "dtype"), [("llava", "float32"), ("text", "bfloat16"), ("aria", "float16")])
def test_the_numbers_of_a_model_are_those_of_its_tensors(family, dtype, tmp_path):
    folder = tiny.save(family, tmp_path / "model", dtype=dtype)
    report = report_on(str(folder))
    tensors = load_file(folder / "model.safetensors")
    assert report.facts["weight elements"] == sum(t.numel() for t in tensors.values())
    assert report.facts["weight bytes"] == sum(t.untyped_storage().nbytes() for t in tensors.values())
    assert {row["stored in"] for row in rows(report)} == {dtype}
    held = {row["part"]: row["bytes"] for row in rows(report)}
    if family != "text":
        vision = sum(t.numel() * t.element_size() for name, t in tensors.items() if "vision_tower" in name)
        assert held[VISION] == vision
        assert set(held) == {VISION, PROJECTOR, "language model", "head"}
    assert report.exit_status == 0


def test_what_each_precision_would_make_of_it(tmp_path):
    report = report_on(str(tiny.save("text", tmp_path / "model", dtype="bfloat16")))
    elements = report.facts["weight elements"]
    made = {(row["precision"], row["weights"]): row for row in rows(report, PRECISIONS)}
    assert made["bf16", "float32"]["full fine-tuning bytes"] == elements * 16
    assert made["bf16", "bfloat16"]["weight bytes"] == elements * 2
    assert made["bf16", "bfloat16"]["verdict"] == "ok"
    # The same that a trainer says: bfloat16 weights do not go with fp16 on a GPU, and a CPU has no fp16 at all.
    assert "fp16-on-cpu" in made["fp16", "bfloat16"]["verdict"]


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_a_packed_checkpoint(config, packed, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(
        cells.folder("llava"), quantization_config=BitsAndBytesConfig(**config), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    report = report_on(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    assert report.facts["weight bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert {row["stored in"] for row in rows(report)} == {packed, "bfloat16"}
    shapes = [
        module.in_features * module.out_features
        for module in model.modules()
        if "bitsandbytes" in type(module).__module__ and hasattr(module, "in_features")
    ]
    found = [row for row in rows(report) if row["stored in"] == packed]
    assert sum(row["elements"] for row in found) == sum(shapes)
    assert sum(row["tensors"] for row in found) == len(shapes)
    assert report.facts["quantisation"] == ("4bit" if packed == "nf4" else "8bit")


def test_an_adapter(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    report = report_on(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert rows(report) == [
        {
            "part": "adapter",
            "stored in": "float32",
            "tensors": len(tensors),
            "elements": sum(t.numel() for t in tensors.values()),
            "bytes": sum(t.numel() * 4 for t in tensors.values()),
        }
    ]
    assert report.facts["base"] == str(cells.folder("text"))


def test_torchs_own_files(tmp_path):
    folder = tiny.save("text", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    before = report_on(str(folder))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert report_on(str(folder)).tables == before.tables


def change(config, **values):
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


SHAPES = "" if TRANSFORMERS_4 else ": [420, 64] and [420, 128]"
DAMAGES = [
    (lambda folder: None, "ok", "can load them as LlamaForCausalLM"),
    (lambda folder: change(folder / "config.json", architectures=["NoSuchForCausalLM"]), "error",
     "has no class NoSuchForCausalLM, so that the model cannot be loaded"),
    (lambda folder: change(folder / "config.json", model_type="no_such"), "error", "cannot load it: ValueError: "),
    (lambda folder: change(folder / "config.json", hidden_size=128), "error",
     "12 tensors have other shapes in the files than in the model, such as lm_head.weight" + SHAPES),
    (lambda folder: (folder / "model.safetensors").unlink(), "error", "there are no weights in this folder"),
    (lambda folder: os.truncate(folder / "model.safetensors", 2000), "error", "model.safetensors is truncated"),
    (lambda folder: keep_first(folder / "model.safetensors", 3), "warning", "9 tensors of the model are not in the"),
    (lambda folder: change(folder / "config.json", auto_map={"AutoModel": "code.Model"}), "note", "custom code"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "level", "said"), DAMAGES)
def test_a_model_that_cannot_be_loaded_is_not_said_to_be_readable(damage, level, said, tmp_path):
    folder = tiny.save("text", tmp_path / "model")
    damage(folder)
    verdicts = report_on(str(folder)).verdicts
    assert [verdict.level for verdict in verdicts] == [level]
    assert said in verdicts[0].text


def keep_first(file, count):
    save_file(dict(list(load_file(file).items())[:count]), file, metadata={"format": "pt"})


def test_a_checkpoint_without_weights_and_without_a_marker_is_an_error(tmp_path):
    folder = tiny.save("text", tmp_path / "checkpoint-3")
    (folder / "trainer_state.json").write_text('{"global_step": 3, "log_history": []}')
    (folder / "model.safetensors").unlink()
    assert [verdict.level for verdict in report_on(str(folder)).verdicts] == ["note", "error"]


def test_a_config_that_says_something_else(tmp_path):
    folder = tiny.save("text", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    report = report_on(str(folder))
    assert report.exit_status == 1
    assert "config.json has dtype bfloat16, but the weights are float32" in report.verdicts[0].text


def test_a_checkpoint(run, capsys):
    status, report = read("report", run / "checkpoint-2", capsys=capsys)
    assert (report["facts"]["complete"], report["facts"]["step"]) == (True, 2)
    state = torch.load(run / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    moments = {row["state"]: row for row in report["tables"][OPTIMIZER]}
    assert moments["exp_avg"]["elements"] == sum(s["exp_avg"].numel() for s in state.values())
    assert {row["stored in"] for row in moments.values()} == {"float32"}
    scaler = {row["setting"]: row["value"] for row in report["tables"]["loss scaler"]}
    assert scaler["scale"] == torch.load(run / "checkpoint-2" / "scaler.pt", weights_only=True)["scale"]
    assert report["facts"]["report of the run"] == "confirmed"
    assert f"{GROUPS} of the run" in report["tables"]
    assert status == 0


def test_the_folder_of_a_run(run, capsys):
    status, report = read("report", run, capsys=capsys)
    assert [(row["checkpoint"], row["complete"]) for row in report["tables"][CHECKPOINTS]] == [
        ("checkpoint-2", True),
        ("checkpoint-1", True),
    ]
    assert report["facts"]["checkpoint"] == "checkpoint-2"
    assert status == 0


def test_a_damaged_checkpoint_is_an_error(run, tmp_path, capsys):
    copied = tmp_path / "checkpoint-2"
    shutil.copytree(run / "checkpoint-2", copied)
    weights = copied / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    status, report = read("report", copied, capsys=capsys)
    assert status == 2
    assert any("adapter_model.safetensors" in v["text"] for v in report["verdicts"] if v["level"] == "error")


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"])
def test_nothing_is_unpickled(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny.save("text", tmp_path / "checkpoint-1")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    torch.save({"state": Harmful()}, folder / name)
    report = report_on(str(folder))
    assert f"{name} cannot be read" in " ".join(verdict.text for verdict in report.verdicts)
    assert report.exit_status > 0
    assert not Path("harmed").exists()
    with pytest.raises(pickle.UnpicklingError):  # what the report relies on
        torch.load(folder / name, weights_only=True)
    torch.load(folder / name, weights_only=False)
    assert Path("harmed").exists()


RECIPE = """
model_name_or_path: tiny:text
dataset_name: tiny:shapes
output_dir: out
use_cpu: true
use_peft: true
load_in_4bit: true
"""


def test_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "sft" / "mine.yaml"
    recipe.parent.mkdir()
    text = RECIPE.replace("tiny:shapes", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    recipe.write_text(text + "precision: bf16\n")
    status, report = read("report", recipe, capsys=capsys)
    assert status == 0
    assert (report["facts"]["task"], report["facts"]["autocast"]) == ("sft", "bfloat16")
    assert report["facts"]["quantisation"] == "4bit"
    values = {row["decision"]: row["value"] for row in report["tables"][POLICY]}
    assert (values["master"], values["frozen_base"]) == ("bfloat16", "4bit")
    assert not (tmp_path / "out").exists()
    recipe.write_text(text + "fp16: true\nadapter_dtype: bfloat16\n")
    status, report = read("report", recipe, capsys=capsys)
    assert status == 1
    assert report["verdicts"][0]["id"] == "fp16-on-cpu"
    recipe.write_text(text + "precision: bf16\nfp16: true\n")
    assert main(["report", str(recipe)]) == 2
    assert "drop `fp16: true`" in capsys.readouterr().err


def test_a_recipe_of_the_package_and_one_that_says_no_task(tmp_path, capsys):
    status, report = read("report", "rloo/tiny_vlm_bf16.yaml", capsys=capsys)
    assert (status, report["facts"]["task"]) == (0, "rloo")
    aside = tmp_path / "mine.yaml"
    from safe_trainers.recipes.packaged import find

    shutil.copy(find("reward/tiny_text_bf16.yaml", "recipes"), aside)
    status, report = read("report", aside, "--task", "reward", capsys=capsys)
    assert (status, report["facts"]["task"]) == (0, "reward")
    status, report = read("report", aside, capsys=capsys)  # its header says it
    assert (status, report["facts"]["task"]) == (0, "reward")
    aside.write_text("model_name_or_path: tiny:llava\nseed: 1\nseed: 2\n")
    assert main(["report", str(aside)]) == 2
    assert capsys.readouterr().err.count("is written twice") == 1  # once, and not for each task


def test_an_embedded_model_is_reported_on_without_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, report = read("report", "tiny:reward", capsys=capsys)
    assert status == 0
    assert {row["part"] for row in report["tables"][STORED]} == {"language model", "head"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["nothing/of/that/name", "./here", "tiny:lava", "missing.yaml", "missing.json", "/" + "a" * 300]
)
def test_what_is_not_there_is_one_error(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", name]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


NO_REPORT = '{"title": "t", "subject": "s", "facts": {}, "tables": %s, "verdicts": %s}'


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tables": 1}', '{"title": "t"', '{"tables": {"a": [{"b": []}]}}',
                                  NO_REPORT % ('{"a": [{}]}', "[]"),
                                  NO_REPORT % ("{}", '[{"level": ["ok"], "text": "x"}]')])  # fmt: skip
def test_a_file_that_is_no_report(text, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match="is not a report of this package"):
        report_on(str(path))


def test_saved_reports_are_read_back(run, tmp_path):
    report = report_on(str(run / FILE))
    assert report.title == "precision report"
    again = tmp_path / "again.json"
    again.write_text(to_json(report))
    assert compare(report, report_on(str(again))).exit_status == 0


def test_two_models_that_differ_in_their_dtype(tmp_path, capsys):
    first = tiny.save("llava", tmp_path / "first")
    second = tiny.save("llava", tmp_path / "second", dtype="bfloat16")
    status, report = read("compare", first, second, capsys=capsys)
    assert status == 1
    found = {(r["where"], r["what"]): (r[str(first)], r[str(second)]) for r in report["tables"][DIFFERENCES]}
    assert found[STORED, f"{VISION}: stored in"] == ("float32", "bfloat16")
    assert found["facts", "declared dtype"] == ("float32", "bfloat16")
    assert not any("elements" in what for _, what in found)


def test_the_same_twice_does_not_differ(run, capsys):
    status, report = read("compare", run / "checkpoint-1", run / "checkpoint-1", capsys=capsys)
    assert status == 0
    assert report["tables"][DIFFERENCES] == []
    status, report = read("compare", run / "checkpoint-1", run / "checkpoint-2", capsys=capsys)
    assert status == 1
    assert {row["what"] for row in report["tables"][DIFFERENCES]} >= {"step"}


@pytest.mark.parametrize("text", ["{", "[1]", '{"architectures": 3}', '{"text_config": 3}'])
def test_a_config_that_is_none_is_an_error(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    status, report = read("report", tmp_path, capsys=capsys)
    assert status == 2
    assert report["verdicts"][0]["text"].startswith("the config cannot be read: ")


def test_what_is_damaged_is_named_beside_what_is_not(tmp_path, capsys):
    folder = tiny.save("text", tmp_path / "model")
    (folder / FILE).write_text("{")
    status, report = read("report", folder, capsys=capsys)
    assert (status, [row["part"] for row in report["tables"][STORED]]) == (1, ["head", "language model"])
    assert f"{folder / FILE} is not a report of this package" in report["verdicts"][0]["text"]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    status, report = read("report", folder, capsys=capsys)
    assert status == 2
    assert report["verdicts"][0]["text"].startswith("model.safetensors is truncated or corrupt: ")
    assert "invalid header length (100 bytes)" in report["verdicts"][0]["text"]


def test_recipes_that_fit_several_tasks_need_a_task(tmp_path, capsys):
    values = "model_name_or_path: tiny:text\ndataset_name: tiny:preferences\nprecision: bf16\nuse_cpu: true\n"
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(values)
    pair = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    assert main(["compare", *pair]) == 2
    said = capsys.readouterr().err
    assert "fits the tasks" in said
    assert "Add `--task " in said
    assert main(["compare", *pair, "--task", "dpo"]) in (0, 1)

"""Checkpoint folders: which are complete, which are refused and with what words, what is removed and what written.

Real folders of real runs; what a kill leaves behind is in integration/test_resume.py.
"""

import hashlib
import inspect
import json
import logging
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import numpy as np
import pytest
import torch
import trl
from cells import Cell
from peft import (
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from safe_trainers import PrecisionBase, PrecisionMixin, SafeSFTTrainer
from safe_trainers.checkpoint import mixin as checkpoints
from safe_trainers.checkpoint.folder import (
    MARKER,
    begin_checkpoint,
    checkpoints_in,
    choose_checkpoint,
    finish_checkpoint,
    inspect_checkpoint,
)
from safe_trainers.checkpoint.integrity import Stored, safetensors_dtypes, safetensors_header, unreadable
from safe_trainers.checkpoint.trainer_state import from_plain, to_plain
from safe_trainers.core.errors import CheckpointError
from safe_trainers.testing import fp16_on_cpu
from upstream import needs_epoch_after_skip


SFT = Cell("text", "sft", "fp32", None)
LORA = Cell("text", "sft", "fp32", None, lora=True)


def trainer(out: Path, steps: int = 2, cell: Cell = SFT, *, of: type = SafeSFTTrainer, **changes: Any) -> Any:
    """A trainer that saves after each step."""
    config = changes.pop("config", trl.SFTConfig)
    saving = {"output_dir": str(out), "save_strategy": "steps", "save_steps": 1, **changes}
    torch.manual_seed(0)
    return of(**cells.arguments(cell, config, steps, **saving))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with two checkpoints."""
    out = tmp_path_factory.mktemp("run")
    trainer(out).train()
    return out


@pytest.fixture
def out(run, tmp_path):
    """A copy of that folder, to damage."""
    return Path(shutil.copytree(run, tmp_path / "out"))


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def truncate(path: Path) -> int:
    """Cuts a file in half, and returns its new size in bytes."""
    half = path.stat().st_size // 2
    os.truncate(path, half)
    return half


# --- the marker ---


def test_the_marker_lists_every_file_with_its_size(run):
    folder = run / "checkpoint-2"
    marker = json.loads((folder / MARKER).read_text())
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MARKER}
    assert marker == {"format": 1, "complete": True, "step": 2, "files": files}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "safe_trainers_state_0.pt"} <= files.keys()


def test_the_marker_comes_after_what_trl_writes_last(tmp_path):
    class Late(trl.SFTTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            assert json.loads((folder / MARKER).read_text())["complete"] is False
            (folder / "written_by_trl.json").write_text("{}")

    class SafeLate(PrecisionMixin, Late, PrecisionBase):
        pass

    trainer(tmp_path, 1, of=SafeLate).train()
    assert "written_by_trl.json" in json.loads((tmp_path / "checkpoint-1" / MARKER).read_text())["files"]


def test_a_push_finds_the_marker(tmp_path):
    pushed = []

    class Pushing(trl.SFTTrainer):
        def _push_from_checkpoint(self, folder):  # a stand-in for the hub, which is not reached from here
            pushed.append((Path(folder).name, inspect_checkpoint(Path(folder)).complete, self.args.save_total_limit))

    class SafePushing(PrecisionMixin, Pushing, PrecisionBase):
        pass

    made = trainer(tmp_path, 2, of=SafePushing, save_total_limit=1)
    made.args.push_to_hub = True
    made.train()
    assert pushed == [("checkpoint-1", True, 1), ("checkpoint-2", True, 1)]


def test_files_that_are_added_later_do_not_matter(out):
    (out / "checkpoint-2" / "notes.md").write_text("pushed")
    assert inspect_checkpoint(out / "checkpoint-2").complete


class Editing(TrainerCallback):
    """Does something to each checkpoint that was written."""

    def __init__(self, edit: Callable[[Path], object]) -> None:
        self.edit = edit

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        assert inspect_checkpoint(folder).complete  # a kill in a callback leaves a whole one
        self.edit(folder)


def widen(folder: Path) -> None:
    """Makes every file longer that a callback may write anew."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "note": "edited"}))
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "note": "edited"})


@pytest.mark.parametrize("limit", [1, 2, None])
def test_a_callback_may_rewrite_files_of_a_checkpoint(limit, tmp_path):
    made = trainer(tmp_path, 3, save_total_limit=limit)
    made.add_callback(Editing(widen))
    made.train()
    kept = [f"checkpoint-{step} (complete)" for step in (3, 2, 1)][:limit]
    assert [str(checkpoint) for checkpoint in checkpoints_in(tmp_path)] == kept
    again = trainer(tmp_path, 4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


@pytest.mark.parametrize("name", ["optimizer.pt", MARKER])
def test_a_checkpoint_that_a_callback_takes_parts_of_is_kept_and_not_called_complete(name, tmp_path):
    made = trainer(tmp_path, 2, save_total_limit=5)
    made.add_callback(Editing(lambda folder: (folder / name).unlink()))
    made.train()
    assert [(c.path.name, c.complete) for c in checkpoints_in(tmp_path)][:1] == [("checkpoint-2", False)]
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


def test_a_callback_may_remove_a_checkpoint(tmp_path):
    made = trainer(tmp_path, 3, save_total_limit=1)
    made.add_callback(Editing(shutil.rmtree))
    made.train()
    assert made.state.global_step == 3
    assert not checkpoints_in(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja", "README.md"])
def test_texts_may_be_edited_by_hand(name, out):
    with open(out / "checkpoint-2" / name, "a") as file:
        file.write("\n")
    assert choose_checkpoint(True, out) == str(out / "checkpoint-2")


def list_also(folder: Path, name: str) -> None:
    """Lists one more file in a marker."""
    content = json.loads((folder / MARKER).read_text())
    content["files"][name] = 1
    (folder / MARKER).write_text(json.dumps(content))


def zero_half(path: Path) -> None:
    """Zeroes the first half of a file, as a disk does that had no time for it."""
    content = path.read_bytes()
    path.write_bytes(bytes(len(content) // 2) + content[len(content) // 2 :])


DAMAGE = {
    "missing": (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "truncated weights": (lambda folder: truncate(folder / "model.safetensors"), "model.safetensors has"),
    "truncated optimizer": (lambda folder: truncate(folder / "optimizer.pt"), "optimizer.pt has"),
    "zeros": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            bytes((folder / "model.safetensors").stat().st_size)
        ),
        "model.safetensors is truncated or corrupt",
    ),
    "corrupt marker": (lambda folder: (folder / MARKER).write_text('{"format": 1, '), f"{MARKER} is corrupt"),
    "marker of another kind": (lambda folder: (folder / MARKER).write_text("[]"), f"{MARKER} is corrupt"),
    "newer marker": (
        lambda folder: (folder / MARKER).write_text('{"format": 2, "complete": true}'),
        "newer release",
    ),
    "unfinished": (
        lambda folder: (folder / MARKER).write_text('{"format": 1, "complete": false}'),
        "was interrupted",
    ),
    **{
        f"marker: {text}": (lambda folder, text=text: (folder / MARKER).write_text(text), f"{MARKER} is corrupt")
        for text in (
            "null",
            '{"format": 1, "complete": true}',
            '{"format": true, "complete": true, "files": {"trainer_state.json": 1}}',
            '{"format": "1", "complete": true, "files": {"trainer_state.json": 1}}',
            '{"format": 1, "complete": true, "files": {}}',
            '{"format": 1, "complete": true, "files": ["trainer_state.json"]}',
            '{"format": 1, "complete": true, "files": {"trainer_state.json": "x"}}',
            '{"format": 1, "complete": true, "files": {"trainer_state.json": null}}',
            '{"format": 1, "complete": true, "files": {"trainer_state.json": 1e400}}',
        )
    },
    "deep marker": (lambda folder: (folder / MARKER).write_text("[" * 100_000), f"{MARKER} is corrupt"),
    "marker with a name that is too long": (lambda folder: list_also(folder, "a" * 300), "aaa is missing"),
    "half an optimizer": (
        lambda folder: zero_half(folder / "optimizer.pt"),
        "optimizer.pt is truncated or corrupt: not a complete file of torch.save (",
    ),
    "corrupt state": (
        lambda folder: (folder / "trainer_state.json").write_bytes(
            b"{" * (folder / "trainer_state.json").stat().st_size
        ),
        "trainer_state.json is truncated or corrupt",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE, ids=lambda kind: kind.replace(" ", "-"))
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(kind, out, caplog):
    folder = out / "checkpoint-2"
    damage, words = DAMAGE[kind]
    damage(folder)
    before = digest(out)
    assert Path(get_last_checkpoint(str(out))) == folder  # stock's choice
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        assert choose_checkpoint(True, out) == str(out / "checkpoint-1")
    assert "skipping incomplete checkpoint: checkpoint-2 (" in caplog.text
    assert words in caplog.text
    assert f"resuming from {out / 'checkpoint-1'}" in caplog.text
    with pytest.raises(CheckpointError) as refused:
        choose_checkpoint(str(folder), out)
    assert words in str(refused.value)
    assert f"`resume_from_checkpoint='{out / 'checkpoint-1'}'`, the latest complete checkpoint" in str(refused.value)
    assert digest(out) == before


def test_the_whole_text_of_a_refusal(out):
    size = (out / "checkpoint-2" / "model.safetensors").stat().st_size
    half = truncate(out / "checkpoint-2" / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        trainer(out).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert str(refused.value) == (
        "1 problem with the checkpoints of this run:\n"
        f"- resume_from_checkpoint='{out}/checkpoint-2'\n"
        f"  why: the checkpoint is damaged: model.safetensors has {half:,} bytes, but {size:,} were written. "
        "Loading it would fail half-way, or continue with an incomplete state.\n"
        f"  fix: `resume_from_checkpoint='{out}/checkpoint-1'`, the latest complete checkpoint  [checkpoint-damaged]"
    )


def test_nothing_is_loaded_or_written_where_a_checkpoint_is_refused(out):
    truncate(out / "checkpoint-2" / "optimizer.pt")
    made = trainer(out)
    before, files = cells.fingerprint(made.model), digest(out)
    with pytest.raises(CheckpointError, match=r"optimizer.pt has"):
        made.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert cells.fingerprint(made.model) == before
    assert digest(out) == files
    assert made.state.global_step == 0


# --- checkpoints without a marker ---


@pytest.fixture
def stock(out):
    """The folder as stock leaves it."""
    for name in ("checkpoint-1", "checkpoint-2"):
        (out / name / MARKER).unlink()
        (out / name / "safe_trainers_state_0.pt").unlink()
    return out


def test_true_refuses_what_has_no_marker_and_says_the_line(stock):
    with pytest.raises(CheckpointError) as refused:
        trainer(stock).train(resume_from_checkpoint=True)
    text = str(refused.value)
    assert "checkpoint-2 (no marker), checkpoint-1 (no marker)" in text
    assert f"`resume_from_checkpoint='{stock}/checkpoint-2'`, if you are sure that it is complete" in text
    assert "[no-complete-checkpoint]" in text


def test_true_names_the_one_without_a_marker_that_can_be_read(stock):
    truncate(stock / "checkpoint-2" / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        choose_checkpoint(True, stock)
    assert f"`resume_from_checkpoint='{stock}/checkpoint-1'`" in str(refused.value)
    truncate(stock / "checkpoint-1" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"fix: `resume_from_checkpoint=None`, to start again"):
        choose_checkpoint(True, stock)


def test_an_explicit_one_is_accepted_with_a_log_line(stock, caplog):
    made = trainer(stock, 3)
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        made.train(resume_from_checkpoint=str(stock / "checkpoint-2"))
    assert "checkpoint-2 has no marker" in caplog.text
    assert made.state.global_step == 3


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_an_explicit_one_that_is_truncated_is_refused_by_name(name, stock):
    truncate(stock / "checkpoint-2" / name)
    with pytest.raises(CheckpointError, match=rf"{name} .*truncated or corrupt"):
        choose_checkpoint(str(stock / "checkpoint-2"), stock)


def test_an_explicit_one_that_stock_never_finished_is_refused(stock):
    (stock / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"trainer_state.json is missing"):
        choose_checkpoint(str(stock / "checkpoint-2"), stock)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"global_step": "1"}', '{"global_step": true}'])
def test_an_explicit_one_whose_state_says_no_step_is_refused(text, stock):
    """Upstream would stop in a traceback, or begin again at step 0 with the weights of step 2."""
    (stock / "checkpoint-2" / "trainer_state.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"trainer_state.json is truncated or corrupt: (its JSON is|global_step must be)"
    ):
        choose_checkpoint(str(stock / "checkpoint-2"), stock)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": null}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_of_shards_that_is_none_is_refused(text, stock):
    (stock / "checkpoint-2" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors.index.json is truncated or corrupt: (its JSON is|it is nested|weight_map must)",
    ):
        choose_checkpoint(str(stock / "checkpoint-2"), stock)


def test_a_missing_shard_is_named(stock):
    folder = stock / "checkpoint-2"
    for shard in ("model-00001-of-00002.safetensors", "a" * 300):
        index = {"metadata": {}, "weight_map": {"a": shard, "b": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=rf"{shard} is missing"):
            choose_checkpoint(str(folder), stock)


def test_what_is_left_of_a_deleted_checkpoint_is_not_taken_for_stocks(out):
    (out / "checkpoint-2" / MARKER).unlink()
    with pytest.raises(CheckpointError, match="parts of the checkpoint were removed"):
        choose_checkpoint(str(out / "checkpoint-2"), out)


def test_old_pickles_of_torch_are_not_refused(stock):
    path = stock / "checkpoint-2" / "optimizer.pt"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert choose_checkpoint(str(stock / "checkpoint-2"), stock) == str(stock / "checkpoint-2")


def test_without_any_checkpoint_upstream_says_so(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))


@pytest.mark.parametrize("given", [None, False, "false"])
def test_a_run_from_the_start_looks_at_nothing(given, tmp_path):
    assert not choose_checkpoint(given, tmp_path / "missing")


def test_true_may_be_a_text_as_recipes_have_it(run):
    assert choose_checkpoint("True", run) == str(run / "checkpoint-2")


# --- what is removed, and when ---


def test_one_checkpoint_is_kept_and_the_arguments_are_saved_as_they_are(tmp_path):
    made = trainer(tmp_path, 3, save_total_limit=1)
    made.train()
    assert [str(checkpoint) for checkpoint in checkpoints_in(tmp_path)] == ["checkpoint-3 (complete)"]
    assert made.args.save_total_limit == 1
    assert torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False).save_total_limit == 1


def test_the_older_checkpoint_is_there_until_the_marker_is(tmp_path, monkeypatch):
    seen = []

    def finishing(folder: Path, *arguments: object) -> None:
        seen.append([c.path.name for c in checkpoints_in(folder.parent) if c.complete])
        finish_checkpoint(folder, *arguments)

    monkeypatch.setattr(checkpoints, "finish_checkpoint", finishing)
    trainer(tmp_path, 3, save_total_limit=1).train()
    assert seen == [[], ["checkpoint-1"], ["checkpoint-2"]]


def test_a_save_that_fails_costs_nothing_that_was_there(tmp_path):
    class Failing(trl.SFTTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            if self.state.global_step == 2:
                raise OSError("No space left on device")
            super()._save_optimizer_and_scheduler(output_dir)

    class SafeFailing(PrecisionMixin, Failing, PrecisionBase):
        pass

    made = trainer(tmp_path, 3, of=SafeFailing, save_total_limit=1)
    with pytest.raises(OSError, match="No space left"):
        made.train()
    assert made.args.save_total_limit == 1
    found = ["checkpoint-2 (saving was interrupted)", "checkpoint-1 (complete)"]
    assert [str(checkpoint) for checkpoint in checkpoints_in(tmp_path)] == found


def test_folders_that_are_not_whole_do_not_count_as_kept(out):
    """Upstream would count both, and delete the one that is whole."""
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-9")
    (out / "checkpoint-9" / MARKER).write_text('{"format": 1, "complete": false}')
    (out / "checkpoint-1" / "model.safetensors").unlink()
    made = trainer(out, 3, save_total_limit=2)
    made.train(resume_from_checkpoint=True)
    assert [str(c) for c in checkpoints_in(out)] == ["checkpoint-3 (complete)", "checkpoint-2 (complete)"]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / MARKER).write_text('{"format": 2, "complete": true}'),
        lambda folder: (folder / MARKER).write_text("garbage"),
        lambda folder: (folder / "optimizer.pt").unlink(),
        lambda folder: truncate(folder / "optimizer.pt"),
    ],
    ids=["of a newer release", "marker damaged", "trimmed", "damaged"],
)
def test_a_checkpoint_that_was_whole_is_removed_by_upstreams_rule_alone(change, out):
    modified = (out / "checkpoint-1").stat().st_mtime
    change(out / "checkpoint-1")
    os.utime(out / "checkpoint-1", (modified, modified))  # upstream removes the oldest
    trainer(out, 3, save_total_limit=3).train(resume_from_checkpoint=True)
    assert [c.path.name for c in checkpoints_in(out)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    trainer(out, 4, save_total_limit=3).train(resume_from_checkpoint=True)
    assert [c.path.name for c in checkpoints_in(out)] == ["checkpoint-4", "checkpoint-3", "checkpoint-2"]


def test_what_stands_where_a_checkpoint_goes_and_is_none_is_kept(out):
    (out / "checkpoint-3").mkdir()
    (out / "checkpoint-3" / "notes.txt").write_text("mine")
    (out / "checkpoint-4").write_text("a file")
    trainer(out, 4, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [str(c) for c in checkpoints_in(out)] == ["checkpoint-4 (complete)"]
    assert (out / "_kept-1-checkpoint-3" / "notes.txt").read_text() == "mine"
    assert (out / "_kept-1-checkpoint-4").read_text() == "a file"


@pytest.mark.parametrize("damage", [False, True])
def test_of_a_checkpoint_that_is_a_link_the_link_alone_is_removed(damage, out, tmp_path):
    shutil.move(out / "checkpoint-2", tmp_path / "elsewhere")
    (out / "checkpoint-2").symlink_to(tmp_path / "elsewhere")
    if damage:
        (tmp_path / "elsewhere" / MARKER).write_text('{"format": 1, "complete": false}')
    (out / "checkpoint-3").symlink_to(tmp_path / "nowhere")
    files = digest(tmp_path / "elsewhere")
    trainer(out, 3).train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert digest(tmp_path / "elsewhere") == files
    assert [(c.complete, c.path.is_symlink()) for c in checkpoints_in(out)] == [(True, False)] * 3
    assert not list(out.glob("_replaced-*"))


def test_folders_of_others_are_removed_by_upstreams_rule_alone(stock):
    (stock / "checkpoint-1" / "trainer_state.json").unlink()
    made = trainer(stock, 3, save_total_limit=3)
    made.train(resume_from_checkpoint=str(stock / "checkpoint-2"))
    assert [c.path.name for c in checkpoints_in(stock)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]


def test_where_times_cannot_be_relied_on_a_later_number_does_not_displace_the_current_one(out, caplog):
    """Folders that seem to be written within a second are ordered by their number: 9 would be the latest."""
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-9")
    (out / "checkpoint-9" / MARKER).unlink()
    (out / "checkpoint-9" / "safe_trainers_state_0.pt").unlink()
    made = trainer(out, 3, save_total_limit=1)
    for folder in out.glob("checkpoint-*"):
        os.utime(folder, (1e9, 1e9))
    made._rotate(out, out / "checkpoint-2")
    assert [c.path.name for c in checkpoints_in(out)] == ["checkpoint-9", "checkpoint-2", "checkpoint-1"]
    assert "checkpoint-9 is from another run and counts as the latest; no checkpoint is removed" in caplog.text
    os.utime(out / "checkpoint-2")
    made._rotate(out, out / "checkpoint-2")
    assert [c.path.name for c in checkpoints_in(out)] == ["checkpoint-2"]


@pytest.mark.parametrize("limit", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_best_checkpoint_survives(limit, tmp_path):
    arguments = {
        "save_total_limit": limit,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first is the best: training lowers the loss
    }
    kept = {}
    for name, of in (("safe", SafeSFTTrainer), ("stock", trl.SFTTrainer)):
        saving = {"output_dir": str(tmp_path / name), "save_strategy": "steps", "save_steps": 1, **arguments}
        made = cells.arguments(SFT, trl.SFTConfig, 4, **saving)
        made["eval_dataset"] = cells.dataset("sft", "text", rows=4)
        torch.manual_seed(0)
        ended = of(**made)
        ended.train()
        assert ended.state.best_model_checkpoint == str(tmp_path / name / "checkpoint-1")
        kept[name] = sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
    assert kept["safe"] == kept["stock"]
    assert inspect_checkpoint(tmp_path / "safe" / "checkpoint-1").complete


def test_remains_of_the_same_step_are_removed_first(out):
    (out / "checkpoint-2" / MARKER).write_text('{"format": 1, "complete": false}')
    (out / "checkpoint-2" / "left_over.bin").write_bytes(b"remains")
    trainer(out, 3).train(resume_from_checkpoint=True)
    assert not (out / "checkpoint-2" / "left_over.bin").exists()
    assert [c.complete for c in checkpoints_in(out)] == [True, True, True]


def test_a_whole_checkpoint_of_the_same_step_waits_until_the_new_one_is_whole(out):
    begin_checkpoint(out / "checkpoint-2")  # and the process dies here
    assert not inspect_checkpoint(out / "checkpoint-2").complete
    assert choose_checkpoint(True, out) == str(out / "checkpoint-2")
    assert inspect_checkpoint(out / "checkpoint-2").complete
    begin_checkpoint(out / "checkpoint-2")
    (out / "checkpoint-2" / "trainer_state.json").write_text("{}")
    finish_checkpoint(out / "checkpoint-2", 2)
    assert not list(out.glob("_replaced-*"))
    assert list(json.loads((out / "checkpoint-2" / MARKER).read_text())["files"]) == ["trainer_state.json"]


def test_a_checkpoint_that_was_set_aside_is_there_for_one_who_names_it(out):
    begin_checkpoint(out / "checkpoint-2")  # and the process dies here
    assert choose_checkpoint(str(out / "checkpoint-2"), out) == str(out / "checkpoint-2")
    os.replace(out / "checkpoint-2", out / "_replaced-checkpoint-2")  # or between two renames
    assert choose_checkpoint(str(out / "checkpoint-2") + "/", out) == str(out / "checkpoint-2") + "/"
    assert inspect_checkpoint(out / "checkpoint-2").complete


@pytest.mark.parametrize("limit", [1, None])
def test_a_checkpoint_that_was_set_aside_does_not_come_back_over_a_later_run(limit, out):
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-4")
    begin_checkpoint(out / "checkpoint-4")  # and the process dies here
    trainer(out, 3, save_total_limit=limit).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert not list(out.glob("_replaced-*"))
    left = ["checkpoint-3"] if limit else ["checkpoint-4", "checkpoint-3", "checkpoint-2", "checkpoint-1"]
    assert [c.path.name for c in checkpoints_in(out) if c.complete] == left


# --- the loss scaler ---


def fp16(out: Path, steps: int, resume: Any = None, **changes: Any) -> Any:
    made = trainer(out, steps, Cell("text", "sft", "fp32", "fp16"), of=fp16_on_cpu(SafeSFTTrainer), **changes)
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize("step", [1, 2, pytest.param(3, marks=needs_epoch_after_skip)])
def test_the_scaler_is_resumed_bit_for_bit(step, tmp_path):
    whole = fp16(tmp_path, 4)
    assert whole.accelerator.scaler.get_scale() != 1
    resumed = fp16(tmp_path / "resumed", 4, str(tmp_path / f"checkpoint-{step}"), save_strategy="no")
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert cells.fingerprint(resumed.model) == cells.fingerprint(whole.model)


@pytest.mark.parametrize("safe", [True, False])
def test_settings_of_the_loss_scale_are_those_of_the_resumed_config(safe, tmp_path, caplog):
    """torch's scaler loads them with its state. A stock config does not contain them: the checkpoint's remain."""
    settings = {"loss_scale_growth_interval": 3, "loss_scale_growth_factor": 4.0, "loss_scale_backoff_factor": 0.25}
    fp16(tmp_path, 2, config=cells.SAFE_CONFIG["sft"], loss_scale_growth_interval=100, loss_scale_init=64.0)
    changes = {"config": cells.SAFE_CONFIG["sft"], **settings, "loss_scale_init": 2.0} if safe else {}
    resumed = fp16(tmp_path, 4, str(tmp_path / "checkpoint-2"), **changes)
    expected = {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25} if safe else {
        "growth_interval": 100, "growth_factor": 2.0, "backoff_factor": 0.5
    }  # fmt: skip
    # The scale of the checkpoint grows after 2 steps before it and 1 after it.
    expected |= {"scale": 256.0, "_growth_tracker": 1} if safe else {"scale": 64.0, "_growth_tracker": 4}
    assert resumed.accelerator.scaler.state_dict() == expected
    assert ("was saved with loss_scale_growth_interval=100: the resumed run uses 3" in caplog.text) == safe


def test_a_scaler_file_without_a_scaler_is_passed_over(out, caplog):
    scaler = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    torch.save(scaler, out / "checkpoint-2" / "scaler.pt")
    with pytest.raises(AttributeError, match="load_state_dict"):
        trainer(out, 3, of=trl.SFTTrainer).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        trainer(out, 3).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert "scaler.pt of" in caplog.text
    assert "this run does not scale the loss" in caplog.text


def test_a_scaler_without_its_file_begins_at_its_initial_scale(out, caplog):
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        made = fp16(out, 3, str(out / "checkpoint-2"))
    scale = made.accelerator.scaler.get_scale()
    assert f"has no scaler.pt: the loss scale starts at {made.accelerator.scaler._init_scale:g}" in caplog.text
    assert scale <= made.accelerator.scaler._init_scale


# --- adapters, and weights under other names ---


def test_adapters_are_resumed_and_the_best_are_loaded_bit_for_bit(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}

    def made(out: Path, cell: Cell) -> Any:
        saving = {
            "output_dir": str(out),
            "save_strategy": "steps",
            "save_steps": 1,
            "metric_for_best_model": "eval_loss",
        }
        arguments = cells.arguments(cell, trl.SFTConfig, 3, **saving, **best)
        arguments["eval_dataset"] = cells.dataset("sft", cell.family, rows=2)
        torch.manual_seed(0)
        return SafeSFTTrainer(**arguments)

    for name, cell in (("lora", LORA), ("full", SFT), ("llava", Cell("llava", "sft", "fp32", None))):
        whole = made(tmp_path / name, cell)
        whole.train()
        one = tmp_path / name / "checkpoint-1"
        assert whole.state.best_model_checkpoint == str(one)
        read = made(tmp_path / "read", cell)
        read._load_from_checkpoint(str(one))
        assert cells.fingerprint(read.model) == cells.fingerprint(whole.model)
        resumed = made(tmp_path / f"{name}-resumed", cell)
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        pairs = (load_all(tmp_path / name / "checkpoint-3"), load_all(tmp_path / f"{name}-resumed" / "checkpoint-3"))
        assert pairs[0].keys() == pairs[1].keys()
        assert all(torch.equal(pairs[0][key], pairs[1][key]) for key in pairs[0])


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's safetensors files."""
    return {name: tensor for file in folder.glob("*model*.safetensors") for name, tensor in load_file(file).items()}


def test_a_log_line_says_that_adapters_have_another_dtype_than_their_file(tmp_path, caplog):
    first = trainer(tmp_path, 1, LORA)
    first.train()
    file = tmp_path / "checkpoint-1" / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    (tmp_path / "checkpoint-1" / MARKER).unlink()
    (tmp_path / "checkpoint-1" / "safe_trainers_state_0.pt").unlink()
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        trainer(tmp_path, 2, LORA).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "cast the adapters of adapter_model.safetensors from bfloat16 to float32" in caplog.text


@pytest.mark.parametrize(
    "family",
    [
        "llava",
        "qwen2_5_vl",
        *(pytest.param(f, marks=pytest.mark.matrix) for f in ("aria", "idefics3", "smolvlm", "text")),
    ],
)
def test_every_family_is_loaded_by_the_names_that_it_is_saved_under(family, tmp_path):
    cell = Cell(family, "sft", "fp32", None)
    whole = trainer(tmp_path, 1, cell)
    whole.train()
    folder = str(tmp_path / "checkpoint-1")
    loaded = trainer(tmp_path / "2", 1, cell)
    assert cells.fingerprint(loaded.model) != cells.fingerprint(whole.model)
    loaded._load_from_checkpoint(folder)
    assert cells.fingerprint(loaded.model) == cells.fingerprint(whole.model)
    if family in ("llava", "qwen2_5_vl"):  # stock finds next to none of its own names, and trains on
        stock = trainer(tmp_path / "3", 1, cell, of=trl.SFTTrainer)
        stock._load_from_checkpoint(folder)
        saved = dict(whole.model.named_parameters())
        found = [name for name, parameter in stock.model.named_parameters() if torch.equal(parameter, saved[name])]
        assert len(found) <= 2, found


def test_a_file_without_some_of_the_weights_is_refused(tmp_path):
    cell = Cell("llava", "sft", "fp32", None)
    made = trainer(tmp_path, 1, cell)
    made.train()
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(file)
    weights.pop(next(name for name in weights if "q_proj" in name))
    save_file(weights, file, metadata={"format": "pt"})
    before = cells.fingerprint(made.model)
    with pytest.raises(CheckpointError, match=r"its files lack 1 of the model's weights, such as .*q_proj"):
        made._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert cells.fingerprint(made.model) == before


@pytest.mark.parametrize(("family", "into"), [("text", "llava"), ("llava", "text"), ("llava", "qwen2_5_vl")])
def test_a_checkpoint_of_another_model_is_refused_and_no_model_of_its_default_size_is_built(family, into, tmp_path):
    """A llama checkpoint in a LLaVA run would have transformers build a LLaVA of 7B parameters, its default."""
    trainer(tmp_path, 1, Cell(family, "sft", "fp32", None)).train()
    made = trainer(tmp_path / "2", 2, Cell(into, "sft", "fp32", None))
    before = cells.fingerprint(made.model)
    with pytest.raises(CheckpointError, match=r"(its files lack|does not match this)") as refused:
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert f"resume_from_checkpoint='{tmp_path}/checkpoint-1'" in str(refused.value)
    assert cells.fingerprint(made.model) == before


def test_weights_of_another_shape_are_refused_by_the_name_of_their_file(tmp_path):
    cell = Cell("llava", "sft", "fp32", None)
    made = trainer(tmp_path, 1, cell)
    made.train()
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "q_proj" in name)
    save_file({**weights, name: torch.ones(3, 3)}, file, metadata={"format": "pt"})
    before = cells.fingerprint(made.model)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not match this LlavaForConditionalGeneration"):
        made._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert cells.fingerprint(made.model) == before


def test_the_signature_of_train_is_upstreams():
    ours, stock = (inspect.signature(of.train).parameters for of in (PrecisionMixin, trl.SFTTrainer))
    assert [name for name in ours if name != "kwargs"] == [name for name in stock if name != "kwargs"]


# --- the dtype of what is saved ---


def saving(out: Path, dtype: str, cell: Cell = SFT, **changes: Any) -> Any:
    task = cell.task
    return trainer(out, 1, cell, of=cells.SAFE[task], config=cells.SAFE_CONFIG[task], save_dtype=dtype, **changes)


@pytest.mark.parametrize(("dtype", "cell"), [("bfloat16", SFT), ("float16", Cell("llava", "sft", "fp32", None)), ("float16", LORA), ("float32", Cell("text", "sft", "bf16", "bf16"))], ids=str)  # fmt: skip # noqa: E501
def test_files_hold_the_dtype_that_was_asked_for_and_checkpoints_the_trained_bits(dtype, cell, tmp_path, caplog):
    made = saving(tmp_path, dtype, cell)
    made.train()
    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        made.save_model()
    assert f"saved weights in {dtype}" in caplog.text
    name = "adapter_model.safetensors" if cell.lora else "model.safetensors"
    exact, saved = load_file(tmp_path / "checkpoint-1" / name), load_file(tmp_path / name)
    assert set(safetensors_dtypes(tmp_path / name).values()) == {dtype}
    assert exact.keys() == saved.keys()
    assert all(torch.equal(exact[key].to(saved[key].dtype), saved[key]) for key in exact)
    assert set(safetensors_dtypes(tmp_path / "checkpoint-1" / name).values()) == {
        "bfloat16" if cell.weights == "bf16" else "float32"
    }
    live = {f"torch.{'bfloat16' if cell.weights == 'bf16' else 'float32'}"}
    assert {str(parameter.dtype) for parameter in made.model.parameters()} == live
    if not cell.lora:
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["dtype"] == dtype
        assert {part["dtype"] for part in config.values() if isinstance(part, dict) and "dtype" in part} <= {dtype}
        loaded = type(made.model).from_pretrained(tmp_path, dtype="auto")
        assert str(loaded.dtype) == f"torch.{dtype}"


PROMPTS = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "encoder": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "multitask": MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=2),
}


def prompted(out: Path, method: str, **changes: Any) -> Any:
    arguments = cells.arguments(SFT, cells.SAFE_CONFIG["sft"], 1, output_dir=str(out), **changes)
    return SafeSFTTrainer(**arguments, peft_config=PROMPTS[method])


@pytest.mark.parametrize("method", PROMPTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_virtual_tokens_are_saved_in_the_dtype_that_was_asked_for(method, dtype, tmp_path):
    made = prompted(tmp_path, method)
    written = {}
    for name, cast in (("exact", None), ("cast", dtype)):
        made.args.save_dtype = cast
        made.save_model(str(tmp_path / name))
        written[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in written["exact"].values()} == {"torch.float32"}
    assert written["exact"].keys() == written["cast"].keys()
    for name, tensor in written["exact"].items():
        assert torch.equal(written["cast"][name], tensor.to(getattr(torch, dtype)))
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    loaded = PeftModel.from_pretrained(base, tmp_path / "cast")
    for name, tensor in get_peft_model_state_dict(loaded).items():
        assert torch.equal(tensor.to(getattr(torch, dtype)), written["cast"][name])


def test_a_virtual_token_that_float16_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    made = prompted(tmp_path, "encoder", save_dtype="float16")
    *_, layer = made.model.prompt_encoder["default"].mlp_head
    with torch.no_grad():  # each weight of the encoder fits, and its output does not
        layer.weight.zero_()
        layer.bias.fill_(65_000.0)
        layer.weight[0].fill_(60_000.0)
    with pytest.raises(CheckpointError, match=r"prompt_embeddings contains \d+,\d+"):
        made.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final").exists()


def test_without_save_dtype_files_are_stocks(tmp_path):
    files = {}
    for name, of in (("safe", SafeSFTTrainer), ("stock", trl.SFTTrainer)):
        made = trainer(tmp_path / name, 1, of=of, save_strategy="no")
        made.train()
        made.save_model()
        files[name] = {path.name: path.read_bytes() for path in (tmp_path / name).glob("*model*")}
    assert files["safe"] == files["stock"]


@pytest.mark.parametrize("number", [70_000.0, -1e9])
def test_a_weight_that_float16_cannot_hold_is_refused_before_anything_is_written(number, tmp_path):
    made = saving(tmp_path, "float16", save_strategy="no")
    name, weight = next((n, p) for n, p in made.model.named_parameters() if "q_proj" in n)
    with torch.no_grad():
        weight.view(-1)[0] = number
    with pytest.raises(CheckpointError) as refused:
        made.save_model(str(tmp_path / "final"))
    assert f"{name} contains {abs(number):,.0f}, and the largest float16 is 65,504" in str(refused.value)
    assert not (tmp_path / "final").exists()
    with torch.no_grad():
        weight.view(-1)[0] = 65_504.0
    made.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_tied_weights_are_saved_once_and_buffers_keep_their_dtype(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.model.register_buffer("statistics", torch.full((3,), 1e-9))
    arguments = cells.arguments(
        SFT, cells.SAFE_CONFIG["sft"], 1, output_dir=str(tmp_path), save_dtype="float16", model_init_kwargs=None
    )
    made = SafeSFTTrainer(**{**arguments, "model": model})
    made.save_model()
    dtypes = safetensors_dtypes(tmp_path / "model.safetensors")
    assert dtypes.pop("model.statistics") == "float32"
    assert set(dtypes.values()) == {"float16"}
    tied = {"lm_head.weight", "model.embed_tokens.weight"} & dtypes.keys()
    assert (len(tied) == 1) == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_packed_weights_are_left_as_they_are(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    from safe_trainers.checkpoint.weights import cast_weights

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(cells.folder("text"), quantization_config=quantized)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    state = model.state_dict()
    cast, kept = cast_weights(model, state, "float16")
    changed = {
        name for name in state if isinstance(state[name], torch.Tensor) and cast[name].dtype != state[name].dtype
    }
    assert {name for name in changed if "lora" in name}
    assert not {name for name in changed if "absmax" in name or "quant" in name or name.endswith("base_layer.weight")}
    assert not kept


def test_weights_that_a_class_wants_in_float32_stay_so(tmp_path):
    made = saving(tmp_path, "float16", save_strategy="no")
    made.model._keep_in_fp32_modules = {"norm"}
    made.save_model()
    dtypes = safetensors_dtypes(tmp_path / "model.safetensors")
    assert dtypes["model.norm.weight"] == "float32"
    assert {dtype for name, dtype in dtypes.items() if ".norm." not in name} == {"float16"}


# --- plain values ---


def test_values_come_back_as_they_were(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    value = {
        "tensors": [{"a": torch.randn(2, 3).bfloat16(), "n": [1, 2]}],
        "table": defaultdict(list, {"reward": [0.1, float("nan")]}),
        "recent": deque([(1, "two"), None], maxlen=3),
        "number": np.float64(0.1),
        "picture": picture,
    }
    torch.save(to_plain(value, "value"), tmp_path / "file.pt")
    like = {"table": defaultdict(list), "recent": deque(maxlen=3)}
    back = from_plain(torch.load(tmp_path / "file.pt", weights_only=True), like)
    assert torch.equal(back["tensors"][0]["a"], value["tensors"][0]["a"])
    assert back["table"]["new"] == []
    assert repr(back["table"]["reward"]) == repr([0.1, float("nan")])
    assert back["recent"] == value["recent"]
    assert back["recent"].maxlen == 3
    assert back["number"] == 0.1
    assert back["picture"].tobytes() == picture.tobytes()


@pytest.mark.parametrize(
    "value", [object(), [{"deep": {1, 2}}], Image.new("CMYK", (1, 1)), torch.nn.Parameter(torch.ones(1))]
)
def test_what_is_not_plain_is_named(value):
    with pytest.raises(TypeError, match=r"^buffer.* is a "):
        to_plain(value, "buffer")


def test_headers_are_read_without_their_tensors(tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = {
        "a": torch.ones(3),
        "b": torch.ones(2, 5, dtype=torch.uint8),
        "c": torch.ones(2, dtype=torch.float16),
        "d": torch.ones((), dtype=torch.bfloat16),
        "e": torch.ones(3).to(torch.float8_e4m3fn),
        "f": torch.ones(3, dtype=torch.bool),
        "g": torch.ones(0, 3, dtype=torch.int64),
    }
    save_file(tensors, file)
    kinds = {"a": "float32", "b": "U8", "c": "float16", "d": "bfloat16", "e": "F8_E4M3", "f": "BOOL", "g": "I64"}
    assert safetensors_dtypes(file) == kinds
    sizes = {name: (t.numel(), t.numel() * t.element_size()) for name, t in tensors.items()}
    assert {name: (s.elements, s.bytes) for name, s in safetensors_header(file).items()} == sizes
    packed = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    file.write_bytes(len(packed).to_bytes(8, "little") + packed + bytes(2))
    assert safetensors_header(file) == {"w": Stored("F4", 4, 2)}


@pytest.mark.parametrize(
    ("damage", "why"),
    {
        "empty": (lambda raw: b"", "header too small"),
        "half a header": (lambda raw: raw[:60], "invalid header length"),
        "one byte less": (lambda raw: raw[:-1], "file not fully covered"),
        "one byte more": (lambda raw: raw + b"x", "file not fully covered"),
        "zeros": (lambda raw: bytes(len(raw)), "invalid JSON in header"),
        "garbage": (lambda raw: b"\xff" * len(raw), "header too large"),
        "no mapping": (lambda raw: b"\2" + bytes(7) + b"[]", "invalid JSON in header"),
        "another offset": (lambda raw: raw.replace(b"[0,", b"[4,"), "invalid"),
        "another shape": (lambda raw: raw.replace(b'"shape":[24', b'"shape":[25'), "invalid"),
    }.values(),
)
def test_a_damaged_file_is_known_by_its_header(damage, why, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(24)}, file)
    assert unreadable(file) is None
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=why):
        safetensors_header(file)
    reason = unreadable(file)
    assert reason.startswith("is truncated or corrupt: ")
    assert reason.endswith(f"({len(damaged):,} bytes)")

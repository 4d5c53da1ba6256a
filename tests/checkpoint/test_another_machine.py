"""A checkpoint that the machine of another process does not have: which files count, and who is named."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from safe_trainers.checkpoint import mixin
from safe_trainers.checkpoint.folder import common_files
from safe_trainers.checkpoint.mixin import ExactCheckpoints
from safe_trainers.core.errors import CheckpointError


WRITTEN = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_0.pth", "README.md",
    "safe_trainers_state_0.pt", "safe_trainers_checkpoint.json", "training_args.bin", "tokenizer.json", "config.json",
)  # fmt: skip
READ = ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("checkpoint-3")
    folder.mkdir()
    for name in WRITTEN:
        (folder / name).touch()
    return folder


def test_every_process_reads_weights_and_states_but_not_files_of_other_ranks(checkpoint, tmp_path):
    assert common_files(checkpoint) == READ
    assert common_files(tmp_path / "missing") == []


def check(monkeypatch, folder, names, world=4, others=()):
    """Checks in a process that is not the main one, which has written `names`.

    Returns:
        What this process sent to the others.
    """
    sent = []

    def gather(found):
        sent.extend(found)
        return [*others, *found]

    def broadcast(objects):
        objects[0] = names

    monkeypatch.setattr(mixin, "broadcast_object_list", broadcast)
    monkeypatch.setattr(mixin, "gather_object", gather)
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=world, process_index=2), accelerator=SimpleNamespace(is_main_process=False)
    )
    ExactCheckpoints._check_everywhere(trainer, folder)
    return sent


def test_a_checkpoint_that_all_machines_have_is_taken(monkeypatch, checkpoint):
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    assert check(monkeypatch, checkpoint, READ, others=[(0, "first", [])]) == [(2, "second", [])]


def test_a_single_process_sends_nothing(monkeypatch, checkpoint):
    assert check(monkeypatch, checkpoint / "missing", READ, world=1) == []


def test_the_refusal_names_the_machine_and_the_files(monkeypatch, checkpoint):
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        check(monkeypatch, checkpoint, READ, others=[(0, "first", [])])
    assert "rank 2 (second) cannot find model.safetensors" in str(caught.value)
    assert caught.value.problems[0].id == "checkpoint-on-another-machine"
    with pytest.raises(CheckpointError, match=r"rank 1 \(first\), and 1 more, cannot find a, b, c and 1 more"):
        check(monkeypatch, checkpoint, READ, others=[(1, "first", ["a", "b", "c", "d"])])

"""The embedded recipes learn, and learn it from the pictures. `docs/tiny_task.md` has the same on three seeds."""

import json
from statistics import fmean

import benchmark_modules
import pytest

from safe_trainers import tiny


@pytest.fixture
def tiny_task(monkeypatch):
    return benchmark_modules.load(monkeypatch, "tiny_task")


def test_the_page_is_made_from_the_measurements(tiny_task):
    made = tiny_task.page(json.loads(tiny_task.RESULT.read_text()))
    assert tiny_task.PAGE.read_text() == made, "run: make bench-tiny"


def test_the_committed_measurements_show_what_is_promised(tiny_task):
    runs = json.loads(tiny_task.RESULT.read_text())["runs"]
    assert all(len(seeds) == 3 for seeds in runs.values())
    assert all(r["after"] > 0.9 for r in runs["GRPO, LLaVA-like"])
    assert all(r["after"] == r["before"] for r in runs["GRPO, Aria-like, learning rate 0"])
    # Chance is one answer in 24; a model that learned to look would be far above it.
    assert all(r["after"] < 0.1 for r in runs["GRPO, Aria-like, shuffled images"])
    learned = ("SFT, LLaVA-like", "DPO, LLaVA-like", "KTO, LLaVA-like", "Distillation, LLaVA-like", "Reward, text")
    assert all(r["after"] > 0.9 for name in learned for r in runs[name])
    assert all(r["after"] - r["before"] >= 0.35 for r in runs["RLOO, Aria-like"])


def test_the_committed_measurements_agree_in_every_precision(tiny_task):
    runs, names = json.loads(tiny_task.RESULT.read_text())["runs"], tiny_task.PRECISIONS.values()
    assert set(tiny_task.PRECISIONS) == {"bf16", "fp32", "fp16"}
    # It starts far below what it ends at: the agreement is of what was learned.
    assert all(r["before"] < 0.4 for name in names for r in runs[name])
    assert all(r["after"] >= 0.95 for name in names for r in runs[name])
    means = [fmean(r["after"] for r in runs[name]) for name in names]
    assert max(means) - min(means) <= 0.05


def test_no_constant_answer_does_well():
    heldout = tiny.prompt_dataset(192, seed=0, split="heldout")
    assert tiny.constant_baseline(heldout) < 0.3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("GRPO, Aria-like", lambda r: r["after"] > 0.9),
        ("GRPO, LLaVA-like", lambda r: r["after"] > 0.9),
        ("GRPO, Aria-like, learning rate 0", lambda r: r["after"] == r["before"]),
        ("GRPO, Aria-like, shuffled images", lambda r: r["after"] < 0.1),
        ("RLOO, Aria-like", lambda r: r["after"] - r["before"] >= 0.35),
        ("SFT, LLaVA-like", lambda r: r["after"] > 0.9),
        ("DPO, LLaVA-like", lambda r: r["after"] > 0.9),
        ("KTO, LLaVA-like", lambda r: r["after"] > 0.9),
        ("Distillation, LLaVA-like", lambda r: r["after"] > 0.9),
        ("Reward, text", lambda r: r["after"] > 0.9),
    ],
)
def test_it_holds_when_it_is_measured_again(tiny_task, name, holds):
    command, recipe, overrides, seeds = tiny_task.RUNS[name]
    measured = tiny_task.run(command, recipe, overrides, seeds[0])
    assert holds(measured), measured

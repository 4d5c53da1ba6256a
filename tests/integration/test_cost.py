"""The benchmark of what the safe trainers cost counts what it says, and its guard can fail."""

import json
import statistics
from pathlib import Path

import benchmark_modules
import pytest


ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def cost(monkeypatch):
    return benchmark_modules.load(monkeypatch, "cost")


def test_bytes_are_those_of_the_tensors(cost):
    point = {"family": "llava", "task": "grpo", "kind": "lora", "images": 2}
    stock, safe = (cost.counted(point, mine) for mine in (False, True))
    pictures, side = 4 * 2, 32
    assert stock["media"] == pictures * 3 * side * side * 4
    assert safe["media"] == stock["media"] / 2
    # Pictures, ids and masks in float32 and int64; each batch of rollouts is moved for generation and for scoring.
    assert stock["moved"] - safe["moved"] == stock["media"] / 2
    assert stock["peak"] > stock["media"]


def test_steps_of_a_window_are_counted_together(cost):
    point = {"family": "llava", "task": "grpo", "kind": "lora", "steps_per_generation": 2, "steps": 8}
    found = cost.timed(point, safe_first=True)
    assert {name: set(value) for name, value in found.items()} == {
        "construction": {"stock", "ratio"},
        "step": {"stock", "ratio", "more"},
    }
    assert 0.5 < found["step"]["ratio"] < 2
    assert abs(found["step"]["more"]) < found["step"]["stock"]


@pytest.mark.parametrize("first", [False, True])
def test_trainers_that_take_turns_train_as_each_does_alone(cost, first):
    import cost_runs
    import torch

    point = {"family": "text", "task": "grpo", "kind": "full", "steps": 6}

    def trained(*sides):
        trainers = {}
        for safe in sides:
            torch.manual_seed(0)
            trainers[safe] = cost_runs.construct(point, safe)
        seconds = cost_runs.in_turns(trainers, sides[0], window=2)
        assert {safe: len(found) for safe, found in seconds.items()} == {False: 0, True: 0} | dict.fromkeys(sides, 1)
        return {safe: [p.detach().clone() for p in trainer.model.parameters()] for safe, trainer in trainers.items()}

    together = trained(first, not first)
    for safe, weights in together.items():
        (alone,) = trained(safe).values()
        assert all(map(torch.equal, weights, alone))
    assert not all(map(torch.equal, together[False], cost_runs.construct(point, False).model.parameters()))


def test_a_trainer_that_fails_ends_both(cost):
    import cost_runs

    point = {"family": "text", "task": "sft", "kind": "full", "steps": 4}
    trainers = {safe: cost_runs.construct(point, safe) for safe in (False, True)}

    def failing(*args, **kwargs):
        raise RuntimeError("no loss")

    trainers[True].compute_loss = failing
    with pytest.raises(RuntimeError, match="no loss"):
        cost_runs.in_turns(trainers, True)
    assert trainers[False].state.global_step == 4  # which went on alone


def test_runs_alternate(cost):
    order = []

    def run(safe):
        order.append(safe)
        return {"time": 3.0 if safe else 2.0}

    assert cost.alternate(run, 3) == {"time": {"stock": 2.0, "ratios": [1.5, 1.5, 1.5]}}
    assert order == [True, False, False, True, True, False]


def test_the_guard_finds_what_is_outside(cost):
    committed = {"cells": {"text": {"step": {"stock": 1.0, "ratios": [0.98, 1.0, 1.02]}}}}

    def now(*ratios):
        return {"cells": {"text": {"step": {"stock": 1.0, "ratios": list(ratios)}}}}

    assert cost.outside(committed, now(0.9, 1.01, 1.3)) == []  # the median counts
    assert cost.outside(committed, now(1.039)) == []  # another day
    (slower,) = cost.outside(committed, now(1.05, 1.05, 1.05))
    assert slower == "cells, text, step: 1.050 is outside 0.960 to 1.040"
    assert len(cost.outside(committed, now(0.9))) == 1
    exact = {"cells": {"text": {"peak": {"stock": 1.0, "ratios": [1.0]}}}}
    assert len(cost.outside(exact, {"cells": {"text": {"peak": {"stock": 1.0, "ratios": [1.001]}}}})) == 1
    assert cost.outside({"cells": {}}, now(1.0)) == ["cells, text, step: not in the committed results"]


def test_what_was_measured_is_what_is_promised(cost):
    sections = json.loads((ROOT / "benchmarks" / "results" / "cost.json").read_text())["sections"]
    figures = {path: statistics.median(value["ratios"]) for path, value in cost.leaves(sections)}
    times = [(path[0], len(value["ratios"])) for path, value in cost.leaves(sections) if path[-1] not in cost.EXACT]
    assert min(number for section, number in times if section != "rollouts") >= 7
    assert min(number for section, number in times if section == "rollouts") >= 3  # their steps take seconds
    # Towers with float32 weights get float32 media.
    assert {value for path, value in figures.items() if path[-1] == "media" and " fp32 " not in path[1]} == {0.5}
    rollouts = {path[1]: value for path, value in figures.items() if path[0] == "rollouts" and path[-1] == "step"}
    # How much is saved differs between CPUs; the page promises that time is saved, except for long completions.
    by_default = {name for name in rollouts if ", " not in name}
    saving = {name for name in by_default if " fp32 " in name and not name.endswith(" 512 tokens")}
    assert len(saving) == 5
    assert all(rollouts[name] < 0.9 for name in saving)
    # Whether a few images have the same bits as many, so that their features are shared, differs between CPUs, too.
    images = sections["images"]
    for name in by_default & images.keys():
        assert all("not bit-identical" in reason for reason in images[name]["refused"])
        assert (images[name]["computed"] < images[name]["seen"]) is not bool(images[name]["refused"])
    always = images.keys() - by_default
    assert len(always) == 3
    for name in always:
        assert images[name]["computed"] < 0.3 * images[name]["seen"]
        assert rollouts[name] < 0.9
    assert rollouts["llava grpo lora fp32 512 32 tokens, share_media_features='always'"] < 0.7
    assert {value for path, value in figures.items() if path[-1] == "drift"} == {0.0}
    assert all(value <= 1.0 for path, value in figures.items() if path[-1] == "moved")
    assert figures["import", "two trainers", "time"] <= 1.1

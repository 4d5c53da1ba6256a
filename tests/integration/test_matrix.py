"""The benchmark of the matrix judges what it should: a few cells whose outcomes are known, and its bookkeeping."""

import itertools
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import benchmark_modules
import pytest
from packaging.version import Version


ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def matrix(monkeypatch):
    return benchmark_modules.load(monkeypatch, "matrix")


JOINED = "qwen2_5_vl-sft-fp16-bf16-full-beta0"
JOINS_ONE_DTYPE = Version(version("transformers")) >= Version("5.14")


def cell(matrix, name):
    return next(cell for cell in matrix.every_cell([name.split("-")[0]]) if cell.id == name)


@pytest.mark.parametrize(
    ("name", "stock", "said", "safe"),
    [
        ("text-grpo-fp32-none-full-beta0", "trained", "", "trained"),
        ("aria-grpo-bf16-none-full-beta0", "crashed", "should be the same", "trained"),
        ("llava-rloo-fp32-bf16-4bit-beta0", "wrong", "adapters rounded to bfloat16", "trained"),
        ("llava-grpo-fp32-bf16-lora-beta0", "wrong", "text computes in float32 in rollout", "trained"),
        ("text-sft-fp16-fp16-4bit-beta0", "crashed", "not implemented for 'BFloat16'", "trained"),
        ("text-sft-bf16-fp16-full-beta0", "crashed", "", "trained"),
        ("llava-sft-fp16-bf16-full-beta0", "crashed", "mixed dtype", "refused"),
        # Its features are joined before they are cast: autocast would refuse them in the other half format.
        (JOINED, "trained", "", "trained"),
        ("lfm2_vl-sft-bf16-bf16-4bit-beta0", "crashed", "only Tensors of floating point", "refused"),
    ],
)
def test_outcomes_that_are_known(matrix, name, stock, said, safe):
    if why := matrix.why_absent(name.split("-")[0]):
        pytest.skip(why)
    if name == JOINED and not JOINS_ONE_DTYPE:  # older transformers join features of two dtypes
        stock, safe = "crashed", "refused"
    row = matrix.run_both(cell(matrix, name))
    assert row["stock"]["outcome"] == stock
    assert said in row["stock"].get("message", "") + "; ".join(row["stock"].get("faults", []))
    assert row["safe"]["outcome"] == safe
    if safe == "refused":
        assert row["followed"]["outcome"] == "trained"
    assert matrix.bad([row]) == []


@pytest.mark.parametrize("family", ["aria", "llava", "qwen2_5_vl", "text"])
def test_the_slice_has_no_safe_cell_that_is_not_right(matrix, family):
    """Three minutes of the matrix: the modes in which faults are known, each cell stock and safe."""
    assert family in matrix.SLICE
    if why := matrix.why_absent(family):
        pytest.skip(why)
    rows = [matrix.run_both(one) for one in matrix.the_slice() if one.family == family]
    assert len(rows) >= 5
    assert matrix.bad(rows) == []
    assert {row["stock"]["outcome"] for row in rows} & {"crashed", "wrong"}  # the judgement can fail


def test_what_must_not_be_is_found(matrix):
    made = {"id": "x", "stock": {"outcome": "trained"}}
    assert matrix.bad([{**made, "safe": {"outcome": "trained"}}]) == []
    for safe in (
        {"outcome": "crashed", "message": "RuntimeError"},
        {"outcome": "wrong", "faults": ["adapters rounded"]},
        {"outcome": "refused", "message": "ValueError: no"},
        {"outcome": "refused", "ids": ["mixed-weights-cannot-meet"]},  # and stock trains it
    ):
        assert len(matrix.bad([{**made, "safe": safe}])) == 1
    unmended = {"outcome": "refused", "ids": ["mixed-weights-cannot-meet"]}
    crashed = {**made, "stock": {"outcome": "crashed"}, "safe": unmended, "followed": {"outcome": "crashed"}}
    assert len(matrix.bad([crashed])) == 1


def test_every_pair_of_values_is_covered(matrix):
    cells = matrix.every_cell(["llava", "text", "mllama"])
    chosen = matrix.pairwise(cells)
    assert len(chosen) < len(cells) / 4

    def pairs(some):
        return {pair for one in some for pair in itertools.combinations(asdict(one).items(), 2)}

    assert pairs(chosen) == pairs(cells)
    assert {(c.family, c.weights, c.flag) for c in chosen} == {(c.family, c.weights, c.flag) for c in cells}


def test_it_goes_on_where_it_was_stopped(matrix, tmp_path, monkeypatch):
    cells = matrix.every_cell(["text"])[:4]
    asked = []

    def run(todo, jobs):
        for one in todo:
            asked.append(one.id)
            yield {"id": one.id, "stock": {"outcome": "trained"}, "safe": {"outcome": "trained"}}
            if len(asked) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "_run", run)
    with pytest.raises(KeyboardInterrupt):
        matrix.measure(cells, tmp_path / "m.jsonl", 1)
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 3
    rows = matrix.measure(cells, tmp_path / "m.jsonl", 1)
    assert [row["id"] for row in rows] == [one.id for one in cells]
    assert sorted(asked) == sorted(one.id for one in cells)
    heading = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    assert heading["versions"]["trl"] == version("trl")


@pytest.mark.parametrize("other", [{"versions": {"trl": "0.0"}}, {"package": "0123456789ab"}])
def test_rows_of_other_versions_or_of_another_package_are_measured_again(matrix, tmp_path, monkeypatch, other):
    cells, asked = matrix.every_cell(["text"])[:2], []

    def run(todo, jobs):
        asked.append(len(todo))
        yield from ({"id": one.id, "stock": {"outcome": "trained"}, "safe": {"outcome": "trained"}} for one in todo)

    monkeypatch.setattr(matrix, "_run", run)
    file = tmp_path / "m.jsonl"
    matrix.measure(cells, file, 1)
    matrix.measure(cells, file, 1)
    heading, *rows = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(heading) | other), *rows]) + "\n")
    matrix.measure(cells, file, 1)
    assert asked == [2, 0, 2]


def test_every_cell_is_counted_by_family(matrix):
    def row(family, stock, safe, **more):
        return {
            "id": f"{family}-{stock}",
            "family": family,
            "stock": {"outcome": stock},
            "safe": {"outcome": safe, **more},
        }

    rows = [
        row("aria", "crashed", "trained"),
        row("aria", "trained", "wrong", faults=["adapters rounded"]),
        row("text", "crashed", "refused", ids=["mixed-weights-cannot-meet"]) | {"followed": {"outcome": "trained"}},
    ]
    found = json.loads(json.dumps(matrix.counted(rows, {"machine": "a machine"})))
    assert found["machine"] == "a machine"
    assert found["families"] == {
        "aria": {"cells": 2, "stock": {"crashed": 1, "trained": 1}, "safe": {"trained": 1, "wrong": 1}},
        "text": {"cells": 1, "stock": {"crashed": 1}, "safe": {"refused": 1}},
    }
    assert found["refusals"] == {"mixed-weights-cannot-meet": 1}
    assert found["problems"] == ["aria-trained: safe wrong: adapters rounded "]

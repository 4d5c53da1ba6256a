"""The learning curves: one short run of each trainer, and the rule by which the page compares runs."""

from dataclasses import replace

import benchmark_modules
import curves_page
import pytest


@pytest.fixture
def curves(monkeypatch):
    return benchmark_modules.load(monkeypatch, "curves")


@pytest.fixture
def warmed_up(curves, monkeypatch):
    """The text model after a short warm-up: the runs below are not about its score."""
    import curve_tasks

    monkeypatch.setattr(curve_tasks, "WARM_UP_STEPS", 2)
    return curve_tasks


@pytest.mark.slow
def test_a_nan_in_one_batch_ends_stock_and_not_safe(curves, warmed_up, tmp_path):
    curve = curves.CURVES["nan-sft"]
    stock, safe = (curves.run(curve, side, 0, tmp_path, max_steps=5) for side in curves.SIDES)
    assert stock["finite"] is False
    assert safe["finite"] is True
    assert len(safe["loss"]) == 5
    assert [step for step, _ in safe["scores"]] == [0, 1, 2, 3, 4, 5]
    # Before the NaN both runs are the same.
    assert stock["loss"][:2] == safe["loss"][:2]


@pytest.mark.slow
def test_without_the_nan_both_runs_are_identical(curves, warmed_up, tmp_path):
    curve = replace(curves.CURVES["nan-sft"], plant=None)
    stock, safe = (curves.run(curve, side, 0, tmp_path, max_steps=3) for side in curves.SIDES)
    assert stock["finite"] is True
    assert curves_page.identical([stock], [safe])


def test_an_error_is_the_result_of_a_run(curves, warmed_up, tmp_path):
    row = curves.run(curves.CURVES["nan-sft"], "stock", 0, tmp_path, optim="no such optimizer")
    assert row["error"].startswith("ValueError: no such optimizer is not")
    assert row["ended_at"] == 0


def test_the_text_task_is_held_out_and_its_score_counts_exact_answers(curves, warmed_up, tmp_path):
    trained, held_out = (dict(warmed_up.text_rows(split)) for split in ("train", "heldout"))
    assert len(trained) + len(held_out) == 576
    assert not trained.keys() & held_out.keys()
    row = warmed_up.text_data("heldout", 0)[0]
    colour, count, shape = row["prompt"][0]["content"].removeprefix("what is ").split(" and ")[0].split()
    assert row["solution"].startswith(f"{count} {colour} {shape}")
    folder = warmed_up.make_model("text", 0, tmp_path)
    model, tokenizer = warmed_up.load("text", folder, curves.torch.float32)
    assert warmed_up.score(model, tokenizer, "text") == 0


def row(seed, last, error=None, loss=1.0):
    found = {"seed": seed, "scores": [[0, 0.1], [5, last / 2], [10, last]], "loss": [loss]}
    return found | ({"error": error} if error else {})


@pytest.mark.parametrize(("stock", "safe", "expected"), [
    ((0.5, 0.6, 0.7), (0.8, 0.9, 1.0), "safe higher"),
    ((0.8, 0.9, 1.0), (0.5, 0.6, 0.7), "stock higher"),
    ((0.5, 0.6, 0.8), (0.7, 0.9, 1.0), "no difference shown"),
    ((0.5, 0.6, 0.7), (0.7, 0.9, 1.0), "no difference shown"),
    ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), "no difference shown"),
    ((None, None, None), (0.1, 0.1, 0.1), "stock ends in an error"),
    ((None, 0.5, 0.5), (0.1, 0.1, 0.1), "stock ends in an error in 1 of 3 runs"),
    ((0.5, 0.5, 0.5), (None, None, 0.9), "safe ends in an error in 2 of 3 runs"),
    ((None, 0.5, 0.6), (0.9, None, 0.8), "safe higher"),
    ((None, None, None), (None, None, None), "both end in an error"),
])  # fmt: skip
def test_the_verdict_is_that_of_the_ranges(stock, safe, expected):
    assert curves_page.compared(stock, safe) == expected
    sides = (
        [row(seed, score or 0, error=score is None and "E: e", loss=loss) for seed, score in enumerate(scores)]
        for scores, loss in ((stock, 1.0), (safe, 2.0))
    )
    assert curves_page.verdict(*sides) == expected


def test_equal_runs_are_identical_and_unequal_seeds_are_not_compared():
    runs = [row(seed, 0.9) for seed in range(3)]
    assert curves_page.verdict(runs, runs) == "identical"
    assert curves_page.verdict(runs, [row(seed, 0.9, loss=2.0) for seed in range(3)]) == "no difference shown"
    assert curves_page.verdict(runs, runs[:2]) == "too few seeds"
    assert curves_page.verdict(runs[:2], runs[:2]) == "too few seeds"
    assert curves_page.verdict([], []) == "too few seeds"
    ended = [row(seed, 0.9, "E: e") for seed in range(3)]
    assert curves_page.verdict(ended, ended) == "both end in an error"


def test_missing_runs_are_named(tmp_path):
    results = curves_page.Results()
    kept = [
        found for found in results.rows if (found["curve"], found["side"], found["seed"]) != ("nan-sft", "safe", 1)
    ]
    assert len(kept) == len(results.rows) - 1
    before, results.rows = results.missing(), kept
    assert set(results.missing()) - set(before) == {"nan-sft (seeds: safe 1)"}
    # Only seeds of both sides are compared.
    assert [[found["seed"] for found in side] for side in results.pairs("nan-sft")] == [[0, 2], [0, 2]]


def test_the_reward_and_the_score_of_long_answers_are_the_share_of_colour_words(warmed_up, tmp_path, curves):
    folder = warmed_up.make_model("long", 0, tmp_path)
    model, tokenizer = warmed_up.load("long", folder, curves.torch.float32)
    words = tokenizer.encode("red blue")
    assert set(words) < set(warmed_up.colour_words(tokenizer))
    assert warmed_up.colour_reward([words, [*words, *tokenizer.encode(" and what")], []]) == [2, 1, 0]
    untrained = warmed_up.score(model, tokenizer, "long")
    assert untrained == pytest.approx(len(warmed_up.colour_words(tokenizer)) / len(tokenizer), rel=0.5)
    with curves.torch.no_grad():
        model.lm_head.weight.zero_()
    uniform = warmed_up.score(model, tokenizer, "long")
    assert uniform == pytest.approx(len(warmed_up.colour_words(tokenizer)) / len(tokenizer), rel=1e-4)

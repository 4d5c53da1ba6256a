"""Errors that people pasted in public threads, and whole logs, are explained by the right entry, or not at all."""

import json
import tomllib
from pathlib import Path

import pytest

from safe_trainers.explain.catalogue import entries
from safe_trainers.explain.log_reader import explain, report


DATA = tomllib.loads(Path(__file__).with_name("pasted_errors.toml").read_text(encoding="utf-8"))
PASTED, UNRELATED = DATA["pasted"], [row["text"] for row in DATA["unrelated"]]


def first(text):
    found = explain(text).found
    return found[0].entry.id if found else None


def name(row):
    return f"{row['set']}-{'-'.join(row['thread'].split('/')[-3:])}"


@pytest.mark.parametrize("row", PASTED, ids=name)
def test_a_pasted_text_gets_its_entry_or_none(row):
    assert first(row["text"]) == row.get("id")
    if row.get("id") is not None:
        assert explain(row["text"]).explained == entries()[row["id"]].explains


@pytest.mark.parametrize("row", [row for row in PASTED if "case" in row], ids=name)
def test_the_text_chooses_the_case_of_its_entry(row):
    found = explain(row["text"]).found[0]
    (case,) = [case for case in entries()[row["id"]].cases if row["case"] in case.evidence]
    assert (found.cause, found.fix) == (case.cause, case.fix)


@pytest.mark.parametrize("text", UNRELATED)
def test_errors_of_other_fields_get_no_entry(text):
    assert explain(text).found == ()


def test_the_data_is_what_its_head_says():
    assert len([row for row in PASTED if row["set"] == 0]) >= 100
    assert len(UNRELATED) >= 30
    for row in PASTED:
        assert row["thread"].startswith("https://github.com/")
        assert row.get("id") in (None, *entries())
        assert row.get("first") in (None, "right", "wrong")
        assert row["set"] > 0 or ("id" in row and "first" not in row)


@pytest.mark.parametrize(
    ("number", "texts", "right", "wrong"),
    [
        (1, 50, 12, 0),
        (2, 50, 18, 5),
        (3, 22, 6, 0),
        (4, 50, 20, 10),
        (5, 50, 27, 10),
        (6, 50, 26, 7),
        (7, 50, 26, 6),
        (8, 50, 29, 7),
        (9, 28, 14, 7),
        (10, 60, 45, 9),
        (11, 50, 37, 12),
        (13, 55, 40, 6),
        (14, 51, 38, 4),
        (15, 50, 33, 0),
        (16, 47, 31, 0),
        (17, 48, 40, 0),
        (18, 55, 44, 1),
        (19, 51, 42, 0),
    ],
    ids=["1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "13", "14", "15", "16", "17", "18", "19"],
)
def test_how_many_texts_were_answered_before_messages_were_written_from_them(number, texts, right, wrong):
    """The share of errors that the catalogue knows without having seen them; a later set is added here."""
    rows = [row for row in PASTED if row["set"] == number]
    assert len(rows) == texts
    assert sum(row.get("first") == "right" for row in rows) == right
    assert sum(row.get("first") == "wrong" for row in rows) == wrong


def test_every_crash_of_stock_in_the_evidence_is_known():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "matrix.jsonl"
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    messages = {row["stock"]["message"] for row in rows if row.get("stock", {}).get("outcome") == "crashed"}
    assert len(messages) > 5
    assert {message for message in messages if not explain(message).explained} == set()


# --- whole logs ------------------------------------------------------------------------------------------------------

STEPS = "".join(f"{{'loss': '{2 - step / 10:.4f}', 'grad_norm': '1.2', 'epoch': '{step}'}}\n" for step in range(9))
FRAMES = 'Traceback (most recent call last):\n  File "/u/train.py", line 9, in <module>\n    trainer.train()\n'
SCATTER = "RuntimeError: masked_scatter_: expected self and source to have same dtypes but got Float and Half"


def test_the_last_error_of_a_log_comes_first():
    memory = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n\nretrying\n\n"
    log = f"{STEPS}{FRAMES}{memory}{STEPS}{FRAMES}{SCATTER}\n"
    said = explain(log)
    assert [found.entry.id for found in said.found] == ["masked-scatter-dtypes", "out-of-memory"]
    assert log.splitlines()[said.found[0].line - 1] == SCATTER


def test_the_error_of_one_rank_is_not_buried_by_the_time_outs_of_the_others():
    failed = "".join(f"[rank2]: {line}\n" for line in f"{FRAMES}{SCATTER}".splitlines())
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, Timeout(ms)=600000) ran for 600009 ms"
    others = "".join(f"[rank{n}]:[E602 11:18:52.5 ProcessGroupNCCL.cpp:684] [Rank {n}] {timeout}\n" for n in (0, 1, 3))
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED\n"
    said = explain(f"{STEPS}{failed}{others}{FRAMES}{launcher}")
    assert [found.entry.id for found in said.found] == ["masked-scatter-dtypes", "nccl-timeout", "rank-failed"]
    assert said.explained
    assert said.found[1].times == 3


def test_a_process_that_was_killed_has_no_other_error():
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED\n"
    killed = "E0112 10:00 99 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: -9) local_rank: 0\n"
    said = explain(f"{STEPS}{killed}{FRAMES}{launcher}")
    assert said.found[0].entry.id == "killed-by-the-system"
    assert said.explained


@pytest.mark.parametrize("dumps", [repr, json.dumps], ids=["python", "json"])
def test_metrics_that_are_not_finite_are_found_in_lines_of_a_log(dumps):
    rows = [{"loss": 1.5, "grad_norm": 0.2}, {"loss": 1.4, "grad_norm": float("nan")}, {"loss": float("nan")}]
    log = "\n".join(map(dumps, rows))
    assert {found.entry.id: found.line for found in explain(log).found} == {"nan-grad-norm": 2, "nan-loss": 3}
    assert explain(dumps(rows[0])).found == ()


@pytest.mark.parametrize("dumps", [repr, json.dumps], ids=["python", "json"])
def test_skipped_steps_are_found_by_their_metric(dumps):
    rows = [{"precision/skipped_steps": float(n), "precision/effective_steps": 20.0} for n in range(12)]
    said = explain("\n".join(map(dumps, rows)))
    assert [(metric.key, value) for metric, value in said.beyond] == [("precision/skipped_steps", 11 / (11 + 20))]
    assert explain("\n".join(map(dumps, rows[:1]))).beyond == ()


def test_a_general_entry_is_used_only_where_no_other_matches():
    general, specific = "AttributeError: 'PeftModel' object has no attribute 'of_tomorrow'", SCATTER
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert first(general) == "attribute-missing"
    assert first(f"{FRAMES}{general}\n{link}{FRAMES}{specific}") == "masked-scatter-dtypes"
    # An earlier chain is not the cause, and its general entry says nothing.
    found = explain(f"{FRAMES}{general}\n\nretrying\n\n{FRAMES}{specific}").found
    assert [one.entry.id for one in found] == ["masked-scatter-dtypes"]


def test_words_of_a_message_go_before_the_class_of_the_exception():
    assert first("AssertionError: peft") == "check-failed"
    assert first("AssertionError: zero stage 2 requires an optimizer") == "deepspeed-refuses"


def test_a_message_of_python_needs_a_word_of_the_field_in_its_text():
    message = "TypeError: __init__() got an unexpected keyword argument 'colour'"
    assert first(message) is None
    assert first(f'  File "/env/site-packages/flask/app.py", line 9, in f\n    f()\n{message}') is None
    assert first(f'  File "/env/site-packages/trl/trainer.py", line 9, in f\n    f()\n{message}') == "argument-unknown"


def test_quotation_marks_of_a_forum_are_read_as_those_of_a_program():
    assert first("name ‘PeftModel’ is not defined") == "peft-missing"


def test_a_wording_is_used_only_where_no_family_matches():
    assert first("ValueError: peft: `alpha` must be an integer of the config") == "argument-not-as-required"
    assert first("AttributeError: 'PeftModel' object has no attribute 'must be '") == "attribute-missing"
    assert first("ValueError: `colour` must be an integer") is None


def test_a_hint_says_where_to_look_and_that_the_cause_is_not_known():
    said = explain("ValueError: peft: `alpha` must be an integer of the config")
    assert [one.entry.kind for one in said.found] == ["hint"]
    assert not said.explained
    printed = [verdict.what for verdict in report(said).verdicts]
    assert printed[0].startswith("this error is not in the catalogue")
    assert printed[1].startswith("argument-not-as-required")


def test_a_wording_in_a_long_log_is_not_an_error():
    line = "peft: `alpha` must be an integer\n"
    assert first(line) == "argument-not-as-required"
    assert first(line + STEPS) is None


def test_capital_letters_and_backticks_do_not_matter():
    message = "Assertion `srcIndex < srcSelectDimSize` failed"
    for text in (message, message.upper(), message.replace("`", "")):
        assert first(text) == "index-out-of-range-on-a-gpu"


def test_the_cause_follows_the_evidence_around_a_message():
    name = "ImportError: cannot import name '{}' from 'transformers' (/env/transformers/__init__.py)"
    other, every = (explain(name.format(one)).found[0] for one in ("OfTomorrow", "Trainer"))
    assert other.entry == every.entry
    assert (other.cause, other.fix) == (other.entry.cause.strip(), other.entry.fix)
    assert (every.cause, every.fix) == (other.entry.cases[0].cause, other.entry.cases[0].fix)


def test_a_traceback_without_its_message_is_explained_by_the_line_that_raises():
    frames = '  File "/u/train.py", line 9, in f\n    raise AssertionError("Torch not compiled with CUDA enabled")\n'
    assert first(f"Traceback (most recent call last):\n{frames}") == first(
        "AssertionError: Torch not compiled with CUDA enabled"
    )
    assert first(f"Traceback (most recent call last):\n{frames}KeyError: 'colour_of_the_sky'") != first(frames)


def test_the_possible_causes_are_listed_where_no_evidence_decides():
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    frame = '  File "/env/transformers/trainer.py", line 9, in nested_concat\n'
    every = [case for case in entries()["out-of-memory"].cases if not case.evidence]
    (unknown,), (known,) = explain(message).found, explain(f"Traceback:\n{frame}{message}").found
    assert list(unknown.possible) == every
    assert len(every) > 2
    assert known.possible == ()
    said, *causes = report(explain(message)).verdicts
    assert "does not tell" in said.what
    assert [(verdict.what, str(verdict.fix)) for verdict in causes] == [
        (f"possible cause: {case.cause}", case.fix) for case in every
    ]
    assert "does not tell" not in report(explain(f"Traceback:\n{frame}{message}")).verdicts[0].what


def test_an_assertion_without_a_message_is_found_by_its_condition():
    frames = '  File "/u/peft/model.py", line 9, in f\n    assert {}\n'
    assert first(f"Traceback (most recent call last):\n{frames.format('self.model is not None')}AssertionError\n") == (
        "none-in-place-of-an-object"
    )
    assert first(f"Traceback (most recent call last):\n{frames.format('size')}AssertionError\n") == "check-failed"


def test_what_a_launcher_quotes_goes_before_the_launcher():
    quoted = "AttributeError: 'LlamaModel' object has no attribute 'of_tomorrow'"
    said = explain(f"RuntimeError: Engine process failed to start. {quoted}")
    assert [one.entry.id for one in said.found] == ["attribute-missing", "vllm-engine-failed"]

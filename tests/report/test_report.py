"""One report and one renderer: what people, programs and model cards are shown is the same."""

import io
import json

import pytest
from rich.console import Console

from safe_trainers.core.errors import Fix, Problem
from safe_trainers.report import render
from safe_trainers.report.document import Report, Table


MADE = Report(
    "precision report",
    "a [model]",
    {"compute": "bfloat16", "weight bytes": 3 * 2**20},
    (
        Table(
            "groups",
            ("group", "bytes", "trainable", "gradient"),
            (("vision | tower", 2**20, True, None), ("head", 2 * 2**20, False, None)),
        ),
    ),
    (
        Problem("all [is] well", level="ok"),
        Problem("adapters lose bits", fix=Fix("`adapter_dtype: float32`"), id="lost", level="warning"),
    ),
)


def shown(report):
    stream = io.StringIO()
    render.show(report, Console(file=stream, width=100))
    return stream.getvalue()


def test_people_are_shown_sizes_and_no_empty_column():
    text = shown(MADE)
    assert "a [model]" in text  # no markup
    assert "weight bytes: 3.0 MiB" in text
    assert "2.0 MiB" in text
    assert "gradient" not in text
    assert "yes" in text
    assert "fix: adapter_dtype: float32" in text


def wide(rows=2):
    columns = ("part", "parameters", "compute dtype of the layers", "why it is stored like this", "bytes")
    why = "a reason of several words that does not fit on one line with everything else"
    return Table(
        "groups",
        columns,
        tuple((f"tower {n} (model.tower.{n})", "bfloat16", "bfloat16", why, 2**20) for n in range(rows)),
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_console_and_no_word_is_cut(width):
    report = Report("precision report", "a model", {"compute": "bfloat16"}, (wide(),), MADE.verdicts)
    stream = io.StringIO()
    render.show(report, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert not any(letter in stream.getvalue() for letter in "│┃┏━─")
    words = {word for row in wide().rows for text in row[:4] for word in text.split()}
    assert words <= {word.rstrip(",") for line in lines for word in line.split()}


def test_a_summary_has_at_most_25_lines(capsys):
    verdicts = tuple(Problem(f"warning {number} of many", level="warning") for number in range(12))
    facts = {f"fact {number}": "one value" for number in range(9)}
    report = Report("precision report", "a model", facts, (wide(30), wide(30)), verdicts)
    stream = io.StringIO()
    render.show_summary(report, Console(file=stream, width=80), "in a file")
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "the whole report: in a file"
    assert any(line.startswith("  fact 0 one value, fact 1") for line in lines)
    assert "  and 29 more" in lines


def test_programs_get_plain_values():
    made = json.loads(render.to_json(MADE))
    assert made["tables"]["groups"][1] == {"group": "head", "bytes": 2 * 2**20, "trainable": False, "gradient": None}
    assert made["verdicts"][0] == {"level": "ok", "text": "all [is] well"}
    assert made["facts"] == {"compute": "bfloat16", "weight bytes": 3 * 2**20}


def test_a_model_card_gets_markdown():
    text = render.to_markdown(MADE)
    assert text.startswith("## Precision report\n")
    assert "| vision \\| tower | 1.0 MiB | yes |" in text
    assert "| group | bytes | trainable |" in text
    assert "- **warning**: adapters lose bits. Fix: `adapter_dtype: float32`" in text


@pytest.mark.parametrize(
    ("levels", "status"), [((), 0), (("ok", "note"), 0), (("warning", "ok"), 1), (("warning", "error"), 2)]
)
def test_the_worst_verdict_is_the_exit_status(levels, status):
    assert Report("t", "s", verdicts=tuple(Problem("x", level=level) for level in levels)).exit_status == status


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="table 'groups' has the columns"):
        Table("groups", ("a", "b"), ((1,),))


def test_a_command_prints_one_or_the_other(capsys):
    assert render.present(MADE, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["subject"] == "a [model]"
    assert render.present(MADE, as_json=False) == 1
    assert "precision report: a [model]" in capsys.readouterr().out

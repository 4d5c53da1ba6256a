"""The dtype parser: every accepted spelling, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safe_trainers.core.dtypes import AUTO, BFLOAT16, FLOAT16, FLOAT32, from_torch, parse_dtype, to_torch
from safe_trainers.core.errors import PrecisionError


SPELLINGS = {
    "float32": ("fp32", "float32", "torch.float32", torch.float32),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16),
    "float16": ("fp16", "float16", "torch.float16", torch.float16),
}
OTHERS = {
    "half": FLOAT16,
    "torch.half": FLOAT16,
    "16-mixed": FLOAT16,
    "bf16-mixed": BFLOAT16,
    "32-true": FLOAT32,
    torch.half: FLOAT16,
}
"""Spellings of PyTorch and Lightning."""


@pytest.mark.parametrize(("name", "spelling"), [(name, s) for name, all_ in SPELLINGS.items() for s in all_])
def test_every_spelling_means_its_own_dtype(name, spelling):
    assert parse_dtype(spelling) == name
    assert to_torch(name) is getattr(torch, name)
    assert from_torch(to_torch(name)) == name


def test_auto_is_itself_or_refused():
    assert parse_dtype("auto") == AUTO
    with pytest.raises(PrecisionError):
        parse_dtype("auto", allow_auto=False)


@pytest.mark.parametrize(("value", "expected"), OTHERS.items())
def test_spellings_of_other_projects_mean_what_they_mean_there(value, expected):
    assert parse_dtype(value) == expected


@pytest.mark.parametrize(
    "value", ["float", "Half", "Float32", "fp8", "", "float64", torch.float64, torch.uint8, 16, None]
)
def test_anything_else_is_an_error_that_lists_what_is_accepted(value):
    with pytest.raises(PrecisionError) as caught:
        parse_dtype(value, field="precision")
    text = str(caught.value)
    for accepted in ("fp32", "float32", "torch.float32", "bf16", "fp16", "auto", "torch.dtype"):
        assert accepted in text


def test_the_error_says_what_was_passed_and_the_nearest_spelling():
    with pytest.raises(PrecisionError) as caught:
        parse_dtype("bflot16", field="precision")
    assert str(caught.value) == (
        "1 problem with the precision of this run:\n"
        "- precision='bflot16'\n"
        '  why: \'bflot16\' is not a dtype; expected one of "fp32", "float32", "torch.float32", "bf16", "bfloat16", '
        '"torch.bfloat16", "fp16", "float16", "torch.float16", "auto", or the torch.dtype of each.\n'
        "  fix: precision='bfloat16'  [unknown-dtype]"
    )


MEANINGS = {s: name for name, all_ in SPELLINGS.items() for s in all_} | OTHERS | {AUTO: AUTO}


@given(st.text(max_size=12) | st.sampled_from([s for s in MEANINGS if isinstance(s, str)]))
def test_no_spelling_falls_back_to_another_dtype(text):
    if text in MEANINGS:
        assert parse_dtype(text) == MEANINGS[text]
    else:
        with pytest.raises(PrecisionError):
            parse_dtype(text)

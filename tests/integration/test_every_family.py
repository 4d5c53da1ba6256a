"""The benchmark of all multimodal families: its results cover the auto classes, and it builds and trains families."""

from importlib.metadata import version
from pathlib import Path

import benchmark_modules
import pytest
import torch
from packaging.version import Version


ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.23"), reason="the models are built for the latest transformers"
)


@pytest.fixture
def every_family(monkeypatch):
    return benchmark_modules.load(monkeypatch, "every_family")


def test_the_results_cover_the_families_of_the_auto_classes(every_family):
    from any_family.models import families

    heading, rows = every_family.read_results(every_family.RESULT)
    if heading["versions"]["transformers"] != version("transformers"):
        pytest.skip("the results are those of another transformers")
    assert {row["family"]: row["model"] for row in rows} == families()
    assert all("reason" in row or set(row["cells"]) == set(every_family.CELLS) for row in rows)
    assert not [line for row in rows for line in every_family.unfit(row)]


@pytest.mark.parametrize(
    ("family", "cell", "stock"),
    [
        ("chameleon", "fp32, bf16=True", "trained"),  # images become tokens
        ("molmo2", "bf16, bf16=True", "trained"),  # tokens are means of patches
        ("glmasr", "bf16", "crashed"),  # sounds in float32 meet a convolution in bfloat16
    ],
)
def test_a_family_is_built_and_trained(every_family, tmp_path, family, cell, stock):
    from any_family.models import build, find_inputs

    model = build(family)
    assert sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    kind, inputs = find_inputs(model)
    assert kind == ("sound" if family == "glmasr" else "image")
    media = next(value for value in inputs.values() if torch.is_tensor(value) and value.is_floating_point())
    assert not torch.equal(media.bfloat16().float(), media)
    model.save_pretrained(tmp_path)
    subject = every_family.Subject(family, str(tmp_path), kind, inputs)
    found, values = every_family.run_cell(subject, every_family.CELLS[cell], safe=False)
    safe, others = every_family.run_cell(subject, every_family.CELLS[cell], safe=True)
    assert (found.outcome, safe.outcome) == (stock, "trained"), (found, safe)
    assert others["trial"].error is None
    assert others["trial"].skipped is None
    if stock == "trained":
        assert every_family.compare(values, others) == {"identical": True, "difference": 0.0}


def test_a_family_that_cannot_be_built_is_listed_with_the_reason(every_family, monkeypatch):
    from any_family import models

    monkeypatch.setattr(models, "LARGEST", 1000)
    row = every_family.measure("llava")
    assert row["step"] == "build"
    assert "parameters" in row["reason"]
    assert "cells" not in row


def test_what_is_wrong_of_the_safe_trainer_is_reported(every_family):
    def row(stock, safe, **more):
        cell = {"stock": {"outcome": stock}, "safe": {"outcome": safe, "message": "why", "ids": ["some-id"]}, **more}
        return {"family": "llava", "cells": {"fp32": cell}}

    assert not every_family.unfit(row("trained", "trained", difference=0.0))
    assert not every_family.unfit(row("crashed", "refused"))
    assert every_family.unfit(row("crashed", "crashed")) == ["llava, fp32: crashed: why "]
    assert every_family.unfit(row("trained", "refused")) == ["llava, fp32: refused (some-id), and stock trains it"]
    assert every_family.unfit(row("trained", "trained", difference=1e-3))
    upstream = {"outcome": "crashed", "message": "an in-place operation"}
    same = {"family": "llava", "cells": {"fp32": {"stock": upstream, "safe": upstream}}}
    assert not every_family.unfit(same)
    upstream["message"] = "mixed dtype (CPU)"
    assert every_family.unfit(same)
    assert not every_family.unfit({**row("crashed", "crashed"), "reason": "stock TRL cannot"})

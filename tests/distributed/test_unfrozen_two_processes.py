"""Weights that were unfrozen beside adapters, which PEFT does not write, are saved and resumed under FSDP2."""

import os
from pathlib import Path

import pytest
import trl
from packaging.version import Version
from processes import ENGINES
from two_processes import TESTS, run_in_two_processes


SCRIPT = """
import sys
import torch
from child import gloo_for_fsdp
from test_weights_without_peft import CASES, build

gloo_for_fsdp()
adapter, unfrozen = CASES["unfrozen"]
out, found = sys.argv[1] + "/run", []
for resume in (None, out + "/checkpoint-3"):
    trainer = build(out, adapter(), unfrozen, use_cpu=False, ddp_backend="gloo")
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.is_fsdp_enabled
    found.append([p.full_tensor() for p in trainer.model.parameters() if p.requires_grad])
assert len(found[0]) == 4 and all(map(torch.equal, *found)), found
"""


@pytest.mark.skipif(
    Version(trl.__version__) < Version("1.15"), reason="older stacks do not resume under FSDP2 on a CPU"
)
def test_unfrozen_weights_are_resumed_under_fsdp2(tmp_path, monkeypatch):
    for name, value in ENGINES["fsdp2"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    run_in_two_processes(SCRIPT, tmp_path, beside=str(TESTS / "checkpoint" / "any.py"))
    assert (tmp_path / "run" / "checkpoint-3" / "safe_trainers_weights.safetensors").is_file()

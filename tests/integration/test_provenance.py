"""Results state the package that they were measured on, and results of another one are not taken for its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import benchmark_modules
import pytest


ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def provenance(monkeypatch):
    return benchmark_modules.load(monkeypatch, "provenance")


def test_the_state_follows_the_python_files_of_the_package(provenance, monkeypatch, tmp_path):
    before = provenance.package_state()
    shutil.copytree(ROOT / "safe_trainers", tmp_path / "safe_trainers", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.package_state() == before
    file = tmp_path / "safe_trainers" / "__init__.py"
    file.write_text(file.read_text() + "\n")
    changed = provenance.package_state()
    assert changed != before
    file.rename(file.with_name("other.py"))
    assert provenance.package_state() not in (before, changed)


def test_results_measured_in_parts_on_two_states_say_so(provenance):
    whole = provenance.measured_with("a command", "torch")
    assert whole["package"] == provenance.package_state()
    assert provenance.measured_with("a command", "torch", before=whole) == whole
    for before in ({}, {"package": "0123456789ab"}, {"package": provenance.SEVERAL}):
        now = provenance.measured_with("a command", before=before)
        assert (now["package"], now["machine"]) == (provenance.SEVERAL, provenance.SEVERAL_MACHINES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_process_is_its_own(provenance):
    command = [sys.executable, "-c", "import provenance; print(provenance.peak_resident())"]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2**27 < provenance.peak_resident()  # this process has imported torch


def test_the_state_is_read_from_json_and_from_json_lines(provenance, tmp_path):
    heading = {"command": "a command", "package": "0123456789ab"}
    lines, whole, none = (tmp_path / name for name in ("rows.jsonl", "whole.json", "none.json"))
    lines.write_text(json.dumps(heading) + "\n" + json.dumps({"row": 1}) + "\n")
    whole.write_text(json.dumps(heading, indent=1))
    none.write_text("{}")
    assert [provenance.state_of(file) for file in (lines, whole, none)] == ["0123456789ab"] * 2 + [None]
    assert set(provenance.states()) == {file.name for file in (ROOT / "benchmarks" / "results").glob("*.json*")}

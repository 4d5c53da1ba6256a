"""Results state the package that they were measured on, and results of another one are not taken for its own."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import benchmark_modules
import grimp
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


def test_what_no_measured_run_executes_is_not_in_the_state(provenance, monkeypatch, tmp_path):
    before, with_recording = provenance.package_state(), provenance.package_state(records=True)
    assert before != with_recording
    shutil.copytree(ROOT / "safe_trainers", tmp_path / "safe_trainers", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)

    def change(name):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")

    for name in provenance.ASIDE:
        change(name)
    assert (provenance.package_state(), provenance.package_state(records=True)) == (before, with_recording)
    change("safe_trainers/diff/recorder.py")
    assert provenance.package_state() == before
    assert provenance.package_state(records=True) != with_recording
    change("safe_trainers/diff/feature.py")
    assert provenance.package_state() != before


def test_no_trainer_imports_what_starts_processes(provenance):
    graph = grimp.build_graph("safe_trainers", cache_dir=None)
    aside = {name.removesuffix(".py").replace("/", ".") for name in provenance.ASIDE}
    for module in aside:
        assert graph.find_downstream_modules(module) <= aside


def test_trainers_import_the_recording_through_its_feature(provenance):
    graph = grimp.build_graph("safe_trainers", cache_dir=None)
    inside = {module for module in graph.modules if f"{module.replace('.', '/')}.py".startswith(provenance.RECORDING)}
    users = {(user, module) for module in inside for user in graph.find_modules_that_directly_import(module) - inside}
    at_request = {("safe_trainers", "safe_trainers.diff.record"), ("safe_trainers", "safe_trainers.diff.live"),
                  ("safe_trainers.cli.diff", "safe_trainers.diff.compare")}  # fmt: skip
    assert users - at_request == {("safe_trainers.trainer.mixin", "safe_trainers.diff.feature")}


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


def test_results_are_read_from_json_and_from_json_lines(provenance, tmp_path):
    heading, row = {"command": "a command", "package": "0123456789ab"}, {"row": 1}
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "whole.json"
    lines.write_text(json.dumps(heading) + "\n" + json.dumps(row) + "\n")
    whole.write_text(json.dumps(heading, indent=1))
    assert provenance.read_results(lines) == (heading, [row])
    assert provenance.read_results(whole) == (heading, [])
    assert provenance.read_results(tmp_path / "none.json") == ({}, [])


@pytest.fixture
def measured(provenance, tmp_path):
    """Results of the present package for each target; a function that changes the heading of one of them."""
    heading = {"package": provenance.package_state(), "versions": {"torch": version("torch")}}

    def write(name, rows=(), /, **changes):
        lines = [json.dumps({**heading, **changes}), *map(json.dumps, rows)]
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")

    for name in provenance.TARGETS.values():
        write(name)
    return write


def test_nothing_is_left_after_all_was_measured(provenance, measured, tmp_path):
    assert provenance.left(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "rows", "changes"),
    [
        ("cost.json", (), {"package": "0123456789ab"}),
        ("cost.json", (), {"package": "several"}),
        ("cost.json", (), {"versions": {"torch": "0.1"}}),
        ("cost.json", (), {"versions": {"a-package-that-is-not-installed": "0.1"}}),
        ("experts.json", (), {"parts": ["families", "cost"], "families": []}),
        ("matrix.jsonl", [{}], {"rows": 2}),
        ("matrix.jsonl", [], {"rows": 2}),
        ("tune.jsonl", [{}], {"models": ["llava", "aria"]}),
    ],
)
def test_results_of_another_package_or_in_part_are_left(provenance, measured, tmp_path, name, rows, changes):
    measured(name, rows, **changes)
    assert [provenance.TARGETS[target] for target in provenance.left(tmp_path)] == [name]


def test_missing_results_are_left(provenance, measured, tmp_path):
    (tmp_path / "growth.json").unlink()
    assert provenance.left(tmp_path) == ["bench-growth"]


@pytest.mark.parametrize(
    ("name", "rows", "changes"),
    [
        ("experts.json", (), {"parts": ["families"], "families": []}),
        ("matrix.jsonl", [{}, {}], {"rows": 2}),
        ("tune.jsonl", [{}, {}], {"models": ["llava", "aria"]}),
    ],
)
def test_complete_results_are_not_left(provenance, measured, tmp_path, name, rows, changes):
    measured(name, rows, **changes)
    assert provenance.left(tmp_path) == []


def test_each_target_is_one_of_make(provenance):
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(provenance.TARGETS) <= set(rules)


def test_families_that_two_processes_measure_are_in_one_file(monkeypatch, tmp_path):
    tune, names = benchmark_modules.load(monkeypatch, "tune"), ("llava", "aria", "text")
    output = tmp_path / "tune.jsonl"
    output.write_text('{"package": "0123456789ab"}\n{"family": "text"}\n', encoding="utf-8")
    for family in ("aria", "llava"):  # in any order
        tune.add({"family": family}, output, names, kept=False)
    heading, *rows = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert heading == tune.heading_of(names)
    assert rows == [{"family": "llava"}, {"family": "aria"}]  # the one of another package is gone


def test_rows_of_another_package_are_kept_for_a_part(monkeypatch, tmp_path):
    tune, names = benchmark_modules.load(monkeypatch, "tune"), ("llava", "text")
    output = tmp_path / "tune.jsonl"
    output.write_text('{"package": "0123456789ab"}\n{"family": "text"}\n', encoding="utf-8")
    tune.add({"family": "llava"}, output, names, kept=True)
    heading, *rows = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert heading["package"] == "several"
    assert rows == [{"family": "llava"}, {"family": "text"}]

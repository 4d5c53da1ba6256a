"""Tests that were written against TRL's trainers pass with the safe ones in their place; a swap that swapped nothing
does not pass."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest


HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SWAP = str(HERE / "swap.py")
SUITES = sorted(map(str, (HERE / "foreign").glob("suite_*.py")))


def run(*command, cwd=ROOT):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command, "-q", "--no-header", "--show-capture=no", "--tb=short", "-p", "no:cacheprovider",
         # TRL names the caller of the method that warns, which is a class of ours.
         "-W", "ignore::FutureWarning"],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def outcomes(report):
    """Whether each test passed, by name."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": not len(case) for case in cases}


@pytest.mark.timeout(900)  # two whole suites, which take half a minute on an idle machine
def test_the_foreign_suites_pass_with_the_stock_trainers_and_with_the_safe_ones(tmp_path):
    stock = run("-m", "pytest", *SUITES, f"--junit-xml={tmp_path}/stock.xml")
    safe = run(SWAP, *SUITES, f"--junit-xml={tmp_path}/safe.xml")
    assert stock.returncode == 0, stock.stdout
    assert safe.returncode == 0, safe.stdout
    found = outcomes(tmp_path / "safe.xml")
    assert len(SUITES) == 6
    assert len(found) > 100
    assert found == outcomes(tmp_path / "stock.xml")
    assert set(found.values()) == {True}
    for name, readers in {
        "GRPOTrainer": 3,
        "RLOOTrainer": 2,
        "RewardTrainer": 2,
        "SFTTrainer": 2,
        "DPOTrainer": 2,
    }.items():
        assert f"{name} -> Safe{name}: seen by {readers} module(s)" in safe.stdout


def test_a_run_that_swaps_nothing_fails(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_passes():\n    assert 1 + 1 == 2\n")
    done = run(SWAP, "test_other.py", cwd=tmp_path)
    assert "1 passed" in done.stdout
    assert "0 classes swapped, 0 safe trainers built" in done.stdout
    assert done.returncode == 1


def test_a_path_is_needed():
    done = run(SWAP, "nowhere.py")
    assert done.returncode == 4
    assert "PATH has to exist, and none of these does: nowhere.py" in done.stderr

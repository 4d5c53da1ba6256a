"""The measurements for a GPU run in a small form on a CPU, and their page says what was measured."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmark_modules import load


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from gpu_page import COMMAND, WHAT, gpu_page  # noqa: E402


SCRIPT = ROOT / "benchmarks" / "gpu_evidence.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "small.json"
    made = run("--small", "--out", str(path))
    assert made.returncode == 0, made.stdout + made.stderr
    return path, made.stdout


def test_every_section_measures(measured):
    path, printed = measured
    sections = json.loads(path.read_text())["sections"]
    assert list(sections) == list(WHAT)
    assert not [name for name, found in sections.items() if "error" in found]
    assert "stock trains 1 of 3, safe 3" in printed
    skipped = {row["trainer"]: row for row in sections["skipped"]["rows"]}
    assert skipped["stock"]["schedule"] == skipped["stock"]["steps"] > skipped["stock"]["taken"]  # it runs ahead
    assert 0 < skipped["safe"]["taken"] == skipped["safe"]["schedule"] < skipped["safe"]["steps"]
    (fp16,), (pictures,) = sections["cost"]["rows"], sections["images"]["rows"]
    assert "error" in fp16["stock"]  # 4-bit with bf16 adapters under a loss scaler
    assert fp16["safe"]["seconds"] > 0
    assert pictures["safe"]["media"] == pictures["stock"]["media"] / 2
    assert len(pictures["ratios"]) == 2
    assert pictures["phases"]["rollout"] > 0
    decode = {row["variant"]: row for row in sections["decode"]["rows"]}
    assert set(decode) == {"stock", "safe", "compiled"}
    assert decode["compiled"]["second"] > 3 * decode["compiled"]["seconds"]  # in which it is compiled
    assert decode["safe"]["second"] < 3 * decode["safe"]["seconds"]
    mismatch = {(row["precision"], row["tokens"]): row["logp_mismatch_mean"] for row in sections["mismatch"]["rows"]}
    assert set(mismatch) == {(precision, length) for precision in ("fp16", "bf16") for length in (16, 64)}
    assert mismatch["fp16", 64] < mismatch["bf16", 64] / 3  # of 16 tokens the mean is too uncertain to tell
    assert sections["tests"]["rows"][0]["collected"] > 30
    assert list(path.parent.iterdir()) == [path]


def test_the_page_says_what_was_measured(measured):
    path, _ = measured
    page = gpu_page(path)
    assert "Measured on CPU" in page
    assert "finite after them in 1 of 3 with stock TRL, in 3 with safe-trainers" in page
    assert "`ValueError: Attempting to unscale FP16 gradients.` | trained |" in page
    assert "Not complete" not in page
    assert "| text half lora bf16 | compiled | " in page
    assert "CPU; random weights, hidden size 64, 2 text layers, 8 new tokens." in page


def test_sections_that_are_not_measured_again_stay(measured, tmp_path):
    path = tmp_path / "small.json"
    before = json.loads(measured[0].read_text())
    before["sections"]["matrix"]["device"] = "another device"
    path.write_text(json.dumps(before))
    made = run("--small", "--only", "vllm", "--limit", "30", "--out", str(path))
    assert made.returncode == 0, made.stdout + made.stderr
    after = json.loads(path.read_text())["sections"]
    assert list(after) == list(before["sections"])
    assert {name: found for name, found in after.items() if name != "vllm"} == {
        name: found for name, found in before["sections"].items() if name != "vllm"
    }


def test_a_section_that_fails_leaves_the_others_and_its_rows(tmp_path, measured):
    content = json.loads(measured[0].read_text())
    content["sections"]["mismatch"] |= {"rows": [], "error": "not done after 110 s"}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(content))
    page = gpu_page(path)
    assert "## Not measured\n\n- Mismatch of `generate` and scoring by length" in page
    assert "in 3 with safe-trainers." in page


def test_without_results_the_page_claims_nothing(tmp_path):
    page = gpu_page(tmp_path / "gpu.json")
    assert "Nothing has been measured on a GPU yet" in page
    assert COMMAND[1] in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--small"], "`--small` needs `--out FILE`"),
        (["--small", "--out", "here.json", "--only", "speed"], "--only speed: the sections are tests, matrix, "),
        (["--only", "matrix"], "this machine has no CUDA device"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    if "no CUDA" in message:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    made = run(*arguments)
    assert made.returncode == 2
    assert message in made.stderr
    assert not (ROOT / "here.json").exists()


def test_a_section_beyond_its_time_ends_with_its_own_processes(tmp_path, monkeypatch):
    started = tmp_path / "pid"
    script = tmp_path / "section.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    evidence = load(monkeypatch, "gpu_evidence")
    monkeypatch.setattr(evidence, "__file__", str(script))
    found = evidence.run_section("tests", True, 5.0, tmp_path / "out.json")
    assert found["error"] == "not done after 5 s"
    state = Path("/proc", started.read_text(), "stat")
    until = time.monotonic() + 30
    while running(state) and time.monotonic() < until:  # the signal was sent; the system ends the process soon
        time.sleep(0.05)
    assert not running(state)


def running(state: Path) -> bool:
    """Whether the process of a file such as `/proc/1/stat` exists and has not ended."""
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Each leak that tests/policing.py names is reported, and does not reach the next test."""

import os
import shutil
from pathlib import Path

import policing
import pytest
import torch
import torch._inductor.config
from accelerate.state import AcceleratorState
from policing import find_leaks, read_state, restore


HERE = Path(__file__).parent

# pytester forgets what an inner run imported, and torch refuses to import some of its modules twice: what the inner
# runs need is imported here, once.
IMPORTED = (torch._inductor.config, AcceleratorState)

# name: (what the test does, what the message must name)
LEAKS = {
    "variable set": ("os.environ['SAFE_TRAINERS_LEAK'] = 'value'", "SAFE_TRAINERS_LEAK was set"),
    "variable changed": ("os.environ['HF_HUB_OFFLINE'] = '0'", "HF_HUB_OFFLINE was changed"),
    "variable removed": ("del os.environ['HF_HUB_OFFLINE']", "HF_HUB_OFFLINE was removed"),
    "default dtype": (
        "torch.set_default_dtype(torch.float16)",
        "default dtype was torch.float32 and is torch.float16",
    ),
    "default device": ("torch.set_default_device('meta')", "default device was cpu and is meta"),
    "grad mode": ("torch.set_grad_enabled(False)", "grad mode was True and is False"),
    "deterministic": ("torch.use_deterministic_algorithms(True)", "deterministic algorithms was False and is True"),
    "warn only": (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "deterministic algorithms, warn only was False and is True",
    ),
    "autocast cpu": ("torch.set_autocast_enabled('cpu', True)", "autocast on cpu was False and is True"),
    "autocast cuda": ("torch.set_autocast_enabled('cuda', True)", "autocast on cuda was False and is True"),
    "autocast dtype cpu": ("torch.set_autocast_dtype('cpu', torch.float16)", "autocast dtype on cpu"),
    "autocast dtype cuda": ("torch.set_autocast_dtype('cuda', torch.bfloat16)", "autocast dtype on cuda"),
    "autocast nesting": ("torch.autocast_decrement_nesting()", "autocast nesting was 0 and is -1"),
    "file": ("open('left_over.txt', 'w').close()", "left_over.txt"),
    "folder": ("os.mkdir('runs')", "file left over"),
    "working directory": ("os.chdir(os.path.dirname(os.getcwd()))", "working directory was changed"),
}
CHECK_CLEAN = """
def test_after():
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.get_autocast_dtype("cuda") is torch.float16
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1" and "SAFE_TRAINERS_LEAK" not in os.environ
    assert os.getcwd() == HERE
"""


def run_inner(pytester: pytest.Pytester, body: str, *args: str) -> pytest.RunResult:
    """Runs a test file of this `body` in this process, with the real conftest and the project's markers."""
    shutil.copy(HERE / "conftest.py", pytester.path)
    pytester.makeini("[pytest]\nmarkers =\n    matrix: a\n    slow: b\n    gpu: c\n")
    pytester.makepyfile("import os\nimport pytest\nimport torch\nHERE = os.getcwd()\n" + body)
    before = read_state(pytester.path)
    # Hypothesis's plugin imports all of Hypothesis at the end of each run, which is 2 s every time.
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    result = pytester.runpytest_inprocess(*plugins, "-rs", *args)
    restore(before)  # so that a hole in the policing under test is not reported twice
    return result


@pytest.mark.parametrize("name", LEAKS)
def test_leak_is_reported_and_undone(pytester: pytest.Pytester, name: str) -> None:
    code, message = LEAKS[name]
    result = run_inner(pytester, f"def test_leak():\n    {code}\n{CHECK_CLEAN}")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*this test leaks:", f"*- *{message}*"])


def test_clean_tests_pass(pytester: pytest.Pytester) -> None:
    body = """
def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("SAFE_TRAINERS_LEAK", "value")
    monkeypatch.chdir(tmp_path)
    open("file.txt", "w").close()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.device("meta"):
        torch.ones(2)
"""
    run_inner(pytester, body + CHECK_CLEAN).assert_outcomes(passed=2)


def test_file_in_the_root_is_reported_from_elsewhere(pytester: pytest.Pytester) -> None:
    body = """
def test_leak(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    open(os.path.join(HERE, "model.safetensors"), "w").close()
def test_next(): pass
"""
    result = run_inner(pytester, body)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*file left over: *model.safetensors*"])


def test_caches_are_no_leak(pytester: pytest.Pytester) -> None:
    run_inner(pytester, "def test_cache():\n    os.makedirs('.ruff_cache')\n").assert_outcomes(passed=1)


def test_module_fixture_may_hold_state_for_its_module(pytester: pytest.Pytester) -> None:
    body = """
@pytest.fixture(scope="module")
def half():
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_dtype(torch.float32)
def test_one(half): pass
def test_two(half): assert torch.get_default_dtype() is torch.float16
"""
    run_inner(pytester, body).assert_outcomes(passed=2)


def test_module_fixture_that_leaks_is_reported(pytester: pytest.Pytester) -> None:
    body = """
@pytest.fixture(scope="module")
def half():
    torch.set_default_dtype(torch.float16)
def test_one(half): pass
"""
    result = run_inner(pytester, body)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*a fixture of this module leaks:", "*default dtype was torch.float32*"])


def test_failing_test_is_still_policed(pytester: pytest.Pytester) -> None:
    result = run_inner(
        pytester, "def test_both():\n    torch.set_grad_enabled(False)\n    assert False\n" + CHECK_CLEAN
    )
    result.assert_outcomes(passed=1, failed=1, errors=1)


def test_value_of_a_variable_is_not_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = read_state(tmp_path)
    monkeypatch.setenv("SAFE_TRAINERS_LEAK", "secret")
    (leak,) = find_leaks(before)
    assert "SAFE_TRAINERS_LEAK" in leak
    assert "secret" not in leak


def test_deleted_working_directory_is_reported_and_left(tmp_path: Path) -> None:
    before = read_state(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert find_leaks(before) == ["the working directory was changed; use monkeypatch.chdir"]
    restore(before)
    assert Path.cwd() == before.cwd


@pytest.mark.parametrize("value", ["bf16", None])
def test_mixed_precision_variable_is_put_back_silently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    name = "ACCELERATE_MIXED_PRECISION"
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    before = read_state(tmp_path)
    os.environ[name] = "fp16"
    assert find_leaks(before) == []
    restore(before)
    assert os.environ.get(name) == value


def test_accelerate_starts_anew_in_each_test(pytester: pytest.Pytester) -> None:
    body = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
def test_bf16():
    assert Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4).mixed_precision == "bf16"
def test_fp32():
    assert not AcceleratorState._shared_state and not GradientState._shared_state and not PartialState._shared_state
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
"""
    run_inner(pytester, body).assert_outcomes(passed=2)


def test_accelerate_keeps_its_first_precision_without_the_reset(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset is needed: without it the second Accelerator is refused."""
    monkeypatch.setattr(policing, "reset_accelerate", lambda: None)
    body = """
from accelerate import Accelerator
def test_bf16():
    Accelerator(cpu=True, mixed_precision="bf16")
def test_fp32():
    Accelerator(cpu=True, mixed_precision="no")
"""
    run_inner(pytester, body).assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize("marker", ["matrix", "slow"])
def test_marked_test_runs_on_request_only(pytester: pytest.Pytester, marker: str) -> None:
    body = f"@pytest.mark.{marker}\ndef test_it(): pass\n"
    result = run_inner(pytester, body)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"SKIPPED*marked {marker}: run `make {marker}`"])
    run_inner(pytester, body, "-m", f"{marker} and not gpu").assert_outcomes(passed=1)
    run_inner(pytester, body, "-m", "not other").assert_outcomes(skipped=1)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_gpu_test_runs_where_there_is_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    result = run_inner(pytester, "@pytest.mark.gpu\ndef test_it(): pass\n", "-m", "gpu")
    result.assert_outcomes(passed=int(has_cuda), skipped=int(not has_cuda))
    if not has_cuda:
        result.stdout.fnmatch_lines(["SKIPPED*no CUDA device*"])

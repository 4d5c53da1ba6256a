"""Shared fixtures, and the rule that a test leaves no trace (what counts as one: tests/policing.py)."""

import gc
import os
import random
import re
from collections.abc import Iterator


# Before torch and the Hugging Face libraries are imported: they read these once, at import.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",  # the tests make their models and data themselves; a download would be a bug
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",  # tokenizers warns in every fork otherwise
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",  # threads cost tiny models more than they give, and a hundredfold on a busy machine
        "WANDB_MODE": "disabled",  # transformers 4.57 reports to every tracker that is installed
    }
)

import numpy as np
import pytest
import torch
from policing import State, find_leaks, read_state, reset_accelerate, restore


# Tiny families that not every supported release of transformers can build without torchvision, or at all.
FRAGILE = ("llama4", "smolvlm", "idefics3", "qwen2_5_vl")
# Marker to make target: what is too slow for every run, and how to run it.
ON_REQUEST = {"matrix": "make matrix", "slow": "make slow", "distributed": "make distributed", "vllm": "make vllm"}


def skip_reasons(markers: set[str], selection: str, has_cuda: bool) -> list[str]:
    """Says why a test is skipped; nothing when it runs.

    Args:
        markers: names of the test's markers.
        selection: the expression given to `pytest -m`, or "".
        has_cuda: whether a CUDA device can be used.
    """
    named = set(re.findall(r"\w+", selection))
    reasons = [
        f"marked {marker}: run `{target}`"
        for marker, target in ON_REQUEST.items()
        if marker in markers and marker not in named
    ]
    if "gpu" in markers and not has_cuda:
        reasons.append("marked gpu: torch finds no CUDA device; run `make gpu` on a machine with one")
    return reasons


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips, with its reason, what this machine or this run is not meant for."""
    has_cuda = torch.cuda.is_available()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {}).values()
        named = {
            getattr(value, "family", value) for value in params if isinstance(value, str) or hasattr(value, "family")
        }
        for family in named.intersection(FRAGILE):
            from upstream import why_not_built

            if why_not_built(family):
                item.add_marker(pytest.mark.skip(reason=why_not_built(family)))
        markers = {marker.name for marker in item.iter_markers()}
        for reason in skip_reasons(markers, config.getoption("markexpr"), has_cuda):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps the garbage collector away from what importing made.

    Accelerate collects twice in every training run, and each time would walk through the millions of objects of
    torch and transformers: two thirds of the time of a tiny run.
    """
    gc.collect()
    gc.freeze()


def undo(before: State) -> list[str]:
    """Puts everything back for the next test, and returns what had leaked since `before`."""
    reset_accelerate()
    leaks = find_leaks(before)
    restore(before)
    return leaks


def fail_on(leaks: list[str], what: str) -> None:
    """Fails, naming every leak, unless there is none."""
    if leaks:
        pytest.fail(f"{what} leaks:\n" + "\n".join(f"  - {leak}" for leak in leaks), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_no_trace(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """Around the fixtures that a module shares between its tests; gives the tests the place for what they report."""
    before = read_state(request.config.rootpath)
    reported: set[str] = set()  # files are not removed, so that the module would report its tests' files again
    yield reported
    fail_on([leak for leak in undo(before) if leak not in reported], "a fixture of this module")


@pytest.fixture(autouse=True)
def _test_leaves_no_trace(request: pytest.FixtureRequest, _module_leaves_no_trace: set[str]) -> Iterator[None]:
    """Around one test and the fixtures it has to itself."""
    before = read_state(request.config.rootpath)
    yield
    leaks = undo(before)
    _module_leaves_no_trace.update(leaks)
    fail_on(leaks, "this test")


@pytest.fixture
def seed_everything() -> Iterator[int]:
    """Seeds Python, NumPy and torch with 0 for one test, and gives each generator its old state back after."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        yield 0
    random.setstate(python_state)
    np.random.set_state(numpy_state)

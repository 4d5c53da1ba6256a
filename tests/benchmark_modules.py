"""Imports benchmarks in tests, without leaving behind what they set for their own processes."""

import importlib
import sys
from pathlib import Path


QUIET = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TRL_EXPERIMENTAL_SILENCE",
         "HF_HUB_OFFLINE", "OMP_NUM_THREADS")  # fmt: skip


def load(monkeypatch, name):
    """A module of `benchmarks/`; the environment is put back after the test."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    for variable in QUIET:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    # Scripts import the package `families`, and tests `benchmarks.families`: two copies would register their classes
    # with transformers twice.
    families = importlib.import_module("benchmarks.families")
    monkeypatch.setitem(sys.modules, "families", families)
    return importlib.import_module(name)

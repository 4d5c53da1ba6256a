"""Training with the real vLLM, in the trainer's process and on the CPU. Run with `make vllm`."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engines
import pytest


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test in this folder, and skips it unless it was asked for."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> engines.Folders:
    """Saved tiny models by family, made on first use."""
    return engines.Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _engines_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends every engine of a test, and what TRL and vLLM leave in the process."""
    before = dict(os.environ)
    monkeypatch.setenv("MASTER_PORT", str(engines.free_port()))
    yield
    engines.end_engines()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def build(folders: engines.Folders) -> Callable[..., Any]:
    """Builds a trainer of a cell, stock or safe, with an engine of its own."""
    return partial(engines.build, folders)

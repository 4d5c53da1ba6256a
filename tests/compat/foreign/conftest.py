"""What the suites of this folder share: tiny models on disk, and the arguments of a short run.

The suites are written as users write theirs, against TRL's own trainers; nothing in them knows of safe ones.
`tests/compat/test_swapped.py` runs them with both.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from safe_trainers import tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of a tiny checkpoint of a family, or of the reward model (`"reward"`)."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def path(family: str) -> str:
        if family not in made:
            made[family] = tiny.save(family, folder / family, seed=0)
        return str(made[family])

    return path


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a run of two steps, for any config."""
    return {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


@pytest.fixture
def short(common: dict[str, Any]) -> dict[str, Any]:
    """The same with what trainers that generate take."""
    return {**common, "num_generations": 2, "max_completion_length": 4}


class Weights:
    """The trainable weights of a model as they were, and what has become of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}

    def changed(self, model: torch.nn.Module) -> set[str]:
        """Names of the trainable weights that are not what they were; frozen ones have to be."""
        for name, old in self.frozen.items():
            assert torch.equal(model.get_parameter(name), old), f"{name} is frozen and has changed"
        return {name for name, old in self.before.items() if not torch.equal(model.get_parameter(name), old)}

    def all_changed(self, model: torch.nn.Module) -> bool:
        """Whether every trainable weight moved, and all of them are numbers."""
        return self.changed(model) == set(self.before) and all(p.isfinite().all() for p in model.parameters())


@pytest.fixture
def weights() -> type[Weights]:
    """Remembers the weights of a model."""
    return Weights


@pytest.fixture
def trainer_of_the_conftest() -> type:
    """What a conftest sees."""
    return trl.GRPOTrainer

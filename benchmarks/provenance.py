"""States what a file of results was measured with.

python benchmarks/provenance.py           # prints which results were measured on the package as it is
python benchmarks/provenance.py --left    # prints the `make` targets of `make bench-all` whose results were not
"""

import argparse
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = {
    "bench": "cost.json",
    "bench-experts": "experts.json",
    "bench-tune": "tune.jsonl",
    "bench-checks": "bench.json",
    "bench-tiny": "tiny_task.json",
    "bench-matrix": "matrix.jsonl",
    "bench-mismatch": "mismatch.json",
    "bench-not-finite": "not_finite.jsonl",
    "bench-growth": "growth.json",
    "bench-metrics": "metric_runs.json",
    "bench-diff": "diff_faults.json",
    "bench-trainers": "trainers.json",
}
"""The targets of `make bench-all` and their results, the longest first for `make --jobs 2 bench-all`."""
RECORDING = "safe_trainers/diff/"
"""The folder of the package that records steps; its feature does nothing unless `record_steps` is set."""
ASIDE = frozenset(f"safe_trainers/cli/{name}.py" for name in ("join", "launch", "launched", "machines", "train"))
"""Files of the package that only start and end the processes of a training command."""
SEVERAL = "several"
"""The package of results that were measured in parts, on different states of the package."""
SEVERAL_MACHINES = "several machines"
"""The machine of results that were measured in parts on different ones."""


def measured_with(
    command: str, *packages: str, before: Mapping[str, Any] | None = None, records: bool = False
) -> dict[str, Any]:
    """Returns what a file of results was measured with, for its heading.

    Args:
        command: The command that measures them.
        *packages: The packages that they depend on.
        before: The earlier heading, if some results of the file are kept.
        records: Whether steps are recorded.

    Returns:
        The command, the versions, the machine, and the state of the package.
    """
    now = {"machine": machine(), "package": package_state(records)}
    several = {"machine": SEVERAL_MACHINES, "package": SEVERAL}
    if before is not None:
        now = {name: found if before.get(name) == found else several[name] for name, found in now.items()}
    marked = {"records": True} if records else {}
    return {"command": command, "versions": {name: version(name) for name in packages}, **marked, **now}


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


def package_state(records: bool = False) -> str:
    """Returns a hash of the package's Python files that a measured run executes, in 12 hexadecimal digits.

    Args:
        records: Whether steps are recorded.
    """
    found = hashlib.sha256()
    for file in sorted((ROOT / "safe_trainers").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        recording = name.startswith(RECORDING) and file.name != "feature.py"
        if name not in ASIDE and (records or not recording):
            found.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def read_results(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what a file of results was measured with, and its rows; both are empty if there is no file.

    Args:
        file: JSON lines with the heading first, or a JSON file, whose content is the heading.
    """
    if not file.is_file():
        return {}, []
    text = file.read_text(encoding="utf-8")
    heading, *rows = map(json.loads, text.splitlines() if file.suffix == ".jsonl" else [text])
    return heading, rows


def is_present(file: Path) -> bool:
    """Returns whether a file has all results, of the present package and of the installed versions."""
    heading, rows = read_results(file)
    same = heading.get("package") == package_state(heading.get("records", False)) and all(
        number == _installed(name) for name, number in heading.get("versions", {}).items()
    )
    return same and _is_complete(file, heading, rows)


def _is_complete(file: Path, heading: Mapping[str, Any], rows: Sequence[Any]) -> bool:
    """Whether a file that is written in parts has all rows, models or parts that its heading announces."""
    if file.suffix == ".jsonl":
        return len(rows) == (len(heading["models"]) if "models" in heading else heading.get("rows", len(rows)))
    return all(part in heading for part in heading.get("parts", ()))


def left(results: Path = RESULTS) -> list[str]:
    """Returns the targets of `make bench-all` whose results are not those of the present package."""
    return [target for target, name in TARGETS.items() if not is_present(results / name)]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Prints a line for each file, or the targets that are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left", action="store_true", help="print the targets whose results are not of the package")
    if parser.parse_args().left:
        print(*left())
        return
    print(f"the package is {package_state()}, and {package_state(records=True)} with the recording of steps")
    for file in sorted(RESULTS.glob("*.json*")):
        heading = read_results(file)[0]
        state = heading.get("package")
        same = state == package_state(heading.get("records", False))
        print(f"{'same' if same else 'other':5}  {file.name}  {state or 'not recorded'}")


if __name__ == "__main__":
    main()

"""Measures on a CUDA device what the pages say of CPUs: combinations, cost, memory, mismatch, skipped steps.

    python benchmarks/gpu_evidence.py            # on a machine with a CUDA device, in at most nine minutes
    python benchmarks/gpu_evidence.py --small    # the same measurements in a small form on a CPU

Each section runs in its own process with a time limit and keeps the rows that it has measured, so that one that fails
leaves the others. `--only` measures some of them; the others stay as they are, each with its device, versions and
package. Results are in `benchmarks/results/gpu.json`; `make docs` makes the page. The small form needs `--out`, so
that it never replaces results of a GPU.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  (sets the environment)
from gpu_sections import FORMS, SECTIONS, SIDES
from provenance import SEVERAL, package_state


RESULT = Path(__file__).parent / "results" / "gpu.json"
PACKAGES = ("safe-trainers", "torch", "trl", "transformers", "peft", "accelerate", "bitsandbytes", "vllm")
LIMIT = 540
"""Seconds of all sections together."""


def main() -> int:
    """Runs the sections, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the small form, on a CPU")
    parser.add_argument("--only", help=f"sections, separated by commas, of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all sections together")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args()
    form = FORMS["small" if options.small else "gpu"]
    if options.section:
        with options.out.open("w", encoding="utf-8") as rows:
            for row in SECTIONS[options.section][0](form):
                print(json.dumps(row), file=rows, flush=True)
        return 0
    import torch

    if not options.small and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; `--small --out FILE` runs a small form on the CPU")
    if options.small and options.out is None:
        parser.error("`--small` needs `--out FILE`: results of a CPU do not replace those of a GPU")
    names = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: the sections are {', '.join(SECTIONS)}")
    path = options.out or RESULT
    names = [name for name in SECTIONS if name in names]
    content: dict[str, Any] = {
        "command": "python benchmarks/gpu_evidence.py" + (" --small" if options.small else ""),
        "form": form.name,
        "sections": {},
    }
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        content["sections"] = before["sections"] if before["form"] == form.name else {}
    heading = {
        "device": "CPU" if options.small else torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "versions": versions(),
        "package": package_state(),
    }
    began = time.perf_counter()
    for name in names:
        left = options.limit - (time.perf_counter() - began)
        found = run_section(name, options.small, min(SECTIONS[name][1], left), path)
        size = {"size": asdict(form.sizes[name])} if name in form.sizes else {}
        content["sections"][name] = {**heading, **size, **found}
        content["sections"] = {key: content["sections"][key] for key in SECTIONS if key in content["sections"]}
        states = {found["package"] for found in content["sections"].values()}
        content["package"] = states.pop() if len(states) == 1 else SEVERAL
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(*summary(content), sep="\n")
    return 1 if any("error" in content["sections"][name] for name in names) else 0


def versions() -> dict[str, str]:
    """The versions of the installed packages."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_section(name: str, small: bool, limit: float, path: Path) -> dict[str, Any]:
    """Runs a section in a process.

    Args:
        name: The section.
        small: Whether it is the small form.
        limit: Its time limit in seconds.
        path: The file of all results; the section writes one beside it.

    Returns:
        The `rows` that it measured, its `seconds`, and an `error` if it did not end well.
    """
    out = path.with_suffix(f".{name}.jsonl")
    command = [sys.executable, __file__, "--section", name, "--out", str(out), *(["--small"] if small else [])]
    began, error = time.perf_counter(), None
    if limit <= 0:
        return {"rows": [], "error": "not run: no time was left", "seconds": 0.0}
    run = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = run.communicate(timeout=limit)
        if run.returncode:
            error = next(iter(errors.strip().splitlines()[-1:]), f"status {run.returncode}")
            print(name, errors[-4000:], sep=": ", file=sys.stderr)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # with its own processes, which would keep the GPU
        run.communicate()
        error = f"not done after {limit:.0f} s"
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    out.unlink(missing_ok=True)
    found = {"rows": rows, "seconds": round(time.perf_counter() - began, 1)}
    return found if error is None else {**found, "error": error}


def summary(content: dict[str, Any]) -> list[str]:
    """A line for each section."""
    lines = [f"{content['form']} form"]
    for name, found in content["sections"].items():
        rows = found["rows"]
        text = f"{len(rows)} rows"
        if name == "matrix":
            trained = {side: sum(row[side] == "trained" for row in rows) for side in SIDES}
            text = f"stock trains {trained['stock']} of {len(rows)}, safe {trained['safe']}"
        elif name == "tests" and rows:
            text = ", ".join(f"{key} {value}" for key, value in rows[0].items())
        text += f"; failed: {found['error']}" if "error" in found else ""
        lines.append(f"  {name:<9} {found['seconds']:6.1f} s  {found['device']}: {text}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

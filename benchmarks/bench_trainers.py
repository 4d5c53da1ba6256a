"""Runs `safe-trainers bench` on TRL's stable trainers, stock and safe: `docs/bench.md`.

    python benchmarks/bench_trainers.py            # some 20 minutes on 2 cores
    python benchmarks/bench_trainers.py --stock    # the stock trainers alone, as in an environment of an older TRL

Results of other releases of TRL stay in the file.
"""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "bench.json"
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from provenance import measured_with, package_state

from safe_trainers.bench.outcome import WRONG
from safe_trainers.bench.run import bench_trainer
from safe_trainers.cli.main import quieten
from safe_trainers.core.tasks import TASKS
from safe_trainers.core.versions import stable_tasks


FIRST = ("sft", "grpo", "rloo", "reward", "dpo")


def main() -> None:
    """Measures each class, and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="only TRL's trainers")
    parser.add_argument("--only", nargs="+", help="only these classes, as MODULE:CLASS")
    parser.add_argument("--checks", nargs="+", help="only these checks; the results of the others are kept")
    options = parser.parse_args()
    quieten()
    stable = sorted(stable_tasks(), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    names = [f"trl:{TASKS[name].algorithm}Trainer" for name in stable]
    if not options.stock:
        names += [f"safe_trainers:{TASKS[name].trainer}" for name in stable]
    for name in options.only or names:
        measured = bench_trainer(name, only=options.checks, progress=lambda line: print(line, flush=True))
        found = measured.to_dict()
        print(name, found["exit_status"], found["seconds"], flush=True)
        runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"] if RESULT.exists() else []
        earlier = [run for run in runs if (run["trainer"], run["versions"]["trl"]) == (name, version("trl"))]
        if options.checks and earlier:
            again = {check["check"]: check for check in found["checks"]}
            found["checks"] = [again.get(check["check"], check) for check in earlier[0]["checks"]]
            found["seconds"] = round(sum(check["seconds"] for check in found["checks"]), 1)
            found["exit_status"] = int(any(check["status"] in WRONG for check in found["checks"]))
        runs = [run for run in runs if run not in earlier]
        now = package_state()
        runs.append(found | {"package": now})
        states = {run.get("package") for run in runs if run["versions"]["trl"] == version("trl")}
        heading = measured_with(
            "python benchmarks/bench_trainers.py", before={"package": now if states == {now} else None}
        )
        content = {**heading, "runs": runs}
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

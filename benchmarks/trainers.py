"""Trains each trainer of TRL for two steps, and writes what is covered: `make bench-trainers`, `docs/trainers.md`."""

import json
import sys
from pathlib import Path

from provenance import measured_with


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "trainers.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    """Measures every row."""
    import trainer_table

    rows = []
    for name in trainer_table.NAMES:
        rows.append(trainer_table.measure(name))
        print(rows[-1], flush=True)
    content = {**measured_with("python benchmarks/trainers.py", "torch", "trl", "transformers", "peft"), "rows": rows}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

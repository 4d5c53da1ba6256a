"""Writes `docs/gpu.md` from `benchmarks/results/gpu.json`, which only a machine with a CUDA device can make."""

import json
import statistics
from pathlib import Path
from typing import Any

from results import versions_of


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
COMMAND = ["```bash", "make gpu-evidence", "```"]
WHAT = {
    "matrix": "Combinations of model, trainer and precision, two steps each",
    "skipped": "Eight steps in float16 with fused AdamW, from a loss scale that overflows",
    "cost": "GRPO steps of safe over stock in turns, peak of memory, bytes of buffered media",
    "mismatch": "Mismatch of `generate` and scoring by length",
    "vllm": "Mismatch of vLLM in the trainer's process",
    "tests": "Tests that need a GPU",
}
"""The sections of the results, and what they measure."""


def gpu_page(result: Path = RESULT) -> str:
    """Returns `gpu.md`.

    Args:
        result: The results.
    """
    lines = ["# On a GPU", ""]
    if not result.is_file():
        lines += [
            "Nothing has been measured on a GPU yet: all figures of these pages are from CPUs.",
            "On a machine with a CUDA device this measures, in at most nine minutes:",
            "",
            *(f"- {what}" for what in WHAT.values()),
            "",
            *COMMAND,
            "",
            "Without a network, give a folder of wheels that `make gpu-wheels WHEELS=wheels` has made elsewhere:",
            "",
            "```bash",
            "make gpu-evidence WHEELS=wheels",
            "```",
            "",
            "The results replace this page.",
        ]
        return "\n".join(lines) + "\n"
    measured = json.loads(result.read_text(encoding="utf-8"))
    lines += [f"Measured on {measured['device']}.", "", *COMMAND]
    tables = {"matrix": _matrix, "skipped": _skipped, "cost": _cost, "mismatch": _mismatch, "vllm": _vllm,
              "tests": _tests}  # fmt: skip
    for name, found in measured["sections"].items():
        lines += ["", f"## {WHAT[name]}", ""]
        lines += tables[name](found["rows"]) if found["rows"] else ["No results."]
        if "error" in found:
            lines += ["", f"Not complete: `{found['error']}`"]
    lines += ["", f"*Made from `benchmarks/results/gpu.json` by `make docs`. `{measured['command']}`;"]
    lines += [f"{versions_of(measured)}.*"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page alone, where other pages cannot be made."""
    (ROOT / "docs" / "gpu.md").write_text(gpu_page(), encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _matrix(rows: list[dict[str, Any]]) -> list[str]:
    counts = {side: sum(row[side] == "trained" for row in rows) for side in ("stock", "safe")}
    lines = [f"Stock TRL trains {counts['stock']} of {len(rows)}, safe-trainers {counts['safe']}.", ""]
    return lines + _table(
        ["combination", "stock TRL", "safe-trainers"],
        [[" ".join(row["cell"]), _code(row["stock"]), _code(row["safe"])] for row in rows],
    )


def _code(text: str) -> str:
    return text if text in ("trained", "not finite") else f"`{text.replace('|', '/').replace('`', '')}`"


def _skipped(rows: list[dict[str, Any]]) -> list[str]:
    return _table(
        ["trainer", "steps", "taken", "steps of the schedule"],
        [[row["trainer"], str(row["steps"]), str(row["taken"]), str(row["schedule"])] for row in rows],
    )


def _cost(rows: list[dict[str, Any]]) -> list[str]:
    made = []
    for row in rows:
        stock, safe = row["stock"], row["safe"]
        ratios = row.get("ratios")
        both = "error" not in stock and "error" not in safe
        made.append([
            " ".join(row["point"]),
            f"{stock['seconds'] * 1e3:.1f}" if "seconds" in stock else _code(stock.get("error", "")),
            f"{safe['seconds'] * 1e3:.1f}" if "seconds" in safe else _code(safe.get("error", "")),
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else "–",
            f"{safe['peak'] / stock['peak']:.3f}" if both else "–",
            f"{safe['media'] / stock['media']:.2f}" if both and stock["media"] else "–",
        ])  # fmt: skip
    head = ["model, weights, kind, precision", "stock, ms per step", "safe, ms per step", "ratio", "peak", "media"]
    return _table(head, made)


def _mismatch(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in rows[0] if name not in ("precision", "tokens")]
    return _table(
        ["tokens", "precision", *(f"`{name}`" for name in names)],
        [[str(row["tokens"]), row["precision"], *(f"{row.get(name, float('nan')):.2e}" for name in names)]
         for row in rows],
    )  # fmt: skip


def _vllm(rows: list[dict[str, Any]]) -> list[str]:
    if "not_run" in rows[0]:
        return [f"Not run: {rows[0]['not_run']}."]
    return _table(
        ["trainer", "precision", "mean, nats", "largest, nats"],
        [
            [row["trainer"], row["precision"], _code(row["error"]), "–"] if "error" in row
            else [row["trainer"], row["precision"], f"{row['mean']:.2e}", f"{row['max']:.2e}"]
            for row in rows
        ],
    )  # fmt: skip


def _tests(rows: list[dict[str, Any]]) -> list[str]:
    row = dict(rows[0])
    failed = row.pop("failed", [])
    lines = [", ".join(f"{name}: {count}" for name, count in row.items()) + "."]
    return [*lines, "", *(f"- `{name}`" for name in failed)]


if __name__ == "__main__":
    main()

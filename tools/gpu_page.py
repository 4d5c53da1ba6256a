"""Writes `docs/gpu.md` from `benchmarks/results/gpu.json`, which only a machine with a CUDA device can make."""

import json
import statistics
from pathlib import Path
from typing import Any

from results import versions_of


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
COMMAND = ["```bash", "make gpu-evidence", "```"]
OFFLINE = "Offline: `make gpu-wheels WHEELS=wheels` elsewhere, then `make gpu-evidence WHEELS=wheels`."
WHAT = {
    "tests": "Tests that need a GPU",
    "matrix": "Combinations, two steps each",
    "skipped": "Eight steps in float16 with fused AdamW, from a loss scale that overflows",
    "cost": "GRPO steps of text models: safe over stock in turns, and peak of memory",
    "images": "GRPO steps of models with images: time, memory, bytes of buffered media",
    "decode": "Rollouts with `compile_decode`",
    "mismatch": "Mismatch of `generate` and scoring by length",
    "vllm": "Mismatch of vLLM in the trainer's process",
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
            OFFLINE,
            "",
            "The results replace this page.",
        ]
        return "\n".join(lines) + "\n"
    measured = json.loads(result.read_text(encoding="utf-8"))
    sections = {name: found for name, found in measured["sections"].items() if found["rows"]}
    devices = dict.fromkeys(found["device"] for found in sections.values())
    lines += [f"Measured on {' and '.join(devices)}.", "", *COMMAND, ""]
    lines += [OFFLINE]
    tables = {"tests": _tests, "matrix": _matrix, "skipped": _skipped, "cost": _cost, "images": _cost,
              "decode": _decode, "mismatch": _mismatch, "vllm": _vllm}  # fmt: skip
    for name, found in sections.items():
        lines += ["", f"## {WHAT[name]}", "", *tables[name](found["rows"]), "", _heading(found)]
        if "error" in found:
            lines += ["", f"Other rows were not measured: `{found['error']}`."]
    missing = [WHAT[name] for name in WHAT if name not in sections]
    if missing:
        lines += ["", "## Not measured", "", *(f"- {what}" for what in missing)]
    versions = dict.fromkeys(versions_of(found) for found in sections.values())
    lines += ["", f"*Made from `benchmarks/results/gpu.json` by `make docs`. `{measured['command']}`;"]
    lines += [f"{'; '.join(versions)}.*"]
    return "\n".join(lines) + "\n"


def _heading(found: dict[str, Any]) -> str:
    """The device of a section, and the size of its model."""
    size = found.get("size")
    if size is None:
        return f"{found['device']}."
    return (
        f"{found['device']}; random weights, hidden size {size['hidden']:,}, {size['layers']} text layers, "
        f"{size['tokens']} new tokens."
    )


def main() -> None:
    """Writes the page alone, where other pages cannot be made."""
    (ROOT / "docs" / "gpu.md").write_text(gpu_page(), encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _matrix(rows: list[dict[str, Any]]) -> list[str]:
    counts = {side: sum(row[side] == "trained" for row in rows) for side in ("stock", "safe")}
    lines = [
        f"Weights are finite after them in {counts['stock']} of {len(rows)} with stock TRL, in {counts['safe']} with "
        "safe-trainers. The others:",
        "",
    ]
    return lines + _table(
        ["model, trainer, weights, flag, kind", "stock TRL", "safe-trainers"],
        [
            [" ".join(row["cell"]), _code(row["stock"]), _code(row["safe"])]
            for row in rows
            if {row["stock"], row["safe"]} != {"trained"}
        ],
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
    pairs = max((len(row.get("ratios") or ()) for row in rows), default=0)
    point = ["model, weights, kind, precision", "stock, ms per step", "safe, ms per step"]
    head = [*point, f"ratio (range of {pairs} pairs)", "peak", "media"]
    return [*_table(head, made), *_phases(rows)]


def _phases(rows: list[dict[str, Any]]) -> list[str]:
    """The share of each phase in a step of safe, where it was profiled."""
    found = [row for row in rows if "phases" in row]
    if not found:
        return []
    names = list(found[0]["phases"])
    shares = [
        [
            " ".join(row["point"]),
            *(f"{row['phases'].get(name, 0.0) / sum(row['phases'].values()):.1%}" for name in names),
        ]
        for row in found
    ]
    return [
        "",
        "Shares of a step of safe:",
        "",
        *_table(["run", *names], shares),
    ]


def _decode(rows: list[dict[str, Any]]) -> list[str]:
    points: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        points.setdefault(" ".join(row["point"]), {})[row["variant"]] = row
    made = [
        [point, variant, *_step(row, found.get("stock", {}))]
        for point, found in points.items()
        for variant, row in found.items()
    ]
    head = [
        "run",
        "rollouts",
        "ms per step",
        "of stock",
        "ms of the second step",
        "mismatch",
    ]
    return [
        *_table(head, made),
        "",
        "Random weights of this depth have a mismatch above the normal range of [metrics](metrics.md).",
    ]


def _step(row: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [_code(row["error"]), "–", "–", "–"]
    ratio = f"{row['seconds'] / stock['seconds']:.2f}" if "seconds" in stock else "–"
    mismatch = f"{row['mismatch']:.2e}" if "mismatch" in row else "–"
    return [f"{row['seconds'] * 1e3:.0f}", ratio, f"{row['second'] * 1e3:.0f}", mismatch]


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
    return [*lines, *(["", *(f"- `{name}`" for name in failed)] if failed else [])]


if __name__ == "__main__":
    main()

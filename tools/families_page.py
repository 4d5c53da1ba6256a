"""Writes the page about all multimodal families of transformers, from the results of a benchmark."""

from collections import Counter
from pathlib import Path

from results import Row, read_rows, versions_of


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "every_family.jsonl"


def families_page() -> str:
    """Returns `families.md`."""
    heading, rows = read_rows(RESULT)
    trained = [row for row in rows if "reason" not in row]
    cells = [(row, name, cell) for row in trained for name, cell in row["cells"].items()]
    versions = versions_of(heading)
    lines = [
        "# All multimodal families",
        "",
        "Every multimodal family in transformers' auto classes, trained for two steps with the stock and the safe",
        "`SFTTrainer`. A tiny model of each is built from its config, and inputs for it are found by trying the forms",
        "that transformers' processors make. The batches contain random images or sounds that bfloat16 cannot hold",
        "exactly.",
        "",
        f"{len(rows)} families: stock TRL trains {len(trained)} in float32, and the others are "
        "[listed below](#families-that-trl-does-not-train) with the reason.",
        "",
        *_summary(cells),
        "",
        "## Families that TRL trains",
        "",
        "*both*: both trainers train, with bit-identical losses and weights; where they are not, the largest relative",
        "difference of the losses is given. *safe only*: stock TRL crashes or is wrong, and the safe trainer trains.",
        "*refused*: the safe trainer fails at construction with the change to make. *neither*: both crash with",
        "the same error.",
        "",
        *_table(trained),
        "",
        *_settings(trained),
        "## Where stock TRL fails",
        "",
        *_errors(cells),
        "",
        "## Families that TRL does not train",
        "",
        *_untrained([row for row in rows if "reason" in row]),
        "",
        f"*Made from the results of `{heading['command']}` by `make docs`; {versions}; {heading['machine']}.*",
    ]
    return "\n".join(lines).rstrip() + "\n"


def _summary(cells: list[tuple[Row, str, Row]]) -> list[str]:
    lines = ["| trainer | trained | refused | wrong | crashed |", "|---|---|---|---|---|"]
    for side in ("stock", "safe"):
        counts = Counter(cell[side]["outcome"] for _, _, cell in cells)
        numbers = [str(counts[outcome]) for outcome in ("trained", "refused", "wrong", "crashed")]
        lines.append(f"| {side} | {' | '.join(numbers)} |")
    both = [cell for _, _, cell in cells if cell["stock"]["outcome"] == cell["safe"]["outcome"] == "trained"]
    same = sum(cell["identical"] for cell in both)
    text = f"Where both train, losses and weights are bit-identical in {same} of {len(both)} cells."
    if same < len(both):
        furthest = max(cell["difference"] for cell in both)
        text += f" In the others the losses differ by at most {furthest:.1e} of their size."
    return [*lines, "", text]


def describe(cell: Row) -> str:
    """Returns the outcomes of a cell in a word or two."""
    stock, safe = cell["stock"]["outcome"], cell["safe"]["outcome"]
    if safe == "trained":
        if stock != "trained":
            return "safe only"
        return "both" if cell["identical"] else f"both, {cell['difference']:.0e}"
    if safe == stock == "crashed":
        return "neither"
    return f"refused: {', '.join(cell['safe'].get('ids', []))}" if safe == "refused" else safe


def _table(rows: list[Row]) -> list[str]:
    names = list(rows[0]["cells"])
    lines = ["| family | input | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for row in rows:
        cells = [describe(row["cells"][name]) for name in names]
        lines.append(f"| {row['family']} | {row['kind']} | {' | '.join(cells)} |")
    return lines


def _settings(rows: list[Row]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.get("settings", {}).items():
            found.setdefault(f"{name}={value}", []).append(row["family"])
    return [
        line
        for setting, names in found.items()
        for line in (
            f"Trained with `{setting}`, without which stock TRL crashes in float32 too: {', '.join(names)}.",
            "",
        )
    ]


def _errors(cells: list[tuple[Row, str, Row]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row, _, cell in cells:
        stock = cell["stock"]
        if stock["outcome"] != "trained":
            text = stock.get("message") or "; ".join(stock.get("faults", []))
            found.setdefault(_short(text), []).append(row["family"])
    lines = ["| error | cells | families |", "|---|---|---|"]
    for text, families in sorted(found.items(), key=lambda item: -len(item[1])):
        names = list(dict.fromkeys(families))
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        lines.append(f"| `{text}` | {len(families)} | {', '.join(names[:6])}{more} |")
    return lines


def _untrained(rows: list[Row]) -> list[str]:
    lines = ["| family | fails at | reason |", "|---|---|---|"]
    steps = {"build": "building", "inputs": "computing", "save": "saving", "stock": "training", "process": "running"}
    for row in rows:
        lines.append(f"| {row['family']} | {steps[row['step']]} | `{_short(row['reason'], 220)}` |")
    return lines


def _short(text: str, length: int = 120) -> str:
    text = " ".join(text.replace("|", "/").replace("`", "'").split())
    return text if len(text) <= length else text[: length - 3] + "..."

"""The section of `docs/matrix.md` about NaN and infinity, from the results of `benchmarks/not_finite.py`."""

from collections import Counter
from pathlib import Path

from results import read_rows


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "not_finite.jsonl"
OUTCOMES = ("stopped", "skipped", "reported", "unharmed", "excluded", "silent")


def section() -> list[str]:
    """Returns the lines of the section."""
    _, rows = read_rows(RESULT)
    total = {side: Counter(row[side] for row in rows) for side in ("stock", "safe")}
    precisions = ", ".join(dict.fromkeys(row["precision"] for row in rows))
    lines = [
        "## NaN and infinity",
        "",
        f"{len(rows)} runs of four steps of SFT, GRPO, RLOO and reward training, in {precisions}. NaN or infinity is",
        "put into one place: one gradient, activation, reward or weight, or the state of the optimizer.",
        "",
        "- **stopped**: an error. **skipped**: the step is skipped, in fp16 by the loss scaler, and all weights "
        "stay finite.",
        "- **reported**: a warning names what is not finite, at the latest when the run ends.",
        "- **unharmed**: the trained weights equal those of the run without the value.",
        "- **excluded**: the reward is NaN, which TRL leaves out by design.",
        "- **silent**: the run ends without an error and without a warning of this package. Its log may have a loss "
        "or a",
        "  gradient norm that is not finite.",
        "",
        "| trainer | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    lines += [f"| {side} | " + " | ".join(str(total[side][o]) for o in OUTCOMES) + " |" for side in ("stock", "safe")]
    lines += ["", "| place | runs | silent in stock | silent in safe | outcomes in safe |", "|---|---|---|---|---|"]
    for place in dict.fromkeys(row["place"] for row in rows):
        cells = [row for row in rows if row["place"] == place]
        stock, safe = (Counter(row[side] for row in cells) for side in ("stock", "safe"))
        found = ", ".join(f"{safe[o]} {o}" for o in OUTCOMES if safe[o])
        lines.append(f"| {place} | {len(cells)} | {stock['silent']} | {safe['silent']} | {found} |")
    return [*lines, ""]

"""Writes the measured parts of the page of `safe-trainers tune`, and its figure, from the results of the benchmark."""

import json
import math
from pathlib import Path

import figures
from results import Row, read_rows, versions_of


RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FLOOR = 2e-6
"""A mismatch in nats below which float32 itself lies, so that a smaller one is not better."""
SAME = 1.02
"""Mismatches within this factor count as equal."""


def saved_example() -> Row:
    """Returns the worked example: commands, what they printed, and the result."""
    found: Row = json.loads((RESULTS / "tune_example.json").read_text(encoding="utf-8"))
    return found


def verdict(found: Row) -> str:
    """Compares the tuned set with the set of a rule: `"better"`, `"fewer bytes"`, `"equal"` or `"worse"`."""
    tuned, rule = found["tuned"]["mean"], found["rule"]["mean"]
    if found["same_set"]:
        return "equal"
    if max(tuned, rule) < FLOOR or rule / SAME <= tuned <= rule * SAME:
        return "fewer bytes" if found["bytes_used"] < found["bytes"] else "equal"
    return "better" if tuned < rule else "worse"


def is_clear(found: Row) -> bool:
    """Whether the mismatches of two sets differ by more than two standard errors, as if their tokens were others."""
    tuned, rule = found["tuned"], found["rule"]
    return bool(abs(tuned["mean"] - rule["mean"]) > 2 * math.hypot(tuned["error"], rule["error"]))


def not_rounding(row: Row) -> bool:
    """Whether the mismatch of a model stays with every module in float32."""
    return bool(row["everything"]["mean"] > 0.5 * row["plain"]["mean"] > FLOOR)


def deviation(row: Row) -> tuple[float, float]:
    """Returns how far a run is from its promise, as a share, and in combined standard errors."""
    promise, run = row["promise"]["promise"], row["promise"]["run"]
    tokens = row["promise"]["steps"] * promise["tokens"] / max(promise["sequences"], 1) * row["promise"]["rows"]
    error = promise["error"] * math.sqrt(1 + promise["tokens"] / tokens)
    return abs(run / promise["mean"] - 1), abs(run - promise["mean"]) / error


def example() -> str:
    """The worked example."""
    shown = saved_example()
    parts = ["```console", *shown["commands"], "```", "", "```text", *shown["printed"], "```", ""]
    caption = (
        "Each point is a measured set of modules in float32, and the star is the chosen one. The head alone (cross) "
        "needs more bytes and leaves a larger mismatch."
    )
    described = "Mean mismatch of measured sets by bytes of weights beyond half precision."
    return "\n".join([*parts, *figures.embed("tune.svg", caption, described=described)])


def measured() -> str:
    """The comparison with fixed rules, and the promises."""
    heading, found = read_rows(RESULTS / "tune.jsonl")
    done = [row for row in found if "reason" not in row]
    compared = [row for row in done if "rules" in row]
    rounded = [row for row in compared if not not_rounding(row)]
    tokens = [row["plain"]["tokens"] for row in compared]
    lines = [
        f"{len(compared)} models. Tiny families have four text layers (Gemma 4 has two); the byte model",
        "has eight, and was trained on source code. The bytes of each rule are a budget, and both sets",
        f"are measured on {min(tokens):,} to {max(tokens):,} tokens, of prompts that the search has not seen.",
        "*Equal*: the search chose the set of the rule, or the mismatches differ by at most 2 %, or both are at the",
        "level of float32.",
        "",
        "| at the bytes of | tuned set better | equal with fewer bytes | equal | worse |",
        "|---|---:|---:|---:|---:|",
    ]
    for rule in dict.fromkeys(rule for row in rounded for rule in row["rules"]):
        verdicts = [verdict(row["rules"][rule]) for row in rounded if rule in row["rules"]]
        counts = [str(verdicts.count(kind)) for kind in ("better", "fewer bytes", "equal", "worse")]
        lines.append(f"| {rule} | {' | '.join(counts)} |")
    apart = [row["family"] for row in compared if not_rounding(row)]
    if apart:
        lines += [
            "",
            f"Not counted: {', '.join(apart)}. TRL scores them differently from how they generate, so that the",
            "mismatch is as large with every module in float32, and `tune` says that it is not due to the precision.",
        ]
    unable = [row for row in found if "reason" in row]
    if unable:
        names = ", ".join(row["family"] for row in unable)
        lines += ["", f"Not measured, because stock TRL cannot train them with GRPO: {names}."]
    left = [name for name in heading["models"] if name not in {row["family"] for row in [*compared, *unable]}]
    if left:
        lines += ["", f"Budgets not measured with this version of the search: {', '.join(left)}."]
    off = [deviation(row) for row in done]
    near = sum(share <= 0.1 for share, _ in off)
    inside = sum(share <= 0.1 or errors <= 2 for share, errors in off)
    cpu = [row["promise"]["cpu_seconds"] for row in done]
    sequences = " or ".join(map(str, sorted({row["promise"]["rows"] for row in done})))
    lines += [
        "",
        "The lines of a search without a budget were pasted into a run. The mismatch that the run logged is within",
        f"10 % of the promise in {near} of {len(off)} models, and within 10 % or two standard errors in {inside}.",
        f"A search took {min(cpu):.0f} to {max(cpu):.0f} s of CPU time, with {sequences} prompts:",
        "the byte model has the default, and the tiny families, whose tokens nearly all agree, have more.",
        "[Each model](tune_results.md).",
        "",
        f"*Made from `benchmarks/results/tune.jsonl`, which `make bench-tune` writes. `{heading['command']}`;",
        f"{versions_of(heading)}; {heading['machine']}.*",
    ]
    return "\n".join(lines)


def results_page() -> str:
    """Returns `tune_results.md`."""
    _, found = read_rows(RESULTS / "tune.jsonl")
    done = [row for row in found if "reason" not in row]
    rounded = [row for row in done if "rules" in row and not not_rounding(row)]
    better = [found for row in rounded for found in row["rules"].values() if verdict(found) == "better"]
    return "\n".join(
        [
            "# Precision search by model",
            "",
            "The results of `safe-trainers tune` in [each model](tune.md#measured): the mean mismatch on held-out",
            "prompts, in millionths of a nat, and the promise with two standard errors. Each search ran once.",
            f"In {sum(map(is_clear, better))} of the {len(better)} cases in which the tuned set is better, "
            "the difference is above two standard errors.",
            "",
            "| model | half precision | head only | tuned, at its bytes | last layer | tuned, at its bytes "
            "| lines of `tune` | promise | run |",
            "|---|---:|---:|---:|---:|---:|---|---:|---:|",
            *map(_row, done),
            "",
            "*Made from `benchmarks/results/tune.jsonl` by `make docs`.*",
            "",
        ]
    )


def _row(row: Row) -> str:
    sides = [
        _millionths(row["rules"][rule][side]["mean"]) if "rules" in row else ""
        for rule in ("head only", "last layer")
        for side in ("rule", "tuned")
    ]
    plain = _millionths(row["plain"]["mean"]) if "plain" in row else ""
    promise = row["promise"]
    names = ", ".join(f"`{name}`" for name in promise["settings"].get("fp32_modules", [])) or "no module"
    settings = f"{promise['settings']['precision']}: {names}"
    promised = f"{_millionths(promise['promise']['mean'])} ± {_millionths(2 * promise['promise']['error'])}"
    cells = (row["family"], plain, *sides, settings, promised, _millionths(promise["run"]))
    return f"| {' | '.join(cells)} |"


def _millionths(value: float) -> str:
    return f"{value * 1e6:.2g}" if value < 1e-5 else f"{value * 1e6:,.0f}"


def draw(file: Path) -> None:
    """Draws the search of the worked example.

    Args:
        file: The SVG to write.
    """
    from safe_trainers.tuning.draw import draw_axes

    figures.plot(file, lambda figure: draw_axes(figure.subplots(), saved_example()["result"]), (7.5, 4.2))

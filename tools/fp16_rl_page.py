"""Writes the page and the figure of the runs in bf16, fp16 and fp32, from the results of `benchmarks/fp16_rl.py`."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import figures
from results import Row, Rows


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "fp16_rl.jsonl"
REFERENCE, HALVES = "fp32", ("bf16", "fp16")
SEEDS, INCOMPLETE, SAME = 5, "too few seeds", "no difference shown"
"""The seeds that a verdict needs, what is printed with fewer, and what if the ranges overlap."""
EARLY = 4
"""The first steps, in which the policies have hardly changed."""
NAMES = {"sequence_mask": "sequence", "token_mask": "token", "none": "none"}
"""What has importance weights."""
Of = Callable[[Row], float]
Case = tuple[str, int]
"""A correction and an offset."""


def final(row: Row) -> float:
    """Returns the held-out score at the end of a run."""
    return float(row["score"])


def on_the_way(row: Row) -> float:
    """Returns the mean reward of all steps of a run."""
    return statistics.fmean(row["reward"])


def early(row: Row, key: str) -> float:
    """Returns the mean of a metric in the first `EARLY` steps."""
    return statistics.fmean(row[key][:EARLY])


def weight(row: Row) -> float:
    """Returns the mean importance weight in the first steps: 1 without a correction."""
    return early(row, "weight") if "weight" in row else 1.0


def variance(row: Row) -> float:
    """Returns the variance of the gradient in the first steps, divided by the square of the mean weight."""
    return early(row, "variance") / weight(row) ** 2


def verdict(first: Sequence[Row], second: Sequence[Row], of: Of) -> str:
    """Compares the runs of two precisions by a number of each run.

    Args:
        first: The runs of one precision.
        second: The runs of the other one, with the same seeds.
        of: `final`, `on_the_way` or `variance`.

    Returns:
        `"<precision> higher"` if the ranges of the seeds do not overlap, otherwise `SAME`; `INCOMPLETE` if a
        precision lacks seeds.
    """
    seeds = [{row["seed"] for row in rows} for rows in (first, second)]
    if seeds[0] != seeds[1] or len(seeds[0]) < SEEDS:
        return INCOMPLETE
    one, other = ([of(row) for row in rows] for rows in (first, second))
    if min(one) > max(other):
        return f"{first[0]['precision']} higher"
    return f"{second[0]['precision']} higher" if min(other) > max(one) else SAME


class Results(Rows):
    """The committed runs."""

    def __init__(self, file: Path = RESULT) -> None:
        super().__init__(file)

    def runs(self, case: Case, precision: str) -> list[Row]:
        """Returns the runs of a case in a precision, by seed. Those in fp32 belong to every correction."""
        correction, offset = case
        found = (
            row
            for row in self.rows
            if (row["offset"], row["precision"]) == (offset, precision)
            and (precision == REFERENCE or row["correction"] == correction)
        )
        return sorted(found, key=lambda row: row["seed"])

    def cases(self) -> list[Case]:
        """Returns the cases with runs in both half precisions."""
        return [
            (correction, offset)
            for correction in self.heading["corrections"]
            for offset in self.heading["offsets"]
            if all(self.runs((correction, offset), precision) for precision in HALVES)
        ]

    def halves(self, case: Case, of: Of) -> str:
        """Returns the verdict of bf16 and fp16."""
        return verdict(self.runs(case, "bf16"), self.runs(case, "fp16"), of)

    def against_reference(self, case: Case, precision: str, of: Of) -> str:
        """Returns the verdict of a half precision and fp32."""
        return verdict(self.runs(case, precision), self.runs(case, REFERENCE), of)


def threshold(results: Results, correction: str, of: Of) -> tuple[float | None, float | None, str]:
    """Returns from which mismatch on runs in half precision differ from fp32.

    Args:
        results: The runs.
        correction: The correction.
        of: `final`, `on_the_way` or `variance`.

    Returns:
        The largest measured mean of abs(S) at which no difference was shown, the smallest at which one was shown, and
        the verdict there; `None` and an empty string without such a mismatch.
    """
    seen: list[tuple[float, str]] = []
    for case in results.cases():
        for precision in HALVES:
            found = results.against_reference(case, precision, of)
            if case[0] == correction and found != INCOMPLETE:
                ratios = [early(row, "log_ratio") for row in results.runs(case, precision)]
                seen.append((statistics.fmean(ratios), found))
    below = max((ratio for ratio, found in seen if found == SAME), default=None)
    above, found = min(((ratio, found) for ratio, found in seen if found != SAME), default=(None, ""))
    return below, above, found


MEASURES: dict[str, Of] = {"score at the end": final, "reward on the way": on_the_way, "gradient variance": variance}


def signs(first: Sequence[Row], second: Sequence[Row], of: Of) -> str:
    """Returns in how many seeds of both a number is larger in the first runs than in the second ones."""
    others = {row["seed"]: of(row) for row in second}
    higher = [of(row) > others[row["seed"]] for row in first if row["seed"] in others]
    return f"{sum(higher)}/{len(higher)}"


def page() -> str:
    """Returns `fp16_rl.md`."""
    results = Results()
    head = results.heading
    lines = [
        "# GRPO in bf16 and in fp16, with vLLM",
        "",
        "Does fp16 train better than bf16 if trainer and sampler both compute in it, and from which mismatch on?",
        "[arXiv 2510.26788](https://arxiv.org/abs/2510.26788) reports that it does, for large models. Here: a tiny",
        f"model on a CPU, the real vLLM, answers of {head['length']} tokens. D is log p trainer − log p sampler of a",
        "token, and S its sum over an answer ([metrics](metrics.md)).",
        "",
        *_answer(results),
        "",
        *figures.embed(
            "fp16_rl.svg",
            "Reward by step in bf16 (orange, dashed), fp16 (blue) and fp32 (grey, dotted), a line for each seed. "
            "Last two panels: a mark for each seed, open unless sequences are weighted.",
            described="Reward by step in three precisions, and reward and gradient variance by mismatch.",
        ),
        "",
        "## From which mismatch on",
        "",
        *_thresholds(results),
        "",
        "Mean and range of the seeds, the verdict against fp32, and the seeds that are higher than fp32:",
        "",
        "| run | mean abs(D), max, k3 | mean abs(S), ESS, weight | score | reward | variance |",
        "|---|---|---|---|---|---|",
        *_by_mismatch(results),
        "",
        f"Mismatch and weight (TRL's metric) are means of the first {EARLY} of {head['steps']} steps. ESS: effective",
        "sample size.",
        "",
        "## Definitions",
        "",
        "- **Score at the end**: mean reward of answers to held-out prompts, sampled in float32 without vLLM.",
        f"- **Gradient variance**: a step accumulates {head['groups']} micro-batches, each the answers to one prompt.",
        "  The sum over all weights of the sample variance of their gradients, unscaled and before clipping, divided",
        f"  by the square of the mean weight, because AdamW ignores the scale; mean of the first {EARLY} steps.",
        "- **Verdict**: *no difference shown* (none) if the ranges of the seeds overlap, otherwise *higher*. Equal",
        f"  precisions have disjoint ranges by chance in one of 126 comparisons. It needs {SEEDS} seeds of both.",
        "- **Seeds**: how many are higher was added after three seeds had been seen, so it is not an independent "
        "test. "
        "All or",
        "  none of five is by chance one case in 16.",
        "",
        *_settings(head),
        "",
        *LIMITS,
        "",
        *_provenance(results),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _title(case: Case) -> str:
    return f"{NAMES[case[0]]} {case[1]}"


def _answer(results: Results) -> list[str]:
    """The verdicts of bf16 and fp16, each with its cases."""
    lines = []
    for name, of in MEASURES.items():
        found: dict[str, list[str]] = {}
        for case in results.cases():
            ratio = statistics.fmean(early(row, "log_ratio") for row in results.runs(case, "bf16"))
            sides = [results.runs(case, precision) for precision in ("fp16", "bf16")]
            higher = signs(*sides, of)
            if higher in (f"0/{SEEDS}", f"{SEEDS}/{SEEDS}"):
                higher += "; {:.3g}, {:.3g}".format(*(statistics.fmean(map(of, rows)) for rows in sides))
            found.setdefault(results.halves(case, of), []).append(f"{_title(case)} ({ratio:.2g}; {higher})")
        lines += [f"- {name}, **{each}**: {', '.join(cases)}" for each, cases in found.items()]
    return [
        "Verdicts, by importance weights and offset. In brackets: bf16's mean abs(S) in nats; seeds in which fp16 is",
        "higher; if all or none, the means of fp16 and bf16.",
        "",
        *lines,
    ]


def _thresholds(results: Results) -> list[str]:
    """A sentence for each measure: the mismatch from which on half precision differs from fp32."""
    lines = ["Against fp32, with weights of sequences, by mean abs(S) in nats:", ""]
    for name, of in MEASURES.items():
        below, above, found = threshold(results, "sequence_mask", of)
        parts = [f"{SAME} at up to {below:.2g}"] if below is not None else []
        parts += [f"{found} from {above:.2g} on"] if above is not None else []
        lines.append(f"- {name}: {'; '.join(parts) or INCOMPLETE}.")
    return lines


def _by_mismatch(results: Results) -> list[str]:
    """Rows of every precision, ordered by mean abs(S), with the verdicts of half precisions against fp32."""
    references = {offset: (correction, offset) for correction, offset in reversed(results.cases())}
    shown = [(case, precision) for case in results.cases() for precision in HALVES]
    shown += [(case, REFERENCE) for case in references.values()]
    lines = []
    for case, precision in shown:
        rows = results.runs(case, precision)

        def mean(key: str, rows: list[Row] = rows) -> float:
            return statistics.fmean(early(row, key) for row in rows)

        largest = max(max(row["mismatch_max"][:EARLY]) for row in rows)
        cells = [
            f"{precision} {_title(case) if precision != REFERENCE else case[1]}",
            f"{mean('mismatch'):.1e}, {largest:.1e}, {mean('k3'):.1e}",
            f"{mean('log_ratio'):.2g}, {mean('ess'):.2f}, {statistics.fmean(map(weight, rows)):.2g}",
        ]  # fmt: skip
        for of in MEASURES.values():
            cell = _short([of(row) for row in rows])
            if precision != REFERENCE:
                found = results.against_reference(case, precision, of).replace(SAME, "none")
                cell += f", {found} {signs(rows, results.runs(case, REFERENCE), of)}"
            cells.append(cell)
        lines.append((mean("log_ratio"), f"| {' | '.join(cells)} |"))
    return [line for _, line in sorted(lines)]


def _short(numbers: Sequence[float]) -> str:
    """Returns mean and range with three digits."""
    return f"{statistics.fmean(numbers):.3g} ({min(numbers):.3g}–{max(numbers):.3g})"


def _settings(head: Row) -> list[str]:
    return [
        "## Settings",
        "",
        f"An untrained Llama with {head['layers']} layers of width {head['hidden']}, {head['words'] + 2} tokens and",
        f"float32 weights, learning rate {head['rate']:g} (chosen in float32 with another seed). The reward is the",
        f"share of {head['rewarded']} words. {head['group']} answers to each of {head['groups']} prompts a step,",
        "`SafeGRPOTrainer`, vLLM in colocate mode in the dtype of the trainer's autocast, fp16 with loss scaling.",
        "",
        "**Offset**: a number that is added to all logits. In exact arithmetic it changes no probability, so only",
        "the mismatch changes. Sharper distributions (final norm scaled by 16 or 64) raise it too, but did not learn",
        "in float32 at the rates tried.",
        "",
        "**Importance weights**: of a sequence, TRL's default (`sequence_mask`: exp(S), and 0 above 3), where S",
        "matters most; at the largest offset also of tokens (`token_mask`), and none. In fp32 all are 1.",
    ]


LIMITS = [
    "## Limits",
    "",
    "A tiny model, one easy task, 14 steps and a CPU; the paper trains large models for thousands of steps. The",
    "offset is artificial. Rows are not independent: runs of a seed share prompts and weights. The mismatch ends",
    "as the policy becomes certain. Verdicts are not corrected for their number.",
]


def _provenance(results: Results) -> list[str]:
    kinds = {", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in results.rows}
    return [
        f"*Made from `benchmarks/results/fp16_rl.jsonl` by `make docs`; `{results.heading['command']}`;",
        f"{' or '.join(sorted(kinds))}; {results.heading['machine']}; {len(results.rows)} runs,",
        f"{sum(row['cpu_seconds'] for row in results.rows) / 60:.0f} minutes of CPU time.*",
    ]


COLUMNS = 4
LOOKS: dict[str, dict[str, Any]] = {
    "bf16": {"color": figures.ORANGE, "linestyle": "--", "marker": "s"},
    "fp16": {"color": figures.BLUE, "linestyle": "-", "marker": "o"},
    REFERENCE: {"color": "#808080", "linestyle": ":", "marker": ""},
}


def draw(file: Path) -> None:
    """Draws the reward by step, a panel for each case, and reward and gradient variance by mismatch.

    Args:
        file: The SVG to write.
    """
    from matplotlib.lines import Line2D

    results = Results()
    cases = results.cases()

    def panels(figure: Any) -> None:
        axes = figure.subplots(-(-(len(cases) + 2) // COLUMNS), COLUMNS, squeeze=False)
        places = list(axes.flat)
        for place, case in zip(places, cases, strict=False):
            for precision in (REFERENCE, *HALVES):
                for row in results.runs(case, precision):
                    place.plot(row["reward"], linewidth=1.2, **{**LOOKS[precision], "marker": ""})
            place.set_title(
                f"{NAMES[case[0]].replace('none', 'no')} weights, offset {case[1]}", loc="left", fontsize=10
            )
            place.set_ylim(-0.04, 1.04)
            place.set_xlabel("step")
            place.set_ylabel("reward")
        for place, of, title in ((places[len(cases)], on_the_way, "reward on the way, minus fp32"),
                                 (places[len(cases) + 1], variance, "gradient variance")):  # fmt: skip
            for case in cases:
                reference = {row["seed"]: row for row in results.runs(case, REFERENCE)}
                for precision in HALVES:
                    look = LOOKS[precision]
                    rows = [row for row in results.runs(case, precision) if row["seed"] in reference]
                    place.plot(
                        [early(row, "log_ratio") for row in rows],
                        [of(row) - (of(reference[row["seed"]]) if of is on_the_way else 0) for row in rows],
                        linestyle="", marker=look["marker"], color=look["color"], markersize=5,
                        fillstyle="full" if case[0] == "sequence_mask" else "none",
                    )  # fmt: skip
            place.set_xscale("log")
            place.set_xlabel("mean abs(S), nats")
            place.set_title(title, loc="left", fontsize=10)
        places[len(cases)].axhline(0, color="#808080", linestyle=":")
        places[len(cases) + 1].set_yscale("log")
        for place in places[len(cases) + 2 :]:
            place.axis("off")
        lines = [Line2D([], [], **LOOKS[precision]) for precision in LOOKS]
        figure.legend(lines, list(LOOKS), loc="outside upper center", ncols=3)

    figures.plot(file, panels, (11, 2.6 * -(-(len(cases) + 2) // COLUMNS) + 0.6))

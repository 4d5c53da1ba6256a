"""Writes the page of the mismatch of sampler and trainer by dtype, and its figure, from "
"`benchmarks/results/mismatch.json`.
"""

from pathlib import Path
from typing import Any

import figures
from fragments import results


PAIRS = {
    ("bf16", "bf16"): "bf16 weights, bf16 autocast",
    ("fp16", "fp16"): "fp16 weights, fp16 autocast",
    ("bf16", "fp16"): "bf16 weights, **fp16** autocast",
    ("autocast bf16", "bf16"): "bf16 autocast on both sides",
    ("autocast fp16", "fp16"): "fp16 autocast on both sides",
    ("fp32", "fp32"): "fp32 on both sides",
}
"""The label of each pair of sampler and trainer in the benchmark."""
LOOKS = {
    ("bf16", "bf16"): (figures.BLUE, "o", "-"),
    ("fp16", "fp16"): (figures.GREEN, "s", "-"),
    ("bf16", "fp16"): (figures.RED, "x", "-."),
    ("autocast bf16", "bf16"): (figures.BLUE, "v", ":"),
    ("autocast fp16", "fp16"): (figures.GREEN, "D", ":"),
}
"""Colour, marker and dash of each line of the figure. fp32 is four orders of magnitude smaller, and left out."""


def mismatch_page() -> str:
    """Returns `mismatch.md`."""
    measured = results("mismatch")
    found = {(row["sampler"], row["trainer"], row["length"]): row for row in measured["rows"]}
    lengths = sorted({row["length"] for row in measured["rows"]})
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())

    def head(words: str) -> list[str]:
        return [
            f"| {words} | " + " | ".join(f"{length:,}" for length in lengths) + " |",
            "|---" + "|---:" * len(lengths) + "|",
        ]

    def table(metric: str, form: str, scale: float = 1.0) -> list[str]:
        rows = [
            [words, *(_number(found[*pair, n][metric] * scale, form) for n in lengths)]
            for pair, words in PAIRS.items()
        ]
        return [*head("sampler, trainer"), *("| " + " | ".join(row) + " |" for row in rows), ""]

    def times(one: tuple[str, str], other: tuple[str, str]) -> list[float]:
        return [found[*one, n]["logp_mismatch_mean"] / found[*other, n]["logp_mismatch_mean"] for n in lengths]

    bf16, fp16, alone, *_ = PAIRS
    both, single = times(bf16, fp16), times(bf16, alone)
    cost = measured["cost"]
    return "\n".join(
        [
            "# Mismatch of sampler and trainer by dtype",
            "",
            f"With fp16 on both sides, the log-probabilities of sampler and trainer are {min(both):.1f} to "
            f"{max(both):.1f} times",
            f"nearer than with bf16 on both sides. fp16 in the trainer alone does not help: {min(single):.2f} to",
            f"{max(single):.2f} times. [Metrics](metrics.md) has the formulas.",
            "",
            *figures.embed(
                "mismatch.svg",
                "fp16 on both sides (green) is eight times nearer than bf16 (blue), at every length; fp16 in the "
                "trainer alone "
                "(red) is not nearer than bf16. With fp32 on both sides the mismatch is four orders of magnitude "
                "smaller.",
                described="Mean mismatch, sequence log-ratio and effective sample size by number of tokens.",
            ),
            "",
            "## What was measured",
            "",
            "A byte-level model with 8 layers and 6.5 million parameters, trained for a few minutes on the source of",
            f"Python's standard library (loss {measured['training']['loss']} nats per byte), samples",
            f"{measured['sequences']} sequences. Samplers with half-precision weights and no autocast correspond to",
            "an inference engine; autocast on both sides corresponds to the safe trainers without an engine. The",
            "trainer has float32 weights. All numbers are logged by `SafeGRPOTrainer`.",
            "",
            "## Mean mismatch",
            "",
            "`precision/logp_mismatch_mean` in thousandths of a nat, by number of tokens:",
            "",
            *table("logp_mismatch_mean", ".2g", 1e3),
            *head("ratio of means: bf16 on both sides"),
            f"| over fp16 on both sides | {' | '.join(f'{value:.2f}' for value in both)} |",
            f"| over fp16 only in the trainer | {' | '.join(f'{value:.2f}' for value in single)} |",
            "",
            "In units of the spacing of the compute dtype, `precision/logp_mismatch_ulp`, which separates the cases "
            "in bf16 and fp16:",
            "",
            *table("logp_mismatch_ulp", ".2f"),
            "## KL divergence",
            "",
            "`precision/logp_mismatch_k3` in millionths of a nat:",
            "",
            *table("logp_mismatch_k3", ".2g", 1e6),
            "## Sequences",
            "",
            "`precision/seq_logratio_abs_mean`, nats:",
            "",
            *table("seq_logratio_abs_mean", ".3f"),
            "`precision/seq_ess`, the effective sample size:",
            "",
            *table("seq_ess", ".4f"),
            "## Cost of the metrics",
            "",
            f"A step of `recipes/grpo/tiny_vlm_bf16.yaml` takes {cost['milliseconds']:.0f} ms of CPU time, of which",
            f"the code of the `precision/` metrics takes {cost['share']:.2%}. This is the median of",
            f"{cost['repetitions']} runs ({cost['range'][0]:.2%} to {cost['range'][1]:.2%}), profiled every",
            f"millisecond for {cost['steps']} steps. `precision_metrics=False` disables this code.",
            "",
            "*Made from `benchmarks/results/mismatch.json`, which `make bench-mismatch` writes, by `make docs`.",
            f"`{measured['command']}`; {versions}; {measured['machine']}.*",
            "",
        ]
    )


def _number(value: float, form: str) -> str:
    return "<1e-5" if value < 1e-5 else format(value, form)


def draw(file: Path) -> None:
    """Draws three metrics by number of tokens.

    Args:
        file: The SVG to write.
    """
    panels = {
        "logp_mismatch_mean": ("mean abs(D), thousandths of a nat", 1e3),
        "seq_logratio_abs_mean": ("mean abs(S), nats", 1.0),
        "seq_ess": ("effective sample size", 1.0),
    }
    rows = results("mismatch")["rows"]
    lengths = sorted({row["length"] for row in rows})

    def lines(figure: Any) -> None:
        for axes, (metric, (label, factor)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for pair, (colour, marker, dash) in LOOKS.items():
                line = [row for row in rows if (row["sampler"], row["trainer"]) == pair]
                x, y = [row["length"] for row in line], [row[metric] * factor for row in line]
                words = PAIRS[pair].replace("*", "")
                axes.plot(x, y, color=colour, marker=marker, linestyle=dash, markersize=5, label=words)
            axes.set(xlabel="tokens", xscale="log", yscale="linear" if metric == "seq_ess" else "log")
            axes.set_title(label, fontsize=11)
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
            if metric == "logp_mismatch_mean":
                axes.set_yticks([0.3, 1, 3], ["0.3", "1", "3"])
            if metric == "seq_logratio_abs_mean":
                axes.set_yticks([0.003, 0.01, 0.03, 0.1], ["0.003", "0.01", "0.03", "0.1"])
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    figures.plot(file, lines, (10, 3.9))

"""Writes the pages of this folder that are made from the code: `make docs`."""

import argparse
import ast
import json
import string
from pathlib import Path
from typing import Any

import cost_section
import evidence_page
import versions_page
from growth_page import growth_page

from safe_trainers.catalogue import FOREIGN, own_entries
from safe_trainers.catalogue_entry import Entry
from safe_trainers.errors import REFUSALS, WARNINGS, Finding


ROOT = Path(__file__).parent.parent


def refusals_page() -> str:
    """The page of everything that is refused or warned about, as it is written to `refusals.md`."""
    lines = [
        "# Refusals and warnings",
        "",
        "Made from `safe_trainers.REFUSALS` and `safe_trainers.WARNINGS` by `make docs`. Names in *italics* are",
        "filled in with what was passed.",
        "",
        "A run is refused only where stock TRL would crash, or would train something else than what was asked for.",
        "All refusals of a run come in one `PrecisionError`, at construction. What stock trains correctly trains.",
        "",
        "## Refused",
        "",
        *(line for finding in REFUSALS.values() for line in _entry(finding)),
        "## Warned about, once for each trainer",
        "",
        *(line for finding in WARNINGS.values() for line in _entry(finding)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def metrics_page() -> str:
    """The page of what is logged about precision, as it is written to `metrics.md`: the modules' own words."""
    sections = {"The optimizer": "skips", "Rollouts": "metrics", "Sampler against trainer": "mismatch"}
    lines = [
        "# Metrics",
        "",
        "Made from the modules that log them by `make docs`. `precision_metrics=False` turns them off.",
        "",
    ]
    for title, module in sections.items():
        source = (ROOT / "safe_trainers" / f"{module}.py").read_text(encoding="utf-8")
        lines += [f"## {title}", "", ast.get_docstring(ast.parse(source)) or "", ""]
    return "\n".join(lines).rstrip() + "\n"


PAIRS = {
    ("bf16", "bf16"): "bf16 weights, bf16 autocast",
    ("fp16", "fp16"): "fp16 weights, fp16 autocast",
    ("bf16", "fp16"): "bf16 weights, **fp16** autocast: fp16 in the trainer alone",
    ("autocast bf16", "bf16"): "bf16 autocast on both sides",
    ("autocast fp16", "fp16"): "fp16 autocast on both sides",
    ("fp32", "fp32"): "fp32 on both sides",
}
"""Sampler and trainer of each row of the benchmark of mismatch, in words."""


def _mismatch() -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((ROOT / "benchmarks/results/mismatch.json").read_text(encoding="utf-8"))
    return measured


def mismatch_page() -> str:
    """The page of sampler against trainer by dtype, as it is written to `mismatch.md`."""
    measured = _mismatch()
    found = {(row["sampler"], row["trainer"], row["length"]): row for row in measured["rows"]}
    lengths = sorted({row["length"] for row in measured["rows"]})
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    head = ["| sampler, trainer | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]

    def table(metric: str, form: str) -> list[str]:
        rows = [[words, *(format(found[*pair, n][metric], form) for n in lengths)] for pair, words in PAIRS.items()]
        return [*head, *("| " + " | ".join(row) + " |" for row in rows), ""]

    def times(one: tuple[str, str], other: tuple[str, str]) -> str:
        parts = (found[*one, n]["logp_mismatch_mean"] / found[*other, n]["logp_mismatch_mean"] for n in lengths)
        return " | ".join(f"{part:.2f}" for part in parts)

    bf16, fp16, alone, *_ = PAIRS
    cost = measured["cost"]
    return "\n".join(
        [
            "# Sampler and trainer, by dtype",
            "",
            "Made from `benchmarks/results/mismatch.json`, which `make bench-mismatch` measures, by `make docs`.",
            f"`{measured['command']}`; {versions}; {measured['machine']}.",
            "",
            "A byte model of 8 layers and 6.5 million parameters, trained for a few minutes on the source of Python's",
            f"standard library (loss {measured['training']['loss']} nats a byte), samples {measured['sequences']}",
            "sequences. Weights in half precision, without autocast, are what an inference engine holds; autocast on",
            "both sides is what the safe trainers do without one. The trainer holds float32 weights. All numbers are",
            "what `SafeGRPOTrainer` logs; their formulas are in [metrics.md](metrics.md).",
            "",
            "![mean mismatch, sequence log-ratio and effective sample size by length](mismatch.png)",
            "",
            "Mean abs(D), nats (`precision/logp_mismatch_mean`), by number of tokens:",
            "",
            *table("logp_mismatch_mean", ".1e"),
            "| bf16 over another, in the mean | " + " | ".join(map(str, lengths)) + " |",
            head[1],
            f"| over fp16 in sampler and trainer | {times(bf16, fp16)} |",
            f"| over fp16 in the trainer alone | {times(bf16, alone)} |",
            "",
            "k3, nats (`precision/logp_mismatch_k3`):",
            "",
            *table("logp_mismatch_k3", ".1e"),
            "Mean abs(S), nats (`precision/seq_logratio_abs_mean`):",
            "",
            *table("seq_logratio_abs_mean", ".3f"),
            "Effective sample size (`precision/seq_ess`):",
            "",
            *table("seq_ess", ".4f"),
            "## What the metrics cost",
            "",
            f"Of the {cost['milliseconds']:.0f} ms of CPU time of a step of `recipes/grpo/tiny_vlm_bf16.yaml`,",
            f"{cost['share']:.2%} goes to the code of the `precision/` metrics: sampled every millisecond for",
            f"{cost['steps']} steps, the median of {cost['repetitions']} runs, which gave {cost['range'][0]:.2%} to "
            f"{cost['range'][1]:.2%}. With",
            "`precision_metrics=False` none of it runs.",
            "",
        ]
    )


def mismatch_plot(file: Path) -> None:
    """Draws the page's figure.

    Args:
        file: Where to.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {
        "logp_mismatch_mean": ("mean abs(D), nats", "log"),
        "seq_logratio_abs_mean": ("mean abs(S), nats", "log"),
        "seq_ess": ("effective sample size", "linear"),
    }
    rows = _mismatch()["rows"]
    lengths = sorted({row["length"] for row in rows})
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (metric, (label, scale)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for (sampler, trainer), words in PAIRS.items():
            if (sampler, trainer) == ("fp32", "fp32"):
                continue  # four orders of magnitude below
            line = [row for row in rows if (row["sampler"], row["trainer"]) == (sampler, trainer)]
            style = {"linestyle": "--"} if sampler.startswith("autocast") else {}
            axes.plot([row["length"] for row in line], [row[metric] for row in line], marker="o",
                      label=words.replace("*", ""), **style)  # fmt: skip
        axes.set(xlabel="tokens", ylabel=label, xscale="log", yscale=scale)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    FigureCanvasAgg(figure).print_png(str(file), metadata={"Software": None})


def errors_page() -> str:
    """The page of the error texts that `safe-trainers explain` knows, as it is written to `errors.md`."""
    packages = sorted({entry.package for entry in FOREIGN.values()})
    lines = [
        "# Error texts",
        "",
        "Made from the catalogue of `safe-trainers explain` by `make docs`. The command takes a message, a log file",
        "or a pipe (`python train.py 2>&1 | safe-trainers explain`), takes colours, ranks and tracebacks away, and",
        "says which of these errors stopped the run, why, and what to write; … stands for anything. Each text is",
        "provoked with the installed packages by `tests/test_catalogue.py`, or has its place upstream.",
        "",
    ]
    for package in packages:
        lines += [f"## {package}", ""]
        lines += [line for entry in FOREIGN.values() if entry.package == package for line in _error(entry)]
    lines += [
        "## safe-trainers",
        "",
        "Our own errors carry their id in brackets, and end with the line to write:",
        "",
        *(
            f"- [{key}](refusals.md#{key})" if key in REFUSALS or key in WARNINGS else f"- {key}: {entry.cause}"
            for key, entry in sorted(own_entries().items())
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _error(entry: Entry) -> list[str]:
    fence = "``" if any("`" in text for text in entry.texts) else "`"
    pad = " " if fence == "``" else ""
    texts = [f"{'  ' if len(entry.texts) > 1 else ''}- {fence}{pad}{text}{pad}{fence}" for text in entry.texts]
    texts = ["- texts:", *texts] if len(texts) > 1 else [f"- text: {texts[0][2:]}"]
    link = [f"- upstream: <{entry.link}>"] if entry.link else []
    return [f"### {entry.id}", "", *texts, f"- why: {entry.cause}", f"- fix: {entry.fix}", *link, ""]


def cli_page() -> str:
    """The page of the commands, as it is written to `cli.md`."""
    from safe_trainers.cli.main import COMMANDS, build_parser

    lines = [
        "# Commands",
        "",
        "Made from the parsers by `make docs`. `safe-trainers COMMAND --help` says the same.",
        "",
    ]
    for name, command in COMMANDS.items():
        (commands,) = (a for a in build_parser(name)._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[name]
        lines += [f"## {name}", "", f"{command.summary[:1].upper()}{command.summary[1:]}.", ""]
        actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            lines += ["| argument | meaning |", "|---|---|"]
            lines += [f"| {_argument(action)} | {action.help.replace('|', chr(92) + '|')} |" for action in actions]
            lines += [""]
        if command.takes_recipe_keys:
            lines += ["Every key of a recipe is an option too, and wins over the file.", ""]
        if parser.epilog and not command.takes_recipe_keys:
            lines += ["```text", *parser.epilog.strip().splitlines(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _argument(action: argparse.Action) -> str:
    """An argument as it is written on the command line."""
    metavar = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices is not None and action.metavar is None:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    words = [f"{', '.join(action.option_strings)} {metavar}".strip() if action.option_strings else str(metavar)]
    return f"`{words[0]}`".replace("|", "\\|")


def _entry(finding: Finding) -> list[str]:
    return [f"### {finding.id}", "", f"- why: {_readable(finding.why)}", f"- fix: {_readable(finding.fix)}", ""]


def _readable(template: str) -> str:
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return template.replace("!r}", "}").format(**{name: f"*{name}*" for name in names})


if __name__ == "__main__":
    Path(__file__).with_name("refusals.md").write_text(refusals_page(), encoding="utf-8")
    Path(__file__).with_name("metrics.md").write_text(metrics_page(), encoding="utf-8")
    Path(__file__).with_name("evidence.md").write_text(evidence_page.page(), encoding="utf-8")
    evidence_page.picture(Path(__file__).with_name("matrix.svg"))
    cost_section.picture(Path(__file__).with_name("cost.svg"))
    Path(__file__).with_name("cli.md").write_text(cli_page(), encoding="utf-8")
    Path(__file__).with_name("mismatch.md").write_text(mismatch_page(), encoding="utf-8")
    mismatch_plot(Path(__file__).with_name("mismatch.png"))
    Path(__file__).with_name("errors.md").write_text(errors_page(), encoding="utf-8")
    Path(__file__).with_name("versions.md").write_text(versions_page.page(), encoding="utf-8")
    Path(__file__).with_name("growth.md").write_text(growth_page(), encoding="utf-8")

"""Writes the pages of docs/ that are generated from the code: `make docs`."""

import argparse
import ast
import json
import string
from pathlib import Path
from typing import Any

import cost_section
import evidence_page
import versions_page
from architecture_page import PAGE as ARCHITECTURE
from architecture_page import architecture_page
from architecture_page import draw as draw_architecture
from families_page import families_page
from growth_page import growth_page
from sampler_page import sampler_page
from trainers_page import trainers_page

from safe_trainers.core.errors import REFUSALS, WARNINGS, Finding
from safe_trainers.explain.catalogue import own_entries
from safe_trainers.explain.entry import Entry
from safe_trainers.explain.known_errors import upstream_entries


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def refusals_page() -> str:
    """Returns `refusals.md`: all refusals and warnings."""
    lines = [
        "# Refusals and warnings",
        "",
        "Generated from `safe_trainers.REFUSALS` and `safe_trainers.WARNINGS` by `make docs`. *Italic* words are",
        "replaced by the values of the run.",
        "",
        "A run is refused only if stock TRL would crash, or would train something else than requested. All refusals",
        "of a run are raised in one `PrecisionError` at construction.",
        "",
        "## Refusals",
        "",
        *(line for finding in REFUSALS.values() for line in _entry(finding)),
        "## Warnings, once for each trainer",
        "",
        *(line for finding in WARNINGS.values() for line in _entry(finding)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def metrics_page() -> str:
    """Returns `metrics.md`: the docstrings of the modules that log metrics."""
    sections = {
        "Optimizer": "numerics/step_monitor",
        "Rollouts": "rollout/mismatch_meter",
        "Mismatch of sampler and trainer": "rollout/mismatch",
    }
    lines = [
        "# Metrics",
        "",
        "`precision_metrics=False` disables all of these metrics.",
        "",
    ]
    for title, module in sections.items():
        source = (ROOT / "safe_trainers" / f"{module}.py").read_text(encoding="utf-8")
        lines += [f"## {title}", "", ast.get_docstring(ast.parse(source)) or "", ""]
    return "\n".join(lines).rstrip() + "\n"


PAIRS = {
    ("bf16", "bf16"): "bf16 weights, bf16 autocast",
    ("fp16", "fp16"): "fp16 weights, fp16 autocast",
    ("bf16", "fp16"): "bf16 weights, **fp16** autocast: fp16 only in the trainer",
    ("autocast bf16", "bf16"): "bf16 autocast on both sides",
    ("autocast fp16", "fp16"): "fp16 autocast on both sides",
    ("fp32", "fp32"): "fp32 on both sides",
}
"""The label of each pair of sampler and trainer in the mismatch benchmark."""


def _mismatch() -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((ROOT / "benchmarks/results/mismatch.json").read_text(encoding="utf-8"))
    return measured


def mismatch_page() -> str:
    """Returns `mismatch.md`: the mismatch of sampler and trainer by dtype."""
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
            "# Mismatch of sampler and trainer by dtype",
            "",
            "Generated from `benchmarks/results/mismatch.json`, which `make bench-mismatch` writes.",
            f"`{measured['command']}`; {versions}; {measured['machine']}.",
            "",
            "A byte-level model with 8 layers and 6.5 million parameters, trained for a few minutes on the source of",
            f"Python's standard library (loss {measured['training']['loss']} nats per byte), samples",
            f"{measured['sequences']} sequences. Samplers with half-precision weights and no autocast correspond to",
            "an inference engine; autocast on both sides corresponds to the safe trainers without an engine. The",
            "trainer has float32 weights. All numbers are logged by `SafeGRPOTrainer`; [metrics.md](metrics.md) has",
            "their formulas.",
            "",
            "![mean mismatch, sequence log-ratio and effective sample size by length](mismatch.png)",
            "",
            "Mean abs(D), nats (`precision/logp_mismatch_mean`), by number of tokens:",
            "",
            *table("logp_mismatch_mean", ".1e"),
            "| ratio of means: bf16 on both sides | " + " | ".join(map(str, lengths)) + " |",
            head[1],
            f"| over fp16 on both sides | {times(bf16, fp16)} |",
            f"| over fp16 only in the trainer | {times(bf16, alone)} |",
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
            "## Cost of the metrics",
            "",
            f"A step of `recipes/grpo/tiny_vlm_bf16.yaml` takes {cost['milliseconds']:.0f} ms of CPU time, of which",
            f"the code of the `precision/` metrics takes {cost['share']:.2%}. This is the median of",
            f"{cost['repetitions']} runs ({cost['range'][0]:.2%} to {cost['range'][1]:.2%}), profiled every",
            f"millisecond for {cost['steps']} steps. `precision_metrics=False` disables this code.",
            "",
        ]
    )


def mismatch_plot(file: Path) -> None:
    """Draws the figure of `mismatch.md`.

    Args:
        file: The PNG file to write.
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
                continue  # four orders of magnitude smaller
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
    """Returns `errors.md`: the errors that `safe-trainers explain` recognises."""
    upstream = upstream_entries().values()
    packages = sorted({entry.package for entry in upstream})
    lines = [
        "# Known errors",
        "",
        "Generated from the catalogue of `safe-trainers explain` by `make docs`. The command reads a message, a log",
        "file or a pipe (`python train.py 2>&1 | safe-trainers explain`), removes colours, ranks and tracebacks, and",
        "prints which of these errors stopped the run, its cause and its fix. … matches any text. Each message is",
        "reproduced with the installed packages by `tests/explain/test_catalogue.py`, or links to its source.",
        "",
    ]
    for package in packages:
        lines += [f"## {package}", ""]
        lines += [line for entry in upstream if entry.package == package for line in _error(entry)]
    lines += [
        "## safe-trainers",
        "",
        "Errors of this package end with the line to write and their id in brackets:",
        "",
        *(
            f"- [{key}](refusals.md#{key})" if key in REFUSALS or key in WARNINGS else f"- {key}: {entry.cause}"
            for key, entry in sorted(own_entries().items())
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _error(entry: Entry) -> list[str]:
    fence = "``" if any("`" in text for text in entry.messages) else "`"
    pad = " " if fence == "``" else ""
    messages = [
        f"{'  ' if len(entry.messages) > 1 else ''}- {fence}{pad}{text}{pad}{fence}" for text in entry.messages
    ]
    messages = ["- messages:", *messages] if len(messages) > 1 else [f"- message: {messages[0][2:]}"]
    link = [f"- upstream: <{entry.link}>"] if entry.link else []
    return [f"### {entry.id}", "", *messages, f"- why: {entry.cause}", f"- fix: {entry.fix}", *link, ""]


def cli_page() -> str:
    """Returns `cli.md`: the commands and their arguments."""
    from safe_trainers.cli.main import COMMANDS, build_parser

    lines = [
        "# Commands",
        "",
        "Generated from the command-line parsers by `make docs`. `safe-trainers COMMAND --help` prints the same.",
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
            lines += ["Every key of a recipe is also an option, which overrides the file.", ""]
        if parser.epilog and not command.takes_recipe_keys:
            lines += ["```text", *parser.epilog.strip().splitlines(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _argument(action: argparse.Action) -> str:
    """An argument in command-line notation."""
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
    draw_architecture(DOCS / "architecture.svg")
    ARCHITECTURE.write_text(architecture_page(), encoding="utf-8")
    (DOCS / "refusals.md").write_text(refusals_page(), encoding="utf-8")
    (DOCS / "metrics.md").write_text(metrics_page(), encoding="utf-8")
    (DOCS / "evidence.md").write_text(evidence_page.page(), encoding="utf-8")
    evidence_page.draw(DOCS / "matrix.svg")
    cost_section.draw(DOCS / "cost.svg")
    (DOCS / "cli.md").write_text(cli_page(), encoding="utf-8")
    (DOCS / "mismatch.md").write_text(mismatch_page(), encoding="utf-8")
    mismatch_plot(DOCS / "mismatch.png")
    (DOCS / "errors.md").write_text(errors_page(), encoding="utf-8")
    (DOCS / "versions.md").write_text(versions_page.page(), encoding="utf-8")
    (DOCS / "growth.md").write_text(growth_page(), encoding="utf-8")
    (DOCS / "families.md").write_text(families_page(), encoding="utf-8")
    (DOCS / "sampler.md").write_text(sampler_page(), encoding="utf-8")
    (DOCS / "trainers.md").write_text(trainers_page(), encoding="utf-8")

"""Writes the pages of this folder that are made from the code: `make docs`."""

import ast
import json
import string
from pathlib import Path

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


def cost_page() -> str:
    """The page of what the safe trainers cost, as it is written to `cost.md`."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    rows = [
        f"| {cell} | {quantity.replace('_', ' ')} | {ratio['median']:.3f} | {_range(ratio['quartiles'])} |"
        for cell, quantities in measured["ratios"].items()
        for quantity, ratio in quantities.items()
    ]
    return "\n".join(
        [
            "# What it costs",
            "",
            "Made from `benchmarks/results/step.json`, which `make bench` measures, by `make docs`.",
            f"`{measured['command']}`; {versions}; {measured['machine']}.",
            "",
            "Each figure is a ratio of safe over stock in one run, the two alternating; the models have 0.1 to 0.25",
            "million parameters and a step takes some 15 ms, so that what is constant shows most. A cell is family,",
            "trainer, weights, flag, full or LoRA, beta.",
            "",
            "| cell | quantity | median | quartiles |",
            "|---|---|---|---|",
            *rows,
            "",
            "Where stock generates in float32 outside autocast (LoRA with float32 weights), a safe rollout computes",
            "in bfloat16 as training does: on a CPU with models of this size that takes longer, which is what the",
            "step of that cell shows. Larger models and GPUs have not been measured yet.",
            "",
        ]
    )


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


def _range(values: list[float]) -> str:
    return " to ".join(f"{value:.3f}" for value in values)


def _entry(finding: Finding) -> list[str]:
    return [f"### {finding.id}", "", f"- why: {_readable(finding.why)}", f"- fix: {_readable(finding.fix)}", ""]


def _readable(template: str) -> str:
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return template.replace("!r}", "}").format(**{name: f"*{name}*" for name in names})


if __name__ == "__main__":
    Path(__file__).with_name("refusals.md").write_text(refusals_page(), encoding="utf-8")
    Path(__file__).with_name("cost.md").write_text(cost_page(), encoding="utf-8")
    Path(__file__).with_name("metrics.md").write_text(metrics_page(), encoding="utf-8")

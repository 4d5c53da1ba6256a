"""Writes the pages and figures of docs/ that are generated from code and results: `make docs`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import architecture_page
import cost_section
import curves_page
import diagrams
import evidence_page
import fp16_rl_page
import fragments
import metrics_page
import mismatch_page
import tune_page
import versions_page
from api_page import api_page
from bench_page import bench_page, rules_page
from bench_page import results_page as bench_results_page
from cli_page import cli_page
from config_page import config_page
from experts_page import experts_page
from families_page import families_page
from gpu_page import gpu_page
from growth_page import growth_page
from recipes_page import recipes_page
from refusals_page import ERRORS, errors_page, known_errors_page, refusals_page
from sampler_page import sampler_page
from trainers_page import trainers_page
from upstream_page import upstream_page


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "api": api_page,
    "architecture": architecture_page.architecture_page,
    "bench": bench_page,
    "bench_results": bench_results_page,
    "bench_rules": rules_page,
    "cli": cli_page,
    "config": config_page,
    "cost": cost_section.page,
    "cost_tables": cost_section.tables_page,
    "curves": curves_page.page,
    "errors": errors_page,
    **{page: partial(known_errors_page, page) for page in ERRORS},
    "evidence": evidence_page.page,
    "experts": experts_page,
    "families": families_page,
    "fp16_rl": fp16_rl_page.page,
    "gpu": gpu_page,
    "growth": growth_page,
    "matrix": evidence_page.matrix_page,
    "metric_runs": metrics_page.metric_runs_page,
    "metrics": metrics_page.metrics_page,
    "mismatch": mismatch_page.mismatch_page,
    "recipes": recipes_page,
    "refusals": refusals_page,
    "sampler": sampler_page,
    "trainers": trainers_page,
    "tune_results": tune_page.results_page,
    "upstream": upstream_page,
    "versions": versions_page.page,
}
"""The generated pages of docs/, by name."""

FIGURES: dict[str, Callable[[Path], None]] = {
    "architecture.svg": architecture_page.draw,
    "casts.svg": lambda file: _write(file, diagrams.casts()),
    "cost.svg": cost_section.draw,
    "curves.svg": curves_page.draw,
    "fp16_rl.svg": fp16_rl_page.draw,
    "matrix.svg": evidence_page.draw,
    "metrics.svg": metrics_page.draw,
    "mismatch.svg": mismatch_page.draw,
    "tune.svg": tune_page.draw,
    "timeline.svg": lambda file: _write(file, diagrams.timeline()),
}
"""The figures of docs/, by file."""


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def main() -> None:
    """Writes everything."""
    for name, make in PAGES.items():
        _write(DOCS / f"{name}.md", make())
    for page in fragments.PARTS:
        _write(ROOT / page, fragments.filled(page))
    for name, draw in FIGURES.items():
        draw(DOCS / name)


if __name__ == "__main__":
    main()

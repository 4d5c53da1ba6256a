"""Writes the pages of `safe-trainers bench`: what it does, its results for TRL's trainers, and its rules."""

import json
from pathlib import Path
from typing import Any

from safe_trainers.bench.checks import CHECKS
from safe_trainers.bench.outcome import WRONG
from safe_trainers.bench.rules import rules


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "bench.json"
SAMPLE = "trl:GRPOTrainer"
Run = dict[str, Any]


def _runs() -> tuple[Run, list[Run], list[Run]]:
    """The measured file, its runs with the newest release of TRL, and those with older ones."""
    measured: Run = json.loads(RESULT.read_text(encoding="utf-8"))
    runs = sorted(measured["runs"], key=_release)
    newest = _release(runs[-1])
    return measured, [r for r in runs if _release(r) == newest], [r for r in runs if _release(r) != newest]


def _release(run: Run) -> tuple[int, ...]:
    return tuple(map(int, run["versions"]["trl"].split(".")))


def bench_page() -> str:
    """Returns `bench.md`."""
    measured, own, _ = _runs()
    sample = next(run for run in own if run["trainer"] == SAMPLE)
    lines = [
        "# Check a trainer",
        "",
        "`safe-trainers bench` checks a trainer class for faults of precision: one of TRL, one of this package, or",
        "your own. It trains tiny models on the CPU, needs no network, and ends within 10 minutes.",
        "",
        "```console",
        "safe-trainers bench --trainer safe_trainers:SafeSFTTrainer --only truncation,skipped-steps",
        "```",
        "",
        "`--json FILE` writes every run. Stock GRPO, with all checks:",
        "",
        "```text",
        f"$ safe-trainers bench --trainer {SAMPLE}",
        *_printed(sample),
        "```",
        "",
        "The exit status is 0 if nothing is wrong, 1 if a check found a fault or could not run, and 2 for invalid",
        "input. The class must be importable; modules of the current folder are. `--args beta=0.1` sets fields of",
        "its config. The data are those of the TRL trainer that the class extends, or `--task` names them. Images are",
        "used only for classes that extend a stable trainer of TRL which takes them. In Python, such as in a test:",
        "",
        "```python",
        "from safe_trainers.bench.run import bench_trainer",
        "from trl import SFTTrainer",
        "",
        "",
        "class MyTrainer(SFTTrainer): ...",
        "",
        "",
        'found = bench_trainer(MyTrainer, only=["skipped-steps"])',
        'print(found["skipped-steps"].status, found.exit_status)',
        "```",
        "",
        "```text",
        "fault 1",
        "```",
        "",
        "## Results of a run",
        "",
        "Each check has several runs. A run is judged only if the same model trains without a fault in float32; else",
        "it *could not run*, and the trainer is broken in another way than by its precision.",
        "",
        "| result | meaning |",
        "|---|---|",
        "| passed | measured, and within the limits of the [rules](bench_rules.md) |",
        "| refused | the constructor failed with a message for the user, which is right |",
        "| fault | it trained, and a rule is broken |",
        "| crashed | it failed later, or without a message, and the float32 run trains |",
        "| could not run | the float32 run fails, or the time ended |",
        "| not applicable | the trainer has nothing to measure; not counted as passed |",
        "",
        "*Stand-in*: a CPU has neither autocast nor a loss scaler for `fp16=True`. Such runs use replacements that",
        "raise the errors of CUDA's. Each check runs in a process of its own, so that a crash ends only the check.",
        "",
        "## Results",
        "",
        f"Checks with a wrong run, of the checks that apply, with TRL {own[0]['versions']['trl']}"
        " ([each check, and older releases](bench_results.md)):",
        "",
        *_summary(own),
        "",
        *_wrong_safe(own),
        "",
        "- resume: TRL rounds the adapters of a 4-bit model to bfloat16, and PEFT loads them from a checkpoint in",
        "  float32. GRPO and RLOO also sample again if a run resumes between two rollouts.",
        "- skipped-steps: accelerate does not notice that a fused optimizer skipped a step.",
        "- nan: the log of stock SFT has the loss 0.0, because transformers leaves NaN losses out of its mean.",
        "",
        "## Limits",
        "",
        "- One process on a CPU: nothing about GPUs, vLLM or several processes.",
        "- Tiny models with random weights: a fault that needs a large model is not found.",
        "- A NaN that ends a run with any error counts as passed, although the message may not name its cause.",
        "",
        *_provenance(measured, own),
        "",
    ]
    return "\n".join(lines)


def results_page() -> str:
    """Returns `bench_results.md`."""
    measured, own, older = _runs()
    lines = [
        "# Results of the bench",
        "",
        "Wrong runs of all runs of each check of [`safe-trainers bench`](bench.md); – is not applicable. The seconds "
        "are of one core that other programs used too.",
        "",
        f"## TRL {own[0]['versions']['trl']}, stock and safe",
        "",
        *_table(own),
        "",
    ]
    if older:
        lines += ["## Older releases", "", *_table(older, release=True), ""]
    return "\n".join([*lines, *_provenance(measured, own), ""])


def _provenance(measured: Run, runs: list[Run]) -> list[str]:
    return [
        "*Made from `benchmarks/results/bench.json` by `make docs`;",
        f"`{measured['command']}`; {_versions(runs[0])}; {measured['machine']}.*",
    ]


def _summary(runs: list[Run]) -> list[str]:
    """A row for each algorithm with the number of wrong checks of its stock and its safe trainer."""
    found: dict[str, dict[bool, str]] = {}
    for run in runs:
        applied = [check for check in run["checks"] if check["status"] != "not applicable"]
        wrong = [check for check in applied if check["status"] in WRONG]
        safe = run["trainer"].startswith("safe_trainers:")
        found.setdefault(_short(run).removeprefix("Safe"), {})[safe] = f"{len(wrong)} of {len(applied)}"
    rows = [f"| {name} | {sides.get(False, '–')} | {sides.get(True, '–')} |" for name, sides in found.items()]
    return ["| trainer | stock | safe |", "|---|---:|---:|", *rows]


def _printed(run: Run) -> list[str]:
    """The table of a run as the command prints it, with the details cut."""
    rows = []
    for check in run["checks"]:
        ran = [row for row in check["rows"] if row["status"] != "not applicable"]
        wrong = [row for row in ran if row["status"] in WRONG]
        mark = " (stand-in)" if check["stand_in"] and ran else ""
        detail = check["detail"] if len(check["detail"]) < 62 else check["detail"][:58].rsplit(" ", 1)[0] + " ..."
        rows.append((check["check"], check["status"] + mark, f"{len(wrong)} of {len(ran)}" if ran else "–", detail))
    rows.insert(0, ("check", "result", "wrong runs", "first of them"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]


def _table(runs: list[Run], release: bool = False) -> list[str]:
    """A row for each check and a column for each trainer, stock and safe in tables of their own."""
    lines: list[str] = []
    for safe in (False, True):
        chosen = [run for run in runs if run["trainer"].startswith("safe_trainers:") is safe]
        if not chosen:
            continue
        names = [_short(run) + (f", TRL {run['versions']['trl']}" if release else "") for run in chosen]
        found = [{check["check"]: check for check in run["checks"]} for run in chosen]
        rows = [[name, *(_cell(checks[name]) for checks in found)] for name in CHECKS]
        rows.append(["seconds", *(format(run["seconds"], ".0f") for run in chosen)])
        table = [["check", *names], ["---"] * (len(names) + 1), *rows]
        lines += [*([""] if lines else []), *(f"| {' | '.join(cells)} |" for cells in table)]
    return lines


def _cell(check: Run) -> str:
    ran = [row for row in check["rows"] if row["status"] != "not applicable"]
    wrong = [row for row in ran if row["status"] in WRONG]
    return f"{len(wrong)}/{len(ran)}" if ran else "–"


def _short(run: Run) -> str:
    return str(run["trainer"].partition(":")[2].removesuffix("Trainer"))


def _wrong_safe(runs: list[Run]) -> list[str]:
    """A sentence about the wrong runs of the safe trainers."""
    safe = [run for run in runs if run["trainer"].startswith("safe_trainers:")]
    wrong = [
        f"- {_short(run)}, {check['check']}, {row['run']}: {row['detail']}"
        for run in safe
        for check in run["checks"]
        for row in check["rows"]
        if row["status"] in WRONG
    ]
    if wrong:
        return ["Wrong in safe trainers:", "", *wrong]
    counted = sum(row["status"] == "refused" for run in safe for check in run["checks"] for row in check["rows"])
    return [f"The safe trainers have 0 wrong runs, and refuse {counted}. What is wrong in stock trainers:"]


def rules_page() -> str:
    """Returns `bench_rules.md`."""
    lines = [
        "---",
        "nosearch: true",
        "---",
        "",
        "# Rules of the bench",
        "",
        "What `safe-trainers bench` [counts as wrong](bench.md). The [matrix](matrix.md) has the same judges.",
        "",
    ]
    for name, check in CHECKS.items():
        lines += [f"**{name}**: {check.summary}.", ""]
        for rule in rules().values():
            if rule.check == name:
                lines += [
                    f"- `{rule.id}`: {rule.measured}.",
                    f"  - Limit: {rule.limit}.",
                    f"  - Why: {rule.why}.",
                    f"  - See {_links(rule.reference)}.",
                ]
        lines.append("")
    return "\n".join([*lines, "*Made from `safe_trainers/bench/rules.toml` by `make docs`.*", ""])


def _links(references: str) -> str:
    return ", ".join(f"<{link.strip()}>" for link in references.split(","))


def _versions(run: Run) -> str:
    return ", ".join(f"{package} {number}" for package, number in run["versions"].items())

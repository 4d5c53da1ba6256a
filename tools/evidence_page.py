"""Writes the pages of evidence and the figure of the matrix, from `benchmarks/results/`."""

import importlib.util
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cost_section
import curves_page
import expected
import figures
import fragments
import not_finite_section
from results import read_rows, versions_of


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "matrix.jsonl"
COLOURS = {"trained": "#0072b2", "refused": "#f0e442", "wrong": "#e69f00", "crashed": "#d55e00"}
"""Blue, yellow, orange and vermilion of the colour-blind palette by Okabe and Ito."""
FLAGS = {"none": "no flag", "bf16": "bf16=True", "fp16": "fp16=True"}
MODES = [(flag, weights) for flag in FLAGS for weights in ("fp32", "bf16", "fp16")]
SIDES = {"stock": "stock TRL", "safe": "safe-trainers"}


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads the heading and the rows of the results."""
    return read_rows(RESULT)


def _specs() -> dict[str, Any]:
    """Loads the specifications of the families, from a module that does not import torch or transformers."""
    spec = importlib.util.spec_from_file_location("family_specs", ROOT / "benchmarks/families/specs.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("benchmarks/families/specs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["family_specs"] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["family_specs"]
    return {family: module.family_spec(family) for family in module.FAMILIES}


def _kind(message: str) -> str:
    """The part of an error message that does not depend on the cell."""
    if message.startswith("RuntimeError: Input type"):  # the message contains both types
        return "RuntimeError: Input type (torch.FloatTensor) and weight type (...) should be the same"
    return message.split(". ", maxsplit=1)[0][:140]


def _fault(fault: str) -> str:
    """A fault without numbers and module names."""
    if fault.startswith("adapters rounded"):
        return "adapters rounded to bfloat16, in which most updates of the run's learning rate (1e-5) are lost"
    if " computes in " in fault:
        return "a part computes in another dtype in the rollout than in scoring and training"
    if fault.startswith("log-probabilities"):
        return "log-probabilities with a larger error than the dtype explains"
    if "not finite" in fault:
        return "loss or gradient not finite"
    return fault


def crash_kinds() -> dict[str, list[str]]:
    """Returns the families in which stock TRL crashes, by error message."""
    crashes: dict[str, list[str]] = {}
    for row in read()[1]:
        if row["stock"]["outcome"] in ("crashed", "refused"):
            crashes.setdefault(_kind(row["stock"]["message"]), []).append(row["family"])
    return dict(sorted(crashes.items(), key=lambda item: (-len(item[1]), item[0])))


def _faults(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    faults: dict[str, list[str]] = {}
    for row in rows:
        for fault in dict.fromkeys(map(_fault, row["stock"].get("faults", []))):
            faults.setdefault(fault, []).append(row["family"])
    return dict(sorted(faults.items(), key=lambda item: (-len(item[1]), item[0])))


def page() -> str:
    """Returns `evidence.md`: the results in short."""
    heading, rows = read()
    stock, safe = (Counter(row[side]["outcome"] for row in rows) for side in ("stock", "safe"))
    families = read_rows(ROOT / "benchmarks" / "results" / "every_family.jsonl")[1]
    trained = [cell for row in families if "reason" not in row for cell in row["cells"].values()]
    of_families = {side: Counter(cell[side]["outcome"] for cell in trained) for side in ("stock", "safe")}
    nan = read_rows(not_finite_section.RESULT)[1]
    silent = {side: sum(row[side] == "silent" for row in nan) for side in ("stock", "safe")}
    lines = [
        "# Evidence: stock TRL and safe-trainers",
        "",
        fragments.measured(),
        "",
        f"Of {len(rows)} combinations, stock TRL trains {stock['trained']} correctly, crashes in "
        f"{stock['crashed']}, and",
        f"trains something else in {stock['wrong']} without a message. safe-trainers trains {safe['trained']} and "
        "refuses",
        f"{safe['refused']}, all of which stock TRL cannot train either; each trains after the fix that the error "
        "prints.",
        "",
        *figures.embed(
            "matrix.svg",
            f"Stock TRL (left) trains {stock['trained']} of {len(rows)} combinations correctly; safe-trainers (right) "
            f"{safe['trained']}. Rows are model families, those with most crashes first. Columns are the dtype of the "
            "weights, in groups by the precision flag; a field with several bars has several combinations.",
            described="A grid of outcomes by family, weights and flag, for stock TRL and for safe-trainers.",
        ),
        "",
        "## What was run",
        "",
        f"{len({row['family'] for row in rows})} model families, with a tiny model of each. The combinations "
        "contain every pair",
        "of values of: trainer (GRPO, RLOO, SFT, Reward), dtype of the weights, precision flag, full fine-tuning, "
        "LoRA or",
        "4-bit LoRA, and a reference model or none. Each trains for two steps, with the stock and the safe trainer "
        "and",
        "TRL's plain config. A CPU has no loss scaler for fp16, so under `fp16=True` both trainers use autocast with",
        "a stand-in that raises the errors of CUDA's.",
        "",
        *_composition(rows),
        "",
        "- **Trains correctly**: both steps, without a fault.",
        "- **Refused**: construction failed, and the error printed the line to write.",
        "- **Trains something else**: a fault was measured on the live model, in the same way for both trainers.",
        "- **Crashes**: another error.",
        "",
        "## What goes wrong in stock TRL",
        "",
        "| error | combinations |",
        "|---|---|",
    ]
    for message, names in list(crash_kinds().items())[:4]:
        lines.append(f"| `{message.replace('|', chr(92) + '|')}` | {len(names)} |")
    lines += ["", "A combination can have several silent faults:", "", "| silent fault | combinations |", "|---|---|"]
    lines += [f"| {fault} | {len(names)} |" for fault, names in _faults(rows).items()]
    lines += [
        "",
        "[Every result](matrix.md); [faults upstream](upstream.md), with scripts.",
        "",
        "## Other comparisons",
        "",
        "| question | stock TRL | safe-trainers | details |",
        "|---|---|---|---|",
        f"| Does every multimodal family of transformers train? SFT, {len(trained)} combinations of those of "
        f"{len(families)} families that stock trains in float32 | "
        f"{of_families['stock']['trained']} train | {of_families['safe']['trained']} train | "
        "[families](families.md) |",
        f"| NaN or infinity is put into {len(nan)} runs: how many end without an error or a warning? | "
        f"{silent['stock']} | "
        f"{silent['safe']} | "
        "[matrix](matrix.md#nan-and-infinity) |",
        "| Does every trainer of TRL work? | those that it can train here | the same ones | [trainers](trainers.md) |",
        "| Does a model with images learn in bf16, fp16 and fp32? GRPO, Aria-like, 3 seeds | crashes in bf16 | "
        "held-out score 0.25 to 0.35 before, at least 0.99 after | "
        "[embedded task](tiny_task.md) |",
        _curves(),
        f"| How close are sampler and trainer? One model, five lengths | – | {_ratio()} | "
        f"[mismatch](mismatch.md), [vLLM](sampler.md) |",
        f"| What does a step cost, in CPU time? | 1 | {_cost('cells')} with toy models, {_cost('rollouts')} with "
        f"larger ones | "
        "[cost](cost.md) |",
        "",
        "## The time of a step",
        "",
        "GRPO with eight completions of each prompt, measured with `profile=True`:",
        "",
        *cost_section.phases_table(fragments.results("cost")["sections"]["phases"]),
        "",
        "## What was not measured",
        "",
        "GPUs, of which [a part](gpu.md) was measured, several processes in the matrix, and models of more than about "
        "ten million parameters: [limits](limits.md).",
        "Combinations that TRL cannot train in any precision are not included.",
        "",
        "*Made from `benchmarks/results/` by `make docs`; `make bench-all` measures again all but families, curves "
        "and vLLM; "
        "`benchmarks/provenance.py` prints which are of the present package. "
        f"`{heading['command']}`; {versions_of(heading)}; {heading['machine']}.*",
    ]
    return "\n".join(lines) + "\n"


def _composition(rows: list[dict[str, Any]]) -> list[str]:
    """The kinds of combinations behind the crashes and the silent faults, as a table."""
    kinds = {
        "weights in one half-precision format, and the flag of the other": lambda weights, flag: (
            {weights, flag} == {"bf16", "fp16"}
        ),
        "other combinations with `fp16=True`": lambda weights, flag: flag == "fp16",
        "all others": lambda weights, flag: True,
    }
    counts: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    for row in rows:
        name = next(name for name, holds in kinds.items() if holds(row["weights"], row["flag"]))
        counts[name][row["stock"]["outcome"]] += 1
    lines = ["Many crashes are of settings that contradict each other:", ""]
    lines += ["| stock TRL | trains correctly | trains something else | crashes |", "|---|---|---|---|"]
    lines += [f"| {name} | {c['trained']} | {c['wrong']} | {c['crashed']} |" for name, c in counts.items()]
    return lines


def _curves() -> str:
    """The row of the learning curves."""
    compared, stock, safe = curves_page.summary()
    return (
        f"| Does a fault change the score at the end of a run? {compared} learning curves | "
        f"worse, or stopped by an error, in {stock} | in {safe} | [curves](curves.md) |"
    )


def _cost(section: str) -> str:
    """The range of the ratios of step times in a section of the cost."""
    cells = cost_section.with_defaults(fragments.results("cost")["sections"][section])
    steps = [statistics.median(found["step"]["ratios"]) for found in cells.values()]
    return f"{min(steps):.2f} to {max(steps):.2f}"


def _ratio() -> str:
    rows = fragments.results("mismatch")["rows"]
    mean = {(row["sampler"], row["trainer"], row["length"]): row["logp_mismatch_mean"] for row in rows}
    both = [mean["bf16", "bf16", n] / mean["fp16", "fp16", n] for n in sorted({row["length"] for row in rows})]
    return f"fp16 on both sides is {min(both):.1f} to {max(both):.1f} times nearer than bf16"


def matrix_page() -> str:
    """Returns `matrix.md`: the results in full."""
    heading, rows = read()
    lines = [
        "# The comparison in full",
        "",
        "Errors and faults of stock TRL, and refusals of the safe trainers, by combination of model, trainer and "
        "precision.",
        "[Evidence](evidence.md) has the summary and the method. `nocast` is a family of this project whose vision "
        "tower does",
        "not cast its inputs, like many models with remote code.",
        "",
        "## Where stock crashes",
        "",
        "| error | combinations | families |",
        "|---|---|---|",
    ]
    for message, families in crash_kinds().items():
        lines.append(f"| `{message.replace('|', chr(92) + '|')}` | {len(families)} | {_some(families)} |")
    lines += ["", "## Where stock trains something else", "", "| fault | combinations | families |", "|---|---|---|"]
    lines += [f"| {fault} | {len(families)} | {_some(families)} |" for fault, families in _faults(rows).items()]
    lines += ["", "## Refusals of the safe trainers", ""]
    for found in sorted({found for row in rows for found in row["safe"].get("ids", [])}):
        cells = [row for row in rows if found in row["safe"].get("ids", [])]
        trained = [row["id"] for row in cells if row["stock"]["outcome"] == "trained"]
        also = (
            f"stock trains {len(trained)} of them ({', '.join(trained)})" if trained else "stock trains none of them"
        )
        lines.append(f"- [`{found}`](refusals.md#{found}): {len(cells)} combinations; {also}.")
    unable = [(name, spec) for name, spec in _specs().items() if spec.not_in_stock]
    lines += [
        "",
        *_every_cell(),
        *expected.section(rows),
        "",
        *not_finite_section.section(),
        "## Not included",
        "",
        "Combinations that TRL cannot train in any precision:",
        "",
        *(f"- {name}, {task}: {why}" for name, spec in unable for task, why in spec.not_in_stock.items()),
        "",
        "Nothing on this page was measured on CUDA or other devices, with vLLM (a stand-in receives the weights), "
        "or with",
        "models of more than about ten million parameters. The matrix does not contain several processes",
        "([engines](engines.md)) and other versions ([versions](versions.md)). Processors that need torchvision are "
        "replaced as listed in",
        "`benchmarks/families/specs.py`.",
        "",
        "*Made from `matrix*` and `not_finite.jsonl` in `benchmarks/results/` by `make docs`. "
        f"`{heading['command']}`;",
        f"{versions_of(heading)}; {heading['machine']}.*",
    ]
    return "\n".join(lines) + "\n"


def _every_cell() -> list[str]:
    """The section with the counts of all combinations, by family, if they were measured."""
    if not (fragments.ROOT / "benchmarks" / "results" / "matrix_all.json").is_file():
        return []
    found = fragments.results("matrix_all")
    sides = [(side, outcome) for side in SIDES for outcome in COLOURS]
    total: dict[tuple[str, str], int] = Counter()
    table = []
    for family, counts in found["families"].items():
        cells = {(side, outcome): counts[side].get(outcome, 0) for side, outcome in sides}
        total.update(cells)
        table.append(f"| {family} | {counts['cells']} | " + " | ".join(str(cells[key]) for key in sides) + " |")
    combinations = sum(counts["cells"] for counts in found["families"].values())
    refusals = ", ".join(f"[`{name}`](refusals.md#{name}) {count}" for name, count in found["refusals"].items())
    return [
        "## Every combination",
        "",
        f"The tables above are of a selection that has every pair of values. All {combinations:,} combinations were "
        "run once as well:",
        "",
        "| family | combinations | " + " | ".join(f"{side}: {outcome}" for side, outcome in sides) + " |",
        "|---|" + "---:|" * (len(sides) + 1),
        *table,
        f"| all | {combinations:,} | " + " | ".join(f"{total[key]:,}" for key in sides) + " |",
        "",
        f"*Wrong* is a run that trains something else, silently. Refusals of the safe trainers by reason: {refusals}.",
        *(f"- not right: {problem}" for problem in found["problems"]),
        "",
    ]


def _some(names: list[str]) -> str:
    """The distinct names, shortened to the first six."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:6]) + (f" and {len(distinct) - 6} more" if len(distinct) > 6 else "")


def draw(file: Path) -> None:
    """Draws the outcomes of stock and safe trainers by family, weights and flag.

    Args:
        file: The SVG to write.
    """
    from matplotlib.patches import Patch, Rectangle

    _, rows = read()
    crashed = Counter(row["family"] for row in rows if row["stock"]["outcome"] in ("crashed", "wrong"))
    families = sorted({row["family"] for row in rows}, key=lambda family: (-crashed[family], family))

    def panels(figure: Any) -> None:
        for axes, side in zip(figure.subplots(1, 2, sharey=True), SIDES, strict=True):
            for down, family in enumerate(families):
                for across, (flag, weights) in enumerate(MODES):
                    cells = [r for r in rows if (r["family"], r["weights"], r["flag"]) == (family, weights, flag)]
                    width = 0.94 / max(len(cells), 1)
                    for index, row in enumerate(cells):
                        colour = COLOURS[row[side]["outcome"]]
                        at = (across + 0.03 + index * width, down + 0.04)
                        axes.add_patch(Rectangle(at, width, 0.92, color=colour, linewidth=0))
            axes.set(xlim=(0, len(MODES)), ylim=(len(families), 0))
            axes.set_title(SIDES[side], loc="left", fontsize=12)
            axes.set_xticks([x + 0.5 for x in range(len(MODES))], [weights for _, weights in MODES])
            axes.set_yticks([y + 0.5 for y in range(len(families))], families)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            for group, words in enumerate(FLAGS.values()):
                middle = 3 * group + 1.5
                axes.annotate(
                    "",
                    (3 * group + 0.1, -0.062),
                    (3 * group + 2.9, -0.062),
                    annotation_clip=False,
                    xycoords=axes.get_xaxis_transform(),
                    arrowprops={"arrowstyle": "-", "color": figures.TEXT},
                )
                axes.text(middle, -0.072, words, transform=axes.get_xaxis_transform(), ha="center", va="top")
            axes.set_xlabel("dtype of the weights, by precision flag", labelpad=24)
        patches = [Patch(color=colour) for colour in COLOURS.values()]
        figure.legend(patches, list(fragments.OUTCOMES.values()), loc="outside upper center", ncols=4)

    figures.plot(file, panels, (10, 0.27 * len(families) + 1.9))

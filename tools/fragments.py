"""The generated parts of pages that are written by hand, and the measured table that README and index share."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diff_section
import tune_page
from results import read_rows

from safe_trainers.core.device import Device
from safe_trainers.core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from safe_trainers.core.versions import __version__


ROOT = Path(__file__).parent.parent
OUTCOMES = {
    "trained": "trains correctly",
    "refused": "refused, with the fix",
    "wrong": "trains something else, silently",
    "crashed": "crashes",
}
PICKED = {BFLOAT16: "bf16 autocast", FLOAT16: "fp16 autocast with loss scaling", FLOAT32: "fp32"}
HARDWARE = {
    "NVIDIA Ampere and newer: A100, H100, RTX 30 and 40": Device("cuda", "A100", (8, 0)),
    "AMD Instinct": Device("cuda", "MI300X", (9, 4), rocm=True),
    "NVIDIA Turing and Volta: T4, V100, RTX 20": Device("cuda", "Tesla T4", (7, 5)),
    "CPU": Device("cpu"),
    "Apple (MPS)": Device("mps"),
}
WHY = {
    "cuda": {
        BFLOAT16: "native arithmetic, no loss scaling needed",
        FLOAT16: "no bfloat16 arithmetic; PyTorch emulates it, many times slower",
    },
    "cpu": {FLOAT32: "half precision saves little time, and fp16 has no loss scaler"},
    "mps": {FLOAT32: "half precision depends on the version of macOS"},
}


PLAIN = {BFLOAT16: "nothing", FLOAT16: "`fp16=True`", FLOAT32: "`bf16=False`"}
"""What a plain TRL config needs, since TRL enables bf16 by default."""


def hardware(reasons: bool = True) -> str:
    """The table of devices, with the precision that `Device.preferred` picks.

    Args:
        reasons: Whether the table has a column with the reasons.
    """
    head = ["your hardware", "picked with a Safe config", "a plain TRL config needs", *(["why"] if reasons else [])]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, device in HARDWARE.items():
        dtype, _ = device.preferred
        cells = [name, PICKED[dtype], PLAIN[dtype], *([WHY[device.kind][dtype]] if reasons else [])]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def hardware_in_short() -> str:
    """The table of devices without the reasons."""
    return hardware(reasons=False)


def measured() -> str:
    """The table of outcomes, stock and safe, from the results of the matrix."""
    heading, rows = read_rows(ROOT / "benchmarks" / "results" / "matrix.jsonl")
    versions: dict[str, str] = heading["versions"]
    first = f"{len(rows)} combinations of model, trainer and precision"
    lines = [f"| {first} | {' | '.join(OUTCOMES.values())} |", "|---|---|---|---|---|"]
    names = {"stock": f"TRL {versions['trl']}", "safe": f"safe-trainers {__version__}"}
    for side, name in names.items():
        counts = Counter(row[side]["outcome"] for row in rows)
        lines.append(f"| {name} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |")
    crashes = [{row["weights"], row["flag"]} for row in rows if row["stock"]["outcome"] == "crashed"]
    mixed = crashes.count({"bf16", "fp16"})
    lines += [
        "",
        f"Two steps of tiny models. {mixed} of the {len(crashes)} crashes mix fp16 and bf16; some train on GPUs.",
    ]
    return "\n".join(lines)


def limits(name: str, key: str) -> str:
    """A field of a metric."""
    from safe_trainers.explain.metrics import metrics

    value: Any = getattr(metrics()[name], key)
    return str(value)


def watch() -> str:
    """The rows of two metrics, for the page about rollouts."""
    lines = ["| metric | normal | look when |", "|---|---|---|"]
    for name in ("logp_mismatch_ulp", "seq_ess", "logp_batch_noise"):
        anchor = name.replace("_", "-")
        lines.append(
            f"| [`precision/{name}`](metrics.md#{anchor}) | {limits(name, 'normal')} | {limits(name, 'look') or '–'} |"
        )
    return "\n".join(lines)


def wrong() -> str:
    """An error, a metric, and where to look up others, for the README."""
    from safe_trainers.explain.metrics import metrics

    mean = metrics()["logp_mismatch_mean"]
    return "\n".join(
        [
            "- `Attempting to unscale FP16 gradients.`: trained weights are float16. A safe trainer trains them in "
            "float32.",
            f"- `{mean.key}` {mean.look}: sampler and trainer give the same tokens different probabilities. Stop, and "
            "apply the `fix` of the run's warning `mismatch-is-not-rounding`; without one, write "
            "`precision='fp16'`. "
            "[What to write](docs/metrics.md#precisionlogp_mismatch_mean).",
            "- Anything else: `python train.py 2>&1 | tee log`, `safe-trainers explain log`, or "
            "[by symptom](docs/troubleshooting.md).",
        ]
    )


PARTS = {
    "README.md": {"hardware": hardware_in_short, "measured": measured, "wrong": wrong},
    "docs/index.md": {"hardware": hardware, "measured": measured},
    "docs/hardware.md": {"hardware": hardware},
    "docs/rollouts.md": {"watch": watch},
    "docs/diff.md": {"diff": diff_section.section},
    "docs/tune.md": {"example": tune_page.example, "measured": tune_page.measured},
}


def filled(page: str) -> str:
    """Returns a page with its generated parts up to date.

    Args:
        page: Its path in the repository.

    Raises:
        ValueError: If the page lacks the lines between which a part is written.
    """
    return fill(page, PARTS[page])


def fill(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Returns a page with some parts written again.

    Args:
        page: Its path in the repository.
        parts: The functions that make the parts, by name.

    Raises:
        ValueError: If the page lacks the lines between which a part is written.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"{page} needs the lines {begin} and {end}")
        text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


def results(name: str) -> dict[str, Any]:
    """Reads a file of `benchmarks/results/`.

    Args:
        name: Its name without `.json`.
    """
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found

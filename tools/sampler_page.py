"""Writes the page about the mismatch with the real vLLM, from the results of two benchmarks."""

import json
import statistics
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TEXT = "text"
NEAR = 1.5
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Row = dict[str, Any]


def read(name: str) -> dict[str, Any]:
    """Reads committed results.

    Args:
        name: Name of the file without its extension.
    """
    measured: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return measured


def sampler_page() -> str:
    """Returns `sampler.md`."""
    measured, sync = read("sampler"), read("adapter_sync")
    rows = [row for row in measured["rows"] if "in float32" not in row["kind"]]
    lines = [
        "# Mismatch with vLLM",
        "",
        "vLLM computes the log-probabilities of the tokens that it samples with its own kernels and its own copy of",
        "the weights. The mismatch is the mean of abs(log p_trainer - log p_vLLM) over the sampled tokens, in nats.",
        "Each row is a run of GRPO with a tiny model and the real vLLM, colocated on a CPU: four steps of 512 tokens.",
        "The text model and the image models have the same size, and output heads that are scaled alike.",
        "",
        "## By kind of training",
        "",
        *_summary(rows),
        "",
        "Stock TRL passes no dtype to a colocated engine, which therefore computes in the dtype of the checkpoint's",
        "config, or in bfloat16; on this CPU build it does not start with 4-bit models. Each row is one seed. "
        "*Closer* is the mismatch of a bfloat16 run",
        "divided by that of a float16 run. Numbers in float16 have three more bits, so that 8 is expected.",
        "",
        *_outliers(rows),
        "",
        "## By family",
        "",
        *_families(rows),
        "",
        "## Modules in float32 that vLLM computes in half precision",
        "",
        "vLLM has no counterpart of `fp32_modules`, except for the output head. These runs hold modules of the text",
        "model in float32 in the trainer only.",
        "",
        *_modules(measured["rows"]),
        "",
        "## Adapters as factors",
        "",
        f"`adapter_sync` with LoRA of rank {sync['rank']} in all linear layers of a Llama. *Bytes* and *time* are",
        "those of one weight sync after the first.",
        "",
        *_sync(sync["rows"]),
        "",
        *_provenance(measured),
        *_provenance(sync),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _provenance(measured: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    return [
        f"*Made from the results of `{measured['command']}` by `make docs`; {versions}; {measured['machine']}.*",
        "",
    ]


def found(rows: list[Row], **wanted: Any) -> Row | None:
    """Returns the row with these values; `None` if it was not measured."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def closer(rows: list[Row], family: str, kind: str) -> float | None:
    """Returns how many times smaller the mismatch of float16 is than that of bfloat16; `None` if unknown.

    Args:
        rows: The results.
        family: The family.
        kind: The kind of training; a kind that was measured in float16 only is compared with LoRA.
    """
    half = found(rows, family=family, kind=kind, precision="fp16", safe=True)
    coarse = found(rows, family=family, kind=kind, precision="bf16", safe=True)
    coarse = coarse or found(rows, family=family, kind="LoRA", precision="bf16", safe=True)
    return coarse["mean"] / half["mean"] if half and coarse and "mean" in half and "mean" in coarse else None


def _summary(rows: list[Row]) -> list[str]:
    lines = ["| trained | precision | stock, images | safe, images | safe, text | closer, images | closer, text |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        families = list(dict.fromkeys(row["family"] for row in rows if row["kind"] == kind and row["family"] != TEXT))
        for precision in dict.fromkeys(row["precision"] for row in rows if row["kind"] == kind):
            chosen = [row for row in rows if row["kind"] == kind and row["precision"] == precision]
            images = [row for row in chosen if row["family"] != TEXT]
            found_factors = (closer(rows, family, kind) for family in families if precision == "fp16")
            factors = [factor for factor in found_factors if factor is not None]
            text = closer(rows, TEXT, kind) if precision == "fp16" else None
            cells = [
                kind, precision, _range(row for row in images if not row["safe"]),
                _range(row for row in images if row["safe"]),
                _number(found(chosen, family=TEXT, safe=True)),
                f"{min(factors):.1f} to {max(factors):.1f}" if factors else "",
                "" if text is None else f"{text:.1f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _outliers(rows: list[Row]) -> list[str]:
    """Names the image families whose mismatch is above `NEAR` times that of text, in each precision."""
    factors: dict[str, dict[str, float]] = {}
    for row in rows:
        text = found(rows, family=TEXT, kind=row["kind"], precision=row["precision"], safe=True)
        if row["safe"] and "mean" in row and text is not None and row["mean"] > NEAR * text["mean"]:
            of_family = factors.setdefault(row["family"], {})
            precision = row["precision"]
            of_family[precision] = max(of_family.get(precision, 0.0), row["mean"] / text["mean"])
    if not factors:
        return [f"No image family has more than {NEAR} times the mismatch of text in the same precision."]
    names = "; ".join(
        f"{family} ({', '.join(f'{factor:.1f} times in {precision}' for precision, factor in of_family.items())})"
        for family, of_family in factors.items()
    )
    return [
        f"Image families with more than {NEAR} times the mismatch of text: {names}.",
        "A factor that float32 has too is due to the model, whose layers amplify rounding more.",
    ]


def _range(rows: Any) -> str:
    rows = list(rows)
    means = [row["mean"] for row in rows if "mean" in row]
    failed = len(rows) - len(means)
    if not rows:
        return ""
    if not means:
        return f"no run starts ({failed})"
    text = f"{min(means):.1e} to {max(means):.1e}, median {statistics.median(means):.1e}"
    return text + (f"; {failed} of {len(rows)} do not train" if failed else "")


def _number(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['mean']:.1e}" if "mean" in row else _error(row)


def _error(row: Row) -> str:
    """Names what ended a run: our refusal, or another error's class."""
    kind = row["error"].split(":")[0]
    return "refused" if kind == "PrecisionError" else kind


def _families(rows: list[Row]) -> list[str]:
    lines = ["Mean and largest mismatch, and the dtype of the engine where it is not that of the run.", ""]
    lines += ["| family | trained | precision | stock | safe | closer |", "|---|---|---|---|---|---|"]
    for row in rows:
        if not row["safe"]:
            continue
        same = {key: row[key] for key in ("family", "kind", "precision")}
        factor = closer(rows, row["family"], row["kind"]) if row["precision"] == "fp16" else None
        cells = [*same.values(), _cell(found(rows, **same, safe=False)), _cell(row)]
        lines.append(f"| {' | '.join(cells)} | {'' if factor is None else f'{factor:.1f}'} |")
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return _error(row)
    engine = "" if row["engine"] == NAMES[row["precision"]] else f" ({row['engine']})"
    return f"{row['mean']:.1e}, {row['max']:.1e}{engine}"


def _modules(rows: list[Row]) -> list[str]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows if "in float32" in row["kind"]))
    lines = ["| precision | no modules | " + " | ".join(kind.removeprefix("full, ") for kind in kinds) + " |"]
    lines += ["|---" * (2 + len(kinds)) + "|"]
    for precision in ("bf16", "fp16"):
        columns = [found(rows, family=TEXT, kind=kind, precision=precision, safe=True) for kind in ("full", *kinds)]
        lines.append(f"| {precision} | {' | '.join(map(_number, columns))} |")
    return lines


def _sync(rows: list[Row]) -> list[str]:
    lines = [
        "| hidden size | precision | bytes, merged | native | time, merged | native | mismatch, merged | native |"
    ]
    lines += ["|---" * 8 + "|"]
    for row in rows:
        if row["adapter_sync"] != "merged":
            continue
        other = found(rows, **{**{k: row[k] for k in ("hidden", "layers", "precision")}, "adapter_sync": "native"})
        if other is None:
            continue
        cells = [str(row["hidden"]), row["precision"]]
        cells += [f"{one['bytes'] / 1e6:.1f} MB" for one in (row, other)]
        cells += [f"{one['seconds'] * 1e3:.0f} ms" for one in (row, other)]
        cells += [f"{one['mismatch']:.1e}" for one in (row, other)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines

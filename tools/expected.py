"""Compares the results of stock TRL with faults that were known before the matrix was run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any


ROLLOUTS = ("grpo", "rloo")
HALVES = ("bf16", "fp16")
NO_CAST = "Input type"
"""Part of torch's error for a convolution with float32 pixels and half-precision weights."""


def _agree(row: dict[str, Any]) -> bool:
    """Whether weights and flag are not two different half-precision formats."""
    return row["flag"] == "none" or row["weights"] in ("fp32", row["flag"])


def _ends(row: dict[str, Any], outcome: str, part: str) -> bool:
    stock = row["stock"]
    return stock["outcome"] == outcome and part in stock.get("message", "") + "; ".join(stock.get("faults", []))


Claim = tuple[str, Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], bool]]
CLAIMS: tuple[Claim, ...] = (
    (
        "Aria does not cast its pixels: GRPO and RLOO crash with half weights, under their own flag or none",
        lambda r: r["family"] == "aria" and r["task"] in ROLLOUTS and r["weights"] in HALVES and _agree(r)
        and r["kind"] != "4bit",
        lambda r: _ends(r, "crashed", NO_CAST),
    ),
    (
        "Aria with float32 weights does not crash, under `bf16=True` or no flag",
        lambda r: r["family"] == "aria" and r["weights"] == "fp32" and r["flag"] in ("bf16", "none"),
        lambda r: r["stock"]["outcome"] != "crashed",
    ),
    (
        "LLaVA, Qwen2.5-VL, Gemma3 and Idefics3 cast their pixels: full and LoRA do not crash under `bf16=True` or no "
        "flag, unless weights and flag are two different half-precision formats",
        lambda r: r["family"] in ("llava", "qwen2_5_vl", "gemma3", "idefics3") and r["kind"] != "4bit"
        and r["flag"] != "fp16" and _agree(r),
        lambda r: r["stock"]["outcome"] != "crashed",
    ),
    (
        "SmolVLM, which crashed with TRL's defaults and earlier transformers, does not crash with this release",
        lambda r: r["family"] == "smolvlm" and (r["weights"], r["flag"]) == ("fp32", "bf16"),
        lambda r: r["stock"]["outcome"] != "crashed",
    ),
    (
        "4-bit LoRA under `fp16=True`: the bfloat16 adapters cannot be unscaled",
        lambda r: r["kind"] == "4bit" and r["flag"] == "fp16" and r["weights"] != "bf16",
        lambda r: _ends(r, "crashed", "_amp_foreach_non_finite_check_and_unscale_cuda"),
    ),
    (
        "4-bit LoRA without `fp16=True`: adapters are rounded to bfloat16",
        lambda r: r["kind"] == "4bit" and r["flag"] != "fp16" and _agree(r),
        lambda r: _ends(r, "wrong", "adapters rounded"),
    ),
    (
        "full fine-tuning of float16 weights under `fp16=True`: float16 gradients cannot be unscaled",
        lambda r: r["kind"] == "full" and (r["weights"], r["flag"]) == ("fp16", "fp16"),
        lambda r: _ends(r, "crashed", "Attempting to unscale FP16 gradients"),
    ),
    (
        "float32 weights under autocast, GRPO and RLOO: the vision tower computes in float32 only in the rollout",
        lambda r: r["weights"] == "fp32" and r["flag"] != "none" and r["task"] in ROLLOUTS and r["kind"] != "4bit"
        and r["family"] not in ("text", "gpt_oss", "gemma2"),
        lambda r: _ends(r, "wrong", "float32 in rollout"),
    ),
    (
        "float16 weights under bfloat16 autocast, or the reverse: crash in most cells",
        lambda r: not _agree(r),
        lambda r: r["stock"]["outcome"] == "crashed",
    ),
)  # fmt: skip


def section(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the section.

    Args:
        rows: The results of the matrix.

    Yields:
        A table with each claim, the number of its cells in which it holds, and the results of the others.
    """
    yield "## Known faults of stock TRL"
    yield ""
    yield "These were measured before the matrix, with the same versions. The table compares them with the matrix."
    yield ""
    yield "| fault | combinations | results of the others |"
    yield "|---|---|---|"
    for words, concerns, holds in CLAIMS:
        cells = [row for row in rows if concerns(row)]
        others = [row for row in cells if not holds(row)]
        yield f"| {words} | {len(cells) - len(others)} of {len(cells)} | {_results(others)} |"


def _results(rows: Sequence[dict[str, Any]]) -> str:
    """The results of cells, counted by kind, with an example of each."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        stock = row["stock"]
        what = (stock.get("message") or "; ".join(stock.get("faults", [])) or "trained").splitlines()[0]
        what = what.split(";")[0].split(" which ")[0].replace("|", "\\|")[:90].rstrip(" ,")
        kinds.setdefault(f"{stock['outcome']}: `{what}`" if what != "trained" else what, []).append(row["id"])
    return "; ".join(f"{len(ids)} {what} ({ids[0]})" for what, ids in kinds.items())

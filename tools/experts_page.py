"""Writes the page about mixtures of experts, with the results of its benchmark."""

import statistics
import textwrap
from typing import Any

from fragments import results


Row = dict[str, Any]
NAMES = {"bf16": "bfloat16", "fp16": "float16"}
NOT_ROUNDING = 0.5
"""A mismatch in float32 of this share of that in half precision is not due to rounding."""
REASONS = {
    "hunyuan_v1_moe": "It normalises queries and keys after their rotation, so that its positions are absolute, and "
    "TRL scores left-padded prompts without `position_ids`, which `generate` passes. With them the two agree.",
}
"""Why a family generates and scores differently in float32."""
WINDOW = 4
"""Last rollouts of a run that its mean reward is of."""

INTRODUCTION = """# Mixture of experts

A router sends each token to a few of its experts, those with the largest scores. In half precision the sampler,
which computes tokens one by one, and the trainer, which computes them all at once, round the scores
differently. Near a tie the router then chooses other experts for the same token, and the log-probability of the
token jumps.

## What to write

```python
from safe_trainers import SafeGRPOConfig

args = SafeGRPOConfig("runs/experts", precision="fp16", router_replay="rollout")
```

With `router_replay="rollout"` the experts that `generate` chose, or a colocated vLLM, are chosen again in
scoring, in losses, and where gradient checkpointing computes layers again. The default, `"off"`, changes
nothing, and logs how often routers choose other experts (`precision/router_flip_frac` and
[others](metrics.md#experts-of-sampler-and-trainer)) for samples of `generate`.

- **The router learns.** The weights of the experts are computed from the live scores of the router, in the
  family's own way, and so is its gradient. Only which experts are used is replayed.
- **What agrees is untouched.** Where the router chooses the same experts itself, its own choice is used, in its
  own order. A run whose choices agree, as in float32 before the weights change, has the same bits with and
  without replay.
- **Later steps of a window** (`num_iterations`, `steps_per_generation`) use the experts of the rollout too,
  although the router would choose others after an update, in float32 as well.
- **The reference model** chooses its own experts, also if it is the policy without its adapters.
- **The auxiliary loss** that balances experts is computed by the model from the scores of the live routers, as
  in stock TRL.
- **Padding, the last token of a completion, and tokens that no turn of the rollout computed** have no record,
  and get the router's own choice.

The record has one integer for each chosen expert, of one byte up to 255 experts and of two above: 8 of 128
experts in 48 layers take 384 bytes for each token. It is part of the rollout batch (`precision_routes`), so
that it is sliced, shuffled and saved in checkpoints with its tokens.

## How routers are found

There is no list of families. A model whose text part has stacks of matrices, or lists of equal `experts`, is
run once at construction on five sequences of one token. Attention then has one key for each token, so a
`torch.topk` with one row for each token and several entries to choose from chooses experts, or groups of
experts. While a rollout is recorded or replayed, these calls are answered, and the code of the family computes
the rest. The precision report has a row for each router: the dtype of its scores, its near ties, and for how
many tokens of the first pass it did not choose what the rollout chose.

`router_replay="rollout"` is refused, with the reason, if some experts get tokens that no such call chose:
routers that draw experts at random (PhiMoE), hash them, or choose inside of a fused kernel; models with experts
of their own for images (Ernie 4.5 VL); `torch_compile=True`; continuous batching; beam search; prompts that
`prefill_chunk_size` divides; a `rollout_func`; and
trainers without rollouts.

## Routers in float32

`fp32_modules=["@routers"]` stands for the routers, whatever their names are: they compute in float32 in the
sampler of `generate` and in the trainer. That makes ties rarer and does not prevent flips, because the hidden
states that a router gets still differ. Measure `precision/router_flip_frac` before and after; replay is what
removes flips.

## With vLLM

`router_replay="rollout"` builds a colocated engine with `enable_return_routed_experts` (vLLM 0.14 and later),
which returns the experts of prompts and completions. Refused: servers, whose experts TRL's client does not pass
on; `vllm_tensor_parallel_size` above 1; and routers that choose groups of experts first, which vLLM does not
return.

Shown on a CPU: the experts of a new engine are those of the same model in transformers, and losses use them.
Not shown: weight syncs, because vLLM's CPU kernels compute with the old, packed weights of experts after new
ones were loaded.
"""


def experts_page() -> str:
    """Returns `experts.md`."""
    measured = results("experts")
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    lines = [INTRODUCTION]
    if "families" in measured:
        lines += _families(measured)
    if "curves" in measured:
        lines += _curves(measured["curves"])
    if "cost" in measured:
        lines += _cost(measured["cost"])
    lines += [f"*Made from the results of `{measured['command']}` by `make docs`; {versions}; {measured['machine']}.*"]
    return "\n".join(lines) + "\n"


def _families(measured: Row) -> list[str]:
    rows = measured["families"]
    lines = [
        "## Measured by family",
        "",
        *_filled(
            f"Each model has 4 layers of 16 or 32 experts, of which 4 are used, and was trained for "
            f"{measured['training']} steps in float32. A `SafeGRPOTrainer` samples with `generate`, with prompts of "
            f"several lengths, and scores sequences of up to {measured['tokens']} tokens: {measured['least']}, or "
            f"as many as should have {measured['flipped']} tokens with a flip, at most {measured['most']}. "
            "*Choices* is the share of choices that differ, *tokens* that of tokens with any. The mismatch is that of "
            "[metrics](metrics.md), in nats; *others* is its mean over the tokens without a flip, without replay."
        ),
        "",
    ]
    for precision in ("fp16", "bf16"):
        lines += [
            f"### {NAMES[precision]}",
            "",
            "| family | sequences | choices | tokens | mean | others | mean, replayed | largest | largest, replayed |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        found = [row for row in rows if row["precision"] == precision]
        for row in found:
            off, on = row["off"], row["rollout"]
            lines.append(
                f"| `{row['family']}` | {row['sequences']} | {off['router_flip_frac']:.2%} | "
                f"{off['router_flip_any_frac']:.2%} | "
                f"{off['logp_mismatch_mean']:.1e} | {off['logp_mismatch_no_flip']:.1e} | "
                f"{on['logp_mismatch_mean']:.1e} | {off['logp_mismatch_max']:.1e} | {on['logp_mismatch_max']:.1e} |"
            )
        lines += ["", *_summary(found), ""]
    other = sorted(
        {row["family"] for row in rows if row.get("fp32", 0.0) > NOT_ROUNDING * row["off"]["logp_mismatch_mean"]}
    )
    if other:
        names = ", ".join(f"`{name}`" for name in other)
        reasons = "".join(f" {REASONS[name]}" for name in other if name in REASONS)
        said = f"Not due to precision: generation and scoring of {names} differ in float32 too.{reasons}"
        lines += [*_filled(said), ""]
    return lines + _float32_head([row for row in rows if "fp32_head" in row])


def _float32_head(rows: list[Row]) -> list[str]:
    """Returns the largest mismatch where the rounding of logits in float16 does not hide it."""
    if not rows:
        return []
    lines = [
        "### float16 with a float32 head",
        "",
        *_filled(
            "Neighbouring float16 numbers between 4 and 8 are 3.9e-3 apart, and logits of the sampler and of the "
            "trainer differ by as much without any flip. "
            '`fp32_modules=["lm_head"]` removes this rounding, and what is left shows what replay does.'
        ),
        "",
        "| family | tokens | mean | others | mean, replayed | largest | largest, replayed |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [{"family": row["family"], **row["fp32_head"]} for row in rows]
    for row in found:
        off, on = row["off"], row["rollout"]
        lines.append(
            f"| `{row['family']}` | {off['router_flip_any_frac']:.2%} | {off['logp_mismatch_mean']:.1e} | "
            f"{off['logp_mismatch_no_flip']:.1e} | {on['logp_mismatch_mean']:.1e} | {off['logp_mismatch_max']:.1e} | "
            f"{on['logp_mismatch_max']:.1e} |"
        )
    return [*lines, "", *_summary(found), ""]


def _summary(rows: list[Row]) -> list[str]:
    """Returns what the rows of one dtype show, and where they show nothing."""
    flipped = [row for row in rows if row["off"]["router_flip_frac"] > 0]
    left = [row for row in rows if row["rollout"]["router_flip_frac"] > 0]
    near = [
        row for row in flipped if row["rollout"]["logp_mismatch_mean"] <= 1.2 * row["off"]["logp_mismatch_no_flip"]
    ]
    ratios = [row["off"]["logp_mismatch_max"] / row["rollout"]["logp_mismatch_max"] for row in flipped]
    tenfold = sum(ratio >= 10 for ratio in ratios)
    text = (
        f"{len(flipped)} of {len(rows)} families have flips, and {len(left) or 'none'} with replay. In {len(near)} of "
        f"{len(flipped)} the mean with replay is at most 1.2 times that of the tokens without a flip. The largest "
        f"mismatch falls to a tenth or less in {tenfold}; the median of the ratios is "
        f"{statistics.median(ratios):.1f}, the smallest {min(ratios):.1f} and the largest {max(ratios):.1f}. Where "
        "the ratio is small, the largest mismatch was not at a flipped token."
    )
    return _filled(text)


def _curves(rows: list[Row]) -> list[str]:
    steps = len(rows[0]["steps"])
    lines = [
        "## GRPO on a byte model",
        "",
        *_filled(
            f"A smaller model of the first family, trained with GRPO on {steps} rollouts to write small letters, from "
            "the same weights with three seeds. A window has two batches and two iterations over each. Each value is "
            "the mean over the seeds, with the smallest and the largest; the reward is that of the last "
            f"{WINDOW} rollouts, and the mismatch that of all."
        ),
        "",
        "| dtype | replay | reward | mean mismatch | largest mismatch | tokens with a flip |",
        "|---|---|---|---|---|---|",
    ]
    for precision in ("bf16", "fp16"):
        for replay in ("off", "rollout"):
            runs = [row["steps"] for row in rows if (row["precision"], row["replay"]) == (precision, replay)]
            rewards = [statistics.fmean(step["reward"] for step in run[-WINDOW:]) for run in runs]
            means, largest, flips = (
                [of(step[name] for step in run if name in step) for run in runs]
                for name, of in (
                    ("logp_mismatch_mean", statistics.fmean),
                    ("logp_mismatch_max", max),
                    ("router_flip_any_frac", statistics.fmean),
                )
            )
            lines.append(
                f"| {NAMES[precision]} | {replay} | {_span(rewards, '.3f')} | {_span(means, '.1e')} | "
                f"{_span(largest, '.1e')} | {statistics.fmean(flips):.2%} |"
            )
    return [*lines, "", *_verdict(rows), ""]


def _verdict(rows: list[Row]) -> list[str]:
    """Returns whether the rewards of runs with and without replay can be told apart."""
    apart = []
    for precision in ("bf16", "fp16"):
        ends = {
            replay: [
                statistics.fmean(step["reward"] for step in row["steps"][-WINDOW:])
                for row in rows
                if (row["precision"], row["replay"]) == (precision, replay)
            ]
            for replay in ("off", "rollout")
        }
        if max(ends["off"]) < min(ends["rollout"]) or max(ends["rollout"]) < min(ends["off"]):
            apart.append(NAMES[precision])
    where = f"differ in {' and '.join(apart)}" if apart else "overlap in both dtypes"
    return _filled(
        f"The rewards of runs with and without replay {where}. At this size and length the curves show the mismatch, "
        "and no collapse: the published ones are of models with 48 layers and 128 experts, trained for "
        "hundreds of steps."
    )


def _cost(cost: Row) -> list[str]:
    text = (
        f"CPU time of a step of GRPO with the same model in float32, {cost['pairs']} times in turn: with replay "
        f"{cost['ratio']:.3f} times that without it (from {cost['ratios'][0]:.3f} to {cost['ratios'][-1]:.3f}), and "
        f"without replay {cost['seen']:.3f} times that of `precision_metrics=False` (from "
        f"{cost['all_seen'][0]:.3f} to {cost['all_seen'][-1]:.3f}). The record takes "
        f"{cost['bytes_per_token']} bytes for each token. The model is so small that most of a step is Python. A "
        "model without experts is not run at construction."
    )
    return ["## Cost", "", *_filled(text), ""]


def _filled(text: str) -> list[str]:
    """Returns the lines of a paragraph."""
    return textwrap.wrap(text, 112, break_long_words=False, break_on_hyphens=False)


def _span(values: list[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"

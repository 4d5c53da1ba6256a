"""Writes the page and the figure of the learning curves, from the results of `benchmarks/curves.py`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
from results import Row, Rows


RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "curves.jsonl"
SIDES = {"stock": "stock TRL", "safe": "safe-trainers"}
REFERENCE = "reference-"
COLUMNS = 3
GREY = "#808080"
SEEDS, INCOMPLETE = 3, "too few seeds"
"""The seeds that a verdict needs, and what is printed with fewer."""
LAST = 10
"""The last steps of a run over which the reward is averaged."""
SAME, STOCK_HIGHER, SAFE_HIGHER, IDENTICAL = "no difference shown", "stock higher", "safe higher", "identical"
EQUAL = (SAME, IDENTICAL, "both end")
STOCK_WORSE, SAFE_WORSE = (SAFE_HIGHER, "stock ends"), (STOCK_HIGHER, "safe ends")
"""How the verdicts of each kind begin."""

FAULTS = {
    "image": "TRL 1.16 sends vLLM prompts whose image tokens the processor has expanded, and vLLM expands the first "
    "again, so that stock samples from other prompts than it scores.",
    "image-markers": "The same fault. `logit_bias` forbids marker tokens in the sampler, for both trainers; without "
    "it a sampled image token can end a run of stock.",
    "top-p": "vLLM returns log-probabilities of the tokens that it keeps, and stock compares them with those of the "
    "whole vocabulary: the importance weights of stock fall with the length of an answer. Here little is cut.",
    "top-k": "The same fault. The distributions are narrow, so that the 20 tokens have almost all of the probability.",
    "top-k-long": "The same fault, with distributions that are almost uniform, of which little is kept.",
    "fp16-vllm": "Stock passes no dtype to vLLM, which samples in bfloat16.",
    "4-bit": "Stock rounds the adapters of a 4-bit model to bfloat16; safe keeps them in float32.",
    "syncs": "For each sync, stock merges the adapters into the bfloat16 base and subtracts them again, which rounds "
    "twice; safe merges a copy.",
    "nan-grpo": "One element of one forward pass is NaN. Stock has no loss scaler in bf16, and the optimizer writes "
    "NaN into every weight; safe skips the step.",
    "nan-sft": "The same fault, without a rollout that could notice it.",
    "overflow": "Gradients overflow while the loss scale is above 64, for ten steps. Fused AdamW hides skipped "
    "steps from stock, which advances its learning-rate schedule.",
    "pure-bf16": "The weights are loaded in bfloat16, in which updates of this learning rate round to zero. Neither "
    "trainer changes the dtype of the weights; safe logs the share of lost updates.",
    "fp32-masters": "The same run with weights loaded in float32, which both trainers can do.",
}
"""What differs between the trainers in each curve."""


def final(row: Row) -> float | None:
    """Returns the last score of a run; `None` if an error ended it."""
    return None if "error" in row else float(row["scores"][-1][1])


def mean_score(row: Row) -> float | None:
    """Returns the mean of the scores after the first one; `None` if an error ended the run."""
    return None if "error" in row else statistics.fmean(score for _, score in row["scores"][1:])


def compared(stock: Sequence[float | None], safe: Sequence[float | None]) -> str:
    """Compares the scores of several seeds; `None` stands for a run that an error ended.

    If every run of one side ended in an error, or more runs than on the other side, that is the verdict. Otherwise
    ranges that overlap or touch show no difference.
    """
    ended = [sum(score is None for score in side) for side in (stock, safe)]
    if ended[0] != ended[1]:
        who, times, of = ("stock", ended[0], stock) if ended[0] > ended[1] else ("safe", ended[1], safe)
        return f"{who} ends in an error" + ("" if times == len(of) else f" in {times} of {len(of)} runs")
    first, second = ([score for score in side if score is not None] for side in (stock, safe))
    if not first or not second:
        return "both end in an error"
    if min(second) > max(first):
        return SAFE_HIGHER
    return STOCK_HIGHER if min(first) > max(second) else SAME


def identical(stock: Sequence[Row], safe: Sequence[Row]) -> bool:
    """Whether the runs of every seed have the same scores and losses, to the four digits that are recorded."""
    return all(
        "error" not in one
        and "error" not in other
        and one["scores"] == other["scores"]
        and one["loss"] == other["loss"]
        for one, other in zip(stock, safe, strict=True)
    )


def verdict(stock: Sequence[Row], safe: Sequence[Row], of: Any = final) -> str:
    """Compares the runs of both trainers by a number of each run.

    Args:
        stock: The runs of stock TRL, by seed.
        safe: The runs of the safe trainer, with the same seeds.
        of: `final` or `mean_score`.

    Returns:
        The verdict, or `INCOMPLETE`.
    """
    if [row["seed"] for row in stock] != [row["seed"] for row in safe] or len(stock) < SEEDS:
        return INCOMPLETE
    return IDENTICAL if identical(stock, safe) else compared([of(row) for row in stock], [of(row) for row in safe])


class Results(Rows):
    """The committed runs."""

    def __init__(self, file: Path = RESULT) -> None:
        super().__init__(file)

    def runs(self, name: str, side: str) -> list[Row]:
        """Returns the runs of a curve and a side, by seed."""
        found = (row for row in self.rows if (row["curve"], row["side"]) == (name, side))
        return sorted(found, key=lambda row: row["seed"])

    def names(self) -> list[str]:
        """Returns the curves with a run of each side."""
        return [
            name
            for name in self.heading["curves"]
            if not name.startswith(REFERENCE) and self.runs(name, "stock") and self.runs(name, "safe")
        ]

    def pairs(self, name: str) -> tuple[list[Row], list[Row]]:
        """Returns the runs of both sides with seeds that both have."""
        sides = [self.runs(name, side) for side in SIDES]
        shared = {row["seed"] for row in sides[0]} & {row["seed"] for row in sides[1]}
        stock, safe = ([row for row in side if row["seed"] in shared] for side in sides)
        return stock, safe

    def reference(self, name: str) -> str:
        """Returns the name of the reference of a curve."""
        curve = self.heading["curves"][name]
        if curve["method"] == "sft":
            return REFERENCE + ("lora" if curve["lora"] else "sft")
        return REFERENCE + curve["task"]

    def missing(self) -> list[str]:
        """Returns which runs are missing, by curve."""
        lines = []
        for name, curve in self.heading["curves"].items():
            left = [
                f"{side} {', '.join(map(str, seeds))}"
                for side in curve["sides"]
                if (seeds := sorted(set(self.heading["seeds"]) - {row["seed"] for row in self.runs(name, side)}))
            ]
            if left:
                lines.append(f"{name} (seeds: {'; '.join(left)})")
        return lines


def spread(numbers: Sequence[float | None]) -> str:
    """Returns the mean of the numbers with their range; `None` stands for an error."""
    known = [number for number in numbers if number is not None]
    failed = len(numbers) - len(known)
    text = f"{statistics.fmean(known):.3f} ({min(known):.3f}–{max(known):.3f})" if known else ""
    return text + (f"{'; ' if text else ''}{failed} of {len(numbers)} end in an error" if failed else "")


def page() -> str:
    """Returns `curves.md`."""
    results = Results()
    names = results.names()
    verdicts = {name: verdict(*results.pairs(name)) for name in names}
    on_the_way = {name: verdict(*results.pairs(name), mean_score) for name in names}
    lines = [
        "# Learning curves",
        "",
        "Runs of stock TRL and of safe-trainers with the same model, data, seeds and settings: TRL's plain config",
        "is passed to both. Most curves have one fault of stock: of precision, of what the sampler reads or cuts "
        "off, or a",
        "planted NaN; `fp32 weights` has none, and `bf16 weights` one of both trainers. The score is the share of "
        "held-out",
        "prompts that the trained model answers exactly right, decoding greedily; with answers of 48 tokens, the",
        "probability of a rewarded word after a held-out prompt. Runs in fp16 have a stand-in for CUDA's autocast and",
        "scaler.",
        "",
        *figures.embed(
            "curves.svg",
            "Held-out score by step: stock TRL (orange, dashed) and safe-trainers (blue), a line for each seed. Grey: "
            "stock TRL in float32 without vLLM, the mean of its seeds. A cross marks a step at which an error ended a "
            "run.",
            described="Held-out score by step for stock TRL and safe-trainers, a panel for each fault.",
        ),
        "",
        *_list("No difference at the end", EQUAL, results, verdicts, on_the_way),
        *_list("Stock is worse at the end", STOCK_WORSE, results, verdicts, on_the_way),
        *_list("Safe is worse at the end", SAFE_WORSE, results, verdicts, on_the_way),
        "## Scores",
        "",
        "The mean over the seeds, and the range. *On the way* is the mean of all scores of a run after the first,",
        "which is higher if a run learns earlier.",
        "",
        "| run | stock, end | safe, end | verdict | stock, on the way | safe | verdict | reference, end |",
        "|---|---|---|---|---|---|---|---|",
        *(_score_row(results, name, verdicts[name], on_the_way[name]) for name in names),
        "",
        "**Rule of the verdict.** *Identical*: scores and losses of every seed agree to four digits. *No difference",
        "shown*: the ranges of the seeds overlap. *Higher*: they do not. If three runs of each of two equal trainers",
        "had independent scores, their ranges would be disjoint by chance in one of ten comparisons. If more runs of",
        f"one trainer end in an error, that is the verdict. With fewer than {SEEDS} seeds of both there is none.",
        "Verdicts are not corrected for their number: of two for each curve, one or two may be chance.",
        "",
        "## What differs",
        "",
        *_details(results, names),
        "## Beside the score",
        "",
        "Means over all steps and seeds with finite values, stock / safe. *Mismatch*: abs(log p",
        f"trainer − log p vLLM), in nats. *Weight*: the importance weight. *Reward*: of the last {LAST} steps, at",
        "most 2.",
        "",
        "| run | mismatch | weight | gradient norm | reward | dtype of vLLM |",
        "|---|---|---|---|---|---|",
        *(_beside(results, name) for name in names),
        "",
        *_errors(results, names),
        *_settings(results),
    ]  # fmt: skip
    missing = results.missing()
    if missing:
        lines += ["## Not run", "", f"{'; '.join(missing)}.", ""]
    return "\n".join([*lines, *_provenance(results)]).rstrip() + "\n"


def summary() -> tuple[int, int, int]:
    """Returns how many curves have a verdict, and how many of them ended worse with stock and with safe."""
    results = Results()
    verdicts = [found for name in results.names() if (found := verdict(*results.pairs(name))) != INCOMPLETE]
    return len(verdicts), *(sum(found.startswith(kind) for found in verdicts) for kind in (STOCK_WORSE, SAFE_WORSE))


def _list(title: str, kind: tuple[str, ...], results: Results, at_end: Row, on_the_way: Row) -> list[str]:
    """Lists the curves whose verdict at the end is of a kind."""
    lines = []
    for name, found in at_end.items():
        if not found.startswith(kind):
            continue
        stock, safe = (spread([final(row) for row in rows]) for rows in results.pairs(name))
        other = "" if on_the_way[name] == found else f" On the way: {on_the_way[name]}."
        lines.append(f"- {results.heading['curves'][name]['title']}: {found}. Stock {stock}, safe {safe}.{other}")
    return [f"## {title}", "", *lines, ""] if lines else []


def _score_row(results: Results, name: str, at_end: str, on_the_way: str) -> str:
    stock, safe = results.pairs(name)
    reference = results.runs(results.reference(name), "stock")
    cells = [
        results.heading["curves"][name]["title"],
        spread([final(row) for row in stock]),
        spread([final(row) for row in safe]),
        at_end,
        spread([mean_score(row) for row in stock]),
        spread([mean_score(row) for row in safe]),
        on_the_way,
        spread([final(row) for row in reference]) if reference else "",
    ]
    return f"| {' | '.join(cells)} |"


def _details(results: Results, names: list[str]) -> list[str]:
    lines = []
    for name in names:
        curve = results.heading["curves"][name]
        stock, safe = results.pairs(name)
        lines += [f"- **{curve['title']}**: {FAULTS[name]}{_measured(name, stock, safe)}"]
    return [*lines, ""]


def _measured(name: str, stock: list[Row], safe: list[Row]) -> str:
    """A sentence with what was measured in some of the curves beside the score; empty in the others."""
    both = {"Stock": stock, "safe": safe}
    parts = []
    if any("base_changed" in row for row in [*stock, *safe]):
        for side, rows in both.items():
            done = [row for row in rows if "base_changed" in row]
            if done:
                parts.append(
                    f"{side}: {statistics.fmean(row['base_changed'] for row in done):.1%} of the base's elements "
                    f"changed, and the saved adapters score {spread([row['saved_score'] for row in done])} on the "
                    "base as it was loaded"
                )
    if name == "overflow":
        for side, rows in both.items():
            done = [row for row in rows if row.get("scales") and "rate" in row]
            if done:
                skipped = [skips(row) for row in done]
                shares = [row["rate"][min(count, len(row["rate"]) - 1)] / max(row["rate"]) for row, count
                          in zip(done, skipped, strict=True)]  # fmt: skip
                parts.append(
                    f"{side}: {statistics.fmean(skipped):.0f} steps skipped, and the first step that changes weights "
                    f"has {statistics.fmean(shares):.0%} of the peak learning rate"
                )
    if name.startswith("nan"):
        for side, rows in both.items():
            broken = sum(not row["finite"] for row in rows)
            parts.append(f"{side}: {broken} of {len(rows)} runs end with weights that are not finite")
    return f" {'. '.join(parts).replace('. safe', '. Safe')}." if parts else ""


def skips(row: Row) -> int:
    """Returns how many steps at the beginning of a run lowered the loss scale."""
    scales = row["scales"]
    lowest = scales.index(min(scales))
    return lowest + 1


def _beside(results: Results, name: str) -> str:
    sides = results.pairs(name)
    cells = [results.heading["curves"][name]["title"]]
    for key, digits in (("mismatch", ".1e"), ("ratio", ".2g"), ("grad_norm", ".2g")):
        cells.append(" / ".join(_mean(rows, key, digits) for rows in sides).strip(" /"))
    rewards = [[{"reward": row["reward"][-LAST:]} for row in rows if row.get("reward")] for rows in sides]
    cells.append(" / ".join(_mean(rows, "reward", ".2f") for rows in rewards).strip(" /"))
    engines = [", ".join(sorted({row["engine"] for row in rows if "engine" in row})) for rows in sides]
    cells.append(" / ".join(engines).strip(" /"))
    return f"| {' | '.join(cells)} |"


def _mean(rows: Sequence[Row], key: str, digits: str) -> str:
    values = [value for row in rows for value in row.get(key, []) if not isinstance(value, str)]
    return f"{statistics.fmean(values):{digits}}" if values else ""


def _errors(results: Results, names: list[str]) -> list[str]:
    lines = []
    for name in names:
        for side, words in SIDES.items():
            ended: dict[str, list[Row]] = {}
            for row in results.runs(name, side):
                if "error" in row:
                    ended.setdefault(row["error"].replace("|", "\\|").replace("`", "'"), []).append(row)
            for error, rows in ended.items():
                seeds, steps = (", ".join(str(row[key]) for row in rows) for key in ("seed", "ended_at"))
                title = results.heading["curves"][name]["title"]
                lines.append(f"| {title} | {words} | {seeds} | {steps} | `{error}` |")
    if not lines:
        return []
    heads = ["| run | trainer | seeds | after step | error |", "|---|---|---|---|---|"]
    return ["## Errors", "", *heads, *lines, ""]


def _settings(results: Results) -> list[str]:
    lines = [
        "## Settings",
        "",
        "Learning rates and steps were chosen with seed 0 of the reference runs, stock TRL in float32 without vLLM,",
        "so that they reach a score near 1 towards their end (images: half of the lower of two rates that were tried,",
        "which both learn within 20 steps); none was changed for a trainer. Linear schedule, AdamW with beta2 0.95;",
        "GRPO with 4 prompts of 8 completions, `beta=0`, the rewards exact match and share of right",
        "words; SFT with batches of 16. Answers have up to 8 tokens in text and 4 with images. The text model is a",
        "Llama with two layers of width 128, and the image model a Qwen2.5-VL with one of width 64, warmed up in",
        "float32 on answers of which 60 % name one colour. With long answers the text model is not warmed up, and",
        "the reward is twice the share of colour words.",
        "",
        "| run | trained | weights, flag | adapters | learning rate | steps | other |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in results.heading["curves"].values():
        other = [f"`{key}={value}`" for key, value in curve["changes"].items()]
        other += [f"{curve['syncs']} syncs a step"] if curve["syncs"] > 1 else []
        other += ["vLLM"] if curve["vllm"] else []
        adapters = "rank {}, alpha {}".format(*curve["lora"]) if curve["lora"] else ""
        weights = "4-bit" if curve["packed"] else curve["weights"]
        cells = [
            curve["title"], f"{curve['method'].upper()}, {curve['task']}", f"{weights}, {curve['precision']}",
            adapters, f"{curve['rate']:g}", str(curve["steps"]), ", ".join(other),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _provenance(results: Results) -> list[str]:
    kinds = {", ".join(f"{name} {number}" for name, number in row["versions"].items()) for row in results.rows}
    seconds = sum(row["cpu_seconds"] for row in results.rows)
    return [
        f"*Made from `benchmarks/results/curves.jsonl` by `make docs`; `{results.heading['command']}`;",
        f"{' or '.join(sorted(kinds))}; {results.heading['machine']}; {len(results.rows)} runs,",
        f"{seconds / 60:.0f} minutes of CPU time.*",
    ]


def draw(file: Path) -> None:
    """Draws the scores by step, a panel for each curve.

    Args:
        file: The SVG to write.
    """
    from matplotlib.lines import Line2D

    results = Results()
    names = results.names()
    height = -(-len(names) // COLUMNS)
    looks = {
        "stock": {"color": figures.ORANGE, "linestyle": "--"},
        "safe": {"color": figures.BLUE, "linestyle": "-"},
    }

    def panels(figure: Any) -> None:
        axes = figure.subplots(height, COLUMNS, squeeze=False, sharey=True)
        for place, name in zip(axes.flat, names, strict=False):
            reference = results.runs(results.reference(name), "stock")
            if reference:
                steps = [step for step, _ in reference[0]["scores"]]
                means = [statistics.fmean(row["scores"][i][1] for row in reference) for i in range(len(steps))]
                place.plot(steps, means, color=GREY, linestyle=":", linewidth=2)
            for side, look in looks.items():
                for row in results.runs(name, side):
                    if not row.get("scores"):
                        continue
                    steps, scores = zip(*row["scores"], strict=True)
                    place.plot(steps, scores, linewidth=1.2, alpha=0.9, **look)
                    if "error" in row:
                        at = max(row["ended_at"], steps[-1])
                        place.plot([at], [scores[-1]], marker="x", markersize=9, markeredgewidth=2, **look)
            place.set_title(results.heading["curves"][name]["title"].replace("`", ""), loc="left", fontsize=10)
            place.set_ylim(-0.04, 1.04)
        for place in axes.flat[len(names) :]:
            place.axis("off")
        for row in axes:
            row[0].set_ylabel("held-out score")
        figure.supxlabel("step", fontsize=11)
        lines = [Line2D([], [], **looks[side]) for side in SIDES]
        lines.append(Line2D([], [], color=GREY, linestyle=":", linewidth=2))
        figure.legend(lines, [*SIDES.values(), "stock TRL, float32, no vLLM"], loc="outside upper center", ncols=3)

    figures.plot(file, panels, (10, 2.1 * height + 0.8))

"""Writes the page of metrics and its figure, from `safe_trainers/explain/metrics.toml` and the benchmark of "
"planted faults.
"""

from pathlib import Path
from statistics import median
from typing import Any

import figures
from fragments import results

from safe_trainers.explain.metrics import Metric, metrics


SECTIONS = {
    "optimizer": ("Optimizer", "numerics"),
    "mismatch": ("Mismatch of sampler and trainer", "rollout"),
    "experts": ("Experts of sampler and trainer", "experts"),
    "rollout": ("Rewards and weight syncs", "rollout"),
}
NOTES = {
    "optimizer": """A step whose gradients are not finite is skipped. `loss_scale` is logged if the loss is scaled, and
`skipped_steps` and `effective_steps` also if a step was skipped. They count from the start of the run, including
resumed parts. The others cover the steps since the last log, and are absent without data.

The sample has about 4,096 elements, at least 8 of each parameter, and does not change. Each element
is weighted by the share of its parameter that it represents. It is read every fifth step that is
taken with a learning rate above 0. Embeddings do not count for `grad_zero_frac`, because the rows
of absent tokens have no gradient in any precision.

With fused AdamW (the default) accelerate cannot tell that a step was skipped, and advances the
schedule anyway ([accelerate#4242](https://github.com/huggingface/accelerate/issues/4242)). The
trainers watch the loss scale instead.

All metrics are of the whole run: with sharded weights they are summed over ranks. DeepSpeed does
not expose gradients, so `grad_zero_frac`, `update_lost_frac` and `stalled_params` are absent there.""",
    "mismatch": """D = log p_trainer(token) - log p_sampler(token), in nats, for every completion token except padding
and the results of tools. Both are computed from `logits / temperature`. With vLLM, log p_sampler is
the value that vLLM returns, which includes top-k, top-p, min-p and penalties. S is the sum of D
over a sequence, and w = exp(S).

The sampler's log-probabilities are recorded while `generate` samples, or are those that vLLM
returns. The trainer's are the old log-probabilities, if TRL computes them, and otherwise those of
the first loss of each slice. No extra forward pass is run. p_now is the probability in a loss.

eps is the spacing of the run's compute dtype at 1 (2^-7 for bfloat16, 2^-10 for float16). A
log-probability is a difference of logits of about its own size, and each logit is rounded by up to
half the spacing at that size. `logp_mismatch_ulp` is therefore about the same for bfloat16 and
float16.

Every mean is taken in float64 over all tokens (or sequences) of all ranks and micro-batches since
the last log. D, and S before `exp`, are clamped to [-300, 300]. `is_masked_frac` follows TRL's
masking: a token whose log p_sampler is NaN has weight 1; if its log p_sampler is minus infinity,
its weight and that of its sequence are infinite.""",
    "experts": """Logged for models whose routers are found, see [Mixture of experts](experts.md). The choices are
compared in the pass that also gives D: the scoring of old log-probabilities, or the first loss of
each slice. A completion token counts with the choices for the token before it, from which it is
predicted. D is defined above.""",
    "rollout": """A reward function that returns None or NaN gives no reward. TRL 1 gives a completion without any
reward no advantage; older releases count its reward as 0. If one of several functions gives no
reward, the completion's reward is the sum of the others.""",
}
SHOWN = {
    "logp_mismatch_ulp": ("bf16", "another temperature", "log"),
    "skipped_steps": ("fp16", "activations overflow", "linear"),
    "update_lost_frac": ("bf16, LoRA", "bf16 adapters", "linear"),
}
"""The metrics of the figure, with a healthy run, a run with a fault, and the scale of the axis."""


def runs() -> dict[str, Any]:
    """The runs of the benchmark, by name."""
    return {run["name"]: run for run in results("metric_runs")["runs"]}


def anchor(name: str) -> str:
    """The anchor of a metric."""
    return name.replace("_", "-")


def metrics_page() -> str:
    """Returns `metrics.md`."""
    found, measured = runs(), results("metric_runs")
    limited = [metric for metric in metrics().values() if metric.look]
    order = ["logp_mismatch_mean", "logp_mismatch_ulp", "seq_ess", "skipped_steps", "loss_scale", "update_lost_frac",
             "stalled_params", "sync_lost_frac", "grad_zero_frac", "unrewarded_frac", "unscored_frac"]  # fmt: skip
    first = [metrics()[name] for name in order] + [metric for metric in limited if metric.name not in order]
    lines = [
        "# Metrics: what is normal",
        "",
        "Each run logs `precision/...` metrics beside TRL's. `precision_metrics=False` disables them. Training",
        "commands write them to `log.json`, and checkpoints have them in `trainer_state.json`. With either file,",
        "`safe-trainers explain runs/mine/log.json` prints each metric that is beyond its limit.",
        "",
        "| metric | normal | look when | most likely | write |",
        "|---|---|---|---|---|",
        *(_row(metric) for metric in first),
        "",
        *figures.embed(
            "metrics.svg",
            "Healthy runs (blue, circles) stay below the limits (dashed); runs with a planted fault (orange, "
            "squares) pass "
            "them within a few steps. From left: the sampler divides by another temperature; activations overflow "
            "float16 "
            "from step 8 on; bfloat16 adapters at a learning rate of 1e-6.",
            described="Three metrics over the steps of a healthy and of an unhealthy run.",
        ),
        "",
        "Look at several logs, not at one: in the first steps of an adapter, or if all rewards of a batch are equal,",
        "gradients are 0 and some shares are 1.",
        "",
    ]
    for section, (title, _) in SECTIONS.items():
        lines += [f"## {title}", "", NOTES[section], ""]
        for metric in metrics().values():
            if metric.section == section:
                lines += _entry(metric, found)
    lines += [
        f"*The limits are checked against {len(found)} runs of {measured['steps']} steps, healthy and with planted "
        "faults, of a",
        f"model with {measured['model']}: [measurements](metric_runs.md). Made from "
        "`safe_trainers/explain/metrics.toml` by",
        "`make docs`.*",
    ]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    cells = [f"[`{metric.name}`](#{anchor(metric.name)})", metric.normal, metric.look, metric.cause, metric.write]
    return f"| {' | '.join(cells)} |"


def _entry(metric: Metric, found: dict[str, Any]) -> list[str]:
    names = metric.names or (metric.name,)
    lines = [f"({anchor(metric.name)})=", f"### precision/{metric.name}", ""]
    if metric.names:
        lines += ["Logged as " + ", ".join(f"`precision/{name}`" for name in names) + ".", ""]
    source = f" Source: {metric.source}." if metric.source else ""
    lines += [f"{metric.formula[:1].upper()}{metric.formula[1:]}. Unit: {metric.unit}.{source}", ""]
    lines += [f"Normal: {metric.normal}." + (f" Look when: {metric.look}." if metric.look else ""), ""]
    if metric.look:
        page = f" See [{metric.page}]({metric.page}.md)." if metric.page else ""
        lines += [f"Most likely: {metric.cause}. Write: {metric.write}.{page}", ""]
    return lines


def _values(run: dict[str, Any], metric: Metric) -> list[float]:
    return [value for name in metric.names or (metric.name,) for value in run["metrics"].get(metric.key, [])] or [
        value for name in metric.names for value in run["metrics"].get(f"precision/{name}", [])
    ]


def metric_runs_page() -> str:
    """Returns `metric_runs.md`: what the limits were checked against."""
    measured, found = results("metric_runs"), runs()
    versions = ", ".join(f"{package} {number}" for package, number in measured["versions"].items())
    healthy = [run for run in found.values() if run["fault"] is None]
    lines = [
        "# Metrics of healthy and unhealthy runs",
        "",
        f"A model with {measured['model']} was trained with `SafeGRPOTrainer` for {measured['steps']} steps,",
        f"with completions of {measured['tokens']} tokens: healthy, and with one planted fault each. The table has "
        "the median of",
        "the last half of each run; for counts and the loss scale the last value.",
        "",
        "## Planted faults",
        "",
        "| run | fault |",
        "|---|---|",
        *(f"| {name} | {run['fault']} |" for name, run in found.items() if run["fault"]),
        "",
        "## Values",
        "",
        "| metric | healthy, smallest to largest | limit | with the fault |",
        "|---|---|---|---|",
    ]
    for metric in metrics().values():
        values = [typical(run, metric) for run in healthy]
        values = [value for value in values if value is not None]
        faults = [f"{name}: {_number(typical(found[name], metric))}" for name in metric.shown_by]
        span = f"{_number(min(values))} to {_number(max(values))}" if values else "–"
        limit = (
            f"above {metric.above:g}"
            if metric.above is not None
            else f"below {metric.below:g}"
            if metric.below
            else "–"
        )
        lines.append(f"| `{metric.name}` | {span} | {limit} | {'; '.join(faults) or '–'} |")
    lines += [
        "",
        "The limit of `skipped_steps` is a share of all steps. `sync_lost_frac` is measured on weights that were "
        "merged for a",
        "bfloat16 engine; no engine ran.",
        "",
        f"*Made from `benchmarks/results/metric_runs.json` by `make docs`. `{measured['command']}`; {versions};",
        f"{measured['machine']}; {measured['minutes']} minutes.*",
    ]
    return "\n".join(lines) + "\n"


def typical(run: dict[str, Any], metric: Metric) -> float | None:
    """The value of a run that a limit is for.

    Args:
        run: The run.
        metric: The metric.
    """
    values = {name.removeprefix("precision/"): series for name, series in run["metrics"].items()}
    if metric.names:
        every = [value for name in metric.names for value in values.get(name, [])]
        return median(every) if every else None
    return metric.typical(values)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if abs(value) < 1000 else f"{value:,.0f}"


def draw(file: Path) -> None:
    """Draws healthy and unhealthy runs.

    Args:
        file: The SVG to write.
    """
    found = runs()

    def panels(figure: Any) -> None:
        for axes, (name, (healthy, faulty, scale)) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
            metric = metrics()[name]
            for run, colour, marker in ((healthy, figures.BLUE, "o"), (faulty, figures.ORANGE, "s")):
                values = found[run]["metrics"].get(metric.key, [])
                steps = range(1, len(values) + 1)
                every = found[run]["metrics"]["precision/grad_norm_finite"]
                width = max(len(every) // max(len(values), 1), 1)
                axes.plot([step * width for step in steps], values, color=colour, marker=marker, markersize=3.5)
            if metric.above is not None and not metric.per:
                axes.axhline(metric.above, color=figures.TEXT, linestyle="--", linewidth=1)
            axes.set(title=name, xlabel="step", yscale=scale)

    figures.plot(file, panels, (10, 3.1))

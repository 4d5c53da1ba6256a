"""What is normal for a metric agrees with runs of both kinds, and logs are read in every form."""

import json
import re
from pathlib import Path

import pytest

from safe_trainers.explain.log_reader import explain, report
from safe_trainers.explain.metrics import metrics, out_of_range, readings
from safe_trainers.rollout.causes import LARGEST_ROUNDING


ROOT = Path(__file__).parent.parent.parent
RUNS = json.loads((ROOT / "benchmarks/results/metric_runs.json").read_text())["runs"]
LIMITED = [metric for metric in metrics().values() if metric.look]


def values(run):
    named = {name.removeprefix("precision/"): series for name, series in run["metrics"].items()}
    return {"mismatch_pos" if name.startswith("mismatch_pos") else name: series for name, series in named.items()}


def test_a_healthy_run_is_within_all_limits():
    healthy = [run for run in RUNS if run["fault"] is None]
    assert {"bf16", "fp16", "fp32", "bf16, engine"} <= {run["name"] for run in healthy}
    found = {run["name"]: [metric.name for metric, _ in out_of_range(values(run))] for run in healthy}
    assert found == {run["name"]: [] for run in healthy}


@pytest.mark.parametrize("metric", LIMITED, ids=lambda metric: metric.name)
def test_a_planted_fault_passes_the_limit_that_is_for_it(metric):
    assert metric.shown_by
    assert metric.cause
    assert metric.write
    for name in metric.shown_by:
        (run,) = [run for run in RUNS if run["name"] == name]
        assert run["fault"]
        assert metric.is_beyond(values(run)), (name, metric.typical(values(run)))


def test_every_planted_fault_is_seen():
    seen = {name for metric in LIMITED for name in metric.shown_by}
    assert seen == {run["name"] for run in RUNS if run["fault"]}


def test_every_metric_that_the_package_logs_is_described():
    """Each logged name is a string of the modules that log."""
    source = "\n".join(
        (ROOT / "safe_trainers" / f"{module}.py").read_text()
        for module in ("numerics/step_monitor", "numerics/update_sample", "numerics/not_finite", "rollout/mismatch",
                       "rollout/weight_sync", "rollout/mismatch_meter", "experts/routes")
    )  # fmt: skip
    logged = {name.removeprefix("precision/") for run in RUNS for name in run["metrics"]}
    known = {name for metric in metrics().values() for name in (metric.names or (metric.name,))}
    assert logged <= known
    for name in known:
        assert re.search(rf"\b{name if not name.startswith('mismatch_pos') else 'mismatch_pos'}", source), name


def test_the_limit_of_rounding_is_that_of_the_warning():
    limits = f"above {LARGEST_ROUNDING:g}, with a mean mismatch above 1e-4, it is not rounding"
    assert limits in metrics()["logp_mismatch_ulp"].look


LINE = "{'loss': '0.1', 'precision/logp_mismatch_ulp': '5.2', 'precision/logp_mismatch_mean': '0.2', 'epoch': '0.1'}"


@pytest.mark.parametrize(
    "text",
    [
        LINE,
        json.dumps([{"loss": 0.1, "precision/logp_mismatch_ulp": 5.2, "precision/logp_mismatch_mean": 0.2}], indent=1),
        "precision/logp_mismatch_ulp=5.2 precision/logp_mismatch_mean=0.2",
        "precision/logp_mismatch_mean is 0.2, and precision/logp_mismatch_ulp is 5.2",
    ],
    ids=["printed", "log.json", "written", "asked"],
)
def test_a_log_with_a_metric_out_of_range_is_explained(text):
    explanation = explain(text)
    assert explanation.explained
    printed = "\n".join(problem.text for problem in report(explanation).verdicts)
    ulp = metrics()["logp_mismatch_ulp"]
    assert ulp.cause in printed
    assert any(str(problem.fix) == ulp.write for problem in report(explanation).verdicts)
    assert report(explanation).exit_status == 0


def test_a_healthy_log_is_reported_as_healthy():
    explanation = explain(LINE.replace("5.2", "0.1").replace("0.2", "0.001"))
    printed = "\n".join(problem.text for problem in report(explanation).verdicts)
    assert "2 metrics are within their limits" in printed
    assert report(explanation).exit_status == 0


def test_an_error_in_a_log_comes_before_its_metrics():
    explanation = explain(LINE + "\nValueError: Attempting to unscale FP16 gradients.\n")
    verdicts = report(explanation).verdicts
    assert verdicts[0].id == "unscale-fp16-gradients"
    assert any("logp_mismatch_ulp" in problem.what for problem in verdicts[1:])


def test_values_are_read_in_order():
    assert readings("'precision/loss_scale': '65536', precision/loss_scale=1,024 precision/nothing=1") == {
        "loss_scale": [65536.0, 1024.0]
    }
    assert readings("precision/seq_ess: nan")["seq_ess"] != [0.0]

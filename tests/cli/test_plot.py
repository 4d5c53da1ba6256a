"""`safe-trainers plot`, and the plot at the end of each run: a panel for each thing in the log, and no other."""

import json
import os
import shutil

import cells
import pytest
from matplotlib.figure import Figure

from safe_trainers import PrecisionError, SafeGRPOTrainer
from safe_trainers.cli import plot
from safe_trainers.cli.main import main
from safe_trainers.testing import fp16_on_cpu


PNG = b"\x89PNG"
GRPO = [
    {
        "step": step,
        "loss": 0.01 * step,
        "reward": 0.1 * step,
        "reward_std": 0.2,
        "rewards/exact_match/mean": 0.1 * step,
        "rewards/attributes/mean": 0.2 * step,
        "precision/loss_scale": 2.0**16 / (2 if step > 5 else 1),
        "precision/skipped_steps": int(step > 5),
        "precision/logp_mismatch_mean": 1e-3 * step,
        "precision/logp_mismatch_max": 1e-2 * step,
    }
    for step in range(1, 11)
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written, so that what is in them can be read."""
    figures = []
    savefig = Figure.savefig

    def keep(figure, *args, **kwargs):
        figures.append(figure)
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def panels(figure):
    return {axes.get_ylabel().replace("\n", " "): axes for axes in figure.axes}


def write(folder, log, name="log.json", key="log"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({key: log}))
    return folder


def test_everything_that_was_logged_has_its_panel(tmp_path, drawn):
    assert plot.plot_run(GRPO, tmp_path / "plot.png", "a run") == tmp_path / "plot.png"
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    made = panels(figure)
    assert list(made) == ["mean per step", "loss", "loss scale", "mismatch of sampler and trainer, nats"]
    labels = made["mean per step"].get_legend_handles_labels()[1]
    assert labels == ["reward", "exact match", "attributes", "reward ± std"]
    assert made["loss scale"].get_yscale() == "log"
    assert made["mismatch of sampler and trainer, nats"].get_yscale() == "log"
    (skipped,) = [line for line in made["loss scale"].lines if line.get_label() == "step skipped"]
    assert list(skipped.get_xdata()) == [6]
    assert figure.axes[0].get_title(loc="left") == "a run"


def test_nothing_overlaps_and_nothing_is_cut_off(tmp_path, drawn):
    plot.plot_run(GRPO, tmp_path / "plot.png", "a run")
    (figure,) = drawn
    renderer, whole = figure.canvas.get_renderer(), figure.bbox
    boxes = [axes.get_window_extent(renderer) for axes in figure.axes]
    legends = [axes.get_legend().get_window_extent(renderer) for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 3
    for number, legend in enumerate(legends):
        assert not any(legend.overlaps(box) for box in boxes)
        assert not any(legend.overlaps(other) for other in legends[number + 1 :])
        assert whole.x0 <= legend.x0
        assert legend.x1 <= whole.x1
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_only_what_was_logged_has_a_panel(tmp_path, drawn):
    log = [{"step": step, "loss": 1.0 / step, "mean_token_accuracy": 0.5} for step in (1, 2, 3)]
    plot.plot_run([*log, {"step": 3, "train_runtime": 1.0}], tmp_path / "plot.png", "sft")
    assert list(panels(drawn[0])) == ["token accuracy", "loss"]
    plot.plot_run([{"step": 1, "loss": 1.0}], tmp_path / "plot.png", "one step")
    assert list(panels(drawn[1])) == ["loss"]


def test_numbers_that_are_none_are_gaps(tmp_path, drawn):
    log = [
        {"step": 1, "loss": 1.0, "precision/logp_mismatch_mean": 0.0},
        {"step": 2, "loss": float("nan"), "precision/logp_mismatch_mean": 1e-4},
        {"step": 3, "loss": float("inf"), "reward": float("nan"), "precision/loss_scale": "x"},
    ]
    plot.plot_run(log, tmp_path / "plot.svg", "gaps")
    assert list(panels(drawn[0])) == ["loss", "mismatch of sampler and trainer, nats"]
    zeros = [{"step": 1, "loss": 0.0, "precision/logp_mismatch_mean": 0.0}]
    plot.plot_run(zeros, tmp_path / "plot.svg", "float32")
    assert panels(drawn[1])["mismatch of sampler and trainer, nats"].get_yscale() == "linear"


def test_a_run_that_logged_nothing(tmp_path):
    assert "lower logging_steps" in plot.why_not([{"step": 1, "train_runtime": 1.0}])
    assert plot.plot_run([], tmp_path / "plot.png", "nothing") is None
    assert not (tmp_path / "plot.png").exists()


def test_a_real_fp16_run_with_skipped_steps(tmp_path, drawn, capsys):
    cell = cells.Cell("text", "grpo", "fp32", "fp16")
    arguments = cells.arguments(
        cell,
        cells.SAFE_CONFIG["grpo"],
        steps=3,
        output_dir=str(tmp_path / "run"),
        loss_scale_init=2.0**60,  # gradients overflow, so that steps are skipped
        save_strategy="steps",
        save_steps=3,
    )
    with pytest.raises(PrecisionError, match="no-step-taken"):  # after the last checkpoint
        fp16_on_cpu(SafeGRPOTrainer)(**arguments).train()
    assert main(["plot", str(tmp_path / "run")]) == 0
    # There is no log.json: the newest checkpoint has the log, and the plot is beside it.
    assert (tmp_path / "run" / "checkpoint-3" / "plot.png").read_bytes().startswith(PNG)
    made = panels(drawn[0])
    assert {"reward", "loss", "loss scale"} <= set(made)
    (skipped,) = [line for line in made["loss scale"].lines if line.get_label() == "step skipped"]
    assert list(skipped.get_xdata()) == [1, 2, 3]


SUFFIX = "--output must end in .pdf, .png, .svg, got"


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "key"), [("log.json", "log"), ("trainer_state.json", "log_history")])
def test_the_folder_of_a_run_or_of_a_checkpoint(name, key, tmp_path, capsys):
    folder = write(tmp_path / "run", GRPO, name, key)
    assert main(["plot", str(folder)]) == 0
    assert capsys.readouterr().out == f"plot {folder / 'plot.png'}\n"
    assert (folder / "plot.png").read_bytes().startswith(PNG)
    assert main(["plot", str(folder / name), "--output", str(tmp_path / "other.svg")]) == 0
    assert "<svg" in (tmp_path / "other.svg").read_text()


def test_of_several_checkpoints_the_newest(tmp_path):
    for step in (9, 10, 100):
        write(tmp_path / "run" / f"checkpoint-{step}", GRPO, "trainer_state.json", "log_history")
    assert plot.find_log(tmp_path / "run").parent.name == "checkpoint-100"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rnu"], "rnu does not exist; did you mean 'run'?"),
        (["empty"], "empty is not a run: it has none of log.jsonl, log.json, trainer_state.json"),
        (["broken"], "broken/log.json cannot be read: "),
        (["other"], "other/log.json is not the log of a run: it has neither `log` nor `log_history`"),
        (["short"], "short/log.json cannot be plotted: the run ended before its first log; lower logging_steps"),
        (["run", "--output", "plot.pgn"], f"{SUFFIX} plot.pgn. Write: --output plot.png"),
        (["run", "--output", "."], f"{SUFFIX} .. Write: --output plot.png"),
        (["run", "--output", "/"], f"{SUFFIX} /. Write: --output /plot.png"),
        (["a" * 300], f"{'a' * 300} does not exist"),
        (["run", "--output", "nowhere/plot.png"], "the folder nowhere of --output nowhere/plot.png does not exist"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_error(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", GRPO)
    write(tmp_path / "short", [])
    (tmp_path / "empty").mkdir()
    for name, text in {"broken": "{", "other": "[1, 2]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.json").write_text(text)
    assert main(["plot", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.p[gn][gn]"))


HUGE, NAN, INF = 1e308, float("nan"), float("inf")


def log_of(*values):
    keys = ("loss", "reward", "precision/logp_mismatch_mean", "precision/logp_mismatch_max", "precision/loss_scale")
    return [
        {"step": step, **dict.fromkeys(keys, value), "reward_std": abs(value)} for step, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize(("values", "counted"), [
    ([NAN, NAN], "2 NaN, 0 above 1e+300 or infinite"),
    ([HUGE, -HUGE, NAN], "1 NaN, 2 above 1e+300 or infinite"),
    ([INF], "0 NaN, 1 above 1e+300 or infinite"),
])  # fmt: skip
def test_a_log_without_a_value_to_draw_says_why(values, counted, tmp_path, capsys):
    folder = write(tmp_path / "run", log_of(*values))
    assert main(["plot", str(folder)]) == 2
    said = f"the loss of {len(values)} of {len(values)} logs cannot be drawn: {counted}"
    assert capsys.readouterr().err == f"error: {folder}/log.json cannot be plotted: {said}\n"


def test_values_that_cannot_be_drawn_are_left_out_and_counted(tmp_path, capsys, drawn):
    folder = write(tmp_path / "run", log_of(1.0, HUGE, NAN, 2.0, 5e-324))
    assert main(["plot", str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "note: the loss of 2 of 5 logs cannot be drawn: 1 NaN, 1 above 1e+300 or infinite\n"
    (line,) = panels(drawn[0])["loss"].lines
    assert [value for value in line.get_ydata() if value == value] == [1.0, 2.0, 5e-324]


def test_a_loss_that_is_nan_throughout_is_said_in_its_panel(tmp_path, drawn):
    log = [{**entry, "loss": NAN} for entry in GRPO]
    assert plot.plot_run(log, tmp_path / "plot.png", "a run") is not None
    (text,) = panels(drawn[0])["loss"].texts
    assert text.get_text() == "the loss of 10 of 10 logs cannot be drawn: 10 NaN, 0 above 1e+300 or infinite"
    assert "reward" in " ".join(panels(drawn[0])["mean per step"].get_legend_handles_labels()[1])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written(tmp_path, capsys):
    folder = write(tmp_path / "run", GRPO)
    folder.chmod(0o500)
    try:
        assert main(["plot", str(folder)]) == 2
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "run", GRPO)
    # matplotlib is installed here: that it is not is all that is pretended.
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert main(["plot", str(folder)]) == 2
    assert 'pip install "safe-trainers[plots]"' in capsys.readouterr().err


def test_a_suffix_in_capitals_is_one(tmp_path):
    folder = write(tmp_path / "run", GRPO)
    assert main(["plot", str(folder), "--output", str(tmp_path / "x.PNG")]) == 0
    assert (tmp_path / "x.PNG").read_bytes().startswith(PNG)

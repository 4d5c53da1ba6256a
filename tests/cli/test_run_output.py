"""What a training command prints and writes while it runs, and how it ends: real processes, terminals and signals."""

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import yaml

from safe_trainers.cli.signals import StopSignals
from safe_trainers.cli.stop import StopAtStep
from safe_trainers.recipes.schema import installed, load
from upstream import needs_transformers_5


RECIPE = {
    "model_name_or_path": "tiny:reward", "dataset_name": "tiny:preferences", "precision": "bf16", "use_cpu": True,
    "max_steps": 400, "dataset_size": 64, "evaluation_size": 0, "per_device_train_batch_size": 4, "logging_steps": 1,
    "report_to": "none", "disable_tqdm": True, "output_dir": "out", "save_strategy": "no",
}  # fmt: skip
SLOW = {
    "model_name_or_path": "tiny:text", "dataset_name": "data.jsonl", "reward_funcs": ["rewarding.reward"],
    "num_generations": 2, "max_completion_length": 4,
}  # fmt: skip
REWARD = """
import time

calls = []

def reward(completions, **kwargs):
    calls.append(1)
    {body}
    return [0.0] * len(completions)
"""
PROGRAM = [sys.executable, "-m", "safe_trainers.cli"]


def control_terminal():
    """Makes standard input the controlling terminal, so that Ctrl-C on it sends SIGINT."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Process:
    """A training command in a folder of its own, with pipes or on a terminal of 80 columns."""

    def __init__(self, folder, arguments, terminal):
        environment = {**os.environ, "PYTHONPATH": str(folder), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        self.text, self.decode = "", codecs.getincrementaldecoder("utf-8")().decode
        self.output, child = pty.openpty() if terminal else os.pipe()
        if terminal:
            fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], cwd=folder, env=environment, stdin=child if terminal else subprocess.DEVNULL,
            stdout=child, stderr=child, start_new_session=True, preexec_fn=control_terminal if terminal else None,  # noqa: PLW1509
        )  # fmt: skip
        os.close(child)

    def read_until(self, pattern, seconds=120):
        """Reads the output until it matches; returns the match."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            assert self._read(end - time.monotonic()), f"{pattern!r} is not in:\n{self.text}"
        return found

    def wait(self, seconds=120):
        """Reads the output to its end; returns the exit status."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(max(1, end - time.monotonic()))

    def _read(self, seconds):
        ready, _, _ = select.select([self.output], [], [], max(0, seconds))
        assert ready, f"nothing was printed in time after:\n{self.text}"
        try:
            read = os.read(self.output, 65536)
        except OSError:  # the terminal was closed
            return False
        self.text += self.decode(read)
        return bool(read)

    def lines(self):
        """The lines without escape sequences, and without what was erased."""
        lines = [line.rpartition("\x1b[2K")[2] for line in self.text.split("\n")]
        return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", line) for line in lines[:-1]]


@pytest.fixture
def start(tmp_path):
    begun = []

    def run(*arguments, terminal=False, task="reward", body="", **changes):
        values = RECIPE | (SLOW if task == "grpo" else {}) | changes
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        (tmp_path / "data.jsonl").write_text('{"prompt": "a", "solution": "b"}\n' * 64)
        (tmp_path / "rewarding.py").write_text(REWARD.format(body=body or "pass"))
        begun.append(Process(tmp_path, [task, "--config", "recipe.yaml", *arguments], terminal))
        return begun[-1]

    yield run
    for process in begun:
        process.process.kill()
        process.process.wait()
        os.close(process.output)


def entries(folder):
    return [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]


STEP = r"reward {}/\d+ .*loss "


def test_a_run_in_a_pipe_prints_each_log_as_it_comes(start, tmp_path):
    run = start()
    run.read_until(STEP.format(3))
    assert run.process.poll() is None
    lines = [line for line in run.lines() if re.match(r"reward \d+/400 ", line)]
    assert [line.split()[1] for line in lines[:3]] == ["1/400", "2/400", "3/400"]
    assert "\x1b" not in run.text
    assert re.search(r"  left \d:\d\d:\d\d$", lines[1])
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    assert [entry["step"] for entry in entries(tmp_path)][:3] == [1, 2, 3]
    assert not (tmp_path / "out" / "log.json").exists()
    done = subprocess.run([*PROGRAM, "plot", "out"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "plot out/plot.png\n"), done.stderr


def test_a_line_that_was_cut_by_a_kill_is_left_out(start, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.jsonl").write_text('{"loss": 1.0, "step": 1}\n{"loss": 0.5, "st')
    done = subprocess.run([*PROGRAM, "plot", "out"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "plot out/plot.png\n"), done.stderr
    (tmp_path / "out" / "log.jsonl").write_text('{"loss": 1.0, "st\n{"loss": 0.5, "step": 2}\n')
    done = subprocess.run([*PROGRAM, "plot", "out"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: out/log.jsonl cannot be read: line 1: ")


def test_the_first_line_comes_before_torch_is_imported(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-X", "importtime", *PROGRAM[1:], "reward", "--config", "recipe.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    if any(installed(package) != version for package, version in load("reward").versions.items()):
        pytest.skip("no schema of recipes was written for this transformers, so that TRL is imported to check them")
    reading, importing = (done.stderr.index(text) for text in ("reading recipe recipe.yaml\n", "importing torch"))
    first = re.search(r"\| +torch\n", done.stderr).start()
    assert reading < importing < first
    assert "loading model tiny:reward\n" in done.stderr[first:]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_a_step_and_the_printed_command_resumes(number, status, start, tmp_path):
    run = start("--learning_rate", "1e-5", "--resume_from_checkpoint", "false")
    run.read_until(STEP.format(2))
    run.process.send_signal(number)
    assert run.wait() == status
    name = signal.Signals(number).name
    assert f"{name}: stopping after this step; a second signal stops at once" in run.lines()
    (step,) = [int(found) for found in re.findall(rf"stopped by {name} after step (\d+) of 400", run.text)]
    assert f"checkpoint  out/checkpoint-{step}" in run.lines()
    assert "plot        out/plot.png" in run.lines()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    command = run.read_until(r"resume with: (.*)\n")[1]
    assert shlex.split(command)[-2:] == ["--resume", f"out/checkpoint-{step}"]
    assert "resume_from_checkpoint" not in command
    done = subprocess.run(
        f"{command} --max_steps {step + 2}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [entry["step"] for entry in entries(tmp_path) if "loss" in entry] == list(range(1, step + 3))


def test_a_signal_in_the_last_step_ends_after_the_results_are_written(start, tmp_path):
    body = "import os, signal; len(calls) == 2 and os.kill(os.getpid(), signal.SIGTERM)"
    run = start("--max_steps", "2", task="grpo", body=body)
    assert run.wait() == 143
    assert "resume with" not in run.text
    assert "stopped by SIGTERM" not in run.text
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert [entry["step"] for entry in entries(tmp_path) if "loss" in entry] == [1, 2]


def test_a_second_signal_stops_at_once(start, tmp_path):
    run = start(task="grpo", body="time.sleep(0 if len(calls) < 3 else 3600)")
    run.read_until(r"grpo 2/400 ")
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    run.read_until("stopping after this step")
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(10) == 130
    assert "Traceback" not in run.text
    assert not list(tmp_path.glob("out/checkpoint-*"))
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2]


def test_the_same_signal_within_half_a_second_counts_once(start, tmp_path):
    """`timeout` signals its child, and then its process group, to which the child belongs."""
    run = start()
    run.read_until(STEP.format(2))
    run.process.send_signal(signal.SIGTERM)
    run.read_until("stopping after this step|stopped by")
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_a_signal_before_training_ends_at_once_and_leaves_nothing(start, tmp_path):
    run = start()
    run.read_until("loading model")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(20) == 143
    assert "Traceback" not in run.text
    assert not (tmp_path / "out").exists()


CURSOR_OFF, CURSOR_ON = "\x1b[?25l", "\x1b[?25h"


def test_ctrl_c_leaves_the_terminal_as_it_was(start):
    run = start(terminal=True)
    run.read_until(r"[1-9]\d*/400")
    os.write(run.output, b"\x03")
    assert run.wait() == 130
    assert run.text.rfind(CURSOR_OFF) < run.text.rfind(CURSOR_ON) < run.text.rfind("stopped by SIGINT")
    lines = run.lines()
    assert any(re.fullmatch(r"checkpoint  out/checkpoint-\d+", line) for line in lines)
    assert lines[-1].startswith("resume with: ")
    assert "SIGINT: stopping after this step" in run.text


def test_a_crash_leaves_the_terminal_as_it_was(start):
    run = start(terminal=True, task="grpo", body="time.sleep(1); 1 / (len(calls) < 3)")
    assert run.wait() == 1
    assert run.text.rfind(CURSOR_OFF) < run.text.rfind(CURSOR_ON) < run.text.rfind("Traceback")
    assert "Traceback (most recent call last):" in run.lines()  # at the beginning of a line
    assert "ZeroDivisionError" in run.text


def test_the_report_is_printed_above_the_bar(start):
    run = start("--max_steps", "30", terminal=True)
    assert run.wait() == 0
    report = next(line for line in run.lines() if "precision report: SafeRewardTrainer" in line)
    assert report == "precision report: SafeRewardTrainer"


@needs_transformers_5("loads no optimizer state to the device `cpu:0`")
def test_two_processes_stop_at_the_same_step(start, tmp_path):
    run = start("--num_processes", "2")
    run.read_until(STEP.format(2))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    (step,) = [int(found) for found in re.findall(r"stopped by SIGTERM after step (\d+) of 400", run.text)]
    assert list(tmp_path.glob("out/checkpoint-*")) == [tmp_path / "out" / f"checkpoint-{step}"]
    assert "\nerror" not in run.text
    command = run.read_until(r"resume with: (.*)\n")[1]
    assert shlex.split(command)[-4:] == ["--num_processes", "2", "--resume", f"out/checkpoint-{step}"]
    done = subprocess.run(
        f"{command} --max_steps {step + 1}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [entry["step"] for entry in entries(tmp_path) if "loss" in entry] == list(range(1, step + 2))


def test_a_signal_for_one_of_two_processes_stops_both(start, tmp_path):
    """As a scheduler sends it that ends one task."""
    import psutil

    run = start("--num_processes", "2")
    run.read_until(STEP.format(2))
    ranks = [child for child in psutil.Process(run.process.pid).children() if "launched" in " ".join(child.cmdline())]
    last = max(ranks, key=lambda child: int(child.environ()["RANK"]))
    last.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert re.search(r"stopped by SIGTERM after step (\d+) of 400", run.text)


def test_a_second_signal_kills_two_processes(start, tmp_path):
    import psutil

    run = start("--num_processes", "2", task="grpo", body="time.sleep(0 if len(calls) < 3 else 3600)")
    run.read_until(r"grpo 2/400 ")
    children = psutil.Process(run.process.pid).children(recursive=True)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    run.read_until("stopping after this step")
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    assert "Traceback" not in run.text
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_a_library_swallows_before_training_ends_it_when_it_begins(number, error):
    with StopSignals() as signals:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        with pytest.raises(error):
            StopAtStep(signals).on_train_begin(None, None, None)

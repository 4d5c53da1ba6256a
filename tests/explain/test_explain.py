"""`safe-trainers explain`: of whatever is pasted, the error that stopped the run comes first."""

import io
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_trainers.cli.main import main
from safe_trainers.explain.entry import ANY
from safe_trainers.explain.known_errors import upstream_entries
from safe_trainers.explain.log_reader import MAX_BYTES, clean, decode, explain, report
from safe_trainers.report.render import to_json


CONV = (
    "Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same or input should be a MKLDNN "
    "tensor and weight is a dense tensor"
)
TRACEBACK = f"""Traceback (most recent call last):
  File "/home/u/train.py", line 12, in <module>
    trainer.train()
  File "/home/u/.venv/lib/python3.11/site-packages/torch/nn/modules/conv.py", line 548, in _conv_forward
    return F.conv2d(
           ^^^^^^^^^
RuntimeError: {CONV}
"""
LAUNCHER = """Traceback (most recent call last):
  File "/home/u/.venv/bin/trl", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/home/u/.venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 999, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/home/u/.venv/bin/python', 'grpo.py']' returned non-zero exit status 1.
"""


SUMMARY = """W1125 16:56:02.561000 60 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 64 closing signal SIGTERM
E1125 16:56:02.594000 60 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 65) of binary: python
Traceback (most recent call last):
  File "/home/u/.venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : {later} (pid: 64)
  traceback : {later_text}
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 65)
  traceback : {first_text}
============================================================
"""  # noqa: E501
"""What torch's launcher prints about two processes, the first of which it has not ended itself."""
FAILED = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
TERMINATED = "Signal 15 (SIGTERM) received by PID 64"


def ids(text):
    return [found.entry.id for found in explain(text).found]


def ranked(text, rank):
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "plain": CONV,
        "with its class": f"RuntimeError: {CONV}",
        "traceback": TRACEBACK,
        "half of it": CONV[:84],
        "other dtypes": "Input type (torch.cuda.HalfTensor) and weight type (torch.FloatTensor) should be the same",
        "colours": f"\x1b[1m\x1b[31mRuntimeError\x1b[0m: \x1b[35m{CONV}\x1b[0m",
        "wrapped": "RuntimeError: Input type (torch.FloatTensor) and\n"
        "    weight type (CPUBFloat16Type) should be th\ne same",
        "windows": TRACEBACK.replace("\n", "\r\n"),
        "rank": ranked(TRACEBACK, 3),
        "torchrun": "".join(f"[default1]:{line}\n" for line in TRACEBACK.splitlines()),
        "ray": "".join(f"(WorkerDict pid=1910872) {line}\n" for line in TRACEBACK.splitlines()),
        "srun": "".join(f"7: {line}\n" for line in TRACEBACK.splitlines()),
        "mpi": "".join(f"[1,0]<stderr>:{line}\n" for line in TRACEBACK.splitlines()),
        "vllm": f"(EngineCore_0 pid=41) ERROR 10-02 11:22:33 [core.py:718] RuntimeError: {CONV}",
        "quoted": "".join(f"> {line}\n" for line in TRACEBACK.splitlines()),
        "pytest": f"E   RuntimeError: {CONV}",
        "rich": "╭─── Traceback (most recent call last) ───╮\n│ 12 trainer.train() │\n╰───╯\nRuntimeError: " + CONV,
        "after a bar": f" 10%|█         | 1/10 [00:01<00:09]\rRuntimeError: {CONV}",
        "before a bar": f"RuntimeError: {CONV}\n 10%|█         | 1/10 [00:01<00:09]",
        "notebook": "RuntimeError           Traceback (most recent call last)\n<ipython-input-3> in <module>\n"
        f"----> 7 trainer.train()\n\nRuntimeError: {CONV}",
    }.items(),
)
def test_a_message_is_found_however_it_is_pasted(name, text):
    assert ids(text) == ["conv-dtypes"], name
    assert explain(text).explained


def test_lines_keep_their_numbers():
    log = "first\n\x1b[31msecond\x1b[0m\n" + TRACEBACK
    (found,) = explain(log).found
    assert log.splitlines()[found.line - 1].startswith("RuntimeError: Input type")
    assert clean(log).count("\n") == log.count("\n")


def test_a_launcher_does_not_bury_the_error_of_its_child():
    said = explain(TRACEBACK + LAUNCHER)
    assert [found.entry.id for found in said.found] == ["conv-dtypes", "child-failed"]
    assert said.subject.startswith("RuntimeError: Input type")


def test_an_unknown_error_of_a_child_is_named_and_not_its_launcher():
    said = explain(TRACEBACK.replace(CONV, "the moon is full") + LAUNCHER)
    assert not said.explained
    assert said.subject == "RuntimeError: the moon is full"
    assert [found.entry.id for found in said.found] == ["child-failed"]


def test_of_a_chain_the_first_is_the_cause():
    second = "ValueError: At most one of fp16 and bf16 can be True, but not both"
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert ids(TRACEBACK + link + f"Traceback (most recent call last):\n{second}\n") == [
        "conv-dtypes",
        "both-half-flags",
    ]
    # The first may be no one's: what came of it is known.
    unknown = "Traceback (most recent call last):\nKeyError: 'x'\n"
    assert ids(unknown + link + TRACEBACK) == ["conv-dtypes"]
    assert explain(unknown + link + TRACEBACK).explained


def test_of_separate_errors_the_last_is_the_cause():
    first = "Traceback (most recent call last):\nValueError: Attempting to unscale FP16 gradients.\n\nretrying\n\n"
    assert ids(first + TRACEBACK) == ["conv-dtypes", "unscale-fp16-gradients"]
    said = explain(first + TRACEBACK.replace(CONV, "the moon is full"))
    assert not said.explained
    assert [found.entry.id for found in said.found] == ["unscale-fp16-gradients"]


def test_of_several_ranks_the_first_that_fails_is_the_cause():
    lost = "Traceback (most recent call last):\ntorch.distributed.DistBackendError: connection reset by peer\n"
    said = explain(ranked(TRACEBACK, 1) + ranked(lost, 0) + LAUNCHER)
    assert said.explained
    assert said.found[0].entry.id == "conv-dtypes"


def test_the_same_error_of_each_rank_counts_once():
    (found,) = explain("".join(ranked(TRACEBACK, rank) for rank in range(4))).found
    assert found.times == 4


def test_a_special_text_hides_the_general_one_inside_it():
    text = "NotImplementedError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
    assert ids(text) == ["unscale-bf16-gradients"]
    assert ids(text.replace("_amp_foreach_non_finite_check_and_unscale_cuda", "geqrf_cpu")) == ["no-half-kernel"]


def test_warnings_come_after_errors():
    warning = "`torch_dtype` is deprecated! Use `dtype` instead!\n"
    assert ids(warning + TRACEBACK) == ["conv-dtypes", "deprecated-torch-dtype"]


def test_code_in_a_traceback_is_no_message():
    frame = '  File "a.py", line 3, in f\n    raise ValueError("Attempting to unscale FP16 gradients.")\n'
    text = f"Traceback (most recent call last):\n{frame}KeyError: 'moon'\n"
    assert "unscale-fp16-gradients" not in ids(text)
    assert explain(text).subject == "KeyError: 'moon'"


# --- the command -----------------------------------------------------------------------------------------------------


def test_it_prints_cause_and_fix(capsys):
    assert main(["explain", "Attempting to unscale FP16 gradients."]) == 0
    said = " ".join(capsys.readouterr().out.split())
    entry = upstream_entries()["unscale-fp16-gradients"]
    assert entry.cause in said
    assert f"fix: {entry.fix}" in said


def test_words_need_no_quotes(capsys):
    assert main(["explain", "Attempting", "to", "unscale", "FP16", "gradients."]) == 0


def test_json_of_a_log_file(capsys, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(TRACEBACK + LAUNCHER)
    assert main(["explain", str(file), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    known = list(dict.fromkeys(verdict["id"] for verdict in made["verdicts"]))
    assert known == ["conv-dtypes", "child-failed"], "each possible cause is a verdict with the id of its entry"
    assert made["tables"]["known errors"][0] == {"id": "conv-dtypes", "package": "torch", "line": 7, "times": 1}


def test_a_file_in_utf_16(capsys, tmp_path):
    file = tmp_path / "train.log"
    file.write_bytes(TRACEBACK.encode("utf-16"))
    assert main(["explain", str(file)]) == 0
    assert "conv-dtypes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["my job.stderr", "job 17", "slurm-1.e1"])
def test_a_file_of_any_name(name, capsys, tmp_path):
    file = tmp_path / name
    file.write_text(TRACEBACK)
    assert main(["explain", str(file)]) == 0
    assert "conv-dtypes" in capsys.readouterr().out


def test_what_is_not_known_is_said_with_the_nearest(capsys):
    assert main(["explain", "RuntimeError: query, key and value of another kind"]) == 1
    said = capsys.readouterr().out
    assert "not in the catalogue; the nearest are" in said
    assert "attention-dtypes" in said
    assert main(["explain", "RuntimeError: the moon is full"]) == 1
    assert "not in the catalogue, nor one like it" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["", "   \n\t ", "\x00\x00"])
def test_nothing_is_one_clear_error(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert main(["explain"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the input is empty. Write: ")
    assert said.count("\n") == 1
    if "\x00" not in given:  # a command line cannot have it
        assert main(["explain", given]) == 2
        assert capsys.readouterr().err == said


def test_a_file_that_is_not_there_names_the_nearest(capsys, tmp_path):
    (tmp_path / "train.log").write_text(TRACEBACK)
    assert main(["explain", str(tmp_path / "trian.log")]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_processes_that_a_launcher_ended_are_not_the_cause():
    ended = {"later": "-15", "later_text": TERMINATED}
    said = explain(TRACEBACK + SUMMARY.format(**ended, first="1", first_text=FAILED))
    assert [(found.entry.id, found.times) for found in said.found] == [("conv-dtypes", 1), ("rank-failed", 1)]
    assert said.subject == f"RuntimeError: {CONV}"
    # A first failure that is a signal came from outside.
    assert ids(SUMMARY.format(**ended, first="-15", first_text=TERMINATED)) == ["stopped-by-a-signal", "rank-failed"]


def test_it_reads_a_pipe_and_imports_nothing_that_takes_seconds():
    code = "import sys; from safe_trainers.cli.main import main; s = main(['explain']); print(s, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=TRACEBACK, capture_output=True, text=True, check=True)
    status, *modules = done.stdout.splitlines()[-1].split()
    assert status == "0"
    assert not {"torch", "trl", "transformers", "datasets", "peft", "accelerate", "numpy"} & set(modules)


def test_a_log_of_many_megabytes():
    line = "[rank1]: {'loss': '0.1', 'grad_norm': '1.2'}\x1b[0m Input type (x) [abc-def] and more of the same\n"
    log = line * (2 * MAX_BYTES // len(line)) + TRACEBACK + LAUNCHER
    began = time.process_time()
    said = explain(decode(log.encode()))
    assert time.process_time() - began < 3  # about 0.5 s on a machine that is idle
    assert [found.entry.id for found in said.found] == ["conv-dtypes", "child-failed"]


@pytest.mark.parametrize(
    "line", ["a", "a.", "\n", "Input type (", "KeyError: {}\n", '  File "a", line 1\n    x\n', "│ ", "[a-b]", "\x1b["]
)
def test_no_log_takes_long(line):
    # What each of the patterns begins with, over and over.
    log = "".join(line.format(number) for number in range(MAX_BYTES // 4 // len(line)))
    began = time.process_time()
    explain(log)
    assert time.process_time() - began < 3  # 0.1 to 0.4 s on a machine that is idle


SPECIFIC = sorted(key for key, entry in upstream_entries().items() if not entry.general)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=400), st.binary(max_size=400), st.sampled_from(SPECIFIC))
def test_junk_around_a_message_hides_nothing(before, after, key):
    text = upstream_entries()[key].messages[0].replace(ANY, "Float")
    raw = b"x" + before + b"\n\n" + text.encode() + b"\n\n" + after
    assert key in ids(decode(raw))


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=300))
def test_whatever_is_given_is_explained_or_not(text):
    said = explain(text)
    assert said.found or not said.explained
    assert report(said).exit_status == (0 if said.explained else 1)
    assert json.loads(to_json(report(said)))["title"] == "explanation"


def test_a_word_that_is_no_file_is_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "KeyboardInterrupt"]) == 1


def test_a_long_word_is_a_message_and_no_file(capsys):
    assert main(["explain", "a" * 400]) == 1
    assert "not in the catalogue" in capsys.readouterr().out


def test_the_first_words_of_a_message_are_enough(capsys):
    assert main(["explain", "CUDA", "out", "of", "memory"]) == 0
    assert "out-of-memory (torch)" in capsys.readouterr().out


def test_a_pipe_that_has_a_name():
    said = subprocess.run(
        [sys.executable, "-m", "safe_trainers.cli", "explain", "/dev/stdin"],
        input="CUDA out of memory.", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "out-of-memory (torch)" in said.stdout

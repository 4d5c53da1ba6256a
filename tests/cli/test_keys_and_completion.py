"""`safe-trainers keys`, and what TAB offers, quickly and without torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safe_trainers.cli.main import main
from safe_trainers.core.versions import stable_tasks
from safe_trainers.recipes.schema import LAUNCH, load


ROOT = Path(__file__).parents[2]


def keys(capsys, *words):
    assert main(["keys", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["tables"]["keys"]


@pytest.mark.parametrize("task", stable_tasks())
def test_every_key_of_a_task_is_listed_with_its_origin(task, capsys):
    rows = {row["key"]: row for row in keys(capsys, task)}
    assert set(rows) == {*load(task).keys, *LAUNCH}
    assert {row["from"] for row in rows.values()} == {"trl", "transformers", "safe_trainers"}
    assert (rows["seed"]["from"], rows["seed"]["default"], rows["seed"]["value"]) == (
        "transformers",
        "42",
        "an integer",
    )
    assert (rows["precision"]["from"], rows["lora_r"]["from"]) == ("safe_trainers", "trl")
    assert [name for name, row in rows.items() if not row["value"] or not row["default"]] == []
    assert sum(row["help"] is None for row in rows.values()) < 12


@pytest.mark.parametrize(("words", "found"), [
    (["sft", "learning"], {"learning_rate", "warm_up_learning_rate"}),
    (["grpo", "lora_r"], {"lora_r"}),
    (["learning_rate"], {"learning_rate", "warm_up_learning_rate"}),
    (["grpo", "*_learning_rate"], {"warm_up_learning_rate"}),
    (["grpo", "LORA-dropout"], {"lora_dropout"}),
    (["num_processes"], {"num_processes"}),
])  # fmt: skip
def test_a_part_of_a_name_or_a_pattern(words, found, capsys):
    assert {row["key"] for row in keys(capsys, *words)} == found


@pytest.mark.skipif("kto" not in stable_tasks(), reason="this TRL has no stable trainer of some tasks")
def test_keys_that_differ_between_tasks_are_listed_for_each(capsys):
    rows = {row["tasks"]: row["value"] for row in keys(capsys, "loss_type")}
    assert "sigmoid" in rows["dpo"]
    assert rows["sft"].startswith("one of nll, dft")
    assert {row["tasks"] for row in keys(capsys, "max_steps")} == {None}


@pytest.mark.parametrize(("words", "said"), [
    (["grpo", "learning_rte"], "grpo has no key like 'learning_rte'; did you mean 'learning_rate'?"),
    (["xyzzy"], "there is no key like 'xyzzy'"),
    (["gpro", "lora"], "there is no task 'gpro'; did you mean 'grpo'?"),
])  # fmt: skip
def test_names_that_fit_nothing(words, said, capsys):
    assert main(["keys", *words]) == 2
    assert said in capsys.readouterr().err


# --- completion ------------------------------------------------------------------------------------------------------


def complete(line, folder, code=""):
    """What TAB offers behind a line, as argcomplete's shell function asks for it."""
    script = f"import os\n{code}\nfrom safe_trainers.cli.main import run\nrun()\n"
    (folder / "safe-trainers").write_text(script)
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1",
             "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "out"),
             "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(folder / "safe-trainers")], check=False, env=os.environ | asked, cwd=folder,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in (folder / "out").read_text().split("\n")]


@pytest.mark.parametrize(("line", "offered"), [
    ("safe-trainers val", ["validate"]),
    ("safe-trainers grpo --config grpo/tiny", ["grpo/tiny_vlm_bf16"]),
    ("safe-trainers grpo --config mi", ["mine.yaml"]),
    ("safe-trainers validate grpo/tiny", ["grpo/tiny_vlm_bf16"]),
    ("safe-trainers copy zero", ["zero2", "zero3"]),
    ("safe-trainers grpo --learning_", ["--learning_rate"]),
    ("safe-trainers grpo --config grpo/tiny_vlm_bf16 --num_gen", ["--num_generations", "--num_generations_eval"]),
    ("safe-trainers sft --loss_type ", ["nll", "dft"]),
    ("safe-trainers grpo --precision b", ["bf16", "bfloat16"]),
    ("safe-trainers grpo --bf16 ", ["true", "false"]),
    ("safe-trainers grpo --accelerate_config fs", ["fsdp2"]),
    ("safe-trainers keys grpo lora_d", ["lora_dropout"]),
    ("safe-trainers report --task di", ["distillation"]),
    ("safe-trainers bench --trainer trl:G", ["trl:GRPOTrainer"]),
    ("safe-trainers bench --only nan,res", ["nan,resume"]),
])  # fmt: skip
def test_commands_recipes_keys_and_values_are_completed(line, offered, tmp_path):
    (tmp_path / "mine.yaml").write_text("a: 1")
    (tmp_path / "mine.txt").write_text("a: 1")
    assert set(offered) <= set(complete(line, tmp_path))
    assert "mine.txt" not in complete(line, tmp_path)


def test_completion_is_quick_and_imports_neither_torch_nor_trl(tmp_path):
    code = (
        "import atexit, sys, time\nleave = os._exit\n"
        "def note(status):\n"
        "    open('modules', 'w').write(f'{time.process_time()} ' + ' '.join(sys.modules))\n"
        "    leave(status)\n"
        "os._exit = note\n"
    )
    start = time.monotonic()
    assert "--learning_rate" in complete("safe-trainers grpo --learning", tmp_path, code)
    seconds, *modules = (tmp_path / "modules").read_text().split()
    assert float(seconds) < 1  # of one core; usually a tenth
    assert time.monotonic() - start < 30
    assert not {"torch", "trl", "transformers", "datasets", "peft", "accelerate"} & set(modules)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_for_a_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "safe-trainers" in capsys.readouterr().out


def test_bash_completes_with_the_code(tmp_path):
    """The whole way: bash runs the function of the code, which runs the program."""
    program = tmp_path / "safe-trainers"
    program.write_text(f"#!{sys.executable}\nfrom safe_trainers.cli.main import run\nrun()\n")
    program.chmod(0o755)
    script = (
        'eval "$(safe-trainers completion bash)"\n'
        "COMP_WORDS=(safe-trainers copy zer); COMP_CWORD=2; COMP_LINE='safe-trainers copy zer'; COMP_POINT=22\n"
        "COMP_TYPE=9; COMP_WORDBREAKS=' '\n"
        "_python_argcomplete safe-trainers zer copy\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], check=True, env=os.environ | path, capture_output=True, text=True)
    assert done.stdout.split() == ["zero2", "zero3"], done.stderr

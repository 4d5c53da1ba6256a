"""`validate --fix`, `validate -`, and fixes that can be typed as they stand."""

import io
import os
import re
import shlex
import stat
import sys
from collections import Counter
from pathlib import Path

import pytest

from safe_trainers import RecipeError
from safe_trainers.cli.main import main
from safe_trainers.recipes.fix import fix, save
from safe_trainers.recipes.validate import validate


GOOD = """\
# my run
model_name_or_path: tiny:llava   # the model
dataset_name: tiny:shapes
reward_funcs:  # what is rewarded
  - safe_trainers.tiny.exact_match   # the answer

# batches
per_device_train_batch_size: 4
num_generations: 2
output_dir: out
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


FIXES = {
    "a renamed key, with its comment": ("torch_dtype: float32  # why", "dtype: float32  # why"),
    "a misspelt key": ("learning_rte: 1e-5", "learning_rate: 1e-5"),
    "a value of another type": ("max_steps: 4.0   # few", "max_steps: 4   # few"),
    "a flag": ("bf16: on_\nuse_cpu: 'off'", None),
    "a misspelt choice": ("loss_type: grop", "loss_type: grpo"),
    "an item of a list": ("report_to:\n  - wandb  # mine\n  - tensorbord  # too",
                          "report_to:\n  - wandb  # mine\n  - tensorboard  # too"),
    "an entry of a mapping": ("model_init_kwargs:\n  # inner\n  dtyp: float32  # why",
                              "model_init_kwargs:\n  # inner\n  dtype: float32  # why"),
    "a key of another task": ("packing: true  # sft\nseed: 1", "seed: 1"),
    "a key that is added": ("lora_r: 8\nseed: 1", "lora_r: 8\nuse_peft: true\nseed: 1"),
    "a variable of a tracker": ("wandb_project: mine\nenv:\n  OMP_NUM_THREADS: 2", None),
    "two settings": ("bf16: false\ndtype: float16", None),
    "a block of text": ("system_prompt: |\n  be kind\n  and short\nlearning_rte: 1e-5",
                        "system_prompt: |\n  be kind\n  and short\nlearning_rate: 1e-5"),
    "groups": ("!num_generations: 3", None),
}  # fmt: skip


def recipe(lines):
    if lines.startswith("!"):
        return re.sub(rf"^{lines[1:].partition(':')[0]}:.*$", lines[1:], GOOD, flags=re.MULTILINE)
    return GOOD + lines + "\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", FIXES)
def test_a_fix_changes_its_lines_only(name, newline):
    lines, expected = FIXES[name]
    text = recipe(lines).replace("\n", newline)
    Path("recipe.yaml").write_bytes(text.encode())
    fixed = fix(Path("recipe.yaml"), task="grpo")
    assert Path("recipe.yaml").read_bytes().decode() == text  # nothing is written yet
    left, before = (
        Counter(p.level for p in checked.problems) for checked in (fixed.checked, validate("recipe.yaml", task="grpo"))
    )
    assert (left["error"], left["warning"]) < (before["error"], before["warning"])
    assert fixed.done
    if expected is not None:
        assert fixed.after == recipe(expected).replace("\n", newline)
        assert fixed.checked.errors == ()
    kept = [line for line in text.splitlines() if "#" in line and "packing" not in line]
    after = fixed.after.splitlines()
    assert [line.partition("#")[2] for line in kept] == [line.partition("#")[2] for line in after if "#" in line]


def test_the_file_is_replaced_and_a_copy_is_kept(capsys):
    path = Path("recipe.yaml")
    text = GOOD + "learning_rte: 1e-5  # why\nhub_token: x\n"
    path.write_text(text)
    path.chmod(0o640)
    assert main(["validate", "recipe.yaml", "--task", "grpo", "--fix"]) == 2
    shown = capsys.readouterr().out
    assert "-learning_rte: 1e-5  # why\n+learning_rate: 1e-5  # why\n" in shown
    assert "1 fixed in recipe.yaml; the file before: " in shown
    assert "a token is a secret" in shown  # what cannot be fixed is printed
    assert Path("recipe.yaml.bak").read_text() == text
    assert path.read_text() == text.replace("learning_rte", "learning_rate")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.write_text(text)
    assert main(["validate", "recipe.yaml", "--task", "grpo", "--fix"]) == 2
    assert sorted(p.name for p in Path().iterdir()) == ["recipe.yaml", "recipe.yaml.bak", "recipe.yaml.bak1"]
    # A good file is left alone.
    capsys.readouterr()
    path.write_text(GOOD)
    assert main(["validate", "recipe.yaml", "--task", "grpo", "--fix"]) == 0
    assert "fixed" not in capsys.readouterr().out
    assert len(list(Path().iterdir())) == 3


def test_a_link_stays_a_link():
    Path("real").mkdir()
    Path("real/recipe.yaml").write_text(GOOD + "learning_rte: 1e-5\n")
    Path("recipe.yaml").symlink_to("real/recipe.yaml")
    assert main(["validate", "recipe.yaml", "--task", "grpo", "--fix"]) == 0
    assert Path("recipe.yaml").is_symlink()
    assert "learning_rate: 1e-5" in Path("real/recipe.yaml").read_text()


def test_a_file_that_cannot_be_written_is_as_it_was(monkeypatch):
    path = Path("recipe.yaml")
    path.write_text(GOOD)

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RecipeError, match=r"cannot be written: No space left on device\. It was not changed"):
        save(path, "a: 1\n")
    assert path.read_text() == GOOD
    assert sorted(p.name for p in Path().iterdir()) == ["recipe.yaml", "recipe.yaml.bak"]


@pytest.mark.parametrize("text", [
    "{model_name_or_path: tiny:llva, dataset_name: tiny:shapes}", "a: [", "- 1", "a: &x 1\nb: *x\nlearning_rte: 1",
    "\ufefflearning_rte: 1\n", "seed: 1\nseed: 2\nlearning_rte: 1\n", "", "reward_funcs:\n  - x # why\n  - 1.5.x\n",
])  # fmt: skip
def test_a_file_that_is_no_plain_recipe_is_fixed_or_left_alone(text):
    """Whatever is changed is read back as meant; the rest is printed."""
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    fixed = fix(Path("recipe.yaml"), task="sft")
    if fixed.after != text:
        assert fixed.after == text.replace("learning_rte", "learning_rate")
    assert fixed.checked.problems


def test_examples_and_decisions_are_left_to_the_user():
    Path("recipe.yaml").write_text("learning_rate: 1e-5\nhub_token: x\nrun_name: ..\n")
    fixed = fix(Path("recipe.yaml"), task="grpo")
    assert fixed.done == ()
    assert "model_name_or_path is missing" in str([problem.text for problem in fixed.checked.problems])


def test_a_recipe_of_unknown_task_is_fixed_in_what_its_tasks_share():
    Path("recipe.yaml").write_text(GOOD + "learning_rte: 1e-5\n")
    fixed = fix(Path("recipe.yaml"))
    assert "learning_rate: 1e-5" in fixed.after


@pytest.mark.parametrize(("name", "said"), [
    ("-", "--fix changes files, and - is standard input"),
    ("grpo/tiny_vlm_bf16", "For a packaged recipe, run: safe-trainers copy grpo/tiny_vlm_bf16"),
])  # fmt: skip
def test_only_files_are_fixed(name, said, capsys):
    assert main(["validate", name, "--fix"]) == 2
    assert said in capsys.readouterr().err


def test_standard_input_is_checked(monkeypatch, capsys):
    class Input:
        buffer = io.BytesIO((GOOD + "learning_rte: 1\n").encode())

    monkeypatch.setattr(sys, "stdin", Input())
    assert main(["validate", "-", "--task", "grpo"]) == 2
    assert "-:11: there is no key 'learning_rte'; did you mean 'learning_rate'?" in capsys.readouterr().out


# --- fixes of the command line ---------------------------------------------------------------------------------------

OPTIONS = {
    "a choice": (["--loss_type", "grop"], "--loss_type grpo"),
    "a dtype": (["--precision", "bf61"], "--precision bf16"),
    "a mapping": (["--model_init_kwargs", '{"dtyp": "float32"}'], """--model_init_kwargs '{"dtype": "float32"}'"""),
    "a list": (["--report_to", "wandb", "tensorbord"], "--report_to wandb tensorboard"),
    "a flag": (["--use_peft", "off"], "--use_peft false"),
    "a key": (["--learning_rte", "1e-5"], "--learning_rate 1e-5"),
    "an older key": (["--torch_dtype", "float32"], "--dtype float32"),
    "nothing": (["--lora_r", "8"], "--use_peft true"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_wrong_on_the_command_line_is_fixed_there(name, capsys):
    words, expected = OPTIONS[name]
    Path("recipe.yaml").write_text(GOOD)
    checked = validate("recipe.yaml", task="grpo", overrides=words)
    (problem,) = checked.errors
    assert f"on the command line: {problem.text}. Write: {expected}" in problem.line()
    # The fix is valid when it is typed.
    typed = shlex.split(expected)
    kept = words if typed[0] == "--use_peft" and words[0] == "--lora_r" else []
    assert validate("recipe.yaml", task="grpo", overrides=[*kept, *typed]).errors == ()
    assert main(["grpo", "--config", "recipe.yaml", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_contradiction_of_an_option_is_fixed_as_an_option():
    Path("recipe.yaml").write_text(GOOD + "precision: fp16\n")
    checked = validate("recipe.yaml", task="grpo", overrides=["--bf16", "true"])
    (problem,) = checked.errors
    assert problem.line().startswith("on the command line: precision='fp16' (fp16) with bf16=True: ")
    assert "Drop `--bf16 true`, or drop " in problem.line()


def test_fixes_of_a_file_are_yaml():
    Path("recipe.yaml").write_text(GOOD + "learning_rte: 1e-5\n")
    (problem,) = validate("recipe.yaml", task="grpo").errors
    assert problem.line().endswith("Write: learning_rate: 1e-5")
    assert os.environ.get("WORLD_SIZE") is None

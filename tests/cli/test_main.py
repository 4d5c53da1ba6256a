"""The command line as a whole: which commands there are, and what a wrong name is answered with."""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trl

from safe_trainers.cli.main import COMMANDS, main
from safe_trainers.core.tasks import EXPERIMENTAL, TASKS
from safe_trainers.core.versions import stable_tasks
from safe_trainers.recipes.validate import split_config
from upstream import needs_trl_1


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"^    {name}\b", shown, re.MULTILINE)] == []


@pytest.mark.parametrize(("given", "near"), [("vlidate", "validate"), ("GRPO", "grpo"), ("docter", "doctor")])
def test_an_unknown_command_gets_the_nearest(given, near, capsys):
    assert main([given, "--config", "x"]) == 2
    assert capsys.readouterr().err == f"error: there is no command {given!r}; did you mean {near!r}?\n"


def test_a_command_that_is_like_none(capsys):
    assert main(["xyzzy"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'xyzzy'. Run: safe-trainers\n"
    assert main(["recipe.yaml"]) == 2
    assert "Run: safe-trainers validate recipe.yaml, or safe-trainers TASK" in capsys.readouterr().err


@needs_trl_1("has experimental trainers among the stable ones")
def test_every_stable_trainer_has_a_command():
    stable = {name.removesuffix("Trainer") for name in dir(trl) if name.endswith("Trainer")}
    assert stable == {TASKS[task].algorithm for task in stable_tasks()}
    assert set(TASKS) <= set(COMMANDS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # TRL's notice of experimental trainers
def test_every_experimental_trainer_is_known_by_its_classes():
    from trl import experimental

    for found in pkgutil.iter_modules(experimental.__path__):
        if not found.ispkg or found.name in TASKS:
            continue
        source = "".join(path.read_text() for path in Path(found.module_finder.path, found.name).glob("*.py"))
        classes = {name for name in re.findall(r"^class (\w+)Trainer\b", source, re.MULTILINE)}
        algorithms = {task.algorithm for task in TASKS.values()}
        assert classes - algorithms <= {EXPERIMENTAL.get(found.name)}, found.name


def test_an_experimental_trainer_gets_its_lines_in_python(capsys):
    assert main(["cpo", "--config", "x"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: cpo is an experimental trainer of TRL, which has no command. In Python:\n")
    lines = "\n".join(line.strip() for line in shown.splitlines()[1:])
    Path("lines.py").write_text(lines + "\nprint(issubclass(SafeCPOTrainer, CPOTrainer))\n")
    done = subprocess.run([sys.executable, "lines.py"], check=False, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("True\n"), done.stderr
    assert main(["ppo"]) == 2
    assert "from trl.experimental.ppo import PPOTrainer" in capsys.readouterr().err


def test_packaged_recipes_are_found_by_name(capsys):
    for name in ("grpo/tiny_vlm_bf16", "grpo/tiny_vlm_bf16.yaml", "recipes/grpo/tiny_vlm_bf16.yaml"):
        path, rest = split_config(["--config", name, "--seed", "1"])
        assert path.is_file()
        assert path.parts[-2:] == ("grpo", "tiny_vlm_bf16.yaml")
        assert rest == ["--seed", "1"]
    assert main(["grpo", "--config", "grpo/tiny_vlm_bf61"]) == 2
    message = "there is no file and no recipe grpo/tiny_vlm_bf61; did you mean 'grpo/tiny_vlm_bf16.yaml'?"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"
    assert main(["grpo", "--config", "tiny_vlm_bf16"]) == 2
    assert "is the name of distillation/tiny_vlm_bf16.yaml, dpo/tiny_vlm_bf16.yaml, " in capsys.readouterr().err
    Path("mine.yaml").write_text("a: 1")
    assert split_config(["--config", "mine.yaml"])[0] == Path("mine.yaml")


def environment():
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def test_a_packaged_name_is_trained(tmp_path):
    """The command of the README, in a folder without recipes."""
    options = [
        "--max_steps",
        "1",
        "--warm_up_steps",
        "0",
        "--evaluation_size",
        "0",
        "--per_device_train_batch_size",
        "8",
    ]
    command = [sys.executable, "-m", "safe_trainers.cli", "grpo", "--config", "grpo/tiny_vlm_bf16", *options]
    done = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "tiny_vlm_bf16" / "log.json").is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_into_80_columns_except_lines_to_copy(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    _, _, rest = shown.partition("\n\n")  # argparse does not wrap the choices of an option in the usage
    wide = [line for line in rest.splitlines() if len(line) > 80 and "  safe-trainers " not in line]
    assert wide == []
    parser = argparse.ArgumentParser()
    importlib.import_module(f"safe_trainers.cli.{COMMANDS[name].module}").add_arguments(parser)
    for line in (parser.epilog or "").splitlines():
        assert " ".join(line.split()) in " ".join(shown.split())  # nothing is lost


def test_an_example_of_two_lines_is_one_command_of_a_shell(capsys):
    with pytest.raises(SystemExit):
        main(["sft", "--help"])
    assert "--num_processes 16 \\\n    --num_machines 2 " in capsys.readouterr().out

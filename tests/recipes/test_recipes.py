"""Recipes are read strictly: what is wrong is said once, clearly, before anything is written."""

import errno
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from trl import ModelConfig, get_quantization_config

from safe_trainers import PrecisionError, RecipeError, SafeSFTTrainer, tiny
from safe_trainers.cli import main as program
from safe_trainers.cli.main import COMMANDS, build_parser, main
from safe_trainers.cli.run_recipe import run_recipe
from safe_trainers.core.tasks import TASKS
from safe_trainers.core.versions import stable_tasks
from safe_trainers.recipes import rules
from safe_trainers.recipes import validate as validation
from safe_trainers.recipes.load import check_columns, load_rewards, read_recipe
from safe_trainers.recipes.packaged import find
from safe_trainers.recipes.yaml_file import read_file
from safe_trainers.trainer import base, from_config


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
RUNNABLE = [path for path in RECIPES if "trackio" not in path.name or importlib.util.find_spec("trackio")]
GOOD = {
    "model_name_or_path": "tiny:llava",
    "dataset_name": "tiny:shapes",
    "reward_funcs": ["safe_trainers.tiny.exact_match"],
    "needs_images": True,
    "precision": "fp32",
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "report_to": "none",
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**changes):
        values = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
        Path("recipe.yaml").write_text(yaml.safe_dump(values))
        return ["--config", "recipe.yaml"]

    return write


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.relative_to(ROOT / "recipes").as_posix())
def test_every_recipe_parses_strictly_and_has_a_header(path):
    task = path.parent.name
    if task not in stable_tasks():
        pytest.skip(f"this TRL has no stable trainer of {task}")
    read = read_recipe(task, ["--config", str(path), "--use_cpu", "true"])  # bf16 is refused without a GPU that has it
    assert read.task == task
    command = f"safe-trainers {task} --config recipes/{path.relative_to(ROOT / 'recipes')}"
    assert read_file(path).header[0] == command


def test_there_is_a_recipe_for_each_trainer():
    assert {path.parent.name for path in RECIPES} == set(TASKS)


def test_the_command_line_wins_over_the_file(recipe):
    read = read_recipe("grpo", [*recipe(learning_rate="1e-5"), "--learning_rate", "2e-5", "--max-steps=3"])
    assert read.training.learning_rate == 2e-5
    assert read.training.max_steps == 3
    assert read.training.bf16 is False
    assert read.extra.needs_images is True
    assert read_recipe("grpo", recipe(learning_rate="1e-5")).training.learning_rate == 1e-5


def test_dictionaries_and_nothing_reach_the_config(recipe):
    read = read_recipe("grpo", recipe(precision="bf16", model_init_kwargs={"dtype": "bfloat16"}, epsilon_high=None))
    assert read.training.model_init_kwargs == {"dtype": "bfloat16"}
    assert read_recipe("sft", recipe(reward_funcs=..., num_generations=...)).script.dataset_name == "tiny:shapes"


BAD = {
    "misspelt key": (
        {"learning_rte": 1e-5},
        "recipe.yaml:2: there is no key 'learning_rte'; did you mean 'learning_rate'?",
    ),
    "two misspelt keys": (
        {"num_generation": 2, "per_device_batch_size": 4},
        "recipe.yaml:4: there is no key 'num_generation'; did you mean 'num_generations'?",
    ),
    "float for an integer": (
        {"num_generations": 4.0},
        "recipe.yaml:4: num_generations must be an integer, got 4.0. Write: num_generations: 4\n",
    ),
    "misspelt dtype": (
        {"dtype": "bflot16"},
        "recipe.yaml:2: dtype must be one of auto, bfloat16, float16, float32, got 'bflot16'. Write: dtype: bfloat16",
    ),
    "misspelt precision": ({"precision": "bf61"}, "fix: precision: bf16  [unknown-dtype]"),
    "contradicting flags": (
        {"precision": "fp16", "bf16": True},
        "fix: drop `bf16: true`, or drop `precision: fp16`  [precision-contradicts-flag]",
    ),
    "misspelt embedded model": (
        {"model_name_or_path": "tiny:llva"},
        "there is no embedded model 'tiny:llva'; did you mean 'tiny:llava'?",
    ),
    "missing model folder": (
        {"model_name_or_path": "./models/qwen"},
        "folder ./models/qwen has no model (config.json)",
    ),
    "missing model of one slash": ({"model_name_or_path": "models/none"}, "model models/none cannot be read:"),
    "no model": (
        {"model_name_or_path": ...},
        "embedded model. Write: model_name_or_path: tiny:aria",
    ),
    "misspelt embedded dataset": (
        {"dataset_name": "tiny:shape"},
        "there is no embedded dataset 'tiny:shape'; did you mean 'tiny:shapes'?",
    ),
    "missing dataset": ({"dataset_name": "./data/nothing"}, "dataset path ./data/nothing does not exist"),
    "no dataset": (
        {"dataset_name": ...},
        "embedded dataset. Write: dataset_name: tiny:shapes",
    ),
    "dataset for another task": (
        {"dataset_name": "tiny:preferences"},
        "dataset tiny:preferences has the columns chosen, rejected; grpo needs prompt",
    ),
    "model that only scores": ({"model_name_or_path": "tiny:reward"}, "tiny:reward only scores; grpo needs a model"),
    "pictures for a text model": (
        {"model_name_or_path": "tiny:text"},
        "tiny:shapes has images, and tiny:text accepts none",
    ),
    "reward that needs a package": ({"reward_funcs": ["accuracy_reward"]}, "Run: pip install math_verify"),
    "model_init_kwargs that are a list": (
        {"model_init_kwargs": "[1]"},
        "model_init_kwargs must be `key: value` pairs",
    ),
    "unknown reward": (
        {"reward_funcs": ["acuracy_reward"]},
        "'acuracy_reward' is not a reward function; did you mean 'accuracy_reward'?",
    ),
    "reward of a missing module": (
        {"reward_funcs": ["rewards_of_mine.digits"]},
        "reward function 'rewards_of_mine.digits' cannot be imported: No module named 'rewards_of_mine'",
    ),
    "misspelt reward": (
        {"reward_funcs": ["safe_trainers.tiny.rewards.exact_mach"]},
        "module safe_trainers.tiny.rewards has no function 'exact_mach'; did you mean "
        "'safe_trainers.tiny.rewards.exact_match'?",
    ),
    "no rewards": (
        {"reward_funcs": ...},
        "dotted paths of your own functions. Write: reward_funcs: [think_format_reward]",
    ),
    "warm-up of a model that is not embedded": (
        {"model_name_or_path": "org/model", "warm_up_steps": 3},
        "warm_up_steps is for embedded models, and 'org/model' is not one. Drop `warm_up_steps`",
    ),
    "batch that does not divide": (
        {"num_generations": 3},
        "recipe.yaml:4: generation_batch_size (4: per_device_train_batch_size 4 on 1 "
        "process(es), times 1) must be divisible by num_generations (3). It fits 3 processes.",
    ),
    "output that is a file": ({"output_dir": "recipe.yaml"}, "output_dir recipe.yaml is a file."),
    "function that is no reward": (
        {"reward_funcs": ["os.path.join"]},
        "'os.path.join' is not a reward function: TRL passes prompts, completions, the dataset's columns and more",
    ),
    "class that is no reward": ({"reward_funcs": ["json.JSONDecoder"]}, "'json.JSONDecoder' is not a reward function"),
    "missing checkpoint": ({"resume_from_checkpoint": "./nope"}, "there is no checkpoint ./nope. Write: resume_from"),
    "nothing to train on": (
        {"dataset_size": 0},
        "of at least 1, got 0. Write: dataset_size: 1",
    ),
    "bias that is no share": ({"warm_up_bias": 2}, "warm_up_bias must be a number between 0 and 1, got 2.0"),
    "adapter that fits nothing": (
        {"use_peft": True, "lora_target_modules": ["nothing", "here"]},
        "the trainer cannot be built: NoMatchingPeftModuleError: Target modules {",
    ),
    "vLLM that is not installed": (
        {"use_vllm": True},
        "the trainer cannot be built: ImportError: vLLM is not available",
    ),
    "misspelt tracker": ({"report_to": "wandbb"}, "got 'wandbb'. Write: report_to: wandb"),
    "unknown rollout compute": (
        {"rollout_compute": "training_"},
        "rollout_compute must be one of training, stock, got 'training_'. Write: rollout_compute: training",
    ),
    "weights against autocast": (
        {"precision": "bf16", "dtype": "float16"},
        "[half-weights-under-other-precision]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_exit_status_2_and_nothing_written(name, recipe, capsys, tmp_path):
    changes, message = BAD[name]
    argv = ["grpo", *recipe(**changes)]
    before = sorted(tmp_path.rglob("*"))
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert any(line.startswith("error: ") for line in captured.err.splitlines())
    assert "Traceback" not in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_all_unknown_keys_and_all_missing_things_are_said_at_once(recipe):
    with pytest.raises(RecipeError) as caught:
        read_recipe("grpo", recipe(learning_rte=1, max_stps=2))
    assert len(caught.value.problems) == 2
    with pytest.raises(RecipeError) as caught:
        read_recipe("grpo", recipe(model_name_or_path=..., dataset_name=..., reward_funcs=...))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "recipe.yaml:1: this is not YAML: while parsing a flow sequence"),
        ("- a\n- b\n", "recipe.yaml:1: this holds a list, and a recipe holds `key: value` lines"),
        ("", "recipe.yaml: this holds nothing"),
    ],
)
def test_files_that_are_no_recipes(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(text)
    assert main(["grpo", "--config", "recipe.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_recipe_names_the_nearest(recipe, capsys):
    recipe()
    assert main(["sft", "--config", "recpie.yaml"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: recpie.yaml: there is no such file; did you mean 'recipe.yaml'?"
    with pytest.raises(RecipeError, match=r"did you mean 'grpo/tiny_vlm_bf16\.yaml'"):
        find("grpo/tiny_vlm_bf61.yaml", "recipes")


def test_unknown_options_on_the_command_line(recipe, capsys):
    assert main(["grpo", *recipe(), "--learning_rte", "1"]) == 2
    assert (
        "on the command line: there is no key 'learning_rte'; did you mean 'learning_rate'?" in capsys.readouterr().err
    )


def test_a_dataset_from_files_without_pictures(recipe, capsys, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "a", "imges": "b"}) + "\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data.jsonl").rename(tmp_path / "data" / "train.jsonl")
    assert main(["grpo", *recipe(dataset_name="./data")]) == 2
    assert "only prompt, imges, and this recipe needs images. Rename the column" in capsys.readouterr().err


def test_columns_and_rewards_of_a_good_recipe(recipe):
    read = read_recipe("grpo", recipe())
    assert check_columns(read, ["prompt", "images"]) is None
    assert load_rewards(read) == [tiny.exact_match]


def test_precision_problems_keep_their_class(recipe):
    with pytest.raises(PrecisionError):
        read_recipe("grpo", recipe(precision="fp16", bf16=True))


def test_a_compute_dtype_of_4_bit_layers_is_parsed_like_any_other(recipe):
    assert read_recipe("grpo", recipe()).extra.bnb_4bit_compute_dtype is None
    read = read_recipe("grpo", [*recipe(load_in_4bit=True, use_peft=True), "--bnb_4bit_compute_dtype", "fp16"])
    assert read.extra.bnb_4bit_compute_dtype == "fp16"
    for misspelt in ("float", "auto"):
        with pytest.raises(PrecisionError, match=f"bnb_4bit_compute_dtype={misspelt!r}") as caught:
            read_recipe("grpo", recipe(load_in_4bit=True, use_peft=True, bnb_4bit_compute_dtype=misspelt))
        assert caught.value.problems[0].id == "unknown-dtype"


def test_a_compute_dtype_without_4_bit_layers_is_refused(recipe):
    with pytest.raises(RecipeError, match=r"tiny:llava is not one\. Write: load_in_4bit: true"):
        read_recipe("grpo", recipe(bnb_4bit_compute_dtype="fp16"))
    tiny.save("llava", "saved")
    with pytest.raises(RecipeError, match="saved is not one"):
        read_recipe("grpo", recipe(model_name_or_path="saved", bnb_4bit_compute_dtype="fp16"))
    config = Path("saved/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"load_in_4bit": True}}))
    assert read_recipe("grpo", recipe(model_name_or_path="saved", bnb_4bit_compute_dtype="fp16"))


@pytest.mark.parametrize(
    ("settings", "compute"),
    [
        ({"precision": "fp32"}, "float32"),
        ({"precision": ..., "bf16": False, "dtype": "bfloat16"}, "bfloat16"),
        ({"precision": "fp32", "dtype": "auto"}, "float32"),
        ({"precision": "bf16"}, "bfloat16"),
        ({"precision": "bf16", "bnb_4bit_compute_dtype": "bf16"}, "bfloat16"),
        ({"precision": "fp32", "dtype": "auto", "bnb_4bit_compute_dtype": "fp16"}, "float16"),
    ],
)
def test_4_bit_layers_are_asked_to_compute_as_the_run_does(recipe, settings, compute):
    asked = {}

    class Asked(Exception):
        """Ends the run where the trainer would be built."""

    class Trainer(SafeSFTTrainer):
        def __init__(self, **kwargs):
            asked.update(kwargs)
            raise Asked

    pytest.importorskip("bitsandbytes")
    argv = recipe(
        reward_funcs=..., num_generations=..., load_in_4bit=True, use_peft=True, output_dir="out", **settings
    )
    with pytest.raises(Asked):
        run_recipe(read_recipe("sft", argv), Console(quiet=True), Trainer)
    config = asked["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type) == (True, "nf4")
    assert str(config.bnb_4bit_compute_dtype) == f"torch.{compute}"
    if "dtype" not in settings:
        # TRL's own scripts take what the weights are loaded in.
        stock = get_quantization_config(ModelConfig(load_in_4bit=True))
        assert str(stock.bnb_4bit_compute_dtype) == "torch.float32"


def test_a_compute_dtype_that_contradicts_the_run_is_refused_before_anything_is_written(recipe, capsys):
    argv = recipe(
        precision="bf16", load_in_4bit=True, use_peft=True, bnb_4bit_compute_dtype="float16", output_dir="out"
    )
    assert main(["grpo", *argv]) == 2
    said = capsys.readouterr().err
    assert "bnb_4bit_compute_dtype='float16' in a run that computes in bfloat16" in said
    assert "drop `bnb_4bit_compute_dtype`" in said
    assert not Path("out").exists()


def test_help_is_fast_and_imports_nothing_heavy():
    code = (
        "import sys; from safe_trainers.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('modules', *sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "train with SafeGRPOTrainer" in out.stdout
    assert not {"torch", "trl", "transformers"} & set(out.stdout.split())
    assert set(COMMANDS) <= set(build_parser().format_help().replace("\n", " ").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_fast_and_imports_nothing_heavy(command):
    code = (
        "import sys; from safe_trainers.cli.main import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: print('modules', *sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert " ".join(COMMANDS[command].summary.split()) in " ".join(out.stdout.split())
    assert not {"torch", "trl", "transformers"} & set(out.stdout.split())


def test_a_run_reads_its_recipe_once_and_validates_it_once(recipe, monkeypatch):
    calls = Counter()

    def count(module, name):
        original = getattr(module, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(validation, "read_file")
    count(validation, "validate")
    for module in (rules, from_config, base):
        count(module, "resolve")
    changes = {"reward_funcs": ..., "num_generations": ..., "max_steps": 1, "output_dir": "out"}
    assert main(["sft", *recipe(**changes), "--evaluation_size", "0", "--dataset_size", "8"]) == 0
    assert (calls["read_file"], calls["validate"]) == (1, 1)
    # For an assumed device while the recipe is validated; before data is loaded; before the model is; on the model.
    assert calls["resolve"] == 4


@pytest.mark.parametrize("task", stable_tasks())
def test_a_run_writes_checkpoint_log_and_plot(task, recipe, capsys, tmp_path):
    changes = {
        "max_steps": 2,
        "logging_steps": 1,
        "dataset_size": 16,
        "evaluation_size": 8,
        "save_strategy": "no",
        "output_dir": "out",
        "progress": False,
    }
    if task not in ("grpo", "rloo"):
        changes |= {"reward_funcs": ..., "num_generations": ...}
    if task == "distillation":
        changes |= {"teacher_model_name_or_path": "tiny:llava", "teacher_warm_up_steps": 1, "max_completion_length": 4}
    if task == "reward":
        changes |= {"dataset_name": "tiny:preferences", "model_name_or_path": "tiny:reward", "needs_images": False}
    else:
        changes |= {"warm_up_steps": 1, "warm_up_batch_size": 4}
    assert main([task, *recipe(**changes)]) == 0
    out = capsys.readouterr().out
    assert "checkpoint  out" in out
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    assert len([entry for entry in log["log"] if "loss" in entry]) == 2
    assert 0 <= log["score"]["before"] <= 1
    assert 0 <= log["score"]["after"] <= 1
    assert log["precision"]["policy"]["compute"]["value"] == "float32"
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.skipif("distillation" not in stable_tasks(), reason="this TRL has no stable trainer of distillation")
def test_a_teacher_is_checked_as_the_model_is(recipe):
    changes = {"reward_funcs": ..., "num_generations": ...}
    for teacher, text in {
        ...: "teacher_model_name_or_path is missing",
        "tiny:llva": "there is no embedded model 'tiny:llva'; did you mean 'tiny:llava'?",
        "./teachers/one": "folder ./teachers/one has no model (config.json)",
        "tiny:reward": "tiny:reward only scores; distillation needs a model that answers",
    }.items():
        with pytest.raises(RecipeError) as caught:
            read_recipe("distillation", recipe(**changes, teacher_model_name_or_path=teacher))
        assert text in str(caught.value)
    with pytest.raises(RecipeError, match="'teacher_warm_up_steps' is a key of distillation, not of sft"):
        read_recipe("sft", recipe(**changes, teacher_warm_up_steps=1))


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_a_4_bit_model_is_scored_and_then_still_learns(task, recipe, tmp_path):
    """On a CPU one forward pass in evaluation mode would leave bitsandbytes' layers without gradients."""
    pytest.importorskip("bitsandbytes")
    changes = {"max_steps": 2, "logging_steps": 1, "dataset_size": 16, "evaluation_size": 8, "output_dir": "out",
               "progress": False, "load_in_4bit": True, "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"],
               "precision": "bf16", "reward_funcs": ..., "num_generations": ...}  # fmt: skip
    if task == "reward":
        changes |= {"dataset_name": "tiny:preferences", "model_name_or_path": "tiny:reward", "needs_images": False}
    assert main([task, *recipe(**changes)]) == 0
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    assert all(entry["grad_norm"] > 0 for entry in log["log"] if "loss" in entry)
    assert log["precision"]["weights"]["quantized"]["compute"] == "bfloat16"
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_recipe_resumes_from_the_newest_checkpoint(recipe, tmp_path):
    changes = {
        "dataset_size": 16, "evaluation_size": 8, "save_strategy": "steps", "save_steps": 1, "output_dir": "out",
        "progress": False, "reward_funcs": ..., "num_generations": ..., "logging_steps": 1,
    }  # fmt: skip
    assert main(["sft", *recipe(**changes, max_steps=2)]) == 0
    assert main(["sft", *recipe(**changes, max_steps=3, resume_from_checkpoint="true")]) == 0
    log = json.loads((tmp_path / "out" / "log.json").read_text())["log"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3]


def test_the_demo_shows_the_crash_of_stock_and_then_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = [
        "--max_steps",
        "2",
        "--logging_steps",
        "1",
        "--warm_up_steps",
        "1",
        "--dataset_size",
        "64",
        "--evaluation_size",
        "8",
    ]
    assert main(["demo", "--output_dir", "out", *short, "--progress", "false"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "trl.GRPOTrainer, bfloat16 weights, bf16=True:"
    assert lines[1].startswith("  RuntimeError: Input type (torch.FloatTensor) and weight type (CPUBFloat16Type)")
    assert lines[2] == "safe_trainers.SafeGRPOTrainer, the same recipe:"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["model"]
    for name in ("plot.png", "log.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).is_file()
    assert "plot        out/plot.png" in out


def test_the_demo_refuses_what_a_recipe_would(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--learning_rte", "1"]) == 2
    assert "did you mean 'learning_rate'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_where_nothing_is_asked(recipe, capsys):
    argv = recipe(
        max_steps=1, dataset_size=16, evaluation_size=0, output_dir="out", progress=False, save_strategy="no"
    )
    assert main(["grpo", *argv]) == 0
    out = capsys.readouterr().out
    assert "held-out" not in out
    assert "plot        not written: the run ended before its first log; lower logging_steps" in out


@pytest.mark.parametrize("task", ["grpo", "sft", "reward"])
def test_evaluation_during_training(task, recipe, tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 1}
    changes |= {
        "dataset_size": 16,
        "evaluation_size": 8,
        "save_strategy": "no",
        "output_dir": "out",
        "progress": False,
    }
    if task != "grpo":
        changes |= {"reward_funcs": ..., "num_generations": ...}
    if task == "reward":
        changes |= {"dataset_name": "tiny:preferences", "model_name_or_path": "tiny:reward", "needs_images": False}
    assert main([task, *recipe(**changes)]) == 0
    log = json.loads((tmp_path / "out" / "log.json").read_text())["log"]
    assert any("eval_loss" in entry for entry in log)


def test_any_spelling_of_a_dtype_works_in_model_init_kwargs(recipe, tmp_path):
    changes = {"model_init_kwargs": {"dtype": "bf16"}, "precision": ..., "bf16": False}
    changes |= {"max_steps": 1, "dataset_size": 16, "evaluation_size": 0}
    assert main(["grpo", *recipe(**changes, output_dir="out", save_strategy="no", progress=False)]) == 0
    census = json.loads((tmp_path / "out" / "log.json").read_text())["precision"]["model"]
    assert set(census["elements"]["weights"]) == {"bfloat16"}


@pytest.mark.parametrize("words", [["validate", "--json"], ["validate"], ["list", "--json"], ["explain"]])
def test_a_pipe_that_is_closed_early_is_no_traceback(words, recipe):
    recipe()
    command = [sys.executable, "-m", "safe_trainers.cli", *words, *(["recipe.yaml"] if words[0] != "list" else [])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 141  # as a shell says it, and not 1, which says that something was warned of


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said():
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "safe_trainers.cli", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: the output cannot be written: No space left on device\n")


def test_a_disk_that_is_full_elsewhere_is_no_matter_of_the_output(monkeypatch, capsys):
    def saves():
        print("step 1")
        raise OSError(errno.ENOSPC, "No space left on device", "out/checkpoint-1/optimizer.pt")

    monkeypatch.setattr(program, "main", saves)
    monkeypatch.setattr(program, "quieten", lambda: None)  # it sets variables for the life of a process
    with pytest.raises(OSError, match=r"optimizer\.pt"):
        program.run()
    assert capsys.readouterr().out == "step 1\n"


@pytest.mark.parametrize(("words", "said"), [
    (["--num_processes", "0"], "must be an integer from 1, got '0'"),
    (["--num-processes", "-2"], "must be an integer from 1, got '-2'"),
    (["--num_processes", "two"], "must be an integer from 1, got 'two'"),
    (["--accelerate-config", "zero9"], "there is no config zero9"),
])  # fmt: skip
def test_options_of_the_launcher(words, said, recipe, capsys):
    try:
        status = main(["grpo", *recipe(), *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_dataset_may_be_one_file_and_places_are_printed_as_they_are(recipe, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "solution": "b"}\n' * 4)
    output = f"{'long' * 30}[lr]"  # longer than a line, and what rich takes for markup
    changes = {"model_name_or_path": "tiny:text", "dataset_name": "data.jsonl", "needs_images": False}
    changes |= {"reward_funcs": ["math_answer_reward"], "max_steps": 1, "save_strategy": "no", "logging_steps": 1}
    assert main(["grpo", *recipe(**changes, output_dir=output)]) == 0
    said = capsys.readouterr().out.splitlines()
    places = {"checkpoint": output, "log": f"{output}/log.json", "report": f"{output}/precision_report.json"}
    places["plot"] = f"{output}/plot.png"
    assert said[1:] == [f"{what:<11} {place}" for what, place in places.items()]


@pytest.mark.parametrize("changes", [
    {"dataset_name": "bad"}, {"dataset_name": "bad.yaml"},
    {"dataset_name": ..., "datasets": [{"path": "bad"}]}, {"dataset_name": ..., "datasets": [{"path": "./nowhere"}]},
], ids=["broken", "no data", "broken in a mixture", "missing in a mixture"])  # fmt: skip
def test_data_that_cannot_be_loaded_is_one_line(changes, recipe, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "bad.yaml").write_text("a: 1")
    assert main(["grpo", *recipe(**changes, needs_images=False, output_dir="out")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert " cannot be loaded: " in line
    assert len(line) < 400
    assert not (tmp_path / "out").exists()

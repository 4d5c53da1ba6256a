"""`validate`: every problem at once, on its line, without importing torch or TRL, and never a traceback."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safe_trainers import PrecisionError, RecipeError
from safe_trainers.cli.main import main
from safe_trainers.core.errors import yaml_value
from safe_trainers.core.tasks import TASKS
from safe_trainers.core.versions import stable_tasks
from safe_trainers.data.columns import local_columns
from safe_trainers.recipes import packaged
from safe_trainers.recipes.load import read_recipe
from safe_trainers.recipes.renamed import RENAMED, VALUE, outdated
from safe_trainers.recipes.reward_lookup import find_module, missing_function
from safe_trainers.recipes.schema import available, convert, load, path_of
from safe_trainers.recipes.validate import prepare, split_config, validate


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
RUNNABLE = [path for path in RECIPES if "trackio" not in path.name or importlib.util.find_spec("trackio")]
GOOD = """\
# a header
model_name_or_path: tiny:llava
dataset_name: tiny:shapes
reward_funcs:
  - safe_trainers.tiny.exact_match
precision: bf16
use_cpu: true
per_device_train_batch_size: 4
num_generations: 2
learning_rate: 1e-5
output_dir: out
report_to: none
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def check(text, task="grpo", **kwargs):
    Path("recipe.yaml").write_text(text)
    return validate("recipe.yaml", task=task, **kwargs)


def said(checked, level="error"):
    return [(problem.place.line, problem.text) for problem in checked.problems if problem.level == level]


def test_a_good_recipe_has_nothing_to_say():
    checked = check(GOOD)
    assert checked.problems == ()
    assert checked.check() is None
    assert checked.values["learning_rate"] == 1e-5


@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed")
def test_a_tracker_that_is_not_installed_is_an_error_of_a_run_with_the_line_to_write(capsys):
    (path,) = [path for path in RECIPES if "trackio" in path.name]
    assert main(["validate", str(path)]) == 1  # it may be edited here, and run elsewhere
    out = capsys.readouterr().out
    (problem,) = validate(path, for_run=True).errors
    assert problem.text in out
    assert "report_to: trackio needs the package trackio, which is not installed" in out
    assert 'fix: run `pip install "safe-trainers[trackio]"`, or write `report_to: none`' in out


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.relative_to(ROOT / "recipes").as_posix())
def test_every_recipe_of_the_package_is_clean(path):
    checked = validate(path)
    assert checked.task == path.parent.name
    assert checked.problems == ()


# --- the table: lines added to a good recipe (line 13 and on), and what is said of which line -----------------------

WRONG = {
    "sizes the wrong way round": ("image_min_size: 9\nimage_max_size: 5", 13, "image_min_size=9 is above"),
    "pixels the wrong way round": ("image_max_pixels: 5\nimage_min_pixels: 9", 14, "image_min_pixels=9 is above"),
    "no size": ("image_resize: [0, 9]", 13, "each number in image_resize must be an integer of at least 1, got 0"),
    "images twice": ("dataset_columns: {prompt: prompt, image: image, images: image}", 13, "name the same column"),
    "template without a prompt": (
        "dataset_columns: {images: image}\nprompt_template: '{prompt}!'", 14, "prompt_template makes the prompt",
    ),
    "list in env": ("env: {OMP_NUM_THREADS: [1]}", 13, "OMP_NUM_THREADS in env must be a single value"),
    "misspelt key": ("learning_rte: 1e-5", 13, "there is no key 'learning_rte'; did you mean 'learning_rate'?"),
    "hyphens": ("learning-rate: 1", 13, "there is no key 'learning-rate'; did you mean 'learning_rate'?"),
    "another task's key": ("packing: true", 13, "'packing' is a key of sft, not of grpo"),
    "key that means nothing": ("xyzzy: 1", 13, "there is no key 'xyzzy'"),
    "float for an integer": ("lora_r: 4.0\nuse_peft: true", 13, "lora_r must be an integer, got 4.0"),
    "text for a flag": ("bf16: 'on'", 13, "bf16 must be true or false, got 'on'"),
    "misspelt loss": ("loss_type: grop", 13, "loss_type must be one of bnpo, cispo, dapo, dr_grpo, grpo, luspo,"),
    "unknown tracker": ("!report_to: foo", 13, "report_to must be one of all, none, azure_ml, clearml"),
    "misspelt tracker in a list": ("!report_to: [wandb, tensorbord]", 13, "got 'tensorbord'"),
    "misspelt task of LoRA": ("use_peft: true\nlora_task_type: CAUSAL", 14, "lora_task_type must be one of SEQ_CLS"),
    "all layers, in other words": (
        "use_peft: true\nlora_target_modules: all", 14, "is not the name of a module; did you mean 'all-linear'?",
    ),
    "pattern that is none": ("use_peft: true\nlora_target_modules: ['q_(proj']", 14, "is not a regular expression"),
    "misspelt argument": ("model_init_kwargs: {dtyp: bfloat16}", 13, "no entry 'dtyp'; did you mean 'dtype'?"),
    "misspelt argument of generation": (
        "generation_kwargs: {temperatur: 1.0}", 13, "generation_kwargs has no entry 'temperatur'; did you mean 'temp",
    ),
    "misspelt attention": ("attn_implementation: spda", 13, "attn_implementation must be one of eager"),
    "misspelt attention of the model": (
        "model_init_kwargs: {attn_implementation: spda}", 13, "attn_implementation must be one of eager",
    ),
    "half weights without an upcast": (
        "!precision: fp16\nuse_cpu: false\ndtype: float16\nupcast_trainables: false", 16,
        "upcast_trainables=False with precision='fp16' and weights in float16",
    ),
    "launch config that is not there": ("accelerate_config: dpd", 13, "there is no config dpd; did you mean 'ddp'?"),
    "no processes": ("num_processes: 0", 13, "num_processes must be an integer of at least 1, got 0"),
    "text for a number": ("beta: low", 13, "beta must be a number, got 'low'"),
    "list for one value": ("max_steps: [1, 2]", 13, "max_steps must be an integer, got a list of 2"),
    "mapping for text": ("run_name: {a: 1}", 13, "run_name must be a string, got `key: value` pairs"),
    "nothing for a number": ("beta:", 13, "beta must be a number, got null"),
    "not finite": ("beta: .nan", 13, "beta must be a number, got nan"),
    "misspelt choice": ("lr_scheduler_type: cosin", 13, "lr_scheduler_type must be one of linear"),
    "negative": ("max_completion_length: -5", 13, "max_completion_length must be an integer of at least 1, got -5"),
    "no share": ("top_p: 1.5", 13, "top_p must be a number between 0 and 1, got 1.5"),
    "no port": ("vllm_server_port: 99999\nuse_vllm: true", 13, "vllm_server_port must be an integer of at most 65535"),
    "one generation": ("!num_generations: 1", 13, "num_generations must be an integer of at least 2, got 1"),
    "groups that do not divide": ("!num_generations: 3", 13, "must be divisible by num_generations (3)"),
    "batch that does not divide": ("generation_batch_size: 6", 13, "generation_batch_size (6) must be divisible by"),
    "two sizes of a batch": (
        "generation_batch_size: 8\nsteps_per_generation: 2", 14, "generation_batch_size and steps_per_generation",
    ),
    "evaluation that does not divide": (
        "eval_strategy: steps\nper_device_eval_batch_size: 3", 14, "the evaluation batch (3) must be divisible",
    ),
    "found batch size": ("auto_find_batch_size: true", 13, "auto_find_batch_size halves the batch"),
    "two precisions": ("fp16: true", 6, "precision='bf16' (bf16) with fp16=True"),
    "misspelt precision": ("!precision: bf61", 13, "precision='bf61'"),
    "both flags": ("!precision: null\nbf16: true\nfp16: true", 15, "bf16 and fp16 are both on"),
    "weights against autocast": ("dtype: float16", 6, "float16 weights with precision='bf16'"),
    "flash attention in float32": (
        "!precision: fp32\nattn_implementation: flash_attention_2", 13, "'flash_attention_2' with float32 compute",
    ),
    "4 bit and 8 bit": ("load_in_4bit: true\nload_in_8bit: true\nuse_peft: true", 14, "a model is packed once"),
    "4 bit without adapters": ("load_in_4bit: true", 13, "load_in_4bit packs the weights"),
    "compute dtype against the run": (
        "load_in_4bit: true\nuse_peft: true\nbnb_4bit_compute_dtype: float16", 15, "in a run that computes in",
    ),
    "compute dtype without 4 bit": ("bnb_4bit_compute_dtype: float16", 13, "and tiny:llava is not one"),
    "LoRA without use_peft": ("lora_r: 8\nlora_alpha: 16", 13, "lora_r, lora_alpha: only for adapters"),
    "bounds the wrong way round": (
        "use_vllm: true\nvllm_importance_sampling_clip_min: 4.0", 14, "must be below vllm_importance_sampling",
    ),
    "structured outputs with vLLM's correction": (
        "use_vllm: true\nvllm_structured_outputs_regex: a+", 14, "vllm_structured_outputs_regex='a+' with use_vllm",
    ),
    "weights without rewards": ("reward_weights: [1, 2]", 13, "reward_weights has 2 numbers for 1 rewards"),
    "unknown reward": ("!reward_funcs: [acuracy_reward]", 13, "did you mean 'accuracy_reward'"),
    "reward of a missing module": ("!reward_funcs: [rew.digits]", 13, "cannot be imported: No module named 'rew'"),
    "second reward": (
        "!reward_funcs:\n- think_format_reward\n- no.such", 15, "cannot be imported: No module named 'no'",
    ),
    "misspelt reward": (
        "!reward_funcs: [safe_trainers.tiny.rewards.exact_mach]", 13, "did you mean 'safe_trainers.tiny.rewards.",
    ),
    "reward that is none": ("!reward_funcs: [os.path.join]", 13, "'os.path.join' is not a reward function"),
    "reward that is a class": ("!reward_funcs: [json.JSONDecoder]", 13, "'json.JSONDecoder' is not a reward function"),
    "reward that is a module": ("!reward_funcs: [safe_trainers.tiny]", 13, "is not a reward function, but a module"),
    "reward in a number": ("!reward_funcs: [1.5.x]", 13, "is not the name of a module"),
    "no rewards": ("!reward_funcs: []", 13, "reward_funcs is empty"),
    "misspelt model": ("!model_name_or_path: tiny:llva", 13, "did you mean 'tiny:llava'?"),
    "model folder that is not there": ("!model_name_or_path: ./qwen", 13, "folder ./qwen has no model (config.json)"),
    "model that only scores": ("!model_name_or_path: tiny:reward", 13, "tiny:reward only scores; grpo needs a model"),
    "misspelt dataset": ("!dataset_name: tiny:shape", 13, "did you mean 'tiny:shapes'?"),
    "dataset that is not there": ("!dataset_name: ./data", 13, "dataset path ./data does not exist"),
    "missing dataset file": ("!dataset_name: data/no.jsonl", 13, "dataset path data/no.jsonl does not exist"),
    "warm-up of a hub model": ("!model_name_or_path: a/b\nwarm_up_steps: 3", 14, "warm_up_steps is for embedded"),
    "checkpoint that is not there": ("resume_from_checkpoint: ./nope", 13, "there is no checkpoint ./nope"),
    "output that is a file": ("!output_dir: recipe.yaml", 13, "output_dir recipe.yaml is a file"),
    "engine file that is not there": ("deepspeed: ds.json", 13, "there is no file ds.json (deepspeed)"),
    "run name that is a path": ("run_name: ../../x", 13, "run_name '../../x' is a path"),
    "cache elsewhere": ("model_init_kwargs: {cache_dir: /var/x}", 13, "cache_dir '/var/x' is outside output_dir"),
    "offload elsewhere": (
        "deepspeed: {zero_optimization: {offload_param: {nvme_path: ../x}}}", 13, "nvme_path '../x' is outside",
    ),
    "secret": ("hub_token: hf_x", 13, "a token is a secret, and recipes are shared"),
    "object": ("parallelism_config: {cp_size: 2}", 13, "parallelism_config cannot be set in a recipe"),
    "best without evaluation": ("load_best_model_at_end: true", 13, "needs save_strategy and eval_strategy to be the"),
    "plateau without evaluation": ("lr_scheduler_type: reduce_lr_on_plateau", 13, "needs evaluations"),
    "prefetch without workers": ("dataloader_prefetch_factor: 2", 13, "only for workers, and dataloader_num_workers"),
    "half a step": ("logging_steps: 2.5", 13, "or a share of the steps below 1, got 2.5"),
    "unknown sharding": ("fsdp: full_shrad auto_wrap", 13, "fsdp must be some of full_shard"),
    "no group": ("!num_generations: null", 13, "num_generations must be an integer, got null"),
    "scale that does not grow": ("loss_scale_growth_factor: 1", 13, "must be a number above 1"),
    "scale that does not back off": ("loss_scale_backoff_factor: 1", 13, "backoff_factor must be a number between 0"),
    "columns that are no text": ("dataset_columns: {prompt: 1}", 13, "in dataset_columns must be strings, got 1"),
    "report nowhere": ("precision_report: console", 13, "precision_report must be one of"),
    "two engines": ("fsdp: full_shard\ndeepspeed: {a: 1}", 13, "one engine trains a model"),
    "written twice": ("use_cpu: false", 13, "'use_cpu' is written twice, first in line 7"),
    "unclosed bracket": ("lora_target_modules: [a, b", 13, "this is not YAML: while parsing a flow sequence"),
    "code": ("run_name: !!python/name:os.system", 13, "a recipe is data, and cannot name code"),
}  # fmt: skip


def with_lines(lines):
    """The good recipe with lines after it; after `!` they take the place of the lines with the same key."""
    if not lines.startswith("!"):
        return GOOD + lines + "\n"
    lines = lines[1:]
    key = lines.partition(":")[0]
    kept = GOOD.replace("reward_funcs:\n  - safe_trainers.tiny.exact_match", "reward_funcs: [x]").splitlines()
    kept = ["#" if line.startswith(f"{key}:") else line for line in kept]
    if key != "reward_funcs":
        return "\n".join(kept).replace("reward_funcs: [x]", "reward_funcs:\n  - safe_trainers.tiny.exact_match") + (
            f"\n{lines}\n"
        )
    return "\n".join([*kept[:3], "#", *kept[3:]]) + f"\n{lines}\n"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_said_on_its_line(name, capsys):
    lines, line, text = WRONG[name]
    found = said(check(with_lines(lines)))
    assert [place for place, what in found if text in what] == [line], found
    assert all(place is not None for place, _ in found)
    assert main(["validate", "recipe.yaml", "--task", "grpo"]) == 2
    captured = capsys.readouterr()
    assert f"recipe.yaml:{line}: " in captured.out
    assert "Traceback" not in captured.out + captured.err


STOCK = {
    "missing file": (None, [], "recipe.yaml: there is no such file"),
    "misspelt key": (GOOD + "learning_rte: 1e-5\n", [], "recipe.yaml:13: there is no key 'learning_rte'; did you"),
    "float": (GOOD.replace("generations: 2", "generations: 4.0"), [], "recipe.yaml:9: num_generations must be"),
    "no model": (GOOD.replace("model_name_or_path: tiny:llava", ""), [], "recipe.yaml: model_name_or_path is missing"),
    "reward": (GOOD.replace("safe_trainers.tiny.exact_match", "rew.digits"), [],
               "recipe.yaml:5: reward function 'rew.digits' cannot be imported: No module named 'rew'"),
    "bf16 on a CPU hides a bad key": (GOOD.replace("use_cpu: true", "learning_rte: 1"), [],
                                      "recipe.yaml:7: there is no key 'learning_rte'"),
    "bad option": (GOOD, ["--num_generations", "4.0"], "on the command line: num_generations must be an integer"),
}  # fmt: skip
"""What stock `trl grpo` answers with tracebacks, accelerate's usage or a message about something else."""


@pytest.mark.parametrize("name", STOCK)
def test_what_stock_answers_with_a_traceback_is_one_message(name, capsys):
    text, words, message = STOCK[name]
    if text is not None:
        Path("recipe.yaml").write_text(text)
    assert main(["grpo", "--config", "recipe.yaml", *words]) == 2
    captured = capsys.readouterr()
    phase, answer = captured.err.splitlines()
    assert phase.startswith("reading recipe ")
    assert answer.startswith(f"error: {message}")
    assert captured.out == ""
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"] * (text is not None)


def test_the_table_is_as_long_as_it_was_promised():
    assert len(WRONG) >= 50


@pytest.mark.parametrize("name", ["misspelt key", "float for an integer", "two precisions", "written twice", "code"])
def test_the_training_commands_say_the_same_before_anything_slow(name):
    lines, line, text = WRONG[name]
    Path("recipe.yaml").write_text(with_lines(lines))
    with pytest.raises((RecipeError, PrecisionError)) as before:
        prepare("grpo", ["--config", "recipe.yaml"])
    with pytest.raises((RecipeError, PrecisionError)) as training:
        read_recipe("grpo", ["--config", "recipe.yaml"])
    assert str(before.value) == str(training.value)
    assert f"recipe.yaml:{line}: " in str(training.value)
    assert text in str(training.value)


def test_all_problems_are_said_at_once():
    lines = [lines for lines, _, _ in WRONG.values() if not lines.startswith("!") and "\n" not in lines]
    lines = [line for line in lines if line.partition(":")[0] not in ("use_cpu", "lora_target_modules")]
    lines = list({line.partition(":")[0]: line for line in lines}.values())
    found = said(check(GOOD + "\n".join(lines)))
    missed = {13 + number for number in range(len(lines))} - {line for line, _ in found}
    # What a broken value would have to be compared with is left alone.
    left = {lines[number - 13].partition(":")[0] for number in missed}
    assert left <= {"fp16", "dtype", "bnb_4bit_compute_dtype", "accelerate_config"}
    assert [line for line, _ in found] == sorted(line for line, _ in found)


WARNED = {
    "vLLM without use_vllm": (
        "vllm_gpu_memory_utilization: 0.5",
        13,
        "vllm_gpu_memory_utilization: only for vLLM, and use_vl",
    ),
    "4-bit settings without 4 bit": ("use_bnb_nested_quant: true", 13, "load_in_4bit is off"),
    "fp16 on a CPU": ("!precision: fp16", 13, "precision='fp16' on CPU"),
    "stock rollouts": ("rollout_compute: stock", 6, "rollout_compute='stock' under autocast"),
    "loss for sequences": ("loss_type: luspo", 13, "made for importance_sampling_level sequence"),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_is_probably_not_meant_is_a_warning(name):
    lines, line, text = WARNED[name]
    checked = check(with_lines(lines))
    assert [place for place, what in said(checked, "warning") if text in what] == [line], checked.problems
    assert checked.errors == ()
    assert main(["validate", "recipe.yaml", "--task", "grpo"]) == 1


@pytest.mark.parametrize("lines", ["vllm_mode: server\nuse_vllm: false", "lora_r: 4\nuse_peft: false",
                                   "save_strategy: no",
                                   "run_name: 2024", "lora_alpha: 32", "report_to: [none]",
                                   "max_completion_length: null",
                                   "num_generations_eval: 2", "env: {OMP_NUM_THREADS: 2}", "seed: 0"])  # fmt: skip
def test_what_is_meant_is_let_through(lines):
    text = GOOD.replace("report_to: none\n", "") + lines + "\n"
    assert check(text).problems == ()


def test_code_that_is_imported_or_trusted_is_named():
    Path("mine.py").write_text("raise SystemError('never run')\ndef digits(completions, **kwargs): return []\n")
    checked = check(with_lines("!reward_funcs: [mine.digits]") + "trust_remote_code: true\n")
    assert checked.errors == ()
    assert said(checked, "note") == [
        (13, f"the run imports the code of mine ({Path('mine.py').absolute()}), for the reward mine.digits"),
        (14, "trust_remote_code is on: the code that comes with tiny:llava is run"),
    ]
    assert main(["validate", "recipe.yaml", "--task", "grpo"]) == 0


# --- outdated keys ---------------------------------------------------------------------------------------------------

KNOWN_OUTDATED = {"max_prompt_length", "torch_dtype", "warmup_ratio", "overwrite_output_dir", "vllm_device",
                  "chat_template", "freeze_vision_modules", "max_pixels"}  # fmt: skip


def test_keys_of_public_recipes_are_keys_now_or_have_a_successor():
    assert set(RENAMED) >= KNOWN_OUTDATED
    keys = load("grpo").keys
    assert {"system_prompt", "bnb_4bit_compute_dtype"} <= set(keys)
    assert not KNOWN_OUTDATED & set(keys)


@pytest.mark.parametrize("task", TASKS)
def test_every_outdated_key_is_named_with_its_successor(task):
    keys = load(task, "1.16.0").keys
    old = [key for key in RENAMED if key not in keys]
    Path("recipe.yaml").write_text(GOOD + "".join(f"{key}: 1\n" for key in old))
    found = {problem.place.key: problem for problem in validate("recipe.yaml", task=task).errors}
    for number, key in enumerate(old, start=13):
        problem = found[key]
        assert problem.place.line == number
        new = RENAMED[key].key
        if new is not None and (new in keys or new == "env"):
            assert re.match(rf"`{key}` was (renamed to|replaced by) `{new}`", problem.text)
            assert [name for name, _ in problem.fix.settings] == [new]
        else:
            assert problem.text.startswith((f"`{key}` was removed", f"there is no key `{key}`"))
            assert problem.fix.drop == (key,)


LINES = {task: [line for line in (ROOT / "recipes" / task / f"tiny_{'text' if task == 'reward' else 'vlm'}_bf16.yaml")
                .read_text().splitlines() if line and not line.startswith("#")] for task in TASKS}  # fmt: skip
OFF = (False, None, 0, "false")
USUAL = {"wandb_project": "mine", "wandb_entity": "me", "dataset_prompt_column": "question",
         "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "warmup_ratio": 0.1, "max_norm": 1.0}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_every_fix_of_an_outdated_key_validates_once_it_is_applied(task):
    """With each value that a key may have: on, off, a number, a word, and those of its own table."""
    schema = load(task, "1.16.0")
    lines = {line.split(":")[0]: line for line in LINES[task] if not line.startswith(("bf16", "use_cpu"))}
    lines["use_peft"] = "use_peft: true"  # for keys of adapters
    for key in (key for key in RENAMED if key not in schema.keys):
        chosen = RENAMED[key].chosen or {}
        for value in (USUAL.get(key, True), *OFF, *chosen):
            problem = outdated(key, value, schema.keys)
            given = dict(problem.fix.settings)
            assert given or problem.fix.drop == (key,), key
            if value in OFF and RENAMED[key].value != VALUE and RENAMED[key].key is not None:
                carried = VALUE in str(RENAMED[key].value)
                assert carried or not given, f"{key}: {value} switches something on"
            accepted = {name: v for name, v in given.items() if name == "env" or _fits(schema, name, v)}
            if value is USUAL.get(key) or value in chosen:
                assert accepted == given, f"{key}: {value}"
            Path("recipe.yaml").write_text(
                "\n".join(
                    [
                        *(line for name, line in lines.items() if name not in accepted),
                        *(f"{n}: {yaml_value(v)}" for n, v in accepted.items()),
                    ]
                )
            )
            found = validate("recipe.yaml", task=task, schema=schema).errors
            if value in OFF and VALUE in str(RENAMED[key].value):
                continue  # the value is kept, whatever it is
            if task == "kto" and accepted.get("train_sampling_strategy") not in (None, "sequential"):
                continue  # which TRL's KTO refuses under any name
            assert [p for p in found if p.place.key in accepted] == [], key


def _fits(schema, name, value):
    try:
        convert(schema.keys[name], value, None)
    except RecipeError:
        return False
    return True


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("group_by_length: false", "Drop `group_by_length`"),
        ("adafactor: false", "Drop `adafactor`"),
        ("use_flash_attention_2: false", "Drop `use_flash_attention_2`"),
        ("include_tokens_per_second: false", "Drop `include_tokens_per_second`"),
        ("freeze_vision_modules: false", "Drop `freeze_vision_modules`"),
        ("tpu_metrics_debug: false", "Drop `tpu_metrics_debug`"),
        ("base_model: mine", "model_name_or_path: mine"),
        ("max_samples: 500", "`datasets: [{path: NAME, split: 'train[:500]'}]`"),
        ("finetuning_type: lora", "use_peft: true"),
        ("adapter: qlora", "use_peft: true"),
        ("quantization_bit: 4", "load_in_4bit: true"),
        ("accumulate_grad_batches: 4", "gradient_accumulation_steps: 4"),
        ("peft_config: x", "Drop `peft_config`"),
    ],
)
def test_keys_that_are_off_and_keys_of_other_projects(line, expected):
    Path("recipe.yaml").write_text("\n".join([*LINES["sft"], line]))
    (problem,) = validate("recipe.yaml", task="sft", schema=load("sft", "1.16.0")).errors
    assert expected in problem.line()


@pytest.mark.parametrize(
    ("precision", "kwargs", "expected"),
    [
        ("bf16", "{torch_dtype: bfloat16}", ["torch-dtype-renamed"]),
        ("fp16", "{torch_dtype: bfloat16}", ["half-weights-under-other-precision", "torch-dtype-renamed"]),
        ("bf16", "{torch_dtype: float16, dtype: bfloat16}", ["two-load-dtypes"]),
        ("bf16", "{torch_dtype: bflaot16}", ["unknown-dtype", "torch-dtype-renamed"]),
        ("half", "{dtype: float16}", []),
        ("bf16", "{torch_dtype: bf16, dtype: bfloat16}", []),
        ("bf16", "{torch_dtype: bflaot16, dtype: bfloat16}", ["unknown-dtype"]),
    ],
)
def test_the_older_name_of_the_load_dtype_is_read(precision, kwargs, expected):
    lines = ["model_name_or_path: tiny:llava", "dataset_name: tiny:shapes", f"precision: {precision}"]
    lines.append("use_peft: true")
    Path("recipe.yaml").write_text("\n".join([*lines, f"model_init_kwargs: {kwargs}\n"]))
    found = validate("recipe.yaml", task="sft")
    assert sorted(str(problem.id) for problem in found.problems) == sorted(expected)
    if "torch-dtype-renamed" in expected:
        (renamed,) = [problem for problem in found.problems if problem.id == "torch-dtype-renamed"]
        assert renamed.fix.as_yaml().startswith("model_init_kwargs: {dtype: bf")


@pytest.mark.parametrize("key", ["maximal_samples", "picture_mode_of", "fsdp_configuration_of", "colour"])
def test_no_key_is_suggested_that_is_not_near(key):
    Path("recipe.yaml").write_text("\n".join([*LINES["sft"], f"{key}: 1"]))
    (problem,) = validate("recipe.yaml", task="sft").errors
    assert "did you mean" not in problem.line()


def test_successors_are_keys_of_some_task_and_old_keys_of_none_that_is_installed():
    newest = {key for task in TASKS for key in load(task, available()[-1]).keys}
    for key, found in RENAMED.items():
        assert found.key in {None, "env"} | newest, key
        assert found.key is not None or found.why or found.chosen, key
        assert {name for asked in (found.chosen or {}).values() for name in asked} <= newest, key
    deprecated = {"use_transformers_paged", "vllm_importance_sampling_cap"}
    assert set(RENAMED) & newest <= deprecated


def test_every_field_that_went_since_the_oldest_supported_version_has_an_entry():
    gone = {key for task in TASKS for key in set(load(task, "0.29.1").keys) - set(load(task, "1.16.0").keys)}
    assert gone - set(RENAMED) == set()


def test_a_key_is_outdated_only_where_the_installed_trl_lacks_it():
    text = GOOD + "warmup_ratio: 0.1\n"
    assert said(check(text, schema=load("grpo", "0.29.1"))) == []
    ((line, what),) = said(check(text, schema=load("grpo", "1.16.0")))
    assert (line, what[:26]) == (13, "`warmup_ratio` was replace")
    assert outdated("learning_rte", 1, load("grpo").keys) is None


def test_values_of_outdated_keys_are_carried_over():
    keys = load("grpo").keys
    assert outdated("torch_dtype", "bfloat16", keys).fix.as_yaml() == "dtype: bfloat16"
    assert outdated("wandb_project", "mine", keys).fix.as_yaml() == "env: {WANDB_PROJECT: mine}"
    assert outdated("fsdp_min_num_params", 1000, keys).fix.as_yaml() == "fsdp_config: {min_num_params: 1000}"
    assert "`num_processes: 2`" in outdated("devices", 2, keys).text


# --- mutations of valid recipes --------------------------------------------------------------------------------------

VALUES = ["4.0", "-3", "null", "[1, 2]", "{a: 1}", "'yes'", "text", "true", "1e400", ".nan", "2024-01-01", "''",
          "!!x y", "*a", "&a 1", "[", "'", "\t", "0", "99999999999999999999", "a: b", "%", "@", "`", "|",
          "- 1", "\u00e9", "\x07"]  # fmt: skip


@st.composite
def mutated(draw):
    """A recipe with one thing wrong, or harmlessly other; with the line that it is on where that is known."""
    task = draw(st.sampled_from(stable_tasks()))
    lines = list(LINES[task])
    index = draw(st.integers(0, len(lines) - 1))
    key = lines[index].partition(":")[0]
    kind = draw(st.sampled_from(["misspelt", "dropped letter", "deleted", "value", "duplicated", "moved", "inserted"]))
    line = index + 1
    if kind == "misspelt":
        letter = draw(st.characters(codec="ascii", categories=["Ll"]))
        at = draw(st.integers(0, len(key)))
        lines[index] = key[:at] + letter + key[at:] + lines[index][len(key) :]
    elif kind == "dropped letter":
        at = draw(st.integers(1, len(key) - 1))
        lines[index] = key[:at] + key[at + 1 :] + lines[index][len(key) :]
    elif kind == "deleted":
        del lines[index]
    elif kind == "value":
        lines[index] = f"{key}: {draw(st.sampled_from(VALUES))}"
    elif kind == "duplicated":
        line = draw(st.integers(index + 1, len(lines))) + 1
        lines.insert(line - 1, lines[index])
    elif kind == "moved":
        lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(index))
    else:
        text = draw(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40))
        lines.insert(index, text)
    return task, kind, key, line, "\n".join(lines) + "\n"


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutated())
def test_mutations_of_valid_recipes_are_said_or_harmless(case):
    task, kind, key, line, text = case
    Path("recipe.yaml").write_bytes(text.encode())
    checked = validate("recipe.yaml", task=task)
    found = [(problem.place.line, problem.line()) for problem in checked.errors]
    if kind == "moved":
        assert found == []
    elif kind in ("misspelt", "dropped letter"):
        assert line in [number for number, _ in found], found
        assert any(f"{key!r}" in what or "is a key of" in what or f"`{key}` was re" in what
                   for number, what in found if number == line), found  # fmt: skip
    elif kind == "duplicated":
        assert [number for number, _ in found] == [line]
    for number, what in found:
        assert what.startswith("recipe.yaml")
        assert "\n" not in what
        assert number is None or 1 <= number <= text.count("\n") + 1
    if not found:
        assert checked.check() is None
        assert set(checked.values) <= set(load(task).keys)


MEANT = ["value", "deleted"]


@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutated().filter(lambda case: case[1] in MEANT))
def test_what_validate_lets_through_the_parser_of_trl_takes_too(case):
    task, _, _, _, text = case
    Path("recipe.yaml").write_bytes(text.encode())
    checked = validate("recipe.yaml", task=task)
    if checked.errors:
        with pytest.raises((RecipeError, PrecisionError)):
            read_recipe(task, ["--config", "recipe.yaml"])
    else:
        read = read_recipe(task, ["--config", "recipe.yaml"])
        assert read.task == task


# --- what surrounds a recipe -----------------------------------------------------------------------------------------


def test_overrides_are_checked_by_the_same_keys():
    words = ["--learning_rte", "1", "--num_generations", "4.0", "--bf16=perhaps", "--max-steps", "5", "--packing"]
    checked = check(GOOD, overrides=words)
    assert {problem.line() for problem in checked.errors} == {
        "on the command line: there is no key 'learning_rte'; did you mean 'learning_rate'?",
        "on the command line: num_generations must be an integer, got '4.0'",
        "on the command line: bf16 must be true or false, got 'perhaps'",
        "on the command line: 'packing' is a key of sft, not of grpo. Drop `--packing`",
    }
    assert checked.values["max_steps"] == 5
    assert said(check(GOOD, overrides=["stray", "--use_peft"])) == [(None, "stray does not belong to a key")]
    assert check(GOOD, overrides=["--no_use_cpu", "--no-dataloader-pin-memory"]).values["use_cpu"] is False


def test_the_command_line_mends_a_broken_file():
    assert said(check(GOOD.replace("generations: 2", "generations: 3"), overrides=["--num_generations", "2"])) == []
    ((line, text),) = said(check(GOOD, overrides=["--num_generations", "3"]))
    assert line is None
    assert "must be divisible by num_generations (3)" in text


@pytest.mark.parametrize(("argv", "expected"), [
    (["--config", "a.yaml", "--x", "1"], (Path("a.yaml"), ["--x", "1"])),
    (["--x", "--config=a.yaml"], (Path("a.yaml"), ["--x"])),
    (["--x"], (None, ["--x"])),
])  # fmt: skip
def test_the_file_of_a_command_line(argv, expected):
    assert split_config(argv) == expected
    with pytest.raises(RecipeError, match="--config needs a file"):
        split_config(["--config"])


@pytest.mark.parametrize(("said_by", "path", "text"), [
    ("folder", "sft/a.yaml", "model_name_or_path: a/b\n"),
    ("header", "a.yaml", "# safe-trainers sft --config a.yaml\nmodel_name_or_path: a/b\n"),
    ("keys", "a.yaml", "model_name_or_path: a/b\npacking: true\n"),
])  # fmt: skip
def test_the_task_is_told_by(said_by, path, text):
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text)
    assert validate(path).task == "sft"


def test_a_task_that_nothing_tells_is_asked_for(capsys):
    Path("recipe.yaml").write_text(GOOD)
    Path("twice.yaml").write_text("model_name_or_path: tiny:aria\nseed: 1\nseed: 2\n")
    assert main(["validate", "recipe.yaml", "twice.yaml", "nowhere.yaml", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    said = [(v["level"], v["text"], v.get("fix")) for v in report["verdicts"]]
    end = "only what these have in common was checked"
    assert said[0] == ("note", f"recipe.yaml: it could be a recipe for grpo, rloo; {end}", "write `--task grpo`")
    assert said[1] == ("ok", "recipe.yaml: grpo or rloo, 10 keys", None)
    first = (
        "grpo (with 1 more error), rloo (with 1 more error), sft, reward, dpo, kto, distillation (with 1 more error)"
    )
    assert said[2][1].startswith(f"twice.yaml: it could be a recipe for {first}; ")
    assert said[2][1].endswith(f"; {end}")
    assert said[3] == ("error", "twice.yaml: dataset_name is missing: a folder, a file, a name on the hub, or an "
                       "embedded dataset", "dataset_name: tiny:shapes")  # fmt: skip
    assert said[4] == ("error", "twice.yaml:3: 'seed' is written twice, first in line 2", "write it once")
    assert said[5][1].startswith("nowhere.yaml: there is no such file")


def test_what_several_tasks_have_in_common_is_checked_without_a_task():
    wrong = "learning_rte: 1\nbeta: low\nhub_strategy: foo\nenv: {VAR1: value1}\nnum_iterations: 4.0\n"
    Path("recipe.yaml").write_text(GOOD + wrong + "loss_type: grop\nnormalize_advantages: 3\n")
    found = validate("recipe.yaml").problems
    assert [p.place.line for p in found if p.level == "error"] == [13, 14, 15, 17]
    assert [p.place.line for p in found if p.level == "note"] == [None, 16]
    # Each of the last two keys belongs to one of them, and is wrong for it too.
    assert "a recipe for grpo (with 2 more errors), rloo (with 2 more errors)" in found[0].text
    assert validate("recipe.yaml").task == "grpo or rloo"


@pytest.mark.parametrize(("precision", "config", "errors"), [
    ("bf16", "fp16", 1), ("fp16", "bf16", 1), ("fp32", "bf16", 1), ("bf16", "bf16", 0),
    ("fp16", "no", 0), ("auto", "bf16", 1),
])  # fmt: skip
def test_a_launch_config_may_not_contradict_the_precision(precision, config, errors):
    Path("launch.yaml").write_text(f"distributed_type: NO\nmixed_precision: '{config}'\nnum_processes: 1\n")
    checked = check(GOOD.replace("bf16", precision).replace("use_cpu: true", "#"), accelerate_config="launch.yaml")
    assert [(p.place.file, p.place.line) for p in checked.errors] == [("launch.yaml", 2)] * errors
    assert all(p.fix.drop == ("mixed_precision",) for p in checked.errors)


def test_launch_configs_of_the_package_fit_every_recipe():
    for config in (one for one in packaged.packaged("configs") if one.path.suffix == ".yaml"):
        assert check(GOOD, accelerate_config=config.name.removesuffix(".yaml")).errors == ()
    ((_, text),) = said(check(GOOD, accelerate_config="zerro3"))
    assert text == "there is no config zerro3; did you mean 'zero3'?"


def test_batches_are_counted_over_the_processes_that_are_launched(monkeypatch):
    text = GOOD.replace("train_batch_size: 4", "train_batch_size: 1").replace("generations: 2", "generations: 8")
    assert "It fits 8 processes" in said(check(text))[0][1]
    Path("launch.yaml").write_text("num_processes: 8\n")
    assert said(check(text, accelerate_config="launch.yaml")) == []
    assert said(check(text, processes=8)) == []
    assert said(check(text.replace("# a header", "# safe-trainers grpo --config x --num_processes 8"))) == []
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert said(check(text, started=True)) == []


def test_columns_of_local_files(tmp_path):
    rows = {"prompt": "a", "picture": "b"}
    Path("a.jsonl").write_text(json.dumps(rows) + "\n{broken")
    Path("a.json").write_text(json.dumps([rows, rows]))
    Path("a.csv").write_text("prompt,picture\n1,2\n")
    Path("a.tsv").write_text("prompt\tpicture\n1\t2\n")
    pytest.importorskip("pyarrow.parquet").write_table(
        pytest.importorskip("pyarrow").table({"prompt": ["a"], "picture": ["b"]}), "a.parquet"
    )
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"):
        assert local_columns(Path(name)) == ["prompt", "picture"], name
    for name, content in {"b.json": "{", "c.parquet": "x", "d.jsonl": "\xff", "e.txt": "x", "f.json": "3"}.items():
        Path(name).write_bytes(content.encode("latin-1"))
        assert local_columns(Path(name)) is None
    folder = Path("data")
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"x": 1}))
    (folder / "train.jsonl").write_text(json.dumps(rows))
    assert local_columns(folder) == ["prompt", "picture"]
    assert local_columns(folder, "test") == ["x"]


def test_columns_are_those_that_datasets_makes(tmp_path):
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "solution": "c"}\n')
    assert local_columns(Path("rows.jsonl")) == ["prompt", "solution"]
    for folder, files in {
        "words": {"constraints.jsonl": {"x": 1}, "train.jsonl": {"prompt": "a"}},
        "folders": {"training/a.jsonl": {"x": 1}, "train/b.jsonl": {"prompt": "a"}},
        "images": {"metadata.jsonl": {"file_name": "1.png", "prompt": "a"}},
        "named": {"metadata.jsonl": {"photo_file_name": "1.png", "prompt": "a"}},
        "several": {"metadata.jsonl": {"file_names": ["1.png"], "prompt": "a"}},
    }.items():
        for name, row in files.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(json.dumps(row))
    assert local_columns(Path("words")) == local_columns(Path("folders")) == ["prompt"]
    assert local_columns(Path("images")) == ["image", "prompt"]
    assert local_columns(Path("named")) == ["photo", "prompt"]
    assert local_columns(Path("several")) == ["images", "prompt"]
    Path("words", "README.md").write_text("---\nconfigs:\n- config_name: a\n  data_files: constraints.jsonl\n---\n")
    assert local_columns(Path("words")) is None


def test_columns_that_trl_accepts_are_not_refused():
    values = "model_name_or_path: tiny:text\ndataset_name: rows.jsonl\nprecision: fp32\nuse_cpu: true\n"
    for task, row, more in (
        ("sft", {"conversations": [{"from": "user", "value": "a"}]}, ""),
        ("sft", {"content": "a"}, "dataset_text_field: content\n"),
        ("reward", {"chosen_ids": [1], "rejected_ids": [2]}, ""),
    ):
        Path("rows.jsonl").write_text(json.dumps(row))
        model = "tiny:reward" if task == "reward" else "tiny:text"
        Path("recipe.yaml").write_text(values.replace("tiny:text", model) + more)
        assert said(validate("recipe.yaml", task=task)) == []
    Path("rows.jsonl").write_text('{"text": "a"}')
    Path("recipe.yaml").write_text(values)
    (error,) = validate("recipe.yaml", task="sft", overrides=["--dataset_text_field", "content"]).errors
    assert "or content" in error.text


def test_two_keys_for_the_data_are_refused():
    values = GOOD + "datasets:\n- path: mine\n"
    (error,) = check(values).errors
    assert error.text == "datasets and dataset_name (tiny:shapes) both name the data of the run"


def test_a_recipe_is_held_against_the_columns_of_its_files():
    Path("data").mkdir()
    Path("data/train.jsonl").write_text(json.dumps({"problem": "a", "img": "b", "solution": "c"}))
    text = GOOD.replace("tiny:shapes", "./data")
    ((line, what),) = said(check(text))
    assert (line, what) == (3, "dataset ./data has the columns problem, img, solution; grpo needs prompt")
    assert said(check(text + "dataset_columns: {prompt: problem, images: img}\n")) == []
    ((line, what),) = said(check(text + "dataset_columns: {prompt: problm}\n"))
    assert line == 13
    assert "no column 'problm'; did you mean 'problem'?" in what
    ((line, what),) = said(check(text + "needs_images: true\ndataset_columns: {prompt: problem}\n"))
    assert "this recipe needs images" in what
    Path("data/train.jsonl").unlink()
    Path("data/metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "prompt": "b"}))
    assert said(check(text + "needs_images: true\n")) == []
    assert said(check(text + "dataset_columns: {prompt: prompt, images: image}\n")) == []


# --- rewards, by their text ------------------------------------------------------------------------------------------


def test_rewards_are_found_without_being_run(tmp_path):
    package = Path("mine")
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('never run')\nfrom .inner.deep import digits as shown\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text(
        "import functools\nif True:\n    def digits(completions, **kwargs): ...\n"
        "def few(a, b): ...\nmade = functools.partial(few)\nclass Judge: ...\n"
        "@functools.cache\ndef decorated(a): ...\nasync def later(completions, **kwargs): ...\n"
    )
    (package / "broken.py").write_text("def f(:\n")
    (package / "star.py").write_text("from os.path import *\n")
    for name in ("mine.shown", "mine.inner.deep.digits", "mine.inner.deep.made", "mine.inner.deep.decorated",
                 "mine.star.anything", "math.sqrt"):  # fmt: skip
        assert missing_function(name)[0] is None, name
    for name, text in {
        "mine.inner.deep.digit": "did you mean 'mine.inner.deep.digits'?",
        "mine.inner.deep.few": "is not a reward function",
        "mine.inner.deep.Judge": "is not a reward function",
        "mine.inner.shallow.x": "No module named 'mine.inner.shallow'",
        "mine.inner.deep.digits.x": "'mine.inner.deep' is not a package",
        "mine.broken.f": "SyntaxError",
        "mine.inner": "is not a reward function, but a module",
        "no.f": "No module named 'no'",
        ".f": "is not the name of a module",
    }.items():
        assert text in missing_function(name)[0].text, name
    assert not {"mine", "mine.inner", "mine.inner.deep"} & set(sys.modules)
    assert find_module("mine.inner.deep")[0] == Path("mine/inner/deep.py").absolute()


# --- the commands ----------------------------------------------------------------------------------------------------


def test_validate_takes_less_than_two_seconds_and_imports_neither_torch_nor_trl():
    code = (
        "import sys, time; start = time.process_time()\n"
        "from safe_trainers.cli.main import main\n"
        f"status = main(['validate', *{[str(path) for path in RUNNABLE]!r}])\n"
        "print('seconds', time.process_time() - start)\n"
        "print('modules', *sys.modules)\n"
        "sys.exit(status)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = dict(line.split(" ", 1) for line in out.stdout.splitlines() if line.startswith(("seconds ", "modules ")))
    assert float(lines["seconds"]) < 2  # of one core: what the machine does besides does not count
    assert not {"torch", "trl", "transformers", "datasets", "peft", "accelerate"} & set(lines["modules"].split())


def test_validate_as_json(capsys):
    Path("recipe.yaml").write_text(GOOD + "learning_rte: 1\nfp16: true\n")
    assert main(["validate", "recipe.yaml", "--task", "grpo", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["subject"] == "recipe.yaml"
    first, second = report["verdicts"]
    assert first["id"] == "precision-contradicts-flag"
    assert second["text"].startswith("recipe.yaml:13: there is no key 'learning_rte'")
    assert (second["level"], second["file"], second["line"]) == ("error", "recipe.yaml", 13)


def test_list_names_everything_with_one_line_each(capsys):
    assert main(["list", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert {row["name"] for row in tables["recipes"]} == {p.relative_to(ROOT / "recipes").as_posix() for p in RECIPES}
    files = {p.name for p in (ROOT / "configs").iterdir()} - {"README.md"}
    assert {row["name"] for row in tables["configs"]} == files
    assert all(row["model"] and row["hardware"] and row["precision"] for row in tables["recipes"])
    assert all(row["what"] for row in tables["configs"])


def test_copies_are_the_files_and_overwrite_nothing(capsys):
    assert main(["copy", "grpo/tiny_vlm_bf16"]) == 0
    assert main(["copy", "recipes/grpo/tiny_vlm_bf16.yaml", "mine.yaml"]) == 0
    original = (ROOT / "recipes" / "grpo" / "tiny_vlm_bf16.yaml").read_text()
    # A copy is the original, except that its line for editors names the schema of this installation.
    line, _, rest = Path("tiny_vlm_bf16.yaml").read_text().partition("\n")
    assert Path("mine.yaml").read_text() == f"{line}\n{rest}"
    assert rest == original.partition("\n")[2]
    assert unquote(urlparse(line.partition("$schema=")[2]).path) == str(path_of("grpo"))
    assert main(["copy", "zero3"]) == 0
    assert Path("zero3.yaml").read_text() == (ROOT / "configs" / "zero3.yaml").read_text()
    Path("mine.yaml").write_text("edited")
    capsys.readouterr()
    assert main(["copy", "grpo/tiny_vlm_bf16", "mine.yaml"]) == 2
    assert "mine.yaml exists already. Write `--force`, or another name" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "edited"
    assert main(["copy", "grpo/tiny_vlm_bf16", "mine.yaml", "--force"]) == 0
    assert Path("mine.yaml").read_text() == f"{line}\n{rest}"


@pytest.mark.parametrize(("argv", "text"), [
    (["grpo/tiny_vlm_bf61"], "there is no recipe grpo/tiny_vlm_bf61; did you mean 'grpo/tiny_vlm_bf16.yaml'?"),
    (["zerro3"], "there is no config zerro3; did you mean 'zero3'?"),
    (["tiny_vlm_bf16"], "tiny_vlm_bf16 is the name of distillation/tiny_vlm_bf16.yaml, "),
    (["zero3", "no/such/folder/x.yaml"], "there is no folder no/such/folder"),
    (["../../etc/passwd"], "there is no recipe"),
])  # fmt: skip
def test_copies_that_cannot_be_made(argv, text, capsys):
    assert main(["copy", *argv]) == 2
    assert text in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_the_environment_of_a_recipe_is_set_before_training(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    Path("recipe.yaml").write_text(GOOD + "env: {WANDB_MODE: online, TRACKIO_PROJECT: mine}\n")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare("grpo", ["--config", "recipe.yaml"])
    assert (os.environ["WANDB_MODE"], os.environ["TRACKIO_PROJECT"]) == ("offline", "mine")


def test_notes_are_said_when_training_begins(capsys):
    Path("recipe.yaml").write_text(GOOD + "trust_remote_code: true\n")
    prepare("grpo", ["--config", "recipe.yaml"])
    assert capsys.readouterr().err.startswith("note: recipe.yaml:13: trust_remote_code is on")


def test_a_contradiction_is_said_beside_keys_that_are_broken(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model_name_or_path: tiny:llava\ntorch_dtype: bfloat16\nprecision: fp16\nbf16: true\nuse_cpu: 'perhaps'\n"
    )
    checked = validate(tmp_path / "r.yaml", task="sft")
    said = {problem.place.line: problem.text for problem in checked.errors}
    assert "`torch_dtype` was renamed to `dtype`" in said[2]
    assert "bf16=True" in said[3]
    assert "use_cpu" in said[5]


@pytest.mark.parametrize("key", ["model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint",
                                 "deepspeed"])  # fmt: skip
@pytest.mark.parametrize("name", ["a" * 300, "~nobody_of_this_name/x", "/a" * 3000])
def test_names_that_no_file_can_have_are_no_traceback(key, name, capsys):
    Path("recipe.yaml").write_text("\n".join(line for line in GOOD.splitlines() if not line.startswith(key)))
    checked = validate("recipe.yaml", task="grpo", overrides=[f"--{key}", name])
    if key == "output_dir" and not name.startswith("~"):
        assert "cannot be a folder: File name too long" in checked.errors[0].text
    assert main(["validate", name]) == 2
    assert "there is no such file" in capsys.readouterr().out


def test_a_home_folder_is_expanded_for_whoever_reads_the_values(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("data").mkdir()
    Path("data/train.jsonl").write_text('{"prompt": "a"}\n')
    text = with_lines("!dataset_name: ~/data").replace("output_dir: out\n", "output_dir: ~/out\n")
    checked = check(text)
    assert checked.errors == ()
    assert checked.values["dataset_name"] == str(tmp_path / "data")
    assert checked.values["output_dir"] == str(tmp_path / "out")


def test_an_output_dir_without_a_name_is_the_default():
    assert check(GOOD.replace("output_dir: out", "output_dir: ''")).values["output_dir"] is None


def test_a_pipe_is_no_missing_file():
    os.mkfifo("pipe.yaml")
    assert validate("pipe.yaml", task="grpo").errors[0].text == "this is not a regular file"


def test_a_recipe_without_its_option(capsys):
    assert main(["grpo", "recipe.yaml"]) == 2
    assert "recipe.yaml does not belong to a key. Write `--config recipe.yaml`" in capsys.readouterr().err


def test_the_launch_config_of_a_header_is_in_the_header():
    text = GOOD.replace("# a header", "# safe-trainers grpo --config recipe.yaml --accelerate_config zero9")
    assert said(check(text)) == [(1, "there is no config zero9; did you mean 'zero3'?")]


def test_a_dtype_of_the_model_is_said_where_it_is_written_and_as_a_recipe_has_it():
    (error,) = check(GOOD + "dtype: bfloat16\nmodel_init_kwargs: {dtype: fp12}\n").errors
    assert (error.place.line, error.fix.as_yaml()) == (14, "dtype: fp32")
    (error,) = check(with_lines("!precision: bf61")).errors
    assert error.fix.as_yaml() == "precision: bf16"
    with pytest.raises(PrecisionError, match="fix: precision: bf16"):
        check(with_lines("!precision: bf61")).check()


def test_the_range_of_a_key_is_said_once():
    (error,) = check(GOOD + "num_train_epochs: -1\n").errors
    assert error.text == "num_train_epochs must be a number above 0, got -1.0"


@pytest.mark.parametrize("text", ["x" * 200_000, '"a"b,c\n', "\ufeffprompt,solution\n1,2\n"])
def test_the_first_line_of_a_table_is_its_columns_or_none(text):
    Path("data.csv").write_text(text, encoding="utf-8")
    found = local_columns(Path("data.csv"))
    assert found == ["prompt", "solution"] if "prompt" in text else found is None or len(found) == 2


def test_where_no_task_is_known_no_keys_are_named(capsys):
    Path("recipe.yaml").write_text(GOOD)
    assert main(["validate", "recipe.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"] == {}


def test_a_name_of_several_recipes_is_no_missing_file(capsys):
    assert main(["validate", "tiny_vlm_bf16"]) == 2
    said = capsys.readouterr().err
    assert "tiny_vlm_bf16 is the name of distillation/tiny_vlm_bf16.yaml, dpo/tiny_vlm_bf16.yaml, " in said


# --- what TRL accepts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [
    "accelerate_config: ddp\nnum_processes: 2", "num_processes: 2", "fsdp: true", "fsdp: []", "fsdp: ''",
    "fsdp: full_shard auto_wrap", "env: {VAR1: value1}", "model_init_kwargs: {trust_remote_code: true}",
    "!precision: null\nbf16: 'true'", "use_peft: 1", "use_peft: 'yes'", "seed: '7'",
    "!reward_funcs: accuracy_reward", "!report_to: [clearml, comet_ml]", "scale_rewards: 1",
    "attn_implementation: kernels-community/flash-attn", "model_init_kwargs: {num_hidden_layers: 2}",
    "use_peft: true\nlora_target_modules: all-linear", "use_peft: true\nlora_target_modules: lm_head",
    "use_peft: true\nlora_target_modules: .*q_proj", "use_peft: true\nlora_target_modules: [q_proj, v_proj]",
])  # fmt: skip
def test_what_trl_takes_is_no_error(lines):
    assert said(check(with_lines(lines))) == []


def test_processes_of_the_recipe_count_and_the_command_line_wins():
    text = GOOD.replace("train_batch_size: 4", "train_batch_size: 1").replace("generations: 2", "generations: 8")
    assert "It fits 8 processes" in said(check(text))[0][1]
    assert said(check(text + "num_processes: 8\n")) == []
    assert said(check(text + "num_processes: 8\n", processes=2)) != []
    Path("launch.yaml").write_text("num_processes: 8\n")
    assert said(check(text + "accelerate_config: launch.yaml\n")) == []
    # A process that was launched has its number from the environment.
    assert said(check(text + "num_processes: 8\n", started=True)) != []


def test_a_recipe_that_asks_for_processes_is_launched(monkeypatch):
    import safe_trainers.cli.launch as launching

    calls = []
    monkeypatch.setattr(launching, "launch", lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Path("recipe.yaml").write_text(GOOD + "accelerate_config: ddp\nnum_processes: 2\n")
    assert main(["grpo", "--config", "recipe.yaml", "--seed", "1"]) == 0
    assert main(["grpo", "--config", "recipe.yaml", "--num_processes", "4"]) == 0
    assert [call[:3] for call in calls] == [
        (["grpo", "--config", "recipe.yaml", "--seed", "1"], "ddp", 2),
        (["grpo", "--config", "recipe.yaml"], "ddp", 4),
    ]


def test_a_package_may_be_missing_where_a_recipe_is_edited(capsys):
    if importlib.util.find_spec("math_verify") is not None:
        pytest.skip("math_verify is installed")
    Path("recipe.yaml").write_text(with_lines("!reward_funcs: accuracy_reward"))
    (problem,) = validate("recipe.yaml", task="grpo").problems
    assert (problem.level, problem.text) == ("warning", "accuracy_reward needs the math_verify package")
    assert main(["validate", "recipe.yaml", "--task", "grpo"]) == 1
    with pytest.raises(RecipeError, match=r"accuracy_reward needs the math_verify package\. Run: pip install"):
        prepare("grpo", ["--config", "recipe.yaml"])


KTO = """\
model_name_or_path: tiny:llava
dataset_name: tiny:shapes
precision: bf16
per_device_train_batch_size: 1
"""


@pytest.mark.skipif("kto" not in stable_tasks(), reason="KTO is not stable in this release")
def test_kto_needs_two_completions_in_a_batch(tmp_path):
    """TRL's trainer refuses it, after the model and the data were loaded."""
    import trl

    from safe_trainers import tiny

    ((line, what),) = said(check(KTO, "kto"))
    assert (line, what.split(",")[0]) == (4, "per_device_train_batch_size is 1")
    assert said(check(KTO + "loss_type: apo_zero_unpaired\n", "kto")) == []
    assert said(check(KTO.replace("size: 1", "size: 2"), "kto")) == []
    assert (
        "train_sampling_strategy is random"
        in said(check(KTO.replace("size: 1", "size: 2") + "train_sampling_strategy: random\n", "kto"))[0][1]
    )
    tiny.save("text", tmp_path / "model")
    data = tiny.unpaired_preference_dataset(8).remove_columns("image")
    settings = {"output_dir": str(tmp_path), "per_device_train_batch_size": 1, "report_to": "none", "bf16": False}
    with pytest.raises(ValueError, match="batch size must be > 1"):
        trl.KTOTrainer(str(tmp_path / "model"), args=trl.KTOConfig(**settings, use_cpu=True), train_dataset=data)


@pytest.mark.parametrize(("lines", "levels"), [
    ("bf16: false\ndtype: float16", {"half-trainables": "warning"}),
    ("bf16: true\ndtype: bfloat16", {"half-trainables": "warning"}),
    ("bf16: true\nmodel_init_kwargs: {dtype: bfloat16}", {"half-trainables": "warning"}),
    ("fp16: true\ndtype: float16\nupcast_trainables: false", {"half-trainables-under-loss-scaling": "error"}),
    ("fp16: true\ndtype: float16", {}),
    ("bf16: true\ndtype: bfloat16\nuse_peft: true", {}),
    ("bf16: true\ndtype: float32", {}),
    ("bf16: true", {}),
])  # fmt: skip
def test_weights_that_are_trained_in_half_precision_are_found_before_a_run(lines, levels):
    text = f"model_name_or_path: tiny:llava\ndataset_name: tiny:shapes\n{lines}\n"
    assert {p.id: p.level for p in check(text, "sft").problems} == levels
    for problem in check(text, "sft").problems:
        if problem.fix.settings:
            lines = [f"{key}: {yaml_value(value)}" for key, value in problem.fix.settings]
            kept = [line for line in text.splitlines() if line.split(":")[0] not in dict(problem.fix.settings)]
            assert check("\n".join([*kept, *lines]), "sft").problems == ()


def test_code_from_the_hub_is_noted():
    notes = said(check(GOOD + "attn_implementation: user/kernel\n"), "note")
    assert notes == [(13, "attn_implementation 'user/kernel' is code from the hub: it is downloaded and run")]
    lines = "model_init_kwargs: {attn_implementation: user/kernel, use_kernels: true, trust_remote_code: true}\n"
    assert [what.split(":")[0] for _, what in said(check(GOOD + lines), "note")] == [
        "trust_remote_code is on", "attn_implementation 'user/kernel' is code from the hub", "use_kernels is on",
    ]  # fmt: skip
    assert said(check(GOOD + "attn_implementation: sdpa\n"), "note") == []


def test_a_copy_into_a_folder_that_does_not_exist_names_the_command(capsys):
    assert main(["copy", "slurm", "new folder/"]) == 2
    assert "there is no folder new folder. Run: mkdir -p 'new folder'" in capsys.readouterr().err
    assert os.listdir() == []
    os.mkdir("new folder")
    assert main(["copy", "slurm", "new folder/"]) == 0
    assert os.listdir("new folder") == ["slurm.sbatch"]


def test_a_misspelt_file_of_a_dataset_gets_the_nearest_and_a_name_on_the_hub_is_left_alone():
    Path("data").mkdir()
    Path("data/train.jsonl").write_text('{"prompt": "a"}\n')
    wrong = check(GOOD.replace("tiny:shapes", "data/trian.jsonl").replace("tiny:llava", "tiny:text"))
    assert said(wrong) == [(3, "dataset path data/trian.jsonl does not exist; did you mean 'data/train.jsonl'?")]
    assert said(check(GOOD.replace("tiny:shapes", "openai/gsm8k-v1.1").replace("tiny:llava", "tiny:text"))) == []


@pytest.mark.parametrize(("name", "is_missing"), [
    ("chat.jinja", True), ("chat.j2", True), ("./model", True), ("Qwen/Qwen3-0.6B", False), ("mine.jinja", False),
])  # fmt: skip
def test_a_chat_template_that_is_not_there_is_an_error_unless_it_may_be_a_model(name, is_missing):
    Path("mine.jinja").write_text("{{ messages }}")
    text = f"model_name_or_path: tiny:text\ndataset_name: tiny:shapes\nchat_template_path: {name}\n"
    found = [what for line, what in said(check(text, task="sft")) if line == 3]
    assert [what.split(";")[0] for what in found] == [f"chat template {name} does not exist"] * is_missing


@pytest.mark.parametrize(("task", "key", "word", "line"), [
    ("sft", "record_steps", "[1, 2]", "--record_steps 1 2"),
    ("grpo", "reward_funcs", '["think_format_reward"]', "--reward_funcs think_format_reward"),
    ("sft", "record_steps", "[]", "--record_steps none"),
])  # fmt: skip
def test_a_list_in_the_form_of_a_file_gets_the_form_of_the_command_line(task, key, word, line):
    found = [problem.line() for problem in validate(None, task=task, overrides=[f"--{key}", word]).errors]
    (refused,) = [text for text in found if key in text and "separate words" in text]
    assert refused.endswith(f"got {word}. Write: {line}")
    _, *words = line.split()
    again = validate(None, task=task, overrides=[f"--{key}", *words])
    assert not any("separate words" in problem.line() for problem in again.errors)

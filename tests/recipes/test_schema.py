"""The written keys are those of the dataclasses, and values are brought to their types without losing meaning."""

import dataclasses
import json
import re
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
import trl
import yaml

from safe_trainers.core.errors import RecipeError
from safe_trainers.core.versions import stable_tasks
from safe_trainers.recipes import schema as schemas
from safe_trainers.recipes.accepted_values import choices_of
from safe_trainers.recipes.keys import recipe_classes
from safe_trainers.recipes.schema import Key, available, convert, convert_words, load
from safe_trainers.recipes.schema_from_trl import json_schema, live_schema, to_json
from safe_trainers.recipes.yaml_file import EDITORS


HERE = {package: metadata.version(package) for package in ("trl", "transformers")}


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def written(task, trl_version):
    return schemas.FOLDER / f"trl-{trl_version}" / f"{task}.json"


@pytest.mark.skipif(not written("grpo", HERE["trl"]).is_file(), reason="no schema of this TRL was written")
@pytest.mark.parametrize("task", stable_tasks())
def test_the_written_schema_is_that_of_the_installed_packages(task):
    content = written(task, HERE["trl"]).read_text()
    if json.loads(content)[schemas.VERSIONS] != HERE:
        pytest.skip("the schema was written beside another transformers")
    assert content == to_json(json_schema(task)), "run: make schema"


# --- the schemas are standard ----------------------------------------------------------------------------------------


class Yaml12(yaml.SafeLoader):
    """Reads `1e-5` as a number, as YAML 1.2 and editors do."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


@pytest.mark.parametrize("path", sorted(schemas.FOLDER.rglob("*.json")), ids=lambda p: f"{p.stem}-{p.parent.name}")
def test_every_schema_is_valid_json_schema(path):
    content = json.loads(path.read_text())
    assert content["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(content)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.relative_to(ROOT / "recipes").as_posix())
def test_every_recipe_names_its_schema_for_editors_and_satisfies_it(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# {EDITORS} $schema=")
    schema = path.parent / first.partition("$schema=")[2]
    assert schema.resolve() == written(path.parent.name, available()[-1]).resolve()
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(yaml.load(path.read_text(), Yaml12))


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("learning_rte: 1e-5", []),
        ("num_generations: 4.5", ["num_generations"]),
        ("bf16: 'on'", ["bf16"]),
        ("loss_type: grop", ["loss_type"]),
        ("accelerate_config: [ddp]", ["accelerate_config"]),
        ("num_processes: 0", ["num_processes"]),
        ("optim: adamw_troch", ["optim"]),
        ("precision: bf61", ["precision"]),
        ("top_p: 1.5", ["top_p"]),
        ("reward_weights: [1, x]", ["reward_weights", 1]),
        ("loss_scale_growth_factor: 1", ["loss_scale_growth_factor"]),
        ("env: {A: [1]}", ["env", "A"]),
    ],
)
def test_an_editor_underlines_what_validate_refuses(line, where):
    validator = jsonschema.Draft202012Validator(json.loads(written("grpo", available()[-1]).read_text()))
    (error,) = validator.iter_errors(yaml.load(line, Yaml12))
    assert list(error.absolute_path) == where


def test_there_is_a_schema_of_the_pinned_trl_and_of_the_oldest_supported_minor():
    pins = dict(line.split("==") for line in Path("constraints.txt").read_text().split() if "==" in line)
    assert pins["trl"] in available()
    assert available()[0].startswith("0.29.")


@pytest.mark.parametrize("task", stable_tasks())
def test_every_field_of_every_dataclass_is_a_key(task):
    fields = {f.name: cls for cls in recipe_classes(task) for f in dataclasses.fields(cls) if f.init}
    live = live_schema(task)
    assert set(live.keys) == set(fields)
    parser = trl.TrlParser(recipe_classes(task))
    defaults = {action.dest: action.default for action in reversed(parser._actions)}  # `--no_x` comes after `--x`
    for name, key in live.keys.items():
        expected = defaults[name]
        if expected is None and name == "debug":  # the parser forgets the default of a union with a list
            expected = ""
        expected = getattr(expected, "value", expected)
        assert key.default == (list(expected) if isinstance(expected, tuple) else expected), name
        assert set(key.types) <= {*schemas.IN_WORDS, schemas.LIST, schemas.NULL}, name


@pytest.mark.parametrize("task", stable_tasks())
def test_the_default_of_every_key_is_a_value_of_it(task):
    for key in live_schema(task).keys.values():
        if key.default is not None or "null" in key.types:
            assert convert(key, key.default) == key.default, key.name


def test_values_are_read_from_the_libraries():
    """The strings that the installed libraries accept; a release that compares others needs a look here."""
    from peft import TaskType
    from transformers.integrations import get_available_reporting_integrations

    keys = live_schema("grpo").keys
    losses = {"bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo"}
    assert losses <= set(keys["loss_type"].choices) <= losses | {"vespo"}
    assert set(keys["vllm_mode"].choices) == {"colocate", "server"}
    assert set(keys["importance_sampling_level"].choices) == {"sequence", "token"}
    assert set(keys["scale_rewards"].choices) == {"batch", "group", "none"}
    assert set(keys["lora_task_type"].choices) == {kind.value for kind in TaskType}
    assert {"all", "none", *get_available_reporting_integrations()} <= set(keys["report_to"].choices)
    assert {"eager", "sdpa", "flash_attention_2"} <= set(keys["attn_implementation"].choices)
    assert keys["lora_target_modules"].examples == ("all-linear",)
    assert {"dtype", "torch_dtype", "attn_implementation", "revision", "trust_remote_code", "device_map",
            "quantization_config"} <= set(keys["model_init_kwargs"].entries)  # fmt: skip
    assert {"sigmoid", "ipo", "hinge"} <= set(live_schema("dpo").keys["loss_type"].choices)


@pytest.mark.parametrize("task", ["grpo", "dpo", "sft", "kto"])
def test_losses_that_are_not_in_the_schema_are_refused_by_trl(task):
    """Each string that the trainer compares its loss with is a choice, and it raises for any other."""
    if task not in stable_tasks():
        pytest.skip("this release has no stable trainer of this task")
    key = live_schema(task).keys["loss_type"]
    default = key.default if isinstance(key.default, str) else key.default[0]
    assert default in key.choices
    field = {f.name: f for f in dataclasses.fields(recipe_classes(task)[2])}["loss_type"]
    named = set(re.findall(r"`?'([a-z_]+)'`?", field.metadata["help"]))
    assert {name for name in named if name in key.choices or name.endswith("po")} <= set(key.choices)


def test_a_scan_that_finds_too_little_restricts_nothing():
    @dataclasses.dataclass
    class Config:
        vllm_mode: str = "elsewhere"

    (field,) = dataclasses.fields(Config)
    assert choices_of(Config, field) == ()


def test_a_version_between_two_schemas_takes_the_older_one():
    assert load("grpo", "0.29.0").versions["trl"] == "0.29.1"
    assert load("grpo", "1.3.0").versions["trl"] == "0.29.1"
    assert load("grpo", "1.99.0").versions["trl"] == available()[-1]
    assert "warmup_ratio" in load("sft", "0.29.1").keys
    assert "warmup_ratio" not in load("sft", "1.16.0").keys
    with pytest.raises(RecipeError, match="'gpro' is not a task"):
        load("gpro")


def test_a_trainer_that_became_stable_later_has_the_oldest_schema_of_its_own():
    assert load("kto", "1.9.0").versions["trl"] == "1.16.0"
    assert load("dpo", "1.9.0").versions["trl"] == "0.29.1"


def test_an_installation_without_schemas_says_how_to_write_one(monkeypatch, tmp_path):
    monkeypatch.setattr(schemas, "FOLDER", tmp_path)
    with pytest.raises(RecipeError, match=r"Run: python -m safe_trainers\.recipes\.schema_from_trl"):
        load("grpo")


KEYS = load("grpo").keys
FITS = [
    ("learning_rate", "1e-5", "1e-5", 1e-5),
    ("learning_rate", 1, "1", 1.0),
    ("num_generations", 4, "4", 4),
    ("num_generations", "4", "4", 4),
    ("num_generations", None, "null", None),
    ("bf16", True, "true", True),
    ("bf16", "true", "true", True),
    ("bf16", "No", "No", False),
    ("use_peft", 1, "1", True),
    ("use_peft", 0, "0", False),
    ("fsdp", True, "true", True),
    ("fsdp", [], None, []),
    ("fsdp", "full_shard auto_wrap", None, "full_shard auto_wrap"),
    ("attn_implementation", "kernels-community/flash-attn", None, "kernels-community/flash-attn"),
    ("save_strategy", False, "no", "no"),
    ("run_name", 2024, "2024", "2024"),
    ("run_name", 1.5, "1.50", "1.50"),
    ("scale_rewards", False, "false", False),
    ("resume_from_checkpoint", True, "true", True),
    ("reward_funcs", "think_format_reward", "think_format_reward", ["think_format_reward"]),
    ("reward_weights", [1, 0.5], None, [1.0, 0.5]),
    ("reward_weights", 2, "2", [2.0]),
    ("lora_target_modules", "all-linear", "all-linear", ["all-linear"]),
    ("model_init_kwargs", '{"dtype": "bfloat16"}', None, {"dtype": "bfloat16"}),
    ("deepspeed", "ds.json", "ds.json", "ds.json"),
    ("report_to", ["wandb"], None, ["wandb"]),
    ("report_to", "wandb", None, "wandb"),
    ("datasets", [{"path": "a"}], None, [{"path": "a"}]),
]


@pytest.mark.parametrize(("name", "value", "text", "expected"), FITS)
def test_values_that_fit(name, value, text, expected):
    made = convert(KEYS[name], value, text)
    assert made == expected
    assert type(made) is type(expected)


UNFIT = [
    ("num_generations", 4.0, "num_generations must be an integer, got 4.0", "num_generations: 4"),
    ("num_generations", True, "num_generations must be an integer, got true", None),
    ("num_generations", "four", "num_generations must be an integer, got 'four'", None),
    ("num_generations", [2], "num_generations must be an integer, got a list of 1", "num_generations: 2"),
    ("num_generations", {"a": 1}, "num_generations must be an integer, got `key: value` pairs", None),
    ("learning_rate", float("nan"), "learning_rate must be a number, got nan", None),
    ("learning_rate", float("inf"), "learning_rate must be a number, got inf", None),
    ("learning_rate", None, "learning_rate must be a number, got null", "learning_rate: 1e-6"),
    ("bf16", 2, "bf16 must be true or false, got 2", None),
    ("bf16", "perhaps", "bf16 must be true or false, got 'perhaps'", None),
    ("use_peft", "off", "use_peft must be true or false, got 'off'", "use_peft: false"),
    ("optim", "adamw_troch", "optim must be one of adamw_torch", "optim: adamw_torch"),
    ("run_name", True, "run_name must be a string, got true", 'run_name: "True"'),
    ("run_name", ["a", "b"], "run_name must be a string, got a list of 2", None),
    ("reward_weights", [1, "x"], "reward_weights must be a list of numbers, got a list that holds 'x'", None),
    ("reward_funcs", [{"a": 1}], "reward_funcs must be a list of strings, got a list that holds", None),
    ("reward_funcs", [None], "reward_funcs must be a list of strings, got a list that holds null", None),
    ("model_init_kwargs", "[1]", "must be `key: value` pairs, got", "model_init_kwargs: {dtype: bfloat16}"),
    ("model_init_kwargs", 3, "must be `key: value` pairs, got", "model_init_kwargs: {dtype: bfloat16}"),
    ("pad_to_multiple_of", "no", "pad_to_multiple_of must be one of auto or an integer, got 'no'", None),
    ("datasets", [{"path": "a", "nmae": "b"}], "datasets has no entry 'nmae'; did you mean 'name'?", None),
    ("image_resize", [1], "image_resize must be a list of 2 integers, got a list of 1", None),
    ("image_mode", "RBG", "image_mode must be one of RGB, RGBA, L, got 'RBG'", "image_mode: RGB"),
    ("loss_type", "grop", "loss_type must be one of bnpo, cispo, dapo, dr_grpo, grpo,", "loss_type: grpo"),
    ("report_to", "foo", "report_to must be one of all, none, azure_ml,", None),
    ("report_to", ["wandb", "tensorbord"], "got 'tensorbord'", "report_to: [wandb, tensorboard]"),
    ("report_to", "tensorbord", "got 'tensorbord'", "report_to: tensorboard"),
    ("lora_task_type", "CAUSAL", "lora_task_type must be one of SEQ_CLS", "lora_task_type: CAUSAL_LM"),
    ("attn_implementation", "spda", "or the name of a kernel on the hub, got 'spda'", "attn_implementation: sdpa"),
    ("include_num_input_tokens_seen", "x", "must be one of no or true or false, got 'x'", None),
    ("parallelism_config", {"a": 1}, "parallelism_config cannot be set in a recipe", "drop `parallelism_config`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said", "fix"), UNFIT)
def test_values_that_do_not_fit(name, value, said, fix):
    with pytest.raises(RecipeError) as caught:
        convert(KEYS[name], value, str(value))
    (problem,) = caught.value.problems
    assert said in problem.text
    assert (None if problem.fix is None else problem.fix.as_yaml()) == fix


def test_pairs_have_two_numbers():
    pair = load("rloo").keys["reward_clip_range"]
    assert convert(pair, [-1, 1]) == [-1.0, 1.0]
    with pytest.raises(match="a list of 2 numbers, got a list of 3"):
        convert(pair, [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("bf16", [], True),
        ("bf16", ["no"], False),
        ("bf16", ["none"], None),
        ("learning_rate", ["1e-5"], 1e-5),
        ("top_k", ["3"], 3),
        ("report_to", ["none"], "none"),
        ("reward_funcs", ["a.b", "c.d"], ["a.b", "c.d"]),
        ("model_init_kwargs", ['{"dtype": "auto"}'], {"dtype": "auto"}),
        ("datasets", ['{"path": "a"}'], [{"path": "a"}]),
        ("scale_rewards", ["false"], False),
        ("save_strategy", ["no"], "no"),
    ],
)
def test_words_of_a_command_line(name, words, expected):
    assert convert_words(KEYS[name], words) == expected


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("learning_rate", [], "--learning_rate needs a value: a number"),
        ("learning_rate", ["1", "2"], "accepts one value, got 2: 1 2"),
        ("num_generations", ["4.0"], "num_generations must be an integer, got '4.0'"),
        ("bf16", ["perhaps"], "bf16 must be true or false, got 'perhaps'"),
    ],
)
def test_words_that_do_not_fit(name, words, said):
    with pytest.raises(RecipeError) as caught:
        convert_words(KEYS[name], words)
    assert said in str(caught.value)


def test_long_values_are_shown_short():
    assert schemas.shown("x" * 500).endswith("...'")
    assert len(schemas.shown("x" * 500)) <= 60
    assert Key("a", ("object",)).accepted == "`key: value` pairs"

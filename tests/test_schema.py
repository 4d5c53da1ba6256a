"""The written keys are those of the dataclasses, and values are brought to their types without losing meaning."""

import dataclasses
import json
from importlib import metadata
from pathlib import Path

import pytest
import trl
from trl.trainer import grpo_trainer

from safe_trainers import schema as schemas
from safe_trainers.embedded import COLUMNS
from safe_trainers.errors import RecipeError
from safe_trainers.recipes import TASKS, recipe_classes
from safe_trainers.schema import Key, UnfitValueError, available, convert, convert_words, load
from safe_trainers.schema_make import CHOICES, live_schema, make


HERE = {package: metadata.version(package) for package in ("trl", "transformers")}


def written(trl_version):
    return schemas.FOLDER / f"trl-{trl_version}.json"


@pytest.mark.skipif(not written(HERE["trl"]).is_file(), reason="no schema of this TRL was written")
def test_the_written_schema_is_that_of_the_installed_packages():
    content = written(HERE["trl"]).read_text()
    if json.loads(content)["versions"] != HERE:
        pytest.skip("the schema was written beside another transformers")
    assert content == make(), "run: make schema"


def test_there_is_a_schema_of_the_pinned_trl_and_of_the_oldest_supported_minor():
    pins = dict(line.split("==") for line in Path("constraints.txt").read_text().split() if "==" in line)
    assert pins["trl"] in available()
    assert available()[0].startswith("0.29.")


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_every_dataclass_is_a_key(task):
    fields = {f.name: cls for cls in recipe_classes(task) for f in dataclasses.fields(cls) if f.init}
    live = live_schema(task)
    assert set(live.keys) == set(fields)
    assert set(schemas.TASKS) == set(TASKS) == set(COLUMNS)
    parser = trl.TrlParser(recipe_classes(task))
    defaults = {action.dest: action.default for action in reversed(parser._actions)}  # `--no_x` comes after `--x`
    for name, key in live.keys.items():
        expected = defaults[name]
        if expected is None and name == "debug":  # the parser forgets the default of a union with a list
            expected = ""
        expected = getattr(expected, "value", expected)
        assert key.default == (list(expected) if isinstance(expected, tuple) else expected), name
        assert key.source in {base.__name__ for base in fields[name].__mro__}
        assert set(key.types) <= {*schemas.IN_WORDS, "null", "object"}, name


@pytest.mark.parametrize("task", TASKS)
def test_the_default_of_every_key_is_a_value_of_it(task):
    for key in live_schema(task).keys.values():
        if key.default is not None or "null" in key.types:
            assert convert(key, key.default) == key.default, key.name


@pytest.mark.parametrize(
    "name",
    ["importance_sampling_level", "multi_objective_aggregation", "scale_rewards", "vllm_importance_sampling_mode"],
)
def test_choices_that_only_trls_source_knows_are_in_it(name):
    source = Path(grpo_trainer.__file__).read_text()
    for choice in CHOICES[name]:
        assert f'"{choice}"' in source or f"'{choice}'" in source


def test_a_version_between_two_schemas_takes_the_older_one():
    assert load("grpo", "0.29.0").versions["trl"] == "0.29.1"
    assert load("grpo", "1.3.0").versions["trl"] == "0.29.1"
    assert load("grpo", "1.99.0").versions["trl"] == available()[-1]
    assert "warmup_ratio" in load("sft", "0.29.1").keys
    assert "warmup_ratio" not in load("sft", "1.16.0").keys
    with pytest.raises(RecipeError, match="there is no task 'gpro'"):
        load("gpro")


def test_an_installation_without_schemas_says_how_to_write_one(monkeypatch, tmp_path):
    monkeypatch.setattr(schemas, "FOLDER", tmp_path)
    with pytest.raises(RecipeError, match=r"Run: python -m safe_trainers\.schema_make"):
        load("grpo")


KEYS = load("grpo").keys
FITS = [
    ("learning_rate", "1e-5", "1e-5", 1e-5),
    ("learning_rate", 1, "1", 1.0),
    ("num_generations", 4, "4", 4),
    ("num_generations", "4", "4", 4),
    ("num_generations", None, "null", None),
    ("bf16", True, "true", True),
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
    ("datasets", [{"path": "a"}], None, [{"path": "a"}]),
]


@pytest.mark.parametrize(("name", "value", "text", "expected"), FITS)
def test_values_that_fit(name, value, text, expected):
    made = convert(KEYS[name], value, text)
    assert made == expected
    assert type(made) is type(expected)


UNFIT = [
    ("num_generations", 4.0, "num_generations is 4.0, and takes a whole number", "num_generations: 4"),
    ("num_generations", True, "num_generations is true, and takes a whole number", None),
    ("num_generations", "four", "num_generations is 'four', and takes a whole number", None),
    ("num_generations", [2], "num_generations is a list of 1, and takes one value", "num_generations: 2"),
    ("num_generations", {"a": 1}, "num_generations is `key: value` pairs", None),
    ("learning_rate", float("nan"), "learning_rate is nan, and takes a number", None),
    ("learning_rate", float("inf"), "learning_rate is inf, and takes a number", None),
    ("learning_rate", None, "learning_rate is null, and takes a number", "drop the line for its default: 1e-06"),
    ("bf16", "yes", "bf16 is 'yes', and takes true or false", "bf16: true"),
    ("bf16", 1, "bf16 is 1, and takes true or false", "bf16: true"),
    ("use_peft", "off", "use_peft is 'off', and takes true or false", "use_peft: false"),
    ("optim", "adamw_troch", "optim is 'adamw_troch', and takes one of", "optim: adamw_torch"),
    ("run_name", True, "run_name is true, and takes text", 'run_name: "true"'),
    ("run_name", ["a", "b"], "run_name is a list of 2, and takes one value: text", None),
    ("reward_weights", [1, "x"], "reward_weights holds 'x', and takes a list of numbers", None),
    ("reward_funcs", [{"a": 1}], "reward_funcs holds `key: value` pairs, and takes a list of texts", None),
    ("reward_funcs", [None], "reward_funcs holds null, and takes a list of texts", None),
    ("model_init_kwargs", "[1]", "holds no `key: value` pairs", "model_init_kwargs: {dtype: bfloat16}"),
    ("model_init_kwargs", 3, "holds no `key: value` pairs", "model_init_kwargs: {dtype: bfloat16}"),
    ("pad_to_multiple_of", "no", "pad_to_multiple_of is 'no', and takes one of auto or a whole number", None),
    ("datasets", [{"path": "a", "nmae": "b"}], "datasets has no 'nmae'; did you mean 'name'?", None),
    ("image_resize", [1], "image_resize is a list of 1, and takes 2 numbers", None),
    ("image_mode", "RBG", "image_mode is 'RBG', and takes one of", "image_mode: RGB"),
    ("include_num_input_tokens_seen", "x", "takes one of no or true or false", None),
    ("parallelism_config", {"a": 1}, "parallelism_config takes an object", "drop `parallelism_config`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said", "fix"), UNFIT)
def test_values_that_do_not_fit(name, value, said, fix):
    with pytest.raises(UnfitValueError) as caught:
        convert(KEYS[name], value, str(value))
    assert said in caught.value.text
    assert caught.value.fix == fix


def test_pairs_have_two_numbers():
    pair = load("rloo").keys["reward_clip_range"]
    assert convert(pair, [-1, 1]) == [-1.0, 1.0]
    with pytest.raises(UnfitValueError, match="a list of 3, and takes 2 numbers"):
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
        ("learning_rate", [], "--learning_rate needs a number"),
        ("learning_rate", ["1", "2"], "takes one value, and 1 2 are 2"),
        ("num_generations", ["4.0"], "num_generations is '4.0', and takes a whole number"),
        ("bf16", ["perhaps"], "bf16 is 'perhaps', and takes true or false"),
    ],
)
def test_words_that_do_not_fit(name, words, said):
    with pytest.raises(UnfitValueError) as caught:
        convert_words(KEYS[name], words)
    assert said in caught.value.text


def test_long_values_are_shown_short():
    assert schemas.shown("x" * 500).endswith("...'")
    assert len(schemas.shown("x" * 500)) <= 60
    assert Key("a", ("object",)).taken == "nothing a recipe can hold"

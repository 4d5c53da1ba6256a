"""Recipes are read as data, with lines, and a file that is none is said to be none."""

import json
from pathlib import Path

import pytest
import yaml

from safe_trainers.core.errors import RecipeError, yaml_value
from safe_trainers.recipes import env as environment
from safe_trainers.recipes.env import ALLOWED, apply, variables
from safe_trainers.recipes.schema import Key, convert
from safe_trainers.recipes.validate import prepare
from safe_trainers.recipes.yaml_file import MAX_BYTES, read_file


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content, name="recipe.yaml"):
        data = content if isinstance(content, bytes) else content.encode()
        Path(name).write_bytes(data)
        return read_file(name)

    return write


def test_keys_have_their_lines_and_values_their_text(written):
    read = written("# a header\n# of two lines\n\na: 1e-5\n\nb:\n  - x\n  - y\nc: {d: 1}\nno: off\n# end\n")
    assert read.problems == []
    assert read.header == ("a header", "of two lines")
    assert {key: (entry.value, entry.line) for key, entry in read.entries.items()} == {
        "a": (1e-5, 4),
        "b": (["x", "y"], 6),
        "c": ({"d": 1}, 9),
        "no": (False, 10),
    }
    assert read.entries["b"].items == (7, 8)
    assert read.entries["no"].text == "off"


def test_what_is_read_is_what_yaml_says(written):
    """Without keys that YAML 1.1 reads as something else, the values are those of PyYAML's safe loader."""
    text = "base: &base {a: 1, b: [1, 2]}\nmore:\n  <<: *base\n  b: 3\nagain: *base\ntext: 'x: y'\nfloat: 1.0e-3\n"
    read = written(text)
    assert read.problems == []
    assert {key: entry.value for key, entry in read.entries.items()} == yaml.safe_load(text)


def test_merged_keys_are_not_written_twice(written):
    read = written("defaults: &d {a: 1}\n<<: *d\na: 2\n")
    assert read.problems == []
    assert read.entries["a"].value == 2


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings_that_editors_write(encoding, written):
    bom = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    read = written(bom + "# Ä\na: é\n".encode(encoding))
    assert read.problems == []
    assert (read.entries["a"].value, read.entries["a"].line) == ("é", 2)
    assert read.header == ("Ä",)


def bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


FLAWS = {
    "unclosed bracket": ("a: 1\nb: [1, 2\nc: 3\n", 2, "while parsing a flow sequence"),
    "unclosed bracket at the end": ("a: 1\nb: [1, 2\n", 2, "while parsing a flow sequence"),
    "unclosed brace": ("a: 1\n\nb: {c: 1\n", 3, "while parsing a flow mapping"),
    "unclosed quote": ("a: 1\nb: 'x\nc: 3\n", 2, "while scanning a quoted scalar"),
    "tab": ("a: 1\nb:\n\tc: 3\n", 3, "a tab"),
    "line without a colon": ("a: 1\nb 2\nc: 3\n", 2, "a line without `key: value`"),
    "wrong indentation": ("a: 1\n   b: 2\n", 2, "mapping values are not allowed here"),
    "written twice": ("a: 1\nb: 2\na: 3\n", 3, "'a' is written twice, first in line 1"),
    "written twice, below": ("a:\n  b: 2\n  b: 3\n", 3, "'b' is written twice, first in line 2"),
    "list": ("- a\n- b\n", 1, "this holds a list"),
    "one value": ("\nhello\n", 2, "this holds one value"),
    "empty": ("", None, "this holds nothing"),
    "only comments": ("# a\n# b\n", None, "this holds nothing"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "expected a single document"),
    "code": ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2, "a recipe is data, and cannot name code"),
    "own tag": ("a: !mine 1\n", 1, "a recipe is data, and cannot name code"),
    "unknown anchor": ("a: 1\nb: *c\n", 2, "found undefined alias"),
    "recursive alias": ("a: &a [*a]\n", None, "its YAML aliases are recursive"),
    "billion values": (bomb(9), None, "its YAML aliases stand for more than"),
    "deep brackets": ("a: " + "[" * 5000, None, "nested too deeply"),
    "deep closed brackets": ("a: " + "[" * 900 + "]" * 900, None, "nested too deeply"),
    "no date": ("a: 1\nb: 2024-13-45\n", 2, "YAML cannot read the value of b"),
    "number of 5000 digits": (f"a: 1\n\nb: {'9' * 5000}\n", 3, "YAML cannot read the value of b"),
    "wrong explicit type": ("a: 1\nb: !!int x\n", 2, "YAML cannot read the value of b"),
    "merge of a number": ("a: 1\n<<: 3\n", 2, "expected a mapping or list of mappings"),
    "key that is a list": ("a: 1\n[b, c]: 2\n", 2, "a key must be a single word"),
    "env that is a list": ("a: 1\nenv: [A, B]\n", 2, "env must hold `NAME: value` lines"),
    "NUL": (b"a: 1\nb: \x00\n", 2, "a byte or character that text cannot hold"),
    "latin-1": ("a: 1\n\nb: \xe9\n".encode("latin-1"), 3, "a byte or character that text cannot hold"),
    "image": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), 1, "a byte or character that text cannot hold"),
    "too large": ("a: 1\n" + "#" * MAX_BYTES, None, "larger than 1 MiB"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_files_that_are_no_recipes(name, written):
    content, line, said = FLAWS[name]
    problems = written(content).problems
    assert [(problem.place.line, said in problem.text) for problem in problems] == [(line, True)], problems
    assert "\n" not in problems[0].text


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("a: 1")
    assert read_file("recpie.yaml").problems[0].text == "there is no such file; did you mean 'recipe.yaml'?"
    assert read_file(".").problems[0].text == "this is a folder, not a recipe"
    assert (
        "cannot be read" in read_file("a\0b").problems[0].text or "no such file" in read_file("a\0b").problems[0].text
    )
    assert read_file("no/such/folder.yaml").problems[0].text == "there is no such file"


def test_variables_are_set_as_they_are_written_and_the_environment_wins(written):
    read = written(
        "env:\n  TOKENIZERS_PARALLELISM: false\n  OMP_NUM_THREADS: 02\n  PYTHONPATH: /x\n  WANDB_PROJECT: mine\n"
        "  NCCL_DEBUG: [1]\n"
    )
    assert "env" not in read.entries
    environ = {"WANDB_PROJECT": "theirs"}
    assert apply(variables(read.env), environ) == {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "02"}
    assert environ == {"WANDB_PROJECT": "theirs", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "02"}
    found = [(problem.place.line, problem.text) for problem in environment.env_problems(read.env, "recipe.yaml")]
    assert found == [
        (4, "env does not set PYTHONPATH: a recipe sets only variables that are known to tune a run"),
        (6, "the value of NCCL_DEBUG in env must be a single value"),
    ]


def test_a_file_that_cannot_be_read_sets_nothing():
    assert variables(read_file("no/such/file.yaml").env) == {}


def env_of(written, name):
    read = written(json.dumps({"env": {name: "value1"}}))
    return variables(read.env), list(environment.env_problems(read.env, "recipe.yaml"))


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_P2P_DISABLE", "VLLM_ATTENTION_BACKEND", "WANDB_MODE",
     "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER", "TRACKIO_PROJECT", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS",
     "TRL_EXPERIMENTAL_SILENCE", "TRANSFORMERS_VERBOSITY", "TORCH_NCCL_ASYNC_ERROR_HANDLING"],
)  # fmt: skip
def test_what_tunes_a_run_may_be_set(name, written):
    assert env_of(written, name) == ({name: "value1"}, [])


@pytest.mark.parametrize(
    "name",
    ["VAR1", "PYTHONPATH", "LD_PRELOAD", "NCCL_NET_PLUGIN", "VLLM_PLUGINS", "HF_ALLOW_CODE_EVAL",
     "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE", "HF_DATASETS_TRUST_REMOTE_CODE", "HF_TOKEN",
     "WANDB_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_ID", "HF_ENDPOINT", "WANDB_BASE_URL", "HTTPS_PROXY",
     "HF_HOME", "HF_HUB_CACHE", "LD_LIBRARY_PATH", "CUDA_HOME", "NCCL_DEBUG_FILE", "WANDB_DIR", "PATH", "MASTER_ADDR",
     "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "EDITOR", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "omp_num_threads",
     "VLLM_USAGE_STATS_SERVER", "NCCL_SOMETHING_NEW", "HF_=", "A B", "", "1X", "WANDB_X\n"],
)  # fmt: skip
def test_any_other_variable_is_not_set_which_a_note_says(name, written):
    made, (note,) = env_of(written, name)
    assert made == {}
    assert note.level == "note"
    assert note.text.startswith(f"env does not set {name}: a recipe sets only variables that are known to tune a run")
    shown = f"if you trust it, run `export {name}=value1`" if name.isidentifier() else None
    assert (None if note.fix is None else str(note.fix)) == shown


def test_a_misspelt_variable_is_named(written):
    assert "did you mean 'OMP_NUM_THREADS'" in env_of(written, "OMP_NUM_THREAD")[1][0].text


def test_no_variable_of_the_list_loads_code_or_moves_files():
    words = {"PATH", "HOME", "DIR", "FILE", "CACHE", "PLUGIN", "PRELOAD", "PYTHON", "TOKEN", "KEY", "ENDPOINT", "URL"}
    found = {name for name in ALLOWED if words & set(name.split("_"))}
    # These two switch something off, or size a cache of vLLM.
    assert found == {"HF_HUB_DISABLE_IMPLICIT_TOKEN", "VLLM_DISABLE_COMPILE_CACHE"}


@pytest.mark.parametrize("text", ["1e-6", "1E+6", "-2e-3", "+1e+2", "1.e-3", ".5e2", "1.5e6", "1_0e+2"])
def test_numbers_with_an_exponent_are_numbers_at_any_depth(text, written):
    read = written(f"a: {text}\nb: {{c: {text}, d: [{text}]}}\ne: '{text}'\n")
    number = float(text)
    assert read.entries["a"].value == number
    assert read.entries["b"].value == {"c": number, "d": [number]}
    assert read.entries["e"].value == text


@pytest.mark.parametrize("text", ["52e4193", "1e5", "1E6"])
def test_an_exponent_without_point_and_sign_is_a_string(text, written):
    read = written(f"a: {text}\nb: {{revision: {text}, d: [{text}]}}\n")
    assert read.entries["b"].value == {"revision": text, "d": [text]}
    if text != "52e4193":  # not a finite number
        assert convert(Key("learning_rate", ("number",)), read.entries["a"].value, text) == float(text)


def test_written_values_are_read_as_the_same_values(written):
    values = [1e-5, 1e22, 2.5e-7, 0.1, "1e-5", "1E6", "yes", 3]
    assert written(f"a: {yaml_value(values)}\n").entries["a"].value == values


@pytest.mark.parametrize("text", ["1e+4193", "-1.5e999", "1.0e+309"])
def test_no_number_is_read_as_infinite(text, written):
    read = written(f"a: {text}\nb: {{c: {text}, d: [{text}]}}\ne: .inf\n")
    assert read.problems == []
    assert [read.entries[key].value for key in "ab"] == [text, {"c": text, "d": [text]}]
    assert read.entries["e"].value == float("inf")
    with pytest.raises(RecipeError, match="learning_rate must be a number, got '"):
        convert(Key("learning_rate", ("number",)), read.entries["a"].value, text)


@pytest.mark.parametrize("text", ["1e-5", "1.5e6", "1e5", "52e4193", "1_000", "1.50", "0x1f", "2024-01-01", "'1e-5'"])
def test_strings_in_lists_are_as_they_are_written(text, written):
    read = written(f"several: [{text}, &name {text}, q_proj, *name]\none: {text}\nnumbers: [1e-6, 2]\n")
    several, one, numbers = read.entries.values()
    strings, plain = Key("lora_target_modules", ("array",), item="string"), text.strip("'")
    assert convert(strings, several.value, several.text, several.written) == [plain, plain, "q_proj", plain]
    assert convert(strings, one.value, one.text, one.written) == [plain]
    assert convert(Key("weights", ("array",), item="number"), numbers.value, None, numbers.written) == [1e-6, 2.0]


def test_a_recipe_passes_on_strings_as_they_are_written(written):
    written(
        "model_name_or_path: tiny:llava\ndataset_name: tiny:shapes\nuse_peft: true\nlora_target_modules: [1e-5, q]\n"
        "learning_rate: 1e-6\nmodel_init_kwargs: {revision: 52e4193, eps: 1e-6}\nrun_name: 1e-5\n"
    )
    values = prepare("sft", ["--config", "recipe.yaml"]).values
    assert values["lora_target_modules"] == ["1e-5", "q"]
    assert (values["learning_rate"], values["run_name"]) == (1e-6, "1e-5")
    assert values["model_init_kwargs"] == {"revision": "52e4193", "eps": 1e-6}

"""Every key and every form of value that TRL's parser takes is taken, or is refused for a reason in a list."""

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forms_of_values import forms

from safe_trainers.core.errors import RecipeError
from safe_trainers.core.versions import stable_tasks
from safe_trainers.recipes.schema import BOOLEAN, INTEGER, LIST, MAPPING, NULL, NUMBER, STRING, convert, load
from safe_trainers.recipes.yaml_file import read_file
from upstream import TRANSFORMERS_4


HERE = Path(__file__).parent
KINDS = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: STRING, list: LIST, dict: MAPPING, type(None): NULL}


def type_is_wrong(key, value):
    return not isinstance(value, str) and KINDS.get(type(value)) not in key.types


def items_are_wrong(key, value):
    items = value if isinstance(value, list) else [value]
    return key.item is not None and any(KINDS.get(type(item)) != key.item for item in items)


def is_not_finite(key, value):
    return NUMBER in key.types and isinstance(value, (str, float)) and not math.isfinite(float(value))


def is_not_a_choice(key, value):
    words = value if isinstance(value, list) else [value]
    return key.choices is not None and not {str(word) for word in words} <= set(key.choices)


def is_not_a_mapping(key, value):
    return MAPPING in key.types and isinstance(value, str)


def has_another_length(key, value):
    return isinstance(value, list) and key.length is not None and len(value) != key.length


REASONS = {
    "TRL's parser checks the types of strings only, and passes on any other value as it is": type_is_wrong,
    "items of lists are passed on as they are, and a single value is": items_are_wrong,
    "no setting of a run is meant to be NaN or infinite": is_not_finite,
    "the trainer, or the library that the value is passed to, raises for all but its choices": is_not_a_choice,
    "lists of another length are passed on as they are": has_another_length,
    "a string that is not JSON is passed on in place of a mapping": is_not_a_mapping,
}
"""Why a value that TRL's parser takes is refused: the run would fail later, or compute something else."""


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """What TRL's parser makes of each form, by key; the keys that several tasks have are tried once."""
    asked: dict[str, list[str]] = {}
    for task in stable_tasks():
        asked[task] = sorted(load(task).keys.keys() - {key for keys in asked.values() for key in keys})
    path = tmp_path_factory.mktemp("forms") / "keys.json"
    path.write_text(json.dumps(asked))
    command = [sys.executable, str(HERE / "forms_of_values.py"), str(path)]
    subprocess.run(command, check=True, capture_output=True, cwd=path.parent)
    return {(task, key): made for task, keys in json.loads(path.read_text()).items() for key, made in keys.items()}


def written(tmp_path, key, form):
    path = tmp_path / "form.yaml"
    path.write_text(f"{key}: {form}\n")
    entry = read_file(path).entries[key]
    return entry.value, entry.text


def test_what_trls_parser_takes_is_taken_or_its_refusal_is_in_the_list(taken, tmp_path):
    used, strange = set(), []
    for (task, name), made in taken.items():
        key = load(task).keys[name]
        for form in made:
            value, text = written(tmp_path, name, form)
            try:
                convert(key, value, text)
            except RecipeError as error:
                why = [reason for reason, fits in REASONS.items() if fits(key, yaml.safe_load(form))]
                used |= set(why[:1])
                strange += [] if why else [f"{task}: {name}: {form}: {error}"]
    assert strange == []
    assert used == set(REASONS)
    assert sum(len(forms(load(task).keys[name].types)) for task, name in taken) > 1500


def test_strings_become_the_values_that_trls_parser_makes_of_them(taken, tmp_path):
    compared, changed = 0, set()
    for (task, name), made in taken.items():
        key = load(task).keys[name]
        if not {BOOLEAN, INTEGER, NUMBER} & set(key.types) or STRING in key.types:
            continue
        for form, result in made.items():
            value, text = written(tmp_path, name, form)
            if not isinstance(value, str) or is_not_finite(key, value):
                continue
            compared += 1
            if repr(convert(key, value, text)) != repr(ast.literal_eval(result)):
                changed.add(name)
    assert compared > 200
    # The configs replace these after they were parsed: no pinned memory on a CPU, and paths of another kind.
    replaced = {"dataloader_pin_memory"} | ({"local_rank", "tpu_metrics_debug"} if TRANSFORMERS_4 else set())
    assert changed <= replaced, changed

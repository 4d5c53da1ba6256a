"""Writes which forms of values TRL's own parser takes: `python forms_of_values.py FILE`, with keys by task in FILE.

A process of its own, because TRL's configs set environment variables, and open a 1 as a file descriptor.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import yaml


FORMS = {
    "boolean": ["true", "false", "'true'", "'yes'", "'No'", "1", "0", "'1'", "'f'", "'on'", "2", "[true]", "{a: 1}"],
    "integer": ["4", "'4'", "1_000", "'1_000'", "4.0", "'4.0'", "true", "[4]", "{a: 1}"],
    "number": ["1", "1.5", "1e-5", "'1E-5'", "'1.5'", "-2", ".inf", ".nan", "'inf'", "true", "[1.0]", "{a: 1}"],
    "string": ["word", "5", "1.5", "'5'", "true", "no", "2024-01-01", "[word]", "{a: 1}"],
    "array": ["[]", "[word]", "word", "[4]", "4", "'4'", "[1.5, 2]", "{a: 1}"],
    "object": ["{}", "{a: 1}", "'{\"a\": 1}'", "word", "[1]", "4"],
}
"""Values as people write them in YAML, by the type of the key."""

BASE = {"bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True}


def forms(types):
    """The forms to try for a key of these types."""
    return list(dict.fromkeys(["null", *(form for kind in types for form in FORMS.get(kind, []))]))


def taken(parser, defaults, key, form):
    """What TRL's parser makes of a value, as Python writes it; `None` if it refuses it."""
    for action, default in defaults:
        action.default = default
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            parser.set_defaults_with_config(**(BASE | {key: yaml.safe_load(form)}))
            made = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
        except (Exception, SystemExit):
            return None
    return repr(next(getattr(part, key) for part in made if hasattr(part, key)))


def taken_by_key(task, keys):
    """What TRL's parser of a task makes of each form that it takes, by key and form."""
    import trl

    from safe_trainers.core.tasks import TASKS
    from safe_trainers.recipes.keys import recipe_classes
    from safe_trainers.recipes.schema import load

    extra, script, _, model, mixture = recipe_classes(task)
    parser = trl.TrlParser((extra, script, getattr(trl, f"{TASKS[task].algorithm}Config"), model, mixture))
    defaults = [(action, action.default) for action in parser._actions]
    known = load(task).keys
    with tempfile.TemporaryDirectory() as folder:
        BASE["output_dir"] = folder
        return {
            key: {form: made for form in forms(known[key].types) if (made := taken(parser, defaults, key, form))}
            for key in keys
            if key in {action.dest for action in parser._actions}
        }


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(
        json.dumps({task: taken_by_key(task, keys) for task, keys in json.loads(file.read_text()).items()})
    )

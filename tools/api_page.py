"""Writes the page of the Python API: autodoc of every public name, in groups."""

import inspect
from typing import Any

import safe_trainers
from safe_trainers.core.tasks import TASKS


GROUPS: dict[str, tuple[str, ...]] = {
    "Trainers": tuple(task.trainer for task in TASKS.values()),
    "Configs": ("PrecisionArguments", *(task.config for task in TASKS.values())),
    "A trainer of your own": ("PrecisionMixin", "PrecisionBase", "SafetyContract", "contract_of", "MEDIA_KEYS"),
    "Decisions": ("resolve", "PrecisionPolicy", "take_inventory", "ModelInventory", "plan_boundaries", "BoundaryPlan",
                  "parse_dtype"),
    "Comparing": ("record", "diff_models"),
    "Precision search": ("tune",),
    "Saving": ("merge_and_save", "MergeCheck"),
    "Errors": ("SafeTrainersError", "PrecisionError", "CheckpointError", "RecipeError", "RecordingError",
               "ContractError",
               "UnsupportedVersionError", "PrecisionWarning", "REFUSALS", "WARNINGS"),
    "Version": ("__version__",),
}  # fmt: skip
ABOUT = {
    "Trainers": "Each takes the arguments of TRL's trainer of the same name without `Safe`.",
    "Configs": "Each is TRL's config with the [precision settings](config.md).",
    "A trainer of your own": "[A new algorithm](new-algorithm.md) shows how to use them.",
    "Decisions": "A trainer has their results in `trainer.precision`; call them to plan a run without one.",
    "Comparing": "[Where two runs part](diff.md) has an example.",
    "Precision search": "[Find the precision that holds the mismatch](tune.md) has an example.",
    "Saving": "[Checkpoints and merging](checkpoints.md) has an example.",
    "Errors": "[Refusals and warnings](refusals.md) lists the messages.",
    "Version": "The version of the package.",
}
DATA = {
    "MEDIA_KEYS": "Names of image and audio inputs, each with the method of the model that consumes it.",
    "REFUSALS": "Every refusal, by id.",
    "WARNINGS": "Every warning, by id.",
    "__version__": "The version, a string.",
}
TESTING = ("assert_safe", "fp16_on_cpu")
BENCH = {"run.bench_trainer": "function", "outcome.Bench": "class", "outcome.Result": "class", "outcome.Row": "class"}


def api_page() -> str:
    """Returns `api.md`."""
    lines = ["# Python API", "", "```python", "import safe_trainers", "```", ""]
    for group, names in GROUPS.items():
        lines += [f"## {group}", "", ABOUT[group], "", "```{eval-rst}"]
        for name in names:
            lines += _directive(name)
        lines += ["```", ""]
    lines += ["## Testing", "", "In `safe_trainers.testing`.", "", "```{eval-rst}"]
    for name in TESTING:
        lines += [f".. autofunction:: safe_trainers.testing.{name}", ""]
    lines += [
        "```",
        "",
        "## Checking a trainer",
        "",
        "[Check a trainer](bench.md) has an example.",
        "",
        "```{eval-rst}",
    ]
    for name, kind in BENCH.items():
        lines += [f".. auto{kind}:: safe_trainers.bench.{name}", *(["   :members:"] if kind == "class" else []), ""]
    return (
        "\n".join([*lines, "```", "", "*Made from `safe_trainers.__all__` and the docstrings by `make docs`.*"]) + "\n"
    )


def _arguments(trainer: Any) -> str:
    """Returns the arguments of a trainer and their defaults, without their types, which are TRL's."""
    given = inspect.signature(trainer)
    bare = [one.replace(annotation=one.empty) for one in given.parameters.values()]
    return str(given.replace(parameters=bare, return_annotation=given.empty))


def _directive(name: str) -> list[str]:
    if name in DATA:
        return [f".. py:data:: safe_trainers.{name}", "", f"   {DATA[name]}", ""]
    value = getattr(safe_trainers, name)
    if not isinstance(value, type):
        return [f".. autofunction:: safe_trainers.{name}", ""]
    if issubclass(value, Exception):
        return [f".. autoexception:: safe_trainers.{name}", ""]
    signature = "(**settings)" if name.endswith("Config") or name == "PrecisionArguments" else ""
    signature = _arguments(value) if name.endswith("Trainer") else signature
    return [f".. autoclass:: safe_trainers.{name}{signature}", ""]

"""Checks that the models, datasets, rewards and folders of a recipe exist, without loading any of them."""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ..core.errors import Fix, Problem, RecipeError, hint, leave_out, nearest, run_command, write, write_example
from ..data.columns import (
    BLIND_MODELS,
    EMBEDDED_DATASETS,
    EMBEDDED_MODELS,
    TINY,
    embedded_columns,
    embedded_name,
    is_path,
    local_columns,
    missing_columns,
)
from ..rewards import registry as rewards
from .reward_lookup import missing_function
from .schema import FILES_OR_MAPPINGS, shown
from .settings import Settings


DISKS = frozenset({"nvme_path", "output_path", "output_file", "csv_monitor", "tensorboard", "job_name"})
"""Entries of an engine's config that name a place to write to, or contain one."""

CACHES = frozenset({"cache_dir", "offload_folder"})
"""Entries of `model_init_kwargs` that name a folder to write to."""

INIT_KWARGS = ("model_init_kwargs", "teacher_model_init_kwargs")
"""Keys with arguments of `from_pretrained`."""

NAMES = ("run_name", "project", "hub_model_id")
"""Keys from which trackers and the hub make names of folders."""


TEMPLATES = (".jinja", ".j2")
"""How the names of files with a chat template end."""

TRACKERS = {
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""Packages of which a tracker needs one."""


def reference_problems(settings: Settings) -> Iterator[Problem]:
    """What cannot be found, and what would be written in the wrong place.

    Args:
        settings: The recipe's settings.

    Yields:
        Problems.
    """
    if settings.sound("model_name_or_path", "load_in_4bit", "warm_up_steps"):
        yield from _model(settings)
    if settings.has("teacher_model_name_or_path") and settings.sound("teacher_model_name_or_path"):
        yield from _named_model(settings, "teacher_model_name_or_path", "teacher_warm_up_steps")
    if settings.sound("dataset_name", "datasets", "dataset_columns", "needs_images"):
        yield from _dataset(settings)
    if settings.has("chat_template_path") and settings.sound("chat_template_path"):
        yield from _chat_template(settings)
    if settings.has("reward_funcs") and settings.sound("reward_funcs"):
        yield from _rewards(settings)
        if settings.sound("dataset_name", "datasets", "dataset_columns", "remove_unused_columns"):
            yield from _reward_columns(settings)
    if settings.sound("output_dir", "resume_from_checkpoint"):
        yield from _output(settings)
    if settings.sound("report_to"):
        yield from _trackers(settings)
    yield from _inside(settings)
    yield from _trust(settings)


def _model(settings: Settings) -> Iterator[Problem]:
    yield from _named_model(settings, "model_name_or_path", "warm_up_steps")
    name = settings["model_name_or_path"]
    if not name:
        return
    family = embedded_name(name)
    if settings["bnb_4bit_compute_dtype"] is not None and not settings["load_in_4bit"]:
        packed = family is None and (not os.path.isdir(name) or _is_packed(Path(name)))
        if not packed:
            what = f"bnb_4bit_compute_dtype is for 4-bit models, and {name} is not one"
            yield settings.error("bnb_4bit_compute_dtype", what, write(load_in_4bit=True))


def _named_model(settings: Settings, key: str, steps: str) -> Iterator[Problem]:
    """The problems of the model that a key names; `steps` is the key of the warm-up of an embedded one."""
    name = settings[key]
    if not name:
        what = f"{key} is missing: a folder, a name on the hub, or an embedded model"
        yield settings.error(key, what, write_example(**{key: "tiny:aria"}))
        return
    family = embedded_name(name)
    if family is not None and family not in EMBEDDED_MODELS:
        near = nearest(family, EMBEDDED_MODELS)
        fix = write(**{key: f"{TINY}{near}"}) if near is not None else None
        yield settings.error(key, f"there is no embedded model {name!r}{hint(near, TINY)}", fix)
    elif family is None and settings[steps]:
        what = f"{steps} is for embedded models, and {name!r} is not one"
        yield settings.error(steps, what, leave_out(steps))
    if family is None and is_path(name) and not os.path.isfile(Path(name, "config.json")):
        models = [path for path in _siblings(name) if os.path.isfile(Path(path, "config.json"))]
        yield settings.error(key, f"folder {name} has no model (config.json){hint(nearest(name, models))}")
    if family == "reward" and settings.task != "reward":
        what = f"{name} only scores; {settings.task} needs a model that answers"
        yield settings.error(key, what, write(**{key: "tiny:text"}))


def _is_packed(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # transformers reports what is wrong with it
    return bool((config.get("quantization_config") or {}).get("load_in_4bit")) if isinstance(config, dict) else True


def _dataset(settings: Settings) -> Iterator[Problem]:
    name, key = settings["dataset_name"], "dataset_name"
    if not name:
        if not settings["datasets"]:
            what = "dataset_name is missing: a folder, a file, a name on the hub, or an embedded dataset"
            yield settings.error(key, what, write_example(dataset_name="tiny:shapes"))
        return
    if settings["datasets"]:
        what = f"datasets and dataset_name ({name}) both name the data of the run"
        yield settings.error(key, what, leave_out(key))
        return
    if not all(isinstance(column, str) for column in (settings["dataset_columns"] or {}).values()):
        return  # reported elsewhere
    embedded = embedded_name(name)
    if embedded is not None and embedded not in EMBEDDED_DATASETS:
        near = nearest(embedded, EMBEDDED_DATASETS)
        fix = write(**{key: f"{TINY}{near}"}) if near is not None else None
        yield settings.error(key, f"there is no embedded dataset {name!r}{hint(near, TINY)}", fix)
    elif embedded is not None:
        columns = embedded_columns(embedded, settings.task)
        images = bool(settings["needs_images"])
        wrong = missing_columns(settings.task, name, columns, images, _text_field(settings))
        if wrong is not None:
            yield settings.finding(wrong, key)
        family = embedded_name(settings["model_name_or_path"])
        if "image" in columns and family in BLIND_MODELS:
            what = f"{name} has images, and {TINY}{family} accepts none"
            yield settings.error("model_name_or_path", what, write(model_name_or_path="tiny:llava"))
    elif is_path(name):
        if not os.path.exists(name):
            yield settings.error(key, f"dataset path {name} does not exist{hint(nearest(name, _siblings(name)))}")
            return
        if os.path.isfile(name) and os.path.getsize(name) == 0:
            yield settings.error(key, f"dataset {name} has no rows: the file is empty")
            return
        found = local_columns(Path(name), str(settings["dataset_train_split"]))
        yield from _columns(settings, name, found) if found else ()


def _siblings(name: str) -> list[str]:
    """Returns the paths in the parent folder of a path; none if it is not a folder."""
    folder = Path(name).parent
    return [str(path) for path in folder.glob("*")] if os.path.isdir(folder) else []


def _chat_template(settings: Settings) -> Iterator[Problem]:
    """Yields the problem of a path to a chat template that does not exist."""
    name = settings["chat_template_path"]
    if not isinstance(name, str) or os.path.exists(name):
        return
    if is_path(name) or name.endswith(TEMPLATES):
        templates = [file for file in _siblings(name) if file.endswith(TEMPLATES)]
        what = f"chat template {name} does not exist{hint(nearest(name, templates))}"
        yield settings.error("chat_template_path", what)


def _text_field(settings: Settings) -> str:
    """The column of SFT's text."""
    return str(settings["dataset_text_field"] or "text") if settings.has("dataset_text_field") else "text"


def _columns(settings: Settings, name: str, found: list[str]) -> Iterator[Problem]:
    """Compares the columns of local files with those that the recipe needs."""
    asked: Mapping[str, Any] = settings["dataset_columns"] or {}
    for ours, theirs in asked.items():
        if theirs not in found:
            near = hint(nearest(str(theirs), found))
            what = f"dataset {name} has no column {theirs!r}{near}: it has {', '.join(found)}"
            yield settings.error("dataset_columns", f"{what} (dataset_columns: {{{ours}: {theirs}}})")
    columns, images = list(asked) or found, bool(settings["needs_images"])
    wrong = missing_columns(settings.task, name, columns, images, _text_field(settings))
    if wrong is not None:
        yield settings.finding(wrong, *(("dataset_columns", "dataset_name") if asked else ("dataset_name",)))


def _rewards(settings: Settings) -> Iterator[Problem]:
    names = settings["reward_funcs"] or []
    if not names and not settings["reward_model_name_or_path"]:
        what = "reward_funcs is empty: names of rewards, or dotted paths of your own functions"
        yield settings.error("reward_funcs", what, write_example(reward_funcs=["think_format_reward"]))
    for item, name in enumerate(names):
        if "." not in name:
            for problem in _registered(name, settings.for_run):
                yield problem.at(settings.place("reward_funcs", item=item))
            continue
        wrong, path = missing_function(name)
        if wrong is not None:
            yield wrong.at(settings.place("reward_funcs", item=item))
        elif not name.startswith("safe_trainers."):
            where = f" ({path})" if path is not None else ""
            what = f"the run imports the code of {name.rpartition('.')[0]}{where}, for the reward {name}"
            yield settings.note("reward_funcs", what, item=item)


def _reward_columns(settings: Settings) -> Iterator[Problem]:
    """Compares the columns of the dataset, if they are known, with those that the package's and TRL's rewards need."""
    name, asked = settings["dataset_name"], settings["dataset_columns"] or {}
    embedded = embedded_name(name)
    if embedded is not None:
        there = list(embedded_columns(embedded, settings.task)) if embedded in EMBEDDED_DATASETS else None
    else:
        known = name and is_path(name) and os.path.exists(name)
        there = local_columns(Path(name), str(settings["dataset_train_split"])) if known else None
    columns = list(asked) or there
    if not columns or any(theirs not in (there or asked.values()) for theirs in asked.values()):
        return  # not known, or reported elsewhere
    for item, reward in enumerate(settings["reward_funcs"] or []):
        needed = rewards.needed_columns(str(reward))
        removes = bool(settings["remove_unused_columns"])
        wrong = rewards.missing_for_reward(str(reward), needed, columns, there or [], asked, removes)
        if wrong is not None:
            yield wrong.at(settings.place("reward_funcs", item=item))


def _output(settings: Settings) -> Iterator[Problem]:
    output = Path(settings["output_dir"] or "trainer_output")
    try:
        os.stat(output)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            why = getattr(error, "strerror", None) or error
            yield settings.error("output_dir", f"output_dir {shown(str(output))} cannot be a folder: {why}")
            return
    if os.path.exists(output) and not os.path.isdir(output):
        yield settings.error("output_dir", f"output_dir {output} is a file", write(output_dir=f"{output}-run"))
        return
    existing = next(folder for folder in (output, *output.absolute().parents) if os.path.exists(folder))
    if not os.access(existing, os.W_OK) or not os.path.isdir(existing):
        why = "read-only" if os.path.isdir(existing) else "a file"
        yield settings.error("output_dir", f"output_dir {output} cannot be written: {existing} is {why}")
    resume = settings["resume_from_checkpoint"]
    if isinstance(resume, str) and resume.lower() not in {"", "true", "false"} and not os.path.isdir(resume):
        fix = write_example(resume_from_checkpoint=f"{output}/checkpoint-100")
        yield settings.error("resume_from_checkpoint", f"there is no checkpoint {resume}", fix)


def _inside(settings: Settings) -> Iterator[Problem]:
    """Places outside of `output_dir` that a recipe would write to."""
    for key in NAMES:
        name = settings[key] if settings.sets(key) else None
        if isinstance(name, str) and (
            ".." in PurePosixPath(name).parts or name.startswith(("/", "~")) or "\\" in name
        ):
            what = f"{key} {shown(name)} is a path, and a run writes only below its output_dir"
            yield settings.error(key, what, _name_below(key, name))
    output = Path(settings["output_dir"] or "trainer_output")
    places = {**dict.fromkeys(INIT_KWARGS, CACHES), "deepspeed": DISKS, "logging_dir": frozenset({"logging_dir"})}
    for key, words in places.items():
        if not settings.has(key) or not settings.sets(key) or not settings.sound(key):
            continue
        value = settings[key]
        for name, place in [(key, value)] if key == "logging_dir" else _places(value, words):
            if isinstance(place, str) and not _below(place, output):
                what = f"{name} {shown(place)} is outside output_dir, and a run writes only below it"
                below = str(output / PurePosixPath(place).name)
                yield settings.error(key, what, write(**{key: _with_place(value, words, place, below)}))
    for key in FILES_OR_MAPPINGS & set(settings.values):
        value = settings[key]
        if isinstance(value, str) and settings.sound(key) and not os.path.isfile(value):
            yield settings.error(key, f"there is no file {value} ({key})")


def _places(value: Any, words: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The entries of a nested mapping that name a place."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key in words:
                yield str(key), below
            yield from _places(below, words)
    elif isinstance(value, list):
        for below in value:
            yield from _places(below, words)


def _with_place(value: Any, words: frozenset[str], old: str, new: str) -> Any:
    """A nested mapping with another place; a single value is the place itself."""
    if isinstance(value, dict):
        return {
            key: new if key in words and below == old else _with_place(below, words, old, new)
            for key, below in value.items()
        }
    if isinstance(value, list):
        return [_with_place(below, words, old, new) for below in value]
    return new if value == old else value


def _name_below(key: str, name: str) -> Fix:
    last = PurePosixPath(name.replace("\\", "/")).name
    return write(**{key: last}) if last else write_example(**{key: "NAME"})


def _below(place: str, output: Path) -> bool:
    inside = os.path.normpath(os.path.join(os.getcwd(), os.path.expanduser(place)))
    root = os.path.normpath(os.path.join(os.getcwd(), output))
    return inside == root or inside.startswith(root + os.sep)


def _trust(settings: Settings) -> Iterator[Problem]:
    """Code and secrets in a recipe, which is shared."""
    keys = [key for key in INIT_KWARGS if settings.sets(key) and settings.sound(key)]
    inner = {key: settings[key] for key in keys if isinstance(settings[key], dict)}
    trusting = ["trust_remote_code"] if settings["trust_remote_code"] else []
    for key in [*trusting, *(key for key, held in inner.items() if held.get("trust_remote_code"))]:
        model = settings["teacher_model_name_or_path" if key.startswith("teacher") else "model_name_or_path"]
        yield settings.note(key, f"trust_remote_code is on: the code that comes with {model} is run")
    kernels = {"attn_implementation": settings.usable("attn_implementation")}
    kernels |= {key: held.get("attn_implementation") for key, held in inner.items()}
    for key, name in kernels.items():
        if isinstance(name, str) and "/" in name:
            yield settings.note(
                key, f"attn_implementation {shown(name)} is code from the hub: it is downloaded and run"
            )
    for key, held in inner.items():
        if held.get("use_kernels"):
            yield settings.note(key, "use_kernels is on: code from the hub is downloaded and run")
    if (settings.sets("hub_token") and settings["hub_token"]) or any(held.get("token") for held in inner.values()):
        what = "a token is a secret, and recipes are shared: leave it out, and log in"
        yield settings.error(("hub_token", *INIT_KWARGS), what, run_command("hf auth login"))


def _trackers(settings: Settings) -> Iterator[Problem]:
    """A tracker whose package is not installed, with which transformers fails when the trainer is built.

    It may be installed where the recipe is run later.
    """
    asked = settings.usable("report_to")
    for name in asked if isinstance(asked, list) else [asked]:
        packages = TRACKERS.get(str(name), ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            install = f'"safe-trainers[{name}]"' if name == "trackio" else packages[0]
            what = f"report_to: {name} needs the package {packages[0]}, which is not installed"
            state = settings.error if settings.for_run else settings.warning
            yield state("report_to", what, Fix(f"run `pip install {install}`, or write `report_to='none'`"))


def _registered(name: str, for_run: bool) -> tuple[Problem, ...]:
    """The problems of a reward that is named without a dotted path; a package may be missing where nothing is run."""
    if name not in rewards.TRL_REWARDS:
        try:
            rewards.import_reward(name)
        except RecipeError as error:
            return error.problems
        return ()
    if name in rewards.NEEDS_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        return (replace(rewards.needs_math_verify(name), level="error" if for_run else "warning"),)
    return ()

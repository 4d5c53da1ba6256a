"""Checks recipes as plain data: every problem at once, with file, line and the line to write.

Neither torch nor TRL is imported, and nothing that a recipe names is run. The training commands begin with the same
check, on the keys of the TRL that is installed.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import packaged
from .cross_checks import cross_checks
from .environment import apply, variables
from .environment import flaws as env_flaws
from .errors import PrecisionError, RecipeError, hint, nearest
from .place_checks import place_checks
from .recipe_file import Flaw, RecipeFile, read_file
from .renamed import successor
from .report import Report, Verdict
from .schema import BOOLEAN, TASKS, Schema, UnfitValueError, convert, convert_words, installed_trl, load
from .settings import Remark, Settings, one_line


LAUNCHER = re.compile(r"--accelerate_config[ =](\S+)")
PROCESSES = re.compile(r"--num_processes[ =](\d+)")
PLACES = frozenset(
    ("model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "reward_model_name_or_path")
)
"""Keys that a folder stands in, or may stand in; `~` is expanded, and what is empty counts as not written."""


@dataclass(frozen=True)
class Checked:
    """What became of a recipe.

    Attributes:
        task: The task's name.
        path: The recipe's name, `None` where everything came from the command line.
        remarks: What there is to say, by file and line.
        values: What it sets, in the types of its keys, with the command line's overrides.
        env: The environment variables that it sets.
        schema: The keys that it was checked against.
    """

    task: str
    path: str | None
    remarks: tuple[Remark, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    schema: Schema | None = None

    @property
    def errors(self) -> tuple[Remark, ...]:
        """What makes the run fail."""
        return tuple(remark for remark in self.remarks if remark.level == "error")

    def check(self) -> None:
        """Raises all problems at once.

        Raises:
            RecipeError: If there are any.
            PrecisionError: If all of them are about the precision.
        """
        if not self.errors:
            return
        if all(remark.problem is not None for remark in self.errors):
            raise PrecisionError([remark.as_problem() for remark in self.errors])
        raise RecipeError([str(remark) for remark in self.errors])


def validate(
    path: str | Path | None,
    *,
    task: str | None = None,
    overrides: Sequence[str] = (),
    schema: Schema | None = None,
    accelerate_config: str | None = None,
    started: bool = False,
    processes: int | None = None,
) -> Checked:
    """Checks a recipe and the overrides after it.

    Args:
        path: The recipe's file; `None` where everything comes from the command line.
        task: Its task; by default what its folder, its header or its keys say.
        overrides: `["--learning_rate", "1e-5", ...]`; they win over the file.
        schema: The task's keys; by default those that were written down for the installed TRL.
        accelerate_config: The launch config: a name in `configs/` or a file; by default what the recipe's header says.
        started: Whether this process is one of the run, so that the environment says how many there are.
        processes: How many processes it is to be started in; by default what the launch config or the header says.

    Returns:
        The recipe's values, and what there is to say about them; where the task cannot be told, that alone.

    Raises:
        RecipeError: If there is no such task.
    """
    file = RecipeFile("command line") if path is None else read_file(path)
    likely = tasks_of(file) if task is None else [task]
    task = likely[0]
    if len(likely) > 1:
        asked = Remark("error", f"it could be a recipe for {', '.join(likely)}", f"--task {task}", None, file.path)
        return Checked(task, file.path, (asked, *(_from_flaw(flaw, file.path) for flaw in file.flaws)))
    schema = schema or load(task)
    settings = Settings(task, schema, None if path is None else str(path), file.entries)
    remarks = [_from_flaw(flaw, settings.path) for flaw in file.flaws]
    readable = bool(file.entries) or not file.flaws
    remarks += [_from_flaw(flaw, settings.path) for flaw in env_flaws(file.env)]
    remarks += _file_values(settings)
    remarks += _overrides(settings, list(overrides))
    for key in PLACES & settings.values.keys():  # datasets and transformers expand only some of them
        value = settings.values[key]
        settings.values[key] = (os.path.expanduser(value) or None) if isinstance(value, str) else value
    if readable:
        remarks += _launcher(settings, file, accelerate_config, started)
        settings.processes = processes or settings.processes
        missing = {key for key, entry in file.entries.items() if key not in schema.keys}
        settings.broken |= _meant(missing, schema)
        remarks += cross_checks(settings)
        remarks += place_checks(settings)
    ordered = sorted(dict.fromkeys(remarks), key=lambda r: (r.file is None, r.file != settings.path, r.line or 0))
    return Checked(task, settings.path, tuple(ordered), settings.values, variables(file.env), schema)


def prepare(
    task: str, argv: Sequence[str], accelerate_config: str | None = None, processes: int | None = None
) -> Checked:
    """What a training command does first, before anything slow: checks its recipe, and sets its environment.

    Where the keys of just the installed TRL were not written down, `recipes.read_recipe` checks the recipe later.

    Args:
        task: One of `TASKS`.
        argv: `["--config", FILE, "--key", "value", ...]`.
        accelerate_config: The launch config, where the run is launched with one.
        processes: How many processes are launched, where that is asked for.

    Returns:
        The recipe's values, and what there is to say about them; warnings and notes are printed.

    Raises:
        RecipeError: For whatever cannot be run, all problems at once.
        PrecisionError: Where all that is wrong is the precision.
    """
    path, overrides = split_config(list(argv))
    started = accelerate_config is None
    checked = validate(
        path, task=task, overrides=overrides, accelerate_config=accelerate_config, started=started, processes=processes
    )
    if checked.schema is not None and checked.schema.versions.get("trl") == installed_trl():
        checked.check()
    if os.environ.get("RANK", "0") == "0":
        for remark in checked.remarks:
            if remark.level != "error":
                print(f"{remark.level}: {remark}", file=sys.stderr)
    if path is not None:
        apply(path)
    return checked


def split_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Takes `--config FILE` out of a command line.

    Args:
        argv: The command line.

    Returns:
        The file, `None` where none is named, and the rest.

    Raises:
        RecipeError: If `--config` comes last.
    """
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in argv:
        return None, argv
    position = argv.index("--config")
    if position + 1 == len(argv):
        raise RecipeError("--config needs a file. Write: --config recipes/grpo/tiny_vlm_bf16.yaml")
    return Path(argv[position + 1]), [*argv[:position], *argv[position + 2 :]]


def report(checked: Sequence[Checked]) -> Report:
    """What was found in some recipes.

    Args:
        checked: The recipes.
    """
    verdicts = []
    for one in checked:
        for remark in one.remarks:
            text, fix = one_line(f"{remark.where}: {remark.text}"), remark.fix and one_line(remark.fix)
            found = None if remark.problem is None else remark.problem.id
            verdicts.append(Verdict(remark.level, text, fix, found, remark.file, remark.line))
        if not one.errors:
            verdicts.append(Verdict("ok", f"{one.path}: {one.task}, {len(one.values)} keys"))
    schemas = {str(one.schema.versions.get("trl")) for one in checked if one.schema is not None}
    facts = {"keys of": f"TRL {', '.join(sorted(schemas))}"} if schemas else {}
    installed = installed_trl()
    if installed is not None and schemas and installed not in schemas:
        facts["installed"] = f"TRL {installed}, whose training commands check its own keys again"
    subject = ", ".join(str(one.path) for one in checked) if len(checked) < 4 else f"{len(checked)} files"
    return Report("recipes", subject, facts, (), tuple(verdicts))


def tasks_of(file: RecipeFile) -> list[str]:
    """What a recipe is for, as its folder is called, as the command of its header says, or as its keys do.

    Args:
        file: The recipe.

    Returns:
        One of `TASKS`; several where none of these tells.
    """
    folder = Path(file.path).absolute().parent.name
    if folder in TASKS:
        return [folder]
    words = file.header[0].split() if file.header else []
    if len(words) > 1 and words[0] in ("safe-trainers", "trl") and words[1] in TASKS:
        return [words[1]]
    known = {task: sum(key in load(task).keys for key in file.entries) for task in TASKS}
    best = max(known.values())
    if not file.entries:
        return [TASKS[0]]  # there is nothing to check but the file itself
    return [task for task in TASKS if known[task] == best]


def _from_flaw(flaw: Flaw, path: str | None) -> Remark:
    return Remark("error", flaw.text, flaw.fix, None, path, flaw.line)


def _file_values(settings: Settings) -> Iterator[Remark]:
    """The values of the file, in the types of their keys."""
    for key, entry in settings.entries.items():
        known = settings.schema.keys.get(key)
        if known is None:
            yield _unknown(settings, key, entry.value, (settings.path, entry.line))
            continue
        try:
            settings.values[key] = convert(known, entry.value, entry.text)
        except UnfitValueError as error:
            settings.broken.add(key)
            yield Remark("error", error.text, error.fix, key, settings.path, entry.line)


def _overrides(settings: Settings, words: list[str]) -> Iterator[Remark]:
    """The values of the command line; each option is followed by what does not begin with `--`."""
    stray: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            stray.append(word)
    if stray:
        recipe = stray[0].endswith((".yaml", ".yml"))
        fix = f"--config {stray[0]}" if recipe and settings.path is None else "--key value"
        yield Remark("error", f"{' '.join(stray)} belongs to no key", fix)
    for name, values in options:
        yield from _override(settings, name, values)


def _override(settings: Settings, name: str, words: list[str]) -> Iterator[Remark]:
    key = name.replace("-", "_")
    known, value = settings.schema.keys.get(key), None
    negated = settings.schema.keys.get(key.removeprefix("no_"))
    if known is None and key.startswith("no_") and negated is not None and BOOLEAN in negated.types and not words:
        key, known, words = negated.name, negated, ["false"]
    if known is None:
        value = words[0] if words else "VALUE"
        yield _unknown(settings, name, value, (None, None))
        return
    settings.overridden.add(key)
    settings.broken.discard(key)
    try:
        settings.values[key] = convert_words(known, words)
    except UnfitValueError as error:
        settings.broken.add(key)
        settings.values.pop(key, None)
        yield Remark("error", error.text, error.fix, key)


def _unknown(settings: Settings, key: str, value: Any, place: tuple[str | None, int | None]) -> Remark:
    """A key that the task does not have: outdated, another task's, or misspelt."""
    plain = key.replace("-", "_")
    outdated = successor(plain, value, settings.schema.keys)
    if outdated is not None:
        return Remark("error", outdated[0], outdated[1], key, *place)
    if plain != key and plain in settings.schema.keys:
        return Remark("error", f"there is no key {key!r}; did you mean {plain!r}?", None, key, *place)
    others = [task for task in TASKS if task != settings.task and plain in load(task).keys]
    if others:
        text = f"{key!r} is a key of {' and '.join(others)}, not of {settings.task}"
        return Remark("error", text, f"drop `{key}`", key, *place)
    near = nearest(key, settings.schema.keys)
    return Remark("error", f"there is no key {key!r}{hint(near)}", None, key, *place)


def _meant(unknown: set[str], schema: Schema) -> set[str]:
    """The keys that misspelt ones stand for: nothing is to be said about their defaults."""
    near = {nearest(key, schema.keys) for key in unknown}
    replaced = {successor(key, "", schema.keys) for key in unknown}
    return {key for key in near if key} | {found[1].partition(":")[0] for found in replaced if found}


def _launcher(settings: Settings, file: RecipeFile, asked: str | None, started: bool) -> Iterator[Remark]:
    """Reads the accelerate config, and how many processes the run is started in."""
    world = os.environ.get("WORLD_SIZE", "")
    command = "" if started or asked else next(iter(file.header), "")
    counted, named = PROCESSES.search(command), LAUNCHER.search(command)
    settings.processes = int(counted[1]) if counted else int(world) if world.isdigit() and int(world) > 0 else 1
    name = asked or (named[1] if named else None)
    if name is None:
        return
    path = Path(name)
    if not os.path.isfile(path):
        try:
            path = packaged.find(name, "configs")
        except RecipeError as error:
            place = (None, None) if asked else (settings.path, 1)
            yield Remark("error", str(error), None, "accelerate_config", *place)
            return
    launch = read_file(path)
    yield from (_from_flaw(flaw, str(path)) for flaw in launch.flaws)
    settings.launch, settings.launch_path = launch.entries, str(path)
    if counted is None:
        written = launch.entries["num_processes"].value if "num_processes" in launch.entries else None
        settings.processes = written if isinstance(written, int) and written > 0 else None

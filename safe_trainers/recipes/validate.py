"""Checks recipes as plain data: every problem at once, with file, line and the line to write.

Neither torch nor TRL is imported, and nothing that a recipe names is run. The training commands begin with the same
check, and use its result.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import Fix, Place, PrecisionError, Problem, RecipeError, hint, leave_out, nearest, write, yaml_value
from ..core.tasks import TASKS
from ..report.document import Report
from . import packaged
from .env import apply, env_problems, variables
from .ranges import RANGES
from .references import reference_problems
from .renamed import outdated, replacement
from .rules import rule_problems
from .schema import BOOLEAN, LAUNCH, Schema, convert, convert_words, installed, load
from .settings import CommandLine, Settings, printable
from .yaml_file import RecipeFile, read_file


LAUNCHER = re.compile(r"--accelerate_config[ =](\S+)")
PROCESSES = re.compile(r"--num_processes[ =](\d+)")
MISSPELT = 0.8
"""The similarity from which an unknown key is taken for a misspelt one; a letter or two differ then."""
FOLDERS = frozenset(
    ("model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "reward_model_name_or_path",
     "teacher_model_name_or_path")
)  # fmt: skip
"""Keys whose value is, or may be, a folder; `~` is expanded, and an empty string counts as not written."""


@dataclass(frozen=True)
class Checked:
    """A recipe that was checked.

    Attributes:
        task: The task's name.
        path: The recipe's name; `None` if everything came from the command line.
        problems: What was found, by file and line.
        values: Its values, in the types of their keys, with the command line's overrides.
        schema: The keys that it was checked against; `None` if its task is not known.
        launch: Its keys of `LAUNCH`: `accelerate_config`, `num_processes`, ...
    """

    task: str
    path: str | None
    problems: tuple[Problem, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    schema: Schema | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that make the run fail."""
        return tuple(problem for problem in self.problems if problem.level == "error")

    def check(self) -> None:
        """Raises all errors at once.

        Raises:
            RecipeError: If there are any.
            PrecisionError: If all of them are refusals of the precision.
        """
        if self.errors and all(problem.id is not None for problem in self.errors):
            raise PrecisionError(self.errors)
        if self.errors:
            raise RecipeError(self.errors)


def validate(
    recipe: str | Path | RecipeFile | None,
    *,
    task: str | None = None,
    overrides: Sequence[str] = (),
    schema: Schema | None = None,
    accelerate_config: str | None = None,
    started: bool = False,
    processes: int | None = None,
    for_run: bool = False,
) -> Checked:
    """Checks a recipe and the overrides after it.

    Args:
        recipe: The recipe, or the name of its file; `None` if everything comes from the command line.
        task: Its task; by default from its folder, its header or its keys.
        overrides: `["--learning_rate", "1e-5", ...]`; they win over the file.
        schema: The task's keys; by default those that were written for the installed TRL.
        accelerate_config: The launch config: a name in `configs/` or a file; by default the one in the header.
        started: Whether this process belongs to the run, so that the environment has the number of processes.
        processes: The number of processes to launch; by default that of the recipe, the launch config or the header.
        for_run: Whether the recipe is run on this machine, and not only edited here.

    Returns:
        The recipe's values and its problems; if several tasks have its keys, the problems that it has in all of them,
        and a note.

    Raises:
        RecipeError: If there is no such task.
    """
    file = RecipeFile() if recipe is None else recipe if isinstance(recipe, RecipeFile) else read_file(recipe)
    likely = tasks_of(file) if task is None else [task]
    checked = [
        _validate(file, one, schema or load(one), overrides, accelerate_config, started, processes, for_run)
        for one in likely
    ]
    return checked[0] if len(checked) == 1 else _in_common(checked)


def _validate(
    file: RecipeFile,
    task: str,
    schema: Schema,
    overrides: Sequence[str],
    accelerate_config: str | None,
    started: bool,
    processes: int | None,
    for_run: bool,
) -> Checked:
    """Checks a recipe of a known task; the arguments are those of `validate`."""
    settings = Settings(task, schema, file.path, file.entries, for_run=for_run)
    found = [*file.problems, *env_problems(file.env, file.path), *_file_values(settings)]
    found += _overrides(settings, list(overrides))
    for key in FOLDERS & settings.values.keys():  # datasets and transformers expand only some of them
        value = settings.values[key]
        settings.values[key] = (os.path.expanduser(value) or None) if isinstance(value, str) else value
    if file.entries or not file.problems:
        found += _launcher(settings, file, accelerate_config, started)
        settings.processes = processes or settings.processes
        settings.broken |= _meant({key for key in file.entries if key not in schema.keys}, schema)
        found += rule_problems(settings)
        found += reference_problems(settings)
    shown = {problem.line(): problem for problem in map(printable, found)}.values()
    ordered = sorted(shown, key=lambda p: (p.place.file is None, p.place.file != file.path, p.place.line or 0))
    return Checked(task, file.path, tuple(ordered), settings.values, schema, settings.launcher)


def _in_common(checked: Sequence[Checked]) -> Checked:
    """What follows for a recipe whose keys fit several tasks: the problems that it has as a recipe of each of them."""
    first, *others = checked
    common = [problem for problem in first.problems if all(problem in other.problems for other in others)]
    counts = {one.task: sum(problem not in common for problem in one.errors) for one in checked}
    more = [
        f"{task} (with {count} more error{'s' * (count > 1)})" if count else task for task, count in counts.items()
    ]
    what = f"it could be a recipe for {', '.join(more)}; only what these have in common was checked"
    note = Problem(what, fix=Fix(f"write `--task {first.task}`"), level="note", place=Place(first.path))
    return Checked(" or ".join(counts), first.path, (note, *common), first.values)


def installed_schema(task: str) -> Schema:
    """The schema of exactly the installed TRL and transformers.

    Args:
        task: One of `TASKS`.

    Returns:
        The one that was written for them, else one that is made from TRL, which is imported.
    """
    written = load(task)
    if all(installed(package) == version for package, version in written.versions.items()):
        return written
    from .schema_from_trl import live_schema

    return live_schema(task)


def check_recipe(
    recipe: str | Path | RecipeFile | None,
    task: str,
    overrides: Sequence[str] = (),
    accelerate_config: str | None = None,
    processes: int | None = None,
) -> Checked:
    """Checks a recipe against the keys of exactly the installed TRL.

    Args:
        recipe: The recipe, or the name of its file; `None` if everything comes from the command line.
        task: One of `TASKS`.
        overrides: `["--key", "value", ...]`.
        accelerate_config: The launch config, if the run is launched with one.
        processes: The number of processes to launch, if it is given.

    Returns:
        The checked recipe, without errors.

    Raises:
        RecipeError: With all problems at once.
        PrecisionError: If all of them are refusals of the precision.
    """
    checked = validate(
        recipe,
        task=task,
        overrides=overrides,
        schema=installed_schema(task),
        accelerate_config=accelerate_config,
        started=accelerate_config is None and not launches(recipe),
        processes=processes,
        for_run=True,
    )
    checked.check()
    return checked


def launches(recipe: str | Path | RecipeFile | None) -> bool:
    """Whether a recipe itself asks for a launch, in a process that was not launched yet.

    Args:
        recipe: The recipe, or the name of its file.
    """
    if recipe is None or "WORLD_SIZE" in os.environ:
        return False
    file = recipe if isinstance(recipe, RecipeFile) else read_file(recipe)
    return any(key in file.entries and file.entries[key].value is not None for key in LAUNCH)


def prepare(
    task: str, argv: Sequence[str], accelerate_config: str | None = None, processes: int | None = None
) -> Checked:
    """Checks the recipe of a training command, before anything slow, and sets its environment variables.

    Args:
        task: One of `TASKS`.
        argv: `["--config", FILE, "--key", "value", ...]`.
        accelerate_config: The launch config, if the run is launched with one.
        processes: The number of processes to launch, if it is given.

    Returns:
        The checked recipe; its warnings and notes are printed.

    Raises:
        RecipeError: With all problems at once.
        PrecisionError: If all of them are refusals of the precision.
    """
    path, overrides = split_config(list(argv))
    file = None if path is None else read_file(path)
    if file is not None:
        apply(variables(file.env))  # before TRL is imported, from which the keys are read if no schema was written
    checked = check_recipe(file, task, overrides, accelerate_config, processes)
    if os.environ.get("RANK", "0") == "0":
        for problem in checked.problems:
            print(f"{problem.level}: {problem.line()}", file=sys.stderr)
    return checked


def split_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Takes `--config FILE` out of a command line.

    Args:
        argv: The command line.

    Returns:
        The file, or the packaged recipe of that name, `None` if there is none; and the rest.

    Raises:
        RecipeError: If `--config` comes last, or several packaged recipes have that name.
    """
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in argv:
        return None, argv
    position = argv.index("--config")
    if position + 1 == len(argv):
        fix = Fix("write `--config recipes/grpo/tiny_vlm_bf16.yaml`")
        raise RecipeError(Problem("--config needs a file", fix=fix))
    return packaged.recipe_path(argv[position + 1]), [*argv[:position], *argv[position + 2 :]]


def report(checked: Sequence[Checked]) -> Report:
    """The problems of some recipes.

    Args:
        checked: The recipes.
    """
    verdicts: list[Problem] = []
    for one in checked:
        verdicts += one.problems
        if not one.errors:
            verdicts.append(Problem(f"{one.path}: {one.task}, {len(one.values)} keys", level="ok"))
    schemas = {str(one.schema.versions.get("trl")) for one in checked if one.schema is not None}
    facts = {"keys of": f"TRL {', '.join(sorted(schemas))}"} if schemas else {}
    here = installed()
    if here is not None and schemas and here not in schemas:
        facts["installed"] = f"TRL {here}, whose training commands check its own keys"
    subject = ", ".join(str(one.path) for one in checked) if len(checked) < 4 else f"{len(checked)} files"
    return Report("recipes", subject, facts, (), tuple(verdicts))


def tasks_of(file: RecipeFile) -> list[str]:
    """The task of a recipe: by the name of its folder, by the command of its header, or by its keys.

    Args:
        file: The recipe.

    Returns:
        One of `TASKS`; several if its keys fit several.
    """
    folder = Path(file.path or "").absolute().parent.name
    if folder in TASKS:
        return [folder]
    words = file.header[0].split() if file.header else []
    if len(words) > 1 and words[0] in ("safe-trainers", "trl") and words[1] in TASKS:
        return [words[1]]
    known = {task: sum(key in load(task).keys for key in file.entries) for task in TASKS}
    best = max(known.values())
    if not file.entries:
        return [next(iter(TASKS))]  # only the file itself can be checked
    return [task for task in TASKS if known[task] == best]


def only_task_of(file: RecipeFile) -> str:
    """The one task of a recipe, as `tasks_of` finds it.

    Args:
        file: The recipe.

    Raises:
        RecipeError: If its keys fit several tasks.
    """
    likely = tasks_of(file)
    if len(likely) > 1 and not file.problems:
        what = f"{file.path} fits the tasks {', '.join(likely)}"
        raise RecipeError(Problem(what, fix=Fix(f"add `--task {likely[0]}`, or move it to a folder {likely[0]}/")))
    return likely[0]


def _file_values(settings: Settings) -> Iterator[Problem]:
    """Converts the values of the file to the types of their keys."""
    for key, entry in settings.entries.items():
        known, place = settings.schema.keys.get(key) or LAUNCH.get(key), Place(settings.path, entry.line, key)
        if known is None:
            yield _unknown(settings, key, entry.value).at(place)
            continue
        try:
            made = convert(known, entry.value, entry.text, entry.written)
            (settings.launcher if key in LAUNCH else settings.values)[key] = made
        except RecipeError as error:
            settings.broken.add(key)
            yield from (problem.at(place) for problem in error.problems)


def _overrides(settings: Settings, words: list[str]) -> Iterator[Problem]:
    """Converts the values of the command line; each option is followed by words that do not begin with `--`."""
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
        recipe = stray[0].endswith((".yaml", ".yml")) and settings.path is None
        fix = Fix(f"write `--config {stray[0]}`" if recipe else "write `--key value`")
        yield Problem(f"{' '.join(stray)} does not belong to a key", fix=fix, place=CommandLine())
    for name, values in options:
        yield from _override(settings, name, values)


def _override(settings: Settings, name: str, words: list[str]) -> Iterator[Problem]:
    key = name.replace("-", "_")
    known = settings.schema.keys.get(key)
    negated = settings.schema.keys.get(key.removeprefix("no_"))
    if known is None and key.startswith("no_") and negated is not None and BOOLEAN in negated.types and not words:
        key, known, words = negated.name, negated, ["false"]
    if known is None:
        yield _unknown(settings, name, words[0] if words else "VALUE").at(CommandLine(key=name))
        return
    settings.overridden.add(key)
    settings.broken.discard(key)
    try:
        settings.values[key] = convert_words(known, words)
    except RecipeError as error:
        settings.broken.add(key)
        settings.values.pop(key, None)
        yield from (problem.at(CommandLine(key=key)) for problem in error.problems)


def _unknown(settings: Settings, key: str, value: Any) -> Problem:
    """The problem of a key that the task does not have: outdated, another task's, or misspelt."""
    plain = key.replace("-", "_")
    problem = outdated(plain, value, settings.schema.keys)
    if problem is not None:
        return problem
    if plain != key and plain in settings.schema.keys:
        return Problem(f"there is no key {key!r}{hint(plain)}", fix=_renamed(settings, plain, value))
    others = [task for task in TASKS if task != settings.task and plain in load(task).keys]
    if others:
        return Problem(f"{key!r} is a key of {' and '.join(others)}, not of {settings.task}", fix=leave_out(key))
    near = nearest(key, settings.schema.keys, MISSPELT)
    return Problem(f"there is no key {key!r}{hint(near)}", fix=_renamed(settings, near, value))


def _renamed(settings: Settings, key: str | None, value: Any) -> Fix | None:
    """The line with the key that was probably meant, if it is not written too."""
    plain = value is None or isinstance(value, (str, int, float, list, dict))
    if key is None or key in settings.entries or not plain or len(yaml_value(value)) > 200:
        return None
    return write(**{key: value})


def _meant(unknown: set[str], schema: Schema) -> set[str]:
    """The keys that unknown ones stand for: their defaults have no problems to report."""
    meant = {nearest(key, schema.keys, MISSPELT) for key in unknown} | {
        replacement(key, schema.keys) for key in unknown
    }
    return {key for key in meant if key is not None}


def _launcher(settings: Settings, file: RecipeFile, asked: str | None, started: bool) -> Iterator[Problem]:
    """Reads the accelerate config and the number of processes of the run."""
    world = os.environ.get("WORLD_SIZE", "")
    command = "" if started or asked else next(iter(file.header), "")
    counted, named = PROCESSES.search(command), LAUNCHER.search(command)
    own = {} if started else settings.launcher
    for key in [key for key, value in own.items() if value is not None and key in RANGES]:
        if own[key] not in RANGES[key]:
            yield settings.error(key, f"{key} must be {RANGES[key]}, got {own.pop(key)}")
    count = own.get("num_processes")
    header = int(counted[1]) if counted else int(world) if world.isdigit() and int(world) > 0 else 1
    settings.processes = count or header
    name = asked or own.get("accelerate_config") or (named[1] if named else None)
    name = name or ("ddp" if (own.get("num_machines") or 1) > 1 else None)
    if name is None:
        return
    path = Path(name)
    if not os.path.isfile(path):
        try:
            path = packaged.find(name, "configs")
        except RecipeError as error:
            in_header = not asked and not own.get("accelerate_config")
            place = Place(file.path, file.header_line) if in_header else settings.place("accelerate_config")
            place = CommandLine() if asked else place
            yield from (replace(problem, place=place) for problem in error.problems)
            return
    launch = read_file(path)
    yield from launch.problems
    settings.launch, settings.launch_path = launch.entries, launch.path
    if counted is None and count is None:
        written = launch.entries["num_processes"].value if "num_processes" in launch.entries else None
        settings.processes = written if isinstance(written, int) and written > 0 else None

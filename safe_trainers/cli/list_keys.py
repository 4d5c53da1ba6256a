"""`safe-trainers keys [TASK] [PATTERN]`: lists the keys of recipes."""

import argparse
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from ..core.errors import Problem, RecipeError, hint, nearest, yaml_value
from ..core.tasks import TASKS


if TYPE_CHECKING:
    from ..recipes.schema import Key, Schema

Row: TypeAlias = tuple[str, str, str, str, str | None]

EPILOG = """  safe-trainers keys grpo               # every key of a task
  safe-trainers keys sft learning       # those with `learning` in their name
  safe-trainers keys "lora_*"           # by a pattern, in all tasks
from: the package that has the key in one of its configs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = EPILOG
    parser.add_argument("task", metavar="TASK", nargs="?", help=f"{', '.join(TASKS)}; by default all of them")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="a part of a name, or a pattern with *")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the keys.

    Returns:
        The exit status.
    """
    from ..recipes.schema import load
    from ..report.document import Report, Table
    from ..report.render import present

    task, pattern = options.task, options.pattern
    if task is not None and task not in TASKS and pattern is None:
        task, pattern = None, task
    if task is not None and task not in TASKS:
        raise RecipeError(f"there is no task {task!r}{hint(nearest(task, TASKS))}: expected {', '.join(TASKS)}")
    schemas = [load(name) for name in ([task] if task is not None else TASKS)]
    names = sorted({key.name for schema in schemas for key in _keys(schema)})
    chosen = {name for name in names if _fits(name, pattern)}
    if not chosen:
        where = f"{task} has" if task is not None else "there is"
        raise RecipeError(Problem(f"{where} no key like {pattern!r}{hint(nearest(pattern, names))}"))
    having: dict[Row, list[str]] = {}  # tasks have keys of the same name with other values
    for schema in schemas:
        for key in _keys(schema):
            if key.name in chosen:
                row = (key.name, _values(key), _default(key), key.owner, key.help or None)
                having.setdefault(row, []).append(schema.task)
    rows = tuple(
        (*row[:4], None if len(tasks) == len(schemas) else ", ".join(tasks), row[4])
        for row, tasks in sorted(having.items(), key=lambda item: item[0][0])
    )
    facts = {"keys of": f"TRL {schemas[0].versions.get('trl')}"}
    table = Table("keys", ("key", "value", "default", "from", "tasks", "help"), rows)
    return present(Report("keys", task or "all tasks", facts, (table,)), options.json)


def _keys(schema: "Schema") -> Iterator["Key"]:
    """The keys of a task, and those that the launching command reads."""
    from ..recipes.schema import LAUNCH

    yield from schema.keys.values()
    yield from LAUNCH.values()


def _fits(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    wanted = pattern.lower().lstrip("-").replace("-", "_")
    return fnmatchcase(name, wanted) if set(wanted) & set("*?[") else wanted in name


def _values(key: "Key") -> str:
    such = f", such as {', '.join(key.examples)}" if key.examples else ""
    return f"{key.describe() or 'only in Python'}{such}"


def _default(key: "Key") -> str:
    shown = yaml_value(key.default)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."

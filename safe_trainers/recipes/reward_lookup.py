"""Finds a reward function without running any code: its module is found as a file and read as a syntax tree."""

import ast
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import Problem, hint, nearest
from ..rewards.registry import not_a_reward


MAX_HOPS = 5
"""The number of imports that are followed from one module to the next."""


@dataclass
class Surface:
    """The names that a module binds, as far as its source shows.

    Attributes:
        names: Each name with the node that binds it; `None` if the node shows nothing about its value.
        open: Whether it binds names that the source does not show, by `import *` or a `__getattr__` without `__all__`.
    """

    names: dict[str, ast.AST | None] = field(default_factory=dict)
    open: bool = False


def find_module(name: str) -> tuple[Path | None, str | None]:
    """Finds a module as a file, without importing the packages that it is in.

    Args:
        name: Its dotted name. The current folder comes first, as in a run.

    Returns:
        Its file, `None` if there is none to read (built in, or compiled); and what is wrong, `None` if nothing is.
    """
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None):
        return _readable(str(loaded.__file__)), None
    path: list[str] | None = [os.getcwd(), *sys.path]
    done: list[str] = []
    spec: importlib.machinery.ModuleSpec | None = None
    for part in name.split("."):
        if not part.isidentifier():
            return None, f"{name!r} is not the name of a module"
        done.append(part)
        full = ".".join(done)
        if path is None:
            return None, f"No module named {full!r}: {'.'.join(done[:-1])!r} is not a package"
        spec = importlib.machinery.PathFinder.find_spec(full, path)
        if spec is None and len(done) == 1:
            spec = _top_level(part)
        if spec is None:
            return None, f"No module named {full!r}"
        locations = spec.submodule_search_locations
        path = None if locations is None else list(locations)
    origin = spec.origin if spec is not None else None
    return (_readable(origin) if origin and spec is not None and spec.has_location else None), None


def missing_function(name: str) -> tuple[Problem | None, Path | None]:
    """The problem of a reward function's dotted name, as far as the source of its module shows.

    Args:
        name: Such as `my_package.rewards.exact_match`.

    Returns:
        The problem, `None` if there is none; and the file whose code a run would import, `None` if it is not known.
    """
    module, _, attribute = name.rpartition(".")
    path, wrong = find_module(module)
    if wrong is not None:
        return Problem(f"reward function {name!r} cannot be imported: {wrong}"), None
    if path is None:
        return None, None
    surface, broken = read_surface(path)
    if broken is not None:
        return Problem(f"reward function {name!r} cannot be imported: {broken}"), path
    if attribute not in surface.names:
        if surface.open:
            return None, path
        if find_module(name)[1] is None:
            return Problem(f"{name!r} is not a reward function, but a module"), path
        near = nearest(attribute, [key for key in surface.names if not key.startswith("_")])
        return Problem(f"module {module} has no function {attribute!r}{hint(near, f'{module}.')}"), path
    node = _followed(surface.names[attribute], module, path, attribute, MAX_HOPS)
    if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not _takes_what_trl_gives(node)):
        return not_a_reward(name), path
    return None, path


def read_surface(path: Path) -> tuple[Surface, str | None]:
    """Reads the names that a module binds at its top level, also in `if`, `try` and `with`.

    Args:
        path: Its file.

    Returns:
        The names, and why the module could not be read.
    """
    made = Surface()
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        return made, f"SyntaxError: {error.msg} ({path.name}, line {error.lineno})"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return made, f"{type(error).__name__}: {error}"
    listed: list[str] | None = None
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.names[node.name] = node
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                made.open |= alias.name == "*"
                made.names.setdefault(alias.asname or alias.name.split(".")[0], node)
            continue
        for below in ast.walk(node):
            if isinstance(below, ast.Name) and isinstance(below.ctx, ast.Store):
                made.names.setdefault(below.id, None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node).split("=")[0]:
            listed = _strings(node.value)
        for name in ("body", "orelse", "finalbody"):
            pending += getattr(node, name, [])
        for handler in getattr(node, "handlers", []):
            pending += handler.body
    if "__getattr__" in made.names:
        made.open |= listed is None
        for name in listed or []:
            made.names.setdefault(name, None)
    return made, None


def _strings(node: ast.expr | None) -> list[str] | None:
    elements = node.elts if isinstance(node, (ast.List, ast.Tuple)) else None
    if elements is None or not all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in elements):
        return None
    return [element.value for element in elements if isinstance(element, ast.Constant)]  # type: ignore[misc]


def _followed(node: ast.AST | None, module: str, path: Path, name: str, hops: int) -> ast.AST | None:
    """The node that binds a name in the module that it was imported from; `None` if it is not shown."""
    if not isinstance(node, ast.ImportFrom) or hops == 0:
        return node
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
    original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
    found, wrong = find_module(source)
    if found is None or wrong is not None:
        return None
    surface, broken = read_surface(found)
    if broken is not None:
        return None
    return _followed(surface.names.get(original), source, found, original, hops - 1)


def _takes_what_trl_gives(node: ast.FunctionDef) -> bool:
    """Whether a function can be called as TRL calls rewards; a decorated one may differ, and is accepted."""
    arguments = node.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return bool(node.decorator_list) or arguments.kwarg is not None or {"completions", "trainer_state"} <= names


def _top_level(name: str) -> importlib.machinery.ModuleSpec | None:
    """A top-level module without a file on the path: built in, frozen, or found by an editable install's finder."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a loaded module without a spec
        return None


def _readable(origin: str) -> Path | None:
    path = Path(origin)
    return path if path.suffix == ".py" and path.is_file() else None

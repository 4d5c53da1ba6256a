"""The recipes and launch configs that come with the package: their files and their headers."""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.errors import Fix, Problem, RecipeError, hint, nearest, run_command
from ..core.tasks import TASKS
from ..report.document import Report, Table
from .schema import path_of
from .yaml_file import EDITORS, read_file


Kind = Literal["recipes", "configs"]

SCRIPT = ".sbatch"
"""The suffix of a script that launches a recipe."""
HEADINGS = frozenset({"Hardware", "Versions", "Settings", "Source", "Verified"})
"""The names that a header's paragraphs begin with."""


@dataclass(frozen=True)
class Packaged:
    """A file that comes with the package.

    Attributes:
        name: Its name below its folder: `grpo/tiny_vlm_bf16.yaml`, `zero3.yaml`.
        kind: `"recipes"` or `"configs"`.
        path: Its path: in an installed package, or in the checkout that the package runs from.
        header: The comments that it begins with.
    """

    name: str
    kind: Kind
    path: Path
    header: tuple[str, ...] = ()

    @property
    def command(self) -> str | None:
        """The command in the first line of its header; `None` if there is none."""
        first = self.header[0] if self.header else ""
        return first if first.startswith(("safe-trainers ", "sbatch ")) else None

    def paragraph(self, name: str) -> str | None:
        """The paragraph of its header that begins with a name of `HEADINGS`; `None` if there is none.

        Args:
            name: The name.
        """
        lines: list[str] = []
        for line in self.header:
            head, colon, rest = line.partition(":")
            if lines and (not line or (colon and head in HEADINGS)):
                break
            if lines:
                lines.append(line)
            elif head == name and colon:
                lines.append(rest.strip())
        return " ".join(lines) or None

    @property
    def summary(self) -> str:
        """The first sentence of its header beside the command and the named paragraphs."""
        for line in self.header:
            if line and line != self.command and line.partition(":")[0] not in HEADINGS:
                return line.split(". ")[0].removesuffix(".")
        return ""


def folder(kind: Kind) -> Path:
    """The folder of the recipes or the configs.

    Args:
        kind: `"recipes"` or `"configs"`.

    Raises:
        RecipeError: If this installation has none.
    """
    package = Path(__file__).parent.parent
    for found in (package / "_data" / kind, package.parent / kind):
        if found.is_dir():
            return found
    raise RecipeError(f"this installation has no {kind}")


def packaged(kind: Kind) -> Iterator[Packaged]:
    """Every recipe or config, by name.

    Args:
        kind: `"recipes"` or `"configs"`.
    """
    root = folder(kind)
    for path in _files(kind):
        header = tuple(line for line in read_file(path).header if not line.startswith("!"))  # the line of the shell
        yield Packaged(path.relative_to(root).as_posix(), kind, path, header)


def _files(kind: Kind) -> list[Path]:
    """The files of the recipes or the configs; a script is a config that `copy` copies."""
    return sorted(path for path in folder(kind).rglob("*") if path.suffix in (".yaml", SCRIPT))


def find(name: str, kind: Kind) -> Path:
    """The file of a name. Its folder and `.yaml` may be left out if only one file has the rest of the name.

    Args:
        name: Such as `grpo/tiny_vlm_bf16.yaml`.
        kind: `"recipes"` or `"configs"`.

    Returns:
        Its path.

    Raises:
        RecipeError: If no file has that name, with the nearest one, or several have it.
    """
    found = _matches(name, kind)
    if len(found) > 1:
        raise _several(name, found, kind)
    if not found:
        raise RecipeError(f"there is no {kind.removesuffix('s')} {name}{hint(_nearest(name, kind))}")
    return found[0]


def recipe_path(name: str) -> Path:
    """The recipe that a user means: a file, or else a packaged recipe of that name.

    Args:
        name: The name that the user wrote.

    Returns:
        The file; a name that is neither is returned unchanged.

    Raises:
        RecipeError: If several recipes have that name, or no file has it and a packaged recipe has a similar one.
    """
    path = Path(name)
    if os.path.exists(path):
        return path
    found = _matches(name, "recipes")
    if len(found) > 1:
        raise _several(name, found, "recipes")
    near = None if found or os.path.isdir(path.parent) or path.suffix == ".yml" else _nearest(name, "recipes")
    if near is not None:
        raise RecipeError(f"there is no file and no recipe {name}{hint(near)}")
    return found[0] if found else path


def _matches(name: str, kind: Kind) -> list[Path]:
    """The files that a name stands for."""
    root, files = folder(kind), _files(kind)
    plain = name.removeprefix(f"{kind}/")
    for candidate in (plain, f"{plain}.yaml", f"{plain}{SCRIPT}"):
        found = [path for path in files if path.relative_to(root).as_posix() == candidate]
        found = found or [path for path in files if path.name == candidate]
        if found:
            return found
    return []


def _several(name: str, found: list[Path], kind: Kind) -> RecipeError:
    names = ", ".join(path.relative_to(folder(kind)).as_posix() for path in found)
    return RecipeError(Problem(f"{name} is the name of {names}", fix=Fix("write one of them with its folder")))


def _nearest(name: str, kind: Kind) -> str | None:
    root, files = folder(kind), _files(kind)
    known = [path.relative_to(root).as_posix() for path in files]
    stems = (path.stem for path in files if path.suffix == ".yaml")
    return nearest(name.removeprefix(f"{kind}/"), [*known, *(path.name for path in files), *stems])


def overview() -> Report:
    """The recipes and configs of the package, as two tables."""
    recipes = tuple(
        (
            one.name,
            *(_setting(one, key) for key in ("model_name_or_path", "precision")),
            _first(one.paragraph("Hardware")),
        )
        for one in packaged("recipes")
    )
    configs = tuple((one.name, one.summary) for one in packaged("configs"))
    tables = (
        Table("recipes", ("name", "model", "precision", "hardware"), recipes),
        Table("configs", ("name", "what"), configs),
    )
    return Report("recipes and launch configs", "what comes with the package", {}, tables)


def copy(name: str, dest: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Copies a packaged recipe or config; the schema that a recipe names for editors is that of this installation.

    Args:
        name: Its name.
        dest: A folder, which may end in a slash, or the name of the new file.
        force: Whether an existing file is overwritten.

    Returns:
        The new file.

    Raises:
        RecipeError: If no file has that name, with the nearest one, or the new file exists already.
    """
    source = _find_any(name)
    is_folder = os.path.isdir(dest) or os.fspath(dest).endswith("/")
    target = Path(dest, source.name) if is_folder else Path(dest)
    if not os.path.isdir(target.parent):
        fix = run_command(f"mkdir -p {shlex.quote(str(target.parent))}")
        raise RecipeError(Problem(f"there is no folder {target.parent}", fix=fix))
    if os.path.isdir(target):
        raise RecipeError(f"{target} is a folder")
    if os.path.exists(target) and target.samefile(source):
        raise RecipeError(f"{target} is the packaged file itself")
    if os.path.exists(target) and not force:
        raise RecipeError(Problem(f"{target} exists already", fix=Fix("write `--force`, or another name")))
    try:
        target.write_text(_for_editors(source.read_text(encoding="utf-8"), source.parent.name), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{target} cannot be written: {error.strerror}") from None
    return target


def _for_editors(text: str, task: str) -> str:
    """A recipe with the address of this installation's schema in the line for editors."""
    if task not in TASKS:
        return text
    line = f"# {EDITORS} $schema={path_of(task).as_uri()}"
    return re.sub(rf"^# {re.escape(EDITORS)}.*$", lambda _: line, text, count=1, flags=re.MULTILINE)


def _find_any(name: str) -> Path:
    """A recipe or a config; if neither has the name, the error names the nearest of both."""
    kinds: tuple[Kind, ...] = ("configs", "recipes") if name.startswith("configs/") else ("recipes", "configs")
    with_name = (kind for kind in kinds if _matches(name, kind))
    similar = (kind for kind in kinds if _nearest(name, kind) is not None)
    return find(name, next(with_name, next(similar, kinds[0])))


def _first(text: str | None) -> str | None:
    """The first sentence."""
    return None if text is None else text.split(". ")[0].removesuffix(".")


def _setting(one: Packaged, key: str) -> str | None:
    """A value of a recipe as it is written; for `precision`, by default the flag that is on."""
    entries = read_file(one.path).entries
    if key == "precision" and key not in entries:
        flags = [flag for flag in ("bf16", "fp16") if flag in entries and entries[flag].value is True]
        return next(iter(flags), None)
    return entries[key].text if key in entries else None

"""The recipes and launch configs that come with the package: where they are, and what their headers say."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import RecipeError, hint, nearest
from .recipe_file import read_file
from .report import Report, Table


Kind = Literal["recipes", "configs"]

HEADINGS = frozenset({"Hardware", "Versions", "Settings", "Source", "Verified"})
"""The names that a header's paragraphs begin with."""

SEVERAL = "stands for"
"""What is said of a name that is not one file's alone."""


@dataclass(frozen=True)
class Packaged:
    """A file that comes with the package.

    Attributes:
        name: Its name below its folder: `grpo/tiny_vlm_bf16.yaml`, `zero3.yaml`.
        kind: `"recipes"` or `"configs"`.
        path: Where it is: inside an installed package, or in the checkout that the package runs from.
        header: The comments that it begins with.
    """

    name: str
    kind: Kind
    path: Path
    header: tuple[str, ...] = ()

    @property
    def command(self) -> str | None:
        """The command that its header begins with."""
        first = self.header[0] if self.header else ""
        return first if first.startswith("safe-trainers ") else None

    def said(self, name: str) -> str | None:
        """What its header says under a name of `HEADINGS`: one paragraph, up to the next name or gap."""
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
        """The first line of its header that is neither the command nor under a name."""
        for line in self.header:
            if line and line != self.command and line.partition(":")[0] not in HEADINGS:
                return line.split(". ")[0].removesuffix(".")
        return ""


def folder(kind: Kind) -> Path:
    """The folder of the recipes or the configs.

    Raises:
        RecipeError: If this installation has none.
    """
    package = Path(__file__).parent
    for found in (package / "_data" / kind, package.parent / kind):
        if found.is_dir():
            return found
    raise RecipeError(f"this installation holds no {kind}")


def packaged(kind: Kind) -> Iterator[Packaged]:
    """Every recipe or config, by name."""
    root = folder(kind)
    for path in sorted(root.rglob("*.yaml")):
        yield Packaged(path.relative_to(root).as_posix(), kind, path, read_file(path).header)


def find(name: str, kind: Kind) -> Path:
    """The file of a name; its folder and `.yaml` may be left out where one file alone has the rest of the name.

    Args:
        name: Such as `grpo/tiny_vlm_bf16.yaml`.
        kind: `"recipes"` or `"configs"`.

    Returns:
        Its path.

    Raises:
        RecipeError: If there is none of that name, with the nearest one.
    """
    root = folder(kind)
    files = sorted(root.rglob("*.yaml"))
    known = {path.relative_to(root).as_posix(): path for path in files}
    plain = name.removeprefix(f"{kind}/")
    for candidate in (plain, f"{plain}.yaml"):
        if candidate in known:
            return known[candidate]
        short = [path for path in files if path.name == candidate]
        if len(short) == 1:
            return short[0]
        if short:
            several = ", ".join(path.relative_to(root).as_posix() for path in short)
            raise RecipeError(f"{name} {SEVERAL} {several}. Write one of them whole")
    names = {**dict.fromkeys(known), **{path.name: None for path in files}, **{path.stem: None for path in files}}
    raise RecipeError(f"there is no {kind.removesuffix('s')} {name}{hint(nearest(plain, names))}")


def recipe_path(name: str) -> Path:
    """The recipe that a user means: a file, or else a packaged recipe of that name.

    Args:
        name: What was written.

    Returns:
        The file; one that does not exist is returned as it was written.

    Raises:
        RecipeError: If several recipes have that name.
    """
    path = Path(name)
    if os.path.exists(path):
        return path
    try:
        return find(name, "recipes")
    except RecipeError as error:
        if SEVERAL in str(error):
            raise
        return path


def overview() -> Report:
    """What comes with the package, as two tables."""
    recipes = tuple(
        (one.name, *(_setting(one, key) for key in ("model_name_or_path", "precision")), _first(one.said("Hardware")))
        for one in packaged("recipes")
    )
    configs = tuple((one.name, one.summary) for one in packaged("configs"))
    tables = (
        Table("recipes", ("name", "model", "precision", "hardware"), recipes),
        Table("configs", ("name", "what"), configs),
    )
    return Report("recipes and launch configs", "what comes with the package", {}, tables)


def copy(name: str, dest: Path, *, force: bool = False) -> Path:
    """Copies a packaged recipe or config.

    Args:
        name: Its name.
        dest: A folder, or the name of the new file.
        force: Whether a file that is there is overwritten.

    Returns:
        The new file.

    Raises:
        RecipeError: If there is none of that name, with the nearest one, or the file is there.
    """
    source = _find_any(name)
    target = dest / source.name if os.path.isdir(dest) else dest
    if not os.path.isdir(target.parent):
        raise RecipeError(f"there is no folder {target.parent}. Run: mkdir -p {target.parent}")
    if os.path.isdir(target):
        raise RecipeError(f"{target} is a folder")
    if os.path.exists(target) and target.samefile(source):
        raise RecipeError(f"{target} is the packaged file itself")
    if os.path.exists(target) and not force:
        raise RecipeError(f"{target} is there already. Write: --force, or another name")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise RecipeError(f"{target} cannot be written: {error.strerror}") from None
    return target


def _find_any(name: str) -> Path:
    """A recipe or a config; where neither is found, the nearest of both is named."""
    said = []
    kinds: tuple[Kind, ...] = ("configs", "recipes") if name.startswith("configs/") else ("recipes", "configs")
    for kind in kinds:
        try:
            return find(name, kind)
        except RecipeError as error:
            said.append(str(error))
    raise RecipeError(next((text for text in said if SEVERAL in text or "did you mean" in text), said[0]))


def _first(text: str | None) -> str | None:
    """The first sentence."""
    return None if text is None else text.split(". ")[0].removesuffix(".")


def _setting(one: Packaged, key: str) -> str | None:
    """A value of a recipe as it is written; of `precision`, what the flags say where it is not set."""
    entries = read_file(one.path).entries
    if key == "precision" and key not in entries:
        flags = [flag for flag in ("bf16", "fp16") if flag in entries and entries[flag].value is True]
        return next(iter(flags), None)
    return entries[key].text if key in entries else None

"""The recipes and launch configs that come with the package: where they are, and what their headers say."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import RecipeError, hint, nearest
from .recipe_file import read_file


Kind = Literal["recipes", "configs"]


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
        """What its header says under a name, such as `"Hardware"`: one paragraph, up to the next name or gap."""
        lines: list[str] = []
        for line in self.header:
            head, colon, rest = line.partition(":")
            if lines and (not line or (colon and head[:1].isupper() and " " not in head)):
                break
            if lines:
                lines.append(line)
            elif head == name and colon:
                lines.append(rest.strip())
        return " ".join(lines) or None

    @property
    def summary(self) -> str:
        """The first sentence of its header that is neither the command nor a `Name: ...` line."""
        for line in self.header:
            head, colon, _ = line.partition(":")
            if line and line != self.command and not (colon and head[:1].isupper() and " " not in head):
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
            raise RecipeError(f"{name} stands for {several}. Write one of them whole")
    names = {**dict.fromkeys(known), **{path.name: None for path in files}, **{path.stem: None for path in files}}
    raise RecipeError(f"there is no {kind.removesuffix('s')} {name}{hint(nearest(plain, names))}")

"""Files that an option names: checked before the work begins, and written with one message if that fails."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import RecipeError


def check_output(option: str, file: str | os.PathLike[str]) -> None:
    """Checks that a file can be written. Nothing is left behind.

    Args:
        option: The option that names it, such as `--json`.
        file: Its path.

    Raises:
        RecipeError: If its folder does not exist or cannot be written to, or the path is a folder.
    """
    path = Path(file)
    if not os.path.isdir(path.parent):
        raise RecipeError(f"the folder {path.parent} of {option} {path} does not exist")
    if os.path.isdir(path):
        raise RecipeError(f"{option} {path} is a folder. Write the name of a file in it: {option} {path / 'NAME'}")
    with written(option, path):
        tempfile.TemporaryFile(dir=path.parent).close()  # root may write without the permission, but not everywhere


@contextlib.contextmanager
def written(option: str, file: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an error of the system in a block that writes a file into one message.

    Args:
        option: The option that names the file.
        file: Its path.

    Raises:
        RecipeError: If the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RecipeError(f"{option} {file} cannot be written: {error.strerror}") from None

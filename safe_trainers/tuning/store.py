"""Stores measurements in a JSON file, so that a search that was ended resumes without measuring again."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import RecipeError
from ..core.files import read_json, replace_file
from .figures import Figures
from .measure import Tokens
from .search import Modules


STATE = "state"
"""Key of the measurements in the file, beside the result."""


class Store:
    """The measurements of one search, in memory and in a file.

    Args:
        path: The file; `None` to keep the measurements in memory only.

    Attributes:
        tokens: The sampled tokens; `None` before they are sampled.
        resumed: Number of measurements that were read from the file.

    Raises:
        RecipeError: If the file has other content.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._identity: Mapping[str, Any] = {}
        self._measured: dict[str, dict[str, Any]] = {}
        self.tokens: Tokens | None = None
        self.resumed = 0
        self._state: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                self._state = read_json(path)[STATE]
            except (ValueError, KeyError, TypeError, OSError) as error:
                given = f"{path} is not a file of `safe-trainers tune` ({type(error).__name__})"
                raise RecipeError(f"{given}. Write the name of a new file") from None

    def open(self, identity: Mapping[str, Any]) -> None:
        """Takes the measurements of the file.

        Args:
            identity: What measurements depend on.

        Raises:
            RecipeError: If the measurements are of another model, other rows, settings or versions.
        """
        self._identity = json.loads(json.dumps(identity))
        if self._state:
            self._check(self._state.get("identity"))
            self._measured, self.tokens = self._state["measured"], self._state["tokens"]
            self.resumed = sum(map(len, self._measured.values()))
        self._state = {}

    def _check(self, known: Any) -> None:
        """Raises `RecipeError` if the measurements of the file depend on something else."""
        if known == self._identity:
            return
        held = dict(_flat(known)) if isinstance(known, dict) else {}
        now = dict(_flat(self._identity))
        names = [name for name in {**now, **held} if held.get(name) != now.get(name)]
        name = next((name for name in names if name != "rows"), None)
        what = "the rows of the dataset" if name is None else f"{name}, {held.get(name)} in place of {now.get(name)}"
        raise RecipeError(
            f"{self._path} has the measurements of another search, which would be lost: they differ in {what}. Write "
            "the name of a new file, or remove this one"
        )

    def __len__(self) -> int:
        return sum(map(len, self._measured.values()))

    def get(self, precision: str, names: Modules) -> Figures | None:
        """Returns the figures of a set, if they were measured."""
        content = self._measured.get(precision, {}).get(_key(names))
        return None if content is None else Figures.of_dict(content)

    def put(self, precision: str, names: Modules, figures: Figures) -> None:
        """Stores the figures of a set."""
        self._measured.setdefault(precision, {})[_key(names)] = figures.to_dict()

    def write(self, result: Mapping[str, Any]) -> None:
        """Writes the file, if there is one.

        Args:
            result: The result so far.

        Raises:
            RecipeError: If it cannot be written.
        """
        if self._path is None:
            return
        state = {"identity": self._identity, "tokens": self.tokens, "measured": self._measured}
        text = json.dumps({**result, STATE: state}) + "\n"
        try:
            replace_file(self._path, lambda file: file.write(text.encode()))
        except OSError as error:
            raise RecipeError(f"{self._path} cannot be written: {error.strerror}") from None


def _flat(identity: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in identity.items():
        if name == "settings" and isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _key(names: Modules) -> str:
    return " ".join(sorted(names))

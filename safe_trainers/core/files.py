"""Atomic file replacement, and JSON files that contain a mapping."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically: after a power cut, the file has either its old or its new content.

    Args:
        path: Path of the file.
        write: Writes the content into an open file.
    """
    temporary = path.with_name(f".{path.name}.part")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that contains a mapping.

    Args:
        path: Path of the file.

    Returns:
        The mapping.

    Raises:
        ValueError: If the file contains anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"its JSON is a {type(content).__name__}, not a mapping")
    return content


def is_file(path: Path) -> bool:
    """Like `Path.is_file`, but false for paths that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def set_config_dtype(config: Path, dtype: str) -> None:
    """Sets `dtype` in a `config.json`, including the configs of the parts of a composed model.

    Args:
        config: Path of the file; nothing is done if it does not exist.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
    """
    if not config.is_file():
        return

    def with_dtype(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: dtype if key == "dtype" and isinstance(entry, str)
            else entry if key == "quantization_config" else with_dtype(entry)
            for key, entry in value.items()
        }  # fmt: skip

    content = with_dtype(json.loads(config.read_text(encoding="utf-8")))
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    replace_file(config, lambda file: file.write(text.encode()))

"""Files of a checkpoint: written as a whole, and checked by their headers and ends.

No tensor is read here, and nothing is unpickled.
"""

import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


TRAINER_STATE = "trainer_state.json"

_TORCH = re.compile(
    r"(pytorch_model|adapter_model|optimizer|scheduler|scaler|rng_state|training_args|safe_trainers_)"
    r".*\.(bin|pt|pth)"
)
_JSON = (TRAINER_STATE, "config.json", "adapter_config.json")
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file that is there as a whole or not at all, also after a power cut.

    Args:
        path: Its place.
        write: What writes the content into an open file.
    """
    temporary = path.with_name(f".{path.name}.part")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, as its header describes it.

    Attributes:
        dtype: Canonical name of a floating dtype; the file's own (`"U8"`) of others.
        elements: How many numbers it holds.
        bytes: How many bytes they take.
    """

    dtype: str
    elements: int
    bytes: int


def safetensors_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, from its header alone.

    Args:
        path: The file.

    Returns:
        What is stored, by tensor name.

    Raises:
        ValueError: If the header does not fit the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length + 8 > size:
            raise ValueError(f"{size:,} bytes are shorter than its header")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if end != size:
        raise ValueError(f"{size:,} bytes, and its header promises {end:,}")
    return {
        name: Stored(
            _SAFETENSORS.get(entry["dtype"], entry["dtype"]),
            math.prod(entry.get("shape", ())),
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in tensors.items()
    }


def safetensors_dtypes(path: Path) -> dict[str, str]:
    """The dtype of each tensor of a safetensors file; see `safetensors_header`.

    Args:
        path: The file.

    Returns:
        Dtypes by tensor name.

    Raises:
        ValueError: If the header does not fit the file.
    """
    return {name: stored.dtype for name, stored in safetensors_header(path).items()}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping.

    Args:
        path: The file.

    Returns:
        The mapping.

    Raises:
        ValueError: If it holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, and no mapping")
    return content


def is_count(value: object) -> bool:
    """Whether a value read from JSON is a whole number from 0 on."""
    return type(value) is int and value >= 0


def is_file(path: Path) -> bool:
    """As `Path.is_file`, also for what no file can be named."""
    try:
        return path.is_file()
    except OSError:
        return False


def unreadable(path: Path) -> str | None:
    """Why a file cannot be what its name says, from its header or its end.

    Args:
        path: The file.

    Returns:
        The reason, or `None` where nothing speaks against it.
    """
    try:
        if path.suffix == ".safetensors":
            safetensors_dtypes(path)
        elif _TORCH.fullmatch(path.name):
            with open(path, "rb") as file:
                head = file.read(4)
            legacy = head[:1] == b"\x80"  # a pickle, as torch wrote before its zip format
            if not legacy and not (head == b"PK\x03\x04" and zipfile.is_zipfile(path)):
                return f"({path.stat().st_size:,} bytes) is truncated or corrupt: it is no file of torch.save"
        elif path.name in _JSON or path.name.endswith(".index.json"):
            content = read_json(path)
            if path.name == TRAINER_STATE and not is_count(content.get("global_step")):
                raise ValueError("it says no global_step")
            if path.name.endswith(".index.json"):
                shards = content.get("weight_map")
                if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                    raise ValueError("its weight_map is no mapping of names to files")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, struct.error) as error:
        return f"is truncated or corrupt: {error}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None

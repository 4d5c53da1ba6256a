"""Checks checkpoint files without reading tensors or unpickling."""

import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..core.files import read_json


TRAINER_STATE = "trainer_state.json"

_TORCH = re.compile(
    r"(pytorch_model|adapter_model|optimizer|scheduler|scaler|rng_state|training_args|safe_trainers_)"
    r".*\.(bin|pt|pth)"
)
_JSON = (TRAINER_STATE, "config.json", "adapter_config.json")
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, from the file's header.

    Attributes:
        dtype: `"float64"`, `"float32"`, `"bfloat16"` or `"float16"`; the file format's name, such as `"U8"`, of
            others.
        elements: Number of elements.
        bytes: Size in bytes.
    """

    dtype: str
    elements: int
    bytes: int


def safetensors_header(path: Path) -> dict[str, Stored]:
    """Reads the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        The tensors by name.

    Raises:
        ValueError: If the file is truncated or damaged, according to its header and its size.
    """
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: _stored(part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{error} ({path.stat().st_size:,} bytes)") from error


def _stored(dtype: str, shape: list[int]) -> Stored:
    """Makes the description of a tensor from the file format's name of its dtype (`"BF16"`, `"F8_E4M3"`, `"F4"`)."""
    bits = 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])
    elements = math.prod(shape)
    return Stored(_SAFETENSORS.get(dtype, dtype), elements, elements * bits // 8)


def safetensors_dtypes(path: Path) -> dict[str, str]:
    """Reads the dtype of each tensor of a safetensors file.

    Args:
        path: The file.

    Returns:
        Dtypes by tensor name, as in `Stored`.

    Raises:
        ValueError: If the file is truncated or damaged, according to its header and its size.
    """
    return {name: stored.dtype for name, stored in safetensors_header(path).items()}


def is_count(value: object) -> bool:
    """Whether a value from a JSON file is an integer of at least 0."""
    return type(value) is int and value >= 0


def unreadable(path: Path) -> str | None:
    """Checks that the header or the end of a file matches the format that its name implies.

    Args:
        path: The file.

    Returns:
        The fault, as a predicate that follows the file's name (`"is truncated ..."`); `None` if there is none.
    """
    try:
        if path.suffix == ".safetensors":
            safetensors_header(path)
        elif _TORCH.fullmatch(path.name):
            _check_torch_file(path)
        elif path.name in _JSON or path.name.endswith(".index.json"):
            content = read_json(path)
            if path.name == TRAINER_STATE and not is_count(content.get("global_step")):
                raise ValueError("global_step must be an integer of at least 0")
            if path.name.endswith(".index.json"):
                shards = content.get("weight_map")
                if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                    raise ValueError("weight_map must map names to files")
    except ValueError as error:
        return f"is truncated or corrupt: {error}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def _check_torch_file(path: Path) -> None:
    """Raises a ValueError if `torch.save` did not write a file completely.

    PyTorch has no check without unpickling. The directory of a ZIP file is at its end, so it shows that the file is
    complete.
    """
    with open(path, "rb") as file:
        head = file.read(4)
    legacy = head[:1] == b"\x80"  # a pickle, PyTorch's format before ZIP
    if not legacy and not (head == b"PK\x03\x04" and zipfile.is_zipfile(path)):
        raise ValueError(f"not a complete file of torch.save ({path.stat().st_size:,} bytes)")

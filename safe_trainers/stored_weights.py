"""What the weight files of a model or a checkpoint hold: dtypes and sizes by part, from headers alone.

Nothing is loaded into memory as a whole and nothing is unpickled: safetensors files are read by their headers, torch's
by its reader of plain weights. What the parts are is seen on a model without memory (torch's meta device), where its
class is known.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dtypes import SHORT
from .file_checks import Stored, safetensors_header
from .quantized_loading import HEADS


logger = logging.getLogger(__name__)

_STATISTICS = re.compile(
    r"(.*?)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(\w+)|SCB|weight_format)"
)
"""What bitsandbytes writes beside a packed weight: for 4 bits below its name, for 8 bits below its layer's."""
_PATTERNS = ("model*.safetensors", "adapter_model.safetensors", "pytorch_model*.bin", "adapter_model.bin")
ADAPTER, WEIGHTS = "adapter", "weights"


@dataclass
class Part:
    """The tensors of one part that are stored alike.

    Attributes:
        name: `"language model"`, `"vision tower (...)"`, `"adapter"`, ...
        dtype: What they are stored in; of packed ones the format, such as `"nf4"`.
        tensors: How many they are; the statistics of a packed one do not count.
        elements: How many numbers they hold, of packed ones those that were packed.
        bytes: How many bytes they take, statistics included.
    """

    name: str
    dtype: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0


def weight_files(folder: Path) -> list[Path]:
    """The files with weights in a folder; torch's own only where there are no safetensors files."""
    found = {pattern: sorted(folder.glob(pattern)) for pattern in _PATTERNS}
    return next((files for files in (found[p] for p in _PATTERNS) if files), [])


def read_weights(path: Path) -> dict[str, Stored]:
    """The tensors of a weight file.

    Args:
        path: A safetensors file, or one of torch's, of which only plain tensors are read.

    Returns:
        What is stored, by tensor name.

    Raises:
        ValueError: If the file is no such file, or holds anything but tensors.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors_header(path)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} is truncated or corrupt: {error}") from error
    content = read_plain(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no mapping of names to tensors")
    return {
        str(name): Stored(str(value.dtype).removeprefix("torch."), value.numel(), value.numel() * value.element_size())
        for name, value in content.items()
        if hasattr(value, "element_size")
    }


def read_plain(path: Path) -> Any:
    """Reads a file of `torch.save` that holds tensors and plain values alone.

    Args:
        path: The file; its tensors stay on the disk until they are used.

    Returns:
        What it holds.

    Raises:
        ValueError: If it holds anything else, or cannot be read.
    """
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path.name} is not read: {why}") from error


def stored_parts(tensors: Mapping[str, Stored], part_of: Callable[[str], str]) -> list[Part]:
    """Sums up what is stored.

    Args:
        tensors: What is stored, by tensor name.
        part_of: The part of a name.

    Returns:
        One entry for each part and dtype, in the order of the files.
    """
    kinds: dict[str, str] = {}
    for name in tensors:
        owner, kind = _owner(name)
        if owner is not None:  # one of several statistics tells the format
            kinds[owner] = kind or kinds.get(owner, "packed")
    found: dict[tuple[str, str], Part] = {}
    for name, stored in tensors.items():
        owner, _ = _owner(name)
        label = owner or name
        layer = label.removesuffix(".weight")
        dtype = kinds.get(label) or (kinds.get(layer) if layer != label or owner else None) or stored.dtype
        part = found.setdefault((part_of(label), dtype), Part(part_of(label), dtype))
        part.bytes += stored.bytes
        if owner is None:
            part.tensors += 1
            part.elements += stored.elements * (2 if dtype in ("nf4", "fp4") else 1)
    return list(found.values())


def _owner(name: str) -> tuple[str | None, str]:
    """What a statistic belongs to, and the format that it tells; no owner for what is none."""
    match = _STATISTICS.fullmatch(name)
    if match is None:
        return None, ""
    kind = match[3] or ("int8" if match[2] in ("SCB", "weight_format") else "")
    return match[1], kind


def floating(parts: Iterable[Part]) -> frozenset[str]:
    """The dtypes of weights that are not packed."""
    return frozenset(part.dtype for part in parts) & frozenset(SHORT)


def namer(folder: Path | None, config: Any = None) -> Callable[[str], str]:
    """Says which part a stored tensor belongs to.

    Args:
        folder: A folder with `config.json`; `None` where `config` is given.
        config: The config of the model.

    Returns:
        A function of a tensor's name. Where the class of the model is not one of transformers', what is no adapter
        and no head is `"weights"`.
    """
    from .inventory import HEAD, TEXT, tower_kind
    from .towers import anatomy

    model = _on_meta(folder, config)
    text, parts = TEXT if model is not None else WEIGHTS, dict.fromkeys(("lm_head", *HEADS), HEAD)
    if model is not None:
        towers = anatomy(model).towers
        parts |= {name.rpartition(".")[2]: tower_kind(name, module) for name, module in towers.items()}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        parts |= {name.rpartition(".")[2]: HEAD for name, module in model.named_modules() if name and module is head}

    def part(name: str) -> str:
        if ".lora_" in name or name.startswith("base_model."):
            return ADAPTER
        return next((parts[component] for component in name.split(".") if component in parts), text)

    return part


def _on_meta(folder: Path | None, config: Any) -> Any:
    """The model without memory; `None` where it cannot be made from its config alone."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False) if config is None else config
        architecture = (getattr(config, "architectures", None) or [""])[0]
        family = getattr(transformers, architecture, None)
        if family is None:
            return None
        with torch.device("meta"):
            return family._from_config(config)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, ImportError) as error:
        # A config of remote code, or of another release.
        logger.info("parts are told by their names alone: %s: %s", type(error).__name__, error)
        return None

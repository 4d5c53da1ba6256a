"""Reads dtypes and sizes of the stored weights of a model or checkpoint, by part.

Weights are not loaded into memory and Python objects are not unpickled: safetensors files are read from their headers,
and files of torch with `weights_only=True`. Parts are found by building the model on torch's meta device.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.integrity import Stored, safetensors_header
from ..core.dtypes import SHORT
from ..core.errors import Fix, Problem
from ..core.files import read_json
from ..model.parts import HEADS


logger = logging.getLogger(__name__)

_STATISTICS = re.compile(
    r"(.*?)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(\w+)|SCB|weight_format)"
)
"""Statistics of packed weights, which bitsandbytes names after the weight (4 bits) or after the layer (8 bits)."""
_PATTERNS = ("model*.safetensors", "adapter_model.safetensors", "pytorch_model*.bin", "adapter_model.bin")
ADAPTER, WEIGHTS = "adapter", "weights"
PICKLED = "it contains more than tensors, and unpickling it may run code"
"""What is wrong with a file of `torch.save` that `weights_only=True` refuses."""


@dataclass
class Part:
    """The tensors of a part that have the same dtype.

    Attributes:
        name: `"language model"`, `"vision tower (...)"`, `"adapter"`, ...
        dtype: The stored dtype; for packed weights the format, such as `"nf4"`.
        tensors: Number of tensors, without the statistics of packed weights.
        elements: Number of weights; packed weights count as unpacked.
        bytes: Size in bytes, including statistics.
    """

    name: str
    dtype: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder; files of torch only if there are no safetensors files."""
    found = {pattern: sorted(folder.glob(pattern)) for pattern in _PATTERNS}
    return next((files for files in (found[p] for p in _PATTERNS) if files), [])


def read_weights(path: Path) -> dict[str, Stored]:
    """Reads the dtypes and sizes of a weight file.

    Args:
        path: A safetensors file, or a file of `torch.save`.

    Returns:
        Dtype and size by tensor name.

    Raises:
        ValueError: If the file is corrupt, has another format, or contains anything but tensors.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors_header(path)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} is truncated or corrupt: {error}") from error
    content = read_plain(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a mapping from names to tensors")
    return {
        str(name): Stored(str(value.dtype).removeprefix("torch."), value.numel(), value.numel() * value.element_size())
        for name, value in content.items()
        if hasattr(value, "element_size")
    }


def read_plain(path: Path) -> Any:
    """Reads a file of `torch.save` that contains only tensors and plain values.

    Args:
        path: The file; its tensors are memory-mapped.

    Returns:
        Its content.

    Raises:
        ValueError: If the file contains anything else or cannot be read.
    """
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path.name} cannot be read: {PICKLED}") from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path.name} cannot be read: {why}") from error


def stored_parts(tensors: Mapping[str, Stored], part_of: Callable[[str], str]) -> list[Part]:
    """Sums up stored tensors by part and dtype.

    Args:
        tensors: Dtype and size by tensor name.
        part_of: Returns the part of a tensor name.

    Returns:
        One entry for each part and dtype, in the order of the files.
    """
    kinds: dict[str, str] = {}
    for name in tensors:
        owner, kind = _owner(name)
        if owner is not None:  # only one of several statistics contains the format
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
    """Returns the weight or layer of a statistic, and the format in its name; `None` for other tensors."""
    match = _STATISTICS.fullmatch(name)
    if match is None:
        return None, ""
    kind = match[3] or ("int8" if match[2] in ("SCB", "weight_format") else "")
    return match[1], kind


def floating(parts: Iterable[Part]) -> frozenset[str]:
    """Returns the dtypes of weights that are not packed."""
    return frozenset(part.dtype for part in parts) & frozenset(SHORT)


def namer(folder: Path | None, config: Any = None) -> Callable[[str], str]:
    """Returns a function that gives the part of a stored tensor.

    Args:
        folder: A folder with `config.json`; `None` if `config` is passed.
        config: The config of the model.

    Returns:
        A function from the name of a tensor to its part. If transformers does not have the class of the model, all
        tensors except adapters and heads are `"weights"`.
    """
    from ..model.inventory import HEAD, TEXT, tower_kind
    from ..model.parts import find_parts

    model = _on_meta(folder, config)
    text, parts = TEXT if model is not None else WEIGHTS, dict.fromkeys(("lm_head", *HEADS), HEAD)
    if model is not None:
        towers = find_parts(model).towers
        parts |= {name.rpartition(".")[2]: tower_kind(name, module) for name, module in towers.items()}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        parts |= {name.rpartition(".")[2]: HEAD for name, module in model.named_modules() if name and module is head}

    def part(name: str) -> str:
        if ".lora_" in name or name.startswith("base_model."):
            return ADAPTER
        return next((parts[component] for component in name.split(".") if component in parts), text)

    return part


def load_problems(folder: Path) -> list[Problem]:
    """Loads a stored model as transformers does, but onto the meta device, which reads no tensors.

    Args:
        folder: The folder of a model with weights and `config.json`.

    Returns:
        What prevents or changes loading; a note if it was not tried; a verdict of level `"ok"` if it works.
    """
    import transformers
    from safetensors import SafetensorError
    from transformers.utils import logging as upstream_logging

    release = f"transformers {transformers.__version__}"
    try:
        config = read_json(folder / "config.json")
    except ValueError:
        return []  # reported with the facts of the config
    name = next(iter(config.get("architectures") or [""]), "")
    family = getattr(transformers, str(name), None)
    untried = "custom code" if "auto_map" in config else "packed weights" if "quantization_config" in config else None
    if untried is not None or not name:
        why = "the config names no class" if not name else f"the model has {untried}"
        return [Problem("the headers of all files can be read, but loading was not tried", why, level="note")]
    if family is None:
        saved = config.get("transformers_version")
        other = saved not in (None, transformers.__version__)
        fix = Fix(f"install the release that saved it: transformers {saved}") if other else None
        return [Problem(f"{release} has no class {name}, so that the model cannot be loaded", fix=fix)]
    verbosity, bars = upstream_logging.get_verbosity(), upstream_logging.is_progress_bar_enabled()
    upstream_logging.set_verbosity(upstream_logging.CRITICAL)
    upstream_logging.disable_progress_bar()
    try:
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _, info = family.from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except (
        OSError, ValueError, LookupError, TypeError, RuntimeError, AttributeError, ImportError, SafetensorError
    ) as error:  # fmt: skip
        return [Problem(f"{release} cannot load it: {type(error).__name__}: {' '.join(str(error).split())}")]
    finally:
        upstream_logging.set_verbosity(verbosity)
        if bars:
            upstream_logging.enable_progress_bar()
    problems = []
    missing = sorted(info["missing_keys"])
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in info["mismatched_keys"])
    mismatched = sorted(entries)  # before transformers 5, names without shapes
    if mismatched:
        key, *shapes = mismatched[0]
        shown = ": " * bool(shapes) + " and ".join(str(list(shape)) for shape in shapes)
        text = f"{len(mismatched)} tensors have other shapes in the files than in the model, such as {key}{shown}"
        problems.append(Problem(text))
    if missing:
        text = f"{len(missing)} tensors of the model are not in the files, such as {missing[0]}"
        problems.append(Problem(text, "transformers fills them with random numbers", level="warning"))
    return problems or [Problem(f"all files can be read, and {release} can load them as {name}", level="ok")]


def _on_meta(folder: Path | None, config: Any) -> Any:
    """Builds the model on the meta device; `None` if it cannot be built from its config."""
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
        # The config needs remote code or another release of transformers.
        logger.info("parts are found from tensor names only: %s: %s", type(error).__name__, error)
        return None

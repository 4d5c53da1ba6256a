"""The settings of a model and its surroundings that decide what it computes, as flat mappings of scalars."""

import functools
import inspect
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import nn

from .names import canonical


Scalar = bool | int | float | str | None

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "safe-trainers")
_OWN = ("_disable_adapters", "_active_adapter", "_attn_implementation")
"""Attributes with a leading underscore that decide what a module computes."""
_IGNORED = frozenset(
    {
        "_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache",
        "layer_idx", "fsdp_auto_wrap_policy", "call_super_init", "dump_patches", "T_destination", "base_model_prefix",
        "main_input_name", "warnings_issued", "id2label", "label2id",
    }
)  # fmt: skip
_PATHS = ("output_dir", "logging_dir", "run_name", "hub_", "push_to", "report", "log_", "logging", "disable_tqdm",
          "save_", "record_steps", "dataloader", "overwrite", "trackio", "project", "local_rank", "vllm_server",
          "dataset_num_proc", "do_", "resume", "eval_", "skip_memory", "precision_report",
          "precision_metrics")  # fmt: skip


_SCALARS = frozenset({type(None), bool, int, float, str})


def flat(value: Any, name: str, depth: int = 4) -> Iterator[tuple[str, Scalar]]:
    """Yields the scalars in nested mappings and short lists by dotted name; skips other objects.

    Args:
        value: Any value.
        name: Its name.
        depth: How deep containers are read.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        yield name, value
    elif isinstance(value, torch.dtype):
        yield name, str(value).removeprefix("torch.")
    elif depth > 0 and isinstance(value, Mapping):
        for key, part in value.items():
            if str(key) not in _IGNORED:
                yield from flat(part, f"{name}.{key}" if name else str(key), depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple)) and len(value) <= 32:
        for index, part in enumerate(value):
            yield from flat(part, f"{name}.{index}", depth - 1)


def of_module(module: nn.Module) -> dict[str, Scalar]:
    """Returns the scalar attributes of a module, those in its mappings (`scaling.default`), and its functions' names.

    The training mode is not among them; it is recorded for each call.
    """
    found: dict[str, Scalar] = {}
    for name, value in vars(module).items():
        if name in _IGNORED or name == "training" or (name.startswith("_") and name not in _OWN):
            continue
        if type(value) in _SCALARS:
            found[name] = value
            continue
        if isinstance(value, (nn.Module, torch.Tensor)):
            continue
        if inspect.isfunction(value) or inspect.isbuiltin(value):
            found[name] = getattr(value, "__qualname__", str(value))
        elif name != "config":
            found.update(flat(value, name, 3))
    return found


def of_config(config: Any) -> dict[str, Scalar]:
    """Returns the scalars of a transformers config, including the attention implementation."""
    found = dict(flat(config.to_dict(), "config"))
    found["config._attn_implementation"] = str(getattr(config, "_attn_implementation", None))
    return found


def of_model(model: nn.Module, configs: dict[int, dict[str, Scalar]]) -> dict[str, dict[str, Scalar]]:
    """Returns the settings of each module by canonical name; only those that are not empty.

    Args:
        model: The model.
        configs: The scalars of configs by `id`, which are read once; extended.
    """
    found: dict[str, dict[str, Scalar]] = {}
    for name, module in model.named_modules():
        settings = of_module(module)
        config = vars(module).get("config")
        if hasattr(config, "to_dict"):
            if id(config) not in configs:
                configs[id(config)] = of_config(config)
            settings.update(configs[id(config)])
        if settings:
            found[canonical(name)] = {**settings, **found.get(canonical(name), {})}
    return found


def of_arguments(args: Any) -> dict[str, Scalar]:
    """Returns the scalars of training arguments, without paths, logging and hardware."""
    if args is None or not hasattr(args, "to_dict"):
        return {}
    return {name: value for name, value in flat(args.to_dict(), "", 2) if not name.startswith(_PATHS)}


def of_optimizer(optimizer: Any) -> dict[str, Scalar]:
    """Returns the class of an optimizer, and the scalars of each group of parameters."""
    if optimizer is None:
        return {}
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    found: dict[str, Scalar] = {"class": type(inner).__name__}
    for index, group in enumerate(inner.param_groups):
        found.update(flat({k: v for k, v in group.items() if k != "params"}, f"group {index}", 2))
    return found


def environment(device: torch.device) -> dict[str, Scalar]:
    """Returns the versions and the global switches that choose kernels.

    Args:
        device: The device of the model.
    """
    found: dict[str, Scalar] = {name: _version(name) for name in _LIBRARIES}
    found |= {
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        found["cuda"] = torch.version.cuda
        found["reduced precision reduction"] = f"{matmul.allow_bf16_reduced_precision_reduction}"
    return found


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

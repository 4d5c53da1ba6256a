"""The values that TRL, transformers and PEFT accept for keys whose annotations name none.

Registries and enums are asked. Where a library only compares a value with strings, these strings are read from its
source files, as data. Only `schema_from_trl` imports this module: it imports TRL.
"""

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from peft import TaskType
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


ASKED: Mapping[str, tuple[str, ...]] = {
    "attn_implementation": ("eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())),
    "cache_implementation": tuple(ALL_CACHE_IMPLEMENTATIONS),
    "lora_task_type": tuple(kind.value for kind in TaskType),
    "report_to": ("all", "none", *sorted(INTEGRATION_TO_CALLBACK)),
}
"""The values that registries and enums of the libraries hold."""

COMPARED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "bnb_4bit_quant_storage": (("transformers.utils.quantization_config", "bnb_4bit_quant_storage"),),
    "f_divergence_type": (),
    "importance_sampling_level": (),
    "loss_type": (),
    "multi_objective_aggregation": (),
    "scale_rewards": (),
    "vllm_importance_sampling_mode": (),
    "vllm_mode": (("trl.generation.vllm_generation", "mode"),),
}
"""Keys that accept only the strings that a library compares them with. The strings are read from the modules of the
task's config and trainer, and from these modules, in which the value has this name."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {"lora_target_modules": (INCLUDE_LINEAR_LAYERS_SHORTHAND,)}
"""Values with a meaning of their own, for keys that accept other values too."""


def choices_of(config: type, field: Any) -> tuple[str, ...]:
    """The strings that a key accepts, as far as the libraries show them.

    Args:
        config: The dataclass that has the key.
        field: Its field.

    Returns:
        The strings, sorted; none if the key accepts any. One string alone, or strings without the key's default, are
        not all that it accepts, so that any is accepted then too.
    """
    if field.name in ASKED:
        return ASKED[field.name]
    if field.name not in COMPARED:
        return ()
    places = [*((module, field.name) for module in _modules_of(config, field.name)), *COMPARED[field.name]]
    found = {value for module, name in places for value in _compared(module).get(name, ())}
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    defaults = {default} if isinstance(default, str) else set(default) if isinstance(default, list) else set()
    return tuple(sorted(found)) if len(found) > 1 and defaults <= found else ()


def entries_of(key: str) -> tuple[str, ...]:
    """The arguments that a mapping holds which is passed to a function of transformers.

    Args:
        key: The key of the mapping.

    Returns:
        Their names, sorted; none if the mapping is passed elsewhere.
    """
    if key in ("model_init_kwargs", "teacher_model_init_kwargs"):
        return _loading_arguments()
    if key == "generation_kwargs":
        return tuple(sorted(name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")))
    return ()


def _modules_of(config: type, name: str) -> Iterator[str]:
    """The modules of a config that declares a field, and of its trainer."""
    for cls in config.__mro__:
        if name in inspect.get_annotations(cls) and cls.__module__.startswith("trl."):
            yield from (cls.__module__, cls.__module__.removesuffix("_config") + "_trainer")


@cache
def _compared(module: str) -> Mapping[str, frozenset[str]]:
    """The strings that a module compares names and attributes with, by the last part of the name."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(_source(module)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        for side in sides:
            name = side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", None)
            if name is not None:
                found.setdefault(name, set()).update(text for other in sides for text in _strings(other))
    return {name: frozenset(found_strings) for name, found_strings in found.items()}


def _strings(node: ast.expr) -> Iterator[str]:
    """The strings of a constant, or of a list of constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for item in node.elts:
            yield from _strings(item)


@cache
def _loading_arguments() -> tuple[str, ...]:
    """The arguments of `from_pretrained`: those of its signature, and those that it takes out of its keywords."""
    method = transformers.PreTrainedModel.from_pretrained
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = {name for name, parameter in inspect.signature(method).parameters.items() if parameter.kind in kinds}
    for module in ("transformers.modeling_utils", "transformers.models.auto.auto_factory"):
        for node in ast.walk(_source(module)):
            if isinstance(node, ast.FunctionDef) and node.name in ("from_pretrained", "_from_config"):
                found |= set(_taken(node))
    return tuple(sorted(name for name in found - {"cls", "pretrained_model_name_or_path"} if not name.startswith("_")))


def _taken(function: ast.FunctionDef) -> Iterator[str]:
    """The names in `kwargs.pop("name")`, `kwargs.get("name")` and `hub_kwargs_names = ["name"]` of a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get"):
            owner = getattr(node.func.value, "id", "")
            if owner in ("kwargs", "hub_kwargs") and node.args:
                yield from _strings(node.args[0])
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "hub_kwargs_names":
            yield from _strings(node.value)


@cache
def _source(module: str) -> ast.Module:
    """The parsed source file of a module; nothing if it has none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that this release does not have
        spec = None
    path = Path(spec.origin) if spec is not None and spec.origin is not None else None
    if path is None or path.suffix != ".py":
        return ast.Module([], [])
    return ast.parse(path.read_text(encoding="utf-8"))

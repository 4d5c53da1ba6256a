"""Binds a trainer's arguments by name, because their order differs between TRL releases."""

import functools
import inspect
import logging
from typing import Any

from ..core.trl import trl_bases


logger = logging.getLogger(__name__)

QUANTIZATION = "quantization_config"
"""An argument of trainers since TRL 1.8; older releases read it from `model_init_kwargs`."""


@functools.lru_cache(maxsize=64)
def signature_of(classes: tuple[type, ...]) -> inspect.Signature:
    """Returns the signature of the first class whose `__init__` names its arguments.

    Classes before it take `*args` and pass them on. Arguments that they name before `*args` come first in the
    signature, and their keyword-only arguments are added to it.
    """
    own: dict[str, inspect.Parameter] = {}
    for cls in classes:
        if "__init__" in vars(cls):
            signature = inspect.signature(vars(cls)["__init__"])
            named = list(signature.parameters.values())[1:]  # without self
            if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in named):
                leading = [parameter for parameter in own.values() if parameter.kind is not parameter.KEYWORD_ONLY]
                only = [p for p in own.values() if p.kind is p.KEYWORD_ONLY and p.name not in signature.parameters]
                last = [parameter for parameter in named if parameter.kind is parameter.VAR_KEYWORD]
                others = [p for p in named if p.kind is not p.VAR_KEYWORD and p.name not in {q.name for q in leading}]
                if any(parameter.default is not parameter.empty for parameter in leading):
                    others = [_optional(parameter) for parameter in others]
                return signature.replace(parameters=[*leading, *others, *only, *last])
            own |= {p.name: p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return inspect.Signature()


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter with a default, as it has to follow one that has a default."""
    positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    return parameter.replace(default=None) if positional else parameter


def takes_others(classes: tuple[type, ...]) -> bool:
    """Whether a class before the one that names its arguments takes keyword arguments of any name.

    Args:
        classes: The classes, in their order of resolution.
    """
    for cls in classes:
        if "__init__" in vars(cls):
            kinds = {parameter.kind for parameter in inspect.signature(vars(cls)["__init__"]).parameters.values()}
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                return False
            if inspect.Parameter.VAR_KEYWORD in kinds:
                return True
    return False


def bind_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], others: bool = False
) -> dict[str, Any]:
    """Returns the arguments of a trainer by name.

    Args:
        signature: The trainer's signature.
        args: The positional arguments.
        kwargs: The keyword arguments; `quantization_config` is accepted under every TRL release.
        others: Whether keyword arguments that the signature does not have are accepted, see `takes_others`.

    Raises:
        TypeError: If the arguments do not match the signature.
    """
    known = _takes_quantization(signature)
    free = {name: value for name, value in kwargs.items() if others and name not in signature.parameters}
    named = {name: value for name, value in kwargs.items() if name not in free and (known or name != QUANTIZATION)}
    bound = dict(signature.bind(*args, **named).arguments) | free
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound if known or QUANTIZATION not in kwargs else {**bound, QUANTIZATION: kwargs[QUANTIZATION]}


def move_quantization_config(signature: inspect.Signature, arguments: dict[str, Any]) -> dict[str, Any]:
    """Moves `quantization_config` into `model_init_kwargs` if this TRL release reads it from there.

    Args:
        signature: The trainer's signature.
        arguments: The arguments by name; `model_init_kwargs` of their config are completed in place.

    Returns:
        The arguments that the trainer accepts.

    Raises:
        ValueError: If `model_init_kwargs` already has a different `quantization_config`.
    """
    if _takes_quantization(signature) or QUANTIZATION not in arguments:
        return arguments
    accepted = {name: value for name, value in arguments.items() if name != QUANTIZATION}
    config, args = arguments[QUANTIZATION], arguments.get("args")
    if config is None:
        return accepted
    if not isinstance(arguments.get("model"), str):
        logger.warning("quantization_config is ignored, because `model` is a model object")
        return accepted
    declared = getattr(args, "model_init_kwargs", None) or {}
    if declared.get(QUANTIZATION, config) is not config:
        raise ValueError(
            f"{QUANTIZATION} was passed both to the trainer and in model_init_kwargs; pass it in one place"
        )
    if args is not None:
        args.model_init_kwargs = {**declared, QUANTIZATION: config}
    return accepted


def _takes_quantization(signature: inspect.Signature) -> bool:
    """Whether a trainer accepts `quantization_config`."""
    parameters = signature.parameters.values()
    return QUANTIZATION in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)


def default_output_dir(model: Any, trainer_class: type) -> str:
    """The folder name that TRL uses by default, e.g. `Qwen2.5-VL-3B-GRPO`."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    algorithm = getattr(trl_bases(trainer_class)[0], "_name", None) or trl_bases(trainer_class)[0].__name__
    return f"{name.rstrip('/').split('/')[-1]}-{algorithm}"

"""How a trainer is called: its arguments by name, whatever their order in a release of TRL."""

import inspect
import logging
from collections.abc import Iterable
from typing import Any

from .contract import trl_bases


logger = logging.getLogger(__name__)

QUANTIZATION = "quantization_config"
"""An argument that trainers have since TRL 1.8; before, it is one of `model_init_kwargs`."""


def signature_of(classes: Iterable[type]) -> inspect.Signature:
    """How the first of some classes that names its arguments is built.

    One that takes `*args` hands them on to the next, and may take keywords of its own.
    """
    own: dict[str, inspect.Parameter] = {}
    for cls in classes:
        if "__init__" in vars(cls):
            signature = inspect.signature(vars(cls)["__init__"])
            named = list(signature.parameters.values())[1:]  # without self
            if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in named):
                own = {name: parameter for name, parameter in own.items() if name not in signature.parameters}
                last = [parameter for parameter in named if parameter.kind is parameter.VAR_KEYWORD]
                first = [parameter for parameter in named if parameter.kind is not parameter.VAR_KEYWORD]
                return signature.replace(parameters=[*first, *own.values(), *last])
            own |= {parameter.name: parameter for parameter in named if parameter.kind is parameter.KEYWORD_ONLY}
    return inspect.Signature()


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by keyword: their order differs between releases of TRL.

    Args:
        signature: Of the trainer.
        args: What was passed by position.
        kwargs: What was passed by keyword; `quantization_config` may be among it in each release.

    Raises:
        TypeError: If the trainer takes something else.
    """
    known = _takes_quantization(signature)
    bound = dict(signature.bind(*args, **{k: v for k, v in kwargs.items() if known or k != QUANTIZATION}).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound if known or QUANTIZATION not in kwargs else {**bound, QUANTIZATION: kwargs[QUANTIZATION]}


def as_taken(signature: inspect.Signature, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as this release of TRL takes them.

    Args:
        signature: Of the trainer.
        arguments: What `by_name` returned. The `model_init_kwargs` of `args` are completed where this release looks
            for a `quantization_config` there.

    Raises:
        ValueError: If two different ones were given.
    """
    if _takes_quantization(signature) or QUANTIZATION not in arguments:
        return arguments
    taken = {name: value for name, value in arguments.items() if name != QUANTIZATION}
    asked, args = arguments[QUANTIZATION], arguments.get("args")
    if asked is None:
        return taken
    if not isinstance(arguments.get("model"), str):
        logger.warning("quantization_config is ignored: the model is built already")
        return taken
    declared = getattr(args, "model_init_kwargs", None) or {}
    if declared.get(QUANTIZATION, asked) is not asked:
        raise ValueError(f"{QUANTIZATION} is given to the trainer and in model_init_kwargs; write it in one place")
    if args is not None:
        args.model_init_kwargs = {**declared, QUANTIZATION: asked}
    return taken


def _takes_quantization(signature: inspect.Signature) -> bool:
    """Whether a trainer has the argument, or takes any."""
    parameters = signature.parameters.values()
    return QUANTIZATION in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)


def default_output_dir(model: Any, trainer_class: type) -> str:
    """The folder that TRL would name, e.g. `Qwen2.5-VL-3B-GRPO`."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    algorithm = getattr(trl_bases(trainer_class)[0], "_name", None) or trl_bases(trainer_class)[0].__name__
    return f"{name.rstrip('/').split('/')[-1]}-{algorithm}"

"""How a trainer is called: its arguments by name, whatever their order in a release of TRL."""

import inspect
from collections.abc import Iterable
from typing import Any

from .contract import trl_bases


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
    """Arguments by keyword: their order differs between releases of TRL."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def default_output_dir(model: Any, trainer_class: type) -> str:
    """The folder that TRL would name, e.g. `Qwen2.5-VL-3B-GRPO`."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    algorithm = getattr(trl_bases(trainer_class)[0], "_name", None) or trl_bases(trainer_class)[0].__name__
    return f"{name.rstrip('/').split('/')[-1]}-{algorithm}"

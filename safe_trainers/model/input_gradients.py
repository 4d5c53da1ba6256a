"""The hooks of transformers that make a model's embeddings require gradients.

With gradient checkpointing, or frozen embeddings, the input of the first layer must require a gradient.
`enable_input_require_grads` registers hooks for that on the embeddings.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from ..core.patches import replace, replaced_by
from .parts import unwrap


_ENABLE = "enable_input_require_grads"


def keep_hooks_single(model: nn.Module) -> None:
    """Lets a model have one set of these hooks.

    TRL turns gradient checkpointing off while it generates and scores, and on again afterwards. transformers then
    registers the hooks again, and loses the handles of those of before: more hooks in each step, which each later
    forward pass calls.

    Args:
        model: The policy model.
    """
    base = unwrap(model)
    if hasattr(base, _ENABLE) and not replaced_by(base, _ENABLE):
        replace("input-gradients", base, _ENABLE, partial(_enable, base))  # which can be copied and pickled


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Removes the hooks while the block runs; graphs of some releases of torch break at them.

    Args:
        model: The policy model.
    """
    base: Any = unwrap(model)
    removed = _remove(base)
    try:
        yield
    finally:
        if removed:
            base.enable_input_require_grads()


def _enable(model: Any) -> None:
    """Registers the hooks of transformers in place of those of an earlier call."""
    _remove(model)
    type(model).enable_input_require_grads(model)


def _remove(model: Any) -> bool:
    """Removes the hooks; returns whether there were any."""
    single = getattr(model, "_require_grads_hook", None)  # all that there is in older releases of transformers
    hooks = [hook for hook in getattr(model, "_require_grads_hooks", [single]) if hook is not None]
    for hook in hooks:
        hook.remove()
    return bool(hooks)

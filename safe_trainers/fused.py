"""Dtype boundaries of modules that multiply their input with matrices of their own: experts, routers, projectors.

Nothing in such a module is an `nn.Linear`, so the boundaries of leaves do not reach it. But it is a module, and what
enters it can be cast. PEFT's adapters on single parameters (`target_parameters`) add their delta in the dtype of the
parameter, so that it is the parameter's dtype that counts, with adapters and without.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .boundaries import MATMUL_LEAVES, NORM_LEAVES
from .towers import adapter_parameters, is_quantized


def guard_fused(model: nn.Module) -> int:
    """Makes what enters modules that are mostly matrices of their own follow these matrices.

    The first floating tensor is cast, which is what they multiply; what comes after it (routing weights) scales and
    may stay wider. The hook is a function of this module without state, so that it survives `deepcopy`, pickling and
    gradient checkpointing. Under autocast it does nothing.

    Args:
        model: The model; a module in it is guarded once, however often it is called.

    Returns:
        How many modules were guarded now.
    """
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    count = 0
    for module in model.modules():
        matrix = _matrix(module)
        if (
            matrix is None
            or id(matrix) in adapters
            or isinstance(module, (*MATMUL_LEAVES, *NORM_LEAVES, nn.Embedding, nn.EmbeddingBag))
            or any(is_quantized(parameter) for parameter in module.parameters(recurse=False))
            # A whole model with a matrix beside its modules (query tokens) does not multiply its input with it.
            or 2 * sum(map(torch.Tensor.numel, _matrices(module))) <= sum(p.numel() for p in module.parameters())
            or _follow_matrix in module._forward_pre_hooks.values()
        ):
            continue
        module.register_forward_pre_hook(_follow_matrix, with_kwargs=True)
        count += 1
    return count


def _matrix(module: nn.Module) -> nn.Parameter | None:
    """The largest matrix that belongs to a module itself, `None` where there is none."""
    return max(_matrices(module), key=torch.Tensor.numel, default=None)


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from (parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
    # While an adapter on the parameter is active, torch keeps it here.
    for held in getattr(module, "parametrizations", {}).values():
        yield held.original


def _follow_matrix(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    matrix = _matrix(module)
    if matrix is None or matrix.is_meta or torch.is_autocast_enabled(matrix.device.type):
        return None
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dtype == matrix.dtype:
                return None
            return (*args[:index], value.to(matrix.dtype), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if value.dtype == matrix.dtype else (args, {**kwargs, name: value.to(matrix.dtype)})
    return None

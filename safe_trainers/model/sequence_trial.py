"""Asks a model how its log-probabilities depend on positions and token types, by running a few tokens through it."""

import contextlib
import inspect
import itertools
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.device import float32_spacing
from .parts import is_quantized, unwrap
from .trial_forward import is_loaded, undisturbed


logger = logging.getLogger(__name__)

LENGTH = 8
"""Tokens of the trial sequence."""
FLOAT32_SPACING = 2.0**-23
"""Spacing between the float32 numbers from 1 to 2."""
SHIFT = 128
"""Distance between the positions that are compared, if the model has as many."""
LARGEST_ROUNDING = {True: 30.0, False: 1.0}
"""The mean difference that may be due to rounding, in spacings of the dtype: in float32 and in half precision. Trained
models have up to 1.3 in float32, where learned positions have 1e5 and HunYuan's 2e3, and 0.3 in half precision, where
learned positions have 2.6 in bfloat16 and 20 in float16."""


def takes(model: nn.Module, name: str) -> bool:
    """Whether the forward pass of a model has an argument of this name.

    Args:
        model: The model, wrapped or not.
        name: The argument.
    """
    return name in inspect.signature(unwrap(model).forward).parameters


def depends_on_shift(model: nn.Module, spacing: float, wrapped: bool = False) -> bool | None:
    """Whether a model's log-probabilities change if all tokens are at later positions.

    They change with learned or absolute positions (GPT-2), and only by rounding with rotary or relative ones. TRL pads
    prompts on the left and scores them without `position_ids`, and `generate` passes those of the tokens without the
    padding, so that such a model scores other positions than it has sampled.

    Args:
        model: The model that is called, wrapped or not.
        spacing: The spacing of the run's compute dtype at 1.
        wrapped: Whether to call the model as it is wrapped, for example under autocast. Otherwise, float32 weights
            compute in float32.

    Returns:
        The answer; `False` if the model takes no positions, `None` if it cannot be run on text alone.
    """
    if not takes(model, "position_ids"):
        return False
    shift = min(SHIFT, _positions(unwrap(model)) - LENGTH)
    if shift <= 0:
        return False
    device = next(model.parameters()).device
    positions = torch.arange(LENGTH, device=device)  # (T,)
    inputs = {"position_ids": torch.stack([positions, positions + shift])}
    exact = not wrapped and _in_float32(model)
    logps = _log_probabilities(model, 2, inputs, exact=exact)
    if exact:
        spacing = float32_spacing(device)
    elif not wrapped:  # without autocast, operations use the dtypes of the weights
        held = {p.dtype for p in model.parameters() if not is_quantized(p) and p.is_floating_point()}
        spacing = max(spacing, *(torch.finfo(dtype).eps for dtype in held))
    return None if logps is None else _differ(logps[0], logps[1], spacing)


def sees_future(model: nn.Module, spacing: float, token_type: int) -> bool | None:
    """Whether a model's log-probabilities depend on later tokens if all tokens have a token type.

    Args:
        model: The model that is called, wrapped or not.
        spacing: The spacing of the run's compute dtype at 1.
        token_type: The type, as in `token_type_ids`.

    Returns:
        The answer; `None` if the model cannot be run on text alone.
    """
    device = next(model.parameters()).device
    types = torch.full((2, LENGTH), token_type, device=device)  # (B, T)
    logps = _log_probabilities(model, 2, {"token_type_ids": types}, change_last=True)
    return None if logps is None else _differ(logps[0, :-1], logps[1, :-1], spacing)


def _log_probabilities(
    model: nn.Module,
    rows: int,
    inputs: Mapping[str, torch.Tensor],
    change_last: bool = False,
    exact: bool = False,
) -> torch.Tensor | None:
    """Returns the log-probabilities of all tokens after each token of equal sequences, (B, T, V) float64.

    Args:
        model: The model.
        rows: Number of sequences, B.
        inputs: Further inputs of the model.
        change_last: Whether the last token of the last sequence is another one.
        exact: Whether to compute in the dtype of the weights, although the forward pass is wrapped in autocast.

    Returns:
        The log-probabilities; `None` if the model cannot be run on text alone.
    """
    if not is_loaded(model):
        logger.info("an engine has not loaded the weights; how the model treats positions is not known")
        return None
    ids = text_sequence(unwrap(model), LENGTH + 1)
    another, ids = ids[0, -1], ids[:, :-1].repeat(rows, 1)  # (B, T)
    if change_last:
        ids[-1, -1] = another
    base: Any = unwrap(model)
    forward = partial(type(base).forward, base) if exact else model
    context = torch.autocast(ids.device.type, enabled=False) if exact else contextlib.nullcontext()
    try:
        with undisturbed(model), context:
            output = forward(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs)
        logits = output["logits"] if isinstance(output, Mapping) and "logits" in output else output[0]
    except Exception as error:
        logger.info("the trial of a sequence failed: %s: %s", type(error).__name__, error)
        return None
    return logits.double().log_softmax(-1)


def _in_float32(model: nn.Module) -> bool:
    """Whether all weights of a model are float32 and none is quantised."""
    return all(not is_quantized(parameter) and parameter.dtype == torch.float32 for parameter in model.parameters())


def _differ(one: torch.Tensor, other: torch.Tensor, spacing: float) -> bool:
    """Whether log-probabilities, of any shape, differ by more than rounding."""
    difference = (one - other).abs() / one.abs().clamp(min=1.0)
    return bool(difference.mean() / spacing > LARGEST_ROUNDING[spacing == FLOAT32_SPACING])


def text_sequence(model: nn.Module, length: int = LENGTH) -> torch.Tensor:
    """Returns different token ids that no config of a model names as special, such as those of images.

    Args:
        model: The model, not wrapped.
        length: Number of tokens, T.

    Returns:
        The token ids, (1, T) int64, on the device of the model.
    """
    config: Any = model.config
    configs = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    special = {
        value for part in configs for name, value in vars(part).items() if "token" in name and isinstance(value, int)
    }
    plain = (index for index in range(1, config.get_text_config().vocab_size) if index not in special)
    return torch.tensor([[*itertools.islice(plain, length)]], device=next(model.parameters()).device)


def _positions(model: nn.Module) -> int:
    """Returns the number of positions that a model has; `SHIFT` + `LENGTH` if its config does not say it."""
    config: Any = model.config
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else SHIFT + LENGTH

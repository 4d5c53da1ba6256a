"""Applies the scale of logits in rollouts, where the forward pass of a vision-language model leaves it out.

The text models of some families scale their logits (Cohere's `logit_scale`, Granite's `logits_scaling`). A
vision-language model of transformers with such a text model has a head of its own and does not scale (Aya Vision,
Cohere2 Vision, LLaVA-NeXT with Granite), so that `generate` samples from a distribution that is many times as sharp as
the one with which the text model was trained. TRL's scoring and vLLM do scale.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..model.parts import unwrap
from ..model.sequence_trial import text_sequence
from ..model.trial_forward import is_loaded, undisturbed


logger = logging.getLogger(__name__)

MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Names, in text configs, of factors of the logits; TRL's fused head uses the first that is set."""
DIVISORS = ("logits_scaling",)
"""Names, in text configs, of divisors of the logits."""
SOFTCAP = "final_logit_softcapping"
FUSED = "fused_lm_head"
"""The argument with which a model that TRL has given a fused head returns log-probabilities."""
ROUNDING = 0.1
"""Largest difference that rounding makes, as a share of the difference that the scale makes."""


def postprocessing(config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns what a text config says about logits: scale, then soft cap.

    Args:
        config: The text config.

    Returns:
        A function of the logits of any shape; `None` if the config changes nothing.
    """
    scale = next((value for name in MULTIPLIERS if (value := getattr(config, name, None)) is not None), None)
    if scale is None:
        divisor = next((value for name in DIVISORS if (value := getattr(config, name, None)) is not None), None)
        # HyperCLOVA X multiplies by the value that Granite divides by.
        multiplies = getattr(config, "model_type", None) == "hyperclovax"
        scale = None if divisor is None else divisor if multiplies else 1 / divisor
    cap = getattr(config, SOFTCAP, None)
    if scale in (None, 1.0) and cap is None:
        return None

    def process(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if scale is None else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return process


def left_out(
    model: nn.Module, temperature: float, compute_context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns the postprocessing of logits that scoring applies and the forward pass of `generate` leaves out.

    The model is run on a few tokens with both heads if it is composed and its text config changes logits. A model that
    cannot compute in the dtypes of its weights is run in the context in which training computes.

    Args:
        model: The policy model, wrapped or not.
        temperature: The temperature of the fused head.
        compute_context: Returns the context in which training computes, such as autocast.

    Returns:
        A function of the logits of any shape; `None` if both agree, or cannot be compared.
    """
    base: Any = unwrap(model)
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return None  # the text model itself has the head
    process = postprocessing(config.get_text_config())
    if process is None or not is_loaded(base):
        return None
    for context in (contextlib.nullcontext, compute_context):
        try:
            with undisturbed(model), context():
                found, chosen, logits = _both_heads(model)
            break
        except Exception as error:  # this model has no fused head, or cannot be run on text alone
            logger.info("the two heads cannot be compared: %s: %s", type(error).__name__, error)
    else:
        return None

    def distance(values: torch.Tensor) -> torch.Tensor:
        logps = (values.double() / temperature).log_softmax(-1).gather(-1, chosen).squeeze(-1)
        return (logps - found).abs().mean()

    unscaled, scaled = distance(logits), distance(process(logits))
    return process if bool(scaled < ROUNDING * unscaled) else None


def _both_heads(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns log-probabilities of the fused head, (1, T - 1), their tokens, (1, T - 1, 1), and logits, (1, T - 1, V).

    All are on one device, although a model that is divided among devices may return them on different ones.
    """
    ids = text_sequence(unwrap(model))  # (1, T)
    scored = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, **{FUSED: True})
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    found = scored.log_probs[:, : ids.shape[1] - 1].double().to(logits.device)
    return found, ids[:, 1:, None].to(logits.device), logits


@contextlib.contextmanager
def applied(model: nn.Module, process: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Changes the logits of the model's head while a block runs.

    Args:
        model: The model, wrapped or not.
        process: What `left_out` returned.
    """
    base: Any = unwrap(model)
    handle = base.get_output_embeddings().register_forward_hook(lambda module, args, output: process(output))
    try:
        yield
    finally:
        handle.remove()

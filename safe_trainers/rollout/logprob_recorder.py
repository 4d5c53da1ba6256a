"""Records the log-probabilities of sampled tokens while `generate` samples them, without a second forward pass.

`generate` accepts a function as its public argument `custom_generate`. The function used here calls the model's own
`_sample` with a list of logits processors that records the logits before any processor changes them. The recorded
distribution is that of `logits / temperature`, which TRL's trainers also score. They ignore top-k, top-p, min-p,
penalties and suppressed tokens, which would add differences that are not due to the dtype.

Recording changes neither the sampled tokens nor the state of any random generator.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessorList
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from ..core.turns import match_sequences


SAMPLER_KEY = "precision_sampler_logps"
"""Key of the sampler's log-probabilities in a rollout batch, (B, C) float32. TRL's key `sampling_per_token_logps`
would change the loss."""

ARGUMENT = "custom_generate"
"""Argument of `generate` for the function that records."""

RECORDED_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
"""The modes that `_sample` implements. Beam search and assisted generation do not sample each token from one
distribution."""

BUFFER_BYTES = 2**20
"""Logits of several steps are scored together up to this size, about a CPU cache; larger buffers are slower."""

_ACCEPTS: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()
"""Which functions `generate` take the argument; their signatures are read once."""


class Recorder(LogitsProcessorList):
    """The logits processors of one call of `generate`, which also records the logits passed to them.

    Args:
        processors: The processors.
        temperature: The trainer's temperature, by which logits are divided.
        prompt_length: Number of tokens before the first sampled token.
    """

    def __init__(self, processors: Sequence[Any], temperature: float, prompt_length: int) -> None:
        super().__init__(processors)
        self._temperature, self._prompt_length = temperature, prompt_length
        self._buffer: list[tuple[torch.Tensor, int | None]] = []  # logits, with their version if they have one
        self._buffered_bytes = 0
        self._scored: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Records the raw logits of one step and processes them.

        Args:
            input_ids: Prompt and tokens so far, (B, P + t).
            scores: Raw logits, (B, V) float32.
            **kwargs: Arguments of single processors.

        Returns:
            The processed logits, (B, V).
        """
        if self._buffer and self._buffered_bytes + scores.nbytes > BUFFER_BYTES:
            self._score(input_ids[:, -len(self._buffer) :])
        # Tensors made in inference mode have no version to detect in-place changes by.
        self._buffer.append((scores.clone(), None) if scores.is_inference() else (scores, scores._version))
        self._buffered_bytes += scores.nbytes
        processed: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        return processed

    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of all sampled tokens.

        Args:
            sequences: Prompts and sampled tokens, (B, P + T). They may be shorter than what was sampled, if `generate`
                removed steps after the end.

        Returns:
            Log-probabilities in nats, (B, T) float32; NaN for steps whose logits a processor changed in place.
        """
        tokens = sequences[:, self._prompt_length :]
        done = sum(part.shape[1] for part in self._scored)
        del self._buffer[max(tokens.shape[1] - done, 0) :]
        if self._buffer:
            self._score(tokens[:, done : done + len(self._buffer)])
        if not self._scored:
            return torch.full(tokens.shape, torch.nan, dtype=torch.float32, device=tokens.device)
        return torch.cat(self._scored, dim=1)[:, : tokens.shape[1]]

    def _score(self, tokens: torch.Tensor) -> None:
        """Converts the buffered logits into log-probabilities of the tokens (B, k) that were sampled from them."""
        raw = [scores for scores, _ in self._buffer]
        logits = raw[0].unsqueeze(1) if len(raw) == 1 else torch.stack(raw, dim=1)  # (B, k, V)
        if self._temperature != 1.0:
            logits = logits / self._temperature
        logps = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # (B, k)
        steps = enumerate(self._buffer)
        changed = [step for step, (scores, version) in steps if version is not None and scores._version != version]
        if changed:
            logps[:, changed] = torch.nan
        self._scored.append(logps)
        self._buffer, self._buffered_bytes = [], 0


def takes_recording(model: Any) -> bool:
    """Whether a model's own `generate` accepts the function that records.

    Args:
        model: The model, without wrappers of adapters and engines.
    """
    generate = getattr(model, "generate", None)
    return generate is not None and _accepts_recording(generate)


def _accepts_recording(generate: Callable[..., Any]) -> bool:
    """Whether a `generate` has the argument, or passes on arguments that it does not have."""
    function = getattr(generate, "__func__", generate)  # a method is another object each time
    accepts = _ACCEPTS.get(function) if isinstance(function, FunctionType) else None
    if accepts is None:
        parameters = inspect.signature(generate).parameters
        accepts = ARGUMENT in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if isinstance(function, FunctionType):
            _ACCEPTS[function] = accepts
    return accepts


@dataclass
class Turn:
    """One call of `generate` in a rollout.

    Attributes:
        temperature: The trainer's temperature, by which logits are divided.
        prompts: Token ids of each row's prompt without padding.
        lengths: Number of sampled tokens of each row, including the end of sequence.
        tokens: The sampled tokens, (b, T), padded after the end of each row.
        logps: Their log-probabilities in nats, (b, T) float32.
        images: A number for the images of each row, see `image_marks`; `None` if there are none or it is not known.
    """

    temperature: float
    prompts: Sequence[Sequence[int]] = ()
    lengths: Sequence[int] = ()
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    logps: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    images: Sequence[float] | None = None

    def recording(self, more: Sequence[Any] = ()) -> Callable[..., Any]:
        """Returns a function for the argument `custom_generate` of `generate`, which fills this turn.

        Args:
            more: Logits processors that come after those of the call.

        Returns:
            A plain function, because PEFT copies the arguments of `generate` for some adapters, and a copied object
            would fill a copy of this turn.
        """

        def generate(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            recorder = Recorder([*logits_processor, *more], self.temperature, input_ids.shape[1])
            output = type(model)._sample(
                model,
                input_ids,
                logits_processor=recorder,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                # `generate` computes this too, but does not pass it to a custom function.
                synced_gpus=(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)) and _world_size() > 1,
                **model_kwargs,
            )
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            self.tokens, self.logps = sequences[:, input_ids.shape[1] :], recorder.finish(sequences)
            self.prompts = unpadded(input_ids, model_kwargs.get("attention_mask"))
            self.lengths = _lengths(self.tokens, generation_config.eos_token_id)
            return output

        return generate


def recording_into(
    turns: list[Turn], temperature: float, processors: Callable[[int], Sequence[Any]] | None = None
) -> Callable[..., Any]:
    """Returns a function for the argument `custom_generate` of `generate`, which adds a turn for each call.

    Args:
        turns: The turns so far.
        temperature: The trainer's temperature, by which logits are divided.
        processors: Makes further logits processors of a call by its number, from 0.
    """

    def generate(*args: Any, **kwargs: Any) -> Any:
        turn = Turn(temperature)
        output = turn.recording(() if processors is None else processors(len(turns)))(*args, **kwargs)
        turns.append(turn)
        return output

    return generate


def unpadded(ids: torch.Tensor, mask: Any) -> list[list[int]]:
    """Returns rows of token ids without padding.

    Args:
        ids: Token ids, (B, T).
        mask: The attention mask, (B, T); without one, no token is padding.
    """
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return ids.tolist()
    return [row[kept].tolist() for row, kept in zip(ids.cpu(), mask.cpu() != 0, strict=True)]


def _lengths(tokens: torch.Tensor, ends: Any) -> list[int]:
    """Returns the number of tokens of each row, (b, T), up to the first one that ends a sequence."""
    if ends is None or not tokens.numel():
        return [tokens.shape[1]] * len(tokens)
    found = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device))
    return torch.where(found.any(1), found.int().argmax(1) + 1, tokens.shape[1]).tolist()


def _world_size() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def align(
    turns: Sequence[Turn],
    ids: torch.Tensor,
    prompt_ids: torch.Tensor | None,
    prompt_mask: torch.Tensor | None = None,
    images: Callable[[int], Sequence[float] | None] = lambda rows: None,
) -> torch.Tensor | None:
    """Arranges the recorded log-probabilities in the shape of the rollout batch.

    Each sequence gets those of the recorded rows that it begins with: the same prompt, or the same prompt and
    completion so far in later turns after tool calls, the same sampled tokens, and the nearest images. A token that
    follows another prefix was sampled from another distribution.

    Args:
        turns: The turns of one rollout, in order.
        ids: The batch's completions, (B, C), right-padded, including the results of tools.
        prompt_ids: Its prompts, (B, P), left-padded; `None` if the batch does not have them.
        prompt_mask: Their attention mask, (B, P).
        images: Returns a number for the images of each of B prompts, as in `Turn`.

    Returns:
        Log-probabilities in nats, (B, C) float32, NaN for tokens that were not recorded; `None` if no turn was
        recorded, or if no row of the turns belongs to this batch.
    """
    if not turns or prompt_ids is None:
        return None
    prompts, completions = unpadded(prompt_ids, prompt_mask), ids.tolist()
    marks = images(len(prompts)) if any(turn.images for turn in turns) else None
    logps = torch.full(ids.shape, torch.nan, device=ids.device)
    found = False
    for turn in turns:
        sampled = [row[:length] for row, length in zip(turn.tokens.tolist(), turn.lengths, strict=True)]
        distance = partial(_distance, turn.images, marks)
        for match in match_sequences(prompts, completions, turn.prompts, sampled, distance):
            end = match.start + match.kept
            logps[match.index, match.start : end] = turn.logps[match.row, : match.kept]
            found = True
    return logps if found else None


def _distance(sampled: Sequence[float] | None, scored: Sequence[float] | None, row: int, index: int) -> float:
    """How far the images of a row of a turn are from those of a sequence; 0 if they are not known."""
    return 0.0 if sampled is None or scored is None else abs(sampled[row] - scored[index])

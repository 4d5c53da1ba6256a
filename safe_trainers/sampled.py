"""Log-probabilities of sampled tokens, taken while `generate` samples them: no second forward pass.

`generate` takes a function in its public argument `custom_generate`. The one given here calls the model's own
`_sample` with the same processors in a list that looks at the logits on their way in, before any processor: what is
recorded is the distribution of `logits / temperature`. That is what TRL's trainers score, who know nothing of top-k,
top-p, min-p, penalties and suppressed tokens; what is left after these differs whatever is computed in which dtype.

Sampled tokens, and the state of every random generator, are those of a run without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from transformers import LogitsProcessorList, Trainer
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module


SAMPLER_KEY = "precision_sampler_logps"
"""Where the sampler's log-probabilities are in a rollout batch, (B, C) float32. Not TRL's own
`sampling_per_token_logps`, which changes its loss."""

RECORDED_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
"""What `_sample` does; in beam search and assisted generation no one distribution was sampled."""

HELD_BYTES = 2**20
"""Logits wait up to this size, so that small steps are scored together; more than a cache holds would be slower."""


class Recorder(LogitsProcessorList):
    """The processors of one `generate`, and what they are given.

    Args:
        processors: The processors.
        temperature: What the logits are divided by.
        prompt_length: Number of tokens before the first sampled one.
    """

    def __init__(self, processors: Sequence[Any], temperature: float, prompt_length: int) -> None:
        super().__init__(processors)
        self._temperature, self._prompt_length = temperature, prompt_length
        self._waiting: list[tuple[torch.Tensor, int | None]] = []
        self._held = 0
        self._scored: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Notes the logits of one step and processes them.

        Args:
            input_ids: Prompt and tokens so far, (B, P + t).
            scores: Raw logits, (B, V) float32.
            **kwargs: What single processors ask for.

        Returns:
            The processed logits, (B, V).
        """
        if self._waiting and self._held + scores.nbytes > HELD_BYTES:
            self._score(input_ids[:, -len(self._waiting) :])
        # In inference mode tensors have no version that would tell of a change.
        self._waiting.append((scores.clone(), None) if scores.is_inference() else (scores, scores._version))
        self._held += scores.nbytes
        processed: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        return processed

    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of everything that was sampled.

        Args:
            sequences: Prompts and sampled tokens, (B, P + T); may be shorter than what was sampled, where steps
                after the end were taken back.

        Returns:
            Log-probabilities in nats, (B, T) float32; NaN where a processor changed the logits in place.
        """
        tokens = sequences[:, self._prompt_length :]
        done = sum(part.shape[1] for part in self._scored)
        del self._waiting[max(tokens.shape[1] - done, 0) :]
        if self._waiting:
            self._score(tokens[:, done : done + len(self._waiting)])
        if not self._scored:
            return torch.full(tokens.shape, torch.nan, dtype=torch.float32, device=tokens.device)
        return torch.cat(self._scored, dim=1)[:, : tokens.shape[1]]

    def _score(self, tokens: torch.Tensor) -> None:
        """Turns the waiting logits into log-probabilities of the tokens (B, k) that were sampled from them."""
        raw = [scores for scores, _ in self._waiting]
        logits = raw[0].unsqueeze(1) if len(raw) == 1 else torch.stack(raw, dim=1)  # (B, k, V)
        if self._temperature != 1.0:
            logits = logits / self._temperature
        logps = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # (B, k)
        held = enumerate(self._waiting)
        changed = [step for step, (scores, version) in held if version is not None and scores._version != version]
        if changed:
            logps[:, changed] = torch.nan
        self._scored.append(logps)
        self._waiting, self._held = [], 0


@dataclass
class Turn:
    """One call of `generate` in a rollout.

    Attributes:
        temperature: What the trainer divides the logits by.
        prompts: Token ids of each row's prompt, not padded, where they are known.
        lengths: Number of tokens of each row's completion, the end of sequence included.
        recorded: Whether `generate` has recorded.
        tokens: What was sampled, (b, T); whatever follows the end of a row is padding.
        logps: Its log-probabilities, (b, T) float32.
    """

    temperature: float
    prompts: Sequence[Sequence[int]] = ()
    lengths: Sequence[int] = ()
    recorded: bool = False
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    logps: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def recording(self) -> Callable[..., Any]:
        """A function for the argument `custom_generate` of `generate`, which fills this turn.

        Returns:
            A plain function: PEFT copies the arguments of `generate` for some adapters, and a copied object would
            record for itself.
        """

        def generate(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            recorder = Recorder(logits_processor, self.temperature, input_ids.shape[1])
            output = type(model)._sample(
                model,
                input_ids,
                logits_processor=recorder,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                # `generate` decides this and hands it to its own methods alone.
                synced_gpus=(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)) and _world_size() > 1,
                **model_kwargs,
            )
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            self.tokens, self.logps = sequences[:, input_ids.shape[1] :], recorder.finish(sequences)
            self.recorded = True
            return output

        return generate


def _world_size() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def align(turns: Sequence[Turn], completion_ids: torch.Tensor) -> torch.Tensor | None:
    """Brings what was recorded into the shape of the rollout batch.

    The first turn has a row for each row of the batch. Later ones, after tool calls, continue some of them, in order:
    a row continues the first sequence, not continued by a row before it, that begins with its prompt.

    Args:
        turns: The turns of one rollout, in order.
        completion_ids: The batch's completions, (B, C), right-padded; results of tools may be part of them.

    Returns:
        Log-probabilities, (B, C) float32, NaN where none was recorded for exactly this token; `None` where no turn
        was recorded, or the turns are not those of this batch.
    """
    if not turns or not all(turn.recorded for turn in turns) or len(turns[0].lengths) != len(completion_ids):
        return None
    logps = torch.full(completion_ids.shape, torch.nan, device=completion_ids.device)
    first, common = turns[0], min(completion_ids.shape[1], turns[0].tokens.shape[1])
    same = first.tokens[:, :common] == completion_ids[:, :common]
    if len(turns) > 1:  # what tools returned may look like the padding after a row
        lengths = torch.tensor(first.lengths, device=logps.device)
        same &= torch.arange(common, device=logps.device) < lengths.unsqueeze(1)
    logps[:, :common] = first.logps[:, :common].where(same, torch.nan)
    if len(turns) > 1:
        _add_later_turns(logps, turns, completion_ids)
    return logps


def _add_later_turns(logps: torch.Tensor, turns: Sequence[Turn], completion_ids: torch.Tensor) -> None:
    completions = completion_ids.tolist()
    prompts = [list(prompt) for prompt in turns[0].prompts]
    whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    for turn in turns[1:]:
        sampled, last = turn.tokens.tolist(), -1
        for row, (prompt, length) in enumerate(zip(turn.prompts, turn.lengths, strict=True)):
            begins = list(prompt)
            matching = (i for i in range(last + 1, len(whole)) if whole[i][: len(begins)] == begins)
            index = next(matching, None)
            if index is None:
                continue
            last, start = index, len(begins) - len(prompts[index])
            # The limit of the completion may have cut the row off.
            pairs = zip(sampled[row][:length], completions[index][start:], strict=False)
            kept = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            logps[index, start : start + kept] = turn.logps[row, :kept]


class SampledRollouts(Trainer):
    """Below TRL: asks `generate` to record while a turn is being recorded; the base of `PrecisionBase`.

    Overrides `_prepare_inputs`, which TRL calls with what it hands to `generate`.
    """

    _turn: Turn | None = None

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Prepares a batch, and adds the recording to the one that a recorded turn generates from.

        Args:
            inputs: Model inputs by name.

        Returns:
            The prepared mapping; `inputs` is not changed.
        """
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        if self._turn is None or "input_ids" not in prepared:
            return prepared
        return {**prepared, "custom_generate": self._turn.recording()}

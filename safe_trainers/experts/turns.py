"""Arranges the records of a rollout's turns in the shape of its batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.turns import match_rows, shared_prefix
from ..model.routers import unknown


@dataclass
class RoutedTurn:
    """One turn of generation.

    Attributes:
        prompts: Token ids of each row's prompt, without padding.
        completions: Token ids that were sampled for each row.
        record: The record of each row from the first token that the model got, (b, S, K), left-padded like the
            prompts; `None` if nothing was recorded. Another rank's longer completions, and rows that have ended, add
            tokens at its end.
        width: Number of prompt tokens in the record, padding included.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]] = field(default_factory=list)
    record: torch.Tensor | None = None
    width: int = 0

    @property
    def fits(self) -> bool:
        """Whether the record has all tokens that the model got of this turn."""
        if self.record is None or not self.completions:
            return False
        sampled = max(map(len, self.completions)) - 1  # the last token is not passed to the model
        return self.width >= max(map(len, self.prompts), default=0) and self.record.shape[1] >= self.width + sampled


def arrange(turns: Sequence[RoutedTurn], input_ids: torch.Tensor, length: int) -> torch.Tensor | None:
    """Arranges records in the shape of a rollout batch.

    A token has the record of the turn in which the model first computed it: a prompt that of the first turn, the
    result of a tool that of the turn after it.

    Args:
        turns: The turns of one rollout, in order.
        input_ids: Prompts, left-padded, and completions, right-padded, (B, P + C).
        length: Number of tokens of the completions, C.

    Returns:
        The record, (B, P + C, K); tokens without a record have `unknown`. `None` if the turns do not belong to this
        batch.
    """
    if not turns or not all(turn.fits for turn in turns) or len(turns[0].completions) != len(input_ids):
        return None
    first = turns[0].record
    if first is None:
        return None
    record = torch.full((*input_ids.shape, first.shape[2]), unknown(first.dtype), dtype=first.dtype)
    record = record.to(first.device)
    starts = [input_ids.shape[1] - length - len(prompt) for prompt in turns[0].prompts]
    if min(starts) < 0:
        return None
    ids = input_ids.tolist()
    completions = [row[input_ids.shape[1] - length :] for row in ids]
    prompts = turns[0].prompts
    for row, (prompt, sampled) in enumerate(zip(prompts, turns[0].completions, strict=True)):
        if ids[row][starts[row] : starts[row] + len(prompt)] != list(prompt):
            return None
        kept = shared_prefix(sampled, completions[row])
        _copy(record[row], starts[row], turns[0], row, len(prompt) + kept)
    for turn in turns[1:]:
        for match in match_rows(prompts, completions, turn.prompts, turn.completions):
            computed = len(turn.prompts[match.row]) + match.kept
            _copy(record[match.index], starts[match.index], turn, match.row, computed)
    return record


def _copy(record: torch.Tensor, start: int, turn: RoutedTurn, row: int, computed: int) -> None:
    """Copies the record of a turn's row to the tokens that have none yet.

    Args:
        record: The record of one sequence of the batch, (T, K).
        start: Where its prompt begins.
        turn: The turn.
        row: Its row.
        computed: Number of tokens, from the first one of the prompt, that belong to the sequence.
    """
    if turn.record is None:
        return
    begin = turn.width - len(turn.prompts[row])
    source = turn.record[row, begin : begin + computed]
    target = record[start : start + len(source)]
    missing = target[:, :1] == unknown(record.dtype)
    target.copy_(torch.where(missing, source, target))

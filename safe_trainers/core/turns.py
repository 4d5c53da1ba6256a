"""Matches the turns of a rollout, which continue some of its sequences after tool calls, to the sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """A row of a turn, and the sequence that it belongs to.

    Attributes:
        row: The row of the turn.
        index: The sequence.
        start: Where the row's tokens begin in the completion.
        kept: How many of them the completion has.
    """

    row: int
    index: int
    start: int
    kept: int


def match_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    turn_prompts: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int]],
) -> Iterator[Match]:
    """Matches each row of a later turn to the first sequence that begins with its prompt, after the last match.

    Args:
        prompts: Token ids of each sequence's prompt.
        completions: Token ids of each completion, including results of tools; padding after the end does not matter.
        turn_prompts: Token ids of the prompt of each row of the turn.
        sampled: Token ids that the turn sampled for each row.

    Yields:
        The matches; no match for rows that continue no sequence.
    """
    sequences = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    last = -1
    for row, (prompt, tokens) in enumerate(zip(turn_prompts, sampled, strict=True)):
        prefix = list(prompt)
        matching = (i for i in range(last + 1, len(sequences)) if sequences[i][: len(prefix)] == prefix)
        index = next(matching, None)
        if index is None:
            continue
        last, start = index, len(prefix) - len(prompts[index])
        # TRL may have truncated the row to the maximum completion length.
        yield Match(row, index, start, shared_prefix(tokens, completions[index][start:]))


def match_sequences(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    turn_prompts: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int]],
    distance: Callable[[int, int], float] = lambda row, index: 0.0,
) -> Iterator[Match]:
    """Matches each sequence to the rows of a turn that it contains: their prompt, and the most of their tokens.

    Of rows with the same tokens the nearest is taken; of those that are as near, the first one that no other sequence
    has. A sequence may have been moved, repeated or left out.

    Args:
        prompts: Token ids of each sequence's prompt.
        completions: Token ids of each completion, including results of tools; padding after the end does not matter.
        turn_prompts: Token ids of the prompt of each row of the turn.
        sampled: Token ids that the turn sampled for each row.
        distance: How far a row of the turn is from a sequence in what the token ids do not show, such as its images.

    Yields:
        The matches with at least one token.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    ends: dict[int, set[int]] = {}  # the last tokens of the turn's prompts, by their length
    for row, prompt in enumerate(turn_prompts):
        rows.setdefault(tuple(prompt), []).append(row)
        ends.setdefault(len(prompt), set()).update(prompt[-1:])
    used: set[int] = set()
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        sequence = (*prompt, *completion)
        for length, last_tokens in ends.items():
            start = length - len(prompt)
            if start < 0 or (length and (length > len(sequence) or sequence[length - 1] not in last_tokens)):
                continue
            alike, rest = rows.get(sequence[:length], ()), completion[start:]
            best = max(
                ((shared_prefix(sampled[row], rest), -distance(row, index), row not in used, -row) for row in alike),
                default=(0, 0.0, False, 0),
            )
            if best[0]:
                used.add(-best[-1])
                yield Match(-best[-1], index, start, best[0])


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns how many first tokens two sequences share.

    Args:
        left: Token ids.
        right: Token ids, of any length.
    """
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next((i for i, (own, other) in enumerate(zip(left, right, strict=False)) if own != other), shorter)

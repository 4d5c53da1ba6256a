"""Matches the turns of a rollout, which continue some of its sequences after tool calls, to the sequences."""

from collections.abc import Iterator, Sequence
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
) -> Iterator[Match]:
    """Matches each sequence to the rows of a turn that it contains: their prompt, and the most of their tokens.

    Rows that are alike are taken in their order, and again only if no other one is left. A sequence may have been
    moved, repeated or left out.

    Args:
        prompts: Token ids of each sequence's prompt.
        completions: Token ids of each completion, including results of tools; padding after the end does not matter.
        turn_prompts: Token ids of the prompt of each row of the turn.
        sampled: Token ids that the turn sampled for each row.

    Yields:
        The matches with at least one token.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(turn_prompts):
        rows.setdefault(tuple(prompt), []).append(row)
    used: set[int] = set()
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        sequence = (*prompt, *completion)
        for begin, alike in rows.items():
            start = len(begin) - len(prompt)
            if start < 0 or sequence[: len(begin)] != begin:
                continue
            rest = completion[start:]
            kept, _, last = max((shared_prefix(sampled[row], rest), row not in used, -row) for row in alike)
            if kept:
                used.add(-last)
                yield Match(-last, index, start, kept)


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

"""Records of turns are arranged like the batch, whatever is padded, and whichever rows a later turn continues."""

import pytest
import torch

from safe_trainers.core.turns import Match, match_rows
from safe_trainers.experts.turns import RoutedTurn, arrange
from safe_trainers.model.routers import unknown


NONE = unknown(torch.uint8)


def turn(prompts, completions, first=0, multiple=1, more=0):
    """A turn whose record has a number of its own for each token: 50 for each row, and 1 for each place.

    Another rank's longer completions add `more` tokens.
    """
    longest = -(-max(map(len, prompts)) // multiple) * multiple
    width = longest + max(map(len, completions)) - 1 + more
    record = torch.arange(width).repeat(len(prompts), 1) - longest
    record = record + torch.tensor([len(prompt) + 50 * row + first for row, prompt in enumerate(prompts)]).unsqueeze(1)
    return RoutedTurn(prompts, completions, record.clamp(min=0).to(torch.uint8).unsqueeze(-1), longest)


def batch(prompts, completions, multiple=1):
    before = -(-max(map(len, prompts)) // multiple) * multiple
    after = max(map(len, completions))
    rows = [
        [0] * (before - len(p)) + p + c + [0] * (after - len(c)) for p, c in zip(prompts, completions, strict=True)
    ]
    return torch.tensor(rows), after


def places(record, row):
    return record[row, :, 0].tolist()


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_prompts_and_completions_of_several_lengths(multiple, more):
    prompts, completions = [[1, 2, 3], [4]], [[5, 6], [7, 8, 9]]
    ids, length = batch(prompts, completions, multiple)
    record = arrange([turn(prompts, completions, multiple=multiple, more=more)], ids, length)
    pad = [NONE] * (ids.shape[1] - length - 3)
    assert places(record, 0) == [*pad, 0, 1, 2, 3, 4, NONE]  # its last token was passed on, because row 1 went on
    assert places(record, 1) == [*pad, NONE, NONE, 50, 51, 52, 53 if more else NONE]


def test_what_a_later_turn_computed_first_has_its_record():
    prompts, first = [[1, 2], [3, 4], [5]], [[6, 7], [8], [9]]
    tool = [10, 11]
    later = turn([[3, 4, 8, *tool]], [[12, 13]], first=100)
    completions = [first[0], [*first[1], *tool, 12, 13], first[2]]
    ids, length = batch(prompts, completions)
    record = arrange([turn(prompts, first), later], ids, length)
    assert places(record, 1) == [50, 51, 52, 103, 104, 105, NONE]
    assert places(record, 0) == [0, 1, 2, NONE, NONE, NONE, NONE]
    assert places(record, 2) == [NONE, 100, 101, NONE, NONE, NONE, NONE]


def test_a_completion_that_was_cut_or_changed_keeps_the_record_of_what_is_left():
    prompts, sampled = [[1], [2]], [[3, 4, 5], [6, 7, 8]]
    ids, length = batch(prompts, [[3, 4], [6, 9]])
    record = arrange([turn(prompts, sampled)], ids, length)
    assert places(record, 0) == [0, 1, 2]
    assert places(record, 1) == [50, 51, NONE]


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [RoutedTurn([[1], [2]], [[3], [4]])],
        [turn([[1]], [[3]])],
        [turn([[9], [2]], [[3], [4]])],
        [RoutedTurn([[1], [2]], [[3, 3, 3, 3], [4]], torch.zeros(2, 2, 1, dtype=torch.uint8), 1)],
        [RoutedTurn([[1], [2]], [[3], [4]], torch.zeros(2, 2, 1, dtype=torch.uint8))],
    ],
    ids=["none", "not recorded", "other rows", "other prompts", "too short", "no prompt"],
)
def test_turns_of_another_batch_have_no_record(turns):
    assert arrange(turns, *batch([[1], [2]], [[3], [4]])) is None


def test_rows_are_matched_in_order_and_once():
    prompts, completions = [[1], [1], [2]], [[3, 7, 8], [3, 7, 9], [4]]
    found = list(match_rows(prompts, completions, [[1, 3, 7], [1, 3, 7], [9]], [[8], [5], [1]]))
    assert found == [Match(0, 0, 2, 1), Match(1, 1, 2, 0)]
